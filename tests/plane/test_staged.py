"""Carriers by way of host memory: what runs ahead of what, how little memory is enough, and what goes wrong between a
card and its host. Cards are fake ones, whose streams run late; that bytes arrive is in test_contract.py."""

import asyncio
import functools
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
import pytest

from dataplane.cards import limits
from dataplane.cards.device import DeviceError
from dataplane.cards.fakes.fake_device import FakeDevice, FakeMemory
from dataplane.cards.lane import Lane
from dataplane.cards.side import wait_done
from dataplane.cards.staged import StagedHolder, StagedReader, StagedSharedHolder
from dataplane.cards.staging_ring import Slot, StagingRing
from dataplane.carriers.carrier import HeldUpError
from dataplane.memory.arena import ByteArray
from dataplane.memory.checksum import FrameHash, sum64
from dataplane.memory.extent import Extent, heads_of
from dataplane.memory.rows import SequenceRuns
from dataplane.protocol.stream import (
    Accepted,
    FramePlanner,
    Header,
    Kind,
    ProtocolError,
    TransferFailedError,
    TransferStats,
    encode_frame,
    encode_header,
)
from dataplane.protocol.wire import SocketWire
from dataplane.times import PlaneTimes
from schemas.handoff import Endpoint
from tests.plane import harness
from tests.plane.harness import (
    DEADLINE_S,
    LAYOUT,
    NUM_BLOCKS,
    ON_CARDS,
    SOURCE,
    STAGED,
    TARGET,
    CardMemory,
    Holder,
    Target,
    fails,
    name_of,
    random_kv,
    running,
    start_thread,
    uniform_shape,
    use_cards,
    write_kv,
)
from tests.plane.test_strangers import END, commit, hears, impostor, knock, opening

FRAME = 4096
RING = 4 * FRAME
EXTENT = Extent(LAYOUT, 0, 300, heads_of(LAYOUT))
SUM64 = FrameHash("sum64")
SHAPE = uniform_shape(LAYOUT, NUM_BLOCKS)
KV = random_kv(300)


@pytest.fixture(params=STAGED)
def carrier(request: pytest.FixtureRequest) -> str:
    return name_of(request.param)


@pytest.fixture
def small_rings(monkeypatch: pytest.MonkeyPatch) -> None:
    """A transfer has many frames, of which four fit at once."""
    monkeypatch.setattr(harness, "STAGING_BYTES", RING)


@pytest.fixture
def card() -> Iterator[CardMemory]:
    made = CardMemory(SHAPE, RING)
    yield made
    made.device.resume()
    made.close()


@pytest.fixture
def wires() -> Iterator[tuple[SocketWire, SocketWire]]:
    ends = tuple(SocketWire(sock) for sock in socket.socketpair())
    yield ends  # type: ignore[misc]
    for end in ends:
        end.close()


def frames_of(num_frames: int) -> list[Header]:
    planner = FramePlanner(EXTENT, FRAME)
    frames = [planner.next([300] * LAYOUT.num_layers) for _ in range(num_frames)]
    assert None not in frames
    return frames  # type: ignore[return-value]


def bytes_of(data: Header) -> bytes:
    """Return a frame as it crosses."""
    layers, tokens = (slice(first, first + num) for first, num in ((data.layer, data.num_layers), data[4:6]))
    return KV[layers, :, tokens].tobytes()


def write_all(array: ByteArray) -> None:
    for layer in range(LAYOUT.num_layers):
        write_kv(array, SHAPE, (SOURCE,), KV, layer, 0, 300)


def fill(ring: StagingRing) -> list[Slot]:
    """Take all of it, for somebody else."""
    return [ring.take(f"somebody {i}", ring.frame_bytes, 0.0) for i in range(4)]


def knows(holder: Holder, carrier: str, *, is_its_own: bool) -> None:
    """The holder has been told of the stream's end; of its own failures, and of a reader's where it waits for Acks.

    What is sent over tcp may all lie in the kernel's buffers when the reader goes.
    """
    _, outcome = holder.gate.wait_outcome()
    assert outcome or (carrier == "tcp" and not is_its_own)


