"""Who may read what, and until when."""

import msgspec
import pytest

from dataplane.blocks.cache import BlockCache
from dataplane.limits import MAX_STREAMS
from dataplane.protocol.progress import KVProgress
from schemas.block import hash_blocks, join_hashes
from schemas.ids import LeaseId, RequestId, WorkerId
from schemas.kv import LeaseEnd, LeaseGranted, RequestLease, ReturnLease, is_as_asked
from schemas.request import RefusalReason, Refused
from schemas.worker import LeftReason, WorkerLeft
from services.holder.core.actions import Action, CloseLease
from services.holder.core.events import Fenced, Stopping, StreamEnded, StreamStarted
from services.holder.core.leases import Grant, LeaseTable
from services.holder.core.lending import LendCore
from services.holder.limits import MAX_LENT_LEASES, MAX_READER_LEASES, MAX_REQUEST_LEASES
from services.times import Times
from tests.worker import worker_cases as case

OPEN_LEASE_WITHIN_MS = Times().worker.open_lease_within_ms

READER = WorkerId("p9")


def request(first_block: int = 0, *, num_tokens: int = 16) -> RequestLease:
    hashes = hash_blocks(list(range(1, num_tokens + 1)), 4, model_fingerprint="f")
    return RequestLease(
        request_id=RequestId("r1"), attempt=1, deadline_ms=case.DEADLINE_MS, reader=READER, fingerprint="f",
        first_block=first_block, block_hashes=join_hashes(hashes[first_block:]),
    )  # fmt: skip


def lender(num_kept: int = 12, *, lease_ms: int = 30_000) -> LendCore:
    cache = case.block_cache(8)
    case.keep(cache, num_kept)
    return LendCore(case.limits(case.DECODE, lease_ms=lease_ms), cache, LeaseTable())


def granted(core: LendCore, asked: RequestLease | None = None, now_ms: int = 0) -> Grant:
    lease = core.answer(asked or request(), now_ms)
    assert isinstance(lease, Grant), lease
    case.check_blocks(cache_of(core), core.leases)
    return lease


def cache_of(core: LendCore) -> BlockCache:
    assert isinstance(core.memory, BlockCache)
    return core.memory


def ended(actions: list[Action]) -> list[tuple[Grant, LeaseEnd]]:
    """Return the leases that these actions close, and why."""
    leases = [action.lease for action in actions if isinstance(action, CloseLease)]
    assert len(leases) == len(actions)
    return [(lease, lease.end) for lease in leases if lease.end is not None]


def assert_all_given_back(core: LendCore) -> None:
    cache = core.memory
    assert len(core.leases) == 0 and cache.num_free + cache.num_cached == cache.num_blocks


@pytest.mark.parametrize("first_block", [0, 1, 2])
def test_the_leading_run_that_is_here_is_lent(first_block: int) -> None:
    core = lender()
    lease = granted(core, request(first_block))
    assert (lease.first_token, lease.num_tokens, lease.tables[0].first_block) == (first_block * 4, 12, first_block)
    assert core.leases.num_leased_blocks == 3 - first_block
    assert core.memory.num_cached == first_block


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"fingerprint": "other"}, RefusalReason.FINGERPRINT),
        ({"first_block": -1}, RefusalReason.INVALID),
        ({"block_hashes": b""}, RefusalReason.INVALID),
        ({"block_hashes": b"cut"}, RefusalReason.INVALID),
        ({"block_hashes": bytes(16)}, RefusalReason.GONE),
        ({"block_hashes": 2 * request().block_hashes}, RefusalReason.INVALID),
        ({"deadline_ms": 0}, RefusalReason.DEADLINE),
        ({"reader": "x" * 3000}, RefusalReason.INVALID),
        ({"request_id": "a.b"}, RefusalReason.INVALID),
        ({"tenant": "t" * 3000}, RefusalReason.INVALID),
    ],
)
def test_what_is_not_here_or_not_right_is_refused(changes: dict[str, object], reason: str) -> None:
    core = lender()
    refused = core.answer(msgspec.structs.replace(request(), **changes), 1)
    assert isinstance(refused, Refused) and refused.reason == reason
    assert_all_given_back(core)


