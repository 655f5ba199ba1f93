"""What a worker offers to others, and what a worker or a store takes of it: events in, actions out."""

from functools import partial

import msgspec
import pytest

from dataplane.blocks.cache import BlockCache
from dataplane.blocks.layout import uniform_shape
from schemas import subjects
from schemas.block import BLOCK_HASH_BYTES, BlockHasher, hash_blocks, join_hashes, split_hashes
from schemas.ids import BlockHash, RequestId, WorkerId
from schemas.kv import EvictionCandidates, ReadEnd, ReplicateBlocks, RequestLease
from schemas.request import RefusalReason
from schemas.worker import LeftReason, WorkerLeft
from services.holder.core.actions import Action, NotTaken, Publish, StartRead, StopRead, Submit
from services.holder.core.attempt import KVRead
from services.holder.core.content import AttemptKey, ReadOutcome
from services.holder.core.copies import CopyCore, num_spare
from services.holder.core.events import CopyOffered, DrainBegun, Fenced, ReadEnded, SequenceFailed, SequenceRemoved
from services.holder.core.leases import LeaseTable
from services.holder.core.replica_offer import ReplicaOffer
from services.holder.limits import (
    MAX_COPY_BLOCKS,
    MAX_COPY_READS,
    MAX_COPY_REFUSALS,
    MAX_COPY_SOURCES,
    MAX_OFFERED_BLOCKS,
    MESSAGE_BLOCKS,
)
from services.times import Times
from services.worker.core import AttemptCore
from tests.worker import worker_cases as case

OFFER_INTERVAL_MS = Times().worker.offer_interval_ms
READ_WITHIN_MS = Times().worker.read_within_ms

BLOCK = 4
SOURCE, REPLICA = WorkerId("d9"), case.DECODE
KEY: AttemptKey = (RequestId("r1"), 1)


def hasher(num_tokens: int = 400) -> BlockHasher:
    made = BlockHasher(BLOCK, model_fingerprint="f")
    made.extend(range(num_tokens), num_tokens)
    return made


def offer_of(sequence: BlockHasher) -> ReplicaOffer:
    return ReplicaOffer(
        msgspec.structs.replace(case.run_prefill(), tenant="acme"), sequence, REPLICA, SOURCE, "f", Times().worker
    )


def offer(first_block: int = 0, num_blocks: int = 4, seed: int = 0) -> ReplicateBlocks:
    tokens = [seed, *range(1, (first_block + num_blocks) * BLOCK)]
    hashes = hash_blocks(tokens, BLOCK, model_fingerprint="f")
    return ReplicateBlocks(
        request_id=RequestId("r1"), attempt=1, deadline_ms=10_000, source=SOURCE, fingerprint="f",
        first_block=first_block, block_hashes=join_hashes(hashes[first_block:]),
    )  # fmt: skip


class Replica(CopyCore):
    """A worker's copies, with the cache that they are kept in."""

    def __init__(self, num_blocks: int = 40, max_reads: int = MAX_COPY_READS) -> None:
        self.cache = case.block_cache(num_blocks)
        limits = case.limits(REPLICA, num_blocks=num_blocks)
        super().__init__(limits, self.cache, partial(num_spare, self.cache), max_reads=max_reads)


def heard(core: Replica, message: ReplicateBlocks, traceparent: str = "", now_ms: int = 0) -> list[KVRead]:
    """Return the reads that an offer brings about."""
    return reads(core, case.decide(core, CopyOffered(message, traceparent), now_ms))


def cools(core: Replica, worker: str, *numbers: int, tenant: str = "") -> list[KVRead]:
    """Return the reads that begin as a worker says that it will give these blocks up, the first of them first."""
    joined = join_hashes([numbered(number) for number in numbers])
    message = EvictionCandidates(worker_id=WorkerId(worker), incarnation="i", block_hashes=joined, tenant=tenant)
    return reads(core, case.decide(core, message, 0))


