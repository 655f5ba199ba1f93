import pytest

from dataplane.blocks.layout import BlockTable, Segment
from dataplane.blocks.lease import Lease, LeaseRefusedError, LeaseState, LeaseTable
from schemas.ids import LeaseId, WorkerId

HOLDER, READER = WorkerId("p"), WorkerId("d")
LEASE = LeaseId("lease-1")


def grant(table: LeaseTable, lease_id: LeaseId = LEASE, expires_at_ms: int = 100, *segments: Segment) -> Lease:
    return table.grant(
        lease_id=lease_id,
        holder=HOLDER,
        reader=READER,
        tables=(BlockTable(segments or (Segment(0, 2),)),),
        num_tokens=20,
        expires_at_ms=expires_at_ms,
    )


def refusal(table: LeaseTable, epoch: int, reader: WorkerId = READER, now_ms: int = 0) -> str:
    with pytest.raises(LeaseRefusedError) as raised:
        table.check(LEASE, epoch, reader, now_ms)
    assert raised.value.lease_id == LEASE
    return raised.value.reason


def test_lease_is_read_by_its_reader_in_its_epoch_in_its_time() -> None:
    table = LeaseTable()
    assert refusal(table, 1) == "unknown"
    lease = grant(table)
    assert table.check(LEASE, lease.epoch, READER, 99) == lease
    assert table.is_current(LEASE, lease.epoch, 99)
    assert refusal(table, lease.epoch, now_ms=100) == "expired"
    assert not table.is_current(LEASE, lease.epoch, 100)
    assert refusal(table, lease.epoch, WorkerId("other")) == "reader"
    assert refusal(table, lease.epoch + 1) == "epoch"
    assert not table.is_current(LEASE, lease.epoch + 1, 0)


def test_every_grant_has_an_epoch_of_its_own() -> None:
    table = LeaseTable()
    first = grant(table)
    table.end(LEASE, "landed")
    second = grant(table)
    assert second.epoch > first.epoch
    assert refusal(table, first.epoch) == "epoch"
    assert not table.is_current(LEASE, first.epoch, 0)


def test_active_lease_is_not_granted_again() -> None:
    table = LeaseTable()
    grant(table)
    with pytest.raises(AssertionError):
        grant(table)


def test_end_is_for_one_caller_only() -> None:
    table = LeaseTable()
    lease = grant(table)
    ended = table.end(LEASE, "landed")
    assert ended is not None
    assert (ended.state, ended.outcome, ended.tables) == (LeaseState.ENDED, "landed", lease.tables)
    assert table.end(LEASE, "aborted") is None
    assert table.end(LeaseId("never"), "x") is None
    assert refusal(table, lease.epoch) == "unknown"
    assert len(table) == 0 and table.num_leased_blocks == 0


def test_expire_ends_what_is_over_in_order() -> None:
    table = LeaseTable()
    for name, at in [("c", 30), ("a", 10), ("b", 20)]:
        grant(table, LeaseId(name), at)
    assert [lease.lease_id for lease in table.expire(20)] == ["a", "b"]
    assert table.expire(20) == []
    (last,) = table.expire(30)
    assert (last.lease_id, last.state) == ("c", LeaseState.EXPIRED)


def test_renew_never_shortens_and_revives_nothing() -> None:
    table = LeaseTable()
    grant(table)
    assert table.renew(LEASE, 50, 10).expires_at_ms == 100
    renewed = table.renew(LEASE, 95, 10)
    assert renewed.expires_at_ms == 105
    assert table.check(LEASE, renewed.epoch, READER, 104) == renewed
    table.expire(105)
    with pytest.raises(LeaseRefusedError):
        table.renew(LEASE, 105, 10)


def test_blocks_under_two_leases_count_once() -> None:
    table = LeaseTable()
    grant(table, LeaseId("a"), 100, Segment(0, 4), Segment(10, 2))
    grant(table, LeaseId("b"), 100, Segment(2, 4), Segment(10, 1), Segment(20, 1))
    assert table.num_leased_blocks == 6 + 2 + 1
    assert [lease.lease_id for lease in table] == ["a", "b"]
    for lease in table:
        table.end(lease.lease_id, "x")
    assert table.num_leased_blocks == 0


def test_a_ring_s_blocks_count_once_and_each_group_has_its_own() -> None:
    table = LeaseTable()
    ring = BlockTable((Segment(3, 2), Segment(3, 2), Segment(3, 1)), first_block=4)
    lease = table.grant(
        lease_id=LEASE,
        holder=HOLDER,
        reader=READER,
        tables=(BlockTable((Segment(3, 9),)), ring),
        num_tokens=140,
        expires_at_ms=100,
        first_token=64,
    )
    assert table.num_leased_blocks == 9 + 2
    assert (lease.first_token, lease.num_tokens) == (64, 140)
    assert table.check(LEASE, lease.epoch, READER, 0).tables == (BlockTable((Segment(3, 9),)), ring)


def test_a_lease_is_read_for_its_tenant() -> None:
    table = LeaseTable()
    lease = table.grant(
        lease_id=LEASE,
        holder=HOLDER,
        reader=READER,
        tables=(BlockTable((Segment(0, 2),)),),
        num_tokens=20,
        expires_at_ms=100,
        tenant="acme",
    )
    assert table.check(LEASE, lease.epoch, READER, 0, "acme") is lease
    assert table.check(LEASE, lease.epoch, READER, 0) is lease, "a reader whose tenant nobody asks for"
    for other in ("", "other"):
        with pytest.raises(LeaseRefusedError) as raised:
            table.check(LEASE, lease.epoch, READER, 0, other)
        assert raised.value.reason == "tenant"
