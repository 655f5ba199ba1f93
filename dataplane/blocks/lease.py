"""Leases: who may read which blocks, and until when. Pure: the time is an argument.

A lease is active from its grant to `end` or `expire`, whichever comes first; then it is forgotten. Past its expiry it
is refused to readers even while nobody has called `expire` yet. The caller holds the blocks' references.
"""

import enum
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from dataplane.blocks.layout import BlockTables, block_ids
from schemas.ids import LeaseId, WorkerId

NEVER = 2**63 - 1
RefusalReason = Literal["unknown", "expired", "epoch", "reader", "tenant"]


class LeaseState(enum.StrEnum):
    ACTIVE = "active"
    ENDED = "ended"
    EXPIRED = "expired"


@dataclass(slots=True, frozen=True)
class Lease:
    """`reader` may read tokens [first_token, num_tokens) in `tables`, whose blocks `holder` keeps as they are until
    `expires_at_ms`. Of a cache group with a window only what its table covers can be read.

    `epoch` is unique to this grant: a ticket for an earlier grant of the same id reads nothing.
    """

    lease_id: LeaseId
    epoch: int
    holder: WorkerId
    reader: WorkerId
    tables: BlockTables
    num_tokens: int
    expires_at_ms: int
    first_token: int = 0
    state: LeaseState = LeaseState.ACTIVE
    outcome: str = ""
    tenant: str = ""
    """On whose behalf it is read; "": nobody in particular."""
    ends_by_ms: int = NEVER
    """However often it is renewed: a reader that takes a byte now and then must not keep the blocks for ever."""
    granted_ms: int = 0


class LeaseRefusedError(Exception):
    """A read under this lease is not allowed (any more)."""

    def __init__(self, lease_id: LeaseId, reason: RefusalReason) -> None:
        super().__init__(f"lease {lease_id} refused: {reason}")
        self.lease_id = lease_id
        self.reason: RefusalReason = reason


class LeaseTable:
    """The active leases of one holder. Not thread-safe."""

    def __init__(self) -> None:
        self._active: dict[LeaseId, Lease] = {}
        self._last_epoch = 0

    def __len__(self) -> int:
        return len(self._active)

    def __iter__(self) -> Iterator[Lease]:
        """Iterate over a copy of the active leases."""
        return iter(tuple(self._active.values()))

    @property
    def num_leased_blocks(self) -> int:
        """Blocks under at least one active lease, each counted once."""
        leased: set[tuple[int, int]] = set()
        for lease in self._active.values():
            for group, table in enumerate(lease.tables):
                leased.update((group, block) for block in block_ids(table.segments))
        return len(leased)

    def grant(
        self,
        *,
        lease_id: LeaseId,
        holder: WorkerId,
        reader: WorkerId,
        tables: BlockTables,
        num_tokens: int,
        expires_at_ms: int,
        first_token: int = 0,
        tenant: str = "",
        ends_by_ms: int = NEVER,
        granted_ms: int = 0,
    ) -> Lease:
        """Return a new active lease with an epoch of its own. Asserts that no lease of this id is active."""
        assert lease_id not in self._active, f"{lease_id} is already granted"
        self._last_epoch += 1
        lease = Lease(
            lease_id,
            self._last_epoch,
            holder,
            reader,
            tables,
            num_tokens,
            min(expires_at_ms, ends_by_ms),
            first_token,
            tenant=tenant,
            ends_by_ms=ends_by_ms,
            granted_ms=granted_ms,
        )
        self._active[lease_id] = lease
        return lease

    def check(self, lease_id: LeaseId, epoch: int, reader: WorkerId, now_ms: int, tenant: str | None = None) -> Lease:
        """Return the lease if `reader` may read under it now, for `tenant` where it is given. Raises
        LeaseRefusedError."""
        lease = self._active.get(lease_id)
        if lease is None:
            raise LeaseRefusedError(lease_id, "unknown")
        if lease.epoch != epoch:
            raise LeaseRefusedError(lease_id, "epoch")
        if lease.reader != reader:
            raise LeaseRefusedError(lease_id, "reader")
        if tenant is not None and lease.tenant != tenant:
            raise LeaseRefusedError(lease_id, "tenant")
        if lease.expires_at_ms <= now_ms:
            raise LeaseRefusedError(lease_id, "expired")
        return lease

    def is_current(self, lease_id: LeaseId, epoch: int, now_ms: int) -> bool:
        """Say whether this very grant is active and not past its expiry: its blocks are still what they were."""
        lease = self._active.get(lease_id)
        return lease is not None and lease.epoch == epoch and lease.expires_at_ms > now_ms

    def renew(self, lease_id: LeaseId, now_ms: int, lease_ms: int) -> Lease:
        """Let the lease run at least until `now_ms + lease_ms`, within its last end. Raises LeaseRefusedError when it
        is not active."""
        lease = self._active.get(lease_id)
        if lease is None:
            raise LeaseRefusedError(lease_id, "unknown")
        until_ms = min(max(lease.expires_at_ms, now_ms + lease_ms), lease.ends_by_ms)
        renewed = replace(lease, expires_at_ms=until_ms)
        self._active[lease_id] = renewed
        return renewed

    def end(self, lease_id: LeaseId, outcome: str) -> Lease | None:
        """End the lease and return it as it ended, or None when it is not active: only one caller frees its blocks."""
        lease = self._active.pop(lease_id, None)
        return None if lease is None else replace(lease, state=LeaseState.ENDED, outcome=outcome)

    def expire(self, now_ms: int, concerns: Callable[[LeaseId], bool] = lambda _: True) -> list[Lease]:
        """End the leases that it `concerns` whose time is over; return them, the one that expired first in front."""
        over = sorted(
            (lease for lease in self._active.values() if lease.expires_at_ms <= now_ms and concerns(lease.lease_id)),
            key=lambda lease: (lease.expires_at_ms, lease.epoch),
        )
        for lease in over:
            del self._active[lease.lease_id]
        return [replace(lease, state=LeaseState.EXPIRED, outcome="expired") for lease in over]
