"""A worker that drains migrates what runs: when, with what word, and how long it then waits for readers."""

import msgspec
import pytest

from schemas.block import join_hashes
from schemas.handoff import HandoffAborted
from schemas.ids import RequestId, WorkerId
from schemas.kv import RequestLease
from schemas.request import RequestFailure, RequestTokens
from services.holder.core.actions import Action, CloseLease, Emit, Publish, StopRead, Submit, Withdraw
from services.holder.core.events import DrainBegun, DrainOver, SequenceRemoved
from services.holder.core.leases import Grant
from services.holder.core.lending import LendCore
from services.prefill.hand_over import FINISHED_TOKENS
from services.times import Times
from tests.worker import worker_cases as case
from tests.worker.test_survival_core import Bench, failures
from tests.worker.worker_cases import one, published
from tests.worker.worker_world import World

READERS_COME_MS = Times().worker.readers_come_ms

KEY = (RequestId("r1"), 1)


def stored(bench: Bench, num_blocks: int) -> None:
    """The shell has stored so many of the first attempt's blocks under their hashes."""
    attempt = bench.prefill.records.get(KEY) or bench.decode.records[KEY]
    hashes = attempt.hasher.hashes[:num_blocks]
    bench.cache.store(attempt.tables, hashes, attempt.num_stored_blocks, num_blocks * 4, 0, ended=True)
    attempt.num_stored_blocks = num_blocks


def said(actions: list[Action]) -> list[RequestFailure]:
    return [f for f in failures(actions) if f.code == "draining" and f.retryable]


def alone(bench: Bench) -> list[Action]:
    """One answer is decoded here, and has its first token."""
    actions = bench.run(case.run_prefill(num_tokens=8, split=False))
    case.hear(bench.prefill, case.sampled(one(actions, Submit).sequence, 0), 1)
    return actions


def test_an_answer_moves_once_the_engine_has_let_go_of_it_and_says_what_it_leaves() -> None:
    bench = Bench()
    sequence = one(alone(bench), Submit).sequence
    assert bench.checked(case.hear(bench.prefill, DrainBegun(), 5)) == [Withdraw(KEY)]
    token = one(bench.checked(case.hear(bench.prefill, case.sampled(sequence, 1), 6)), Emit).tokens
    assert token.index == 1, "the step that ran gives its token"
    stored(bench, 2)
    (failure,) = said(bench.checked(case.hear(bench.prefill, SequenceRemoved(KEY), 7)))
    assert failure.held_blocks == 2
    assert not bench.prefill.records and bench.leases.num_expected == 1
    assert bench.cache.num_free + bench.cache.num_cached == bench.cache.num_blocks


def test_an_answer_that_ends_in_the_step_under_way_is_not_moved() -> None:
    bench = Bench()
    sequence = one(alone(bench), Submit).sequence
    case.hear(bench.prefill, DrainBegun(), 5)
    actions = bench.checked(case.hear(bench.prefill, case.sampled(sequence, 1, finish="stop", local_end=True), 6))
    assert one(actions, Emit).tokens.finish_reason == "stop"
    assert case.hear(bench.prefill, SequenceRemoved(KEY), 7) == [] and bench.leases.num_expected == 0
    bench.assert_empty()


def test_an_answer_that_is_cancelled_while_it_moves_says_nothing_more() -> None:
    bench = Bench()
    alone(bench)
    case.hear(bench.prefill, DrainBegun(), 5)
    case.hear(bench.prefill, case.cancel(), 6)
    assert case.hear(bench.prefill, SequenceRemoved(KEY), 7) == [] and bench.leases.num_expected == 0
    bench.assert_empty()


def test_what_an_engine_does_not_let_go_of_in_time_is_handed_back_as_it_is() -> None:
    bench = Bench()
    alone(bench)
    case.hear(bench.prefill, DrainBegun(), 5)
    stored(bench, 1)
    (failure,) = said(bench.checked(case.hear(bench.prefill, DrainOver(), 600)))
    assert failure.held_blocks == 1 and bench.leases.num_expected == 1
    assert case.hear(bench.prefill, SequenceRemoved(KEY), 700) == []
    assert not bench.prefill.records


@pytest.mark.parametrize("stage", ["queued", "reserved", "receiving"])
def test_what_is_not_decoded_yet_moves_at_once(stage: str) -> None:
    bench = Bench(num_blocks=3)
    if stage == "queued":
        case.ask(bench.decode, case.reserve(2), 0)
    case.ask(bench.decode, case.reserve(1), 0)
    if stage == "receiving":
        case.hear(bench.decode, case.offered(), 0)
    actions = bench.checked(case.hear(bench.decode, DrainBegun(), 5))
    assert {f.held_blocks for f in said(actions)} == {0} and bench.leases.num_expected == 0
    assert bool([a for a in actions if isinstance(a, StopRead)]) == (stage == "receiving")
    if stage == "receiving":
        actions += bench.stopped("r1")
    assert set(published(actions)) == {HandoffAborted}
    bench.assert_empty()


