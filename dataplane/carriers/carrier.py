"""The two ends of a carrier, as holders and readers use them."""

from typing import NamedTuple, Protocol

from dataplane.protocol.stream import DeviceHandles, Digest, Header, TransferStats
from dataplane.protocol.wire import Wire


class Access(NamedTuple):
    """How a reader that copies for itself finds a frame: by the block tables in the arena, which is in shared memory or
    on the card of `device`, or `at` an offset of the staging memory."""

    by_tables: bool = False
    staged: bool = False
    device: DeviceHandles | None = None


class HeldUpError(Exception):
    """The oldest frame cannot go before the reader's Ack of an earlier one: what that one holds is needed for it."""


class HolderCarrier(Protocol):
    """How a frame's bytes cross, at the holder's end. For one thread.

    `needs_ack`: the reader copies from the holder's memory. `max_begun`: so many frames may be begun before the first
    of them is sent. All but `close` may raise DeviceError.
    """

    @property
    def needs_ack(self) -> bool: ...
    @property
    def access(self) -> Access: ...
    @property
    def frame_bytes(self) -> int: ...
    @property
    def max_begun(self) -> int: ...

    def begin(self, data: Header, mark: int) -> None:
        """Start what must be done before the frame can go, which is there once the arena's `mark` is reached. Does not
        wait for it."""
        ...

    def send(self, wire: Wire, head: bytes, data: Header, stats: TransferStats, timeout_s: float) -> Digest:
        """Send `head` and the oldest frame that was begun; return its digest. Without `needs_ack` its bytes have then
        left the arena. Raises WireClosedError, WireTimeoutError, NotFiniteError, and HeldUpError: nothing was
        sent, and it may be tried again once an Ack has come."""
        ...

    def acked(self, sequence: int) -> None:
        """The reader has finished with all frames up to this one."""
        ...

    def close(self) -> None:
        """Give back what is held, however the stream has ended: from here on nothing reads the arena."""
        ...


class ReaderCarrier(Protocol):
    """How a frame's bytes cross, at the reader's end. For one thread. All but `close` may raise DeviceError."""

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
