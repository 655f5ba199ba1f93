"""Leases: who may read which blocks, until when, and what has come of it. Pure: the time is an argument.

A lease is active from its grant to `end` or `expire`, whichever comes first. Past its expiry it is refused to readers
even while nobody has called `expire` yet. The caller holds the blocks' references.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from dataplane.blocks.layout import BlockTables, block_ids
from dataplane.protocol.gate import LeaseRefusedError
from dataplane.protocol.progress import KVProgress
from schemas.ids import LeaseId, RequestId, WorkerId
from schemas.kv import LeaseEnd
from services.worker.limits import MAX_ENDED_LEASES

NEVER = 2**63 - 1


@dataclass(slots=True, eq=False, kw_only=True)
class Grant:
    """One lease, from its grant until it has ended and its stream as well: the only record of it.

    `reader` may read tokens [first_token, num_tokens) in `tables`, whose blocks `holder` keeps as they are until
    `expires_at_ms`. Of a cache group with a window only what its table covers can be read. `epoch` is unique to this
    grant: a ticket for an earlier grant of the same id reads nothing.

    The event loop changes it, holding the holder's lock; the plane's threads look, holding it as well.
    """

    lease_id: LeaseId
    epoch: int
    holder: WorkerId
    reader: WorkerId
    request_id: RequestId
    attempt: int
    """For which attempt it is read."""
    tenant: str
    """On whose behalf it is read; "": nobody in particular."""
    tables: BlockTables
    first_token: int
    num_tokens: int
    is_lent: bool
    """Its reader has asked for it; else it is the lease of a hand-over."""
    granted_ms: int
    expires_at_ms: int
    ends_by_ms: int
    """However often it is renewed: a reader that takes a byte now and then must not keep the blocks for ever."""

    progress: KVProgress
    """How much of it can be read."""
    readable_ns: int = 0
    """Since when all of it can be read, Unix time; 0: some of it is still being computed."""
    is_offered: bool = False
    """Of a hand-over: its terms have been sent to the reader."""
    is_read: bool = False
    """A stream on it is under way."""
    has_moved: bool = False
    """A stream on it has made progress since `take_moved`."""
    closes_ms: int | None = None
    """Of a hand-over whose stream has ended: until when it waits for the reader to say what came of it."""
    had_stream: bool = False
    """A stream on it has ended, and that is recorded."""
    traceparent: str = ""
    """The trace that it belongs to; "": none."""

    end: LeaseEnd | None = None
    """Why it has ended; None: it is active."""
    detail: str = ""
    """The same for people, where there is more to say."""

    @property
    def num_blocks(self) -> int:
        """How many blocks it names."""
        return sum(segment.num_blocks for table in self.tables for segment in table.segments)

    @property
    def outcome(self) -> str:
        """Why it has ended, for people; "": it is active."""
        return self.detail or (self.end.value if self.end else "")


class LeaseTable:
    """The leases of one holder. Not thread-safe. Iterates over the active ones."""

    def __init__(self) -> None:
        self._active: dict[LeaseId, Grant] = {}
        self._ended: dict[LeaseId, Grant] = {}
        """Those without the end of a stream: one may still be under way, or none was ever opened."""
        self._last_epoch = 0

    def __len__(self) -> int:
        """How many are active."""
        return len(self._active)

    def __iter__(self) -> Iterator[Grant]:
        """Iterate over a copy of the active leases."""
        return iter(tuple(self._active.values()))

    @property
    def num_lent(self) -> int:
        """How many active ones were asked for by their readers."""
        return sum(grant.is_lent for grant in self._active.values())

    @property
    def num_leased_blocks(self) -> int:
        """Blocks under at least one active lease, each counted once."""
        leased: set[tuple[int, int]] = set()
        for grant in self._active.values():
            for group, table in enumerate(grant.tables):
                leased.update((group, block) for block in block_ids(table.segments))
        return len(leased)

    def grant(
        self,
        *,
        lease_id: LeaseId,
        holder: WorkerId,
        reader: WorkerId,
        request_id: RequestId,
        attempt: int,
        tables: BlockTables,
        num_tokens: int,
        progress: KVProgress,
        expires_at_ms: int,
        first_token: int = 0,
        tenant: str = "",
        ends_by_ms: int = NEVER,
        granted_ms: int = 0,
        is_lent: bool = False,
    ) -> Grant:
        """Return a new active lease with an epoch of its own. Asserts that no lease of this id is active."""
        assert lease_id not in self._active, f"{lease_id} is already granted"
        self._last_epoch += 1
        grant = self._active[lease_id] = Grant(
            lease_id=lease_id,
            epoch=self._last_epoch,
            holder=holder,
            reader=reader,
            request_id=request_id,
            attempt=attempt,
            tenant=tenant,
            tables=tables,
            first_token=first_token,
            num_tokens=num_tokens,
            is_lent=is_lent,
            granted_ms=granted_ms,
            expires_at_ms=min(expires_at_ms, ends_by_ms),
            ends_by_ms=ends_by_ms,
            progress=progress,
        )
        return grant

    def find(self, lease_id: LeaseId) -> Grant | None:
        """Return the lease, also one that has ended before any stream on it has."""
        return self._active.get(lease_id) or self._ended.get(lease_id)

    def check(self, lease_id: LeaseId, epoch: int, reader: WorkerId, now_ms: int, tenant: str | None = None) -> Grant:
        """Return the lease if `reader` may read under it now, for `tenant` where it is given. Raises
        LeaseRefusedError."""
        grant = self._active.get(lease_id)
        if grant is None:
            raise LeaseRefusedError(lease_id, "unknown")
        if grant.epoch != epoch:
            raise LeaseRefusedError(lease_id, "epoch")
        if grant.reader != reader:
            raise LeaseRefusedError(lease_id, "reader")
        if tenant is not None and grant.tenant != tenant:
            raise LeaseRefusedError(lease_id, "tenant")
        if grant.expires_at_ms <= now_ms:
            raise LeaseRefusedError(lease_id, "expired")
        return grant

    def current(self, lease_id: LeaseId, epoch: int, now_ms: int) -> Grant | None:
        """Return this very grant if it is active and not past its expiry: its blocks are still what they were."""
        grant = self._active.get(lease_id)
        return grant if grant is not None and grant.epoch == epoch and grant.expires_at_ms > now_ms else None

    def renew(self, grant: Grant, now_ms: int, lease_ms: int) -> None:
        """Let an active lease run at least until `now_ms + lease_ms`, within its last end. One that has ended stays
        so."""
        if grant.end is None:
            grant.expires_at_ms = min(max(grant.expires_at_ms, now_ms + lease_ms), grant.ends_by_ms)

    def take_moved(self) -> list[Grant]:
        """Return the active leases whose streams have got on since the last call."""
        moved = [grant for grant in self._active.values() if grant.has_moved]
        for grant in moved:
            grant.has_moved = False
        return moved

    def end(self, lease_id: LeaseId, end: LeaseEnd, detail: str = "") -> Grant | None:
        """End the lease and return it, or None when it is not active: only one caller frees its blocks."""
        grant = self._active.pop(lease_id, None)
        if grant is None:
            return None
        grant.end, grant.detail = end, detail
        if not grant.had_stream:
            self._ended[lease_id] = grant
            if len(self._ended) > MAX_ENDED_LEASES:
                del self._ended[next(iter(self._ended))]
        return grant

    def expire(self, now_ms: int, concerns: Callable[[Grant], bool] = lambda _: True, detail: str = "") -> list[Grant]:
        """End the leases that it `concerns` whose time is over; return them, the one that expired first in front."""
        over = sorted(
            (grant for grant in self._active.values() if grant.expires_at_ms <= now_ms and concerns(grant)),
            key=lambda grant: (grant.expires_at_ms, grant.epoch),
        )
        for grant in over:
            self.end(grant.lease_id, LeaseEnd.EXPIRED, detail)
        return over

    def stream_started(self, grant: Grant) -> None:
        """A stream on it brings its first bytes: it is remembered until this one has ended, whatever came before."""
        grant.had_stream, grant.is_read = False, True

    def stream_ended(self, grant: Grant) -> None:
        """A stream on it has ended: once the lease has ended too it is forgotten. Until then another may follow, where
        this one broke before it brought anything."""
        grant.had_stream, grant.is_read = True, False
        if grant.end is not None:
            self._ended.pop(grant.lease_id, None)
