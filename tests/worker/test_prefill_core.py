"""The prefill worker's decisions, step by step."""

import msgspec
import pytest

from schemas.handoff import HandoffAborted, KVReleased
from schemas.ids import HandoffId, WorkerId
from schemas.kv import LeaseEnd
from schemas.logprobs import TokenLogprob, pack_logprobs
from schemas.request import AttemptEnd, OtherEnd, RefusalReason, Refused, RunAttempt
from schemas.worker import LeftReason, WorkerLeft
from services.holder.core.actions import (
    Action,
    AttemptEnded,
    CloseLease,
    Emit,
    FinishLease,
    Offer,
    Publish,
    StartRead,
    StopRead,
    Submit,
    Withdraw,
)
from services.holder.core.attempt import KVRead
from services.holder.core.events import Event, SequenceFailed, SequenceRemoved
from services.holder.core.leases import LeaseTable
from services.times import Times
from services.worker.core import AttemptCore
from tests.worker import worker_cases as case
from tests.worker.worker_cases import one

UNKNOWN_AFTER_MS = Times().prefill.unknown_after_ms


class Bench:
    """A core with its pool, which is checked after every event."""

    def __init__(self, *, num_blocks: int = 8, max_queued: int = 4, whole_blocks: bool = False) -> None:
        self.cache, self.leases = case.block_cache(num_blocks, whole_blocks=whole_blocks), LeaseTable()
        limits = case.limits(case.PREFILL, num_blocks=num_blocks, max_queued=max_queued)
        self.core = AttemptCore(limits, self.cache, self.leases)

    def run(self, request: RunAttempt, now_ms: int = 0) -> list[Action]:
        return self.checked(case.run(self.core, request, now_ms))

    def run_ready(self, request: RunAttempt, now_ms: int = 0) -> list[Action]:
        """Run a prompt whose decode worker has said that it has room."""
        self.hear(case.reserved(int(request.request_id[1:])), now_ms)
        return self.run(request, now_ms)

    def refused(self, request: RunAttempt, now_ms: int = 0) -> Refused:
        reply, actions = case.ask(self.core, request, now_ms)
        assert isinstance(reply, Refused) and not actions
        return reply

    def hear(self, event: Event, now_ms: int = 0) -> list[Action]:
        return self.checked(case.hear(self.core, event, now_ms))

    def tick(self, now_ms: int) -> list[Action]:
        return self.checked(case.tick(self.core, now_ms))

    def checked(self, actions: list[Action]) -> list[Action]:
        case.check_blocks(self.cache, self.leases, self.core)
        return actions

    def computed(self, submit: Submit, finish: None = None) -> list[Action]:
        step = case.sampled(submit.sequence, 0, local_end=True)
        return self.hear(step, 10)

    def assert_empty(self) -> None:
        assert (self.cache.num_free, len(self.leases), len(self.core.records)) == (self.cache.num_blocks, 0, 0)


def test_the_engine_hears_whose_request_it_is() -> None:
    """It may keep KV of its own, which no other tenant gets."""
    submit = one(Bench().run(msgspec.structs.replace(case.run_prefill(), tenant="a")), Submit)
    assert submit.sequence.tenant == "a"


def test_a_hand_over_from_acceptance_to_release() -> None:
    bench = Bench()
    submit = one(bench.run(case.run_prefill()), Submit)
    assert submit.lease is not None and submit.sequence.max_local_tokens == 1
    assert isinstance(one(bench.hear(case.reserved(), 0), Offer), Offer)
    actions = bench.computed(submit)
    assert [type(action) for action in actions] == [Emit, FinishLease]  # token 0 goes out before anything waits
    assert one(actions, FinishLease).first_token.token_id == 9
    assert bench.leases.num_leased_blocks == 2
    actions = bench.hear(case.landed(), 20)
    assert one(actions, CloseLease).lease.end is LeaseEnd.LANDED
    assert isinstance(one(actions, Publish).message, KVReleased)
    bench.assert_empty()


