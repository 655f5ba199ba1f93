"""Connecting to a holder, and ending a read from another thread wherever it stands."""

import contextlib
import socket
import threading
import time

from dataplane.stream import TransferFailedError
from schemas.handoff import Endpoint


class Cancellation:
    """Ends a read from another thread: nothing is written any more once the read's thread has ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._cancelled = False

    @property
    def is_cancelled(self) -> bool:
        return self._cancelled

    def watch(self, sock: socket.socket) -> None:
        """Shut `sock` down on `cancel`. Raises TransferFailedError when that has been called already."""
        with self._lock:
            self._sockets.append(sock)
        self.check()

    def unwatch(self, sock: socket.socket) -> None:
        with self._lock:
            self._sockets.remove(sock)

    def check(self) -> None:
        if self._cancelled:
            raise TransferFailedError("cancelled", "the reader was cancelled")

    def cancel(self) -> None:
        """From any thread; idempotent."""
        with self._lock:
            self._cancelled = True
            for sock in self._sockets:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)


def connect_tcp(endpoint: Endpoint, timeout_s: float, cancellation: Cancellation) -> socket.socket:
    """Return a connected socket. Raises TransferFailedError with code "connect" or "cancelled"."""
    deadline = time.monotonic() + timeout_s
    try:
        addresses = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError, OverflowError) as error:
        raise TransferFailedError("connect", f"{endpoint.host[:100]}: {error}") from error
    reason = "no address"
    for family, kind, protocol, _, address in addresses:
        sock = socket.socket(family, kind, protocol)
        try:
            cancellation.watch(sock)
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
            cancellation.unwatch(sock)
    raise TransferFailedError("connect", f"{endpoint.host}:{endpoint.port}: {reason}")
