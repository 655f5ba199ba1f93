"""An arena in a card's memory, and what stands beside it: marks on the engine's stream, and memory on the host and on
the card through which frames pass on their way to another machine.

The engine runs ahead of its card: that it has come past a layer does not say that the layer is computed. It records a
mark behind each, and whoever reads the layer waits for the mark. Marks are events of a ring: the mark n is the event
(n - 1) % NUM_MARKS. As the work of a stream is done in order, a later record of the same event covers the earlier one:
who waits for an old mark may wait longer than it had to, and never too short.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable

import msgspec
import numpy as np

from dataplane import limits as plane_limits
from dataplane.blocks.layout import ArenaShape
from dataplane.cards import limits
from dataplane.cards.device import Device, DeviceError, DeviceMemory, Event, Stream, SupportsDLPack
from dataplane.cards.moves import unsuited
from dataplane.cards.staging_ring import MIN_FRAMES, StagingRing
from dataplane.memory.arena import Arena, ByteArray
from dataplane.protocol.stream import ProtocolError, decoded_by_threads

log = logging.getLogger(__name__)

NUM_MARKS = 128
"""More than a model has layers: a mark comes round again when the engine has begun another step."""
READY = 0
"""The mark of what was ready before anybody could ask."""


class Marks:
    """A ring of events on the engine's stream. Thread-safe."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._events: list[Event] = []
        self._streams: dict[int, Stream] = {}
        self._last_stream: Stream | None = None
        self._num_marks = 0
        self._lock = threading.Lock()
        try:
            for _ in range(NUM_MARKS):
                self._events.append(device.new_event(shared=True))
        except DeviceError:
            self.close()
            raise

    def mark(self, stream_handle: int) -> int:
        """Return a mark of all that has been put on the stream so far. Raises DeviceError."""
        with self._lock:
            stream = self._streams.get(stream_handle)
            if stream is None:
                stream = self._streams[stream_handle] = self._device.foreign_stream(stream_handle)
            if stream is not self._last_stream:
                if self._num_marks:  # a later mark covers the earlier ones, on whatever stream it is
                    stream.wait_for(self._events[_slot(self._num_marks)])
                self._last_stream = stream
            self._events[self._num_marks % NUM_MARKS].record(stream)
            self._num_marks += 1
            return self._num_marks

    def event(self, mark: int) -> Event | None:
        """Return the event of a mark; None: it is ready. Raises ValueError when there is no such mark yet."""
        if not READY <= mark <= self._num_marks:
            raise ValueError(f"mark {mark} of {self._num_marks}")
        return None if mark == READY else self._events[_slot(mark)]

    def export(self) -> tuple[bytes, ...]:
        """Return the events' names for other processes. Raises DeviceError."""
        return tuple(self._device.export_event(event) for event in self._events)

    def close(self) -> None:
        for event in self._events:
            event.close()


@decoded_by_threads
class DeviceHandles(msgspec.Struct, frozen=True, kw_only=True):
    """The names by which another process of the host opens an arena on a card: its memory, and the events of its marks.
    The holder's `Accepted` has them."""

    uuid: str
    """The card's."""
    num_bytes: int
    memory: bytes
    marks: tuple[bytes, ...]

    @classmethod
    def read(cls, names: dict[str, object]) -> "DeviceHandles":
        """Return what an `Accepted` has. Raises ProtocolError."""
        try:
            return msgspec.convert(names, cls)
        except msgspec.ValidationError as error:
            raise ProtocolError(f"the holder's memory: {error}") from error