@pytest.mark.parametrize(("num_tokens", "num_padded"), [(1, 4), (6, 8), (8, 8), (9, 12)])
def test_a_hand_over_in_whole_blocks_ends_at_a_border(num_tokens: int, num_padded: int) -> None:
    """The lease is on its last block too, and the engine announces that with the prompt's end. No token is added."""
    bench = Bench(whole_blocks=True)
    bench.hear(case.reserved(), 0)
    actions = bench.run(case.run_prefill(num_tokens=num_tokens))
    lease, sequence = one(actions, Offer).lease, one(actions, Submit).sequence
    assert (lease.num_tokens, lease.progress.num_tokens) == (num_padded, num_padded)
    assert lease.num_blocks * 4 == num_padded, "its tables have all of it, and no more"
    assert len(case.tokens_of(sequence)) == sequence.num_prompt_tokens == num_tokens
    finished = one(bench.computed(one(actions, Submit)), FinishLease).lease
    finished.progress.advance(0, num_padded)
    finished.progress.complete()
    bench.hear(case.landed(), 20)
    bench.assert_empty()


def test_what_is_there_when_a_lease_in_whole_blocks_begins_is_whole_blocks() -> None:
    bench = Bench(num_blocks=16, whole_blocks=True)
    case.keep(bench.cache, 8)
    actions = bench.run(case.run_prefill(num_tokens=18, sources=(case.source("d9", 0, 9),)))
    actions = bench.hear(case.brings(one(actions, StartRead).read, 16, 1, "tcp", is_whole=True), 1)
    submit = one(actions, Submit)
    assert submit.lease is not None and submit.lease.num_tokens == 20
    assert submit.sequence.num_computed_tokens == 16
    report = one(bench.computed(submit), Emit).tokens.report
    assert report is not None
    assert (report.cached_tokens, report.transferred_tokens, report.recomputed_tokens) == (8, 8, 2)


def test_a_hand_over_in_whole_blocks_that_is_cancelled_leaves_nothing() -> None:
    bench = Bench(whole_blocks=True)
    bench.run(case.run_prefill())
    actions = bench.hear(case.cancel(), 1)
    assert one(actions, CloseLease).lease.end is LeaseEnd.CANCELLED
    bench.hear(SequenceRemoved(("r1", 1)), 2)
    bench.assert_empty()


def test_a_reservation_that_is_heard_first_is_offered_at_the_start() -> None:
    bench = Bench()
    assert bench.hear(case.reserved(), 0) == []
    assert [type(a) for a in bench.run(case.run_prefill())] == [Offer, Submit]
    assert bench.hear(case.reserved(), 0) == []  # heard twice, offered once


def test_a_reservation_for_what_nobody_knows_is_refused_in_the_end() -> None:
    """Of a predecessor's hand-over, or where its request was lost: the reader must not wait for it."""
    bench = Bench()
    assert bench.hear(case.reserved(), 0) == []
    assert bench.hear(case.reserved(), UNKNOWN_AFTER_MS - 1) == []
    told = one(bench.hear(case.reserved(), UNKNOWN_AFTER_MS), Publish)
    assert isinstance(told, Publish) and isinstance(told.message, HandoffAborted)
    assert told.message.handoff_id == case.reserved().handoff_id


def test_without_a_hand_over_the_worker_goes_on_decoding() -> None:
    bench = Bench()
    submit = one(bench.run(case.run_prefill(split=False)), Submit)
    assert submit.lease is None and submit.sequence.max_local_tokens is None
    assert sum(s.num_blocks for s in submit.sequence.tables[0].segments) == 3  # 6 + 5 - 1 tokens in blocks of 4
    assert one(bench.hear(case.sampled(submit.sequence, 0), 1), Emit).tokens.index == 0
    step = case.sampled(submit.sequence, 1, finish="stop", local_end=True)
    assert one(bench.hear(step, 2), Emit).tokens.finish_reason == "stop"
    bench.assert_empty()


