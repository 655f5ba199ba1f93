"""What CudaDevice says to the driver, with the host for a card: errors, what is kept and used again, and its end."""

from collections.abc import Iterator

import numpy as np
import pytest

from dataplane.cards import limits
from dataplane.cards.cuda import cuda_driver as cuda
from dataplane.cards.cuda.cuda_driver import CudaDevice, find_device
from dataplane.cards.cuda.kernel import NUM_THREADS
from dataplane.cards.cuda.run_tables import MIN_TABLE_BYTES
from dataplane.cards.device import DeviceError, Moves
from dataplane.cards.limits import MAX_TABLES
from dataplane.memory.checksum import sum64
from tests.gpu import why_no_card
from tests.plane.host_cuda import HostDriver, HostRuntime, host_device, why_no_compiler
from tests.plane.test_device import Bench, one_run, random_bytes

pytestmark = pytest.mark.skipif(bool(why_no_compiler()), reason=why_no_compiler())


class HostBench(Bench):
    def __init__(self) -> None:
        device = host_device()
        super().__init__(device)
        self.runtime: HostRuntime = device.cuda.runtime
        self.driver: HostDriver = device.cuda.driver


@pytest.fixture
def bench() -> Iterator[HostBench]:
    made = HostBench()
    yield made
    made.close()
    assert not +made.runtime.open, f"left open: {+made.runtime.open}"
    assert made.driver.num_loaded == 0


def fail(*arguments: object) -> None:
    raise HostRuntime.CUDARuntimeError("cudaErrorIllegalAddress: it is lost")


