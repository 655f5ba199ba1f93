"""What both engines promise to a worker, and what the fake promises to tests."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from dataplane.blocks.layout import KVLayout, Segment, uniform_shape
from schemas.request import SamplingParams
from services.engine.batch import Batch
from services.engine.fake import FakeEngine, fake_answer
from services.engine.interface import Engine, StepItem
from tests.engine.rig import Allocator, arena_bytes, copy_kv, greedy, load_tiny, make_sequence, prompt_of, run_batch

NUM_BLOCKS = 64
SAMPLINGS = [greedy(10), SamplingParams(max_tokens=10, temperature=1.0, seed=4)]


@dataclass
class Held:
    engine: Engine
    arena: memoryview


def fake(num_blocks: int = NUM_BLOCKS, *, whole_blocks: bool = False, **fields: object) -> Held:
    layout = KVLayout(
        weights="fake", dtype="float32", num_layers=3, num_kv_heads=1, head_dim=5, block_size=8,
        whole_blocks=whole_blocks,
    )  # fmt: skip
    arena = memoryview(bytearray(num_blocks * layout.block_bytes))
    return Held(FakeEngine(uniform_shape(layout, num_blocks), arena, vocab_size=512, **fields), arena)  # type: ignore[arg-type]


@pytest.fixture(params=["fake", "transformers"])
def make(request: pytest.FixtureRequest, tiny: Callable[..., Path]) -> Iterator[Callable[[], Held]]:
    def transformers() -> Held:
        engine = load_tiny(tiny(), num_blocks=NUM_BLOCKS)
        return Held(engine, arena_bytes(engine))

    yield fake if request.param == "fake" else transformers


def answer(held: Held, prompt: list[int], sampling: SamplingParams, *, budget: int, run: int, first: int) -> list[int]:
    batch = Batch(budget)
    segments = Allocator(run=run, first=first).take(len(prompt) + sampling.max_tokens)
    batch.add(make_sequence("r", prompt, segments, sampling))
    return run_batch(held.engine, batch)["r"]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled"])
def test_tokens_do_not_depend_on_chunks_or_blocks(make: Callable[[], Held], sampling: SamplingParams) -> None:
    held, prompt = make(), prompt_of(61)
    expected = answer(held, prompt, sampling, budget=1000, run=1000, first=0)
    assert len(expected) == 10
    assert all(0 <= token < held.engine.vocab_size for token in expected)
    assert answer(held, prompt, sampling, budget=7, run=1, first=20) == expected


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled"])
def test_received_kv_continues_the_answer(make: Callable[[], Held], sampling: SamplingParams) -> None:
    source, target, prompt = make(), make(), prompt_of(50)
    segments, other = Allocator(run=3).take(60), Allocator(run=2, first=30).take(60)
    batch = Batch(100)
    batch.add(make_sequence("r", prompt, segments, sampling))
    expected = run_batch(source.engine, batch)["r"]
    copy_kv(source.arena, target.arena, source.engine.layout, (segments, other), len(prompt))
    received = make_sequence("r", prompt, other, sampling)
    received.token_ids.append(expected[0])
    received.num_computed_tokens = len(prompt)
    batch.add(received)
    assert run_batch(target.engine, batch)["r"] == expected[1:]


def test_missing_kv_gives_other_tokens(make: Callable[[], Held]) -> None:
    source, target, prompt = make(), make(), prompt_of(50)
    segments = Allocator().take(60)
    batch, sampling = Batch(100), greedy(10)
    batch.add(make_sequence("r", prompt, segments, sampling))
    expected = run_batch(source.engine, batch)["r"]
    target.arena[:] = bytes(target.arena.nbytes)
    copy_kv(source.arena, target.arena, source.engine.layout, (segments, segments), len(prompt) - 10)
    received = make_sequence("r", prompt, segments, sampling)
    received.token_ids.append(expected[0])
    received.num_computed_tokens = len(prompt)
    batch.add(received)
    assert run_batch(target.engine, batch)["r"] != expected[1:]


def test_listeners_hear_every_layer_in_order(make: Callable[[], Held]) -> None:
    class Listener:
        def __init__(self) -> None:
            self.heard: list[tuple[int, int]] = []

        def advance(self, layer: int, num_tokens: int, mark: int = 0) -> None:
            self.heard.append((layer, num_tokens))

    held, listener, batch = make(), Listener(), Batch(32)
    batch.add(make_sequence("r", prompt_of(40), [Segment(2, 6)], greedy(1), listener=listener))
    batch.add(make_sequence("other", prompt_of(20), [Segment(10, 6)], greedy(1)))
    run_batch(held.engine, batch)
    assert listener.heard == [(layer, n) for n in (32, 40) for layer in range(held.engine.layout.num_layers)]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled"])
def test_the_fake_s_whole_blocks_are_of_no_use_by_parts(sampling: SamplingParams) -> None:
    """All blocks go over to another arena, whose engine goes on; or all but a token's slots of the last one."""
    prompt = prompt_of(61)
    for num_tokens, is_right in ((64, True), (61, False)):
        source, target = fake(whole_blocks=True), fake(whole_blocks=True)
        layout = source.engine.layout
        expected = answer(source, prompt, sampling, budget=7, run=1, first=20)
        assert expected == fake_answer(layout, prompt, sampling, vocab_size=512)
        tables = Allocator(run=1, first=20).take(71), Allocator(run=2).take(71)
        copy_kv(source.arena, target.arena, layout, tables, num_tokens)
        batch, received = Batch(100), make_sequence("r", prompt, tables[1], sampling)
        received.token_ids.append(expected[0])
        received.num_computed_tokens = len(prompt)
        batch.add(received)
        assert (run_batch(target.engine, batch)["r"] == expected[1:]) is is_right