def numbered(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(BLOCK_HASH_BYTES, "big"))


def reads(core: Replica, actions: list[Action]) -> list[KVRead]:
    case.check_blocks(core.cache, None, copies=core.reading.values())
    return [action.read for action in actions if isinstance(action, StartRead)]


def ended(core: Replica, read: KVRead, num_blocks: int, end: ReadEnd = ReadEnd.LANDED, **more) -> list[Action]:
    outcome = ReadOutcome(num_landed_tokens=num_blocks * BLOCK, num_bytes=1, carrier="shm", is_whole=True)
    return case.decide(core, ReadEnded(read, outcome, end, **more), 0)


def landed(core: Replica, read: KVRead, num_blocks: int) -> list[KVRead]:
    return reads(core, ended(core, read, num_blocks))


def gone(core: Replica, read: KVRead) -> list[Action]:
    """The source has given up the first block of these."""
    return ended(core, read, 0, ReadEnd.REFUSED, refusal=RefusalReason.GONE)


def hashes_of(read: KVRead) -> tuple[BlockHash, ...]:
    assert isinstance(read.lease, RequestLease)
    return tuple(split_hashes(read.lease.block_hashes))


# Out.


def offered_blocks(messages: list[ReplicateBlocks]) -> list[tuple[int, int]]:
    return [(message.first_block, len(split_hashes(message.block_hashes))) for message in messages]


def test_the_prompt_s_blocks_go_out_at_once_and_the_answer_s_as_they_fill() -> None:
    sequence = hasher()
    offers = offer_of(sequence)
    assert offers.due(0, 0) == []
    (message,) = offers.due(3, 1_000)
    assert (message.request_id, message.attempt) == KEY
    assert (message.source, message.first_block, message.tenant) == (SOURCE, 0, "acme")
    assert message.deadline_ms == 1_000 + READ_WITHIN_MS
    assert split_hashes(message.block_hashes) == sequence.hashes[:3]
    assert offers.due(5, 1_000 + OFFER_INTERVAL_MS - 1) == []
    assert offered_blocks(offers.due(5, 1_000 + OFFER_INTERVAL_MS)) == [(3, 2)]
    assert offers.due(12, 1_300) == []
    assert offered_blocks(offers.due(13, 1_300)) == [(5, 8)]
    assert offers.due(13, 99_000) == []


def test_an_ended_sequence_s_last_blocks_go_out_at_once() -> None:
    offers = offer_of(hasher())
    offers.due(3, 0)
    assert offered_blocks(offers.due(4, 1, ended=True)) == [(3, 1)]
    assert offers.due(4, 2, ended=True) == []


def test_a_long_prompt_goes_out_in_several_messages() -> None:
    offers = offer_of(hasher((MESSAGE_BLOCKS + 5) * BLOCK))
    assert offered_blocks(offers.due(MESSAGE_BLOCKS + 5, 0)) == [(0, MESSAGE_BLOCKS), (MESSAGE_BLOCKS, 5)]


def prefilling(replica: WorkerId | None, cache: BlockCache | None = None) -> tuple[AttemptCore, Submit]:
    """Return a core that computes a prompt, alone, of a request that names this replica."""
    core = AttemptCore(case.limits(case.PREFILL), cache or case.block_cache(), LeaseTable())
    request = msgspec.structs.replace(case.run_prefill(split=False), replica=replica)
    _, actions = case.ask(core, request)
    return core, case.one(actions, Submit)


@pytest.mark.parametrize("named", [None, case.PREFILL])
def test_without_a_replica_nothing_is_offered(named: WorkerId | None) -> None:
    core, submit = prefilling(named)
    submit.attempt.num_stored_blocks = 1
    assert submit.attempt.replica_offer is None
    assert not [a for a in case.tick(core, 1_000) if isinstance(a, Publish)]


