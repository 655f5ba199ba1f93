"""An arena behind the plane: which carriers lead from and to it, and who makes their ends. Whoever serves or reads
knows no more of what the KV lies in than this. `host.py` has host memory."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

from dataplane.blocks.layout import ArenaShape
from dataplane.carriers.carrier import HolderCarrier, ReaderCarrier
from dataplane.memory.arena import ByteArray
from dataplane.memory.checksum import DigestKind, FrameHash
from dataplane.memory.extent import Extent
from dataplane.memory.rows import SequenceRuns
from dataplane.protocol.stream import Accepted, Open, PairRead
from dataplane.protocol.wire import Wire
from schemas.handoff import Endpoint
from schemas.ids import WorkerId

AUTO = "auto"
"""Not a carrier's name: the best that leads there."""


class PairRefusedError(Exception):
    """There is no such pair any more, or it cannot be made. `reason` is for the peer."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class PairListener(Protocol):
    """The holder's end of a pair (`stream.py`) that its reader has opened."""

    def accept(self, wire: Wire) -> None:
        """Say so on the pair's wire, and listen until the pair is over. Raises nothing."""
        ...


class HolderSide(Protocol):
    """An arena, as the server that lends from it uses it. Thread-safe.

    `digest_kind`: with what frames out of it are digested; None: as the reader likes.
    """

    @property
    def digest_kind(self) -> DigestKind | None: ...

    def describe(self, endpoint: Endpoint, reader: WorkerId | None = None) -> Endpoint:
        """Return the endpoint with what is to be said of this memory, and what only this reader may open. Does not
        wait."""
        ...

    def carrier(
        self, wanted: Open, reader: WorkerId, source: SequenceRuns, extent: Extent, frame_hash: FrameHash
    ) -> HolderCarrier:
        """Return this end of the carrier that a reader wants. Raises CarrierBrokenError when it cannot be had here."""
        ...

    def open_pair(self, reader: WorkerId, generation: int) -> PairListener:
        """Return the pair of this offer. Raises PairRefusedError when the offer is over, and CarrierBrokenError: here
        there never were any."""
        ...

    def close(self) -> None:
        """Nothing is lent any more."""
        ...


class ReadAsked(NamedTuple):
    """What a read wants of its arena. `target`: where the tokens go. `deadline`: by the monotonic clock. `dial` makes
    one more connection to the holder."""

    endpoint: Endpoint
    ticket: str
    target: SequenceRuns
    deadline: float
    is_cancelled: Callable[[], bool]
    dial: Callable[[], Wire]


class Approach(Protocol):
    """A read over one carrier, from before its Open on. For one thread. `pair`, `frame_bytes`: what the Open says."""

    @property
    def pair(self) -> PairRead | None: ...
    @property
    def frame_bytes(self) -> int: ...

    def end(self, accepted: Accepted, extent: Extent, frame_hash: FrameHash) -> ReaderCarrier:
        """Return this end of the carrier. Raises ArenaMissingError, ProtocolError, CarrierBrokenError."""
        ...

    def close(self) -> None:
        """The read has ended."""
        ...


class ReaderPlace(Protocol):
    """Where an arena is, for who chooses a carrier. `carriers`: those that can lead here, best first."""

    @property
    def carriers(self) -> tuple[str, ...]: ...

    def reason(self, carrier: str, endpoint: Endpoint) -> str | None:
        """Say, for people, why this carrier leads here from that holder; None: it does not."""
        ...


class ReaderSide(Protocol):
    """An arena, as the reader that fills it uses it. Thread-safe. `digest_kind`: what suits it."""

    @property
    def place(self) -> ReaderPlace: ...
    @property
    def digest_kind(self) -> DigestKind: ...

    def approach(self, carrier: str, asked: ReadAsked) -> Approach:
        """Prepare a read over this carrier, which the caller closes. Raises CarrierBrokenError, TransferFailedError,
        WireClosedError, WireTimeoutError."""
        ...

    def release_ended(self) -> None:
        """Let go of the memory of holders that have ended. To be called now and then; may take its time."""
        ...

    def close(self) -> None:
        """Let go of all holders' memory."""
        ...


class KVArena(Protocol):
    """Memory that holds a worker's KV. `nonce`: of this memory alone. `host_array`: the same, where the host itself
    can read it."""

    @property
    def name(self) -> str: ...
    @property
    def nonce(self) -> str: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def host_array(self) -> ByteArray | None: ...

    def offered(self, wanted: str) -> tuple[str, ...]:
        """Return what a holder with this memory offers, best first: the carrier wanted, or under "auto" all."""
        ...

    def as_holder(self, carriers: tuple[str, ...]) -> HolderSide:
        """Return it for a server that offers these carriers."""
        ...

    def as_reader(self, shape: ArenaShape) -> ReaderSide:
        """Return it for a reader; `shape`: the arena's."""
        ...

    def close(self) -> None:
        """Give the memory back. Idempotent."""
        ...