def card_of(end: Holder | Target) -> CardMemory:
    assert isinstance(end.memory, CardMemory)
    return end.memory


# What runs ahead.


def test_frames_are_brought_out_before_they_are_sent(card: CardMemory, wires: tuple[SocketWire, SocketWire]) -> None:
    write_all(card.array)
    holder = StagedHolder(card.arena, SequenceRuns(SHAPE, (SOURCE,)), EXTENT, SUM64)
    frames = frames_of(3)
    card.device.stall()
    for data in frames:  # none of them waits for the card
        holder.begin(data, 0)
    card.device.resume()
    passages = [begun.passage for begun in holder._begun]
    assert all(passage is not None and wait_done(passage.piece, None, DEADLINE_S) for passage in passages)
    for data in frames:
        assert holder.send(wires[0], b"", data, TransferStats(), DEADLINE_S)() == sum64(bytes_of(data))
        assert wires[1].receive_header(DEADLINE_S + 1e9, Kind.DATA) == data
        assert wires[1].receive(data.length, 1e12) == bytes_of(data)
    assert not card.arena.ring.used_bytes, "what was sent needs no slot"
    holder.close()


@pytest.mark.parametrize("shared", [False, True])
def test_nothing_is_read_before_its_mark(card: CardMemory, wires: tuple[SocketWire, SocketWire], shared: bool) -> None:
    """The engine has said that the layer comes; its card has not got there."""
    made = (StagedSharedHolder if shared else StagedHolder)(card.arena, SequenceRuns(SHAPE, (SOURCE,)), EXTENT, SUM64)
    (data,) = frames_of(1)
    card.device.stall(card.stream.handle)
    mark = card.compute(lambda: write_all(card.array))
    made.begin(data, mark)
    passage = made._begun[0].passage
    assert passage is not None and not wait_done(passage.piece, None, 0.2)
    with pytest.raises(DeviceError, match=r"frame 1 is not there within 0\.1 s"):
        made.send(wires[0], b"", data, TransferStats(), 0.1)
    card.device.resume()
    assert made.send(wires[0], b"", data, TransferStats(), DEADLINE_S)() == sum64(bytes_of(data))
    made.close()


def test_frames_are_received_while_others_are_brought_in(
    card: CardMemory, wires: tuple[SocketWire, SocketWire]
) -> None:
    reader = StagedReader(card.arena, SequenceRuns(SHAPE, (TARGET,)), EXTENT, SUM64)
    frames = frames_of(4)
    card.device.stall()
    digests = []
    for data in frames:  # the card does nothing, and none of them waits for it
        wires[0].send([bytes_of(data)], DEADLINE_S)
        digests.append(reader.land(wires[1], data, TransferStats(), 1e12))
    assert not any(passing.passage.piece.event.is_done() for passing in reader._passing)
    card.device.resume()
    assert [digest() for digest in digests] == [sum64(bytes_of(data)) for data in frames]
    assert not card.arena.ring.used_bytes, "what is in place needs no slot"
    reader.close()


def test_a_slot_comes_back_when_it_is_needed_and_its_frame_is_in_place(
    card: CardMemory, wires: tuple[SocketWire, SocketWire]
) -> None:
    reader = StagedReader(card.arena, SequenceRuns(SHAPE, (TARGET,)), EXTENT, SUM64)
    others = fill(card.arena.ring)
    card.arena.ring.release(others[0])
    for data in frames_of(10):
        wires[0].send([bytes_of(data)], DEADLINE_S)
        reader.land(wires[1], data, TransferStats(), 1e12)
    reader.finish(1e12)
    assert len(card.arena.ring.slots) == 3, "those of others"
    reader.close()
    for slot in others:
        card.arena.ring.release(slot)