def test_runs_wait_in_order_for_blocks() -> None:
    bench = Bench(num_blocks=3)
    first = one(bench.run_ready(case.run_prefill(1)), Submit)
    assert [type(action) for action in bench.run_ready(case.run_prefill(2, first=50))] == []
    assert bench.run_ready(case.run_prefill(3, num_tokens=2)) == []
    assert bench.core.num_queued == 2  # the third would fit, and waits for the second
    bench.computed(first)
    actions = bench.hear(case.landed(1), 20)
    assert [a.sequence.request_id for a in actions if isinstance(a, Submit)] == ["r2", "r3"]


def test_a_prompt_whose_reader_has_room_is_begun_first() -> None:
    bench = Bench(num_blocks=4)
    first = one(bench.run_ready(case.run_prefill(1)), Submit)
    assert isinstance(one(bench.run(case.run_prefill(2, first=50)), Submit), Submit)
    assert bench.run(case.run_prefill(3, first=60)) == [] and bench.run_ready(case.run_prefill(4, first=70)) == []
    bench.computed(first)
    actions = bench.hear(case.landed(1), 20)
    assert [a.sequence.request_id for a in actions if isinstance(a, Submit)] == ["r4"]


def test_prompts_run_ahead_of_their_readers_with_half_of_the_blocks() -> None:
    bench = Bench(num_blocks=8)
    ahead = [one(bench.run(case.run_prefill(number, first=100 * number)), Submit) for number in (1, 2)]
    assert bench.run(case.run_prefill(3, first=300)) == []
    for submit in ahead:
        bench.hear(case.sampled(submit.sequence, 0, local_end=True), 10)
    assert bench.tick(1_000) == [], "they wait for their readers, and keep what they have"
    actions = bench.hear(case.reserved(2), 1_010)
    assert isinstance(one(actions, Offer), Offer)
    assert one(actions, Submit).sequence.request_id == "r3", "there is one less that runs ahead"


def test_a_prompt_of_more_than_half_the_blocks_is_begun_once_its_reader_has_room() -> None:
    bench = Bench(num_blocks=3)
    assert bench.run(case.run_prefill()) == []
    assert {type(action) for action in bench.hear(case.reserved(), 1)} == {Submit, Offer}


def test_a_full_queue_refuses() -> None:
    bench = Bench(num_blocks=3, max_queued=1)
    bench.run_ready(case.run_prefill(1))
    bench.run(case.run_prefill(2))
    assert bench.refused(case.run_prefill(3)).reason == RefusalReason.OVERLOADED


@pytest.mark.parametrize(
    ("request_", "now_ms", "reason"),
    [
        (case.run_prefill(), case.DEADLINE_MS, RefusalReason.DEADLINE),
        (case.run_prefill(num_tokens=0), 0, RefusalReason.INVALID),
        (case.run_prefill(max_tokens=0), 0, RefusalReason.INVALID),
        (case.run_prefill(num_tokens=40), 0, RefusalReason.TOO_LONG),
        (case.run_prefill(num_tokens=2000), 0, RefusalReason.INVALID),
        (msgspec.structs.replace(case.run_prefill(), tenant="t" * 3_000), 0, RefusalReason.INVALID),
    ],
)
def test_what_cannot_be_served_is_refused(request_: RunAttempt, now_ms: int, reason: str) -> None:
    bench = Bench()
    assert bench.refused(request_, now_ms).reason == reason
    bench.assert_empty()


def test_a_repeated_message_is_accepted_once() -> None:
    bench = Bench()
    bench.run(case.run_prefill())
    assert bench.run(case.run_prefill()) == []
    assert len(bench.core.records) == 1


