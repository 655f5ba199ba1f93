"""A reader's connections: made, cut from another thread wherever the read stands, and kept for the next read from the
same holder once a stream has ended well."""

import contextlib
import socket
import threading
import time
from dataclasses import dataclass
from typing import Protocol

from dataplane import limits
from dataplane.carriers import loopback
from dataplane.protocol.stream import TransferFailedError
from dataplane.protocol.wire import Wire
from schemas.handoff import Endpoint
from schemas.kv import ReadEnd


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
        self.raise_if_cancelled()

    def unwatch(self, wire: Cuttable) -> None:
        with self._lock:
            self._watched.remove(wire)

    def raise_if_cancelled(self) -> None:
        if self._cancelled:
            raise TransferFailedError(ReadEnd.CANCELLED, "the reader was cancelled")

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
    # A name can have several addresses: they are tried in order, under one deadline for all of them.
    deadline = time.monotonic() + timeout_s
    try:
        addresses = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError, OverflowError) as error:
        raise TransferFailedError(ReadEnd.CONNECT, f"{endpoint.host[:100]}: {error}") from error
    reason = "no address"
    for family, kind, protocol, _, address in addresses:
        try:
            sock = socket.socket(family, kind, protocol)
        except OSError as error:  # this machine may lack the family, and have the next address's
            reason = error.strerror or str(error)
            continue
        # Watch the socket while it connects: a cancellation from another thread shuts it down.
        dialling = _Dialling(sock)
        try:
            cancellation.watch(dialling)
            # Allow at least 1 ms: a timeout of 0 would make the socket non-blocking, and a negative one is an error.
            sock.settimeout(max(0.001, deadline - time.monotonic()))
            sock.connect(address)
            cancellation.raise_if_cancelled()
        except TransferFailedError:
            sock.close()
            raise
        except OSError as error:
            # A socket that was cut fails like any other: check for a cancellation before the next address is tried.
            sock.close()
            cancellation.raise_if_cancelled()
            reason = error.strerror or str(error)
        else:
            return sock
        finally:
            cancellation.unwatch(dialling)
    raise TransferFailedError(ReadEnd.CONNECT, f"{endpoint.host}:{endpoint.port}: {reason}")


def connect_near(address: str) -> socket.socket | None:
    """Return a socket that is connected to this address of the machine; None: nobody listens there."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        sock.connect(address)
    except OSError:
        sock.close()
        return None
    return sock


_HolderKey = tuple[str, str, int, str]
"""Carrier, host, port and the arena's nonce: a holder that has started again is another one."""


@dataclass(slots=True, frozen=True, eq=False)
class _Idle:
    key: _HolderKey
    wire: Wire
    since: float


class IdleConnections:
    """A few connections, the latest used first; one is kept for `max_idle_s`. Thread-safe."""

    def __init__(self, max_idle_s: float) -> None:
        self._max_idle_s = max_idle_s
        self._lock = threading.Lock()
        self._idle: list[_Idle] = []
        self._closed = False

    def __len__(self) -> int:
        with self._lock:
            return len(self._idle)

    def reuse(self, carrier: str, endpoint: Endpoint) -> Wire | None:
        """Return a connection to this holder that has been silent since its stream ended, or None."""
        key = _key_of(carrier, endpoint)
        with self._lock:
            self._drop_old()
            for idle in reversed(self._idle):
                if idle.key == key:
                    self._idle.remove(idle)
                    if idle.wire.is_silent:  # not closed meanwhile, and nothing that nobody asked for
                        return idle.wire
                    idle.wire.close()
        return None

    def keep_idle(self, carrier: str, endpoint: Endpoint, wire: Wire) -> None:
        """Keep the connection, or close it."""
        key = _key_of(carrier, endpoint)
        with self._lock:
            self._drop_old()
            same = [idle for idle in self._idle if idle.key == key]
            if len(same) >= limits.MAX_IDLE_PER_HOLDER:
                self._drop(same[0])
            elif len(self._idle) >= limits.MAX_IDLE:
                self._drop(self._idle[0])
            if self._closed:
                wire.close()
            else:
                self._idle.append(_Idle(key, wire, time.monotonic()))

    def close(self) -> None:
        """Close all, and whatever comes later."""
        with self._lock:
            self._closed = True
            while self._idle:
                self._drop(self._idle[0])

    def _drop_old(self) -> None:
        oldest = time.monotonic() - self._max_idle_s
        while self._idle and self._idle[0].since < oldest:
            self._drop(self._idle[0])

    def _drop(self, idle: _Idle) -> None:
        self._idle.remove(idle)
        idle.wire.close()


def _key_of(carrier: str, endpoint: Endpoint) -> _HolderKey:
    """Return what the connections that serve this read have in common."""
    if carrier == loopback.NAME:
        return (carrier, "", 0, endpoint.arena_nonce)
    return (carrier, endpoint.host, endpoint.port, endpoint.arena_nonce)
