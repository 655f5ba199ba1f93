"""An arena in host memory: `loopback` inside one process, `shm` on one host, `tcp` between hosts."""

import contextlib
import mmap
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

from dataplane import limits
from dataplane.blocks.layout import ArenaShape
from dataplane.carriers import loopback, shm, tcp
from dataplane.carriers.carrier import AUTO, CarrierBrokenError, HolderEnd, ReaderEnd
from dataplane.carriers.shm import SharedHolder, SharedReader, holder_memory
from dataplane.carriers.tcp import TcpHolder, TcpReader
from dataplane.memory.arena import SHM_DIR, Arena, ArenaMissingError, ByteArray
from dataplane.memory.checksum import FrameHash
from dataplane.memory.extent import Extent
from dataplane.memory.frames import SequenceMemory
from dataplane.memory.rows import SequenceRuns
from dataplane.protocol.stream import Accepted, Names, Open
from schemas.handoff import Endpoint
from schemas.ids import WorkerId


class HostArena(Arena):
    """An arena in host memory that is served and read into (`KVArena`)."""

    carriers = (loopback.NAME, shm.NAME, tcp.NAME)

    def __init__(self, name: str, nonce: str, mapping: mmap.mmap, *, owned: bool) -> None:
        super().__init__(name, nonce, mapping, owned=owned)
        self._attached = AttachedArenas()

    @property
    def host_array(self) -> ByteArray:
        return self.array

    def offered(self, wanted: str) -> tuple[str, ...]:
        """Return what a holder offers. `loopback` is for who asks for it: a mesh has a process for each worker."""
        return (shm.NAME, tcp.NAME) if wanted == AUTO else (wanted,)

    def describe(self, endpoint: Endpoint) -> Endpoint:
        """There is nothing more to announce."""
        return endpoint

    def wait_written(self, mark: int, has_ended: Callable[[], bool], timeout_s: float) -> bool:
        """What an engine has announced is in host memory."""
        return True

    def holder_end(
        self, wanted: Open, reader: WorkerId, source: SequenceRuns, extent: Extent, frame_hash: FrameHash
    ) -> HolderEnd:
        """Return the holder's end of the carrier. Raises CarrierBrokenError."""
        memory = SequenceMemory(self.array, source)
        match wanted.carrier:
            case loopback.NAME | shm.NAME:
                return SharedHolder(memory, frame_hash)
            case tcp.NAME:
                return TcpHolder(memory, extent, frame_hash)
            case other:
                raise CarrierBrokenError(other, "this holder's arena is in host memory")

    def leads_from(self, carrier: str, endpoint: Endpoint) -> str | None:
        """Return why a carrier leads here, if it does."""
        detour = ", the holder's card staged through host memory" if endpoint.card else ""
        match carrier:
            case loopback.NAME:
                return "one process" if loopback.array_of(endpoint.arena_nonce) is not None else None
            case shm.NAME:
                return "one host" if self._attached.can_attach(endpoint) else None
            case tcp.NAME if endpoint.port > 0:
                return f"a network{detour}"
            case _:
                return None

    def opening(self, carrier: str, endpoint: Endpoint, deadline: float) -> AbstractContextManager[Names | None]:
        """There is nothing to prepare."""
        return contextlib.nullcontext()

    def reader_end(
        self,
        endpoint: Endpoint,
        accepted: Accepted,
        shape: ArenaShape,
        target: SequenceRuns,
        extent: Extent,
        frame_hash: FrameHash,
    ) -> ReaderEnd:
        """Return the reader's end. Raises ArenaMissingError, ProtocolError."""
        memory = SequenceMemory(self.array, target)
        if accepted.carrier == tcp.NAME:
            return TcpReader(memory, extent, frame_hash)
        array = self._holder_array(accepted.carrier, endpoint)
        return SharedReader(holder_memory(array, accepted, shape, extent), memory, frame_hash)

    def _holder_array(self, carrier: str, endpoint: Endpoint) -> ByteArray:
        """Return the KV of the holder's arena. Raises ArenaMissingError."""
        if carrier == shm.NAME:
            return self._attached.attach(endpoint)
        if (array := loopback.array_of(endpoint.arena_nonce)) is None:
            raise ArenaMissingError(endpoint.arena, "the holder has closed")
        return array

    def release_ended(self) -> None:
        """Let go of the arenas of holders that have ended."""
        self._attached.release_unlinked()

    def close(self) -> None:
        """Unmap it, and the holders' arenas. Idempotent."""
        self._attached.close()
        super().close()


class AttachedArenas:
    """The holders' arenas that this process has mapped, kept: a mapping's first touch of each page is dear.

    Bounded. Thread-safe.
    """

    def __init__(self, max_attached: int = limits.MAX_ATTACHED) -> None:
        self._max_attached = max_attached
        self._lock = threading.Lock()
        self._arenas: dict[tuple[str, str], Arena] = {}

    def attach(self, endpoint: Endpoint) -> ByteArray:
        """Return the KV of the endpoint's arena, read-only. Raises ArenaMissingError."""
        key = (endpoint.arena, endpoint.arena_nonce)
        with self._lock:
            arena = self._arenas.pop(key, None) or Arena.attach(*key)
            self._arenas[key] = arena  # the one used last is at the end
            while len(self._arenas) > self._max_attached:
                self._arenas.pop(next(iter(self._arenas))).close()
            return arena.array

    def release_unlinked(self) -> None:
        """Let go of the arenas whose owners have ended: what is mapped here, nobody else can have."""
        with self._lock:
            for gone in [key for key in self._arenas if not (SHM_DIR / key[0]).exists()]:
                self._arenas.pop(gone).close()

    def can_attach(self, endpoint: Endpoint) -> bool:
        """Return whether the endpoint's arena is on this host."""
        with contextlib.suppress(ArenaMissingError):
            self.attach(endpoint)
            return True
        return False

    def close(self) -> None:
        """Unmap all. Copies that run keep what they use."""
        with self._lock:
            while self._arenas:
                self._arenas.popitem()[1].close()
