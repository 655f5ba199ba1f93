"""What is offered to a replica, and what a replica takes in: events in, actions out."""

import msgspec
import pytest

from dataplane.blocks.cache import BlockCache
from schemas import subjects
from schemas.block import BlockHasher, hash_blocks, join_hashes, split_hashes
from schemas.ids import BlockHash, RequestId, WorkerId
from schemas.kv import ReplicateBlocks
from schemas.worker import LeftReason, WorkerLeft
from services.prefill.core import PrefillCore
from services.times import Times
from services.worker.core.actions import Action, Publish, StartRead, StopRead, Submit
from services.worker.core.attempts import KVRead, WantedLease
from services.worker.core.content import AttemptKey
from services.worker.core.events import CopyOffered, DrainBegun, Fenced, SequenceFailed, SequenceRemoved
from services.worker.core.leases import LeaseTable
from services.worker.core.replica_offer import ReplicaOffer
from services.worker.core.replicas import ReplicaCore
from services.worker.limits import MAX_COPIES_WAITING, MAX_COPY_BLOCKS, MAX_COPY_READS, MESSAGE_BLOCKS
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


def replica(num_blocks: int = 40) -> ReplicaCore:
    return ReplicaCore(case.limits(REPLICA, num_blocks=num_blocks), case.block_cache(num_blocks))


def check(core: ReplicaCore) -> None:
    case.check_blocks(core._cache, None, copies=core.reading.values())


def heard(core: ReplicaCore, message: ReplicateBlocks, traceparent: str = "", now_ms: int = 0) -> list[KVRead]:
    """Return the reads that an offer brings about."""
    return reads(core, case.decide(core, CopyOffered(message, traceparent), now_ms))


def reads(core: ReplicaCore, actions: list[Action]) -> list[KVRead]:
    check(core)
    return [action.read for action in actions if isinstance(action, StartRead)]


def landed(core: ReplicaCore, read: KVRead, num_blocks: int) -> list[KVRead]:
    _, first_block, _ = case.wanted(read)
    num_tokens = (first_block + num_blocks) * BLOCK if num_blocks else 0
    return reads(core, case.decide(core, case.brings(read, num_tokens), 0))


def hashes_of(read: KVRead) -> tuple[BlockHash, ...]:
    assert isinstance(read.lease, WantedLease)
    return read.lease.block_hashes


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


def prefilling(replica: WorkerId | None, cache: BlockCache | None = None) -> tuple[PrefillCore, Submit]:
    """Return a core that computes a prompt, alone, of a request that names this replica."""
    core = PrefillCore(case.limits(case.PREFILL), cache or case.block_cache(), LeaseTable())
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
    core = replica()
    (read,) = heard(core, offer(3, 5), "trace")
    assert (*case.wanted(read), read.traceparent) == (SOURCE, 3, 5, "trace")
    assert (read.tables[0].first_block, read.tables[0].end_block) == (3, 8)
    assert landed(core, read, 5) == []
    assert all(map(core._cache.holds, hashes_of(read))) and len(core.reading) == 0
    assert heard(core, offer(3, 5), now_ms=1) == [], "it is here"


@pytest.mark.parametrize("num_landed", [0, 2])
def test_a_read_that_breaks_keeps_what_landed(num_landed: int) -> None:
    core = replica()
    (read,) = heard(core, offer(3, 5))
    landed(core, read, num_landed)
    assert sum(map(core._cache.holds, hashes_of(read))) == num_landed == core._cache.num_cached
    (again,) = heard(core, offer(3, 5))
    assert case.wanted(again)[1] == 3 + num_landed, "only what is not here"


def test_what_is_here_in_the_middle_is_read_around() -> None:
    core = replica()
    case.keep(core._cache, 0)
    (middle,) = heard(core, offer(2, 2))
    landed(core, middle, 2)
    before, after = heard(core, offer(0, 8))
    assert [(case.wanted(f)[1], case.wanted(f)[2]) for f in (before, after)] == [(0, 2), (4, 4)]


