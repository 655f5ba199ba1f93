"""What is offered to a replica, and what a replica takes in: events in, actions out."""

import msgspec
import pytest

from schemas.block import join_hashes, split_hashes
from schemas.ids import RequestId, WorkerId
from schemas.kv import ReplicateBlocks
from schemas.worker import LeftReason, WorkerLeft
from services.worker.core.actions import Action, AttemptKey, Fetch, Publish, StopFetch
from services.worker.core.content import ReadOutcome, SequenceContent
from services.worker.core.replicas import (
    MAX_OFFER_BLOCKS,
    MAX_READ_BLOCKS,
    MAX_READS,
    MAX_WAITING,
    OFFER_INTERVAL_MS,
    READ_WITHIN_MS,
    ReplicaCore,
    ReplicaOffers,
)
from tests.worker import worker_cases as case

BLOCK = 4
SOURCE, REPLICA = WorkerId("d9"), case.DECODE
KEY: AttemptKey = (RequestId("r1"), 1)


def content(num_tokens: int = 400, *, replica: WorkerId | None = REPLICA, tenant: str = "") -> SequenceContent:
    return SequenceContent(list(range(num_tokens)), BLOCK, "f", replica=replica, tenant=tenant)


def offer(first_block: int = 0, num_blocks: int = 4, seed: int = 0) -> ReplicateBlocks:
    tokens = [seed, *range(1, (first_block + num_blocks) * BLOCK)]
    hashes = SequenceContent(tokens, BLOCK, "f").hashes
    return ReplicateBlocks(
        request_id=RequestId("r1"), attempt=1, deadline_ms=10_000, source=SOURCE, fingerprint="f",
        first_block=first_block, block_hashes=join_hashes(hashes[first_block:]),
    )  # fmt: skip


def replica(num_blocks: int = 40) -> ReplicaCore:
    return ReplicaCore(case.limits(REPLICA, num_blocks=num_blocks), case.block_cache(num_blocks))


def fetches(core: ReplicaCore, actions: list[Action]) -> list[Fetch]:
    case.check_blocks(core._cache, None, core)
    return [action for action in actions if isinstance(action, Fetch)]


def landed(core: ReplicaCore, fetch: Fetch, num_blocks: int) -> list[Fetch]:
    outcome = ReadOutcome((fetch.first_block + num_blocks) * BLOCK if num_blocks else 0)
    return fetches(core, core.fetched(fetch.key, outcome, 0))


# Out.


def offered_blocks(messages: list[Publish]) -> list[tuple[int, int]]:
    said = [publish.message for publish in messages]
    assert all(isinstance(message, ReplicateBlocks) for message in said)
    return [(m.first_block, len(split_hashes(m.block_hashes))) for m in said if isinstance(m, ReplicateBlocks)]


def test_the_prompt_s_blocks_go_out_at_once_and_the_answer_s_as_they_fill() -> None:
    offers, sequence = ReplicaOffers(SOURCE, "f"), content(tenant="acme")
    offers.submitted(KEY, sequence)
    assert offers.due(0) == []
    sequence.num_stored_blocks = 3
    (publish,) = offers.due(1_000)
    assert publish.ids == (REPLICA,) and publish.key == KEY
    message = publish.message
    assert isinstance(message, ReplicateBlocks)
    assert (message.source, message.first_block, message.tenant) == (SOURCE, 0, "acme")
    assert message.deadline_ms == 1_000 + READ_WITHIN_MS
    assert split_hashes(message.block_hashes) == sequence.hashes[:3]
    sequence.num_stored_blocks = 5
    assert offers.due(1_000 + OFFER_INTERVAL_MS - 1) == []
    assert offered_blocks(offers.due(1_000 + OFFER_INTERVAL_MS)) == [(3, 2)]
    sequence.num_stored_blocks = 12
    assert offers.due(1_300) == []
    sequence.num_stored_blocks = 13
    assert offered_blocks(offers.due(1_300)) == [(5, 8)]
    assert offers.due(99_000) == []


def test_an_ended_sequence_s_last_blocks_go_out_at_once_and_it_is_forgotten() -> None:
    offers, sequence = ReplicaOffers(SOURCE, "f"), content()
    offers.submitted(KEY, sequence)
    sequence.num_stored_blocks = 3
    offers.due(0)
    sequence.num_stored_blocks = 4
    offers.ended(KEY)
    assert offered_blocks(offers.due(1)) == [(3, 1)]
    assert len(offers) == 0


def test_a_long_prompt_goes_out_in_several_messages() -> None:
    offers, sequence = ReplicaOffers(SOURCE, "f"), content((MAX_OFFER_BLOCKS + 5) * BLOCK)
    offers.submitted(KEY, sequence)
    sequence.num_stored_blocks = MAX_OFFER_BLOCKS + 5
    assert offered_blocks(offers.due(0)) == [(0, MAX_OFFER_BLOCKS), (MAX_OFFER_BLOCKS, 5)]


@pytest.mark.parametrize("named", [None, SOURCE])
def test_without_a_replica_nothing_is_offered(named: WorkerId | None) -> None:
    offers, sequence = ReplicaOffers(SOURCE, "f"), content(replica=named)
    offers.submitted(KEY, sequence)
    sequence.num_stored_blocks = 5
    assert offers.due(0) == [] and len(offers) == 0


