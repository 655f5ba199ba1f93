"""A blocking socket with deadlines, for the threads of the plane. It is cut from another thread by `cut`."""

import contextlib
import select
import socket
import struct
import time
from collections.abc import Sequence
from typing import Any

from dataplane.stream import HEADER_BYTES, Header, Kind, decode_header

_TIMEVAL = struct.Struct("@ll")
_MAX_BUFFERS = 512
"""Below the kernel's limit for one sendmsg."""
_READ_AHEAD_BYTES = 4096
_LINGER_S = 1.0


class WireClosedError(Exception):
    """The peer has gone, or this end was cut."""


class WireTimeoutError(Exception):
    """Nothing moved within the time allowed."""


class Wire:
    """One connected stream socket. One thread uses it; any thread may `cut` it.

    Deadlines are `time.monotonic()` seconds. The socket stays in blocking mode, its timeouts are the kernel's: no
    system call is spent on asking whether there is something to read.
    """

    def __init__(self, sock: socket.socket, *, reads_ahead: bool = False) -> None:
        self._sock = sock
        self._cut = False
        self._unread = bytearray()
        self._receive_timeout_s = 0.0
        self.reads_ahead = reads_ahead
        """Take in whatever is there with a header: only where no payload follows headers on this socket."""
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        sock.settimeout(None)
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def fileno(self) -> int:
        return self._sock.fileno()

    def receive_header(self, deadline: float, *allowed: Kind) -> Header:
        """Return the next header. Raises WireClosedError, WireTimeoutError, ProtocolError."""
        return decode_header(self.receive(HEADER_BYTES, deadline), *allowed)

    def receive(self, num_bytes: int, deadline: float) -> bytearray:
        """Return exactly `num_bytes`. Raises WireClosedError, WireTimeoutError."""
        unread = self._unread
        while len(unread) < num_bytes:
            missing = num_bytes - len(unread)
            chunk = bytearray(max(missing, _READ_AHEAD_BYTES) if self.reads_ahead else missing)
            unread += memoryview(chunk)[: self.receive_into(chunk, deadline)]
        taken = unread[:num_bytes]
        del unread[:num_bytes]
        return taken

    def receive_into(self, view: Any, deadline: float) -> int:
        """Write what is there, at least a byte, into `view` and return how much. Raises as `receive`."""
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            raise WireTimeoutError("the deadline has passed")
        if not remaining <= self._receive_timeout_s <= remaining * 1.1:  # a system call less, for most pieces
            self._receive_timeout_s = remaining
            self._set_timeout(socket.SO_RCVTIMEO, remaining)
        try:
            received = self._sock.recv_into(view)
        except BlockingIOError as error:
            raise WireTimeoutError(f"nothing came for {remaining:.1f} s") from error
        except OSError as error:
            raise WireClosedError(error.strerror or str(error)) from error
        if not received:
            raise WireClosedError("cut" if self._cut else "closed by the peer")
        return received

    def has_unread(self) -> bool:
        """Say whether `receive_header` would return without waiting."""
        return len(self._unread) >= HEADER_BYTES or self.wait_readable(0)

    @property
    def is_silent(self) -> bool:
        """Nothing has been said that was not taken in: not even the end."""
        return not self._unread and not self.wait_readable(0)

    def wait_readable(self, timeout_s: float) -> bool:
        """Wait until something or the end of the stream can be read."""
        return bool(self._poll.poll(timeout_s * 1000))

    def send(self, buffers: Sequence[Any], timeout_s: float) -> None:
        """Hand all bytes to the kernel: when it returns they have left the caller's memory.

        Raises WireTimeoutError when the peer takes nothing for `timeout_s`, and WireClosedError.
        """
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
        """Say that nothing more comes and give the peer a moment to read it all: closing at once could lose it."""
        deadline = time.monotonic() + _LINGER_S
        with contextlib.suppress(OSError, WireClosedError, WireTimeoutError):
            self._sock.shutdown(socket.SHUT_WR)
            while True:
                self.receive_into(bytearray(_READ_AHEAD_BYTES), deadline)

    def cut(self) -> None:
        """Wake the thread that uses this wire, now and for good. From any thread; idempotent."""
        self._cut = True
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._sock.close()

    def _send_some(self, views: list[memoryview]) -> None:
        while views:
            sent = self._sock.sendmsg(views)
            while views and sent >= views[0].nbytes:
                sent -= views.pop(0).nbytes
            if sent:
                views[0] = views[0][sent:]

    def _set_timeout(self, option: int, seconds: float) -> None:
        micros = max(1, int(seconds * 1e6))
        with contextlib.suppress(OSError):  # the socket is gone: the call that follows says so
            self._sock.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(*divmod(micros, 1_000_000)))
