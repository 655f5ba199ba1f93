"""Checkpoints in the shapes of known models: whole, in several files, and read as what they are."""

from pathlib import Path

import pytest
import torch

from services.engine.checkpoint import layout_of, read_checkpoint
from services.engine.torch_engine.model import load_model
from services.errors import CheckpointError
from tests.bench.known_models import KNOWN_SHAPES, make_known_checkpoint

SMALL = {"vocab_size": 300, "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96}


@pytest.mark.parametrize("name", KNOWN_SHAPES)
def test_a_known_shape_is_written_in_several_files_and_loads(name: str, tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    folder = make_known_checkpoint(
        name, tmp_path / name, on_progress=lambda *done: told.append(done), shard_bytes=600_000, **SMALL
    )
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) == len(told) > 2
    assert all(file.stat().st_size < 700_000 for file in files)
    assert [done for done, _ in told] == sorted({done for done, _ in told})
    assert told[-1][0] == told[-1][1]
    checkpoint = read_checkpoint(str(folder))
    assert (checkpoint.dtype, checkpoint.num_kv_heads, checkpoint.head_dim) == ("bfloat16", 8, 128)
    assert layout_of(checkpoint, dtype="bfloat16").groups[0].window == 0
    model = load_model(checkpoint, "bfloat16")
    assert isinstance(model.config.tie_word_embeddings, bool)
    assert model.config.tie_word_embeddings == KNOWN_SHAPES[name][1]["tie_word_embeddings"]
    assert model.dtype == torch.bfloat16
    assert float(model.model.norm.weight.float().mean()) == 1.0
    assert 0.015 < float(model.model.embed_tokens.weight.float().std()) < 0.025


def test_what_is_there_is_kept_and_what_is_not_whole_is_made(tmp_path: Path) -> None:
    folder = make_known_checkpoint("qwen3-0.6b", tmp_path, **SMALL)
    before = (folder / "config.json").stat().st_mtime_ns
    make_known_checkpoint("qwen3-0.6b", tmp_path, **SMALL)
    assert (folder / "config.json").stat().st_mtime_ns == before
    (folder / "model.safetensors.index.json").unlink()
    make_known_checkpoint("qwen3-0.6b", tmp_path, **SMALL)
    assert read_checkpoint(str(folder)).dtype == "bfloat16"


def test_another_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"qwen3-0.6b, qwen3-8b"):
        make_known_checkpoint("gpt-5", tmp_path)