def test_lent_blocks_are_not_given_to_others_until_the_read_is_over() -> None:
    core = lender()
    lease = granted(core)
    assert cache_of(core).admit([], 6 * 4, 0) is None
    assert ended(case.decide(core, StreamEnded(lease), 0)) == [(lease, LeaseEnd.LANDED)]
    assert case.decide(core, StreamEnded(lease), 0) == []
    assert_all_given_back(core)
    assert cache_of(core).admit([], 6 * 4, 0) is not None


def test_a_lease_that_nobody_opens_ends_soon_and_one_that_is_read_later() -> None:
    core = lender()
    unopened, opened = granted(core), granted(core)
    case.decide(core, StreamStarted(opened), OPEN_LEASE_WITHIN_MS - 1)
    assert case.tick(core, OPEN_LEASE_WITHIN_MS - 1) == []
    assert ended(case.tick(core, OPEN_LEASE_WITHIN_MS)) == [(unopened, LeaseEnd.EXPIRED)]
    assert len(case.tick(core, OPEN_LEASE_WITHIN_MS + 30_000)) == 1
    assert_all_given_back(core)


def test_a_reader_that_trickles_has_the_blocks_until_its_deadline_at_most() -> None:
    core = lender(lease_ms=1_000)
    lease = granted(core, now_ms=case.DEADLINE_MS - 1_500)
    for now_ms in range(case.DEADLINE_MS - 1_500, case.DEADLINE_MS, 100):
        lease.has_moved = True
        assert case.tick(core, now_ms) == []
    assert ended(case.tick(core, case.DEADLINE_MS)) == [(lease, LeaseEnd.EXPIRED)]
    assert_all_given_back(core)


def test_a_lease_that_is_returned_ends_and_nobody_else_s_does() -> None:
    core = lender()
    mine, other = granted(core), granted(core)
    back = ReturnLease(
        request_id=RequestId("r1"), attempt=1, deadline_ms=case.DEADLINE_MS, reader=READER, lease_id=mine.lease_id
    )
    assert case.decide(core, msgspec.structs.replace(back, reader=WorkerId("stranger")), 0) == []
    assert ended(case.decide(core, back, 0)) == [(mine, LeaseEnd.RETURNED)]
    assert case.decide(core, back, 0) == []
    assert case.decide(core, StreamEnded(other), 0)
    assert_all_given_back(core)


def test_a_reader_that_left_gives_back() -> None:
    core = lender()
    lease = granted(core)
    assert (
        case.decide(core, WorkerLeft(worker_id=WorkerId("other"), incarnation="a", reason=LeftReason.SILENT), 0) == []
    )
    left = case.decide(core, WorkerLeft(worker_id=READER, incarnation="a", reason=LeftReason.SILENT), 0)
    assert ended(left) == [(lease, LeaseEnd.READER_LEFT)]
    assert_all_given_back(core)


def test_leases_are_bounded() -> None:
    core = lender()
    for number in range(MAX_LENT_LEASES):
        granted(core, of(f"r{number}", f"p{number}"))
    assert is_overloaded(core.answer(of("one more", "other"), 0))


def of(request_id: str, reader: str = READER, num_tokens: int = 16) -> RequestLease:
    asked = request(num_tokens=num_tokens)
    return msgspec.structs.replace(asked, request_id=RequestId(request_id.replace(" ", "-")), reader=WorkerId(reader))


def is_overloaded(answer: Grant | Refused) -> bool:
    """Say whether it is a refusal for now: whoever is refused may ask again."""
    return isinstance(answer, Refused) and answer.reason == RefusalReason.OVERLOADED and answer.retry_after_ms > 0


def test_one_request_has_few_leases_under_whatever_names_it_is_read() -> None:
    """A reader's name may be invented, a request's id is signed."""
    core = lender()
    leases = [granted(core, of("r1", f"p{number}")) for number in range(MAX_REQUEST_LEASES)]
    assert is_overloaded(core.answer(of("r1", "one-more"), 0))
    granted(core, of("r2", "one-more"))
    case.decide(core, StreamEnded(leases[0]), 0)
    granted(core, of("r1", "one-more"))


def test_one_reader_has_as_many_leases_as_there_are_streams() -> None:
    core = lender()
    for number in range(MAX_READER_LEASES):
        granted(core, of(f"r{number}"))
    assert MAX_STREAMS == MAX_READER_LEASES and is_overloaded(core.answer(of("one more"), 0))
    granted(core, of("one more", "other"))


