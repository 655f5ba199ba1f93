"""Every bad checkpoint is refused with one line that says what to do."""

import json
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dataplane.blocks.layout import uniform_shape
from services.engine import limits
from services.engine.checkpoint import layout_of, read_checkpoint
from services.engine.torch_engine.attention import StepAttention
from services.engine.torch_engine.model import load_engine
from services.errors import CheckpointError
from tests.engine.rig import BLOCK_SIZE, load_tiny

Tiny = Callable[..., Path]


def edit_config(folder: Path, **fields: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    config.update(fields)
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value != "drop"}))


def shard(folder: Path, *, drop_file: bool = False, name: str = "model-1.safetensors") -> None:
    """Turn the single weight file into an index with one shard, of which the index says that it is called `name`."""
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    with (folder / "model-1.safetensors").open("rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    weight_map = dict.fromkeys((tensor for tensor in header if tensor != "__metadata__"), name)
    if drop_file:
        weight_map["model.layers.99.absent"] = "model-2.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def truncate(path: Path, num_bytes: int) -> None:
    with path.open("r+b") as file:
        file.truncate(num_bytes)


WEIGHTS = "model.safetensors"
BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda f: (f / "config.json").unlink(), "has no config.json"),
    "config is no JSON": (lambda f: (f / "config.json").write_text("{"), "not valid JSON"),
    "config is a list": (lambda f: (f / "config.json").write_text("[]"), "no JSON object"),
    "config is binary": (lambda f: (f / "config.json").write_bytes(b"\xff\xfe\x00"), "not valid JSON"),
    "no architecture": (lambda f: edit_config(f, architectures="drop"), "names no architecture"),
    "not causal": (lambda f: edit_config(f, architectures=["BertForMaskedLM"]), "no causal language model"),
    "encoder-decoder": (lambda f: edit_config(f, is_encoder_decoder=True), "encoder-decoder"),
    "multi-modal": (lambda f: edit_config(f, text_config={}), "multi-modal"),
    "remote code": (lambda f: edit_config(f, auto_map={"AutoModel": "x"}), "code of its own"),
    "quantized": (lambda f: edit_config(f, quantization_config={"bits": 4}), "quantized"),
    "soft cap": (lambda f: edit_config(f, attn_logit_softcapping=50.0), "caps its attention"),
    "compressed KV": (lambda f: edit_config(f, kv_lora_rank=16), "compresses or shares KV"),
    "linear attention": (lambda f: edit_config(f, layer_types=["linear_attention"] * 2), "linear_attention layers"),
    "bidirectional": (lambda f: edit_config(f, use_bidirectional_attention=True), "both directions"),
    "dynamic rope": (lambda f: edit_config(f, rope_scaling={"rope_type": "dynamic"}), "dynamic rope"),
    "rope per layer type": (
        lambda f: edit_config(f, rope_parameters={"full_attention": {"rope_type": "longrope"}}),
        "longrope rope",
    ),
    "two bases of a rope": (lambda f: edit_config(f, rope_theta=5.0), "rope's rope_theta is 5.0 and"),
    "two types of a rope": (
        lambda f: edit_config(f, rope_parameters={"rope_type": "default", "type": "linear"}),
        "rope's type is 'default' and 'linear'",
    ),
    "two ropes": (
        lambda f: edit_config(f, rope_scaling={"type": "linear", "factor": 2.0}),
        "rope's factor is None and 2.0",
    ),
    "no layers": (lambda f: edit_config(f, num_hidden_layers=0), "num_hidden_layers"),
    "words for numbers": (lambda f: edit_config(f, hidden_size="big"), "hidden_size"),
    "no weights": (lambda f: (f / WEIGHTS).unlink(), "neither model.safetensors nor"),
    "pickled weights": (lambda f: (f / WEIGHTS).rename(f / "pytorch_model.bin"), "convert its pickled weights"),
    "empty weights": (lambda f: truncate(f / WEIGHTS, 0), "truncated"),
    "truncated header": (lambda f: truncate(f / WEIGHTS, 100), "truncated"),
    "truncated weights": (lambda f: truncate(f / WEIGHTS, 5000), "header promises"),
    "broken header": (
        lambda f: (f / WEIGHTS).write_bytes(struct.pack("<Q", 4) + b'{"a"'),
        "broken safetensors header",
    ),
    "header without tensors": (lambda f: (f / WEIGHTS).write_bytes(struct.pack("<Q", 2) + b"{}"), "holds no weights"),
    "missing shard": (lambda f: shard(f, drop_file=True), "lacks 1 weight file(s), first model-2"),
    "broken index": (
        lambda f: ((f / WEIGHTS).unlink(), (f / "model.safetensors.index.json").write_text("{}")),
        "no valid index",
    ),
    "shards elsewhere": (lambda f: shard(f, name="../model-1.safetensors"), "not in its folder"),
    "an adapter": (lambda f: (f / "adapter_config.json").write_text("{}"), "holds an adapter"),
    "pickled weights by name": (lambda f: edit_config(f, transformers_weights="x.bin"), "no safetensors file"),
    "weights by a wrong name": (lambda f: edit_config(f, transformers_weights="x.safetensors"), "has no x.safetensors"),
    "weights by an outer name": (
        lambda f: (
            shutil.copy(f / WEIGHTS, f.parent / "x.safetensors"),
            edit_config(f, transformers_weights="../x.safetensors"),
        ),
        "has no ../x.safetensors",
    ),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), "no tokenizer.json"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_folder_is_refused_in_one_line(tiny: Tiny, tmp_path: Path, name: str) -> None:
    breaks, expected = BROKEN[name]
    folder = Path(shutil.copytree(tiny(), tmp_path / "model"))
    breaks(folder)
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(str(folder))
    message = str(caught.value)
    assert expected in message
    assert "\n" not in message
    assert ":" in message or ";" in message, "it says what to do"


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("/nowhere/at/all", "there is no folder '/nowhere/at/all'"),
        ("no-such-model", "there is no folder 'no-such-model'"),
        ("", "there is no folder ''"),
        ("a/b/c", "there is no folder"),
        ("\0", "there is no folder"),
        ("x" * 5000, "there is no folder"),
        ("~no-such-user/model", "there is no folder"),
        (__file__, "is a file"),
    ],
)
def test_no_folder(model: str, expected: str) -> None:
    with pytest.raises(CheckpointError, match=expected):
        read_checkpoint(model)


