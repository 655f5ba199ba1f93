"""An engine on a real card; and what is said where there is none."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dataplane.blocks.layout import ArenaShape, Segment, uniform_shape
from dataplane.cards.arena import CardArena
from schemas.request import SamplingParams
from services.engine.batch import Batch
from services.engine.checkpoint import layout_of, read_checkpoint
from services.engine.torch_engine.card import CardStream, DeviceUnusableError, check_card
from services.engine.torch_engine.model import load_engine
from tests.engine.rig import (
    BLOCK_SIZE,
    Allocator,
    generate,
    greedy,
    make_sequence,
    num_near_ties,
    prompt_of,
    run_batch,
)
from tests.gpu import card, needs_gpu

Tiny = Callable[..., Path]

MODELS: dict[str, dict[str, Any]] = {"qwen3": {}, "llama": {"kv_heads": 1}, "mistral": {"sliding_window": 24}}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_without_a_card_one_line_says_so() -> None:
    with pytest.raises(DeviceUnusableError, match="--device cpu") as raised:
        check_card(0)
    assert "\n" not in str(raised.value)


@needs_gpu
def test_a_card_that_is_not_there_is_refused() -> None:
    with pytest.raises(DeviceUnusableError, match="there is no card cuda:99"):
        check_card(99)


class Loaded:
    """An engine on the card over an arena of its own."""

    def __init__(self, folder: Path, dtype: str, num_blocks: int) -> None:
        checkpoint = read_checkpoint(str(folder))
        shape = uniform_shape(layout_of(checkpoint, dtype=dtype, block_size=BLOCK_SIZE), num_blocks)
        self.shape: ArenaShape = shape
        self.arena = CardArena(card(), shape)
        buffer, stream = torch.from_dlpack(self.arena.exported), CardStream(check_card(0), self.arena.mark)
        self.engine = load_engine(checkpoint, arena_buffer=buffer, shape=shape, card=stream)

    def close(self) -> None:
        self.engine.close()
        self.arena.close()


@pytest.fixture
def load(tiny: Tiny) -> Iterator[Callable[..., Loaded]]:
    made: list[Loaded] = []

    def make(name: str = "qwen3", dtype: str = "float32", num_blocks: int = 96) -> Loaded:
        made.append(Loaded(tiny(name, **MODELS[name]), dtype, num_blocks))
        return made[-1]

    yield make
    for loaded in made:
        loaded.close()


def answers_of(loaded: Loaded, prompts: dict[str, list[int]], sampling: SamplingParams) -> dict[str, list[int]]:
    batch, allocator = Batch(29), Allocator(run=3)
    for name, prompt in prompts.items():
        blocks = allocator.take(len(prompt) + sampling.max_tokens)
        batch.add(make_sequence(name, prompt, blocks, sampling, num_groups=len(loaded.shape.layout.groups)))
    return run_batch(loaded.engine, batch)


@needs_gpu
@pytest.mark.parametrize("name", MODELS)
def test_tokens_equal_generate(load: Callable[..., Loaded], tiny: Tiny, name: str) -> None:
    prompts = {f"r{length}": prompt_of(length, seed=length) for length in (1, 2, 37, 90, 131)}
    answers, folder = answers_of(load(name), prompts, greedy(12)), tiny(name, **MODELS[name])
    ties = sum(num_near_ties(folder, p, answers[r], generate(folder, p, 12), greedy(12)) for r, p in prompts.items())
    assert ties <= 1, "near-ties are rare"


@needs_gpu
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_split_answer_is_that_of_a_single_engine(load: Callable[..., Loaded], temperature: float) -> None:
    """Prefill in one engine, its slots copied to other blocks of another, decode there."""
    sampling = SamplingParams(max_tokens=16, temperature=temperature, top_p=0.95, top_k=40, seed=7)
    source, target, prompt = load(), load(num_blocks=64), prompt_of(50)
    expected = answers_of(source, {"r": prompt}, sampling)["r"]
    segments = [Segment(40, 7)]
    batch = Batch(31)
    batch.add(make_sequence("r", prompt, segments, sampling, max_local_tokens=1))
    (first,) = run_batch(source.engine, batch)["r"]
    ours, theirs = source.engine._arena, target.engine._arena
    assert ours is not None and theirs is not None
    count = len(prompt)
    for layer in range(source.shape.layout.num_layers):
        for kind in ("keys", "values"):
            moved = getattr(ours, kind)[layer][40 * BLOCK_SIZE : 40 * BLOCK_SIZE + count]
            getattr(theirs, kind)[layer][8 * BLOCK_SIZE : 8 * BLOCK_SIZE + count] = moved
    torch.cuda.synchronize()
    received = make_sequence("r", prompt, [Segment(8, 9)], sampling)
    received.token_ids.append(first)
    received.num_computed_tokens = count
    batch = Batch(31)
    batch.add(received)
    assert [first, *run_batch(target.engine, batch)["r"]] == expected


@needs_gpu
def test_marks_are_reached_when_the_step_has_returned(load: Callable[..., Loaded]) -> None:
    class Listener:
        marks: list[int] = []

        def advance(self, layer: int, num_tokens: int, mark: int = 0) -> None:
            self.marks.append(mark)

    loaded = load(dtype="bfloat16")
    batch = Batch(29)
    for number, listener in enumerate((None, Listener())):
        sampling = SamplingParams(max_tokens=4, temperature=0.8, top_p=0.9, seed=1)
        batch.add(make_sequence(f"r{number}", prompt_of(40), [Segment(number * 8, 8)], sampling, listener=listener))
    run_batch(loaded.engine, batch)
    assert Listener.marks == sorted(set(Listener.marks)) and Listener.marks
    assert loaded.arena.wait_written(Listener.marks[-1], lambda: False, 0.0)