def test_what_is_on_its_way_is_not_asked_for_again() -> None:
    core = replica()
    assert len(heard(core, offer())) == 1
    assert heard(core, offer(), now_ms=0) == [] and core.num_waiting == 0


def test_few_reads_at_once_and_few_wait() -> None:
    core = replica(4_000)
    begun = [read for seed in range(100) for read in heard(core, offer(seed=seed))]
    num_dropped = 100 - MAX_COPY_READS - MAX_COPIES_WAITING
    assert (len(begun), core.num_waiting, core.num_dropped) == (MAX_COPY_READS, MAX_COPIES_WAITING, num_dropped)
    (following,) = landed(core, begun[0], 4)
    assert following.key != begun[0].key and core.num_waiting == MAX_COPIES_WAITING - 1
    assert reads(core, case.tick(core, 10_000)) == [] and core.num_waiting == 0, "what waits too long is forgotten"


def test_one_read_is_bounded() -> None:
    core = replica(4_000)
    first, second = heard(core, offer(0, MAX_COPY_BLOCKS + 3))
    assert [(case.wanted(f)[1], case.wanted(f)[2]) for f in (first, second)] == [
        (0, MAX_COPY_BLOCKS),
        (MAX_COPY_BLOCKS, 3),
    ]


def test_a_quarter_stays_free_and_nothing_is_evicted() -> None:
    core = replica(40)
    case.keep(core._cache, 20 * BLOCK)
    (read,) = heard(core, offer(0, 30, seed=7))
    assert len(hashes_of(read)) == 10 and core._cache.num_free == 10 and core._cache.num_cached == 20
    landed(core, read, 10)
    assert heard(core, offer(0, 5, seed=8), now_ms=0) == [] and core.num_waiting == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"fingerprint": "other"},
        {"source": REPLICA},
        {"source": "a.b"},
        {"source": ""},
        {"first_block": -1},
        {"block_hashes": b"cut"},
        {"block_hashes": 2 * offer().block_hashes},
        {"block_hashes": bytes(16) * (MESSAGE_BLOCKS + 1)},
        {"deadline_ms": 0},
    ],
)
def test_what_is_no_offer_is_dropped(changes: dict[str, object]) -> None:
    core = replica()
    assert heard(core, msgspec.structs.replace(offer(), **changes), now_ms=1) == []
    assert (core.num_dropped, core.num_waiting, core._cache.num_free) == (1, 0, 40)


def test_an_empty_offer_is_nothing() -> None:
    core = replica()
    assert heard(core, msgspec.structs.replace(offer(), block_hashes=b""), now_ms=1) == []


def test_a_source_that_left_ends_its_reads() -> None:
    core = replica(4_000)
    begun = [read for seed in range(5) for read in heard(core, offer(seed=seed))]
    assert (
        case.decide(core, WorkerLeft(worker_id=WorkerId("other"), incarnation="a", reason=LeftReason.SILENT), 0) == []
    )
    stops = case.decide(core, WorkerLeft(worker_id=SOURCE, incarnation="a", reason=LeftReason.SILENT), 0)
    assert stops == [StopRead(read) for read in begun] and core.num_waiting == 0
    for read in begun:
        assert landed(core, read, 0) == []
    assert core._cache.num_free == 4_000


@pytest.mark.parametrize("how", ["drain", "fence"])
def test_who_stops_takes_nothing_more(how: str) -> None:
    core = replica()
    (read,) = heard(core, offer())
    actions = case.decide(core, DrainBegun() if how == "drain" else Fenced("lost"), 0)
    assert actions == [StopRead(read)]
    assert len(core.reading) == 1, "its blocks are written until the read has ended"
    landed(core, read, 0)
    assert (heard(core, offer(), now_ms=0) == []) == (how == "drain")