def test_an_unreachable_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def fail(*_: object, **__: object) -> str:
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(CheckpointError, match=r"hub could not be reached \(ConnectionError\)") as caught:
        read_checkpoint("nobody/nothing")
    assert "\n" not in str(caught.value)


def test_a_checkpoint_is_read(tiny: Tiny) -> None:
    folder = tiny("llama", eos_token_id=[3, 4])
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 9}))
    checkpoint = read_checkpoint(f"{folder}/")
    assert checkpoint.path == str(folder)
    assert checkpoint.name == folder.name
    assert (checkpoint.model_type, checkpoint.architecture) == ("llama", "LlamaForCausalLM")
    assert (checkpoint.num_layers, checkpoint.num_kv_heads, checkpoint.head_dim) == (2, 2, 16)
    assert (checkpoint.vocab_size, checkpoint.context_length, checkpoint.dtype) == (512, 2048, "float32")
    assert checkpoint.eos_token_ids == {9}, "as transformers generates"
    layout = layout_of(checkpoint, block_size=4)
    assert (layout.weights, layout.block_size, layout.dtype) == (checkpoint.weights, 4, "float32")
    with pytest.raises(CheckpointError, match="float8"):
        layout_of(checkpoint, dtype="float8")


def test_kv_of_another_format_is_other_kv_in_whole_blocks(tiny: Tiny) -> None:
    checkpoint = read_checkpoint(str(tiny()))
    layouts = [layout_of(checkpoint, kv_format=kv_format) for kv_format in ("", "int8", "a", "b")]
    assert [layout.whole_blocks for layout in layouts] == [False, True, True, True]
    layouts.append(layout_of(checkpoint, wire_dtype="int8"))
    assert len({layout.fingerprint for layout in layouts}) == len(layouts)
    windowed = msgspec.structs.replace(checkpoint, windows=(0, 16))
    layout = layout_of(windowed, kv_format="a")
    assert layout.is_windowed and layout.whole_blocks


def test_sharded_weights_load(tiny: Tiny, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny(), tmp_path / "model"))
    shard(folder)
    assert read_checkpoint(str(folder)).weights != read_checkpoint(str(tiny())).weights, "names are part of identity"
    assert load_tiny(folder).layout.num_layers == 2


def test_the_identity_follows_weights_and_configuration(tiny: Tiny, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny(), tmp_path / "a"))
    original = read_checkpoint(str(tiny())).weights
    assert read_checkpoint(str(folder)).weights == original, "the folder's name is not part of it"
    with (folder / WEIGHTS).open("r+b") as file:
        file.seek(-3, 2)
        file.write(b"\x01")
    assert read_checkpoint(str(folder)).weights != original
    shutil.copy(tiny() / WEIGHTS, folder)
    assert read_checkpoint(str(folder)).weights == original
    edit_config(folder, rms_norm_eps=0.5)
    assert read_checkpoint(str(folder)).weights != original


