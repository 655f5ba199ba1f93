"""The two ends of a carrier, as a holder's stream and a read use them, and what may go wrong with one."""

from typing import NamedTuple, Protocol

from dataplane.protocol.stream import Digest, Header, TransferStats
from dataplane.protocol.wire import Wire


class Access(NamedTuple):
    """How a reader that copies for itself finds a frame, as the holder's `Accepted` says it: by the block tables in the
    holder's arena (`by_tables`), or packed, `at` an offset of its shared memory (`staged`). `names`: by which another
    process opens that arena, where its shared memory is not what it lies in; the carrier's own."""

    by_tables: bool = False
    staged: bool = False
    names: dict[str, object] | None = None


class CarrierBrokenError(Exception):
    """A carrier that should lead to this holder cannot be set up. Nothing has crossed yet: another may be tried."""

    def __init__(self, carrier: str, reason: str) -> None:
        super().__init__(f"{carrier} cannot be set up: {reason}")
        self.carrier = carrier
        self.reason = reason


class HeldUpError(Exception):
    """The oldest frame cannot go before the reader's Ack of an earlier one: what that one holds is needed for it."""


class MemoryFailedError(Exception):
    """What this end's KV lies in, or what moves it, has failed."""

    may_still_write = False
    """What a read had begun is not known to have ended: it may still write to the arena."""


class BeginsAhead(Protocol):
    """What a holder's carrier has that works on a frame before the frame is sent. `max_begun`: on so many at once."""

    @property
    def max_begun(self) -> int: ...

    def begin(self, data: Header, mark: int) -> None:
        """Start on the frame, which is in the arena once the arena's `mark` is reached (0: it is). Does not wait for
        that. Raises MemoryFailedError."""
        ...


class HolderCarrier(Protocol):
    """How a frame's bytes cross, at the holder's end. For one thread.

    `needs_ack`: the reader copies from the holder's memory. `ahead`: is told of each frame before it is sent; None: a
    frame that is announced is there, and nothing is to be done before. All but `close` may raise MemoryFailedError.
    """

    @property
    def needs_ack(self) -> bool: ...
    @property
    def access(self) -> Access: ...
    @property
    def frame_bytes(self) -> int: ...
    @property
    def ahead(self) -> BeginsAhead | None: ...

    def send(self, wire: Wire, head: bytes, data: Header, stats: TransferStats, timeout_s: float) -> Digest:
        """Send `head` and the oldest frame that was not sent yet; return its digest. Without `needs_ack` its bytes have
        then left the arena. Raises WireClosedError, WireTimeoutError, KVNotFiniteError, and HeldUpError: nothing was
        sent, and it may be tried again once an Ack has come."""
        ...

    def acked(self, sequence: int) -> None:
        """The reader has finished with all frames up to this one."""
        ...

    def close(self) -> None:
        """Give back what is held, however the stream has ended: from here on nothing reads the arena."""
        ...


class ReaderCarrier(Protocol):
    """How a frame's bytes cross, at the reader's end. For one thread. All but `close` may raise MemoryFailedError."""

    @property
    def needs_ack(self) -> bool: ...

    def land(self, wire: Wire, data: Header, stats: TransferStats, deadline: float) -> Digest:
        """Put the frame in place, or begin to; return its digest. Raises WireClosedError, WireTimeoutError,
        ProtocolError."""
        ...

    def finished(self) -> int:
        """Return up to which frame the holder's memory is not needed any more."""
        ...

    def wait_finished(self, deadline: float) -> int:
        """Return the same once there is one more, of those that have landed. Raises WireTimeoutError."""
        ...

    def finish(self, deadline: float) -> None:
        """Wait until all that has landed is in place. Raises WireTimeoutError."""
        ...

    def close(self) -> None:
        """Give back what is held, however the read has ended: from here on nothing writes to the arena."""
        ...
