"""Which leases there are, and who may read under them."""

import pytest

from dataplane.blocks.layout import BlockTable, Segment
from dataplane.blocks.ticket import Ticket
from dataplane.protocol.gate import LeaseRefusedError
from dataplane.protocol.progress import KVProgress
from schemas.ids import LeaseId, RequestId, WorkerId, new_nonce
from schemas.kv import LeaseEnd
from services.holder.core import leases as leases_module
from services.holder.core.leases import NEVER, Grant, LeaseTable

HOLDER, READER = WorkerId("p"), WorkerId("d")
LEASE = LeaseId("lease-1")


def grant(table: LeaseTable, lease_id: LeaseId = LEASE, expires_at_ms: int = 100, *segments: Segment) -> Grant:
    return table.grant(
        lease_id=lease_id,
        holder=HOLDER,
        reader=READER,
        request_id=RequestId("r1"),
        attempt=1,
        tables=(BlockTable(segments or (Segment(0, 2),)),),
        num_tokens=20,
        progress=KVProgress(1, 20),
        expires_at_ms=expires_at_ms,
    )


def ticket(epoch: int, reader: WorkerId = READER, tenant: str = "", **changes) -> Ticket:
    fields = {"nonce": "n", "holder": HOLDER, "incarnation": "i", "expires_at_ms": NEVER} | changes
    return Ticket(lease_id=LEASE, epoch=epoch, reader=reader, tenant=tenant, **fields)


@pytest.fixture(autouse=True)
def known_nonce(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases_module, "new_nonce", lambda: "n")


def refusal(table: LeaseTable, epoch: int, reader: WorkerId = READER, now_ms: int = 0, tenant: str = "") -> str:
    with pytest.raises(LeaseRefusedError) as raised:
        table.lease_of(ticket(epoch, reader, tenant), "i", now_ms)
    assert raised.value.lease_id == LEASE
    return raised.value.reason


def test_lease_is_read_by_its_reader_in_its_epoch_in_its_time() -> None:
    table = LeaseTable()
    assert refusal(table, 1) == "unknown"
    lease = grant(table)
    assert table.lease_of(ticket(lease.epoch), "i", 99) is lease
    assert lease.is_valid(99)
    assert refusal(table, lease.epoch, now_ms=100) == "expired"
    assert not lease.is_valid(100)
    assert refusal(table, lease.epoch, WorkerId("other")) == "reader"
    assert refusal(table, lease.epoch + 1) == "epoch"


def test_every_grant_has_an_epoch_of_its_own() -> None:
    table = LeaseTable()
    first = grant(table)
    table.end(LEASE, LeaseEnd.LANDED)
    second = grant(table)
    assert second.epoch > first.epoch
    assert refusal(table, first.epoch) == "epoch"
    assert second.is_valid(0) and not first.is_valid(0), "who has opened the first one does not read the second"


def test_active_lease_is_not_granted_again() -> None:
    table = LeaseTable()
    grant(table)
    with pytest.raises(AssertionError):
        grant(table)


def test_end_is_for_one_caller_only() -> None:
    table = LeaseTable()
    lease = grant(table)
    assert (lease.end, lease.outcome) == (None, "")
    assert table.end(LEASE, LeaseEnd.LANDED) is lease
    assert (lease.end, lease.outcome) == (LeaseEnd.LANDED, "landed")
    assert table.end(LEASE, LeaseEnd.CANCELLED) is None
    assert table.end(LeaseId("never"), LeaseEnd.CANCELLED) is None
    assert lease.end is LeaseEnd.LANDED
    assert refusal(table, lease.epoch) == "unknown"
    assert len(table) == 0 and table.num_leased_blocks == 0


def test_expire_ends_what_is_over_in_order() -> None:
    table = LeaseTable()
    for name, at in [("c", 30), ("a", 10), ("b", 20)]:
        grant(table, LeaseId(name), at)
    assert [lease.lease_id for lease in table.expire(20)] == ["a", "b"]
    assert table.expire(20) == []
    (last,) = table.expire(30)
    assert (last.lease_id, last.end) == ("c", LeaseEnd.EXPIRED)


