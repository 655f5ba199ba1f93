"""A connection between two simulated processes: latency, bandwidth, a bounded buffer, and faults."""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dataplane.memory.frames import Rows
from dataplane.protocol.stream import HEADER_BYTES, Header, Kind, decode_header
from dataplane.protocol.wire import Waker, WireClosedError, WireTimeoutError
from services.sim.limits import CONNECTION_LINGER_S
from services.sim.platform.threads import CoThread, current, pause

BUFFER_BYTES = 64 << 10
"""Bytes in flight, at most. A sender waits until the receiver has taken some."""
SMALL_BYTES = 1024
"""A message of at most so many bytes is handed over at once; a longer one takes its time."""
_MIN_PIECE_BYTES = 1024
_MAX_PIECES = 3
_NEVER = float("inf")

StreamFaultKind = Literal["truncation", "corruption", "stall", "slowness"]


@dataclass(frozen=True, slots=True)
class StreamFault:
    """A fault of one stream, at byte `at_byte` of what goes to the reader. Copied memory counts like bytes on the wire.

    Truncation: the connection breaks there. Corruption: one bit of that byte is flipped. Stall: nothing moves for
    `for_s`. Slowness: from there on every KiB takes `for_s` longer.
    """

    kind: StreamFaultKind
    at_byte: int
    for_s: float = 0.0


class Pipe:
    """The bytes in flight in one direction."""

    def __init__(self, connection: "Connection") -> None:
        self._connection = connection
        self._chunks: deque[tuple[float, memoryview]] = deque()
        self._last_at = 0.0
        self._end_at = _NEVER
        self._num_crossed = 0
        self._fault: StreamFault | None = None
        self._stalled_until = 0.0
        self.num_bytes = 0
        """Bytes in flight."""
        self.is_ended = False
        self.is_broken = False
        """The receiver has closed: nothing will be taken any more."""
        self.reader: CoThread | None = None
        """The thread that waits for bytes."""
        self.writer: CoThread | None = None
        """The thread that waits for room."""

    def begin_stream(self, fault: StreamFault | None) -> None:
        """Count bytes from here on; `fault` happens to them."""
        self._fault, self._num_crossed = fault, 0
        self._connection.delay_s = 0.0

    def ready_at(self) -> float:
        """Return when something can be taken, the end of the stream included; infinity: never."""
        if self._chunks:
            return max(self._chunks[0][0], self._connection.held_until())
        return max(self._end_at, self._connection.held_until()) if self.is_ended else _NEVER

    def push(self, data: bytes) -> None:
        """Send. The caller has waited until there is room."""
        if self.is_ended or self.is_broken:
            return
        if self._fault is not None and self._num_crossed + len(data) > self._fault.at_byte:
            data = self._apply(self._fault, data)
        self._num_crossed += len(data)
        if data:
            at = self._last_at = max(
                self._connection.now_s() + self._connection.latency_s, self._last_at, self._stalled_until
            )
            self._chunks.append((at, memoryview(data)))
            self.num_bytes += len(data)
            self.notify_reader()

    def pop(self, num_bytes: int) -> memoryview:
        """Return at most so many of the bytes that have arrived. Raises WireClosedError at the end."""
        if not self._chunks:
            raise WireClosedError("closed by the peer")
        at, data = self._chunks.popleft()
        if len(data) > num_bytes:
            self._chunks.appendleft((at, data[num_bytes:]))
            data = data[:num_bytes]
        self.num_bytes -= len(data)
        if self.writer is not None:
            self.writer.wake()
        return data

    def copied(self, rows: Rows) -> Rows:
        """Return how rows arrive that the reader copies from the holder's memory. Raises WireClosedError."""
        fault = self._fault
        if fault is not None and self._num_crossed + rows.nbytes > fault.at_byte:
            at = fault.at_byte - self._num_crossed
            self._fault = None
            if fault.kind == "corruption":
                rows = rows.copy()
                rows[divmod(max(0, at), rows.shape[1])] ^= 1 << fault.at_byte % 8
            elif fault.kind == "truncation":
                self._connection.reset()
                raise WireClosedError("the connection was reset")
            elif fault.kind == "stall":
                pause(fault.for_s)
            else:
                self._connection.delay_s = fault.for_s / 1024
        self._num_crossed += rows.nbytes
        return rows

    def close_writing(self) -> None:
        """The sender has closed: nothing more comes."""
        if not self.is_ended:
            self.is_ended = True
            self._end_at = max(self._connection.now_s() + self._connection.latency_s, self._last_at)
            self.notify_reader()

    def reset(self) -> None:
        """The connection breaks: nothing more comes, and nothing more is taken."""
        self.close_writing()
        self.is_broken = True
        if self.writer is not None:
            self.writer.wake()

    def notify_reader(self) -> None:
        """Let the thread that waits for bytes wake when there are some."""
        if self.reader is not None:
            self.reader.wake_at(self.ready_at())

    def _apply(self, fault: StreamFault, data: bytes) -> bytes:
        self._fault = None
        at = max(0, fault.at_byte - self._num_crossed)
        if fault.kind == "corruption":
            return b"%b%c%b" % (data[:at], data[at] ^ 1 << fault.at_byte % 8, data[at + 1 :])
        if fault.kind == "stall":
            self._stalled_until = self._connection.now_s() + fault.for_s
            return data
        if fault.kind == "slowness":
            self._connection.delay_s = fault.for_s / 1024
            return data
        self._num_crossed = fault.at_byte
        before = data[:at]
        if before:
            at_s = self._last_at = max(self._connection.now_s() + self._connection.latency_s, self._last_at)
            self._chunks.append((at_s, memoryview(before)))
            self.num_bytes += len(before)
        self._connection.reset()
        return b""


