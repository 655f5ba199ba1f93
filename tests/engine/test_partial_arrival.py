"""KV that arrives in part delays nobody whose KV is whole: counted in engine steps, on an engine that is exact."""

import random

import pytest

from dataplane.blocks.layout import KEY, VALUE, BlockTable, KVLayout, Segment, num_blocks_for, slot_spans, uniform_shape
from schemas.ids import RequestId
from schemas.request import SamplingParams
from services.engine.batch import Batch
from services.engine.fake import FakeEngine, fake_answer
from services.engine.interface import Sequence
from tests.bench.bench_loss import (
    NUM_REQUESTS,
    NUMBERS_LOST,
    WAYS,
    LossBench,
    Samples,
    Terms,
    Way,
    arena_shape,
    lost_requests,
)
from tests.engine.rig import num_uncomputed

FULL = KVLayout(weights="fake", dtype="float32", num_layers=2, num_kv_heads=1, head_dim=4, block_size=8)
WINDOWED = KVLayout(
    weights="fake", dtype="float32", num_layers=3, num_kv_heads=1, head_dim=4, block_size=8, windows=(20, 20, 0)
)
PROMPT_TOKENS = 203
LANDED_TOKENS = 101
"""Neither ends at a block's border."""
ANSWER_TOKENS = 40


class Arrivals:
    """A batch of eight prompts whose KV is in the arena, but for the lost ones' rows past what landed."""

    def __init__(self, layout: KVLayout, num_lost: int, *, landed: int = LANDED_TOKENS) -> None:
        rng = random.Random(num_lost)
        self.layout = layout
        self.shape = uniform_shape(layout, NUM_REQUESTS * _num_blocks())
        self.arena = memoryview(bytearray(b"\xff") * self.shape.arena_bytes)
        self.engine = FakeEngine(self.shape, self.arena)
        self.prompts = [[rng.randrange(256) for _ in range(PROMPT_TOKENS)] for _ in range(NUM_REQUESTS)]
        lost = set(rng.sample(range(NUM_REQUESTS), num_lost))
        self.landed = landed
        self.sequences = [self._arrived(number, landed if number in lost else None) for number in range(NUM_REQUESTS)]
        self.lost = [self.sequences[number] for number in sorted(lost)]
        self.ready = [sequence for sequence in self.sequences if sequence not in self.lost]

    def answers(self) -> list[list[int]]:
        """What the sequences have said, with the token that came with the KV."""
        return [sequence.token_ids[PROMPT_TOKENS:] for sequence in self.sequences]

    def expected(self) -> list[list[int]]:
        return [fake_answer(self.layout, prompt, _greedy(ANSWER_TOKENS)) for prompt in self.prompts]

    def _arrived(self, number: int, landed: int | None) -> Sequence:
        """Compute the prompt as a prefill worker does; then drop all but `landed` tokens of its KV."""
        table = BlockTable((Segment(number * _num_blocks(), _num_blocks()),))
        sequence = Sequence(
            request_id=RequestId(f"r{number}"),
            number=number,
            token_ids=list(self.prompts[number]),
            num_prompt_tokens=PROMPT_TOKENS,
            sampling=_greedy(ANSWER_TOKENS),
            tables=(table,) * len(self.layout.groups),
            max_local_tokens=1,
        )
        batch = Batch(64)
        batch.add(sequence)
        while items := batch.plan():
            batch.commit(items, self.engine.compute(items), 0, 0)
        assert sequence.num_computed_tokens == PROMPT_TOKENS and sequence.index == 1
        sequence.max_local_tokens = None
        if landed is not None:
            sequence.num_computed_tokens = landed
            self._drop(table, landed)
        return sequence

    def _drop(self, table: BlockTable, start: int) -> None:
        for layer in range(self.layout.num_layers):
            for slot, count in slot_spans(table, self.layout.block_size, start, PROMPT_TOKENS):
                for key_or_value in (KEY, VALUE):
                    at = self.shape.offset(layer, key_or_value, slot)
                    self.arena[at : at + count * self.layout.token_bytes] = b"\xff" * (count * self.layout.token_bytes)


def _num_blocks() -> int:
    return num_blocks_for(PROMPT_TOKENS + ANSWER_TOKENS, FULL.block_size)


def _greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0)


