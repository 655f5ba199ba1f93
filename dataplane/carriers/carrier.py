"""What the plane asks of memory that holds KV, and of a carrier that leads from one such memory to another."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from dataplane.blocks.layout import ArenaShape
from dataplane.memory.arena import ByteArray
from dataplane.memory.checksum import FrameHash
from dataplane.memory.extent import Extent
from dataplane.memory.rows import SequenceRuns
from dataplane.protocol.stream import Accepted, Header, Names, Open, TransferStats
from dataplane.protocol.wire import Wire
from schemas.handoff import Endpoint
from schemas.ids import WorkerId

AUTO = "auto"
"""Not a carrier's name: the best that leads there."""


class CarrierBrokenError(Exception):
    """A carrier that should lead to this holder cannot be set up. Nothing has crossed yet: another may be tried."""

    def __init__(self, carrier: str, reason: str) -> None:
        super().__init__(f"{carrier} cannot be set up: {reason}")
        self.carrier = carrier
        self.reason = reason


class MemoryFailedError(Exception):
    """What this end's KV lies in, or what moves it, has failed."""

    may_still_write = False
    """What a read had begun is not known to have ended: it may still write to the arena."""


class HolderEnd(Protocol):
    """A carrier's end at the holder, for one stream and one thread. `names`: what its reader needs to find the holder's
    memory (`Accepted`).

    `needs_ack`: the reader copies from the holder's memory, and a frame has left it once the reader acknowledges it.
    """

    @property
    def needs_ack(self) -> bool: ...
    @property
    def frame_bytes(self) -> int: ...
    @property
    def names(self) -> Names | None: ...

    def send_frame(self, wire: Wire, head: bytes, data: Header, stats: TransferStats, timeout_s: float) -> int:
        """Send `head`, the frame's header, and its bytes where they cross the wire; return the frame's digest. Without
        `needs_ack` its bytes have then left the arena. Raises WireClosedError, WireTimeoutError, MemoryFailedError, and
        KVNotFiniteError, before anything is sent."""
        ...

    def close(self) -> None:
        """Give back what is held, however the stream has ended: from here on nothing reads the arena."""
        ...


class ReaderEnd(Protocol):
    """A carrier's end at the reader, for one stream and one thread. `needs_ack`: as above."""

    @property
    def needs_ack(self) -> bool: ...

    def take_frame(self, wire: Wire, data: Header, stats: TransferStats, deadline: float) -> int:
        """Put the frame in place; return the digest of what arrived. Raises WireClosedError, WireTimeoutError,
        ProtocolError, MemoryFailedError."""
        ...

    def close(self) -> None:
        """Give back what is held, however the read has ended: from here on nothing writes to the arena."""
        ...


class KVArena(Protocol):
    """Memory that holds a worker's KV, and the ends of the carriers from and to it. Thread-safe.

    `nonce`: of this memory alone. `host_array`: the same, where the host itself can read it. `carriers`: those that
    can lead here, best first.
    """

    @property
    def name(self) -> str: ...
    @property
    def nonce(self) -> str: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def host_array(self) -> ByteArray | None: ...
    @property
    def carriers(self) -> tuple[str, ...]: ...

    # As a holder.

    def offered(self, wanted: str) -> tuple[str, ...]:
        """Return what a holder with this memory offers, best first: the carrier wanted, or under "auto" all."""
        ...

    def describe(self, endpoint: Endpoint) -> Endpoint:
        """Return the endpoint with what is to be announced of this memory."""
        ...

    def wait_written(self, mark: int, has_ended: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until what was put in line before an engine's `mark` is written; return whether it is. Returns early
        when `has_ended`. Raises MemoryFailedError."""
        ...

    def holder_end(
        self, wanted: Open, reader: WorkerId, source: SequenceRuns, extent: Extent, frame_hash: FrameHash
    ) -> HolderEnd:
        """Return this end of the carrier that a reader wants. Raises CarrierBrokenError when it cannot be had here."""
        ...

    # As a reader.

    def leads_from(self, carrier: str, endpoint: Endpoint) -> str | None:
        """Return, for people, why this carrier leads here from that holder; None: it does not."""
        ...

    def opening(self, carrier: str, endpoint: Endpoint, deadline: float) -> AbstractContextManager[Names | None]:
        """Return what an Open over this carrier sends to the holder, for as long as the read takes. Raises
        CarrierBrokenError, WireTimeoutError."""
        ...

    def reader_end(
        self,
        endpoint: Endpoint,
        accepted: Accepted,
        shape: ArenaShape,
        target: SequenceRuns,
        extent: Extent,
        frame_hash: FrameHash,
    ) -> ReaderEnd:
        """Return this end of the carrier that the holder has accepted. `shape`: this arena's. Raises ArenaMissingError,
        ProtocolError, CarrierBrokenError."""
        ...

    def release_ended(self) -> None:
        """Let go of what is kept of holders that have ended. To be called now and then; may take its time."""
        ...

    def close(self) -> None:
        """Give the memory back, and all that is kept of holders. Idempotent."""
        ...