def test_only_an_ack_makes_room_where_frames_wait_for_acks(
    card: CardMemory, wires: tuple[SocketWire, SocketWire]
) -> None:
    holder = StagedSharedHolder(card.arena, SequenceRuns(SHAPE, (SOURCE,)), EXTENT, SUM64)
    send = functools.partial(holder.send, wires[0], b"", stats=TransferStats(), timeout_s=DEADLINE_S)
    *fit, held_up = frames_of(5)
    places = []
    for data in fit:
        holder.begin(data, 0)
        send(data=data)
        places.append(wires[1].receive_header(1e12, Kind.DATA).at)
    assert sorted(places) == [0, FRAME, 2 * FRAME, 3 * FRAME]
    holder.begin(held_up, 0)
    for num_acked in (0, 1, 2):  # there is room for a first slot of others, until use is low
        holder.acked(num_acked)
        with pytest.raises(HeldUpError):
            send(data=held_up)
    holder.acked(3)
    send(data=held_up)
    assert wires[1].receive_header(1e12, Kind.DATA).at in places[:3]
    holder.acked(5)
    assert not card.arena.ring.used_bytes
    holder.close()


def test_a_frame_that_fits_no_slot_is_refused(card: CardMemory, wires: tuple[SocketWire, SocketWire]) -> None:
    reader = StagedReader(card.arena, SequenceRuns(SHAPE, (TARGET,)), EXTENT, SUM64)
    large = FramePlanner(EXTENT, 2 * FRAME).next([300] * LAYOUT.num_layers)
    assert large is not None
    with pytest.raises(ProtocolError, match="here fit 4096"):
        reader.land(wires[1], large, TransferStats(), 1e12)
    reader.close()


@pytest.mark.parametrize(
    ("changes", "what"),
    [({"num_kv_heads": 512}, "32768 bytes of a token"), ({"num_kv_heads": 8, "whole_blocks": True}, "of a block")],
)
def test_a_token_or_a_block_that_fits_no_slot(card: CardMemory, changes: dict[str, Any], what: str) -> None:
    wide = msgspec.structs.replace(LAYOUT, **changes)
    with pytest.raises(DeviceError, match=what):
        StagedHolder(card.arena, SequenceRuns(SHAPE, (SOURCE,)), Extent(wide, 0, 300, heads_of(wide)), None)


def test_frames_of_no_bytes_are_not_asked_for(make_holder: Callable[..., Holder]) -> None:
    with knock(holder := make_holder(("tcp",))) as sock:
        sock.sendall(opening(holder, "tcp", frame_bytes=0))
        assert b'"malformed"' in hears(sock)


@pytest.mark.usefixtures("small_rings")
@pytest.mark.parametrize("carrier", [*STAGED, *ON_CARDS], indirect=True)
def test_frames_are_as_small_as_the_ring_wants_only_where_they_pass_through_it(
    carrier: str, holder: Holder, target: Target
) -> None:
    holder.compute_all()
    stats = target.read_from(holder, carrier).stats
    assert stats.num_frames >= stats.num_bytes / FRAME if carrier in ("tcp", "shm") else stats.num_frames == 1


# Under pressure.


@pytest.mark.usefixtures("small_rings")
def test_many_streams_move_through_small_rings(carrier: str, make_holder: Callable[..., Holder]) -> None:
    """Eight readers of one holder, and each of them reads twice at once: 16 streams out of a ring of four frames."""
    holder = make_holder((carrier,))
    targets = [Target() for _ in range(8)]
    errors: list[BaseException] = []

    def read(target: Target) -> None:
        try:
            target.read_from(holder, carrier)
        except TransferFailedError as error:
            errors.append(error)

    threads = [start_thread(functools.partial(read, target)) for target in targets * 2]
    holder.compute_all()
    for thread in threads:
        thread.join(DEADLINE_S)
        assert not thread.is_alive(), "a stream does not move"
    assert not errors
    for target in targets:
        assert np.array_equal(target.landed(300), holder.kv)
        target.close()


