"""What the plane's threads need of a holder: its leases."""

from dataclasses import dataclass
from typing import Literal, Protocol

from dataplane.blocks.layout import BlockTables
from dataplane.blocks.ticket import Ticket
from dataplane.protocol.progress import KVProgress
from dataplane.protocol.stream import TransferStats
from schemas.ids import LeaseId

LeaseRefusalReason = Literal["unknown", "expired", "epoch", "reader", "tenant"]
"""`epoch`: the ticket is of an earlier grant. `reader`, `tenant`: it is another's."""


class LeaseRefusedError(Exception):
    """A read under this lease is not allowed (any more)."""

    def __init__(self, lease_id: LeaseId, reason: LeaseRefusalReason) -> None:
        super().__init__(f"lease {lease_id} refused: {reason}")
        self.lease_id = lease_id
        self.reason: LeaseRefusalReason = reason


@dataclass(slots=True, frozen=True)
class ReadableKV:
    """What a ticket gives access to: tokens [first_token, num_tokens), of a sliding window what its table has."""

    tables: BlockTables
    num_tokens: int
    progress: KVProgress
    first_token: int = 0
    traceparent: str = ""
    """What this end of the transfer is called in its trace: told to the reader."""


class LeaseGate(Protocol):
    """The holder's leases, as the plane's threads see them. Every method may be called on any thread."""

    def open(self, ticket: Ticket) -> ReadableKV:
        """Return what the ticket names. Raises LeaseRefusedError."""
        ...

    def still_valid(self, ticket: Ticket) -> bool:
        """Say whether the leased blocks are still what they were when `open` was called."""
        ...

    def started(self, lease_id: LeaseId, carrier: str) -> None:
        """The first frame is on its way, over `carrier`."""
        ...

    def served(self, lease_id: LeaseId, stats: TransferStats, error: str) -> None:
        """The stream is over; `error` is "" when all was sent and committed."""
        ...
