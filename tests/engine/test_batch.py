"""The batch: who is computed next, and what a step's tokens mean."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dataplane.blocks.layout import BlockTable, KVLayout, Segment, uniform_shape
from schemas.ids import RequestId
from schemas.request import SamplingParams
from services.engine.batch import Batch
from services.engine.fake import FakeEngine
from services.engine.interface import ChosenToken, InvalidSequenceError, Sequence, StepItem
from services.engine.messages import StepResult
from services.engine.rules import num_tokens_to_store
from tests.engine.rig import NAMES, new_number, num_uncomputed
from tests.share import examples

SHAPE = uniform_shape(
    KVLayout(weights="fake", dtype="float32", num_layers=1, num_kv_heads=1, head_dim=1, block_size=1), 1000
)
ENGINE = FakeEngine(SHAPE, memoryview(bytearray(SHAPE.arena_bytes)))


def make(
    name: str,
    num_prompt_tokens: int,
    *,
    max_tokens: int = 4,
    answer: tuple[int, ...] = (),
    num_computed_tokens: int = 0,
    max_local_tokens: int | None = None,
    eos: frozenset[int] = frozenset(),
    stop: tuple[int, ...] = (),
    ignore_eos: bool = False,
    tenant: str = "",
) -> Sequence:
    return Sequence(
        request_id=RequestId(name),
        number=new_number(name),
        token_ids=[*range(100, 100 + num_prompt_tokens), *answer],
        num_prompt_tokens=num_prompt_tokens,
        sampling=SamplingParams(max_tokens=max_tokens, stop_token_ids=stop, ignore_eos=ignore_eos),
        tables=(BlockTable((Segment(0, 1000),)),),
        num_computed_tokens=num_computed_tokens,
        max_local_tokens=max_local_tokens,
        stop_token_ids=eos,
        tenant=tenant,
    )


def step(batch: Batch, token_id: int = 7) -> StepResult:
    items = batch.plan()
    result = batch.commit(items, [ChosenToken(token_id) for item in items if item.samples], 1, 2)
    batch.check_integrity()
    return result


def shape(items: list[StepItem]) -> list[tuple[str, int, int, bool]]:
    return [(item.sequence.request_id, item.start, item.num_tokens, item.samples) for item in items]


def test_an_empty_batch_plans_nothing() -> None:
    assert Batch(16).plan() == []


def test_decodes_go_first_and_prefill_fills_the_budget() -> None:
    batch = Batch(10)
    batch.add(make("p1", 6))
    batch.add(make("d1", 5, answer=(1,), num_computed_tokens=5))
    batch.add(make("p2", 20))
    assert shape(batch.plan()) == [("d1", 5, 1, True), ("p1", 0, 6, True), ("p2", 0, 3, False)]


def test_tenants_prompts_are_computed_in_turn() -> None:
    """One that is short does not wait for another tenant's backlog, nor for the long prompt that is in work."""
    batch = Batch(10)
    for number in range(20):
        batch.add(make(f"a{number}", 100, tenant="a"))
    step(batch)
    batch.add(make("b", 12, tenant="b"))
    assert [shape(_planned(batch)) for _ in range(3)] == [
        [("b", 0, 10, False)],
        [("a0", 10, 10, False)],
        [("b", 10, 2, True), ("a0", 20, 8, False)],
    ]


def test_tenants_decodes_take_turns_where_they_do_not_fit() -> None:
    batch = Batch(5)
    for number in range(40):
        batch.add(make(f"a{number}", 5, answer=(1,), num_computed_tokens=5, max_tokens=50, tenant="a"))
    batch.add(make("b", 5, answer=(1,), num_computed_tokens=5, max_tokens=50, tenant="b"))
    seen = Counter(NAMES[sampled.number] for _ in range(20) for sampled in step(batch).sampled)
    assert seen["b"] == 20 and all(seen[RequestId(f"a{number}")] == 2 for number in range(40))


def test_a_long_prompt_is_split_and_sampled_once() -> None:
    batch = Batch(8)
    batch.add(make("p", 20))
    assert [shape(step_items) for step_items in (_planned(batch) for _ in range(3))] == [
        [("p", 0, 8, False)],
        [("p", 8, 8, False)],
        [("p", 16, 4, True)],
    ]


