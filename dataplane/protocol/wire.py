"""What the threads of the plane speak over: a blocking stream with deadlines. `cut` ends it from another thread."""

import contextlib
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Sequence
from typing import Any, Protocol

from dataplane import limits
from dataplane.protocol.stream import HEADER_BYTES, Header, Kind, decode_header

_TIMEVAL = struct.Struct("@ll")
_MAX_BUFFERS = 512
"""Below the kernel's limit for one sendmsg."""
_READ_AHEAD_BYTES = 4096
_THERE_NS = 10_000
"""What is received within this time was there already: it says nothing of how quickly the peer answers."""
_PROMPT_NS = 150_000
"""A peer that answered within this time is watched for so long the next time, awake: on a core that has gone to sleep
both its answer and what is done with it take twice as long."""


class WireClosedError(Exception):
    """The peer has gone, or this end was cut."""


class WireTimeoutError(Exception):
    """Nothing moved within the time allowed."""


class Thread(Protocol):
    """What the plane needs of a thread."""

    def start(self) -> None: ...
    def join(self) -> None: ...


class Waker(Protocol):
    """Lets the thread of a wire wait for it and for a call of `wake` at once."""

    def wake(self) -> None:
        """From any thread, but never from two at once."""
        ...

    def rearm(self) -> None:
        """Forget the calls so far, before looking at what they announced."""
        ...

    def wait_readable(self, timeout_s: float) -> bool:
        """Return whether either happened in time."""
        ...


class Wire(Protocol):
    """One connected stream. One thread uses it; any thread may `cut` it. Deadlines are `time.monotonic()` seconds."""

    def receive_header(self, deadline: float, *allowed: Kind) -> Header:
        """Return the next header. Raises WireClosedError, WireTimeoutError, ProtocolError."""
        ...

    def receive(self, num_bytes: int, deadline: float) -> bytearray:
        """Return exactly `num_bytes`. Raises WireClosedError, WireTimeoutError."""
        ...

    def receive_into(self, view: Any, deadline: float) -> int:
        """Write what is there, at least a byte, into `view` and return how much. Raises as `receive`."""
        ...

    def has_unread(self) -> bool:
        """Return whether `receive_header` would return without waiting."""
        ...

    @property
    def is_silent(self) -> bool:
        """Nothing has come that was not taken in: not even the end."""
        ...

    @property
    def has_ended(self) -> bool:
        """The peer sends nothing more, or this end was cut: even if some of what it sent is still unread."""
        ...

    @property
    def is_cut(self) -> bool:
        """This end was cut: nobody wants what comes any more."""
        ...

    def send(self, buffers: Sequence[Any], timeout_s: float) -> None:
        """Hand all bytes over: when it returns they have left the caller's memory.

        Raises WireTimeoutError when the peer takes nothing for `timeout_s`, and WireClosedError.
        """
        ...

    def finish_sending(self) -> None:
        """Signal that nothing more comes and give the peer a moment to read it all: closing at once could lose it."""
        ...

    def waker(self) -> Waker:
        """Return what waits for this wire and for another thread, for one stream and until the wire is closed."""
        ...

    def cut(self) -> None:
        """Wake the thread that uses this wire, now and for good. From any thread; idempotent."""
        ...

    def close(self) -> None: ...


