"""What can go wrong between a holder and its reader. Nothing wrong is ever believed, and both ends are told."""

import asyncio
import threading
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import pytest

from dataplane.ends.reader import Landed
from dataplane.limits import MAX_TRAILER_BYTES
from dataplane.memory import frames
from dataplane.protocol.stream import HEADER_BYTES, Kind, TransferFailedError, decode_header
from dataplane.protocol.wire import SocketWire
from dataplane.times import PlaneTimes
from schemas.ids import WorkerId
from tests.plane import fake_card
from tests.plane.fake_card import FakeStream
from tests.plane.harness import (
    CARRIERS,
    DEADLINE_S,
    FROM_OR_TO_CARDS,
    LAYOUT,
    Holder,
    Target,
    fails,
    name_of,
    now_ms,
    running,
)
from tests.waiting import wait_until


@pytest.fixture(params=[*CARRIERS, *FROM_OR_TO_CARDS])
def carrier(request: pytest.FixtureRequest) -> str:
    return name_of(request.param)


class Midway:
    """A read that stands in mid-stream: the first 20 tokens have come, the holder computes no more."""

    def __init__(self, holder: Holder, target: Target, carrier: str) -> None:
        self.started = threading.Event()
        self.error: TransferFailedError | None = None
        self._read = lambda: target.read_from(holder, carrier, lambda _: self.started.set())
        holder.compute(300, end=20)

    def run(self) -> None:
        self.error = fails(self._read)


# Refused before the first byte.


@pytest.mark.parametrize(
    ("make_ticket", "code", "detail"),
    [
        (lambda h: h.ticket(secret=b"another secret"), "ticket", "signature"),
        (lambda h: h.ticket(expires_at_ms=now_ms() - 1), "ticket", "expired"),
        (lambda h: "junk", "ticket", "signature"),
        (lambda h: "", "ticket", "signature"),
        (lambda h: h.ticket(reader=WorkerId("decode-1")), "lease", "reader"),
        (lambda h: h.ticket(epoch=h.lease.epoch + 1), "lease", "epoch"),
        (lambda h: h.ticket(lease_id="lease-1"), "lease", "unknown"),
    ],
)
def test_ticket_that_opens_nothing(
    carrier: str, holder: Holder, target: Target, make_ticket: Callable[[Holder], str], code: str, detail: str
) -> None:
    holder.compute_all()
    error = fails(lambda: target.read_from(holder, carrier, ticket=make_ticket(holder)))
    assert (error.code, error.detail, error.num_landed_tokens) == (code, detail, 0)
    assert not target.array.any(), "not a byte was written"
    holder.server.close()  # its threads have ended: all is counted
    assert not holder.gate.num_started and not holder.server.num_junk
    assert holder.server.num_refused == (code == "ticket"), "forged is counted; late or ended is not"


def test_ended_lease_opens_nothing(carrier: str, holder: Holder, target: Target) -> None:
    holder.compute_all()
    holder.end_lease()
    assert fails(lambda: target.read_from(holder, carrier)).detail == "unknown"


def test_expired_lease_opens_nothing(carrier: str, holder: Holder, target: Target) -> None:
    lease, _ = holder.grant("lease-1", lease_ms=0)
    assert fails(lambda: target.read_from(holder, carrier, ticket=holder.ticket(lease))).detail == "expired"


@pytest.mark.parametrize("field", ["weights", "dtype", "head_dim", "block_size"])
def test_other_layout_is_refused(carrier: str, holder: Holder, field: str) -> None:
    changed = {"weights": "other", "dtype": "float16", "head_dim": 16, "block_size": 32}[field]
    target = Target(msgspec.structs.replace(LAYOUT, **{field: changed}))
    holder.compute_all()
    error = fails(lambda: target.read_from(holder, carrier))
    assert error.code == "fingerprint"
    assert not target.array.any()
    target.close()


def test_more_than_the_lease_is_refused(carrier: str, holder: Holder, target: Target) -> None:
    assert fails(lambda: target.read_from(holder, carrier, num_tokens=301)).code == "range"


def test_too_many_streams(carrier: str, make_holder: Callable[..., Holder], target: Target) -> None:
    holder = make_holder((carrier,), max_streams=1)
    midway, other = Midway(holder, target, carrier), Target(name="decode-1")
    with running(midway.run):
        assert midway.started.wait(DEADLINE_S)
        assert fails(lambda: other.read_from(holder, carrier)).code == "busy"
        holder.progress.fail("done")
    other.close()


