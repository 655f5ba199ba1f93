"""What an engine on a card is before it serves: proven, with another library's attention and graphs only if right."""

import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dataplane.blocks.layout import ArenaShape, uniform_shape
from services.engine.batch import Batch
from services.engine.checkpoint import layout_of, read_checkpoint
from services.engine.cpu.attention import KVTensors
from services.engine.cpu.model import load_model
from services.engine.cuda.backends import FlashInferBackend
from services.engine.cuda.device_engine import DeviceEngine
from services.engine.cuda.device_load import Card, make_device_engine
from services.engine.cuda.step_plan import StepLimits
from services.errors import CheckpointError
from tests.engine import flashinfer_fake
from tests.engine.device_rig import LIMITS, CountedMarks, EagerRecorder, EagerRecording, HostRuntime
from tests.engine.rig import BLOCK_SIZE, Allocator, generate, greedy, make_sequence, prompt_of, run_batch

Tiny = Callable[..., Path]

QWEN: dict[str, Any] = {"heads": 2, "kv_heads": 1}
MISTRAL: dict[str, Any] = {"heads": 2, "kv_heads": 1, "sliding_window": 24}


def load(
    folder: Path,
    wrapper: Any = None,
    recorder: Any = None,
    model: Any = None,
    limits: StepLimits = LIMITS,
    num_blocks: int = 60,
) -> DeviceEngine:
    checkpoint = read_checkpoint(str(folder))
    shape: ArenaShape = uniform_shape(layout_of(checkpoint, block_size=BLOCK_SIZE), num_blocks)
    arena = KVTensors(shape, torch.zeros(shape.num_bytes, dtype=torch.uint8))  # as a card's memory is
    backend = None
    if wrapper is not None:
        backend = FlashInferBackend(SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=wrapper), torch.device("cpu"))
    card = Card(HostRuntime(), CountedMarks(), recorder, backend)
    return make_device_engine(model or load_model(checkpoint, "float32"), checkpoint, arena, card, limits)


def answers_of(engine: DeviceEngine, prompts: dict[str, list[int]]) -> dict[str, list[int]]:
    batch, allocator = Batch(29), Allocator(run=3)
    for name, prompt in prompts.items():
        batch.add(make_sequence(name, prompt, allocator.take(len(prompt) + 4), greedy(4)))
    return run_batch(engine, batch)


@pytest.mark.parametrize(("name", "fields"), [("qwen3", QWEN), ("mistral", MISTRAL)])
def test_flashinfer_computes_the_chunks(tiny: Tiny, name: str, fields: dict[str, Any]) -> None:
    folder = tiny(name, **fields)
    engine = load(folder, flashinfer_fake.BatchPrefillWithPagedKVCacheWrapper)
    prompts = {f"r{length}": prompt_of(length, seed=length) for length in (1, 23, 50)}
    before = flashinfer_fake.BatchPrefillWithPagedKVCacheWrapper.planned
    answers = answers_of(engine, prompts)
    assert answers == {r: generate(folder, prompt, 4) for r, prompt in prompts.items()}
    assert flashinfer_fake.BatchPrefillWithPagedKVCacheWrapper.planned - before == 3, "once for each step with chunks"


