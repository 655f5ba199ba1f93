"""The decode worker's decisions, step by step."""

from typing import Any

import msgspec
import pytest

from schemas.handoff import BlocksReserved, FirstToken, HandoffAborted, HandoffMessage, KVLanded, KVStreaming
from schemas.kv import ReadEnd
from schemas.request import (
    AttemptAccepted,
    AttemptEnd,
    AttemptFailure,
    RefusalReason,
    Refused,
)
from schemas.worker import LeftReason, WorkerLeft
from services.holder.core.actions import Action, Emit, Publish, StartRead, StopRead, Submit, Withdraw
from services.holder.core.attempt import KVRead
from services.holder.core.content import ReadOutcome
from services.holder.core.events import DrainBegun, Event, ReadEnded, ReadStarted, SequenceFailed, SequenceRemoved
from services.holder.core.leases import LeaseTable
from services.worker.core import AttemptCore
from tests.worker import worker_cases as case
from tests.worker.worker_cases import one, published

FIRST = FirstToken(token_id=9)


class Bench:
    """A core with its pool."""

    def __init__(self, *, num_blocks: int = 8, max_queued: int = 4, whole_blocks: bool = False) -> None:
        self.cache = case.block_cache(num_blocks, whole_blocks=whole_blocks)
        self.core = AttemptCore(
            case.limits(case.DECODE, num_blocks=num_blocks, max_queued=max_queued), self.cache, LeaseTable()
        )

    def hear(self, event: Event, now_ms: int = 0) -> list[Action]:
        return case.hear(self.core, event, now_ms)

    def reading(self) -> KVRead:
        case.ask(self.core, case.reserve())
        return one(self.hear(case.offered()), StartRead).read

    @property
    def read(self) -> KVRead:
        """The read under way of the one attempt."""
        (attempt,) = self.core.records.values()
        assert attempt.read is not None
        return attempt.read

    def whole(self, first: FirstToken) -> list[Action]:
        """The hand-over lands."""
        return self.hear(ReadEnded(self.read, case.WHOLE, first_token=first))

    def broken(self, reason: str, *outcome: Any) -> list[Action]:
        """The hand-over breaks, after it has brought this."""
        return self.hear(ReadEnded(self.read, ReadOutcome(*outcome), ReadEnd.CLOSED, reason))

    def nobody_has_it(self, actions: list[Action]) -> list[Action]:
        """Let every read among the actions, and those that follow, come back with nothing; return the last actions."""
        while reads := [action.read for action in actions if isinstance(action, StartRead)]:
            actions = self.hear(case.brings(reads[0], 0), 1)
        return actions

    def assert_empty(self) -> None:
        case.check_blocks(self.cache, None, self.core)
        assert (self.cache.num_free, len(self.core.records), self.core.num_queued) == (self.cache.num_blocks, 0, 0)


def test_a_hand_over_from_reservation_to_the_last_token() -> None:
    bench = Bench()
    reply, actions = case.ask(bench.core, case.reserve(), 0)
    assert isinstance(reply, AttemptAccepted) and published(actions) == [BlocksReserved]
    read = one(bench.hear(case.offered()), StartRead).read
    assert sum(s.num_blocks for s in read.tables[0].segments) == 3  # 6 + 5 - 1 tokens in blocks of 4
    assert published(bench.hear(ReadStarted(read, "shm"))) == [KVStreaming]
    actions = bench.whole(FIRST)
    assert published(actions) == [KVLanded]
    sequence = one(actions, Submit).sequence
    assert (case.tokens_of(sequence)[-1], sequence.num_computed_tokens, case.index_of(sequence)) == (9, 6, 1)
    emit = one(bench.hear(case.sampled(sequence, 1), 1), Emit)
    assert emit.tokens.report is not None and emit.tokens.report.transferred_tokens == 6
    emit = one(bench.hear(case.sampled(sequence, 2, finish="length", local_end=True), 2), Emit)
    assert (emit.tokens.finish_reason, emit.tokens.report) == ("length", None)
    bench.assert_empty()


