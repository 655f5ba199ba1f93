"""Which blocks a holder lends to readers that ask for a lease, and until when. Pure.

A lease is for one read. It ends when that has ended, when its reader has left, or by its time: a short one until the
read begins, then the holder's own. A worker that drains goes on lending until it stops; a store that is stopped lends
nothing more at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from dataplane.blocks.cache import Allocation
from dataplane.blocks.kept import Content, ContentChanges, KeptBlocks
from dataplane.blocks.layout import BlockTables, KVLayout, block_ids, num_distinct_blocks
from dataplane.protocol.progress import KVProgress
from schemas.block import split_hashes
from schemas.directory import Tier
from schemas.ids import BlockHash, LeaseId, new_id
from schemas.kv import LeaseEnd, PurgeBlocks, RequestLease, ReturnLease, refuse_lease
from schemas.request import RefusalReason, Refused, refuse
from schemas.worker import WorkerLeft
from services.holder.core.actions import Action, CloseLease, Lend, SendReply
from services.holder.core.checks import HolderLimits
from services.holder.core.events import Fenced, LeaseAsked, Stopping, StreamEnded, StreamStarted, TimePassed
from services.holder.core.leases import Grant, LeaseTable
from services.holder.core.rules import RuleTable
from services.holder.limits import (
    MAX_LENT_LEASES,
    MAX_READER_LEASES,
    MAX_REQUEST_LEASES,
    READ_BYTES_PER_S_MIN,
    READER_SHARE,
    RETRY_AFTER_MS,
)


class HolderMemory(Protocol):
    """Where the blocks lie that are lent and copied: a worker's block cache, or the store's memory."""

    @property
    def layout(self) -> KVLayout: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def kept(self) -> KeptBlocks:
        """What is known of the blocks' content."""
        ...

    @property
    def num_free(self) -> int:
        """Blocks that hold nothing."""
        ...

    @property
    def num_cached(self) -> int:
        """Blocks that nobody uses and that are kept for their content."""
        ...

    def lend(self, hashes: Sequence[BlockHash], first_block: int, tenant: str) -> Allocation | None:
        """Return what is here of this tenant's blocks `first_block`, `first_block` + 1, … with these hashes, a
        reference to each; None: not even the first."""
        ...

    def free(self, tables: BlockTables) -> None:
        """Drop a reference to each block."""
        ...

    def holds(self, block_hash: BlockHash, tenant: str) -> bool:
        """Return whether a tenant's block is here."""
        ...

    def admit_spare(self, num_blocks: int, tenant: str, *, evicts: bool) -> BlockTables | None:
        """Return so many empty blocks, a reference to each; None where there is no room. `evicts`: what is worth less
        may be given up for them."""
        ...

    def keep(self, tables: BlockTables, hashes: Sequence[BlockHash]) -> None:
        """Note that the first `len(hashes)` of these blocks are filled, and drop the reference to each."""
        ...

    def forget(self, tenant: str | None = None) -> None:
        """Give up the content of this tenant's blocks, of all for None (`KeptBlocks.forget`)."""
        ...

    def take_changes(self) -> list[tuple[Tier, ContentChanges]]:
        """Return what came to each tier and what went since the last call."""
        ...

    def contents(self) -> list[tuple[Tier, list[BlockHash]]]:
        """Return what each tier has now."""
        ...