@pytest.mark.parametrize(
    ("wrapper", "reason"), [(flashinfer_fake.Wrong, "computes other logits"), (flashinfer_fake.Failing, "no kernel")]
)
def test_a_library_that_is_wrong_is_not_used(
    tiny: Tiny, wrapper: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = load(tiny(**QWEN), wrapper)
    assert engine._backend is None
    (said,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert said.startswith("FlashInferBackend is not used") and reason in said
    prompt = prompt_of(20)
    assert answers_of(engine, {"r": prompt})["r"] == generate(tiny(**QWEN), prompt, 4)


def test_graphs_that_compute_something_else_are_not_used(tiny: Tiny, caplog: pytest.LogCaptureFixture) -> None:
    class Stale(EagerRecording):
        def replay(self) -> None:
            self.output.copy_(torch.randn_like(self.output))

    class Recorder(EagerRecorder):
        def record(self, compute: Callable[[], Tensor]) -> EagerRecording:
            return Stale(compute)

    engine = load(tiny(**QWEN), recorder=Recorder())
    assert engine.graphs is not None and engine.graphs.is_disabled
    assert any("computes other logits" in r.getMessage() for r in caplog.records)
    prompt = prompt_of(20)
    assert answers_of(engine, {"r": prompt})["r"] == generate(tiny(**QWEN), prompt, 4)


def test_an_engine_that_computes_something_else_is_refused(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    from services.engine.cuda import paged_ops

    attend = paged_ops.attend_chunks
    monkeypatch.setattr(paged_ops, "attend_chunks", lambda query, *rest: attend(query * 1.5, *rest))
    with pytest.raises(CheckpointError, match="other logits on paged KV"):
        load(tiny(**QWEN))


def test_a_step_s_chunks_are_left_to_our_kernel_where_they_are_not_side_by_side(tiny: Tiny) -> None:
    from services.engine.cuda.step_plan import StepPlanner
    from tests.engine.interpreted.test_engine import step_of

    engine = load(tiny(**QWEN), flashinfer_fake.BatchPrefillWithPagedKVCacheWrapper)
    assert engine._backend is not None and engine._arena is not None
    planner = StepPlanner(engine.layout)
    single, chunk = step_of(1, 4), step_of(20, 4)
    assert engine._backend.plan(engine._arena, planner.plan([*single, *chunk, *chunk])) is not None
    assert engine._backend.plan(engine._arena, planner.plan([*chunk, *single, *chunk])) is None


class Noted(DeviceEngine):
    """Notes each step's rows and samples."""

    steps: list[tuple[int, int]]

    def step(self, items: Any) -> list[int]:
        self.steps = [*getattr(self, "steps", []), (sum(i.num_tokens for i in items), sum(i.samples for i in items))]
        return super().step(items)


@pytest.mark.parametrize(
    ("limits", "num_blocks", "largest"),
    [
        (StepLimits(num_tokens=40, num_sequences=3, sequence_tokens=64), 60, (40, 3)),
        (StepLimits(num_tokens=3, num_sequences=8, sequence_tokens=64), 60, (3, 3)),
        (StepLimits(num_tokens=90, num_sequences=2, sequence_tokens=30), 60, (31, 2)),  # a sequence has no more tokens
        (StepLimits(num_tokens=900, num_sequences=2, sequence_tokens=900), 4, (4 * BLOCK_SIZE + 1, 2)),  # nor the arena
    ],
)
def test_the_largest_step_is_computed_before_anybody_is_served(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, limits: StepLimits, num_blocks: int, largest: tuple[int, int]
) -> None:
    monkeypatch.setattr("services.engine.cuda.device_load.DeviceEngine", Noted)
    engine = load(tiny(**QWEN), limits=limits, num_blocks=num_blocks)
    assert isinstance(engine, Noted)
    assert engine.steps == [largest]


def test_a_step_that_does_not_fit_is_said_at_the_start(tiny: Tiny) -> None:
    """Not when the first long prompt comes."""
    model = load_model(read_checkpoint(str(tiny(**QWEN))), "float32")
    forward = model.forward

    def small_card(*args: Any, input_ids: Tensor, **kwargs: Any) -> Any:
        if input_ids.shape[1] > 100:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return forward(*args, input_ids=input_ids, **kwargs)

    model.forward = small_card
    load(tiny(**QWEN), model=model)
    limits = StepLimits(num_tokens=120, num_sequences=2, sequence_tokens=200)
    with pytest.raises(CheckpointError, match=r"120 tokens .* does not fit .*--token-budget") as raised:
        load(tiny(**QWEN), model=model, limits=limits)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("wrong", [1, 2, 4])
def test_each_graph_is_compared(tiny: Tiny, caplog: pytest.LogCaptureFixture, wrong: int) -> None:
    class Stale(EagerRecording):
        def replay(self) -> None:
            super().replay()
            if len(self.output) == wrong:
                self.output[-1 if wrong < 4 else -2] *= 1.5  # the last row of four is padding

    class Recorder(EagerRecorder):
        def record(self, compute: Callable[[], Tensor]) -> EagerRecording:
            return Stale(compute)

    engine = load(tiny(**QWEN), recorder=Recorder())
    assert engine.graphs is not None and engine.graphs.sizes == (1, 2, 4) and engine.graphs.is_disabled
    assert any(f"the one for {wrong} sequences computes other" in r.getMessage() for r in caplog.records)
