"""Connections on which a stream has ended well, kept for the next read from the same holder."""

import threading
import time
from dataclasses import dataclass

from dataplane import limits
from dataplane.carriers import loopback
from dataplane.protocol.wire import Wire
from schemas.handoff import Endpoint

HolderKey = tuple[str, int, str]
"""Host, port and the arena's nonce: a holder that has started again is another one."""


def holder_key(carrier: str, endpoint: Endpoint) -> HolderKey:
    """Return what the connections that serve this read have in common."""
    if carrier == loopback.NAME:
        return ("", 0, endpoint.arena_nonce)
    return (endpoint.host, endpoint.port, endpoint.arena_nonce)


@dataclass(slots=True, frozen=True, eq=False)
class _Idle:
    key: HolderKey
    wire: Wire
    since: float


class IdleConnections:
    """A few connections, the latest used first. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[_Idle] = []
        self._closed = False

    def __len__(self) -> int:
        with self._lock:
            return len(self._idle)

    def take(self, key: HolderKey) -> Wire | None:
        """Return a connection to this holder that has been silent since its stream ended, or None."""
        with self._lock:
            self._drop_old()
            for idle in reversed(self._idle):
                if idle.key == key:
                    self._idle.remove(idle)
                    if not _has_something(idle.wire):
                        return idle.wire
                    idle.wire.close()
        return None

    def put(self, key: HolderKey, wire: Wire) -> None:
        """Keep the connection, or close it."""
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
        oldest = time.monotonic() - limits.MAX_IDLE_S
        while self._idle and self._idle[0].since < oldest:
            self._drop(self._idle[0])

    def _drop(self, idle: _Idle) -> None:
        self._idle.remove(idle)
        idle.wire.close()


def _has_something(wire: Wire) -> bool:
    """Say whether there is something to read: the end, or what nobody asked for."""
    return not wire.is_silent
