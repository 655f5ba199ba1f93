"""An arena on a card: marks on the engine's stream, handles for others, and nothing left when it is closed."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from dataplane.blocks.layout import KVLayout, uniform_shape
from dataplane.cards.device import Device, DeviceError
from dataplane.cards.device_arena import NUM_MARKS, READY, DeviceArena, DeviceHandles, PeerArena
from dataplane.cards.fakes.fake_device import FakeDevice
from dataplane.memory.arena import Arena, ArenaTooLargeError
from tests.gpu import GPU_MARKS, card, needs_gpu
from tests.plane.harness import DEADLINE_S, LAYOUT

SHAPE = uniform_shape(LAYOUT, 8)
STAGING_BYTES = 1 << 16


@pytest.fixture
def device() -> Iterator[FakeDevice]:
    made = FakeDevice(max_delay_s=0.002)
    yield made
    made.resume()
    made.close()
    assert not +made.opened, f"left open: {+made.opened}"


@pytest.fixture
def arena(device: FakeDevice) -> Iterator[DeviceArena]:
    made = DeviceArena(device, SHAPE, STAGING_BYTES)
    yield made
    made.close()


@pytest.fixture
def peer() -> Iterator[FakeDevice]:
    made = FakeDevice(owner="peer")
    yield made
    made.close()
    assert not +made.opened, f"left open: {+made.opened}"


@pytest.mark.parametrize("kind", ["fake", pytest.param("cuda", marks=GPU_MARKS)])
def test_an_arena_is_what_its_shape_says(kind: str) -> None:
    device: Device = FakeDevice() if kind == "fake" else card()
    arena = DeviceArena(device, SHAPE, STAGING_BYTES)
    assert arena.num_bytes == arena.memory.num_bytes == SHAPE.num_bytes
    assert arena.staging.nbytes == arena.mirror.num_bytes == STAGING_BYTES
    stream = device.new_stream()
    marks = [arena.mark(stream.handle) for _ in range(3)]
    assert marks == [1, 2, 3]
    assert arena.wait_ready(3, DEADLINE_S) and arena.is_ready(1)
    stream.close()
    arena.close()
    device.close()


def test_staging_is_a_file_that_others_on_the_host_can_map(arena: DeviceArena) -> None:
    arena.staging[:3] = (1, 2, 3)
    attached = Arena.attach(arena.name, arena.nonce)
    assert attached.num_bytes == STAGING_BYTES and attached.array[:3].tolist() == [1, 2, 3]
    attached.close()
    assert arena.name.startswith(f"kvmesh-{os.getpid()}-"), "what cleans up after the dead must know it"


def test_a_mark_is_of_what_was_put_on_the_stream_before_it(device: FakeDevice, arena: DeviceArena) -> None:
    stream, done = device.new_stream(), []
    device.stall(stream.handle)
    for layer in range(5):
        stream.run(lambda layer=layer: done.append(layer))
        assert arena.mark(stream.handle) == layer + 1
    assert arena.is_ready(READY) and not arena.is_ready(1) and not arena.wait_ready(5, 0.01)
    device.resume()
    for mark in range(1, 6):
        assert arena.wait_ready(mark, DEADLINE_S)
        assert done[:mark] == list(range(mark))
    stream.close()


def test_marks_come_round_again(device: FakeDevice, arena: DeviceArena) -> None:
    """An old mark may be waited for longer than need be, and is never taken for ready too early."""
    stream, done = device.new_stream(), []
    for number in range(1, 3 * NUM_MARKS):
        stream.run(lambda number=number: done.append(number))
        assert arena.mark(stream.handle) == number
    for mark in (1, NUM_MARKS, NUM_MARKS + 1, 2 * NUM_MARKS + 5, 3 * NUM_MARKS - 1):
        assert arena.wait_ready(mark, DEADLINE_S)
        assert done[-1] >= mark
    stream.close()


def test_marks_of_several_streams_cover_each_other(device: FakeDevice, arena: DeviceArena) -> None:
    """An engine that goes on on another stream: the later mark says that the earlier one is ready, too."""
    streams = [device.new_stream() for _ in range(2)]
    for round_ in range(20):
        device.stall(streams[round_ % 2].handle)
        marks = [arena.mark(streams[(round_ + i) % 2].handle) for i in range(2)]
        assert not arena.wait_ready(marks[1], 0.002)
        device.resume()
        assert arena.wait_ready(marks[1], DEADLINE_S)
        assert arena.is_ready(marks[0])
    for stream in streams:
        stream.close()


def test_a_stream_that_is_ordered_behind_a_mark_reads_what_it_marks(device: FakeDevice, arena: DeviceArena) -> None:
    engine, reader, host = device.new_stream(), device.new_stream(), np.zeros(64, np.uint8)
    device.pin(host)
    memory = arena.memory
    for number in range(1, 30):
        engine.run(lambda number=number: memory.array[:64].fill(number))  # pyright: ignore[reportAttributeAccessIssue]
        arena.order(reader, arena.mark(engine.handle))
        arena.order(reader, READY)
        device.download(reader, memory, 0, host)
        event = device.new_event()
        event.record(reader)
        assert event.wait(DEADLINE_S) and (host == number).all()
        event.close()
    device.unpin(host)
    engine.close()
    reader.close()


def test_marks_that_are_none(arena: DeviceArena) -> None:
    for mark in (-1, 1):
        with pytest.raises(ValueError, match="mark"):
            arena.is_ready(mark)


def test_another_process_sees_the_arena_and_its_marks(device: FakeDevice, arena: DeviceArena, peer: FakeDevice) -> None:
    handles = msgspec.json.decode(msgspec.json.encode(arena.handles()), type=DeviceHandles)
    assert arena.handles() is arena.handles(), "asked for once"
    opened, stream = PeerArena(peer, handles), device.new_stream()
    assert opened.memory.num_bytes == arena.num_bytes
    arena.memory.array[:4] = (1, 2, 3, 4)  # pyright: ignore[reportAttributeAccessIssue]
    assert opened.memory.array[:4].tolist() == [1, 2, 3, 4]  # pyright: ignore[reportAttributeAccessIssue]
    device.stall(stream.handle)
    mark = arena.mark(stream.handle)
    assert opened.is_ready(READY) and not opened.is_ready(mark) and not opened.wait_ready(mark, 0.01)
    device.resume()
    assert opened.wait_ready(mark, DEADLINE_S)
    for _ in range(2 * NUM_MARKS):
        mark = arena.mark(stream.handle)
    assert opened.wait_ready(mark, DEADLINE_S)
    with pytest.raises(ValueError, match="mark -1"):
        opened.is_ready(-1)
    stream.close()
    opened.close()
    opened.close()


def test_only_the_events_that_are_asked_for_are_opened(arena: DeviceArena, peer: FakeDevice) -> None:
    opened = PeerArena(peer, arena.handles())
    for mark in (3, 3 + NUM_MARKS, 7):
        assert opened.is_ready(mark)
    assert peer.opened["event"] == 3, "and the first, to know at once that it can be done"
    opened.close()


def test_an_arena_whose_events_cannot_be_opened_is_not_opened(arena: DeviceArena, peer: FakeDevice) -> None:
    peer.fail_next("open_event")
    with pytest.raises(DeviceError, match="open_event"):
        PeerArena(peer, arena.handles())
    assert not +peer.opened


def test_handles_of_an_arena_that_has_gone(arena: DeviceArena, peer: FakeDevice) -> None:
    handles = arena.handles()
    opened = PeerArena(peer, handles)
    arena.close()
    with pytest.raises(DeviceError):
        PeerArena(peer, handles)
    with pytest.raises(DeviceError):
        opened.is_ready(2)
    opened.close()


def test_closing_leaves_nothing(device: FakeDevice) -> None:
    arena = DeviceArena(device, SHAPE, STAGING_BYTES)
    assert +device.opened
    path = Path("/dev/shm") / arena.name
    assert path.exists()
    arena.close()
    arena.close()
    assert not +device.opened and not path.exists()


FAILURES: dict[str, Callable[[FakeDevice], object]] = {
    "pin": lambda device: device.fail_next("pin"),
    "memory": lambda device: device.fail_next("allocate"),
    "events": lambda device: device.fail_next("new_event"),
    "card": lambda device: device.die(),
}


def arenas() -> set[Path]:
    return set(Path("/dev/shm").glob(f"kvmesh-{os.getpid()}-*"))


@pytest.mark.parametrize("failure", FAILURES)
def test_an_arena_that_cannot_be_made_leaves_nothing(device: FakeDevice, failure: str) -> None:
    before = arenas()
    FAILURES[failure](device)
    with pytest.raises(DeviceError):
        DeviceArena(device, SHAPE, STAGING_BYTES)
    assert not +device.opened and arenas() <= before


def test_an_arena_that_does_not_fit(device: FakeDevice) -> None:
    with pytest.raises(ArenaTooLargeError):
        DeviceArena(device, SHAPE, 1 << 50)
    small = FakeDevice(capacity_bytes=STAGING_BYTES // 2)
    with pytest.raises(DeviceError, match="out of memory"):
        DeviceArena(small, uniform_shape(LAYOUT, 200), STAGING_BYTES)
    assert not +small.opened and not +device.opened
    small.close()


def test_a_layout_that_does_not_suit(device: FakeDevice) -> None:
    layout = KVLayout(weights="w", dtype="bfloat16", num_layers=1, num_kv_heads=4, head_dim=2, block_size=16)
    with pytest.raises(ValueError, match="not a multiple of 8"):
        DeviceArena(device, uniform_shape(layout, 4), STAGING_BYTES)


def test_a_card_that_died_lets_go_of_its_arena(device: FakeDevice, arena: DeviceArena) -> None:
    device.die()
    with pytest.raises(DeviceError):
        arena.mark(0)
    with pytest.raises(DeviceError):
        arena.handles()
    arena.close()
    assert not (Path("/dev/shm") / arena.name).exists()


@needs_gpu
def test_torch_shares_an_arena_on_a_card() -> None:
    torch = pytest.importorskip("torch")
    device = card()
    arena = DeviceArena(device, SHAPE, STAGING_BYTES)
    tensor = torch.from_dlpack(arena.exported)
    assert tensor.is_cuda and tensor.data_ptr() == arena.memory.pointer and not tensor.any()
    tensor.fill_(7)
    mark = arena.mark(torch.cuda.current_stream().cuda_stream)
    assert arena.wait_ready(mark, DEADLINE_S)
    stream = device.new_stream()
    arena.order(stream, mark)
    device.download(stream, arena.memory, 0, arena.staging[:64])
    event = device.new_event()
    event.record(stream)
    assert event.wait(DEADLINE_S) and (arena.staging[:64] == 7).all()
    del tensor
    event.close()
    stream.close()
    arena.close()
    device.close()
