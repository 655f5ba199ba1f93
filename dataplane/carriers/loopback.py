"""The carrier inside one process: as shm, but the reader has the holder's arena already, and no port is involved."""

import threading
from collections.abc import Callable
from typing import NamedTuple

from dataplane.carriers.carrier import KVArena
from dataplane.memory.arena import ByteArray
from dataplane.protocol.wire import Wire

NAME = "loopback"


class LocalServer(NamedTuple):
    """A plane server of this process. `connect` returns the reader's end of a new stream."""

    arena: KVArena
    connect: Callable[[], Wire]


_lock = threading.Lock()
_servers: dict[str, LocalServer] = {}
"""The servers of this process by the nonce of their arenas."""


def register(server: LocalServer) -> None:
    """Let readers of this process find the server."""
    with _lock:
        _servers[server.arena.nonce] = server


def unregister(arena: KVArena) -> None:
    with _lock:
        _servers.pop(arena.nonce, None)


def find(arena_nonce: str) -> LocalServer | None:
    """Return the server of this process that serves this arena."""
    with _lock:
        return _servers.get(arena_nonce)


def array_of(arena_nonce: str) -> ByteArray | None:
    """Return the KV of that arena, if it is in host memory."""
    server = find(arena_nonce)
    return None if server is None else server.arena.host_array
