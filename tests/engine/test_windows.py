"""Sliding-window layers keep only what their window can still see, and the tokens are the library's."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

from dataplane.blocks.cache import BlockCache, ring_blocks
from dataplane.blocks.layout import ArenaShape, BlockTables, KVLayout, block_ids
from schemas.block import hash_blocks
from schemas.ids import RequestId
from services.engine.batch import Batch
from services.engine.checkpoint import default_shape, layout_of, read_checkpoint
from services.engine.interface import Sequence
from services.engine.torch_engine.model import TransformersEngine, load_engine
from services.errors import CheckpointError
from tests.engine.rig import BLOCK_SIZE, generate, greedy, new_number, num_near_ties, prompt_of, run_batch

Tiny = Callable[..., Path]

SLIDING, FULL = "sliding_attention", "full_attention"
GEMMA: dict[str, Any] = {
    "sliding_window": 20, "num_layers": 6, "layer_types": [SLIDING, SLIDING, FULL] * 2, "query_pre_attn_scalar": 16,
}  # fmt: skip
MISTRAL: dict[str, Any] = {"sliding_window": 24, "num_layers": 3}
QWEN: dict[str, Any] = {
    "sliding_window": 16, "use_sliding_window": True, "num_layers": 4, "layer_types": [FULL, SLIDING, FULL, SLIDING],
}  # fmt: skip
MODELS = [("gemma3_text", GEMMA), ("mistral", MISTRAL), ("qwen3", QWEN)]
BUDGET = 29
NUM_ANSWER_TOKENS = 40


def load(folder: Path) -> tuple[TransformersEngine, BlockCache]:
    """Load with windowed groups so small that nothing but rings fits; every byte that is not written is NaN."""
    layout = layout_of(read_checkpoint(str(folder)), block_size=BLOCK_SIZE)
    counts = [3 * ring_blocks(g.window, BUDGET, BLOCK_SIZE) if g.window else 120 for g in layout.groups]
    shape = ArenaShape(layout=layout, num_blocks=tuple(counts))
    buffer = memoryview(bytearray(b"\xff") * shape.arena_bytes)
    engine = load_engine(read_checkpoint(str(folder)), arena_buffer=buffer, shape=shape, num_threads=1)
    return engine, BlockCache(shape, chunk_tokens=BUDGET)


def sequence(name: str, tokens: list[int], tables: BlockTables, num_computed: int = 0) -> Sequence:
    return Sequence(
        request_id=RequestId(name), number=new_number(name), token_ids=list(tokens), num_prompt_tokens=len(tokens),
        sampling=greedy(NUM_ANSWER_TOKENS), tables=tables, num_computed_tokens=num_computed,
    )  # fmt: skip


@pytest.mark.parametrize(("architecture", "fields"), MODELS, ids=[m[0] for m in MODELS])
def test_tokens_equal_generate_on_rings(tiny: Tiny, architecture: str, fields: dict[str, Any]) -> None:
    folder = tiny(architecture, **fields)
    engine, cache = load(folder)
    assert engine.layout.is_windowed
    prompts = {f"r{length}": prompt_of(length, seed=length) for length in (3, 61, 150)}
    batch = Batch(BUDGET)
    for name, prompt in prompts.items():
        allocation = cache.admit([], len(prompt) + NUM_ANSWER_TOKENS, 0)
        assert allocation is not None
        for group, table in zip(engine.layout.groups, allocation.tables, strict=True):
            assert not group.window or len(set(block_ids(table.segments))) <= ring_blocks(
                group.window, BUDGET, BLOCK_SIZE
            )
        batch.add(sequence(name, prompt, allocation.tables))
    answers = run_batch(engine, batch)
    ties = sum(
        num_near_ties(folder, prompt, answers[name], generate(folder, prompt, NUM_ANSWER_TOKENS), greedy(40))
        for name, prompt in prompts.items()
    )
    assert ties <= 1, "near-ties are rare"


@pytest.mark.parametrize(("architecture", "fields"), MODELS, ids=[m[0] for m in MODELS])
def test_a_prefix_hit_is_right_for_every_group(tiny: Tiny, architecture: str, fields: dict[str, Any]) -> None:
    """A second turn goes on from the first one's last full block: of windowed layers, from its last window."""
    folder = tiny(architecture, **fields)
    engine, cache = load(folder)
    prompt = prompt_of(130, seed=1)
    first = cache.admit([], len(prompt) + NUM_ANSWER_TOKENS, 0)
    assert first is not None
    batch = Batch(BUDGET)
    batch.add(held := sequence("first", prompt, first.tables))
    run_batch(engine, batch)
    history = list(held.token_ids)
    hashes = hash_blocks(history, BLOCK_SIZE, model_fingerprint="f")
    cache.store(first.tables, hashes, 0, held.num_computed_tokens, 0, ended=True)
    cache.free(first.tables)
    tokens = history + prompt_of(37, seed=2)
    second = cache.admit(hash_blocks(tokens, BLOCK_SIZE, model_fingerprint="f"), len(tokens) + 40, len(tokens) - 1)
    assert second is not None and second.num_cached_tokens == held.num_computed_tokens // BLOCK_SIZE * BLOCK_SIZE
    batch.add(sequence("second", tokens, second.tables, second.num_cached_tokens))
    ours = run_batch(engine, batch)["second"]
    assert not num_near_ties(folder, tokens, ours, generate(folder, tokens, NUM_ANSWER_TOKENS), greedy(40))