class DeviceArena:
    """A card's memory of this shape, owned by this process.

    `staging`: pinned host memory, a file in /dev/shm whose `name` and `nonce` are the arena's: who can map it is on the
    same host. `mirror`: as many bytes on the card. `ring`: who has which part of both. Raises DeviceError,
    ArenaTooLargeError, and ValueError when the layout cannot live on a card.
    """

    def __init__(self, device: Device, shape: ArenaShape, staging_bytes: int) -> None:
        if (reason := unsuited(shape.layout)) is not None:
            raise ValueError(reason)
        self.device = device
        self.shape = shape
        self.card = device.uuid
        self.ring = StagingRing(staging_bytes, min(plane_limits.MAX_FRAME_BYTES, staging_bytes // MIN_FRAMES))
        self._file = Arena.create_bytes(staging_bytes)
        self.name, self.nonce = self._file.name, self._file.nonce
        self.staging: ByteArray = self._file.array
        self._close_lock = threading.Lock()
        self._unused = threading.Condition()
        self._num_users = 0
        self._is_closed = False
        self._pinned = False
        self._memories: list[DeviceMemory] = []
        self._marks: Marks | None = None
        try:
            device.pin(self.staging)
            self._pinned = True
            self.memory = self._allocate(shape.num_bytes)
            self.mirror = self._allocate(staging_bytes)
            self._marks = self.marks = Marks(device)
            self._handles: DeviceHandles | None = None
        except DeviceError:
            self.close()
            raise

    @property
    def host_array(self) -> None:
        """The host cannot read a card's memory."""
        return

    @property
    def num_bytes(self) -> int:
        """Of KV."""
        return self.memory.num_bytes

    @property
    def exported(self) -> SupportsDLPack:
        """The KV as torch or CuPy take it over without a copy; it must not be used once the arena is closed."""
        return self.memory.exported

    def mark(self, stream_handle: int) -> int:
        """Return a mark of all that has been put on the engine's stream so far. Raises DeviceError."""
        return self.marks.mark(stream_handle)

    def is_ready(self, mark: int) -> bool:
        """Raises DeviceError, and ValueError when there is no such mark."""
        event = self.marks.event(mark)
        return event is None or event.is_done()

    def wait_ready(self, mark: int, timeout_s: float) -> bool:
        """Wait for a mark, other threads running; say whether it has come. Raises as `is_ready`."""
        event = self.marks.event(mark)
        return event is None or event.wait(timeout_s)

    def order(self, stream: Stream, mark: int) -> None:
        """Let what comes next on the stream, which is this process's, wait for a mark. Raises as `is_ready`."""
        if (event := self.marks.event(mark)) is not None:
            stream.wait_for(event)

    def handles(self) -> DeviceHandles:
        """Return by what other processes open the arena and its marks. Raises DeviceError."""
        with self._close_lock:
            if self._handles is None:
                self._handles = DeviceHandles(
                    uuid=self.device.uuid,
                    num_bytes=self.num_bytes,
                    memory=self.device.export_memory(self.memory),
                    marks=self.marks.export(),
                )
            return self._handles

    def use(self) -> Callable[[], None]:
        """Keep the memory until what is returned is called, by a reader of this process. Raises DeviceError."""
        with self._unused:
            if self._is_closed:
                raise DeviceError("use an arena", "it is closed")
            self._num_users += 1
        return self._give_back

    def close(self) -> None:
        """Free everything, once the readers of this process have done with it. The device stays. Idempotent."""
        with self._unused:
            if self._is_closed:
                return
            self._is_closed = True
            if not self._unused.wait_for(lambda: not self._num_users, limits.DRAIN_S):
                log.warning("%s: %d readers have not ended; its memory stays", self.name, self._num_users)
                return
        self.ring.close()
        if self._marks is not None:
            self._marks.close()
        for memory in self._memories:
            memory.close()
        if self._pinned:
            with contextlib.suppress(DeviceError):  # a card that has died holds nothing any more
                self.device.unpin(self.staging)
        self.staging = np.empty(0, np.uint8)
        self._file.close()

    def _give_back(self) -> None:
        with self._unused:
            self._num_users -= 1
            self._unused.notify_all()

    def _allocate(self, num_bytes: int) -> DeviceMemory:
        self._memories.append(self.device.allocate(num_bytes))
        return self._memories[-1]


class PeerArena:
    """Another process's arena and marks, opened here. Raises DeviceError. Thread-safe."""

    def __init__(self, device: Device, handles: DeviceHandles) -> None:
        self._device = device
        self._handles = handles.marks
        self._events: dict[int, Event] = {}
        self._lock = threading.Lock()
        self.memory = device.open_memory(handles.memory, handles.num_bytes)
        try:
            self.is_ready(1)  # a reader that can open memory and no events must know before anything is read
        except (DeviceError, ValueError):
            self.memory.close()
            raise

    def is_ready(self, mark: int) -> bool:
        """Raises DeviceError, and ValueError when no mark is called so."""
        if mark == READY:
            return True
        if mark < READY or not self._handles:
            raise ValueError(f"mark {mark}")
        slot = (mark - 1) % len(self._handles)
        with self._lock:
            event = self._events.get(slot)
            if event is None:  # opened when first asked for: most of the ring is never needed
                event = self._events[slot] = self._device.open_event(self._handles[slot])
        return event.is_done()

    def wait_ready(self, mark: int, timeout_s: float) -> bool:
        """Ask until the mark has come; say whether it has. Raises as `is_ready`."""
        deadline = time.monotonic() + timeout_s
        while not self.is_ready(mark):
            if time.monotonic() >= deadline:
                return False
            time.sleep(limits.MARK_POLL_S)
        return True

    def close(self) -> None:
        """Unmap it. Idempotent."""
        with self._lock:
            events, self._events = self._events, {}
        for event in events.values():
            event.close()
        self.memory.close()


def _slot(mark: int) -> int:
    return (mark - 1) % NUM_MARKS
