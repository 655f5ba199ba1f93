"""What the plane's threads need of a holder: its leases."""

from typing import Literal, Protocol

from dataplane.blocks.layout import BlockTables
from dataplane.blocks.ticket import Ticket
from dataplane.protocol.progress import KVProgress
from dataplane.protocol.stream import TransferStats
from schemas.ids import LeaseId

LeaseRefusalReason = Literal[
    "unknown", "expired", "opened", "holder", "incarnation", "epoch", "nonce", "reader", "tenant", "expires_at_ms"
]
"""`opened`: a stream is or was under it. Beside these: the field in which the ticket differs from the lease. `holder`,
`incarnation`: it is another's, or of an earlier life. `epoch`, `nonce`: of an earlier grant. `reader`, `tenant`: of
another one."""


class LeaseRefusedError(Exception):
    """A read under this lease is not allowed (any more)."""

    def __init__(self, lease_id: LeaseId, reason: LeaseRefusalReason) -> None:
        super().__init__(f"lease {lease_id} refused: {reason}")
        self.lease_id = lease_id
        self.reason: LeaseRefusalReason = reason


class LeasedKV(Protocol):
    """What a lease is on: tokens [first_token, num_tokens), of a sliding window what its table has."""

    @property
    def tables(self) -> BlockTables: ...
    @property
    def first_token(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def progress(self) -> KVProgress: ...


class OpenLease(Protocol):
    """A lease as one stream reads under it. `traceparent`: what this end of the transfer is called in its trace; it is
    sent to the reader. Every method may be called on any thread, also once the lease has ended."""

    @property
    def kv(self) -> LeasedKV: ...
    @property
    def traceparent(self) -> str: ...

    def content_macs(self) -> bytes:
        """Return the tags of the blocks that are lent, joined; none of those of a hand-over, or where none can be made.
        May take as long as reading the blocks."""
        ...

    def give_back(self) -> None:
        """The reader has had nothing of it: its ticket may open another stream."""
        ...

    def still_valid(self) -> bool:
        """Return whether the leased blocks are still what they were when the lease was opened."""
        ...

    def started(self) -> None:
        """The first frame is on its way."""
        ...

    def served(self, stats: TransferStats, error: str) -> None:
        """The stream is over; `error` is "" when all was sent and committed."""
        ...


class LeaseGate(Protocol):
    """The holder's leases, as the plane's threads see them."""

    def open(self, ticket: Ticket) -> OpenLease:
        """Return the lease that the ticket names, for its one stream. Raises LeaseRefusedError. Any thread."""
        ...