def _planned(batch: Batch) -> list[StepItem]:
    items = batch.plan()
    batch.commit(items, [ChosenToken(7) for item in items if item.samples], 0, 0)
    return items


def test_a_last_single_prompt_token_is_a_decode() -> None:
    batch = Batch(8)
    batch.add(make("p", 9))
    assert step(batch).num_prefill_tokens == 8
    result = step(batch)
    assert (result.num_prefill_tokens, result.num_decode_tokens) == (0, 1)


def test_prefill_is_first_come_first_served() -> None:
    batch = Batch(8)
    for name in ("a", "b", "c"):
        batch.add(make(name, 6, max_tokens=1))
    order = [NAMES[token.number] for _ in range(4) for token in step(batch).sampled]
    assert order == ["a", "b", "c"]


def test_cached_tokens_are_not_computed_again() -> None:
    batch = Batch(100)
    batch.add(make("p", 20, num_computed_tokens=16))
    assert shape(batch.plan()) == [("p", 16, 4, True)]


def test_who_is_taken_out_is_not_computed() -> None:
    batch, gone = Batch(8), make("p1", 30)
    for sequence in (make("d", 5, answer=(1,), num_computed_tokens=5), gone, make("p2", 10)):
        batch.add(sequence)
    step(batch)
    assert batch.remove(gone.number) is gone
    assert batch.remove(gone.number) is None
    assert {item.sequence.request_id for item in batch.plan()} == {"d", "p2"}
    batch.clear()
    assert not len(batch) and not batch.plan()


@pytest.mark.parametrize(
    ("sequence", "token_id", "finish_reason", "local_end"),
    [
        (make("r", 3, max_tokens=1), 7, "length", True),
        (make("r", 3, max_tokens=2), 7, None, False),
        (make("r", 3, max_tokens=2, answer=(1,), num_computed_tokens=3), 7, "length", True),
        (make("r", 3, max_tokens=9, eos=frozenset({7})), 7, "stop", True),
        (make("r", 3, max_tokens=9, eos=frozenset({7}), ignore_eos=True), 7, None, False),
        (make("r", 3, max_tokens=9, stop=(7,), ignore_eos=True), 7, "stop", True),
        (make("r", 3, max_tokens=1, eos=frozenset({7})), 7, "stop", True),
        (make("r", 3, max_tokens=9, max_local_tokens=1), 7, None, True),
        (make("r", 3, max_tokens=1, max_local_tokens=1), 7, "length", True),
        (make("r", 3, max_tokens=9, max_local_tokens=2), 7, None, False),
        (make("r", 9, max_tokens=9), 7, "length", True),
    ],
    ids=[
        "max_tokens", "goes on", "token 0 from elsewhere counts", "eos", "ignored eos", "own stop token",
        "stop before length", "handed over", "finished rather than handed over", "local tokens left", "context full",
    ],
)  # fmt: skip
def test_how_sequences_end(sequence: Sequence, token_id: int, finish_reason: str | None, local_end: bool) -> None:
    batch = Batch(64, context_length=10)
    sequence = replace(sequence, token_ids=list(sequence.token_ids))
    batch.add(sequence)
    index = sequence.index
    (token,) = step(batch, token_id).sampled
    assert (token.index, token.token_id) == (index, token_id)
    assert (token.finish_reason, token.local_end) == (finish_reason, local_end)
    assert len(batch) == (0 if local_end else 1)
    assert sequence.token_ids[-1] == token_id
    assert sequence.num_local_tokens == 1


def test_the_result_tells_what_was_computed() -> None:
    batch = Batch(8)
    sequence = make("p", 20)
    batch.add(sequence)
    result = step(batch)
    assert (result.started_ns, result.ended_ns) == (1, 2)
    assert result.computed == ((sequence.number, 8),)
    assert result.sampled == ()


def test_many_decodes_do_not_starve_a_prompt() -> None:
    batch = Batch(16)
    for n in range(40):
        batch.add(make(f"d{n}", 5, answer=(1,), num_computed_tokens=5, max_tokens=10_000))
    prompt = make("p", 41)
    batch.add(prompt)
    for _ in range(20):
        num_prefill_tokens = step(batch).num_prefill_tokens
        assert num_prefill_tokens >= batch.prefill_reserve or prompt.num_uncomputed_tokens == 1