def test_who_is_full_has_a_limit_of_its_own_to_say_so(
    make_holder: Callable[..., Holder], target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It accepts nobody while it says so: not for as long as its log is silent about a peer."""
    send, refused_within = SocketWire.send, list[float]()

    def noted(wire: SocketWire, buffers: Sequence[bytes], timeout_s: float) -> None:
        if decode_header(bytes(buffers[0])[:HEADER_BYTES], *Kind).kind is Kind.REFUSED:
            refused_within.append(timeout_s)
        send(wire, buffers, timeout_s)

    holder = make_holder(("tcp",), max_streams=1, times=PlaneTimes(busy_send_s=0.37))
    midway, other = Midway(holder, target, "tcp"), Target(name="decode-1")
    with running(midway.run):
        assert midway.started.wait(DEADLINE_S)
        monkeypatch.setattr(SocketWire, "send", noted)
        assert fails(lambda: other.read_from(holder, "tcp")).code == "busy"
        monkeypatch.setattr(SocketWire, "send", send)
        holder.progress.fail("done")
    assert refused_within == [0.37]
    other.close()


def test_carrier_that_is_not_offered(carrier: str, make_holder: Callable[..., Holder], target: Target) -> None:
    holder = make_holder(tuple({"loopback", "shm", "tcp"} - {carrier}))
    assert fails(lambda: target.read_from(holder, carrier)).code == "carrier"
    claimed = msgspec.structs.replace(holder.endpoint, carriers=("loopback", "shm", "tcp"))
    request = target.request(claimed, holder.ticket(), carrier, 300)
    assert fails(lambda: target.reader.read_blocking(request)).code == "carrier"


def test_other_host_has_no_such_arena(make_holder: Callable[..., Holder], target: Target) -> None:
    holder = make_holder(("shm", "tcp"))
    holder.compute_all()
    for changes in ({"arena_nonce": "0" * 32}, {"arena": "kvmesh-1-0123456789abcdef"}, {"arena": "../etc/passwd"}):
        endpoint = msgspec.structs.replace(holder.endpoint, **changes)
        request = target.request(endpoint, holder.ticket(), "shm", 300)
        assert fails(lambda request=request: target.reader.read_blocking(request)).code == "carrier"
        request = target.request(endpoint, holder.ticket(), "auto", 300)
        assert target.reader.read_blocking(request).stats.carrier == "tcp"


def test_nobody_listens(make_holder: Callable[..., Holder], target: Target) -> None:
    holder = make_holder(("tcp",))
    endpoint, ticket = holder.endpoint, holder.ticket()
    holder.close()
    request = target.request(endpoint, ticket, "tcp", 300)
    assert fails(lambda: target.reader.read_blocking(request)).code == "connect"


# In mid-stream.


def test_blocks_reused_while_they_are_read(carrier: str, holder: Holder, target: Target) -> None:
    """The lease ends and the memory gets another content after the bytes were sent: that frame is not believed."""

    def reuse(num_rechecks: int) -> None:
        if num_rechecks == 2:
            holder.end_lease()
            holder.array[:] = 0xEE

    holder.gate.before_recheck = reuse
    started = threading.Event()
    errors: list[TransferFailedError] = []

    def attempt() -> None:
        errors.append(fails(lambda: target.read_from(holder, carrier, lambda _: started.set())))

    with running(attempt):
        holder.compute(300, end=20)
        assert started.wait(DEADLINE_S)
        wait_until(lambda: holder.gate.num_rechecks > 0)  # else its first look might be at everything
        with holder.gate.lock:  # only now may the holder look at the lease again
            holder.compute(300, start=20)
    assert errors[0].code == "holder" and "lease" in errors[0].detail
    # How much the first look committed depends on how many Acks had come; what it did is what was there then.
    landed = errors[0].num_landed_tokens
    assert np.array_equal(target.landed(landed), holder.kv[:, :, :landed])
    assert "lease" in holder.gate.wait_outcome()[1]


def test_lease_ends_before_the_first_commit(carrier: str, holder: Holder, target: Target) -> None:
    holder.gate.before_recheck = lambda _: holder.end_lease()
    holder.compute_all()
    error = fails(lambda: target.read_from(holder, carrier))
    assert (error.code, error.num_landed_tokens) == ("holder", 0)


def test_lease_ends_after_the_last_commit(carrier: str, holder: Holder, target: Target) -> None:
    """All has landed and is good, but the end is not confirmed: the tokens count, the trailer does not come."""
    holder.gate.before_recheck = lambda num_rechecks: holder.end_lease() if num_rechecks == 2 else None
    holder.compute_all()
    error = fails(lambda: target.read_from(holder, carrier))
    assert (error.code, error.num_landed_tokens) == ("holder", 300)
    assert np.array_equal(target.landed(300), holder.kv)


def test_flipped_byte(carrier: str, holder: Holder, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = frames.digest

    def digest_of_something_else(rows, stats, hasher):
        changed = np.concatenate([view.flatten() for view in rows.views()])
        changed[-1] ^= 1
        return digest(frames.packed_rows(changed, rows.row_bytes), stats, hasher)

    def damage(data) -> None:
        data.reshape(-1)[-1] ^= 1

    holder.compute_all()
    if holder.card is None:
        monkeypatch.setattr(frames, "digest", digest_of_something_else)
    elif carrier == "tcp":
        holder.card.damages = "download"
    else:
        monkeypatch.setattr(fake_card, "crossed", damage)
    error = fails(lambda: target.read_from(holder, carrier))
    seen_by_holder = holder.card is not None and carrier == "tcp"  # it compares with what its card has found
    assert (error.code, error.num_landed_tokens) == ("device" if seen_by_holder else "digest", 0)
    assert holder.gate.wait_outcome()[0] is not None


def test_holder_fails(carrier: str, holder: Holder, target: Target) -> None:
    midway = Midway(holder, target, carrier)
    with running(midway.run):
        assert midway.started.wait(DEADLINE_S)
        holder.progress.fail("the engine has failed")
    assert midway.error is not None
    assert (midway.error.code, midway.error.detail) == ("holder", "the engine has failed")
    assert midway.error.num_landed_tokens in (0, 20)
    assert holder.gate.wait_outcome()[1] == "the engine has failed"


def test_failed_progress_serves_nothing(carrier: str, holder: Holder, target: Target) -> None:
    holder.compute_all()
    holder.progress.fail("taken back")
    error = fails(lambda: target.read_from(holder, carrier))
    assert (error.code, error.detail, error.num_landed_tokens) == ("holder", "taken back", 0)
    stats, outcome = holder.gate.wait_outcome()
    assert (stats.num_frames, outcome) == (0, "taken back")


def test_server_closes_in_mid_stream(carrier: str, holder: Holder, target: Target) -> None:
    midway = Midway(holder, target, carrier)
    with running(midway.run):
        assert midway.started.wait(DEADLINE_S)
        holder.server.close()
    assert midway.error is not None and midway.error.code == "closed"
    assert holder.server.num_streams == 0


def test_oversized_trailer(carrier: str, holder: Holder, target: Target) -> None:
    holder.compute_all(trailer=bytes(MAX_TRAILER_BYTES + 1))
    assert fails(lambda: target.read_from(holder, carrier)).code == "holder"


def test_largest_trailer(carrier: str, holder: Holder, target: Target) -> None:
    holder.compute_all(trailer=bytes(MAX_TRAILER_BYTES))
    assert len(target.read_from(holder, carrier).trailer) == MAX_TRAILER_BYTES


# Cancelled.


async def test_cancelled_in_mid_stream(carrier: str, holder: Holder, target: Target) -> None:
    started = asyncio.Event()
    task = asyncio.create_task(_read(target, holder, carrier, lambda _: started.set()))
    holder.compute(300, end=20)
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not [t for t in threading.enumerate() if t.name == "kv-read"], "the thread has ended first"
    target.array[:] = 0xAB
    holder.compute(300, start=20)
    outcome = await asyncio.to_thread(holder.gate.wait_outcome)
    assert "gone" in outcome[1]
    assert (target.array == 0xAB).all(), "no late write"


async def test_cancelled_before_it_has_begun(carrier: str, holder: Holder, target: Target) -> None:
    for num_steps in range(3):
        task = asyncio.create_task(_read(target, holder, carrier))
        for _ in range(num_steps):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not [t for t in threading.enumerate() if t.name == "kv-read"]


async def test_cancelled_twice(carrier: str, holder: Holder, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second cancellation does not free the blocks under a copy that still runs."""
    copying, go_on = threading.Event(), threading.Event()
    rows, copy = frames.SequenceMemory.rows, FakeStream.copy

    def held_up(self, data):
        if target.card is None and np.may_share_memory(self.array, target.array):
            copying.set()
            assert go_on.wait(DEADLINE_S)
        return rows(self, data)

    def held_up_on_the_card(stream, source, source_rows, memory, rows):
        if memory is target.arena.memory:
            target.card.is_stalled = True
            copying.set()
        copy(stream, source, source_rows, memory, rows)

    monkeypatch.setattr(frames.SequenceMemory, "rows", held_up)
    if target.card is not None:
        monkeypatch.setattr(FakeStream, "copy", held_up_on_the_card)
    holder.compute_all()
    task = asyncio.create_task(_read(target, holder, carrier))
    assert await asyncio.to_thread(copying.wait, DEADLINE_S)
    for _ in range(2):
        task.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert not task.done(), "the thread may still write"
    go_on.set()
    if target.card is not None:
        target.card.is_stalled = False
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not [t for t in threading.enumerate() if t.name == "kv-read"]


async def test_cancelled_while_connecting(target: Target, make_holder: Callable[..., Holder]) -> None:
    """Towards an address that never answers."""
    holder = make_holder(("tcp",))
    silent = msgspec.structs.replace(holder.endpoint, host="192.0.2.1")
    task = asyncio.create_task(_read(target, holder, "tcp", endpoint=silent))
    await asyncio.sleep(0)
    task.cancel()
    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(asyncio.CancelledError):
            await task


async def _read(
    target: Target, holder: Holder, carrier: str, on_started: Callable[[str], None] = lambda _: None, endpoint=None
) -> Landed:
    request = target.request(endpoint or holder.endpoint, holder.ticket(), carrier, 300)
    return await target.reader.read_kv(request, on_started)