@pytest.mark.parametrize("layout", [FULL, WINDOWED], ids=["full", "windowed"])
@pytest.mark.parametrize("token_budget", [16, 33, 64, 512])
@pytest.mark.parametrize("num_lost", NUMBERS_LOST)
def test_ready_sequences_decode_in_every_step(layout: KVLayout, token_budget: int, num_lost: int) -> None:
    """While lost KV is computed each ready sequence gets exactly one token a step, and a step keeps to its budget."""
    arrivals = Arrivals(layout, num_lost)
    batch = Batch(token_budget)
    for sequence in arrivals.sequences:
        batch.add(sequence)
    computed = {sequence.request_id: 0 for sequence in arrivals.lost}
    num_steps_with_lost = 0
    while items := batch.plan():
        assert sum(item.num_tokens for item in items) <= token_budget
        waiting = [sequence for sequence in arrivals.lost if sequence.num_uncomputed_tokens > 1]
        running = [sequence for sequence in arrivals.ready if sequence.index < ANSWER_TOKENS]
        for item in items:
            if item.sequence in waiting:
                assert item.start >= LANDED_TOKENS, "what landed is not computed again"
                computed[item.sequence.request_id] += item.num_tokens
        if waiting:
            num_steps_with_lost += 1
            assert any(item.sequence in waiting for item in items), "what was lost makes progress in every step"
        result = batch.commit(items, arrivals.engine.compute(items), 0, 0)
        batch.check_integrity()
        sampled = [token.number for token in result.sampled]
        for sequence in running:
            assert sampled.count(sequence.number) == 1, "a ready sequence waits for no more than this step"
    missing = PROMPT_TOKENS + 1 - LANDED_TOKENS
    assert all(missing - 1 <= count <= missing for count in computed.values()), "only what is missing is computed"
    assert (num_steps_with_lost > 0) == (num_lost > 0)
    assert arrivals.answers() == arrivals.expected()


@pytest.mark.parametrize("num_lost", [1, 4, 8])
def test_lost_kv_is_computed_in_as_few_steps_as_the_budget_allows(num_lost: int) -> None:
    """The room that ready sequences leave is filled in every step: lost ones wait for nothing but their own tokens."""
    token_budget = 64
    arrivals = Arrivals(FULL, num_lost)
    batch = Batch(token_budget)
    for sequence in arrivals.sequences:
        batch.add(sequence)
    while any(sequence.num_uncomputed_tokens > 1 for sequence in arrivals.lost):
        num_decodes = len(batch) - sum(sequence.num_uncomputed_tokens > 1 for sequence in arrivals.lost)
        wanted = num_decodes + num_uncomputed(arrivals.sequences)
        items = batch.plan()
        assert sum(item.num_tokens for item in items) == min(token_budget, wanted)
        batch.commit(items, arrivals.engine.compute(items), 0, 0)


def test_a_prefix_that_did_not_land_gives_another_answer() -> None:
    """The engine notices: counting tokens as landed that were lost is no quiet success."""
    arrivals = Arrivals(FULL, 1)
    lost = arrivals.lost[0]
    lost.num_computed_tokens = LANDED_TOKENS + 1
    batch = Batch(64)
    batch.add(lost)
    while items := batch.plan():
        batch.commit(items, arrivals.engine.compute(items), 0, 0)
    assert lost.token_ids[PROMPT_TOKENS:] != arrivals.expected()[arrivals.sequences.index(lost)]


TERMS = Terms(prompt_tokens=PROMPT_TOKENS, landed_tokens=LANDED_TOKENS, num_tokens=ANSWER_TOKENS, token_budget=64)


@pytest.fixture(scope="module")
def bench() -> LossBench:
    """The benchmark's own batches, on the fake engine."""
    rng = random.Random(7)
    prompts = [[rng.randrange(256) for _ in range(PROMPT_TOKENS)] for _ in range(NUM_REQUESTS)]
    shape = arena_shape(FULL, TERMS)
    arena = memoryview(bytearray(shape.arena_bytes))
    made = LossBench(FakeEngine(shape, arena), arena, prompts, TERMS)
    sampling = SamplingParams(max_tokens=1 + ANSWER_TOKENS, temperature=0.0)
    assert made.expected == {n: fake_answer(FULL, prompt, sampling)[1:] for n, prompt in enumerate(prompts)}
    return made


@pytest.mark.parametrize("num_lost", NUMBERS_LOST)
@pytest.mark.parametrize("way", WAYS)
def test_the_benchmark_s_ways(bench: LossBench, way: Way, num_lost: int) -> None:
    """Each way gives the right answers; they differ in what is computed, and in whom they make wait."""
    lost = lost_requests(num_lost, repeat=3)
    outcome = bench.run(way, lost)
    assert outcome.tokens == bench.expected
    per_request = {"ours": PROMPT_TOKENS - LANDED_TOKENS, "recompute": PROMPT_TOKENS, "naive": 0}[way]
    whole_batch = NUM_REQUESTS * PROMPT_TOKENS if way == "naive" and lost else 0
    assert outcome.num_recomputed_tokens == num_lost * per_request + whole_batch
    samples = Samples()
    samples.add(outcome, lost, bench.expected)
    assert (len(samples.lost_ttft_ms), len(samples.ready_ttft_ms)) == (num_lost, NUM_REQUESTS - num_lost)
    assert samples.num_differing == 0
    if not samples.ready_steps:
        return
    num_recomputing = -(-NUM_REQUESTS * PROMPT_TOKENS // TERMS.token_budget)
    assert max(samples.ready_steps) == (1 + num_recomputing if whole_batch else 1)


def test_other_requests_lose_in_each_repeat() -> None:
    assert {number for repeat in range(NUM_REQUESTS) for number in lost_requests(1, repeat)} == set(range(NUM_REQUESTS))
    assert all(len(lost_requests(count, repeat)) == count for count in NUMBERS_LOST for repeat in range(20))