@pytest.mark.usefixtures("small_rings")
def test_no_slot_for_the_holder(make_holder: Callable[..., Holder], target: Target) -> None:
    for name in ("tcp", "shm"):
        use_cards(holder=True, target=False)
        holder = make_holder((name,), times=PlaneTimes(holder_idle_s=0.3))
        holder.compute_all()
        slots = fill(card_of(holder).arena.ring)
        error = fails(functools.partial(target.read_from, holder, name))
        assert error.code == "device" and "staging ring" in error.detail
        for slot in slots:
            card_of(holder).arena.ring.release(slot)
        target.read_from(holder, name)
        assert np.array_equal(target.landed(300), holder.kv)


@pytest.mark.usefixtures("small_rings")
@pytest.mark.parametrize("carrier", ["host>card:tcp", "host>card:shm"], indirect=True)
def test_no_slot_for_the_reader(carrier: str, holder: Holder, target: Target) -> None:
    holder.compute_all()
    slots = fill(card_of(target).arena.ring)
    error = fails(lambda: target.read_from(holder, carrier, deadline_s=0.3))
    assert error.code == "deadline" and "staging ring" in error.detail
    for slot in slots:
        card_of(target).arena.ring.release(slot)
    target.read_from(holder, carrier)
    assert np.array_equal(target.landed(300), holder.kv)


@pytest.mark.usefixtures("small_rings")
@pytest.mark.parametrize("carrier", ["card>card:tcp", "card>card:shm"], indirect=True)
async def test_cancelled_while_it_waits_for_a_slot(carrier: str, holder: Holder, target: Target) -> None:
    holder.compute_all()
    slots = fill(card_of(target).arena.ring)
    started = asyncio.Event()
    request = target.request(holder.endpoint, holder.ticket(), carrier, 300, deadline_s=10 * DEADLINE_S)
    task = asyncio.create_task(target.reader.read(request, lambda _: started.set()))
    async with asyncio.timeout(DEADLINE_S):
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    for slot in slots:
        card_of(target).arena.ring.release(slot)


