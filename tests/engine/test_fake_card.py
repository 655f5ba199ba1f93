"""Whole steps on fake tensors of a card: everything is on the card, and the host waits for nothing but the tokens."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

from dataplane.blocks.layout import BlockTable, Segment, uniform_shape
from schemas.request import SamplingParams
from services.engine.checkpoint import layout_of, read_checkpoint
from services.engine.cpu.attention import ATTENTION_NAME, KVTensors, paged_attention
from services.engine.interface import StepItem

pytest.importorskip("triton")

from services.engine.cuda.device_engine import DeviceEngine
from tests.engine.device_rig import LIMITS
from tests.engine.fake_card import CARD, Copy, FakeCard
from tests.engine.rig import greedy, make_sequence, prompt_of

Tiny = Callable[..., Path]

FULL, SLIDING = "full_attention", "sliding_attention"
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "llama": {"kv_heads": 1},
    "mistral": {"sliding_window": 24},
    "gemma3_text": {"sliding_window": 16, "num_layers": 3, "layer_types": [SLIDING, FULL, SLIDING]},
}
SAMPLED = SamplingParams(max_tokens=9, temperature=0.8, top_k=20, top_p=0.9, seed=1)


class Marks:
    count = 0

    def mark(self, stream_handle: int) -> int:
        self.count += 1
        return self.count


class Listener:
    def __init__(self) -> None:
        self.heard: list[tuple[int, int, int]] = []

    def advance(self, layer: int, num_tokens: int, mark: int = 0) -> None:
        self.heard.append((layer, num_tokens, mark))


def make_engine(folder: Path, card: FakeCard) -> DeviceEngine:
    checkpoint = read_checkpoint(str(folder))
    layout = layout_of(checkpoint, dtype="bfloat16", block_size=8)
    shape = uniform_shape(layout, 64)
    AttentionInterface.register(ATTENTION_NAME, paged_attention)
    config = AutoConfig.from_pretrained(folder)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=ATTENTION_NAME)
    card.move(model.eval())
    arena = KVTensors(shape, torch.empty(shape.num_bytes, dtype=torch.uint8, device=CARD))
    return DeviceEngine(model, arena, vocab_size=checkpoint.vocab_size, runtime=card, marks=Marks(), limits=LIMITS)


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
def test_a_step_goes_up_in_one_copy_and_waits_once(tiny: Tiny, name: str) -> None:
    folder, card, listener = tiny(name, **MODELS[name]), FakeCard(), Listener()
    with card.entered():
        engine = make_engine(folder, card)
        num_layers = engine.layout.num_layers
        for kind, step in items(listener, len(engine.layout.groups)).items():
            for noted in (card.copies, card.fetches, listener.heard):
                noted.clear()
            ids = engine.step(step)
            assert len(ids) == sum(item.samples for item in step)
            assert [(copy.name, copy.source) for copy in card.copies] == [("copy_", "cpu")], kind
            assert card.fetches == [len(ids)], kind
            assert len(listener.heard) == num_layers * len(step)
            assert len({mark for _, _, mark in listener.heard}) == num_layers


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