@pytest.mark.parametrize(
    ("model_type", "fields", "windows"),
    [
        ("mistral", {"sliding_window": 100}, (100, 100, 100)),
        ("mistral", {"sliding_window": None}, ()),
        ("mistral", {"sliding_window": 4096}, ()),
        ("mixtral", {"sliding_window": 100}, (100, 100, 100)),
        ("phi3", {"sliding_window": 100}, (100, 100, 100)),
        ("starcoder2", {"sliding_window": 100}, (100, 100, 100)),
        ("cohere2", {"sliding_window": 100, "sliding_window_pattern": 2}, (100, 0, 100)),
        ("qwen3", {"sliding_window": 100, "use_sliding_window": True, "max_window_layers": 1}, (0, 100, 100)),
        (
            "qwen3",
            {"sliding_window": 100, "use_sliding_window": False, "layer_types": [SLIDING, FULL, SLIDING]},
            (),
        ),
        ("qwen2", {"sliding_window": 100, "use_sliding_window": False}, ()),
        ("qwen2", {"sliding_window": 100, "use_sliding_window": True, "max_window_layers": 2}, (0, 0, 100)),
        ("gemma3_text", {"sliding_window": 100, "sliding_window_pattern": 3}, (100, 100, 0)),
        ("gemma2", {"sliding_window": 100}, (100, 0, 100)),
        ("gemma3_text", {"sliding_window": 100, "layer_types": [FULL, SLIDING, FULL]}, (0, 100, 0)),
        ("llama", {"sliding_window": 100}, ()),
    ],
)
def test_windows_are_those_that_the_library_s_layers_use(
    tiny: Tiny, tmp_path: Path, model_type: str, fields: dict[str, Any], windows: tuple[int, ...]
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for file in tiny("llama", num_layers=3).iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text()) | {"model_type": model_type} | fields
    (folder / "config.json").write_text(json.dumps(config))
    assert read_checkpoint(str(folder)).windows == windows
    seen = _windows_of_the_library_s_layers(folder)
    assert tuple(0 if window is None or window >= 2048 else window for window in seen) == (windows or (0, 0, 0))


def _windows_of_the_library_s_layers(folder: Path) -> list[int | None]:
    """Return what the model made of this configuration passes to each layer's attention."""
    seen: list[int | None] = []

    def listen(
        module: Any, query: Tensor, *_: Any, sliding_window: int | None = None, **__: Any
    ) -> tuple[Tensor, None]:
        assert module.layer_idx == len(seen)
        seen.append(sliding_window)
        return query.transpose(1, 2), None

    AttentionInterface.register("listening", listen)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), attn_implementation="listening")
    model.eval()(input_ids=torch.tensor([[1, 2, 3]]), use_cache=False)
    return seen


def test_a_configuration_without_a_window_we_know_of_is_taken_to_see_all(tiny: Tiny, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for file in tiny("llama", num_layers=3).iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text()) | {"model_type": "unheard_of", "sliding_window": 100}
    (folder / "config.json").write_text(json.dumps(config))
    assert read_checkpoint(str(folder)).windows == ()


def test_a_model_whose_layers_see_more_than_is_kept_is_refused(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the configuration seemed to say: the model itself is asked, at its loading."""
    folder = tiny("llama")
    checkpoint = read_checkpoint(str(folder))
    layout = layout_of(checkpoint, block_size=BLOCK_SIZE)
    fields = {name: getattr(layout, name) for name in ("weights", "dtype", "num_layers", "num_kv_heads", "head_dim")}
    wrong = KVLayout(**fields, block_size=BLOCK_SIZE, windows=(0, 8))
    shape = ArenaShape(layout=wrong, num_blocks=(20, 20))
    with pytest.raises(CheckpointError, match="only 8 are kept"):
        load_engine(checkpoint, arena_buffer=memoryview(bytearray(shape.arena_bytes)), shape=shape)


def layout(*windows: int) -> KVLayout:
    return KVLayout(
        weights="w", dtype="float32", num_layers=len(windows), num_kv_heads=1, head_dim=16, block_size=16,
        windows=windows if any(windows) else (),
    )  # fmt: skip


def test_memory_is_shared_out_by_what_the_groups_need() -> None:
    hybrid = layout(64, 64, 64, 0)
    shape = default_shape(hybrid, 64 << 20, context_length=4096, token_budget=64)
    full, windowed = shape.num_blocks
    assert full >= 4096 // 16 and windowed >= ring_blocks(64, 64, 16)
    assert full > 5 * windowed, "windowed layers need little"
    assert 0.9 * (64 << 20) < shape.arena_bytes <= 64 << 20
    assert default_shape(layout(0, 0), 1 << 20, context_length=4096, token_budget=64).num_blocks == (256,)


def test_memory_that_holds_no_longest_sequence_is_refused() -> None:
    with pytest.raises(CheckpointError, match="raise --kv-mib"):
        default_shape(layout(64, 0), 1 << 18, context_length=4096, token_budget=64)