def test_cancelling_a_queued_run_tells_the_target() -> None:
    bench = Bench(num_blocks=2)
    first = one(bench.run_ready(case.run_prefill(1)), Submit)
    bench.run(case.run_prefill(2))
    assert isinstance(one(bench.hear(case.cancel(2), 5), Publish).message, HandoffAborted)
    bench.computed(first)
    bench.hear(case.landed(1), 6)
    bench.assert_empty()


def test_blocks_of_a_cancelled_run_wait_for_the_engine() -> None:
    bench = Bench()
    submit = one(bench.run(case.run_prefill()), Submit)
    actions = bench.hear(case.cancel(), 5)
    assert {type(a) for a in actions} == {CloseLease, Publish, Withdraw}
    assert bench.cache.num_free < bench.cache.num_blocks
    assert bench.hear(case.cancel(), 5) == []  # idempotent
    bench.hear(SequenceRemoved(("r1", 1)), 6)
    bench.assert_empty()
    assert bench.hear(case.sampled(submit.sequence, 0, local_end=True), 7) == []


def test_a_run_that_ends_while_being_withdrawn_is_forgotten() -> None:
    bench = Bench()
    submit = one(bench.run(case.run_prefill()), Submit)
    bench.hear(case.cancel(), 5)
    assert bench.computed(submit) == []
    bench.assert_empty()


def test_an_abort_by_the_reader_ends_lease_and_run() -> None:
    bench = Bench()
    submit = one(bench.run(case.run_prefill()), Submit)
    bench.computed(submit)
    lease = one(bench.hear(case.aborted(), 5), CloseLease).lease
    assert (lease.end, lease.outcome) == (LeaseEnd.CANCELLED, "gave up")
    assert bench.hear(case.aborted(), 5) == []
    bench.assert_empty()


@pytest.mark.parametrize(
    ("end", "lease_end"),
    [
        (AttemptEnd.COMPLETE, LeaseEnd.UNNEEDED),
        (AttemptEnd.CANCELLED, LeaseEnd.CANCELLED),
        (AttemptEnd.DEADLINE, LeaseEnd.DEADLINE),
        (AttemptEnd.FAILED, LeaseEnd.CANCELLED),
    ],
)
@pytest.mark.parametrize("who", ["gateway", "reader"])
def test_why_an_attempt_ends_is_why_its_lease_does(who: str, end: AttemptEnd, lease_end: LeaseEnd) -> None:
    bench = Bench()
    bench.computed(one(bench.run(case.run_prefill()), Submit))
    message = case.cancel() if who == "gateway" else case.aborted()
    actions = bench.checked(case.decide(bench.core, msgspec.structs.replace(message, end=end), 20))
    lease = one(actions, CloseLease).lease
    assert lease.end is lease_end and lease.end.is_good == (end is AttemptEnd.COMPLETE)
    ended = one(actions, AttemptEnded).attempt
    assert (ended.end, ended.outcome) == (end, lease.outcome)
    bench.assert_empty()


def test_a_reader_that_left_ends_its_leases() -> None:
    bench = Bench()
    bench.computed(one(bench.run(case.run_prefill()), Submit))
    left = WorkerLeft(worker_id=case.DECODE, incarnation="a", reason=LeftReason.SILENT)
    actions = bench.hear(left, 5)
    assert isinstance(one(actions, CloseLease), CloseLease)
    assert isinstance(one(actions, Publish).message, HandoffAborted)  # it may live after all, and computes by itself
    bench.assert_empty()


def test_a_lease_waits_for_a_decode_worker_that_has_no_room_yet() -> None:
    bench = Bench()
    bench.computed(one(bench.run(case.run_prefill()), Submit))
    for now_ms in range(500, 20_000, 500):
        assert bench.tick(now_ms) == []
    assert isinstance(one(bench.hear(case.reserved(), 0), Offer), Offer)


