"""A card of numpy and a thread, for machines without one. What is put on its streams is done late, in the order of
each stream and in a random one between streams: bytes that nobody waited for are wrong, as they would be on a card.

Another process maps its memory, and asks for its events, through /proc/<pid>/fd: nothing outlives a process.
"""

import time
from collections import Counter
from collections.abc import Callable

import numpy as np

from dataplane.cards.device import DeviceError, DeviceMemory, DigestSlot, Event, Moves, Stream, SupportsDLPack
from dataplane.cards.fakes.fake_memory import FakePages, card_of
from dataplane.cards.fakes.fake_work import FELL_OFF, FOREIGN_POLL_S, FakeWork, Operation, Queue
from dataplane.memory.arena import ByteArray
from dataplane.memory.checksum import sum64

DEFAULT_MAX_DELAY_S = 0.0005


class FakeStream:
    def __init__(self, device: "FakeDevice", queue: Queue, *, owned: bool) -> None:
        self.queue = queue
        self._device = device
        self._owned = owned

    @property
    def handle(self) -> int:
        return self.queue.handle

    def wait_for(self, event: Event) -> None:
        assert isinstance(event, FakeEvent), "an event of another kind of card"
        assert event.is_recordable, "work that is queued behind another process's event is never called back"
        wanted = event.num_recorded
        self._device.enqueue("wait_for", self, lambda: None, lambda: event.num_done >= wanted)

    def run(self, work: Callable[[], None]) -> None:
        """Do what a kernel of somebody else would do, in order."""
        self._device.enqueue("run", self, work)

    def close(self) -> None:
        if self._owned and not self.queue.is_closed:
            self.queue.is_closed = True
            self._device.count("stream", -1)