@pytest.mark.parametrize("how", ["tick", "step", "end", "removed"])
def test_a_running_attempt_offers_its_blocks(how: str) -> None:
    core, submit = prefilling(REPLICA)
    submit.attempt.num_stored_blocks = 1
    sequence = submit.sequence
    if how == "tick":
        actions = case.tick(core, 1_000)
    elif how == "removed":
        actions = case.decide(core, SequenceRemoved((sequence.request_id, 1)), 1_000)
    else:
        actions = case.decide(core, case.sampled(sequence, 0, local_end=how == "end"), 1_000)
    publish = case.one(actions, Publish)
    assert (publish.subject, publish.ids) == (subjects.REPLICATE, (REPLICA, publish.message.source))
    assert isinstance(publish.message, ReplicateBlocks)
    assert not [a for a in case.tick(core, 1_000) if isinstance(a, Publish)], "said once"
    assert (submit.attempt.replica_offer is None) == (how in ("end", "removed"))


def test_what_fails_or_is_fenced_offers_nothing_more() -> None:
    for event in (SequenceFailed((RequestId("r1"), 1), "boom"), Fenced("lost")):
        core, submit = prefilling(REPLICA)
        submit.attempt.num_stored_blocks = 1
        actions = case.decide(core, event, 1_000) + case.tick(core, 1_000)
        assert not [a for a in actions if isinstance(a, Publish)]


# In.


def test_what_is_offered_is_read_and_kept() -> None:
    core = Replica()
    (read,) = heard(core, offer(3, 5), "trace")
    assert (*case.wanted(read), read.traceparent) == (SOURCE, 0, 5, "trace")
    assert landed(core, read, 5) == []
    assert all(map(core.cache.holds, hashes_of(read))) and not core.reading and not core.num_waiting
    assert heard(core, offer(3, 5), now_ms=1) == [], "it is here"


@pytest.mark.parametrize("num_landed", [0, 2])
def test_a_read_that_breaks_keeps_what_landed(num_landed: int) -> None:
    core = Replica()
    (read,) = heard(core, offer(3, 5))
    assert ended(core, read, num_landed, ReadEnd.CLOSED) == [NotTaken(SOURCE, 5 - num_landed, "closed")]
    assert sum(map(core.cache.holds, hashes_of(read))) == num_landed == core.cache.num_cached
    (again,) = heard(core, offer(3, 5))
    assert hashes_of(again) == hashes_of(read)[num_landed:], "only what is not here"


def test_of_a_source_one_read_goes_on_at_a_time() -> None:
    core = Replica(4_000)
    (first,) = heard(core, offer(0, MAX_COPY_BLOCKS + 3))
    assert heard(core, offer(seed=1)) == [] and len(hashes_of(first)) == MAX_COPY_BLOCKS
    assert core.num_waiting == 3 + 4
    (second,) = landed(core, first, MAX_COPY_BLOCKS)
    assert len(hashes_of(second)) == 7 and landed(core, second, 7) == []


def test_sources_are_read_from_in_turn_and_few_at_once() -> None:
    core = Replica(4_000)
    begun = [
        read for at in range(MAX_COPY_READS + 2) for read in cools(core, f"w{at}", *range(100 * at, 100 * at + 70))
    ]
    assert [read.holder for read in begun] == [f"w{at}" for at in range(MAX_COPY_READS)]
    (third,) = landed(core, begun[0], MAX_COPY_BLOCKS)
    (fourth,) = landed(core, begun[1], MAX_COPY_BLOCKS)
    assert (third.holder, fourth.holder) == (f"w{MAX_COPY_READS}", f"w{MAX_COPY_READS + 1}")
    (rest,) = landed(core, third, MAX_COPY_BLOCKS)
    assert (rest.holder, len(hashes_of(rest))) == ("w0", 6)


def test_what_cools_is_read_the_coldest_first_and_in_the_order_of_its_sequence() -> None:
    """So the source lends all before the first that it has given up meanwhile."""
    core = Replica(4_000)
    (read,) = cools(core, "a", *range(100))
    assert hashes_of(read) == tuple(map(numbered, reversed(range(MAX_COPY_BLOCKS))))