@pytest.mark.usefixtures("small_rings")
@pytest.mark.parametrize("carrier", ["card>host:tcp", "card>host:shm"], indirect=True)
def test_server_closes_while_a_stream_waits_for_a_slot(
    carrier: str, make_holder: Callable[..., Holder], target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder = make_holder((carrier,), times=PlaneTimes(holder_idle_s=10 * DEADLINE_S))
    holder.compute_all()
    slots = fill(card_of(holder).arena.ring)
    errors: list[TransferFailedError] = []
    waiting = threading.Event()
    claim = StagingRing.claim

    def noted(*args):
        waiting.set()
        return claim(*args)

    read = functools.partial(target.read_from, holder, carrier)
    monkeypatch.setattr(StagingRing, "claim", noted)
    with running(lambda: errors.append(fails(read))):
        assert waiting.wait(DEADLINE_S)
        holder.server.close()
    assert errors[0].code == "closed"
    for slot in slots:
        card_of(holder).arena.ring.release(slot)


# A card that fails.


@pytest.mark.usefixtures("small_rings")
@pytest.mark.parametrize("what", ["new_stream", "new_event", "new_digest", "move", "download", "upload"])
@pytest.mark.parametrize("carrier", ["card>card:tcp", "card>card:shm"], indirect=True)
def test_calls_that_fail(carrier: str, holder: Holder, target: Target, what: str) -> None:
    """At either end: a typed error, nothing is lost, and the next read is a good one."""
    holder.compute_all()
    for end in (holder, target):
        used = ("download" if end is holder else "upload") if what in ("download", "upload") else what
        card_of(end).device.fail_next(used)
        error = fails(lambda: target.read_from(holder, carrier))
        is_refused = end is holder and what in ("new_stream", "new_event")
        assert error.code == ("carrier" if is_refused else "device")
        assert "failed as it was told to" in error.detail
        if error.code == "device":
            knows(holder, carrier, is_its_own=end is holder)
    target.read_from(holder, carrier)
    assert np.array_equal(target.landed(300), holder.kv)


@pytest.mark.usefixtures("small_rings")
@pytest.mark.parametrize("num_operations", [0, 1, 2, 3, 5, 8, 20, 50])
@pytest.mark.parametrize("end", ["holder", "target"])
@pytest.mark.parametrize("carrier", ["card>card:tcp", "card>card:shm"], indirect=True)
def test_card_that_dies(carrier: str, holder: Holder, target: Target, end: str, num_operations: int) -> None:
    holder.compute_all()
    card_of(holder if end == "holder" else target).device.die_after(num_operations)
    error = fails(lambda: target.read_from(holder, carrier))
    assert error.code == "device" and "fallen off" in error.detail
    landed = error.num_landed_tokens
    assert np.array_equal(target.landed(landed), holder.kv[:, :, :landed])
    knows(holder, carrier, is_its_own=end == "holder")


@pytest.mark.usefixtures("small_rings")
@pytest.mark.parametrize("carrier", ["host>card:tcp", "host>card:shm"], indirect=True)
def test_card_that_does_not_come_to_an_end(
    carrier: str, holder: Holder, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The read is over, and with an error; memory that the card may still write to is lent to nobody."""
    monkeypatch.setattr(limits, "DRAIN_S", 0.1)
    device = card_of(target).device
    device.stall()
    bring_in = Lane.bring_in

    def stalled(*args):
        device.stall()
        return bring_in(*args)

    monkeypatch.setattr(Lane, "bring_in", stalled)
    holder.compute_all()
    error = fails(lambda: target.read_from(holder, carrier, deadline_s=0.3))
    assert error.code == "device" and "has not ended" in error.detail
    assert target.reader.is_stuck
    assert card_of(target).arena.ring.used_bytes
    device.die()  # the only cure


# Damage between the arenas.


@contextmanager
def damaged(place: str, holder: Holder, target: Target) -> Iterator[None]:
    """Flip a bit of the second frame that passes there."""
    num_passed = 0

    def is_second() -> bool:
        nonlocal num_passed
        num_passed += 1
        return num_passed == 2

    download, upload, bring_in = FakeDevice.download, FakeDevice.upload, Lane.bring_in

    def flip_mirror(stream, memory: FakeMemory, first_byte: int) -> None:
        def run() -> None:
            memory.array[first_byte] ^= 1

        stream.run(run)

    def download_flipped(self, stream, source, first_byte, into):
        if is_second():
            flip_mirror(stream, source, first_byte)
        download(self, stream, source, first_byte, into)

    def upload_flipped(self, stream, source, into, first_byte):
        upload(self, stream, source, into, first_byte)
        if is_second():
            flip_mirror(stream, into, first_byte)

    def bring_in_flipped(self, slot, runs, data):
        if is_second():
            self.host(slot)[-1] ^= 1
        return bring_in(self, slot, runs, data)

    def flip_slot(holder, _data, slot, *_):
        if is_second():
            holder._lane.host(slot)[-1] ^= 1

    with pytest.MonkeyPatch.context() as patch:
        match place:
            case "download":
                card_of(holder).device.corrupt_next("download")
            case "upload":
                card_of(target).device.corrupt_next("upload")
            case "scatter":
                card_of(target).device.corrupt_next("move")
            case "holder's mirror":
                patch.setattr(FakeDevice, "download", download_flipped)
            case "reader's mirror":
                patch.setattr(FakeDevice, "upload", upload_flipped)
            case "holder's ring":
                for kind in (StagedHolder, StagedSharedHolder):
                    patch.setattr(kind, "_frame", _then(flip_slot, kind._frame))
            case "reader's ring":
                patch.setattr(Lane, "bring_in", bring_in_flipped)
        yield


def _then(first: Callable[..., object], second: Callable[..., object]) -> Callable[..., object]:
    def both(*args: object) -> object:
        first(*args)
        return second(*args)

    return both


PLACES = ["download", "upload", "scatter", "holder's mirror", "reader's mirror", "holder's ring", "reader's ring"]


@pytest.mark.usefixtures("small_rings")
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("carrier", ["card>card:tcp", "card>card:shm"], indirect=True)
def test_damage_is_found(carrier: str, holder: Holder, target: Target, place: str) -> None:
    holder.compute_all()
    with damaged(place, holder, target):
        error = fails(lambda: target.read_from(holder, carrier))
    at_holder = carrier == "tcp" and (place == "download" or place.startswith("holder"))
    assert error.code == ("device" if at_holder else "digest"), "what crosses a network is looked at before it is sent"
    landed = error.num_landed_tokens
    assert landed < 300 and np.array_equal(target.landed(landed), holder.kv[:, :, :landed])
    target.read_from(holder, carrier)
    assert np.array_equal(target.landed(300), holder.kv)


@pytest.mark.usefixtures("small_rings")
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("carrier", ["card>card:tcp"], indirect=True)
def test_damage_is_found_where_what_crosses_is_compressed(
    carrier: str, make_holder: Callable[..., Holder], target: Target, place: str
) -> None:
    """Before it is packed, and after it was unpacked: the wire's own digest does not see it."""
    numbers = np.random.default_rng(3).standard_normal((LAYOUT.num_layers, 2, 300, 16)).astype(np.float32)
    holder = make_holder((carrier,), kv=numbers.view(np.uint8))
    holder.compute_all()
    with damaged(place, holder, target):
        error = fails(lambda: target.read_from(holder, carrier, wire_dtype="int8"))
    if place in ("upload", "scatter") or place.startswith("reader"):
        assert error.code == "digest" and "on its way to the card" in error.detail
    else:
        assert error.code == "device" and "on its way from the card" in error.detail
    target.read_from(holder, carrier, wire_dtype="int8")


# A holder that lies.


@pytest.mark.parametrize("on_card", [False, True])
@pytest.mark.parametrize("at", [1 << 63, harness.STAGING_BYTES, harness.STAGING_BYTES - FRAME + 1])
def test_frames_outside_the_holder_s_memory(make_holder: Callable[..., Holder], on_card: bool, at: int) -> None:
    use_cards(holder=True, target=on_card)
    holder, target = make_holder(("shm",)), Target()
    target.array[:] = 0xAB
    said = encode_frame(Kind.ACCEPTED, Accepted(carrier="shm", nonce="n", staged=True))
    (data,) = frames_of(1)
    with impostor(said + encode_header(data._replace(at=at)) + commit() + END) as endpoint:
        error = fails(lambda: target.reader.read_blocking(_request(target, holder, endpoint)))
    assert error.code == "protocol" and f"said to lie at {at}" in error.detail
    assert (target.array == 0xAB).all()
    target.close()


def test_a_place_where_frames_have_none(make_holder: Callable[..., Holder]) -> None:
    """The holder's arena is in host memory, its frames lie by its tables; or they follow on the wire."""
    for name in ("shm", "tcp"):
        use_cards(holder=False, target=True)
        holder, target = make_holder((name,)), Target()
        accepted = Accepted(
            carrier=name, nonce="n", num_blocks=SHAPE.num_blocks, heads=heads_of(LAYOUT), tables=holder.tables
        )
        (data,) = frames_of(1)
        said = encode_frame(Kind.ACCEPTED, accepted) + encode_header(data._replace(at=1)) + bytes_of(data)
        with impostor(said) as endpoint:
            error = fails(functools.partial(target.reader.read_blocking, _request(target, holder, endpoint, name)))
        assert error.code == "protocol" and "said to lie at 1" in error.detail
        target.close()


def _request(target: Target, holder: Holder, endpoint: Endpoint, name: str = "shm"):
    endpoint = msgspec.structs.replace(holder.endpoint, port=endpoint.port)
    return target.request(endpoint, holder.ticket(), name, 300)