# In.


def test_what_is_offered_is_read_and_kept() -> None:
    core = replica()
    (fetch,) = fetches(core, core.offered(offer(3, 5), "trace", 0))
    assert (fetch.source, fetch.first_block, len(fetch.block_hashes), fetch.traceparent) == (SOURCE, 3, 5, "trace")
    assert (fetch.tables[0].first_block, fetch.tables[0].end_block) == (3, 8)
    assert landed(core, fetch, 5) == []
    assert all(map(core._cache.holds, fetch.block_hashes)) and core.num_runs == 0
    assert core.offered(offer(3, 5), "", 1) == [], "it is here"


@pytest.mark.parametrize("num_landed", [0, 2])
def test_a_read_that_breaks_keeps_what_landed(num_landed: int) -> None:
    core = replica()
    (fetch,) = fetches(core, core.offered(offer(3, 5), "", 0))
    landed(core, fetch, num_landed)
    assert sum(map(core._cache.holds, fetch.block_hashes)) == num_landed == core._cache.num_cached
    (again,) = fetches(core, core.offered(offer(3, 5), "", 0))
    assert again.first_block == 3 + num_landed, "only what is not here"


def test_what_is_here_in_the_middle_is_read_around() -> None:
    core = replica()
    case.keep(core._cache, 0)
    (middle,) = fetches(core, core.offered(offer(2, 2), "", 0))
    landed(core, middle, 2)
    before, after = fetches(core, core.offered(offer(0, 8), "", 0))
    assert [(f.first_block, len(f.block_hashes)) for f in (before, after)] == [(0, 2), (4, 4)]


def test_what_is_on_its_way_is_not_asked_for_again() -> None:
    core = replica()
    assert len(fetches(core, core.offered(offer(), "", 0))) == 1
    assert core.offered(offer(), "", 0) == [] and core.num_waiting == 0


def test_few_reads_at_once_and_few_wait() -> None:
    core = replica(4_000)
    begun = [fetch for seed in range(100) for fetch in fetches(core, core.offered(offer(seed=seed), "", 0))]
    assert (len(begun), core.num_waiting, core.num_dropped) == (MAX_READS, MAX_WAITING, 100 - MAX_READS - MAX_WAITING)
    (following,) = landed(core, begun[0], 4)
    assert following.key != begun[0].key and core.num_waiting == MAX_WAITING - 1
    assert fetches(core, core.tick(10_000)) == [] and core.num_waiting == 0, "what waits too long is forgotten"


def test_one_read_is_bounded() -> None:
    core = replica(4_000)
    first, second = fetches(core, core.offered(offer(0, MAX_READ_BLOCKS + 3), "", 0))
    assert [(f.first_block, len(f.block_hashes)) for f in (first, second)] == [
        (0, MAX_READ_BLOCKS),
        (MAX_READ_BLOCKS, 3),
    ]


def test_a_quarter_stays_free_and_nothing_is_evicted() -> None:
    core = replica(40)
    case.keep(core._cache, 20 * BLOCK)
    (fetch,) = fetches(core, core.offered(offer(0, 30, seed=7), "", 0))
    assert len(fetch.block_hashes) == 10 and core._cache.num_free == 10 and core._cache.num_cached == 20
    landed(core, fetch, 10)
    assert core.offered(offer(0, 5, seed=8), "", 0) == [] and core.num_waiting == 0


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
        {"block_hashes": bytes(16) * (MAX_OFFER_BLOCKS + 1)},
        {"deadline_ms": 0},
    ],
)
def test_what_is_no_offer_is_dropped(changes: dict[str, object]) -> None:
    core = replica()
    assert core.offered(msgspec.structs.replace(offer(), **changes), "", 1) == []
    assert (core.num_dropped, core.num_waiting, core._cache.num_free) == (1, 0, 40)


def test_an_empty_offer_is_nothing() -> None:
    core = replica()
    assert core.offered(msgspec.structs.replace(offer(), block_hashes=b""), "", 1) == []


def test_a_source_that_left_ends_its_reads() -> None:
    core = replica(4_000)
    begun = [fetch for seed in range(5) for fetch in fetches(core, core.offered(offer(seed=seed), "", 0))]
    assert core.left(WorkerLeft(worker_id=WorkerId("other"), incarnation="a", reason=LeftReason.SILENT), 0) == []
    stops = core.left(WorkerLeft(worker_id=SOURCE, incarnation="a", reason=LeftReason.SILENT), 0)
    assert stops == [StopFetch(fetch.key) for fetch in begun] and core.num_waiting == 0
    for fetch in begun:
        assert landed(core, fetch, 0) == []
    assert core._cache.num_free == 4_000


@pytest.mark.parametrize("how", ["drain", "fence"])
def test_who_stops_takes_nothing_more(how: str) -> None:
    core = replica()
    (fetch,) = fetches(core, core.offered(offer(), "", 0))
    actions = core.drain(0) if how == "drain" else core.fence(0, "lost")
    assert actions == [StopFetch(fetch.key)]
    assert core.owned_tables() and core.num_runs == 1, "its blocks are written until the read has ended"
    landed(core, fetch, 0)
    assert (core.offered(offer(), "", 0) == []) == (how == "drain")
