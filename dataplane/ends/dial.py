"""Connecting to a holder, and ending a read from another thread wherever it stands."""

import contextlib
import socket
import threading
import time
from typing import Protocol

from dataplane.protocol.reasons import FailureCode
from dataplane.protocol.stream import TransferFailedError
from schemas.handoff import Endpoint


class Cuttable(Protocol):
    """What a read waits on."""

    def cut(self) -> None:
        """Wake whoever waits on it, now and for good."""
        ...


class Cancellation:
    """Ends a read from another thread: nothing is written any more once the read's thread has ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watched: list[Cuttable] = []
        self._cancelled = False

    @property
    def is_cancelled(self) -> bool:
        return self._cancelled

    def watch(self, wire: Cuttable) -> None:
        """Cut `wire` on `cancel`. Raises TransferFailedError when that has been called already."""
        with self._lock:
            self._watched.append(wire)
        self.check()

    def unwatch(self, wire: Cuttable) -> None:
        with self._lock:
            self._watched.remove(wire)

    def check(self) -> None:
        if self._cancelled:
            raise TransferFailedError(FailureCode.CANCELLED, "the reader was cancelled")

    def cancel(self) -> None:
        """From any thread; idempotent."""
        with self._lock:
            self._cancelled = True
            for wire in self._watched:
                wire.cut()


class _Dialling:
    """A socket that is being connected."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def cut(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)


def connect_tcp(endpoint: Endpoint, timeout_s: float, cancellation: Cancellation) -> socket.socket:
    """Return a connected socket. Raises TransferFailedError with code "connect" or "cancelled"."""
    deadline = time.monotonic() + timeout_s
    try:
        addresses = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError, OverflowError) as error:
        raise TransferFailedError(FailureCode.CONNECT, f"{endpoint.host[:100]}: {error}") from error
    reason = "no address"
    for family, kind, protocol, _, address in addresses:
        sock = socket.socket(family, kind, protocol)
        dialling = _Dialling(sock)
        try:
            cancellation.watch(dialling)
            sock.settimeout(max(0.001, deadline - time.monotonic()))
            sock.connect(address)
            cancellation.check()
        except TransferFailedError:
            sock.close()
            raise
        except OSError as error:
            sock.close()
            cancellation.check()
            reason = error.strerror or str(error)
        else:
            return sock
        finally:
            cancellation.unwatch(dialling)
    raise TransferFailedError(FailureCode.CONNECT, f"{endpoint.host}:{endpoint.port}: {reason}")