def test_renew_never_shortens_and_revives_nothing() -> None:
    table = LeaseTable()
    lease = grant(table)
    table.renew(lease, 50, 10)
    assert lease.expires_at_ms == 100
    table.renew(lease, 95, 10)
    assert lease.expires_at_ms == 105
    assert table.lease_of(ticket(lease.epoch), "i", 104) is lease
    table.expire(105)
    table.renew(lease, 105, 10)
    assert lease.expires_at_ms == 105 and refusal(table, lease.epoch) == "unknown"


def test_a_stream_that_makes_progress_counts_once() -> None:
    table = LeaseTable()
    lease = grant(table)
    assert table.take_moved() == []
    lease.has_moved = True
    assert table.take_moved() == [lease]
    assert table.take_moved() == []


def test_blocks_under_two_leases_count_once() -> None:
    table = LeaseTable()
    grant(table, LeaseId("a"), 100, Segment(0, 4), Segment(10, 2))
    grant(table, LeaseId("b"), 100, Segment(2, 4), Segment(10, 1), Segment(20, 1))
    assert table.num_leased_blocks == 6 + 2 + 1
    assert [lease.lease_id for lease in table] == ["a", "b"]
    for lease in table:
        table.end(lease.lease_id, LeaseEnd.LANDED)
    assert table.num_leased_blocks == 0


def test_a_ring_s_blocks_count_once_and_each_group_has_its_own() -> None:
    table = LeaseTable()
    ring = BlockTable((Segment(3, 2), Segment(3, 2), Segment(3, 1)), first_block=4)
    lease = table.grant(
        lease_id=LEASE,
        holder=HOLDER,
        reader=READER,
        request_id=RequestId("r1"),
        attempt=1,
        tables=(BlockTable((Segment(3, 9),)), ring),
        num_tokens=140,
        progress=KVProgress(1, 140),
        expires_at_ms=100,
        first_token=64,
    )
    assert table.num_leased_blocks == 9 + 2
    assert (lease.first_token, lease.num_tokens) == (64, 140)
    assert table.lease_of(ticket(lease.epoch), "i", 0).tables == (BlockTable((Segment(3, 9),)), ring)


def test_a_lease_is_read_for_its_tenant() -> None:
    table = LeaseTable()
    lease = table.grant(
        lease_id=LEASE,
        holder=HOLDER,
        reader=READER,
        request_id=RequestId("r1"),
        attempt=1,
        tables=(BlockTable((Segment(0, 2),)),),
        num_tokens=20,
        progress=KVProgress(1, 20),
        expires_at_ms=100,
        tenant="acme",
    )
    assert table.lease_of(ticket(lease.epoch, tenant="acme"), "i", 0) is lease
    for other in ("", "other"):
        assert refusal(table, lease.epoch, tenant=other) == "tenant"


@pytest.mark.parametrize(
    ("field", "value"),
    [("holder", "other"), ("incarnation", "a life before"), ("nonce", "another"), ("expires_at_ms", NEVER - 1)],
)
def test_a_ticket_is_compared_whole(field: str, value: object) -> None:
    table = LeaseTable()
    lease = grant(table)
    with pytest.raises(LeaseRefusedError) as raised:
        table.lease_of(ticket(lease.epoch, **{field: value}), "i", 0)
    assert raised.value.reason == field


def test_what_a_former_life_has_signed_opens_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ids and the epochs begin again; the nonce does not, and each life has a name of its own."""
    monkeypatch.setattr(leases_module, "new_nonce", new_nonce)
    before, after = LeaseTable(), LeaseTable()
    old, new = grant(before), grant(after)
    assert (old.lease_id, old.epoch) == (new.lease_id, new.epoch)
    for incarnation, reason in (("first", "incarnation"), ("second", "nonce")):
        with pytest.raises(LeaseRefusedError) as raised:
            after.lease_of(old.ticket(incarnation), "second", 0)
        assert raised.value.reason == reason
    assert after.lease_of(new.ticket("second"), "second", 0) is new
