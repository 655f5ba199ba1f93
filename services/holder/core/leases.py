"""Leases: who may read which blocks, until when, and how each has ended. Pure: the time is an argument.

A lease is active from its grant to `end` or `expire`, whichever comes first. Past its expiry it is refused to readers
even while nobody has called `expire` yet. The caller holds the blocks' references.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from dataplane.blocks.kept import Content
from dataplane.blocks.layout import BlockTables, num_distinct_blocks
from dataplane.blocks.ticket import Ticket
from dataplane.protocol.gate import LeaseRefusalReason, LeaseRefusedError
from dataplane.protocol.progress import KVProgress
from schemas.ids import LeaseId, RequestId, WorkerId, new_nonce
from schemas.kv import LeaseEnd

NEVER = 2**63 - 1

_COMPARED: tuple[LeaseRefusalReason, ...] = (
    "holder", "incarnation", "epoch", "nonce", "reader", "tenant", "expires_at_ms"
)  # fmt: skip
"""What a ticket says beside its lease's id."""


@dataclass(slots=True, eq=False, kw_only=True)
class Grant:
    """One lease: the only record of it. Whoever serves a stream under it keeps it until that has ended.

    `reader` may read tokens [first_token, num_tokens) in `tables`, whose blocks `holder` keeps as they are until
    `expires_at_ms`. Of a cache group with a window only what its table covers can be read. Where blocks are only whole
    of use, a hand-over's lease ends at the border of the prompt's last block (`KVLayout.padded`). `epoch` is unique to
    this grant: a ticket for an earlier grant of the same id reads nothing.

    The event loop changes it, holding the holder's lock; the plane's threads look, holding it as well.
    """

    lease_id: LeaseId
    epoch: int
    nonce: str
    """Random, of this grant alone: where ids and epochs come again in a next life, it does not."""
    holder: WorkerId
    reader: WorkerId
    request_id: RequestId
    attempt: int
    """It is read for this attempt of the request."""
    tenant: str
    """It is read on behalf of this tenant; "": of nobody in particular."""
    tables: BlockTables
    first_token: int
    num_tokens: int
    is_lent: bool
    """Its reader has asked for it; else it is the lease of a hand-over."""
    content: tuple[Content, ...] = ()
    """Of what is lent: what each block is known by."""
    tags: tuple[bytes | None, ...] = ()
    """By which each of these proves it; None: its tag is yet to be made."""
    granted_ms: int
    expires_at_ms: int
    ends_by_ms: int
    """However often it is renewed: a reader that takes a byte now and then must not keep the blocks for ever."""

    progress: KVProgress
    """How much of it can be read."""
    readable_ns: int = 0
    """When the last of it could be read; 0: some of it is still being computed."""
    is_offered: bool = False
    """It is a hand-over's, and its terms have been sent to the reader."""
    is_opened: bool = False
    """Its ticket has opened a stream: it opens no other."""
    is_read: bool = False
    """A stream on it is under way."""
    has_moved: bool = False
    """A stream on it has made progress since `take_moved`."""
    closes_ms: int | None = None
    """When a hand-over's lease ends whose stream is over, unless the reader reports before how its read ended; None:
    its stream is not over."""
    traceparent: str = ""
    """The trace that it belongs to; "": none."""

    end: LeaseEnd | None = None
    """Why it has ended; None: it is active."""
    detail: str = ""
    """The same for people, where there is more to say."""

    def is_valid(self, now_ms: int) -> bool:
        """Return whether it is active and not past its expiry: its blocks are still what they were."""
        return self.end is None and self.expires_at_ms > now_ms

    def ticket(self, incarnation: str) -> Ticket:
        """Return what its reader has to show, where this incarnation of its holder has granted it."""
        return Ticket(
            lease_id=self.lease_id,
            epoch=self.epoch,
            nonce=self.nonce,
            holder=self.holder,
            incarnation=incarnation,
            reader=self.reader,
            tenant=self.tenant,
            expires_at_ms=self.ends_by_ms,
        )

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
        self._expected: dict[RequestId, int] = {}
        """Requests that go on elsewhere and are to be read here, and until when they are waited for."""
        self._last_epoch = 0

    def __len__(self) -> int:
        """How many are active."""
        return len(self._active)

    def __iter__(self) -> Iterator[Grant]:
        """Iterate over a copy of the active leases."""
        return iter(tuple(self._active.values()))

    @property
    def num_granted(self) -> int:
        """How many were ever granted."""
        return self._last_epoch

    @property
    def num_expected(self) -> int:
        """How many requests have yet to be asked for that go on elsewhere."""
        return len(self._expected)

    def expect(self, request_id: RequestId, until_ms: int) -> None:
        """Somebody is to ask for what is here of a request, by then."""
        self._expected[request_id] = until_ms

    def is_expected(self, request_id: RequestId) -> bool:
        """Return whether somebody has yet to ask for what is here of a request."""
        return request_id in self._expected

    def expect_no_more(self, now_ms: int) -> None:
        """Wait no longer for those who have not come by now."""
        self._expected = {request_id: until for request_id, until in self._expected.items() if until > now_ms}

    @property
    def num_lent(self) -> int:
        """How many active ones were asked for by their readers."""
        return sum(grant.is_lent for grant in self._active.values())

    @property
    def num_leased_blocks(self) -> int:
        """Blocks under at least one active lease, each counted once."""
        return num_distinct_blocks(grant.tables for grant in self._active.values())

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
        content: tuple[Content, ...] = (),
        tags: tuple[bytes | None, ...] = (),
    ) -> Grant:
        """Return a new active lease with an epoch of its own. Asserts that no lease of this id is active."""
        assert lease_id not in self._active, f"{lease_id} is already granted"
        # A reader has come for what is here of this request: nobody waits for one any more.
        if is_lent:
            self._expected.pop(request_id, None)
        # Epochs begin anew when a holder restarts, nonces do not repeat: so a ticket fits one grant only.
        self._last_epoch += 1
        grant = self._active[lease_id] = Grant(
            lease_id=lease_id,
            epoch=self._last_epoch,
            nonce=new_nonce(),
            holder=holder,
            reader=reader,
            request_id=request_id,
            attempt=attempt,
            tenant=tenant,
            tables=tables,
            first_token=first_token,
            num_tokens=num_tokens,
            is_lent=is_lent,
            content=content,
            tags=tags,
            granted_ms=granted_ms,
            expires_at_ms=min(expires_at_ms, ends_by_ms),
            ends_by_ms=ends_by_ms,
            progress=progress,
        )
        return grant

    def lease_of(self, ticket: Ticket, incarnation: str, now_ms: int) -> Grant:
        """Return the lease that a ticket is for, if it may be read under now from this incarnation of its holder: for
        one stream, as no ticket opens a second one. Raises LeaseRefusedError."""
        grant = self._active.get(ticket.lease_id)
        if grant is None:
            raise LeaseRefusedError(ticket.lease_id, "unknown")
        granted = grant.ticket(incarnation)
        for name in _COMPARED:
            if getattr(ticket, name) != getattr(granted, name):
                raise LeaseRefusedError(ticket.lease_id, name)
        assert ticket == granted, "every field is compared"
        if not grant.is_valid(now_ms):
            raise LeaseRefusedError(ticket.lease_id, "expired")
        if grant.is_opened:
            raise LeaseRefusedError(ticket.lease_id, "opened")
        grant.is_opened = True
        return grant

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
        if grant is not None:
            grant.end, grant.detail = end, detail
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