class SocketWire:
    """A stream socket. It stays in blocking mode, its timeouts are the kernel's: no system call is spent on asking
    whether there is something to read. With a header comes what is there behind it."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._cut = False
        self._unread = bytearray()
        """What came with the last header, behind it."""
        self._ahead = memoryview(bytearray(_READ_AHEAD_BYTES))
        self._timeouts_s = {socket.SO_RCVTIMEO: -1.0, socket.SO_SNDTIMEO: -1.0}
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._waker: _SocketWaker | None = None
        self._is_prompt = False
        """The peer's last answer came at once."""
        sock.settimeout(None)
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def fileno(self) -> int:
        return self._sock.fileno()

    def receive_header(self, deadline: float, *allowed: Kind) -> Header:
        return decode_header(self.receive(HEADER_BYTES, deadline), *allowed)

    def receive(self, num_bytes: int, deadline: float) -> bytearray:
        unread = self._unread
        while len(unread) < num_bytes:
            missing = num_bytes - len(unread)
            chunk = self._ahead if missing <= _READ_AHEAD_BYTES else memoryview(bytearray(missing))
            unread += chunk[: self._receive_some(chunk, deadline)]
        taken = unread[:num_bytes]
        del unread[:num_bytes]
        return taken

    def receive_into(self, view: Any, deadline: float) -> int:
        if not self._unread:
            return self._receive_some(view, deadline)
        taken = self._unread[: len(view)]
        view[: len(taken)] = taken
        del self._unread[: len(taken)]
        return len(taken)

    def _receive_some(self, view: Any, deadline: float) -> int:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            raise WireTimeoutError("the deadline has passed")
        self._set_timeout(socket.SO_RCVTIMEO, remaining)
        started = time.perf_counter_ns()
        if self._is_prompt:
            _watch(self._poll, started)
        try:
            received = self._sock.recv_into(view)
        except BlockingIOError as error:
            raise WireTimeoutError(f"nothing came for {remaining:.1f} s") from error
        except OSError as error:
            raise WireClosedError(error.strerror or str(error)) from error
        waited_ns = time.perf_counter_ns() - started
        if waited_ns > _THERE_NS:
            self._is_prompt = waited_ns < _PROMPT_NS
        if not received:
            raise WireClosedError("cut" if self._cut else "closed by the peer")
        return received

    def has_unread(self) -> bool:
        return len(self._unread) >= HEADER_BYTES or self.wait_readable(0)

    @property
    def is_silent(self) -> bool:
        return not self._unread and not self.wait_readable(0)

    @property
    def has_ended(self) -> bool:
        poll = select.poll()
        poll.register(self._sock, select.POLLRDHUP)
        return bool(poll.poll(0))

    @property
    def is_cut(self) -> bool:
        return self._cut

    def wait_readable(self, timeout_s: float) -> bool:
        """Wait until something or the end of the stream can be read."""
        return bool(self._poll.poll(timeout_s * 1000))

    def send(self, buffers: Sequence[Any], timeout_s: float) -> None:
        self._set_timeout(socket.SO_SNDTIMEO, timeout_s)
        views = [memoryview(buffer) for buffer in buffers]
        try:
            for at in range(0, len(views), _MAX_BUFFERS):
                self._send_some(views[at : at + _MAX_BUFFERS])
        except BlockingIOError as error:
            raise WireTimeoutError(f"the peer took nothing for {timeout_s:.1f} s") from error
        except OSError as error:
            raise WireClosedError(error.strerror or str(error)) from error

    def finish_sending(self) -> None:
        deadline = time.monotonic() + limits.LINGER_S
        with contextlib.suppress(OSError, WireClosedError, WireTimeoutError):
            self._sock.shutdown(socket.SHUT_WR)
            while True:
                self.receive_into(bytearray(_READ_AHEAD_BYTES), deadline)

    def waker(self) -> Waker:
        self._waker = self._waker or _SocketWaker(self._sock)
        return self._waker

    def cut(self) -> None:
        self._cut = True
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._sock.close()
        waker, self._waker = self._waker, None
        if waker is not None:
            waker.close()

    def _send_some(self, views: list[memoryview]) -> None:
        while views:
            sent = self._sock.sendmsg(views)
            while views and sent >= views[0].nbytes:
                sent -= views.pop(0).nbytes
            if sent:
                views[0] = views[0][sent:]

    def _set_timeout(self, option: int, seconds: float) -> None:
        if seconds <= self._timeouts_s[option] <= seconds * 1.1:  # a system call less, for most pieces
            return
        self._timeouts_s[option] = seconds
        micros = max(1, int(seconds * 1e6))
        with contextlib.suppress(OSError):  # the socket is gone: the call that follows says so
            self._sock.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(*divmod(micros, 1_000_000)))


_watching = threading.Lock()
"""Held by the one thread of this process that watches."""


def _watch(poll: select.poll, started_ns: int) -> None:
    """Return once something can be read, or it does not come at once."""
    if _watching.acquire(blocking=False):
        try:
            while not poll.poll(0) and time.perf_counter_ns() - started_ns < _PROMPT_NS:
                os.sched_yield()
        finally:
            _watching.release()


class _SocketWaker:
    def __init__(self, sock: socket.socket) -> None:
        self._is_prompt = False
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._set = False
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLIN)
        self._poll.register(sock, select.POLLIN)

    def close(self) -> None:
        os.close(self._fd)

    def wake(self) -> None:
        if not self._set:
            self._set = True
            os.eventfd_write(self._fd, 1)

    def rearm(self) -> None:
        if self._set:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._fd)
            self._set = False

    def wait_readable(self, timeout_s: float) -> bool:
        started = time.perf_counter_ns()
        if self._is_prompt:
            _watch(self._poll, started)
        is_readable = bool(self._poll.poll(timeout_s * 1000))
        self._is_prompt = time.perf_counter_ns() - started < _PROMPT_NS
        return is_readable
