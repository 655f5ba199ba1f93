"""Which blocks this worker lends to readers that ask for a lease, and until when. Pure.

A lease is for one read. It ends when that has ended, when its reader has left, or by its time: a short one until the
read begins, then the worker's own.
"""

from dataclasses import dataclass

from dataplane.blocks.cache import BlockCache
from dataplane.blocks.lease import Lease, LeaseTable
from schemas.block import split_hashes
from schemas.ids import LeaseId
from schemas.kv import RequestLease, ReturnLease, refuse_lease
from schemas.request import Refused, refuse
from schemas.worker import WorkerLeft
from services.worker.core.actions import Action, CloseLease
from services.worker.core.checks import WorkerLimits
from services.worker.limits import RETRY_AFTER_MS

OPEN_WITHIN_MS = 5_000
"""How long a lease waits for its read to begin."""
MAX_LENT = 256


@dataclass
class LendCore:
    """The leases that were asked for; those of hand-overs are the prefill core's."""

    limits: WorkerLimits
    cache: BlockCache
    leases: LeaseTable
    num_asked: int = 0
    draining: bool = False

    def __post_init__(self) -> None:
        self._lent: set[LeaseId] = set()

    def lend(self, request: RequestLease, now_ms: int) -> Lease | Refused:
        """Grant a lease on the leading run of the asked blocks that is here, or say why not."""
        limits = self.limits
        if (refused := refuse_lease(request, limits.worker_id, limits.fingerprint, now_ms)) is not None:
            return refused
        if self.draining:
            return refuse(request, "draining", f"{limits.worker_id} is draining", RETRY_AFTER_MS)
        if len(self._lent) >= MAX_LENT:
            return refuse(request, "overloaded", f"{MAX_LENT} leases are open", RETRY_AFTER_MS)
        found = self.cache.lend(split_hashes(request.block_hashes), request.first_block)
        if found is None:
            return refuse(request, "gone", f"{limits.worker_id} does not hold these blocks (any more)")
        self.num_asked += 1
        lease = self.leases.grant(
            lease_id=LeaseId(f"read-{limits.worker_id}-{self.num_asked}"),
            holder=limits.worker_id,
            reader=request.reader,
            tenant=request.tenant,
            tables=found.tables,
            first_token=request.first_block * limits.block_size,
            num_tokens=found.num_cached_tokens,
            expires_at_ms=now_ms + min(OPEN_WITHIN_MS, limits.lease_ms),
            granted_ms=now_ms,
            ends_by_ms=request.deadline_ms,
        )
        self._lent.add(lease.lease_id)
        return lease

    def started(self, lease_id: LeaseId, now_ms: int) -> None:
        """The read has begun: it may take the worker's full time."""
        if lease_id in self._lent:
            self.leases.renew(lease_id, now_ms, self.limits.lease_ms)

    def served(self, lease_id: LeaseId, outcome: str) -> list[Action]:
        """The read is over, however it ended."""
        lease = self.leases.end(lease_id, outcome) if lease_id in self._lent else None
        return [] if lease is None else self._gone(lease)

    def returned(self, event: ReturnLease) -> list[Action]:
        """The reader does not read, or no more."""
        is_its_own = any(lease.lease_id == event.lease_id and lease.reader == event.reader for lease in self.leases)
        return self.served(event.lease_id, "returned") if is_its_own else []

    def left(self, event: WorkerLeft) -> list[Action]:
        """A reader is gone."""
        lost = [lease for lease in self.leases if lease.lease_id in self._lent and lease.reader == event.worker_id]
        return [action for lease in lost for action in self.served(lease.lease_id, "the reader left")]

    def fence(self, now_ms: int, reason: str) -> list[Action]:
        """This worker has been declared dead: no reader waits for it any more."""
        lent = [lease.lease_id for lease in self.leases if lease.lease_id in self._lent]
        return [action for lease_id in lent for action in self.served(lease_id, reason)]

    def tick(self, now_ms: int) -> list[Action]:
        """End what is over its time."""
        over = self.leases.expire(now_ms, self._lent.__contains__)
        return [action for lease in over for action in self._gone(lease)]

    def _gone(self, lease: Lease) -> list[Action]:
        self._lent.discard(lease.lease_id)
        self.cache.free(lease.tables)
        return [CloseLease(lease.lease_id, lease.outcome)]