def test_what_one_source_gives_is_not_asked_of_another() -> None:
    core = Replica()
    (first,) = cools(core, "a", 1, 2)
    (second,) = cools(core, "b", 2, 3)
    assert hashes_of(second) == (numbered(3),) and cools(core, "c", 1) == []
    assert landed(core, first, 2) == [] and landed(core, second, 1) == []
    assert core.num_waiting == 0, "nothing is left of the other offers"


@pytest.mark.parametrize("end", [ReadEnd.REFUSED, ReadEnd.CONTENT, ReadEnd.CLOSED])
def test_what_one_source_does_not_give_is_asked_of_who_offers_it_as_well(end: ReadEnd) -> None:
    core = Replica(4_000, max_reads=1)
    (first,) = cools(core, "a", 2, 1)
    assert cools(core, "b", 2, 1) == [] and cools(core, "c", 1) == []
    refusal = RefusalReason.GONE if end is ReadEnd.REFUSED else None
    (second,) = reads(core, ended(core, first, 0, end, refusal=refusal))
    assert second.holder == "b" and hashes_of(second) == (numbered(1), numbered(2))
    (third,) = landed(core, second, 1)
    assert (third.holder, hashes_of(third)) == (("b" if end is ReadEnd.CLOSED else "a"), (numbered(2),))


def test_what_its_source_has_given_up_is_passed_over() -> None:
    core = Replica()
    (read,) = cools(core, "a", 3, 2, 1)
    (start,) = gone(core, read)
    assert isinstance(start, StartRead)
    assert hashes_of(start.read) == (numbered(2), numbered(3))


def test_a_source_that_has_given_all_up_is_not_asked_for_ever() -> None:
    core = Replica(4_000)
    (read,) = cools(core, "a", *range(100))
    for _ in range(MAX_COPY_REFUSALS):
        (start,) = gone(core, read)
        assert isinstance(start, StartRead)
        read = start.read
    assert gone(core, read) == [NotTaken(WorkerId("a"), 100 - MAX_COPY_REFUSALS, "refused")]
    assert core.num_waiting == 0


def test_a_source_that_says_no_is_left_alone_until_it_offers_again() -> None:
    core = Replica()
    (read,) = cools(core, "a", 1, 2)
    (refused,) = ended(core, read, 0, ReadEnd.REFUSED, refusal=RefusalReason.OVERLOADED)
    assert refused == NotTaken(WorkerId("a"), 2, "refused")
    assert len(cools(core, "a", 1, 2)) == 1


def test_one_read_is_of_one_tenants_blocks() -> None:
    core = Replica()
    (read,) = cools(core, "a", 2, 1, tenant="x")
    assert cools(core, "a", 2, 1, tenant="y") == []
    (other,) = landed(core, read, 2)
    assert isinstance(read.lease, RequestLease) and isinstance(other.lease, RequestLease)
    assert (read.lease.tenant, other.lease.tenant) == ("x", "y") and hashes_of(read) == hashes_of(other)
    landed(core, other, 2)
    assert core.cache.num_of("x") == core.cache.num_of("y") == 2


def test_what_waits_is_bounded_by_source_and_in_sources() -> None:
    core = Replica(4_000)
    for at in range(0, MAX_OFFERED_BLOCKS + 10, MESSAGE_BLOCKS):
        cools(core, "a", *range(at, min(at + MESSAGE_BLOCKS, MAX_OFFERED_BLOCKS + 10)))
    assert core.num_waiting == MAX_OFFERED_BLOCKS - MAX_COPY_BLOCKS
    for at in range(MAX_COPY_SOURCES + 5):
        cools(core, f"w{at}", 10_000 + at)
    num_coming = sum(len(copy.contents) for copy in core.reading.values())
    assert core.num_waiting + num_coming == MAX_OFFERED_BLOCKS + MAX_COPY_SOURCES - 1