def test_a_read_too_short_to_be_seen_starting_still_says_all_steps() -> None:
    bench = Bench()
    bench.reading()
    assert published(bench.whole(FIRST)) == [KVStreaming, KVLanded]


def test_an_answer_that_ended_with_token_0_is_not_decoded() -> None:
    bench = Bench()
    bench.reading()
    actions = bench.whole(FirstToken(token_id=0, finish_reason="stop"))
    assert published(actions) == [KVStreaming, KVLanded] and not [a for a in actions if isinstance(a, Submit)]
    bench.assert_empty()


@pytest.mark.parametrize(("landed", "kept"), [(0, 0), (4, 4), (5, 5), (6, 5)])
def test_what_did_not_land_is_computed_here(landed: int, kept: int) -> None:
    bench = Bench()
    bench.reading()
    actions = bench.broken("digest", landed, 10, "tcp")
    assert published(actions) == [HandoffAborted]
    sequence = one(bench.nobody_has_it(actions), Submit).sequence
    assert (len(case.tokens_of(sequence)), sequence.num_computed_tokens, case.index_of(sequence)) == (6, kept, 0)
    report = one(bench.hear(case.sampled(sequence, 0), 1), Emit).tokens.report
    assert report is not None and (report.transferred_tokens, report.recomputed_tokens) == (kept, 6 - kept)