def test_one_reader_does_not_hold_all_blocks() -> None:
    """Its first lease may be on any number. With one more it would have over half of the blocks; the same blocks again
    do not count twice, and others are not in its way."""
    core = lender(num_kept=0)
    cache = cache_of(core)
    for base in (0, 100):
        case.keep(cache, 12, base=base)  # 3 of 8 blocks each
    first, second = ask_from(0), ask_from(100)
    lease = granted(core, first)
    granted(core, first)
    assert is_overloaded(core.answer(second, 0)), "6 of 8"
    cache.check_integrity()
    granted(core, msgspec.structs.replace(second, reader=WorkerId("other"), request_id=RequestId("r2")))
    case.decide(core, Fenced("over"), 0)
    assert lease.end is not None
    granted(core, second)


def ask_from(base: int) -> RequestLease:
    hashes = hash_blocks(list(range(base + 1, base + 13)), 4, model_fingerprint="f")
    return msgspec.structs.replace(request(), block_hashes=join_hashes(hashes))


def test_a_lease_ends_when_its_reader_has_given_up_however_much_moves() -> None:
    core = lender()
    lease = granted(core)
    assert lease.ends_by_ms < case.DEADLINE_MS
    case.decide(core, StreamStarted(lease), 0)
    for now_ms in range(0, lease.ends_by_ms, 1_000):
        lease.has_moved = True
        assert case.tick(core, now_ms) == []
    lease.has_moved = True
    assert ended(case.tick(core, lease.ends_by_ms)) == [(lease, LeaseEnd.EXPIRED)]


def test_another_tenants_blocks_are_not_lent_though_their_hashes_are_named() -> None:
    """Hashes are told to the directory: who hears them has not got the blocks."""
    core = lender(num_kept=0)
    cache = cache_of(core)
    allocation = cache.admit([], 12, 0, tenant="acme")
    hashes = hash_blocks(list(range(1, 13)), 4, model_fingerprint="f", tenant="acme")
    assert allocation is not None
    cache.store(allocation.tables, hashes, 0, 12, 0, ended=True)
    cache.free(allocation.tables)
    asked = msgspec.structs.replace(request(), block_hashes=join_hashes(hashes))
    for tenant in ("", "other"):
        refused = core.answer(msgspec.structs.replace(asked, tenant=tenant), 0)
        assert isinstance(refused, Refused) and refused.reason == RefusalReason.GONE
    lease = granted(core, msgspec.structs.replace(asked, tenant="acme"))
    assert lease.tenant == lease.ticket("i").tenant == "acme"


def test_a_holder_that_is_about_to_stop_lends_nothing_more() -> None:
    core = lender()
    lease = granted(core)
    assert case.decide(core, Stopping(), 0) == []
    refused = core.answer(request(), 0)
    assert isinstance(refused, Refused) and refused.reason == RefusalReason.DRAINING and refused.retry_after_ms > 0
    assert ended(case.decide(core, StreamEnded(lease), 0)) == [(lease, LeaseEnd.LANDED)]


def test_who_ends_all_ends_what_was_asked_for_only() -> None:
    core = lender()
    lent = granted(core)
    offered = core.leases.grant(
        lease_id=LeaseId("lease-1"), holder=case.DECODE, reader=READER, request_id=RequestId("r2"), attempt=1,
        tables=(), num_tokens=4, progress=KVProgress(1, 4), expires_at_ms=10,
    )  # fmt: skip
    assert case.decide(core, StreamEnded(offered), 0) == [] and case.tick(core, 20) == []
    assert ended(case.decide(core, Fenced("declared lost"), 0)) == [(lent, LeaseEnd.CANCELLED)]
    assert lent.outcome == "declared lost" and list(core.leases) == [offered]


@pytest.mark.parametrize(
    ("first_token", "num_tokens", "right"),
    [
        (4, 12, True),
        (4, 16, True),
        (0, 12, False),
        (8, 12, False),
        (4, 4, False),
        (4, 20, False),
        (4, 13, False),
        (4, -4, False),
    ],
)
def test_what_is_granted_must_be_what_was_asked(first_token: int, num_tokens: int, right: bool) -> None:
    asked = request(1)
    granted = LeaseGranted(
        request_id=asked.request_id, attempt=1, deadline_ms=1, worker_id=READER, lease_id=LeaseId("l"), epoch=1,
        lease_ms=1, ticket="t", incarnation="i", first_token=first_token, num_tokens=num_tokens,
    )  # fmt: skip
    assert is_as_asked(asked, granted, 4) == right