class FakeEvent:
    """`num_recorded`, `num_done`: of its records; kept in pages that another process can open when it is shared."""

    def __init__(self, device: "FakeDevice", pages: FakePages | None, *, is_recordable: bool) -> None:
        self.pages = pages
        self.is_recordable = is_recordable
        self._device = device
        self._counts = np.zeros(2, np.uint64) if pages is None else pages.array[:16].view(np.uint64)
        self._is_closed = False

    @property
    def num_recorded(self) -> int:
        return int(self._counts[0])

    @property
    def num_done(self) -> int:
        return int(self._counts[1])

    def record(self, stream: Stream) -> None:
        if not self.is_recordable:
            raise DeviceError("record", "the event is another process's")
        self._check("record")
        with self._device.changed:
            self._counts[0] += np.uint64(1)
            number = self._counts[0]
            self._device.enqueue("record", stream, lambda: self._done(number))

    def is_done(self) -> bool:
        self._check("is_done")
        return self.num_done >= self.num_recorded

    def wait(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while not self.is_done():
            if (left := deadline - time.monotonic()) <= 0:
                return False
            with self._device.changed:
                self._device.changed.wait(min(left, FOREIGN_POLL_S))
        return True

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._device.count("event", -1)
            self._counts = self._counts.copy()
            if self.pages is not None:
                self.pages.close()

    def _check(self, what: str) -> None:
        self._device.check(what)
        if self._is_closed:
            raise DeviceError(what, "the event is closed")

    def _done(self, number: np.uint64) -> None:
        self._counts[1] = max(self._counts[1], number)


class FakeMemory:
    """`array`: the bytes, to be looked at by tests and by whoever stands for an engine."""

    def __init__(self, device: "FakeDevice", pages: FakePages, num_bytes: int) -> None:
        self.device = device
        self.pages = pages
        self.array: ByteArray = pages.array[:num_bytes]
        self._num_bytes = num_bytes
        self.is_closed = False

    @property
    def pointer(self) -> int:
        return self.array.ctypes.data

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    @property
    def exported(self) -> SupportsDLPack:
        return self.array

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self.device.count("memory", -1)
            self.array = np.empty(0, np.uint8)
            self.pages.close()


class FakeDigest:
    def __init__(self, device: "FakeDevice") -> None:
        self.result: int | None = None
        self.is_closed = False
        self._device = device

    def value(self) -> int:
        assert not self.is_closed, "the slot was given back"
        assert self.result is not None, "a digest that is read before its kernel is done"
        return self.result

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self._device.count("digest", -1)


class FakeDevice:
    """`seed`: of the order between streams. `owner`: devices of another owner in this process count as another
    process's. `opened`: what has been made and not been closed, by kind. `close` asserts that nothing was used
    after it had been closed."""

    def __init__(
        self,
        uuid: str = "GPU-fake-0",
        *,
        seed: int = 0,
        max_delay_s: float = DEFAULT_MAX_DELAY_S,
        owner: str = "",
        peers: tuple[str, ...] = (),
        capacity_bytes: int | None = None,
    ) -> None:
        self.opened: Counter[str] = Counter()
        self._uuid, self._owner, self._peers = uuid, owner, peers
        self._capacity_bytes = capacity_bytes
        self._pinned: dict[int, int] = {}
        self._failing: Counter[str] = Counter()
        self._corrupting: Counter[str] = Counter()
        self._is_closed = False
        self.work = FakeWork(seed, max_delay_s)
        self.changed = self.work.changed

    @property
    def uuid(self) -> str:
        return self._uuid

    @property
    def name(self) -> str:
        return "a fake card"

    def allocate(self, num_bytes: int) -> DeviceMemory:
        self.check("allocate")
        if self._capacity_bytes is not None and num_bytes > self._capacity_bytes:
            raise DeviceError("allocate", f"out of memory: {num_bytes} bytes of {self._capacity_bytes}")
        self.count("memory", 1)
        return FakeMemory(self, FakePages.create(num_bytes, card_of(self._uuid), self._owner), num_bytes)

    def new_stream(self) -> FakeStream:
        self.check("new_stream")
        self.count("stream", 1)
        return FakeStream(self, self.work.new_queue(), owned=True)

    def foreign_stream(self, handle: int) -> FakeStream:
        """Of a stream that `new_stream` returned to whoever stands for another library; 0: the default one."""
        self.check("foreign_stream")
        queue = self.work.queue(handle)
        if queue is None:
            raise DeviceError("foreign_stream", f"no stream is called {handle}")
        return FakeStream(self, queue, owned=False)

    def new_event(self, *, shared: bool = False) -> FakeEvent:
        self.check("new_event")
        self.count("event", 1)
        pages = FakePages.create(16, card_of(self._uuid), self._owner) if shared else None
        return FakeEvent(self, pages, is_recordable=True)

    def new_digest(self) -> FakeDigest:
        self.check("new_digest")
        self.count("digest", 1)
        return FakeDigest(self)

    def pin(self, array: ByteArray) -> None:
        self.check("pin")
        with self.changed:
            if array.ctypes.data in self._pinned:
                raise DeviceError("pin", "the memory is pinned already")
            self._pinned[array.ctypes.data] = array.nbytes
            self.count("pin", 1)

    def unpin(self, array: ByteArray) -> None:
        with self.changed:
            if self._pinned.pop(array.ctypes.data, None) is None:
                raise DeviceError("unpin", "the memory is not pinned")
            self.count("pin", -1)

    def move(
        self, stream: Stream, moves: Moves, source: DeviceMemory, target: DeviceMemory | None, digest: DigestSlot | None
    ) -> None:
        self.check("move")
        moves.check(source.num_bytes, None if target is None else target.num_bytes)
        corrupt = self._is_next(self._corrupting, "move")

        def run() -> None:
            rows = _load(moves, self._bytes_of("move", source))
            if corrupt:
                rows[:1, 0] ^= 1
            if target is not None:
                _store(moves, rows, self._bytes_of("move", target))
            if digest is not None:
                assert isinstance(digest, FakeDigest)
                if digest.is_closed:
                    raise DeviceError("move", "a digest slot that was given back")
                digest.result = sum64(rows.reshape(-1))

        self.enqueue("move", stream, run)

    def download(self, stream: Stream, source: DeviceMemory, first_byte: int, target: ByteArray) -> None:
        self._check_copy("download", source, first_byte, target)
        corrupt = self._is_next(self._corrupting, "download")

        def run() -> None:
            target[:] = self._bytes_of("download", source)[first_byte : first_byte + target.nbytes]
            if corrupt:
                target[:1] ^= 1

        self.enqueue("download", stream, run)

    def upload(self, stream: Stream, source: ByteArray, target: DeviceMemory, first_byte: int) -> None:
        self._check_copy("upload", target, first_byte, source)
        corrupt = self._is_next(self._corrupting, "upload")

        def run() -> None:
            written = self._bytes_of("upload", target)[first_byte : first_byte + source.nbytes]
            written[:] = source
            if corrupt:
                written[:1] ^= 1

        self.enqueue("upload", stream, run)

    def export_memory(self, memory: DeviceMemory) -> bytes:
        self.check("export_memory")
        assert isinstance(memory, FakeMemory)
        return memory.pages.handle

    def open_memory(self, handle: bytes, num_bytes: int) -> FakeMemory:
        self.check("open_memory")
        pages = self._open_pages("open_memory", handle, num_bytes)
        self.count("memory", 1)
        return FakeMemory(self, pages, num_bytes)

    def export_event(self, event: Event) -> bytes:
        self.check("export_event")
        assert isinstance(event, FakeEvent)
        if event.pages is None:
            raise DeviceError("export_event", "the event is not shared")
        return event.pages.handle

    def open_event(self, handle: bytes) -> FakeEvent:
        self.check("open_event")
        pages = self._open_pages("open_event", handle, 16)
        self.count("event", 1)
        return FakeEvent(self, pages, is_recordable=False)

    def can_map(self, uuid: str) -> bool:
        return uuid == self._uuid or uuid in self._peers

    def close(self) -> None:
        """Idempotent. What streams have not done yet is dropped."""
        self._is_closed = True
        self.work.close()
        assert not self.work.faults, "; ".join(self.work.faults)

    # What tests do to it.

    def fail_next(self, what: str, count: int = 1) -> None:
        """The next calls of this name raise DeviceError."""
        self._failing[what] += count

    def corrupt_next(self, what: str) -> None:
        """The next "move", "upload" or "download" writes a bit wrong; of a move the digest is of what it writes."""
        self._corrupting[what] += 1

    def die(self, reason: str = FELL_OFF) -> None:
        """Nothing is done any more, and every call raises DeviceError."""
        self.work.die(reason)

    def die_after(self, num_operations: int) -> None:
        """Die when streams have done so many operations more."""
        self.work.die_after(num_operations)

    def stall(self, handle: int | None = None) -> None:
        """Streams, or this one, do nothing until `resume`."""
        self.work.stall(handle)

    def resume(self) -> None:
        self.work.resume()

    # What its parts do.

    def check(self, what: str) -> None:
        """Raises DeviceError."""
        if self.work.died_of is not None:
            raise DeviceError(what, self.work.died_of)
        if self._is_closed:
            raise DeviceError(what, "the card is closed")
        if self._is_next(self._failing, what):
            raise DeviceError(what, "failed as it was told to")

    def count(self, kind: str, change: int) -> None:
        with self.changed:
            self.opened[kind] += change

    def enqueue(
        self, what: str, stream: Stream, run: Callable[[], None], can_run: Callable[[], bool] = lambda: True
    ) -> None:
        assert isinstance(stream, FakeStream)
        self.check(what)
        if not self.work.put(stream.queue, Operation(what, can_run, run)):
            raise DeviceError(what, "the stream is closed, or another card's")

    def _bytes_of(self, what: str, memory: DeviceMemory) -> ByteArray:
        assert isinstance(memory, FakeMemory), "memory of another kind of card"
        if memory.is_closed:
            raise DeviceError(what, "memory that was closed")
        if not self.can_map(memory.device.uuid):
            raise DeviceError(what, f"memory of {memory.device.uuid}")
        return memory.array

    def _check_copy(self, what: str, memory: DeviceMemory, first_byte: int, array: ByteArray) -> None:
        self.check(what)
        if first_byte < 0 or first_byte + array.nbytes > memory.num_bytes:
            raise ValueError(f"bytes {first_byte}+{array.nbytes} of {memory.num_bytes}")
        at = array.ctypes.data
        with self.changed:
            if not any(first <= at and at + array.nbytes <= first + size for first, size in self._pinned.items()):
                raise DeviceError(what, "the host's memory is not pinned")

    def _open_pages(self, what: str, handle: bytes, num_bytes: int) -> FakePages:
        cards = {card_of(uuid) for uuid in (self._uuid, *self._peers)}
        try:
            return FakePages.open(handle, num_bytes, cards, self._owner)
        except (OSError, ValueError) as error:
            raise DeviceError(what, str(error)) from error

    def _is_next(self, counts: Counter[str], what: str) -> bool:
        with self.changed:
            if counts[what] <= 0:
                return False
            counts[what] -= 1
            return True


def _load(moves: Moves, source: ByteArray) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    rows = np.empty((moves.num_rows, moves.row_bytes), np.uint8)
    for at, _, first, end in _runs_of(moves):
        rows[first:end] = _rows_at(source, at, end - first, moves.row_bytes, moves.source_stride)
    return rows


def _store(moves: Moves, rows: np.ndarray[tuple[int, int], np.dtype[np.uint8]], target: ByteArray) -> None:
    for _, at, first, end in _runs_of(moves):
        _rows_at(target, at, end - first, moves.row_bytes, moves.target_stride)[:] = rows[first:end]


def _runs_of(moves: Moves) -> list[tuple[int, int, int, int]]:
    """Return source byte, target byte, first row and the row after the last, of each run."""
    ends = [*moves.runs[1:, 2].tolist(), moves.num_rows]
    return [
        (at, to, first, end) for (at, to, first), end in zip(moves.runs.tolist(), ends, strict=False) if end > first
    ]


def _rows_at(memory: ByteArray, at: int, num_rows: int, row_bytes: int, stride: int):
    return np.lib.stride_tricks.as_strided(memory[at:], (num_rows, row_bytes), (stride, 1))
