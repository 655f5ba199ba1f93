"""What both worker cores do when messages are lost, when they are told to leave, and when they are declared dead."""

import msgspec
import pytest

from schemas.block import hash_blocks, split_hashes
from schemas.handoff import BlocksReserved, FirstToken, HandoffAborted, KVLanded, KVOffered
from schemas.ids import LeaseId, RequestId, WorkerId
from schemas.kv import ReadEnd, RequestLease
from schemas.message import Message
from schemas.request import AttemptAccepted, RefusalReason, Refused, RequestFailure, RunAttempt
from services.holder.core.actions import (
    Action,
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
from services.holder.core.content import ReadOutcome
from services.holder.core.events import (
    AttemptUnwanted,
    DrainBegun,
    DrainOver,
    Event,
    Fenced,
    ReadEnded,
    SequenceFailed,
    SequenceRemoved,
    StreamEnded,
)
from services.holder.core.leases import LeaseTable
from services.times import Times
from services.worker.core import AttemptCore
from tests.worker import worker_cases as case
from tests.worker.worker_cases import one, published
from tests.worker.worker_world import World, token_at

LANDED_GRACE_MS = Times().prefill.landed_grace_ms
OFFER_AGAIN_MS = Times().prefill.offer_again_ms
RESERVED_AGAIN_MS = Times().decode.reserved_again_ms

LEASE = LeaseId("lease-r1-1")


class Bench:
    """One role's core with its blocks."""

    def __init__(self, num_blocks: int = 8) -> None:
        self.cache, self.leases = case.block_cache(num_blocks), LeaseTable()
        self.prefill = AttemptCore(case.limits(case.PREFILL, num_blocks=num_blocks), self.cache, self.leases)
        self.decode = AttemptCore(case.limits(case.DECODE, num_blocks=num_blocks), self.cache, self.leases)

    def run(self, request: RunAttempt, now_ms: int = 0) -> list[Action]:
        return self.checked(case.run(self.prefill, request, now_ms))

    def computed(self, actions: list[Action]) -> list[Action]:
        """The engine computes the prompt that is submitted in `actions`; the run hands over."""
        sequence = one(actions, Submit).sequence
        return self.checked(
            case.hear(self.prefill, case.sampled(sequence, case.index_of(sequence), local_end=True), 10)
        )

    def reading(self) -> KVRead:
        case.ask(self.decode, case.reserve())
        return one(self.checked(case.hear(self.decode, case.offered())), StartRead).read

    def read_of(self, request_id: str) -> KVRead:
        read = self.decode.records[(RequestId(request_id), 1)].read
        assert read is not None
        return read

    def whole(self, first: FirstToken) -> list[Action]:
        """The first request's hand-over lands."""
        return case.hear(self.decode, ReadEnded(self.read_of("r1"), case.WHOLE, first_token=first))

    def both(self, event: Event, now_ms: int) -> list[Action]:
        return case.hear(self.prefill, event, now_ms) + case.hear(self.decode, event, now_ms)

    def stopped(self, request_id: str) -> list[Action]:
        """A hand-over's read has been stopped."""
        return case.hear(self.decode, ReadEnded(self.read_of(request_id), ReadOutcome(0), ReadEnd.STOPPED))

    def checked(self, actions: list[Action]) -> list[Action]:
        case.check_blocks(self.cache, self.leases, self.prefill, self.decode)
        return actions

    def assert_empty(self) -> None:
        self.checked([])
        assert (self.cache.num_free, len(self.leases)) == (self.cache.num_blocks, 0)
        assert len(self.prefill.records) == len(self.decode.records) == 0


def failures(actions: list[Action]) -> list[RequestFailure]:
    return [a.tokens.failure for a in actions if isinstance(a, Emit) and a.tokens.failure is not None]


def resumed(request: RunAttempt, num_answered: int) -> RunAttempt:
    return msgspec.structs.replace(request, num_answered_tokens=num_answered)


# Answers that go on.


def test_a_resumed_prefill_samples_the_next_token_and_hands_over() -> None:
    bench = Bench()
    submit = one(bench.run(resumed(case.run_prefill(), 2)), Submit)
    assert (submit.sequence.num_prompt_tokens, len(case.tokens_of(submit.sequence))) == (4, 6)
    step = case.sampled(submit.sequence, 2, local_end=True)
    emit = one(bench.checked(case.hear(bench.prefill, step, 1)), Emit)
    report = emit.tokens.report
    assert emit.tokens.index == 2 and report is not None and report.recomputed_tokens == 6


def test_a_resumed_decode_goes_on_after_the_handed_over_token() -> None:
    bench = Bench()
    case.ask(bench.decode, msgspec.structs.replace(case.reserve(), num_answered_tokens=2), 0)
    read = one(case.hear(bench.decode, case.offered()), StartRead).read
    assert sum(s.num_blocks for s in read.tables[0].segments) == 2  # 6 + 5 - 2 - 1 = 8 tokens in blocks of 4
    sequence = one(bench.whole(FirstToken(token_id=9)), Submit).sequence
    assert (case.index_of(sequence), sequence.num_computed_tokens) == (3, 6)
    report = one(case.hear(bench.decode, case.sampled(sequence, 3), 1), Emit).tokens.report
    assert report is not None and report.transferred_tokens == 6


def test_a_resumed_answer_needs_room_for_what_is_left_of_it() -> None:
    bench = Bench(num_blocks=3)
    submit = one(bench.run(resumed(case.run_prefill(num_tokens=8, max_tokens=8, split=False), 3)), Submit)
    assert sum(s.num_blocks for s in submit.sequence.tables[0].segments) == 3  # 8 + 8 - 3 - 1 = 12 tokens
    assert isinstance(
        case.ask(bench.prefill, case.run_prefill(2, num_tokens=8, max_tokens=8, split=False), 0)[0], Refused
    )


@pytest.mark.parametrize("num_answered", [-1, 5, 6, 7])
def test_an_answer_that_leaves_nothing_to_do_is_refused(num_answered: int) -> None:
    bench = Bench()
    reply, _ = case.ask(bench.prefill, resumed(case.run_prefill(), num_answered), 0)
    assert isinstance(reply, Refused) and reply.reason == RefusalReason.INVALID
    reply, _ = case.ask(bench.decode, msgspec.structs.replace(case.reserve(), num_answered_tokens=num_answered), 0)
    assert isinstance(reply, Refused) and reply.reason == RefusalReason.INVALID
    bench.assert_empty()


def test_a_tenants_blocks_have_names_of_their_own_wherever_they_are_asked_for() -> None:
    bench = Bench()
    request = case.run_prefill(num_tokens=9, sources=(case.source("d0", 0, 2),))
    request = msgspec.structs.replace(request, tenant="a", replica=WorkerId("d5"))
    read = one(bench.run(request), StartRead).read
    assert isinstance(read.lease, RequestLease) and read.lease.tenant == "a"
    expected = hash_blocks(list(range(1, 10)), 4, model_fingerprint="f", tenant="a")
    assert split_hashes(read.lease.block_hashes) == expected
    attempt = one(case.hear(bench.prefill, case.brings(read, 0), 1), Submit).attempt
    assert attempt.request.tenant == "a"
    assert attempt.replica_offer is not None and attempt.replica_offer.replica == "d5"


# Lost messages.


def test_the_source_is_told_of_the_room_again_until_it_offers() -> None:
    bench = Bench()
    case.ask(bench.decode, case.reserve(), 0)
    times = [now for now in range(100, 1_700, 100) if published(bench.checked(case.tick(bench.decode, now)))]
    assert times == [100 + RESERVED_AGAIN_MS * n for n in (1, 2, 3)]
    case.hear(bench.decode, case.offered())
    assert case.tick(bench.decode, 5_000) == []


def test_who_says_again_that_there_is_room_is_offered_again_but_not_too_often() -> None:
    bench = Bench()
    bench.run(case.run_prefill())
    assert isinstance(one(case.hear(bench.prefill, case.reserved(), 0), Offer), Offer)
    assert case.tick(bench.prefill, 1_000) == []
    offers: list[int] = []
    for now in range(1_000, 2_000, 50):
        assert case.hear(bench.prefill, case.reserved(), 0) == []
        offers += [now for action in case.tick(bench.prefill, now) if isinstance(action, Offer)]
    assert offers == list(range(1_000, 2_000, OFFER_AGAIN_MS))


def test_who_waits_for_an_offer_that_will_not_come_is_told_so() -> None:
    bench = Bench()
    bench.run(case.run_prefill())
    case.hear(bench.prefill, case.cancel(), 1)  # the abort that this says is lost
    assert published(case.hear(bench.prefill, case.reserved(), 0)) == []  # still withdrawing: the lease is over
    case.hear(bench.prefill, SequenceRemoved(("r1", 1)), 2)
    assert published(case.hear(bench.prefill, case.reserved(), 0)) == [HandoffAborted]
    bench.assert_empty()


def test_a_lease_whose_stream_has_ended_waits_only_a_little_for_the_readers_word() -> None:
    bench = Bench()
    computing = bench.run(case.run_prefill())
    case.hear(bench.prefill, case.reserved(), 0)
    bench.computed(computing)
    (lease,) = bench.leases
    case.hear(bench.prefill, StreamEnded(lease, "cut"), 100)
    bench.leases.renew(lease, 100, 60_000)
    assert case.tick(bench.prefill, 100 + LANDED_GRACE_MS - 1) == []
    actions = bench.checked(case.tick(bench.prefill, 100 + LANDED_GRACE_MS))
    assert isinstance(one(actions, CloseLease), CloseLease) and published(actions) == [HandoffAborted]
    bench.assert_empty()


def test_a_reader_whose_stream_broke_early_and_who_says_nothing_ends_the_prefill() -> None:
    bench = Bench()
    bench.run(case.run_prefill())
    case.hear(bench.prefill, case.reserved(), 0)
    (lease,) = bench.leases
    case.hear(bench.prefill, StreamEnded(lease, "cut"), 100)
    actions = bench.checked(case.tick(bench.prefill, 100 + LANDED_GRACE_MS))
    assert {type(a) for a in actions} == {CloseLease, Publish, Withdraw}
    case.hear(bench.prefill, SequenceRemoved(("r1", 1)), 3_000)
    bench.assert_empty()


def test_a_repeated_message_is_answered_as_before_even_by_who_takes_nothing_new() -> None:
    bench = Bench()
    bench.run(case.run_prefill())
    case.ask(bench.decode, case.reserve(2), 0)
    case.hear(bench.prefill, DrainBegun(finishes=True), 1)
    case.hear(bench.decode, DrainBegun(finishes=True), 1)
    assert bench.run(case.run_prefill()) == []
    reply = case.ask(bench.decode, case.reserve(2), 1)[0]
    assert isinstance(reply, AttemptAccepted)


def test_a_message_that_comes_again_when_all_is_over_begins_nothing() -> None:
    bench = Bench()
    bench.computed(bench.run(case.run_prefill()))
    case.hear(bench.prefill, case.landed(), 20)
    assert isinstance(case.ask(bench.prefill, case.run_prefill(), 30)[0], Refused)
    case.ask(bench.decode, case.reserve(), 0)
    case.hear(bench.decode, case.cancel(), 1)
    assert isinstance(case.ask(bench.decode, case.reserve(), 2)[0], Refused)
    bench.assert_empty()


@pytest.mark.parametrize(
    ("lost", "nth"),
    [
        (Message, None),
        (RunAttempt, 0),
        (RunAttempt, 1),
        (BlocksReserved, 0),
        (KVOffered, 0),
        (KVLanded, 0),
        (HandoffAborted, 0),
    ],
)
@pytest.mark.parametrize("broken", [False, True])
def test_one_lost_message_costs_time_and_nothing_else(lost: type[Message], nth: int | None, broken: bool) -> None:
    """The gateway sends its own two messages again; the workers heal the rest by themselves."""
    world, num_heard = World(8), 0
    sent = [case.run_prefill(1), case.reserve(1)]
    world.bus += sent
    for round_ in range(200):
        while world.bus:
            is_meant = isinstance(world.bus[0], lost)
            num_heard += is_meant
            if is_meant and num_heard - 1 == nth:
                world.lose(0)
            else:
                world.deliver(0)
        for worker in (world.p, world.d):
            worker.step(world.now_ms)
            worker.end_fetch(0, 0, world.now_ms)
        world.end_read(0, whole=not broken)
        world.advance(50)
        world.check()
        if round_ == 20:
            world.bus += sent
    answered = {tokens.index for worker in (world.p, world.d) for tokens in worker.emitted if tokens.tokens}
    assert answered == set(range(5)), "all of the answer, from whom ever"
    assert not [t.failure for worker in (world.p, world.d) for t in worker.emitted if t.failure]
    assert world.p.is_at_rest and world.d.is_at_rest
    assert world.now_ms < case.DEADLINE_MS


# Leaving, and being declared dead.


def test_a_drain_sends_elsewhere_what_waits_and_finishes_the_rest() -> None:
    bench = Bench(num_blocks=2)
    case.hear(bench.prefill, case.reserved(1), 0)
    computing = bench.run(case.run_prefill(1))
    bench.run(case.run_prefill(2))
    actions = bench.checked(case.hear(bench.prefill, DrainBegun(), 5))
    assert [(f.code, f.retryable) for f in failures(actions)] == [("draining", True)]
    assert published(actions) == [HandoffAborted] and bench.prefill.num_queued == 0
    assert isinstance(one(bench.computed(computing), FinishLease), FinishLease)
    case.hear(bench.prefill, case.landed(1), 20)
    reply, _ = case.ask(bench.prefill, case.run_prefill(3), 21)
    assert isinstance(reply, Refused) and reply.reason == RefusalReason.DRAINING
    bench.assert_empty()


def test_a_reservation_that_waits_is_failed_by_a_drain() -> None:
    bench = Bench(num_blocks=3)
    case.ask(bench.decode, case.reserve(1), 0)
    assert isinstance(case.ask(bench.decode, case.reserve(2), 0)[0], AttemptAccepted)
    actions = bench.checked(case.hear(bench.decode, DrainBegun(finishes=True), 5))
    assert [f.code for f in failures(actions)] == ["draining"] and published(actions) == [HandoffAborted]
    assert bench.decode.wanted_by() == {("r1", 1): case.GATEWAY}


def test_at_a_drains_end_what_owes_tokens_goes_elsewhere_and_prefixes_stay_for_their_readers() -> None:
    bench = Bench(num_blocks=12)
    finished = bench.run(case.run_prefill(1))
    case.hear(bench.prefill, case.reserved(1), 0)
    bench.computed(finished)
    bench.run(case.run_prefill(2))
    case.ask(bench.decode, case.reserve(3), 0)
    actions = bench.checked(bench.both(DrainOver(), 20))
    assert [(f.code, f.retryable) for f in failures(actions)] == [("draining", True)] * 2
    assert [lease.lease_id for lease in bench.leases] == [LEASE]
    case.hear(bench.prefill, case.landed(1), 30)
    case.hear(bench.prefill, SequenceRemoved(("r2", 1)), 31)
    bench.assert_empty()


def test_a_fenced_worker_ends_all_and_tells_no_gateway() -> None:
    bench = Bench(num_blocks=7)
    bench.computed(bench.run(case.run_prefill(1)))
    case.hear(bench.prefill, case.reserved(2), 0)
    computing = one(bench.run(case.run_prefill(2)), Submit)
    case.ask(bench.decode, case.reserve(3), 0)
    assert isinstance(one(case.hear(bench.decode, case.offered(3)), StartRead), StartRead)
    bench.run(case.run_prefill(4, first=50))
    case.ask(bench.decode, case.reserve(5, first=50), 0)
    assert bench.prefill.num_queued == bench.decode.num_queued == 1
    actions = bench.checked(bench.both(Fenced("declared dead"), 20))
    assert not [a for a in actions if isinstance(a, Emit)] and len(bench.leases) == 0
    assert one(actions, Withdraw).key == ("r2", 1) and one(actions, StopRead).read.key == ("r3", 1)
    assert bench.prefill.wanted_by() == bench.decode.wanted_by() == {}
    assert bench.cache.num_free < bench.cache.num_blocks, "the engine and the read may still write"
    assert case.hear(bench.prefill, case.sampled(computing.sequence, 0, local_end=True), 21) == []
    bench.stopped("r3")
    bench.assert_empty()
    bench.run(case.run_prefill(6))  # it has joined again


def test_what_nobody_wants_any_more_ends_like_a_cancel() -> None:
    bench = Bench()
    bench.reading()
    submit = one(bench.run(case.run_prefill(2)), Submit)
    assert bench.decode.wanted_by() == {("r1", 1): case.GATEWAY}
    assert bench.prefill.wanted_by() == {("r2", 1): case.GATEWAY}
    assert (
        case.hear(bench.decode, AttemptUnwanted(("r2", 1)), 5) == []
        and case.hear(bench.prefill, AttemptUnwanted(("r9", 1)), 5) == []
    )
    assert [type(a) for a in bench.checked(case.hear(bench.decode, AttemptUnwanted(("r1", 1)), 5))] == [StopRead]
    assert isinstance(one(bench.checked(case.hear(bench.prefill, AttemptUnwanted(("r2", 1)), 5)), Withdraw), Withdraw)
    assert not bench.decode.wanted_by() and not bench.prefill.wanted_by()
    bench.stopped("r1")
    case.hear(bench.prefill, case.sampled(submit.sequence, 0, local_end=True), 6)
    bench.assert_empty()


def test_a_deadline_ends_what_waits_for_blocks_too() -> None:
    bench = Bench(num_blocks=3)
    case.ask(bench.decode, case.reserve(1), 0)
    case.ask(bench.decode, case.reserve(2, deadline_ms=1_000), 0)
    case.ask(bench.prefill, case.run_prefill(3, deadline_ms=1_000), 0)
    actions = bench.checked(case.tick(bench.decode, 1_000) + case.tick(bench.prefill, 1_000))
    assert [(f.code, f.retryable) for f in failures(actions)] == [("deadline", False)] * 2
    assert bench.decode.num_queued == bench.prefill.num_queued == 0


def test_an_end_is_said_once_even_when_the_engine_fails_after_it() -> None:
    bench = Bench()
    bench.run(case.run_prefill(1))
    case.hear(bench.prefill, case.cancel(1), 1)
    assert bench.checked(case.hear(bench.prefill, SequenceFailed(("r1", 1), "boom"), 2)) == []
    bench.reading()
    bench.whole(FirstToken(token_id=token_at(0)))
    case.hear(bench.decode, case.cancel(1), 3)
    assert bench.checked(case.hear(bench.decode, SequenceFailed(("r1", 1), "boom"), 4)) == []
    bench.assert_empty()