class Connection:
    """Two pipes between the processes on `reader_host` and `holder_host`. Nothing arrives before `held_until()`."""

    def __init__(self, reader_host: str, holder_host: str, *, latency_s: float, bytes_per_s: float) -> None:
        self.reader_host = reader_host
        self.holder_host = holder_host
        self.latency_s = latency_s
        self.delay_s = 0.0
        """Additional time for each byte, in seconds."""
        self._bytes_per_s = bytes_per_s
        self.now_s = asyncio.get_running_loop().time
        """The simulation's own time: each end has clocks of its own."""
        self.held_until: Callable[[], float] = lambda: 0.0
        self.on_closed: Callable[[], None] = lambda: None
        self.to_reader = Pipe(self)
        self.to_holder = Pipe(self)

    def transfer_s(self, num_bytes: int) -> float:
        """Return how long so many bytes take to be sent or copied, in seconds."""
        return num_bytes / self._bytes_per_s + num_bytes * self.delay_s

    def ends(self) -> "tuple[SimWire, SimWire]":
        """Return the holder's end and the reader's."""
        return SimWire(self, self.to_holder, self.to_reader), SimWire(self, self.to_reader, self.to_holder)

    def reset(self) -> None:
        """Break the connection. Each end notices at its next use, or now if it waits."""
        self.to_reader.reset()
        self.to_holder.reset()

    def notify_readers(self) -> None:
        """`held_until` has changed: waiting threads look again."""
        self.to_reader.notify_reader()
        self.to_holder.notify_reader()


