"""What a worker that leaves offers to whom, and what those who stay give up for it."""

from functools import partial

import msgspec
import pytest

from dataplane.blocks.cache import BlockCache
from dataplane.blocks.kept import Content, KeptBlocks
from schemas.block import join_hashes, split_hashes
from schemas.ids import BlockHash, RequestId, WorkerId
from schemas.kv import ReplicateBlocks, RequestLease
from schemas.worker import BlockCounts, WorkerInfo, WorkerLoad, WorkerRole
from services.holder.core.actions import StartRead
from services.holder.core.content import ReadOutcome
from services.holder.core.copies import CopyCore, num_spare
from services.holder.core.events import CopyOffered, ReadEnded
from services.holder.limits import MESSAGE_BLOCKS
from services.worker.leaving import LeftBehind, hottest_first, left_behind
from tests.worker import worker_cases as case
from tests.worker.worker_cases import one


def hashes(num: int, first: int = 0) -> list[BlockHash]:
    return [BlockHash(number.to_bytes(16, "big")) for number in range(first + 1, first + num + 1)]


def hot(num: int, tenant: str = "") -> list[Content]:
    return [Content(tenant, block_hash) for block_hash in hashes(num)]


def info(name: str, role: WorkerRole, fingerprint: str = "f") -> WorkerInfo:
    return WorkerInfo(
        worker_id=WorkerId(name), incarnation="a", role=role, model="m", fingerprint=fingerprint, num_blocks=100,
        block_size=4, context_length=100,
    )  # fmt: skip


def load(
    name: str, role: WorkerRole, *, free: int = 0, cached: int = 0, state: str = "ready", fingerprint: str = "f"
) -> WorkerLoad:
    return WorkerLoad(
        worker=info(name, role, fingerprint),
        state=state,  # type: ignore[arg-type]
        blocks=BlockCounts(total=100, free=free, cached=cached, running=0, leased=0),
        num_running=0,
        num_queued=0,
        num_uncomputed_tokens=0,
    )


ME = info("d0", "decode")


def to(offers: list[LeftBehind]) -> list[tuple[str, int]]:
    return [(offer.receiver.worker_id, len(offer.hashes)) for offer in offers]


def test_what_the_directory_was_asked_for_most_comes_first_and_else_what_was_used_last() -> None:
    used_last = hot(6)
    first, second, third, *rest = used_last
    assert hottest_first(used_last, bytes([1, 9, 255, 1, 1, 0])) == [third, second, first, *rest]
    assert hottest_first(used_last, b"") == hottest_first(used_last, bytes(6)) == used_last, "nobody says"
    assert hottest_first(used_last, bytes([0, 3])) == [second, first, third, *rest], "the end of a list is left out"
    assert hottest_first(used_last, bytes(9)) == used_last and hottest_first([], b"\1") == []


def test_a_block_stays_behind_those_before_it() -> None:
    """Two prompts share their first two blocks; the second is asked for more often, and the first was used last."""
    shared, first, second = hot(2), hot(5)[2:], hot(9)[5:]
    order = hottest_first([*shared, *first, *second], bytes([9, 9, 2, 2, 2, 7, 7, 6, 2]))
    assert order == [*shared, *second[:3], *first, second[3]]


def test_who_does_the_same_work_and_has_most_room_is_offered_first_and_the_hottest() -> None:
    fleet = [load("p0", "prefill", free=90), load("d1", "decode", free=20), load("d2", "decode", free=10, cached=30)]
    offers = left_behind(ME, hot(40), fleet)
    assert to(offers) == [("d2", 20), ("d1", 10), ("p0", 10)]
    assert [h for offer in offers for h in offer.hashes] == hashes(40), "the hottest goes where it is surely taken"


def test_a_store_takes_all() -> None:
    fleet = [load("d1", "decode", free=90), load("s0", "store", free=1)]
    assert to(left_behind(ME, hot(60), fleet)) == [("s0", 60)]


@pytest.mark.parametrize(
    "other",
    [
        load("d0", "decode", free=90),
        load("d1", "decode"),
        load("d1", "decode", free=90, state="draining"),
        load("d1", "decode", free=90, fingerprint="g"),
    ],
    ids=["itself", "no room", "leaves too", "another model"],
)
def test_who_is_offered_nothing(other: WorkerLoad) -> None:
    assert left_behind(ME, hot(10), [other]) == []


def test_tenants_and_long_lists_are_messages_of_their_own() -> None:
    roomy = BlockCounts(total=10_000, free=0, running=0, leased=0)
    store = msgspec.structs.replace(load("s0", "store"), blocks=roomy)
    mixed = [*hot(MESSAGE_BLOCKS + 1), *hot(2, "t")]
    offers = left_behind(ME, mixed, [store])
    assert [(o.tenant, len(o.hashes)) for o in offers] == [("", MESSAGE_BLOCKS), ("", 1), ("t", 2)]


def test_what_was_used_last_comes_first() -> None:
    kept = KeptBlocks(8)
    for number in range(3):
        blocks = kept.allocate(2)
        assert blocks is not None
        for at, block in enumerate(blocks):
            kept.put(block, hashes(1, number * 2 + at)[0])
        kept.release(blocks[::-1])
    used = kept.take(hashes(2))
    kept.release(used[::-1])
    assert [content.block_hash for content in kept.used_last(4)] == [*hashes(2), *hashes(2, 4)]
    assert kept.used_last(0) == [] and len(kept.used_last(99)) == 6
    kept.take(hashes(1))
    assert hashes(1)[0] not in [content.block_hash for content in kept.used_last(99)], "it is in use"


def offered(num: int, first: int = 0, *, leaving: bool = True) -> CopyOffered:
    return CopyOffered(
        ReplicateBlocks(
            request_id=RequestId("leave-p9"), attempt=1, deadline_ms=10_000, source=WorkerId("p9"), fingerprint="f",
            first_block=0, block_hashes=join_hashes(hashes(num, first)), leaving=leaving,
        )
    )  # fmt: skip


def copies_of(cache: BlockCache) -> CopyCore:
    limits = case.limits(case.DECODE, num_blocks=cache.num_blocks)
    return CopyCore(limits, cache, partial(num_spare, cache), max_reads=2)


def full_cache(num_blocks: int = 12) -> BlockCache:
    cache = case.block_cache(num_blocks)
    tables = cache.admit_spare(num_blocks)
    assert tables is not None
    cache.keep(tables, hashes(num_blocks, 100))
    assert (cache.num_free, cache.num_cached) == (0, num_blocks)
    return cache


def test_a_full_cache_gives_up_its_coldest_half_for_one_that_leaves_and_nothing_for_others() -> None:
    cache = full_cache()
    core = copies_of(cache)
    assert case.decide(core, offered(8, leaving=False), 0) == []
    read = one(case.decide(core, offered(8), 0), StartRead).read
    assert isinstance(read.lease, RequestLease)
    assert split_hashes(read.lease.block_hashes) == hashes(6), "half, the hottest"
    case.decide(core, ReadEnded(read, ReadOutcome(num_landed_tokens=24, num_bytes=1, carrier="shm", is_whole=True)), 1)
    assert all(cache.holds(block_hash) for block_hash in hashes(6))
    assert cache.num_cached == 12 and cache.num_free == 0
    cache.check_integrity()


def test_a_worker_all_of_whose_blocks_are_in_use_takes_nothing() -> None:
    cache = case.block_cache(4)
    assert cache.admit_spare(4) is not None
    core = copies_of(cache)
    assert case.decide(core, offered(2), 0) == [] and core.num_waiting == 2