def test_large_files_are_sampled(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "FULL_DIGEST_BYTES", 1000)
    monkeypatch.setattr(limits, "SAMPLE_BYTES", 512)
    monkeypatch.setattr(limits, "NUM_SAMPLES", 16)
    folder = Path(shutil.copytree(tiny(), tmp_path / "a"))
    sampled = read_checkpoint(str(folder)).weights
    size = (folder / WEIGHTS).stat().st_size
    changed: list[bool] = []
    for at in (size - 1, size // 2 + 7777):
        original = (folder / WEIGHTS).read_bytes()
        with (folder / WEIGHTS).open("r+b") as file:
            file.seek(at)
            file.write(bytes([original[at] ^ 1]))
        changed.append(read_checkpoint(str(folder)).weights != sampled)
        (folder / WEIGHTS).write_bytes(original)
    assert changed == [True, False], "the ends are always looked at; between samples a change goes unseen"


def test_reading_needs_no_torch() -> None:
    script = (
        "import sys, services.engine.checkpoint, services.engine.batch, services.engine.fake, services.engine.thread;"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'huggingface_hub')))"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def load(folder: Path) -> None:
    checkpoint = read_checkpoint(str(folder))
    layout = layout_of(checkpoint, block_size=BLOCK_SIZE)
    buffer = memoryview(bytearray(4 * layout.block_bytes))
    load_engine(checkpoint, arena_buffer=buffer, shape=uniform_shape(layout, 4))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"model_type": "never_heard_of"}, "does not know the architecture"),
        ({"num_hidden_layers": 3}, "lacks or misshapes weight model.layers.2"),
        ({"intermediate_size": 96}, "cannot load|misshapes"),
        ({"head_dim": 8}, "cannot load|misshapes|where its configuration means"),
    ],
)
def test_what_only_loading_shows(tiny: Tiny, tmp_path: Path, fields: dict[str, Any], expected: str) -> None:
    folder = Path(shutil.copytree(tiny(), tmp_path / "model"))
    edit_config(folder, **fields)
    if "num_hidden_layers" in fields:
        edit_config(folder, layer_types=["full_attention"] * 3)
    with pytest.raises(CheckpointError, match=expected) as caught:
        load(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("architecture", "fields", "expected"),
    [
        ("gemma2", {}, "softcap"),  # on by default there, whatever config.json says
    ],
)
def test_attention_that_would_be_wrong_is_refused(
    tiny: Tiny, tmp_path: Path, architecture: str, fields: dict[str, Any], expected: str
) -> None:
    folder = Path(shutil.copytree(tiny(architecture, **fields), tmp_path / "model"))
    edit_config(folder, attn_logit_softcapping="drop")
    with pytest.raises(CheckpointError, match=expected):
        load(folder)


@pytest.mark.parametrize(
    ("architecture", "model_type", "expected"),
    [
        ("BloomForCausalLM", "bloom", "code of its own"),
        ("FalconForCausalLM", "falcon", "code of its own"),
        ("GPTJForCausalLM", "gptj", "code of its own"),
        ("GptOssForCausalLM", "gpt_oss", "attention sinks"),
        ("JambaForCausalLM", "jamba", "code of its own"),
        ("Mamba2ForCausalLM", "mamba2", "code of its own"),
        ("MambaForCausalLM", "mamba", "code of its own"),
        ("StableLmForCausalLM", "stablelm", "code of its own"),
        ("NeverHeardOfForCausalLM", "never_heard_of", "does not know the architecture"),
    ],
)
def test_an_architecture_that_cannot_run_on_paged_kv_is_refused_before_anything_is_loaded(
    tiny: Tiny, tmp_path: Path, architecture: str, model_type: str, expected: str
) -> None:
    folder = Path(shutil.copytree(tiny(), tmp_path / "model"))
    edit_config(folder, architectures=[architecture], model_type=model_type, max_position_embeddings="drop")
    with pytest.raises(CheckpointError, match=expected) as caught:
        read_checkpoint(str(folder))
    assert architecture in str(caught.value) and "download it again" not in str(caught.value)


def test_the_self_check_catches_wrong_attention(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    right = StepAttention._attend_chunk
    monkeypatch.setattr(StepAttention, "_attend_chunk", lambda step, q, k, v, scale: right(step, q, k, v, scale * 0.9))
    with pytest.raises(CheckpointError, match="computes other logits"):
        load(tiny())