def reading_whole_blocks(num_tokens: int) -> Bench:
    """Return a bench whose hand-over of so many tokens is under way, in whole blocks of 4."""
    bench = Bench(whole_blocks=True)
    case.ask(bench.core, case.reserve(num_tokens=num_tokens))
    one(bench.hear(case.offered(num_tokens=-(-num_tokens // 4) * 4)), StartRead)
    return bench


@pytest.mark.parametrize(("num_tokens", "num_padded"), [(5, 8), (6, 8), (8, 8)])
def test_what_fills_up_the_last_block_is_no_token(num_tokens: int, num_padded: int) -> None:
    bench = reading_whole_blocks(num_tokens)
    actions = bench.hear(
        ReadEnded(bench.read, ReadOutcome(num_padded, 100, "tcp", is_whole=True), first_token=FirstToken(token_id=9))
    )
    said = [action.message for action in actions if isinstance(action, Publish)]
    assert [message.num_tokens for message in said if isinstance(message, KVLanded)] == [num_tokens]
    sequence = one(actions, Submit).sequence
    assert (sequence.num_computed_tokens, case.tokens_of(sequence)[-1]) == (num_tokens, 9)
    assert case.index_of(sequence) == 1
    report = one(bench.hear(case.sampled(sequence, 1), 1), Emit).tokens.report
    assert report is not None and (report.transferred_tokens, report.recomputed_tokens) == (num_tokens, 0)


@pytest.mark.parametrize("num_tokens", [6, 8])
@pytest.mark.parametrize(("landed", "kept"), [(0, 0), (4, 4), (8, 4)])
def test_of_a_broken_hand_over_in_whole_blocks_whole_blocks_are_kept(num_tokens: int, landed: int, kept: int) -> None:
    """All may have landed but the end: the last token is computed again, and its block with it."""
    bench = reading_whole_blocks(num_tokens)
    submit = one(bench.nobody_has_it(bench.broken("cut", landed, 10, "tcp")), Submit)
    assert (len(case.tokens_of(submit.sequence)), submit.sequence.num_computed_tokens) == (num_tokens, kept)
    report = one(bench.hear(case.sampled(submit.sequence, 0), 1), Emit).tokens.report
    assert report is not None and (report.transferred_tokens, report.recomputed_tokens) == (kept, num_tokens - kept)


@pytest.mark.parametrize("landed", [0, 4, 8])
def test_a_hand_over_in_whole_blocks_that_is_cancelled_leaves_nothing(landed: int) -> None:
    bench = reading_whole_blocks(6)
    bench.hear(case.cancel(), 1)
    assert published(bench.broken("stopped", landed)) == [HandoffAborted]
    bench.assert_empty()


@pytest.mark.parametrize(
    ("offer", "whole_blocks"),
    [
        (case.offered(fingerprint="other"), False),
        (case.offered(num_tokens=5), False),
        (case.offered(num_tokens=8), False),
        (case.offered(num_tokens=6), True),
        (case.offered(num_tokens=12), True),
    ],
)
def test_foreign_kv_is_not_read(offer: case.KVOffered, whole_blocks: bool) -> None:
    bench = Bench(whole_blocks=whole_blocks)
    case.ask(bench.core, case.reserve(), 0)
    actions = bench.hear(offer)
    assert published(actions) == [HandoffAborted]
    assert one(bench.nobody_has_it(actions), Submit).sequence.num_computed_tokens == 0


def test_an_offer_without_a_reservation_is_declined() -> None:
    bench = Bench()
    assert published(bench.hear(case.offered(7))) == [HandoffAborted]
    bench.reading()
    assert bench.hear(case.offered()) == []  # repeated


def test_a_reservation_waits_for_blocks_and_is_answered_then() -> None:
    bench = Bench(num_blocks=3)
    case.ask(bench.core, case.reserve(1), 0)
    reply, actions = case.ask(bench.core, case.reserve(2, first=50), 0)
    assert isinstance(reply, AttemptAccepted) and actions == []
    assert bench.core.num_queued == 1
    actions = bench.hear(case.cancel(1), 1)
    said = [a.message for a in actions if isinstance(a, Publish)]
    assert {m.request_id for m in said if isinstance(m, HandoffMessage)} == {"r1", "r2"}
    assert published(actions) == [BlocksReserved, HandoffAborted] or published(actions) == [
        HandoffAborted,
        BlocksReserved,
    ]


def test_a_full_queue_and_a_passed_deadline_are_refused() -> None:
    bench = Bench(num_blocks=3, max_queued=1)
    for number in (1, 2):
        case.ask(bench.core, case.reserve(number), 0)
    for request, reason in (
        (case.reserve(3), RefusalReason.OVERLOADED),
        (case.reserve(4, deadline_ms=0), RefusalReason.DEADLINE),
    ):
        reply, _ = case.ask(bench.core, request, 1)
        assert isinstance(reply, Refused) and reply.reason == reason


def test_blocks_of_a_cancelled_read_wait_for_its_end() -> None:
    bench = Bench()
    bench.reading()
    assert [type(a) for a in bench.hear(case.cancel(), 1)] == [StopRead]
    assert bench.cache.num_free < bench.cache.num_blocks
    assert published(bench.broken("stopped", 2, 0, "")) == [HandoffAborted]
    bench.assert_empty()


def test_a_cancelled_read_that_lands_all_the_same_releases_the_source() -> None:
    bench = Bench()
    bench.reading()
    bench.hear(case.cancel(), 1)
    actions = bench.whole(FIRST)
    assert published(actions)[-1] is KVLanded and not [a for a in actions if isinstance(a, Submit)]
    bench.assert_empty()


def test_blocks_of_a_cancelled_answer_wait_for_the_engine() -> None:
    bench = Bench()
    bench.reading()
    bench.whole(FIRST)
    assert [type(a) for a in bench.hear(case.cancel(), 1)] == [Withdraw]
    assert bench.hear(case.cancel(), 1) == []
    bench.hear(SequenceRemoved(("r1", 1)), 2)
    bench.assert_empty()


def test_an_answer_that_ends_while_being_withdrawn_is_forgotten() -> None:
    bench = Bench()
    bench.reading()
    sequence = one(bench.whole(FIRST), Submit).sequence
    bench.hear(case.cancel(), 1)
    assert bench.hear(case.sampled(sequence, 1, finish="stop", local_end=True), 2) == []
    bench.assert_empty()


def test_losing_the_source_costs_a_recompute() -> None:
    left = WorkerLeft(worker_id=case.PREFILL, incarnation="a", reason=LeftReason.SILENT)
    waiting, reading, decoding = Bench(), Bench(), Bench()
    case.ask(waiting.core, case.reserve(), 0)
    assert one(waiting.hear(left, 1), Submit).sequence.num_computed_tokens == 0
    reading.reading()
    assert [type(a) for a in reading.hear(left, 1)] == [StopRead]
    decoding.reading()
    decoding.whole(FIRST)
    assert decoding.hear(left, 1) == []
    assert decoding.hear(case.aborted()) == []


def test_a_deadline_fails_the_request_once() -> None:
    bench = Bench()
    case.ask(bench.core, case.reserve(deadline_ms=1000), 0)
    actions = case.tick(bench.core, 1000)
    failure = one(actions, Emit).tokens.failure
    assert failure is not None and failure.code == "deadline"
    aborted = one(actions, Publish).message
    assert isinstance(aborted, HandoffAborted) and aborted.end is AttemptEnd.DEADLINE
    assert case.tick(bench.core, 1001) == []
    bench.assert_empty()


def test_an_engine_failure_is_said() -> None:
    bench = Bench()
    bench.reading()
    bench.whole(FIRST)
    failure = one(bench.hear(SequenceFailed(("r1", 1), "boom"), 5), Emit).tokens.failure
    assert failure is not None and failure.retryable
    bench.assert_empty()


def test_a_cancel_that_overtakes_its_reservation_holds() -> None:
    bench = Bench()
    assert bench.hear(case.cancel(), 0) == []
    reply, _ = case.ask(bench.core, case.reserve(), 1)
    assert isinstance(reply, Refused) and reply.reason == RefusalReason.INVALID
    bench.assert_empty()


def test_a_repeated_reservation_is_answered_again() -> None:
    bench = Bench()
    first, _ = case.ask(bench.core, case.reserve(), 0)
    again, actions = case.ask(bench.core, case.reserve(), 1)
    assert again == first and actions == []
    assert len(bench.core.records) == 1


def test_a_source_that_is_lost_while_waiting_for_blocks_costs_a_recompute_once_there_are_some() -> None:
    bench = Bench(num_blocks=3)
    case.ask(bench.core, case.reserve(1), 0)
    case.ask(bench.core, case.reserve(2), 0)
    assert (
        bench.hear(WorkerLeft(worker_id=case.PREFILL, incarnation="a", reason=LeftReason.SILENT), 1) != []
    )  # the first's
    actions = bench.hear(SequenceRemoved(("r1", 1)), 2)
    submit = one(actions, Submit)
    assert (submit.sequence.request_id, submit.sequence.num_computed_tokens) == ("r2", 0)


def test_a_worker_that_finishes_what_it_has_still_reads_what_it_has_reserved() -> None:
    bench = Bench()
    case.ask(bench.core, case.reserve(), 0)
    assert bench.hear(DrainBegun(finishes=True), 1) == []
    assert one(bench.hear(case.offered()), StartRead).read.first_token == 0
    reply, _ = case.ask(bench.core, case.reserve(2), 2)
    assert isinstance(reply, Refused) and reply.reason == RefusalReason.DRAINING


def test_one_hand_over_belongs_to_one_attempt() -> None:
    bench = Bench()
    case.ask(bench.core, case.reserve(1), 0)
    stolen = msgspec.structs.replace(case.reserve(2), upstream=case.reserve(1).upstream)
    reply, actions = case.ask(bench.core, stolen, 0)
    assert isinstance(reply, Refused) and reply.reason == RefusalReason.INVALID and actions == []
    assert len(bench.core.records) == 1


def test_only_what_is_not_cached_is_read() -> None:
    bench = Bench()
    case.keep(bench.cache, 4)
    read = bench.reading()
    assert read.first_token == 4
    sequence = one(bench.whole(FirstToken(token_id=9)), Submit).sequence
    assert sequence.num_computed_tokens == 6
    report = one(bench.hear(case.sampled(sequence, 1), 1), Emit).tokens.report
    assert report is not None and not report.is_prefill
    assert (report.cached_tokens, case.by_source(report), report.recomputed_tokens) == (4, {case.PREFILL: 2}, 0)


def test_a_prompt_that_is_cached_whole_still_reads_its_last_token() -> None:
    bench = Bench()
    case.keep(bench.cache, 8)
    case.ask(bench.core, case.reserve(num_tokens=8), 0)
    assert one(bench.hear(case.offered(num_tokens=8)), StartRead).read.first_token == 4


def test_the_rest_of_a_broken_read_is_asked_of_the_source_and_then_of_others() -> None:
    bench = Bench(num_blocks=16)
    sources = (case.source("p1", 0, 2), case.source("d9", 1, 9), case.source("d0", 0, 9))
    case.ask(bench.core, case.reserve(num_tokens=18, sources=sources), 0)
    bench.hear(case.offered(num_tokens=18))
    first = one(bench.broken("cut", 5, 10, "tcp"), StartRead).read
    assert case.wanted(first) == (case.PREFILL, 1, 3)
    second = one(bench.hear(case.brings(first, 8, 1, "tcp"), 1), StartRead).read  # p1 has nothing beyond 8
    assert case.wanted(second) == ("d9", 2, 2)
    submit = one(bench.hear(case.brings(second, 16, 1, "tcp", is_whole=True), 2), Submit)
    assert submit.sequence.num_computed_tokens == 16
    report = one(bench.hear(case.sampled(submit.sequence, 0), 3), Emit).tokens.report
    assert report is not None and case.by_source(report) == {case.PREFILL: 8, "d9": 8}
    assert report.cached_tokens + report.transferred_tokens + report.recomputed_tokens == 18


def test_a_source_that_has_left_is_not_asked() -> None:
    bench = Bench()
    case.ask(bench.core, case.reserve(), 0)
    left = WorkerLeft(worker_id=case.PREFILL, incarnation="a", reason=LeftReason.SILENT)
    actions = bench.hear(left, 1)
    assert published(actions) == [HandoffAborted] and one(actions, Submit).sequence.num_computed_tokens == 0


def test_blocks_of_a_cancelled_fetch_wait_for_its_end() -> None:
    bench = Bench()
    bench.reading()
    fetch = one(bench.broken("cut", 0), StartRead).read
    assert [type(a) for a in bench.hear(case.cancel(), 1)] == [StopRead]
    assert bench.cache.num_free < bench.cache.num_blocks
    assert bench.hear(case.brings(fetch, 4), 2) == []
    bench.assert_empty()


def test_a_reservation_gets_the_blocks_that_the_other_core_gives_back() -> None:
    bench, leases = Bench(), LeaseTable()
    alone = AttemptCore(case.limits(case.DECODE), bench.cache, leases)
    _, actions = case.ask(alone, case.run_prefill(1, num_tokens=20, split=False))
    assert isinstance(case.ask(bench.core, case.reserve(2, num_tokens=20), 0)[0], AttemptAccepted)
    end = case.sampled(one(actions, Submit).sequence, 0, finish="stop", local_end=True)
    case.decide(alone, end, 1)
    assert published(bench.hear(end, 1)) == [BlocksReserved]


def test_a_draining_worker_computes_what_it_cannot_read() -> None:
    bench = Bench()
    bench.reading()
    bench.core.draining = True
    assert isinstance(one(bench.broken("stopped", 0), Submit), Submit)


def test_without_its_source_a_prompt_whose_logprobs_are_wanted_needs_another_attempt() -> None:
    core = AttemptCore(case.limits(case.DECODE), case.block_cache(), LeaseTable())
    case.ask(core, case.with_sampling(case.reserve(), prompt_logprobs=2))
    actions = case.decide(core, case.aborted(), 1)
    failure = case.one(actions, Emit).tokens.failure
    assert failure is not None and failure.code is AttemptFailure.TRANSFER_FAILED and failure.retryable
    assert not core.records


@pytest.mark.parametrize(
    "sampling", [{"logit_bias": ((1000, 1.0),)}, {"allowed_token_ids": (-1,)}, {"bad_words": ((1, 2**40),)}]
)
def test_sampling_that_names_no_token_of_the_model_is_refused(sampling: dict[str, object]) -> None:
    core = AttemptCore(case.limits(case.DECODE), case.block_cache(), LeaseTable())
    reply, actions = case.ask(core, case.with_sampling(case.reserve(), **sampling))
    assert isinstance(reply, Refused) and reply.reason is RefusalReason.INVALID and not actions