@pytest.mark.parametrize("num_tokens", [6, FINISHED_TOKENS + 20])
def test_a_prompt_moves_unless_it_is_nearly_computed(num_tokens: int) -> None:
    bench = Bench(num_blocks=200)
    actions = bench.run(case.run_prefill(num_tokens=min(num_tokens, 90)))
    attempt = bench.prefill.records[KEY]
    attempt.num_prompt_tokens = num_tokens
    moved = bench.checked(case.hear(bench.prefill, DrainBegun(), 5))
    if num_tokens < FINISHED_TOKENS:
        assert moved == []
        case.hear(bench.prefill, case.reserved(), 6)
        bench.computed(actions)
        case.hear(bench.prefill, case.landed(), 20)
        bench.assert_empty()
        return
    assert moved == [Withdraw(KEY)]
    stored(bench, 5)
    ended = bench.checked(case.hear(bench.prefill, SequenceRemoved(KEY), 7))
    assert [f.held_blocks for f in said(ended)] == [5]
    assert published(ended) == [HandoffAborted] and one(ended, CloseLease).lease.end == "cancelled"
    assert len(bench.leases) == 0


def test_a_prefix_whose_reader_has_no_room_is_given_up_in_the_end() -> None:
    bench = Bench()
    bench.computed(bench.run(case.run_prefill()))
    assert case.hear(bench.prefill, DrainBegun(), 20) == []
    actions = bench.checked(case.hear(bench.prefill, DrainOver(), 600))
    assert published(actions) == [HandoffAborted] and said(actions) == []
    bench.assert_empty()


def test_a_worker_waits_for_those_who_go_on_until_they_have_asked_or_for_so_long() -> None:
    bench = Bench()
    lending = LendCore(case.limits(case.PREFILL), bench.cache, bench.leases)
    for number in (1, 2):
        bench.leases.expect(RequestId(f"r{number}"), READERS_COME_MS)
    alone(bench)
    stored(bench, 1)
    hashes = bench.prefill.records[KEY].hasher.hashes[:1]
    request = RequestLease(
        request_id=RequestId("r1"), attempt=2, deadline_ms=60_000, reader=WorkerId("d1"), fingerprint="f",
        first_block=0, block_hashes=join_hashes(hashes),
    )  # fmt: skip
    assert isinstance(lending.answer(request, 10), Grant)
    assert bench.leases.num_expected == 1
    case.tick(lending, READERS_COME_MS - 1)
    assert bench.leases.num_expected == 1
    case.tick(lending, READERS_COME_MS)
    assert bench.leases.num_expected == 0


def test_every_answer_of_a_worker_that_drains_goes_on_and_nothing_is_counted_twice() -> None:
    """Moved, finished and refused add up to what was asked, at any time."""
    world = World(40)
    for number in range(1, 6):
        world.bus.append(case.run_prefill(number, num_tokens=9, max_tokens=20, split=False))
    while world.bus:
        world.deliver(0)
    for _ in range(4):
        world.d.step(world.now_ms)
    world.d.handle(DrainBegun(), world.now_ms)
    world.check()
    for _ in range(3):
        world.d.step(world.now_ms)
        world.check()
    told: dict[str, list[RequestTokens]] = {}
    for tokens in world.d.emitted:
        told.setdefault(tokens.request_id, []).append(tokens)
    assert len(told) == 5
    for words in told.values():
        indices = [t.index for t in words if t.tokens]
        assert indices == list(range(len(indices))), "no token twice, none left out"
        failed = [t.failure for t in words if t.failure]
        assert len(failed) == 1 and words[-1].failure is failed[0], "the last word, and once"
        assert not indices or failed[0].held_blocks == (9 + len(indices) - 1) // 4
    assert world.d.leases.num_expected == sum(1 for w in told.values() if w[-1].failure and w[-1].failure.held_blocks)
    assert not world.d.core.records
    assert world.d.is_at_rest


def test_a_copy_of_what_a_worker_migrates_is_offered_before_it_is_told() -> None:
    """The order of words: copies, then where to read, so that a replica asks while the blocks are surely here."""
    bench = Bench()
    request = msgspec.structs.replace(case.run_prefill(num_tokens=8, split=False), replica=WorkerId("x0"))
    sequence = one(bench.run(request), Submit).sequence
    case.hear(bench.prefill, case.sampled(sequence, 0), 1)
    case.hear(bench.prefill, DrainBegun(), 5)
    stored(bench, 2)
    kinds = [type(a) for a in case.hear(bench.prefill, SequenceRemoved(KEY), 7) if isinstance(a, Publish | Emit)]
    assert kinds == [Publish, Emit]
