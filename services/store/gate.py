"""The store's leases as the plane's threads see them."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from dataplane.blocks.lease import Lease, LeaseTable
from dataplane.blocks.ticket import Ticket
from dataplane.ends.server import ReadableKV
from dataplane.protocol.progress import KVProgress
from dataplane.protocol.stream import TransferStats
from schemas.ids import LeaseId
from schemas.kv import RequestLease
from services.runtime import now_ms


@dataclass(slots=True, frozen=True)
class Lent:
    """A granted lease, whom it was granted to, and what its stream waits on: nothing, all is there."""

    lease: Lease
    request: RequestLease
    traceparent: str
    granted_ns: int
    progress: KVProgress


class StoreGate:
    """A `LeaseGate`. The event loop changes the leases, holding `lock`; the plane's threads look.

    `on_started`, `on_served` and `name_stream` are called on the plane's threads; the last one is given a lease's
    traceparent, and returns that of a stream under it.
    """

    def __init__(
        self,
        leases: LeaseTable,
        num_layers: int,
        on_started: Callable[[LeaseId], None],
        on_served: Callable[[LeaseId, TransferStats, str], None],
        name_stream: Callable[[str], str],
    ) -> None:
        self.lock = threading.Lock()
        self._leases = leases
        self._num_layers = num_layers
        self._on_started = on_started
        self._on_served = on_served
        self._name_stream = name_stream
        self._lent: dict[LeaseId, Lent] = {}

    # For the event loop.

    def add(self, lease: Lease, request: RequestLease, traceparent: str) -> None:
        """Let a lease that was granted be read."""
        progress = KVProgress.completed(self._num_layers, lease.num_tokens)
        self._lent[lease.lease_id] = Lent(lease, request, traceparent, time.time_ns(), progress)

    def remove(self, lease: Lease) -> Lent:
        """The lease has ended: cut a stream that is still open on it."""
        lent = self._lent.pop(lease.lease_id)
        lent.progress.fail(lease.outcome)
        return lent

    # For the plane's threads.

    def open(self, ticket: Ticket) -> ReadableKV:
        with self.lock:
            lease = self._leases.check(ticket.lease_id, ticket.epoch, ticket.reader, now_ms(), ticket.tenant)
            lent = self._lent[lease.lease_id]
        return ReadableKV(
            tables=lease.tables,
            num_tokens=lease.num_tokens,
            progress=lent.progress,
            first_token=lease.first_token,
            traceparent=self._name_stream(lent.traceparent),
        )

    def still_valid(self, ticket: Ticket) -> bool:
        with self.lock:
            return self._leases.is_current(ticket.lease_id, ticket.epoch, now_ms())

    def started(self, lease_id: LeaseId, carrier: str) -> None:
        self._on_started(lease_id)

    def served(self, lease_id: LeaseId, stats: TransferStats, error: str) -> None:
        self._on_served(lease_id, stats, error)