def test_a_lease_is_renewed_while_computing_and_expires_when_the_reader_is_silent() -> None:
    bench = Bench()
    submit = one(bench.run(case.run_prefill()), Submit)
    bench.hear(case.reserved(), 0)
    for now_ms in range(500, 5000, 500):
        assert bench.tick(now_ms) == []
    bench.hear(case.sampled(submit.sequence, 0, local_end=True), 5000)
    assert bench.tick(5900) == []
    actions = bench.tick(6001)
    lease = one(actions, CloseLease).lease
    assert (lease.end, lease.outcome) == (LeaseEnd.EXPIRED, "the lease expired")
    assert isinstance(one(actions, Publish).message, HandoffAborted)
    bench.assert_empty()


def test_a_deadline_fails_the_request_once() -> None:
    bench = Bench()
    bench.run(case.run_prefill(deadline_ms=1000))
    actions = bench.tick(1000)
    failure = one(actions, Emit).tokens.failure
    assert failure is not None and (failure.code, failure.retryable) == ("deadline", False)
    assert one(actions, CloseLease).lease.end is LeaseEnd.DEADLINE
    (attempt,) = bench.core.records.values()
    assert attempt.end is AttemptEnd.DEADLINE
    assert not [a for a in bench.tick(1100) if isinstance(a, Emit)]
    bench.hear(SequenceRemoved(("r1", 1)), 1200)
    bench.assert_empty()


def test_an_engine_failure_is_said_and_may_be_retried_elsewhere() -> None:
    bench = Bench()
    bench.run(case.run_prefill())
    actions = bench.hear(SequenceFailed(("r1", 1), "boom"), 5)
    failure = one(actions, Emit).tokens.failure
    assert failure is not None and (failure.code, failure.retryable) == ("engine_failed", True)
    bench.assert_empty()


def test_junk_is_passed_over() -> None:
    bench = Bench()
    assert bench.hear(case.landed(7), 0) == []
    assert bench.hear(case.aborted(7), 0) == []
    assert bench.hear(case.cancel(7), 0) == []
    assert bench.hear(SequenceRemoved(("r7", 1)), 0) == []
    for number in range(100):
        bench.hear(case.reserved(number), 0)
    bench.assert_empty()


def test_a_cancel_that_overtakes_its_request_holds() -> None:
    bench = Bench()
    assert bench.hear(case.cancel(), 0) == []
    assert bench.refused(case.run_prefill()).reason == RefusalReason.INVALID
    bench.assert_empty()


def test_one_hand_over_belongs_to_one_attempt() -> None:
    bench = Bench()
    bench.run(case.run_prefill(1))
    stolen = msgspec.structs.replace(case.run_prefill(2), downstream=case.run_prefill(1).downstream)
    assert bench.refused(stolen).reason == RefusalReason.INVALID


def test_a_queued_runs_reservation_is_not_pushed_out_by_strangers() -> None:
    bench = Bench(num_blocks=2)
    first = one(bench.run_ready(case.run_prefill(1)), Submit)
    bench.run(case.run_prefill(2))
    bench.hear(case.reserved(2), 0)
    for number in range(10, 100):
        bench.hear(case.reserved(number), 0)
    bench.computed(first)
    actions = bench.hear(case.aborted(1), 5)
    assert one(actions, Offer).attempt.key[0] == "r2"


def fetching(bench: Bench, *, num_tokens: int = 18, split: bool = True) -> KVRead:
    bench.hear(case.reserved(), 0)
    sources = (case.source("d0", 0, 2), case.source("p0", 0, 9), case.source("d7", 3, 1), case.source("s0", 1, 9))
    return one(bench.run(case.run_prefill(num_tokens=num_tokens, split=split, sources=sources)), StartRead).read


