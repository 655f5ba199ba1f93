"""What every kind of card does: the fake one, a CudaDevice whose card is the host, and a real one."""

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from dataplane.cards.device import Device, DeviceError, DeviceMemory, DigestSlot, Event, Moves, Stream
from dataplane.cards.fakes.fake_device import FakeDevice
from dataplane.memory.checksum import sum64
from tests.gpu import GPU_MARKS, card
from tests.plane.device_process import DEADLINE_S, NUM_BYTES
from tests.plane.host_cuda import host_device, why_no_compiler
from tests.plane.test_cuda_kernel import by_numpy, moved

NO_COMPILER = pytest.mark.skipif(bool(why_no_compiler()), reason=why_no_compiler())
KINDS = [
    "fake",
    pytest.param("host", marks=NO_COMPILER),
    pytest.param("cuda", marks=GPU_MARKS),
]
ASYNCHRONOUS = ["fake", pytest.param("cuda", marks=GPU_MARKS)]
"""Those with processes beside them, and with streams that run behind."""
quick = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def make_device(kind: str, **options) -> Device:
    return {"fake": lambda: FakeDevice(**options), "host": host_device, "cuda": card}[kind]()


class Bench:
    """A card and what a test has of it, all of which is closed in the end."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._stack = contextlib.ExitStack()
        self._stack.callback(device.close)
        self.stream = self.new_stream()

    def new_stream(self) -> Stream:
        return self._keep(self.device.new_stream())

    def event(self, *, shared: bool = False) -> Event:
        return self._keep(self.device.new_event(shared=shared))

    def digest(self) -> DigestSlot:
        return self._keep(self.device.new_digest())

    def allocate(self, num_bytes: int) -> DeviceMemory:
        return self._keep(self.device.allocate(num_bytes))

    def host(self, num_bytes: int) -> np.ndarray:
        """Pinned, and full of what nobody means."""
        array = np.full(num_bytes, 0xAA, np.uint8)
        self.device.pin(array)
        self._stack.callback(self.device.unpin, array)
        return array

    def write(self, memory: DeviceMemory, content: np.ndarray) -> None:
        host = self.host(content.nbytes)
        host[:] = content
        self.device.upload(self.stream, host, memory, 0)
        self.finish()

    def read(self, memory: DeviceMemory, stream: Stream | None = None) -> np.ndarray:
        host = self.host(memory.num_bytes)
        self.device.download(stream or self.stream, memory, 0, host)
        self.finish(stream)
        return host

    def finish(self, stream: Stream | None = None) -> None:
        event = self.event()
        event.record(stream or self.stream)
        assert event.wait(DEADLINE_S)

    def close(self) -> None:
        self._stack.close()

    def _keep(self, thing):
        self._stack.callback(thing.close)
        return thing


@pytest.fixture(params=KINDS)
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    made = Bench(make_device(request.param))
    yield made
    made.close()
    if isinstance(made.device, FakeDevice):
        assert not +made.device.opened, f"left open: {+made.device.opened}"


@pytest.fixture
def fake() -> Iterator[Bench]:
    made = Bench(FakeDevice(max_delay_s=0.002))
    yield made
    made.device.resume()
    made.close()
    assert not +made.device.opened, f"left open: {+made.device.opened}"


def random_bytes(size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


# Memory and copies


def test_memory_is_zeroed_and_of_its_size(bench: Bench) -> None:
    memory = bench.allocate(1000)
    assert memory.num_bytes == 1000 and memory.pointer
    assert not bench.read(memory).any()


def test_what_goes_up_comes_down(bench: Bench) -> None:
    memory, content = bench.allocate(NUM_BYTES), random_bytes(NUM_BYTES)
    bench.write(memory, content)
    assert np.array_equal(bench.read(memory), content)
    part = bench.host(100)
    bench.device.download(bench.stream, memory, 50, part)
    bench.finish()
    assert np.array_equal(part, content[50:150])
    bench.device.upload(bench.stream, part[:8], memory, 4000)
    assert np.array_equal(bench.read(memory)[4000:4008], content[50:58])


def test_copies_stay_inside(bench: Bench) -> None:
    memory, host = bench.allocate(64), bench.host(128)
    for first_byte in (-1, 1, 64):
        with pytest.raises(ValueError, match="of 64"):
            bench.device.download(bench.stream, memory, first_byte, host[:64])
        with pytest.raises(ValueError, match="of 64"):
            bench.device.upload(bench.stream, host[:64], memory, first_byte)
    with pytest.raises(ValueError, match="of 64"):
        bench.device.download(bench.stream, memory, 0, host)


def test_only_pinned_memory_is_copied(bench: Bench) -> None:
    memory, host = bench.allocate(64), np.zeros(64, np.uint8)
    for copy in (
        lambda: bench.device.download(bench.stream, memory, 0, host),
        lambda: bench.device.upload(bench.stream, host, memory, 0),
    ):
        with pytest.raises(DeviceError, match="not pinned"):
            copy()
    bench.device.pin(host)
    bench.device.download(bench.stream, memory, 0, host)
    bench.finish()
    with pytest.raises(DeviceError):
        bench.device.pin(host)
    bench.device.unpin(host)
    with pytest.raises(DeviceError, match="not pinned"):
        bench.device.unpin(host)
    with pytest.raises(DeviceError, match="not pinned"):
        bench.device.download(bench.stream, memory, 0, host)


@pytest.mark.parametrize("kind", ["fake", pytest.param("cuda", marks=GPU_MARKS)])
def test_memory_that_is_not_there(kind: str) -> None:
    device = make_device(kind, **({"capacity_bytes": 1 << 30} if kind == "fake" else {}))
    with pytest.raises(DeviceError, match=str(1 << 45)):
        device.allocate(1 << 45)
    device.close()


def test_closing_twice_is_closing(bench: Bench) -> None:
    for thing in (bench.allocate(8), bench.event(), bench.event(shared=True), bench.digest(), bench.new_stream()):
        thing.close()
        thing.close()


# Streams and events


def test_work_of_one_stream_is_done_in_order(bench: Bench) -> None:
    memory = bench.allocate(512)
    hosts = [bench.host(512) for _ in range(20)]
    for number, host in enumerate(hosts):
        host[:] = number
        bench.device.upload(bench.stream, host, memory, 0)
    read = bench.host(512)
    bench.device.download(bench.stream, memory, 0, read)
    bench.finish()
    assert (read == 19).all()


def test_an_event_that_was_never_recorded_is_done(bench: Bench) -> None:
    event = bench.event()
    assert event.is_done() and event.wait(0)
    bench.stream.wait_for(event)
    bench.finish()


def test_one_stream_waits_for_another(bench: Bench) -> None:
    """Back and forth, many times: each reads what the other has written last."""
    memory, streams = bench.allocate(256), [bench.stream, bench.new_stream()]
    events = [bench.event(), bench.event()]
    reads = []
    for number in range(30):
        one, other = number % 2, (number + 1) % 2
        streams[one].wait_for(events[other])
        written, read = bench.host(256), bench.host(256)
        written[:] = number
        bench.device.download(streams[one], memory, 0, read)
        bench.device.upload(streams[one], written, memory, 0)
        events[one].record(streams[one])
        reads.append(read)
    assert events[0].wait(DEADLINE_S) and events[1].wait(DEADLINE_S)
    assert [int(read[0]) for read in reads] == [0, *range(29)]
    assert all((read == read[0]).all() for read in reads)


def test_a_stream_by_its_handle(bench: Bench) -> None:
    memory, host = bench.allocate(64), bench.host(64)
    foreign = bench.device.foreign_stream(bench.stream.handle)
    assert foreign.handle == bench.stream.handle
    bench.device.upload(foreign, host, memory, 0)
    foreign.close()
    assert np.array_equal(bench.read(memory), host)
    event = bench.event()
    event.record(bench.device.foreign_stream(0))
    assert event.wait(DEADLINE_S)


# Moves


@quick
@given(case=moved(), seed=st.integers(0, 99))
def test_moves_are_what_numpy_does(bench: Bench, case: tuple[Moves, int, int], seed: int) -> None:
    moves, source_bytes, target_bytes = case
    source, target = bench.allocate(source_bytes), bench.allocate(target_bytes)
    content, expected = random_bytes(source_bytes, seed), random_bytes(target_bytes, seed + 1)
    bench.write(source, content)
    bench.write(target, expected)
    digests = [bench.digest() for _ in range(2)]
    right = by_numpy(moves, content, expected)
    bench.device.move(bench.stream, moves, source, target, digests[0])
    bench.device.move(bench.stream, moves, source, None, digests[1])
    assert np.array_equal(bench.read(target), expected)
    assert [digest.value() for digest in digests] == [right, right]


def one_run(num_rows: int, row_bytes: int, source: int = 0, target: int = 0) -> Moves:
    return Moves(np.array([[source, target, 0]], np.int64), num_rows, row_bytes, row_bytes, row_bytes)


def test_a_move_without_a_digest(bench: Bench) -> None:
    source, target, content = bench.allocate(640), bench.allocate(640), random_bytes(640)
    bench.write(source, content)
    bench.device.move(bench.stream, one_run(10, 64), source, target, None)
    assert np.array_equal(bench.read(target), content)


def test_a_move_of_nothing_has_the_digest_of_nothing(bench: Bench) -> None:
    memory, digest = bench.allocate(64), bench.digest()
    nothing = Moves(np.empty((0, 3), np.int64), 0, 64, 64, 64)
    bench.device.move(bench.stream, nothing, memory, memory, digest)
    bench.finish()
    assert digest.value() == 0


@pytest.mark.parametrize("moves", [one_run(11, 64), one_run(10, 64, target=8), one_run(10, 60), one_run(10, 64, -8)])
def test_moves_that_lie_outside_are_not_made(bench: Bench, moves: Moves) -> None:
    source, target = bench.allocate(640), bench.allocate(640)
    with pytest.raises(ValueError, match="rows"):
        bench.device.move(bench.stream, moves, source, target, None)
    assert not bench.read(target).any()


def test_many_moves_are_under_way_at_once(bench: Bench) -> None:
    """More than there are tables and slots, on several streams, of many runs each: nothing is used again too early."""
    num_moves, num_rows = 100, 24
    source, content = bench.allocate(num_rows * 64), random_bytes(num_rows * 64)
    bench.write(source, content)
    targets = [bench.allocate(num_rows * 64) for _ in range(4)]
    streams = [bench.new_stream() for _ in range(4)]
    digests, expected = [], []
    for number in range(num_moves):
        order = np.random.default_rng(number).permutation(num_rows)
        runs = np.stack((order * 64, np.arange(num_rows) * 64, np.arange(num_rows)), axis=1)
        digests.append(bench.digest())
        moves = Moves(runs, num_rows, 64, 64, 64)
        bench.device.move(streams[number % 4], moves, source, targets[number % 4], digests[-1])
        expected.append(content.reshape(num_rows, 64)[order].reshape(-1))
    for stream in streams:
        bench.finish(stream)
    assert [digest.value() for digest in digests] == [sum64(rows) for rows in expected]
    for number, target in enumerate(targets):
        assert np.array_equal(bench.read(target), expected[num_moves - 4 + number])


def test_digests_are_used_again(bench: Bench) -> None:
    """Far more than fit on one page, a few at a time."""
    memory, content = bench.allocate(64), random_bytes(64)
    bench.write(memory, content)
    for _ in range(3):
        digests = [bench.device.new_digest() for _ in range(300)]
        for digest in digests[::100]:
            bench.device.move(bench.stream, one_run(1, 64), memory, None, digest)
        bench.finish()
        assert {digest.value() for digest in digests[::100]} == {sum64(content)}
        for digest in digests:
            digest.close()


def test_threads_use_one_card_at_once(bench: Bench) -> None:
    failures = []

    def run(seed: int) -> None:
        try:
            own = contextlib.ExitStack()
            with own:
                content = random_bytes(640, seed)
                host, back = content.copy(), np.zeros(640, np.uint8)
                stream, event = bench.device.new_stream(), bench.device.new_event()
                source, target = bench.device.allocate(640), bench.device.allocate(640)
                for thing in (stream, event, source, target):
                    own.callback(thing.close)
                for array in (host, back):
                    bench.device.pin(array)
                    own.callback(bench.device.unpin, array)
                for _ in range(10):
                    digest = bench.device.new_digest()
                    bench.device.upload(stream, host, source, 0)
                    bench.device.move(stream, one_run(10, 64), source, target, digest)
                    bench.device.download(stream, target, 0, back)
                    event.record(stream)
                    assert event.wait(DEADLINE_S)
                    assert np.array_equal(back, content) and digest.value() == sum64(content)
                    digest.close()
        except BaseException as error:  # noqa: BLE001 - raised below
            failures.append(error)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert not failures, failures


# Names, and what others see


def test_a_card_maps_itself_and_no_stranger(bench: Bench) -> None:
    assert bench.device.can_map(bench.device.uuid)
    assert not bench.device.can_map("GPU-of-another-host")
    assert bench.device.name


@pytest.mark.parametrize("kind", ASYNCHRONOUS)
def test_other_libraries_take_the_memory_over(kind: str) -> None:
    torch = pytest.importorskip("torch")
    bench = Bench(make_device(kind))
    memory, content = bench.allocate(640), random_bytes(640)
    tensor = torch.from_dlpack(memory.exported)
    assert (tensor.dtype, tuple(tensor.shape), tensor.data_ptr()) == (torch.uint8, (640,), memory.pointer)
    bench.write(memory, content)
    assert np.array_equal(tensor.cpu().numpy(), content)
    tensor[:8] = 7
    if tensor.is_cuda:
        torch.cuda.synchronize()
    assert (bench.read(memory)[:8] == 7).all()
    del tensor
    bench.close()


class Process:
    """`device_process.py`, at work."""

    def __init__(self, kind: str, role: str) -> None:
        command = [sys.executable, "-m", "tests.plane.device_process", kind, role]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=dict(os.environ)
        )
        assert self._process.stdin and self._process.stdout
        self._in, self._out = self._process.stdin, self._process.stdout

    def tell(self, line: str) -> None:
        self._in.write(line + "\n")
        self._in.flush()

    def hear(self) -> str:
        return self._out.readline().strip()

    def ask(self, line: str) -> None:
        self.tell(line)
        assert self.hear() == "done"

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(DEADLINE_S)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._in.close()
        try:
            self._process.wait(DEADLINE_S)
        finally:
            self._process.kill()
            self._out.close()


@pytest.fixture
def start() -> Iterator[Callable[[str, str], Process]]:
    started: list[Process] = []

    def begin(kind: str, role: str) -> Process:
        started.append(Process(kind, role))
        return started[-1]

    yield begin
    for process in started:
        process.close()


@pytest.mark.parametrize("kind", ASYNCHRONOUS)
def test_memory_and_events_of_another_process(kind: str, start: Callable[[str, str], Process]) -> None:
    process, bench = start(kind, "exporting"), Bench(make_device(kind))
    handles = [bytes.fromhex(process.hear()) for _ in range(2)]
    memory, event = bench.device.open_memory(handles[0], NUM_BYTES), bench.device.open_event(handles[1])
    assert event.is_done()
    for number in (3, 4):
        process.ask(f"write {number}")
        process.ask("record")
        assert event.wait(DEADLINE_S)
        assert (bench.read(memory) == number).all()
    with pytest.raises(DeviceError):
        event.record(bench.stream)
    with pytest.raises(AssertionError):
        bench.stream.wait_for(event)
    event.close()
    memory.close()
    bench.close()


@pytest.mark.parametrize("kind", ASYNCHRONOUS)
def test_another_process_opens_what_is_here(kind: str, start: Callable[[str, str], Process]) -> None:
    process, bench = start(kind, "opening"), Bench(make_device(kind))
    memory, event = bench.allocate(NUM_BYTES), bench.event(shared=True)
    content = random_bytes(NUM_BYTES)
    bench.write(memory, content)
    event.record(bench.stream)
    process.tell(bench.device.export_memory(memory).hex())
    process.tell(bench.device.export_event(event).hex())
    assert process.hear() == "True"
    assert process.hear() == content[:8].tobytes().hex()
    bench.close()


@pytest.mark.parametrize("kind", ASYNCHRONOUS)
def test_what_a_process_left_behind_cannot_be_opened(kind: str, start: Callable[[str, str], Process]) -> None:
    process, bench = start(kind, "exporting"), Bench(make_device(kind))
    handles = [bytes.fromhex(process.hear()) for _ in range(2)]
    process.kill()
    with pytest.raises(DeviceError):
        bench.device.open_memory(handles[0], NUM_BYTES)
    try:  # CUDA opens events of the dead: who opens the memory first, as readers do, is refused
        event = bench.device.open_event(handles[1])
    except DeviceError:
        assert kind != "cuda"
    else:
        assert kind == "cuda" and event.is_done()
        event.close()
    bench.close()


@pytest.mark.parametrize("kind", ASYNCHRONOUS)
def test_handles_that_lead_nowhere(kind: str) -> None:
    bench = Bench(make_device(kind))
    own = bench.device.export_memory(bench.allocate(NUM_BYTES))
    for handle in (b"", b"x" * 64, b"x" * 65, own, own[:-1]):
        with pytest.raises(DeviceError):
            bench.device.open_memory(handle, NUM_BYTES)
    for handle in (b"", b"x" * 64):
        with pytest.raises(DeviceError):
            bench.device.open_event(handle)
    with pytest.raises(DeviceError):
        bench.device.export_event(bench.event())
    bench.close()
