"""An arena in host memory behind the plane: `loopback` inside one process, `shm` on one host, `tcp` between hosts."""

from collections.abc import Callable
from dataclasses import dataclass

from dataplane import limits
from dataplane.blocks.layout import ArenaShape
from dataplane.carriers import loopback, shm, tcp
from dataplane.carriers.carrier import CarrierBrokenError, HolderCarrier, ReaderCarrier
from dataplane.carriers.kv_arena import AUTO, PairListener, ReadAsked
from dataplane.carriers.shm import AttachedArenas, FrameSource, SharedHolder, SharedReader, holder_frames
from dataplane.carriers.tcp import TcpHolder, TcpReader
from dataplane.memory.arena import Arena, ArenaMissingError, ByteArray
from dataplane.memory.checksum import DigestKind, FrameHash
from dataplane.memory.extent import Extent
from dataplane.memory.frames import SequenceMemory
from dataplane.memory.rows import SequenceRuns
from dataplane.protocol.stream import Accepted, Open
from schemas.handoff import Endpoint
from schemas.ids import WorkerId


class HostArena(Arena):
    """An arena in host memory that is served and read into."""

    @property
    def host_array(self) -> ByteArray:
        return self.array

    def offered(self, wanted: str) -> tuple[str, ...]:
        """Return what a holder offers. `loopback` is for who asks for it: a mesh has a process for each worker."""
        return (shm.NAME, tcp.NAME) if wanted == AUTO else (wanted,)

    def as_holder(self, carriers: tuple[str, ...]) -> "HostHolderSide":
        return HostHolderSide(self)

    def as_reader(self, shape: ArenaShape) -> "HostReaderSide":
        return HostReaderSide(self, shape)


class HostHolderSide:
    """Makes the holder's ends."""

    digest_kind = None
    """The host computes either."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena

    def describe(self, endpoint: Endpoint, reader: WorkerId | None = None) -> Endpoint:
        """There is nothing more to say."""
        return endpoint

    def carrier(
        self, wanted: Open, reader: WorkerId, source: SequenceRuns, extent: Extent, frame_hash: FrameHash
    ) -> HolderCarrier:
        """Return the holder's end of the carrier. Raises CarrierBrokenError."""
        memory = SequenceMemory(self._arena.array, source)
        match wanted.carrier:
            case loopback.NAME | shm.NAME:
                return SharedHolder(memory, frame_hash)
            case tcp.NAME:
                return TcpHolder(memory, extent, frame_hash)
            case other:
                raise CarrierBrokenError(other, "this holder's arena is in host memory")

    def open_pair(self, reader: WorkerId, generation: int) -> PairListener:
        """Raises CarrierBrokenError: over none of these carriers there are pairs."""
        raise CarrierBrokenError("a pair", "this holder has no pairs")

    def close(self) -> None:
        """Nothing is held."""


@dataclass(slots=True, frozen=True)
class HostPlace:
    """`can_attach`: whether the endpoint's shared memory is on this host."""

    can_attach: Callable[[Endpoint], bool]
    carriers: tuple[str, ...] = (loopback.NAME, shm.NAME, tcp.NAME)

    def reason(self, carrier: str, endpoint: Endpoint) -> str | None:
        """Say why a carrier leads here, if it does."""
        match carrier:
            case loopback.NAME:
                server = loopback.find(endpoint.arena_nonce)
                return "one process" if server is not None and isinstance(server.arena, Arena) else None
            case shm.NAME if self.can_attach(endpoint):
                return f"one host{_detour(endpoint)}"
            case tcp.NAME if endpoint.port > 0:
                return f"a network{_detour(endpoint)}"
            case _:
                return None


class HostReaderSide:
    """Makes the reader's ends, and keeps the holders' arenas mapped that are on this host."""

    digest_kind: DigestKind = "xxh3"

    def __init__(self, arena: Arena, shape: ArenaShape) -> None:
        self.arena = arena
        self.shape = shape
        self.attached = AttachedArenas()
        self.place = HostPlace(self.attached.can_attach)

    def approach(self, carrier: str, asked: ReadAsked) -> "HostApproach":
        """Nothing is to be prepared."""
        return HostApproach(self, carrier, asked)

    def release_ended(self) -> None:
        """Let go of the arenas of holders that have ended."""
        self.attached.release_unlinked()

    def close(self) -> None:
        """Unmap the holders' arenas."""
        self.attached.close()

    # What the simulator does in its own way.

    def holder_memory(self, carrier: str, endpoint: Endpoint) -> ByteArray:
        """Return the holder's arena. Raises ArenaMissingError."""
        if carrier == shm.NAME:
            return self.attached.attach(endpoint)
        server = loopback.find(endpoint.arena_nonce)
        if server is None or not isinstance(server.arena, Arena):
            raise ArenaMissingError(endpoint.arena, "the holder has closed")
        return server.arena.array

    def shared_reader(self, source: FrameSource, target: SequenceMemory, frame_hash: FrameHash) -> ReaderCarrier:
        """Return the end that copies from the holder's memory."""
        return SharedReader(source, target, frame_hash)


class HostApproach:
    """A read over one of these carriers."""

    pair = None
    frame_bytes = limits.MAX_FRAME_BYTES

    def __init__(self, side: HostReaderSide, carrier: str, asked: ReadAsked) -> None:
        self._side = side
        self._carrier = carrier
        self._asked = asked

    def end(self, accepted: Accepted, extent: Extent, frame_hash: FrameHash) -> ReaderCarrier:
        """Return the reader's end. Raises ArenaMissingError, ProtocolError."""
        side, asked = self._side, self._asked
        target = SequenceMemory(side.arena.array, asked.target)
        if self._carrier == tcp.NAME:
            return TcpReader(target, extent, frame_hash)
        array = side.holder_memory(self._carrier, asked.endpoint)
        return side.shared_reader(holder_frames(array, accepted, side.shape, extent), target, frame_hash)

    def close(self) -> None:
        """Nothing is held."""


def _detour(endpoint: Endpoint) -> str:
    """Say which end's KV makes a stop in host memory on its way, if one's does."""
    return ", the holder's card staged through host memory" if endpoint.card else ""