def test_what_is_cached_is_not_computed_and_what_others_hold_is_read() -> None:
    bench = Bench(num_blocks=16)
    case.keep(bench.cache, 4)
    first = fetching(bench)
    assert case.wanted(first) == ("d0", 1, 1)
    second = one(bench.hear(case.brings(first, 8, 1, "shm", is_whole=True), 1), StartRead).read
    assert case.wanted(second) == ("s0", 2, 2)  # not itself, not beyond a gap
    submit = one(bench.hear(case.brings(second, 12, 1, "tcp"), 2), Submit)
    assert submit.sequence.num_computed_tokens == 12 and submit.lease is not None
    report = one(bench.computed(submit), Emit).tokens.report
    assert report is not None and report.is_prefill
    assert (report.cached_tokens, case.by_source(report), report.recomputed_tokens) == (4, {"d0": 4, "s0": 4}, 6)


def test_the_offer_goes_out_while_others_are_still_read() -> None:
    bench = Bench(num_blocks=16)
    sources = (case.source("d0", 0, 2),)
    assert isinstance(one(bench.run(case.run_prefill(num_tokens=18, sources=sources)), StartRead), StartRead)
    assert isinstance(one(bench.hear(case.reserved(), 0), Offer), Offer)


def test_a_refused_lease_costs_a_recompute() -> None:
    bench = Bench()
    fetch = one(bench.run(case.run_prefill(sources=(case.source("d0", 0, 2),))), StartRead).read
    submit = one(bench.hear(case.brings(fetch, 0), 1), Submit)
    assert submit.sequence.num_computed_tokens == 0


def test_a_hit_is_never_a_whole_prompt() -> None:
    bench = Bench()
    case.keep(bench.cache, 8)
    submit = one(bench.run(case.run_prefill(num_tokens=8)), Submit)
    assert submit.sequence.num_computed_tokens == 4


def test_blocks_of_a_cancelled_fetch_wait_for_its_end() -> None:
    bench = Bench()
    fetch = fetching(bench)
    actions = bench.hear(case.cancel(), 1)
    assert {type(a) for a in actions} == {CloseLease, Publish, StopRead}
    assert bench.cache.num_free < bench.cache.num_blocks
    assert bench.hear(case.brings(fetch, 8), 2) == []
    bench.assert_empty()


def test_what_is_cancelled_awaits_nothing_more() -> None:
    bench = Bench()
    read = fetching(bench)
    attempt = bench.core.records[read.key]
    assert attempt.num_awaited_tokens == 18
    bench.hear(case.cancel(), 1)
    assert attempt.read is read and attempt.num_awaited_tokens == 0


def test_a_source_that_left_ends_its_fetch_only() -> None:
    bench = Bench()
    fetch = fetching(bench, split=False)
    left = WorkerLeft(worker_id=case.DECODE, incarnation="a", reason=LeftReason.SILENT)
    assert bench.hear(left, 1) == [StopRead(fetch)]
    assert one(bench.hear(case.brings(fetch, 4), 2), StartRead).read.holder == "s0"


def test_a_deadline_during_a_fetch_fails_the_request() -> None:
    bench = Bench()
    fetch = fetching(bench)
    actions = bench.tick(case.DEADLINE_MS)
    assert one(actions, Emit).tokens.failure is not None and one(actions, StopRead).read is fetch
    bench.hear(case.brings(fetch, 0), case.DEADLINE_MS + 1)
    bench.assert_empty()


def ahead(bench: Bench, *numbers: int, deadline_ms: int = case.DEADLINE_MS) -> None:
    """Prompts that are computed, and whose decode worker has no room."""
    for number in numbers:
        submit = one(bench.run(case.run_prefill(number, first=100 * number, deadline_ms=deadline_ms)), Submit)
        bench.hear(case.sampled(submit.sequence, 0, local_end=True), 0)


def test_in_a_stand_off_the_last_that_ran_ahead_makes_way() -> None:
    """The blocks that the third one lacks wait for room that may be kept for it."""
    bench = Bench()
    ahead(bench, 1, 2)
    assert bench.run(case.run_prefill(3, num_tokens=20), 10) == []
    assert bench.tick(900) == [], "nobody has room: time changes nothing"
    actions = bench.hear(case.reserved(3), 910)
    aborted = one(actions, Publish).message
    assert isinstance(aborted, HandoffAborted) and aborted.request_id == "r2"
    assert one(actions, Submit).sequence.request_id == "r3" and len(bench.leases) == 2