def test_decodes_that_do_not_fit_take_turns() -> None:
    batch = Batch(8)
    for n in range(20):
        batch.add(make(f"d{n}", 5, answer=(1,), num_computed_tokens=5, max_tokens=10_000))
    turns = Counter(NAMES[token.number] for _ in range(50) for token in step(batch).sampled)
    assert set(turns.values()) == {20}


def test_many_prompts_do_not_hold_back_a_decode() -> None:
    batch = Batch(8)
    batch.add(make("d", 5, answer=(1,), num_computed_tokens=5, max_tokens=10_000))
    for n in range(10):
        batch.add(make(f"p{n}", 50))
    for _ in range(30):
        assert "d" in [NAMES[token.number] for token in step(batch).sampled]


def test_wrong_use_is_refused() -> None:
    batch = Batch(8)
    sequence = make("r", 3)
    batch.add(sequence)
    with pytest.raises(AssertionError):
        batch.add(sequence)
    for sequence in (make("done", 3, num_computed_tokens=3), make("full", 3, max_tokens=1, answer=(1,))):
        with pytest.raises(InvalidSequenceError):
            batch.check(sequence, ENGINE)
    with pytest.raises(AssertionError):
        batch.commit(batch.plan(), [], 0, 0)
    with pytest.raises(ValueError, match="2 or more"):
        Batch(1)


@pytest.mark.parametrize(
    ("sequence", "expected"),
    [
        (make("r", 10, max_tokens=5), 14),
        (make("r", 10, max_tokens=5, max_local_tokens=1), 10),
        (make("r", 10, max_tokens=1), 10),
        (make("r", 10, max_tokens=1000), 49),
    ],
)
def test_slots_needed(sequence: Sequence, expected: int) -> None:
    assert num_tokens_to_store(sequence, 50) == expected


@example(prompts=[(1, 1, 0), (2, 1, 0), (2, 1, 0)], budget=24, max_sequences=2)  # the places run out, not the budget
@settings(max_examples=examples(150), deadline=None)
@given(
    prompts=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 6), st.integers(0, 8)), min_size=1, max_size=15),
    budget=st.integers(2, 40),
    max_sequences=st.integers(2, 12),
)
def test_every_token_is_computed_once_in_order(
    prompts: list[tuple[int, int, int]], budget: int, max_sequences: int
) -> None:
    """Any prompts, joining at any step, under any budget: each computed exactly once, all end, budgets hold."""
    batch = Batch(budget, max_sequences=max_sequences)
    waiting = [(joins, make(f"r{n}", length, max_tokens=tokens)) for n, (length, tokens, joins) in enumerate(prompts)]
    computed: dict[str, int] = {}
    answers: Counter[str] = Counter()
    sampled_at: dict[str, int] = {}
    longest_wait = len(prompts) + 2
    for number in range(10_000):
        for joins, sequence in waiting:
            if joins == number:
                batch.add(sequence)
        items = batch.plan()
        if not items and number > 8:
            break
        assert sum(item.num_tokens for item in items) <= budget
        assert len(items) <= max_sequences
        assert len({item.sequence.request_id for item in items}) == len(items)
        here = [sequence for joins, sequence in waiting if joins <= number]
        if num_uncomputed(here):
            chunks = [item for item in items if item.sequence.num_uncomputed_tokens > 1]
            assert chunks, "the first prompt in line always gets on"
            assert chunks[0].num_tokens >= min(batch.prefill_reserve, chunks[0].sequence.num_uncomputed_tokens)
            if len(items) < max_sequences:
                prefilled = sum(item.num_tokens for item in chunks)
                assert prefilled >= min(batch.prefill_reserve, num_uncomputed(here))
        for item in items:
            name = item.sequence.request_id
            assert item.start == computed.get(name, 0)
            computed[name] = item.start + item.num_tokens
            assert item.samples == (computed[name] == len(item.sequence.token_ids))
            if item.samples:
                assert number - sampled_at.get(name, number) <= longest_wait, "a decode waited for more than a round"
                sampled_at[name] = number
        for token in batch.commit(items, [ChosenToken(7)] * sum(i.samples for i in items), 0, 0).sampled:
            answers[NAMES[token.number]] += 1
        batch.check_integrity()
    assert len(batch) == 0
    for _, sequence in waiting:
        assert answers[sequence.request_id] == sequence.sampling.max_tokens
        assert computed[sequence.request_id] == len(sequence.token_ids) - 1
