"""An engine on a card that is none: everything is where the card is, and every step has ended when `step` returns."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

from dataplane.blocks.layout import BlockTable, Segment, uniform_shape
from schemas.request import SamplingParams
from services.engine.batch import Batch
from services.engine.batch_steps import BatchSteps
from services.engine.checkpoint import layout_of, read_checkpoint
from services.engine.interface import EngineLostError, StepFailedError, StepItem
from services.engine.torch_engine.attention import ATTENTION_NAME, KVTensors, paged_attention
from services.engine.torch_engine.card import CardStream
from services.engine.torch_engine.model import TransformersEngine
from tests.engine.fake_card import CARD, Copy, FakeCard
from tests.engine.rig import VOCAB, greedy, load_tiny, make_sequence, prompt_of, run_batch

Tiny = Callable[..., Path]

FULL, SLIDING = "full_attention", "sliding_attention"
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "llama": {"kv_heads": 1},
    "mistral": {"sliding_window": 24},
    "gemma3_text": {"sliding_window": 16, "num_layers": 3, "layer_types": [SLIDING, FULL, SLIDING]},
}
SAMPLED = SamplingParams(max_tokens=9, temperature=0.8, top_k=20, top_p=0.9, seed=1)


class Listener:
    def __init__(self) -> None:
        self.heard: list[tuple[int, int, int]] = []

    def advance(self, layer: int, num_tokens: int, mark: int = 0) -> None:
        self.heard.append((layer, num_tokens, mark))


def make_engine(folder: Path, card: FakeCard) -> TransformersEngine:
    checkpoint = read_checkpoint(str(folder))
    layout = layout_of(checkpoint, dtype="bfloat16", block_size=8)
    shape = uniform_shape(layout, 64)
    AttentionInterface.register(ATTENTION_NAME, paged_attention)
    config = AutoConfig.from_pretrained(folder)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=ATTENTION_NAME)
    card.move(model.eval())
    arena = KVTensors(shape, torch.empty(shape.arena_bytes, dtype=torch.uint8, device=CARD))
    return TransformersEngine(model, arena, vocab_size=VOCAB, num_threads=1, card=cast(CardStream, card))


def items(listener: Listener | None, num_groups: int) -> dict[str, list[StepItem]]:
    def item(name: str, start: int, count: int, sampling: SamplingParams) -> StepItem:
        sequence = make_sequence(name, PROMPT, (), sampling, listener=listener)
        sequence.tables = (BlockTable((Segment(3, 12),)),) * num_groups
        return StepItem(sequence, start, count, start + count == len(PROMPT))

    decodes = [item("a", 59, 1, greedy(9)), item("b", 59, 1, SAMPLED), item("c", 59, 1, greedy(9))]
    return {
        "prefill": [item("d", 0, 60, SAMPLED)],
        "chunk": [item("d", 5, 40, SAMPLED)],
        "mixed": [*decodes, item("d", 20, 40, SAMPLED)],
        "decode": decodes,
    }


PROMPT = prompt_of(60)


@pytest.mark.parametrize("name", MODELS)
def test_a_step_is_computed_where_the_card_is(tiny: Tiny, name: str) -> None:
    """Nothing mixes devices, and nothing of a step is waited for before its end."""
    folder, card, listener = tiny(name, **MODELS[name]), FakeCard(), Listener()
    with card.entered():
        engine = make_engine(folder, card)
        num_layers = engine.layout.num_layers
        for kind, step in items(listener, len(engine.layout.groups)).items():
            card.num_waits = 0
            for noted in (card.copies, listener.heard):
                noted.clear()
            logits = engine.logits(step, range(len(step)))
            assert (logits.device, logits.dtype, logits.shape) == (CARD, torch.float32, (len(step), VOCAB)), kind
            assert all(copy.source == "cpu" for copy in card.copies), kind
            assert card.num_waits == 1
            assert len(listener.heard) == num_layers * len(step)
            assert len({mark for _, _, mark in listener.heard}) == num_layers


class HostCard(FakeCard):
    """The stream of an engine that computes in memory. `failure`: what waiting for it raises."""

    failure: Exception | None = None

    def wait(self) -> None:
        super().wait()
        if self.failure is not None:
            raise self.failure


@pytest.fixture
def on_card(tiny: Tiny) -> tuple[TransformersEngine, HostCard]:
    engine, card = load_tiny(tiny("qwen3")), HostCard()
    engine._card = cast(CardStream, card)
    return engine, card


def test_tokens_are_those_of_the_cpu(tiny: Tiny, on_card: tuple[TransformersEngine, HostCard]) -> None:
    """Each layer is told of with a mark of its own, where somebody listens; each step is waited for once."""
    engine, card = on_card
    answers, steps = [], []
    engine.model.register_forward_hook(lambda *_: steps.append("a step"))
    for one in (load_tiny(tiny("qwen3")), engine):
        batch, listener = Batch(29), Listener()
        batch.add(make_sequence("r", PROMPT, [Segment(3, 12)], SAMPLED, listener=listener))
        batch.add(make_sequence("s", PROMPT[:40], [Segment(20, 12)], greedy(9)))
        answers.append(run_batch(one, batch))
    assert answers[0] == answers[1]
    marks = [mark for _, _, mark in listener.heard]
    assert marks == sorted(set(marks)) == list(range(1, card.num_marks + 1))
    assert card.num_waits == len(steps) >= len(marks) // engine.layout.num_layers


def test_what_a_failed_step_had_begun_has_ended(on_card: tuple[TransformersEngine, HostCard]) -> None:
    engine, card = on_card
    steps = BatchSteps(engine, Batch(29))
    engine.model.register_forward_hook(lambda *_: 1 / 0)
    steps.add(make_sequence("r", PROMPT, [Segment(3, 12)], SAMPLED))
    with pytest.raises(StepFailedError, match="ZeroDivisionError") as failed:
        steps.run_step()
    assert (card.num_waits, failed.value.is_lost) == (1, False)
    card.failure = RuntimeError("CUDA error: unspecified launch failure\nand more")
    steps.add(make_sequence("s", PROMPT, [Segment(3, 12)], SAMPLED))
    with pytest.raises(StepFailedError, match=r"the card fails: CUDA error: unspecified launch failure$") as failed:
        steps.run_step()
    assert failed.value.is_lost and isinstance(failed.value.__cause__, EngineLostError)


def test_the_fake_card_sees_what_it_is_for() -> None:
    card = FakeCard()
    with card.entered():
        here, there = torch.empty(3), torch.empty(3, device=CARD)
        with pytest.raises(RuntimeError, match="device"):
            here + there
        with pytest.raises(DataDependentOutputException):
            there.sum().item()
        with pytest.raises(DataDependentOutputException):
            bool(there.any())
        with pytest.raises(DynamicOutputShapeException):
            torch.nonzero(there)
        there.cpu()
        there.copy_(here)
    assert card.copies == [Copy("cpu", "cuda", 12), Copy("copy_", "cpu", 12)]