def test_what_waits_for_room_for_too_long_is_forgotten() -> None:
    core = Replica(4)
    assert core.cache.admit_spare(4) is not None
    assert case.decide(core, CopyOffered(offer()), 0) == [] and core.num_waiting == 4
    assert case.tick(core, 9_999) == []
    (late,) = case.tick(core, 10_000)
    assert isinstance(late, NotTaken) and late.num_blocks == 4 and core.num_waiting == 0


def test_what_waits_is_read_once_there_is_room() -> None:
    core = Replica(8)
    tables = core.cache.admit_spare(8)
    assert tables is not None and case.decide(core, CopyOffered(offer()), 0) == []
    core.cache.free(tables)
    (read,) = reads(core, case.tick(core, 1))
    assert len(hashes_of(read)) == 4


def test_a_quarter_stays_free_and_nothing_is_evicted() -> None:
    core = Replica(40)
    case.keep(core.cache, 20 * BLOCK)
    (read,) = heard(core, offer(0, 30, seed=7))
    assert len(hashes_of(read)) == 10 and core.cache.num_free == 10 and core.cache.num_cached == 20
    assert landed(core, read, 10) == [] and core.num_waiting == 20


@pytest.mark.parametrize(
    "changes",
    [
        {"fingerprint": "other"},
        {"source": REPLICA},
        {"source": "a.b"},
        {"source": ""},
        {"first_block": -1},
        {"block_hashes": b"cut"},
        {"block_hashes": bytes(16) * (MESSAGE_BLOCKS + 1)},
        {"deadline_ms": 0},
    ],
)
def test_what_is_no_offer_is_dropped(changes: dict[str, object]) -> None:
    core = Replica()
    assert heard(core, msgspec.structs.replace(offer(), **changes), now_ms=1) == []
    assert (core.num_waiting, core.cache.num_free) == (0, 40)


def test_what_cools_and_is_no_list_of_hashes_is_dropped() -> None:
    core = Replica()
    for worker, joined in (("a", b"seventeen bytes!!"), ("a.b", bytes(16)), (REPLICA, bytes(16))):
        message = EvictionCandidates(worker_id=WorkerId(worker), incarnation="i", block_hashes=joined)
        assert case.decide(core, message, 0) == []
    assert core.num_waiting == 0


def test_an_empty_offer_is_nothing() -> None:
    core = Replica()
    assert heard(core, msgspec.structs.replace(offer(), block_hashes=b""), now_ms=1) == []


def test_of_layers_with_windows_nothing_is_taken() -> None:
    core = Replica()
    windowed = msgspec.structs.replace(core.cache.layout, windows=(8,) * core.cache.layout.num_layers)
    core._memory = BlockCache(uniform_shape(windowed, 40), chunk_tokens=8)
    assert heard(core, offer()) == [] and core.num_waiting == 0


def test_a_source_that_left_ends_its_reads() -> None:
    core = Replica(4_000)
    (begun,) = heard(core, offer(0, 100))
    assert case.decide(core, left("other"), 0) == []
    assert case.decide(core, left(SOURCE), 0) == [StopRead(begun), NotTaken(SOURCE, 100, "it left")]
    assert core.num_waiting == 0 and ended(core, begun, 0, ReadEnd.STOPPED) == []
    assert core.cache.num_free == 4_000


def left(worker: str) -> WorkerLeft:
    return WorkerLeft(worker_id=WorkerId(worker), incarnation="a", reason=LeftReason.SILENT)


@pytest.mark.parametrize("how", ["drain", "fence"])
def test_who_stops_takes_nothing_more(how: str) -> None:
    core = Replica()
    (read,) = heard(core, offer())
    actions = case.decide(core, DrainBegun() if how == "drain" else Fenced("lost"), 0)
    assert actions == [StopRead(read)] and len(core.reading) == 1, "its blocks are written until the read has ended"
    ended(core, read, 0, ReadEnd.STOPPED)
    assert (heard(core, offer(), now_ms=0) == []) == (how == "drain")