def test_nobody_makes_way_where_blocks_become_free_by_themselves() -> None:
    bench = Bench()
    ahead(bench, 1)
    running = one(bench.run_ready(case.run_prefill(2, first=200)), Submit)
    assert bench.run_ready(case.run_prefill(3, num_tokens=20), 10) == []
    bench.computed(running)
    assert bench.tick(900) == [], "it is being read"
    assert one(bench.hear(case.landed(2), 910), Submit).sequence.request_id == "r3"


def test_runs_that_make_way_while_others_end_are_ended_once() -> None:
    bench = Bench()
    ahead(bench, 1, 2)
    bench.run_ready(case.run_prefill(3, num_tokens=28))
    bench.hear(WorkerLeft(worker_id=case.DECODE, incarnation="a", reason=LeftReason.SILENT), 1_000)
    bench = Bench()
    ahead(bench, 1, 2, deadline_ms=1_000)
    assert bench.run(case.run_prefill(3, num_tokens=28), 10) == []
    bench.tick(1_000)
    assert one(bench.hear(case.reserved(3), 1_000), Submit).sequence.request_id == "r3"


def test_a_draining_worker_reads_from_nobody() -> None:
    bench = Bench(num_blocks=16)
    fetch = fetching(bench)
    bench.core.draining = True
    assert isinstance(one(bench.hear(case.brings(fetch, 8), 1), Submit), Submit)


@pytest.mark.parametrize(
    "change",
    [
        {"downstream": OtherEnd(worker_id=WorkerId("d" * 3000), handoff_id=HandoffId("h"))},
        {"downstream": OtherEnd(worker_id=case.DECODE, handoff_id=HandoffId("a.b"))},
        {"upstream": OtherEnd(worker_id=case.DECODE, handoff_id=HandoffId("h"))},
        {"gateway_id": ">"},
        {"request_id": ""},
        {"sources": (case.source("x y", 0, 1),)},
        {"sources": (case.source("d0", 0, 1),) * 17},
    ],
)
def test_ids_that_fit_no_subject_are_refused(change: dict[str, object]) -> None:
    bench = Bench()
    assert bench.refused(msgspec.structs.replace(case.run_prefill(), **change)).reason == RefusalReason.INVALID


def test_a_prompt_whose_logprobs_are_wanted_is_computed_whole() -> None:
    core = AttemptCore(case.limits(case.PREFILL), case.block_cache(), LeaseTable())
    asked = case.with_sampling(case.run_prefill(split=False, sources=(case.source("x", 0, 1),)), prompt_logprobs=2)
    sequence = case.one(case.ask(core, asked)[1], Submit).sequence
    assert sequence.wants_prompt_logprobs and sequence.num_computed_tokens == 0
    first = case.sampled(sequence, 0, prompt_logprobs=(TokenLogprob(-1.0),) * 5)
    emitted = case.one(case.decide(core, first, 1), Emit).tokens
    assert emitted.prompt_logprobs == pack_logprobs([TokenLogprob(-1.0)] * 5)
    assert case.one(case.decide(core, case.sampled(sequence, 1), 1), Emit).tokens.prompt_logprobs is None


def test_an_answer_that_goes_on_has_its_prompts_logprobs_already() -> None:
    core = AttemptCore(case.limits(case.PREFILL), case.block_cache(), LeaseTable())
    asked = msgspec.structs.replace(case.run_prefill(split=False), num_answered_tokens=1)
    sequence = case.one(case.ask(core, case.with_sampling(asked, prompt_logprobs=0))[1], Submit).sequence
    assert not sequence.wants_prompt_logprobs