@dataclass
class LendCore:
    """The leases that readers have asked for; those of hand-overs are the prefill core's. What the streams report of a
    lease is noted here for both."""

    limits: HolderLimits
    memory: HolderMemory
    leases: LeaseTable
    is_stopping: bool = False

    def rules(self) -> RuleTable:
        """Return what is done with which event."""
        return {
            LeaseAsked: self._asked,
            StreamStarted: self._stream_started,
            StreamEnded: self._stream_ended,
            ReturnLease: self._returned,
            PurgeBlocks: self._purged,
            WorkerLeft: self._reader_left,
            Fenced: self._fenced,
            Stopping: self._stopping,
            TimePassed: self._time_passed,
        }

    def _asked(self, event: LeaseAsked, now_ms: int) -> list[Action]:
        """Lend what is here of the asked blocks, or answer why not."""
        answer = self.answer(event.request, now_ms)
        if isinstance(answer, Refused):
            return [SendReply(answer)]
        return [Lend(answer, event.request, event.traceparent)]

    def _stream_started(self, event: StreamStarted, now_ms: int) -> list[Action]:
        """The first frame is on its way: the read may take the holder's full time."""
        lease = event.lease
        lease.is_read = True
        if lease.is_lent:
            self.leases.renew(lease, now_ms, self.limits.lease_ms)
            self._keep_tags(lease)
        return []

    def _stream_ended(self, event: StreamEnded, _: int) -> list[Action]:
        """The read is over, and with it a lease that was lent for it."""
        event.lease.is_read = False
        return self._end([event.lease], LeaseEnd.CANCELLED if event.error else LeaseEnd.LANDED, event.error)

    def _returned(self, event: ReturnLease, _: int) -> list[Action]:
        """The reader does without."""
        meant = (event.lease_id, event.reader)
        return self._end([grant for grant in self.leases if (grant.lease_id, grant.reader) == meant], LeaseEnd.RETURNED)

    def _purged(self, event: PurgeBlocks, _: int) -> list[Action]:
        """Forget what the blocks hold, and lend none of it any more."""
        self.memory.forget(event.tenant)
        meant = [grant for grant in self.leases if event.tenant is None or grant.tenant == event.tenant]
        return self._end(meant, LeaseEnd.CANCELLED, "its blocks were purged")

    def _reader_left(self, event: WorkerLeft, _: int) -> list[Action]:
        """A reader is gone."""
        lost = [grant for grant in self.leases if grant.reader == event.worker_id]
        return self._end(lost, LeaseEnd.READER_LEFT, "the reader left")

    def _fenced(self, event: Fenced, _: int) -> list[Action]:
        """All that is lent ends."""
        return self._end(list(self.leases), LeaseEnd.CANCELLED, event.reason)

    def _stopping(self, _: Stopping, __: int) -> list[Action]:
        """Lend nothing more."""
        self.is_stopping = True
        return []

    def _time_passed(self, _: TimePassed, now_ms: int) -> list[Action]:
        """Renew every lease whose stream makes progress, whoever granted it; end the lent ones whose time is over."""
        self.leases.expect_no_more(now_ms)
        for grant in self.leases.take_moved():
            self.leases.renew(grant, now_ms, self.limits.lease_ms)
        return [self._closed(grant) for grant in self.leases.expire(now_ms, lambda grant: grant.is_lent)]

    def refusal(self, request: RequestLease, now_ms: int) -> Refused | None:
        """Return why this request cannot be granted, whatever is here; None: that depends on what is here."""
        holder = self.limits.worker_id
        if (refused := refuse_lease(request, holder, self.limits.fingerprint, now_ms)) is not None:
            return refused
        if self.is_stopping:
            return refuse(request, RefusalReason.DRAINING, f"{holder} is about to stop", RETRY_AFTER_MS)
        lent = [grant for grant in self.leases if grant.is_lent]
        of_reader = sum(grant.reader == request.reader for grant in lent)
        of_request = sum(grant.request_id == request.request_id for grant in lent)
        for what, count, limit in (
            ("leases", len(lent), MAX_LENT_LEASES),
            (f"leases of {request.reader}", of_reader, MAX_READER_LEASES),
            ("leases of this request", of_request, MAX_REQUEST_LEASES),
        ):
            if count >= limit:
                return refuse(request, RefusalReason.OVERLOADED, f"{count} {what} are open", RETRY_AFTER_MS)
        return None

    def answer(self, request: RequestLease, now_ms: int) -> Grant | Refused:
        """Grant a lease on the leading run of the asked blocks that is here, or return why not."""
        # Check what does not depend on the blocks, then take a reference to each block of the leading run that is here.
        limits = self.limits
        if (refused := self.refusal(request, now_ms)) is not None:
            return refused
        found = self.memory.lend(split_hashes(request.block_hashes), request.first_block, request.tenant)
        if found is None:
            return refuse(request, RefusalReason.GONE, f"{limits.worker_id} does not hold these blocks (any more)")
        # Blocks on loan already count once, so the reader's share is checked only now: too many are given back.
        if self._would_hoard(request, found.tables):
            self.memory.free(found.tables)
            detail = f"{request.reader} has half of {limits.worker_id}'s blocks on loan"
            return refuse(request, RefusalReason.OVERLOADED, detail, RETRY_AFTER_MS)
        # Name the content that each block's tag proves to the reader. Blocks of windowed layers have no tags.
        num_tokens = found.num_cached_tokens - request.first_block * limits.block_size
        content: tuple[Content, ...] = ()
        if not self.memory.layout.is_windowed:
            hashes = split_hashes(request.block_hashes)[: num_tokens // limits.block_size]
            content = tuple(Content(request.tenant, block_hash) for block_hash in hashes)
        blocks = block_ids(found.tables[0].segments)
        # The lease expires soon unless a stream starts; renewals go to the deadline or the longest read at most.
        return self.leases.grant(
            lease_id=LeaseId(new_id("read")),
            holder=limits.worker_id,
            reader=request.reader,
            request_id=request.request_id,
            attempt=request.attempt,
            tenant=request.tenant,
            tables=found.tables,
            first_token=request.first_block * limits.block_size,
            num_tokens=found.num_cached_tokens,
            progress=KVProgress.completed(self.memory.layout.num_layers, found.num_cached_tokens),
            expires_at_ms=now_ms + min(limits.times.worker.open_lease_within_ms, limits.lease_ms),
            granted_ms=now_ms,
            ends_by_ms=min(request.deadline_ms, now_ms + self._longest_read_ms(num_tokens)),
            is_lent=True,
            content=content,
            tags=tuple(self.memory.kept.tags.get(block) for _, block in zip(content, blocks, strict=False)),
        )

    def _would_hoard(self, request: RequestLease, tables: BlockTables) -> bool:
        """Return whether a reader that has leases already would have more than its share with these blocks. One lease
        be on any number: a long prompt is no hoard."""
        lent = [grant.tables for grant in self.leases if grant.is_lent and grant.reader == request.reader]
        most = self.memory.num_blocks // READER_SHARE
        return bool(lent) and num_distinct_blocks([*lent, tables]) > most

    def _longest_read_ms(self, num_tokens: int) -> int:
        """Return when a reader has given up its read of so many tokens by itself."""
        num_bytes = self.memory.layout.block_bytes * num_tokens / self.limits.block_size
        times = self.limits.times.worker
        read_s = times.lent_read_base_s + num_bytes / READ_BYTES_PER_S_MIN
        return times.open_lease_within_ms + round(1e3 * read_s)

    def _end(self, grants: Sequence[Grant], end: LeaseEnd, detail: str = "") -> list[Action]:
        """End those of these leases that are lent and active, and give their blocks back."""
        lent = [grant for grant in grants if grant.is_lent]
        ended = [self.leases.end(grant.lease_id, end, detail) for grant in lent if grant.end is None]
        return [self._closed(grant) for grant in ended if grant is not None]

    def _keep_tags(self, lease: Grant) -> None:
        """Keep the tags that were made for a stream, where its blocks are still what they were."""
        if lease.end is None:
            blocks = block_ids(lease.tables[0].segments)
            self.memory.kept.tags |= {b: tag for b, tag in zip(blocks, lease.tags, strict=False) if tag is not None}

    def _closed(self, grant: Grant) -> CloseLease:
        self.memory.free(grant.tables)
        return CloseLease(grant)