class SimWire:
    """One end of a connection, as `dataplane.protocol.wire.Wire`. Used by one cooperative thread."""

    def __init__(self, connection: Connection, incoming: Pipe, outgoing: Pipe) -> None:
        self.connection = connection
        self._incoming = incoming
        self._outgoing = outgoing
        self._cut = False

    def receive_header(self, deadline: float, *allowed: Kind) -> Header:
        return decode_header(self.receive(HEADER_BYTES, deadline), *allowed)

    def receive(self, num_bytes: int, deadline: float) -> bytearray:
        taken = bytearray()
        while len(taken) < num_bytes:
            self._await_something(deadline)
            taken += self._incoming.pop(num_bytes - len(taken))
        return taken

    def receive_into(self, view: Any, deadline: float) -> int:
        self._await_something(deadline)
        view = memoryview(view)
        data = self._incoming.pop(len(view))
        view[: len(data)] = data
        return len(data)

    def has_unread(self) -> bool:
        return self._cut or self._incoming.ready_at() <= self.connection.now_s()

    @property
    def is_silent(self) -> bool:
        return not self.has_unread()

    @property
    def has_ended(self) -> bool:
        return self._cut or self._incoming.is_ended

    @property
    def is_cut(self) -> bool:
        return self._cut

    def send(self, buffers: Sequence[Any], timeout_s: float) -> None:
        if sum(memoryview(buffer).nbytes for buffer in buffers) <= SMALL_BYTES:
            self._put(b"".join(buffers), timeout_s)
            return
        for piece in _pieces(buffers):
            data = b"".join(piece)
            self._put(data, timeout_s)
            pause(self.connection.transfer_s(len(data)))

    def finish_sending(self) -> None:
        self._outgoing.close_writing()
        deadline = time.monotonic() + CONNECTION_LINGER_S
        with contextlib.suppress(WireClosedError, WireTimeoutError):
            while True:
                self._await_something(deadline)
                self._incoming.pop(BUFFER_BYTES)

    def waker(self) -> Waker:
        return _SimWaker(self, self._incoming)

    def copied(self, rows: Rows) -> Rows:
        """Return how rows arrive at this end that it copies from the other end's memory."""
        return self._incoming.copied(rows)

    def cut(self) -> None:
        if not self._cut:
            self._cut = True
            for thread in (self._incoming.reader, self._outgoing.writer):
                if thread is not None:
                    thread.wake()
            self._outgoing.close_writing()
            self._incoming.reset()

    def close(self) -> None:
        self.cut()
        if self._outgoing.is_broken:  # the other end is closed as well
            self.connection.on_closed()

    def _await_something(self, deadline: float) -> None:
        """Return once `pop` can be called without waiting; `deadline` is by the clock of this end's machine. Raises
        WireClosedError, WireTimeoutError."""
        incoming = self._incoming
        deadline += self.connection.now_s() - time.monotonic()
        while True:
            now = self.connection.now_s()
            if self._cut:
                raise WireClosedError("cut")
            if now >= deadline:
                raise WireTimeoutError("nothing came in time")
            if (ready_at := incoming.ready_at()) <= now:
                return
            incoming.reader = current()
            try:
                pause(min(ready_at, deadline) - now)
            finally:
                incoming.reader = None

    def _put(self, data: bytes, timeout_s: float) -> None:
        outgoing = self._outgoing
        deadline = self.connection.now_s() + timeout_s
        while True:
            if self._cut or outgoing.is_ended:
                raise WireClosedError("cut")
            if outgoing.is_broken:
                raise WireClosedError("the peer has closed")
            if outgoing.num_bytes < BUFFER_BYTES:
                outgoing.push(data)
                return
            if (now := self.connection.now_s()) >= deadline:
                raise WireTimeoutError(f"the peer took nothing for {timeout_s:.1f} s")
            before = outgoing.num_bytes
            outgoing.writer = current()
            try:
                pause(deadline - now)
            finally:
                outgoing.writer = None
            if outgoing.num_bytes < before:
                deadline = self.connection.now_s() + timeout_s


class _SimWaker:
    def __init__(self, wire: SimWire, incoming: Pipe) -> None:
        self._wire = wire
        self._incoming = incoming
        self._set = False
        self._thread: CoThread | None = None

    def wake(self) -> None:
        self._set = True
        if self._thread is not None:
            self._thread.wake()

    def rearm(self) -> None:
        self._set = False

    def wait_readable(self, timeout_s: float) -> bool:
        deadline = self._wire.connection.now_s() + timeout_s
        while not (self._set or self._wire.has_unread()):
            remaining = min(deadline, self._incoming.ready_at()) - self._wire.connection.now_s()
            if remaining <= 0:
                return self._wire.has_unread()
            self._thread = self._incoming.reader = current()
            try:
                pause(remaining)
            finally:
                self._thread = self._incoming.reader = None
        return True


def _pieces(buffers: Sequence[Any]) -> "list[list[memoryview]]":
    """Cut what is sent into at most a few pieces, which leave one after another."""
    views = [memoryview(buffer).cast("B") for buffer in buffers]
    size = max(_MIN_PIECE_BYTES, -(-sum(map(len, views)) // _MAX_PIECES))
    pieces: list[list[memoryview]] = [[]]
    room = size
    for view in views:
        while view:
            part, view = view[:room], view[room:]
            pieces[-1].append(part)
            room -= len(part)
            if not room:
                pieces.append([])
                room = size
    return pieces if pieces[-1] else pieces[:-1]