def test_what_the_driver_says_is_raised_with_what_was_done(bench: HostBench, monkeypatch: pytest.MonkeyPatch) -> None:
    memory, event, host, device = bench.allocate(64), bench.event(), bench.host(64), bench.device
    calls = {
        "malloc": (lambda: device.allocate(64), "allocate 64 bytes"),
        "memsetAsync": (lambda: device.allocate(64), "allocate 64 bytes"),
        "streamCreateWithFlags": (device.new_stream, "make a stream"),
        "eventCreateWithFlags": (device.new_event, "make an event"),
        "eventRecord": (lambda: event.record(bench.stream), "record an event"),
        "eventQuery": (event.is_done, "ask for an event"),
        "streamWaitEvent": (lambda: bench.stream.wait_for(event), "wait for an event on a stream"),
        "hostRegister": (lambda: device.pin(np.zeros(8, np.uint8)), "pin 8 bytes"),
    }
    for name, (call, what) in calls.items():
        with monkeypatch.context() as patch:
            patch.setattr(bench.runtime, name, fail)
            with pytest.raises(DeviceError, match="it is lost") as raised:
                call()
            assert raised.value.what == what
    for call, what in (
        (lambda: device.upload(bench.stream, host, memory, 0), "upload 64 bytes"),
        (lambda: device.download(bench.stream, memory, 0, host), "download 64 bytes"),
        (lambda: device.move(bench.stream, one_run(1, 64), memory, None, None), "move 1 rows"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(bench.runtime, "memcpyAsync", fail)
            with pytest.raises(DeviceError, match="it is lost") as raised:
                call()
            assert raised.value.what == what


def test_an_event_that_failed_is_not_taken_for_one_that_is_under_way(
    bench: HostBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    event = bench.event()
    monkeypatch.setattr(bench.runtime, "eventQuery", lambda event: 600)
    assert not event.is_done() and not event.wait(0.01)
    monkeypatch.setattr(bench.runtime, "eventQuery", lambda event: 700)
    with pytest.raises(DeviceError, match="700"):
        event.is_done()


def test_a_launch_that_fails_leaves_its_table_to_be_used_again(
    bench: HostBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, digest = bench.allocate(64), bench.digest()
    for _ in range(2 * MAX_TABLES):
        with monkeypatch.context() as patch:
            patch.setattr(bench.driver, "launchKernel", fail)
            with pytest.raises(DeviceError, match="it is lost"):
                bench.device.move(bench.stream, one_run(1, 64), memory, None, digest)
    bench.device.move(bench.stream, one_run(1, 64), memory, None, digest)
    assert digest.value() == sum64(bytes(64))


def test_tables_are_not_used_again_before_their_kernels_are_done(
    bench: HostBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With kernels that do not end, there are so many tables and then an error; with ones that do, a few."""
    memory = bench.allocate(64)
    for _ in range(10):
        bench.device.move(bench.stream, one_run(1, 64), memory, None, None)
    assert bench.runtime.open["event"] == 1
    monkeypatch.setattr(limits, "TABLE_WAIT_S", 0.01)
    with monkeypatch.context() as patch:
        patch.setattr(bench.runtime, "eventQuery", lambda event: 600)
        for _ in range(MAX_TABLES - 1):  # and the one of before
            bench.device.move(bench.stream, one_run(1, 64), memory, None, None)
        assert bench.runtime.open["event"] == MAX_TABLES
        with pytest.raises(DeviceError, match=f"{MAX_TABLES} have not ended"):
            bench.device.move(bench.stream, one_run(1, 64), memory, None, None)
    bench.device.move(bench.stream, one_run(1, 64), memory, None, None)


def test_many_runs_have_a_larger_table(bench: HostBench) -> None:
    num_rows = 3 * MIN_TABLE_BYTES // 24
    content = random_bytes(8 * num_rows)
    source, target, digest = bench.allocate(8 * num_rows), bench.allocate(8 * num_rows), bench.digest()
    bench.write(source, content)
    numbers = np.arange(num_rows)
    order = np.random.default_rng(0).permutation(num_rows)
    moves = Moves(np.stack((order * 8, numbers * 8, numbers), axis=1), num_rows, 8, 8, 8)
    bench.device.move(bench.stream, moves, source, target, digest)
    expected = content.reshape(-1, 8)[order].reshape(-1)
    assert np.array_equal(bench.read(target), expected) and digest.value() == sum64(expected)


def test_rows_are_moved_by_the_widest_loads_that_they_allow(bench: HostBench) -> None:
    source, target = bench.allocate(1 << 12), bench.allocate(1 << 12)
    cases = [
        (one_run(4, 64), True, 16),
        (one_run(4, 72), True, 8),
        (one_run(4, 64, source=8), True, 8),
        (one_run(4, 64, target=8), True, 8),
        (one_run(4, 64, target=8), False, 16),
        (one_run(4, 64)._replace(source_stride=72), True, 8),
        (one_run(4, 64)._replace(target_stride=72), True, 8),
        (one_run(4, 64)._replace(target_stride=72), False, 16),
    ]
    for moves, with_target, width in cases:
        bench.device.move(bench.stream, moves, source, target if with_target else None, None)
        assert bench.driver.launches[-1][0] == f"move_rows_{width}", (moves, with_target)


def test_a_launch_has_as_many_blocks_as_it_needs_and_a_bound(bench: HostBench) -> None:
    memory = bench.allocate(1 << 20)
    for num_rows, num_blocks in ((1, 1), (1024, 1), (1025, 2), (1 << 16, 16)):
        bench.device.move(bench.stream, one_run(num_rows, 16), memory, None, None)
        assert bench.driver.launches[-1][1:] == (num_blocks, NUM_THREADS)
    huge = one_run(1 << 31, 16)
    with pytest.raises(ValueError, match="rows outside"):
        bench.device.move(bench.stream, huge, memory, None, None)


def test_another_cards_memory_needs_peer_access_once(bench: HostBench, monkeypatch: pytest.MonkeyPatch) -> None:
    memory, asked = bench.allocate(64), []
    monkeypatch.setattr(memory, "index", 1)
    monkeypatch.setattr(bench.runtime, "deviceEnablePeerAccess", asked.append, raising=False)
    for _ in range(3):
        bench.device.move(bench.stream, one_run(1, 64), memory, None, None)
    assert asked == [1]


def test_peers_map_each_other_and_strangers_do_not(bench: HostBench) -> None:
    bench.runtime.num_cards, bench.runtime.peers = 3, {(0, 1), (2, 0)}
    card = CudaDevice(bench.device.cuda, 0)  # pyright: ignore[reportAttributeAccessIssue]
    uuids = [f"GPU-0102-0000:0{index}:00.0" for index in range(3)]
    assert card.uuid == uuids[0] and [card.can_map(uuid) for uuid in uuids] == [True, True, False]
    card.close()


def test_room_for_digests_is_used_again(bench: HostBench) -> None:
    for _ in range(10):
        digests = [bench.device.new_digest() for _ in range(400)]
        assert bench.runtime.open["hostAlloc"] == 1
        for digest in digests:
            digest.close()


def test_no_other_card_is_touched(bench: HostBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """To set a fresh thread's card back to 0 would make a context there, in each worker of the other cards."""
    chosen: list[int] = []
    monkeypatch.setattr(bench.runtime, "setDevice", chosen.append)
    bench.allocate(64)
    bench.device.new_event().close()
    assert chosen and set(chosen) == {bench.device.index}


def test_a_name_is_of_the_card_and_of_its_place(bench: HostBench) -> None:
    assert bench.device.uuid == "GPU-0102-0000:00:00.0"
    assert bench.device.name == "a host"


def test_what_is_closed_is_not_asked_for(bench: HostBench) -> None:
    event = bench.device.new_event()
    event.close()
    with pytest.raises(DeviceError, match="closed"):
        event.is_done()
    with pytest.raises(DeviceError, match="a handle of 5 bytes"):
        bench.device.open_memory(b"short", 8)


def test_closing_does_not_raise_on_a_card_that_has_died(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = HostBench()
    memory, event, stream = bench.allocate(8), bench.event(), bench.new_stream()
    for name in ("free", "eventDestroy", "streamDestroy", "freeHost", "ipcCloseMemHandle"):
        monkeypatch.setattr(bench.runtime, name, fail, raising=False)
    for thing in (memory, event, stream):
        thing.close()
    bench.close()


@pytest.mark.skipif(not why_no_card(), reason="there is a card")
def test_a_machine_without_a_card_says_so_in_one_line() -> None:
    with pytest.raises(DeviceError) as raised:
        find_device()
    assert "\n" not in str(raised.value) and "card" in str(raised.value)


def test_cards_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = HostBench()
    monkeypatch.setattr(cuda, "import_cupy", lambda: bench.device.cuda)  # pyright: ignore[reportAttributeAccessIssue]
    for index in (-1, 1):
        with pytest.raises(DeviceError, match=f"no card {index}: 1 can be used"):
            find_device(index)
    found = find_device(0)
    assert isinstance(found, CudaDevice)
    found.close()
    bench.close()