@pytest.mark.parametrize(("num_tokens", "padded"), [(40, 40), (37, 40), (33, 40), (7, 8)])
def test_the_fake_announces_whole_blocks(num_tokens: int, padded: int) -> None:
    """As a prompt comes to its end, all of its last block."""

    class Listener:
        def __init__(self) -> None:
            self.heard: list[int] = []

        def advance(self, layer: int, num_tokens: int, mark: int = 0) -> None:
            self.heard += [num_tokens] if layer == 2 else []

    listener, batch = Listener(), Batch(13)
    batch.add(make_sequence("r", prompt_of(num_tokens), [Segment(2, 6)], greedy(1), listener=listener))
    run_batch(fake(whole_blocks=True).engine, batch)
    assert listener.heard == [at // 8 * 8 for at in range(13, num_tokens, 13)] + [padded]


def test_items_that_do_not_sample_give_no_token(make: Callable[[], Held]) -> None:
    held = make()
    sequence = make_sequence("r", prompt_of(20), [Segment(0, 4)], greedy(1))
    assert held.engine.compute([StepItem(sequence, 0, 12, False)]) == []
    assert len(held.engine.compute([StepItem(sequence, 12, 8, True)])) == 1


def test_only_its_own_slots_are_written(make: Callable[[], Held]) -> None:
    held = make()
    layout = held.engine.layout
    held.arena[:] = b"\x77" * held.arena.nbytes
    batch = Batch(16)
    batch.add(make_sequence("r", prompt_of(20), [Segment(3, 2), Segment(9, 1)], greedy(3)))
    run_batch(held.engine, batch)
    num_slots = NUM_BLOCKS * layout.block_size
    written = set()
    for layer_half in range(layout.num_layers * 2):
        for slot in range(num_slots):
            at = (layer_half * num_slots + slot) * layout.token_bytes
            if bytes(held.arena[at : at + layout.token_bytes]) != b"\x77" * layout.token_bytes:
                written.add(slot)
    assert written == {*range(24, 40), *range(72, 78)}, "20 prompt tokens, and all of the answer but its last"


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled"])
def test_the_fake_s_answer_is_known_in_advance(sampling: SamplingParams) -> None:
    held, prompt = fake(), prompt_of(45)
    expected = answer(held, prompt, sampling, budget=13, run=2, first=0)
    assert fake_answer(held.engine.layout, prompt, sampling, vocab_size=512) == expected
    assert fake_answer(held.engine.layout, prompt, sampling, vocab_size=512, eos=[expected[3]]) == expected[:4]
    other = fake_answer(held.engine.layout, [*prompt[:-1], prompt[-1] ^ 1], sampling, vocab_size=512)
    assert other != expected


def test_the_fake_notices_one_flipped_bit_anywhere() -> None:
    held, prompt = fake(num_blocks=6), prompt_of(40)
    sequence = make_sequence("r", prompt, [Segment(0, 6)], SamplingParams(max_tokens=3, temperature=0.0))
    clean = [held.engine.compute([StepItem(sequence, 0, 40, True)])[0]]
    layout = held.engine.layout
    last = StepItem(sequence, 39, 1, True)
    assert held.engine.compute([last]) == clean
    unseen = 0
    for layer_half in range(layout.num_layers * 2):
        for slot in (0, 17, 38):
            at = (layer_half * 48 + slot) * layout.token_bytes + 11
            held.arena[at] ^= 4
            unseen += held.engine.compute([last]) == clean
            held.arena[at] ^= 4
    assert unseen <= 1, "a hash of 512 tokens may collide once"


def test_the_fake_s_hook_runs_before_anything_is_written() -> None:
    def fail(items: object) -> None:
        raise RuntimeError("as asked")

    held = fake(before_step=fail)
    with pytest.raises(RuntimeError, match="as asked"):
        held.engine.compute([StepItem(make_sequence("r", [1, 2], [Segment(0, 1)], greedy(1)), 0, 2, True)])
    assert not any(held.arena)
