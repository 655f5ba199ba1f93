"""Copies that outlive their holder: a worker, as somebody's replica or as one of those who stay, and a store read and
keep the blocks that others offer, while they have room to spare. Nobody waits for it. What a worker offers itself is in
`replica_offer.py` and `leaving.py`. Pure.

An offer stands for a while: its source gives the blocks up when it needs the room. Each source is read from by one read
at a time. A block that several offer is asked of one of them; of the next where that one does not give it.

Of layers with windows nothing is copied: such blocks are of no use by themselves.
"""

import enum
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from dataplane.blocks.cache import BlockCache
from dataplane.blocks.kept import Content
from dataplane.blocks.layout import BlockTables
from schemas.block import BLOCK_HASH_BYTES, join_hashes, split_hashes
from schemas.ids import BlockHash, RequestId, WorkerId, is_subject_token
from schemas.kv import EvictionCandidates, ReadEnd, ReplicateBlocks, RequestLease
from schemas.observe import HeldRequest, Part, RunStage
from schemas.request import RefusalReason
from schemas.worker import WorkerLeft
from services.holder.core.actions import Action, NotTaken, StartRead, StopRead
from services.holder.core.attempt import KVRead
from services.holder.core.checks import HolderLimits
from services.holder.core.events import (
    CopyOffered,
    CopyWanted,
    DrainBegun,
    DrainOver,
    Fenced,
    ReadEnded,
    TimePassed,
)
from services.holder.core.lending import HolderMemory
from services.holder.core.rules import RuleTable
from services.holder.limits import (
    LEAVING_SHARE,
    MAX_COPY_BLOCKS,
    MAX_COPY_REFUSALS,
    MAX_COPY_SOURCES,
    MAX_OFFERED_BLOCKS,
    MESSAGE_BLOCKS,
    SPARE_SHARE,
)

COPY_REQUEST = "copy-"
"""So the id of a copy's read begins; the reader's name follows, and a number."""


class Why(enum.Enum):
    """Why a block is offered."""

    COMPLETED = enum.auto()
    """It was just computed, and is wanted elsewhere as well."""
    CANDIDATE = enum.auto()
    """Its source will soon give it up. The coldest come first."""
    WANTED = enum.auto()
    """Somebody here waits for it. The first of a sequence come first."""
    LEFT_BEHIND = enum.auto()
    """Its source leaves: it is worth more than what was not used for longest here."""


class Claim(NamedTuple):
    """What is given with a block that is offered: until when, and in which trace."""

    why: Why
    deadline_ms: int
    traceparent: str = ""


@dataclass(slots=True)
class Source:
    """What one holder offers, the block to be read first in front. `num_refused`: how often in a row it did not have
    what it was asked for."""

    claims: dict[Content, Claim] = field(default_factory=dict[Content, Claim])
    num_refused: int = 0


@dataclass(slots=True, frozen=True)
class BlockCopy:
    """Blocks of one tenant that are being read. `tables`: where to."""

    hashes: tuple[BlockHash, ...]
    tenant: str
    tables: BlockTables
    why: Why
    began_ms: int

    @property
    def contents(self) -> list[Content]:
        return [Content(self.tenant, block_hash) for block_hash in self.hashes]


class CopyCore:
    """What one holder copies of others' blocks. `num_spare`: how many blocks may be taken for such copies now."""

    def __init__(
        self, limits: HolderLimits, memory: HolderMemory, num_spare: Callable[[Why], int], *, max_reads: int
    ) -> None:
        self.draining = False
        self.reading: dict[KVRead, BlockCopy] = {}
        self._limits = limits
        self._memory = memory
        self._num_spare = num_spare
        self._max_reads = max_reads
        self._sources: dict[WorkerId, Source] = {}
        """The one that was read from last is at the end."""
        self._num_read = 0

    @property
    def num_waiting(self) -> int:
        """Blocks that are offered and not being read."""
        coming = self._in_flight()
        return sum(content not in coming for source in self._sources.values() for content in source.claims)

    def held(self, now_ms: int) -> Iterator[HeldRequest]:
        """Yield the copies that are being read, for people."""
        for read, copy in self.reading.items():
            yield HeldRequest(
                request_id=read.key[0],
                attempt=read.key[1],
                part=Part.REPLICA,
                stage=RunStage.FETCHING,
                age_ms=max(0, now_ms - copy.began_ms),
                reading_from=read.holder,
            )

    def rules(self) -> RuleTable:
        """Return what is done with which event."""
        return {
            CopyOffered: self._offered,
            CopyWanted: self._wanted,
            EvictionCandidates: self._candidates,
            ReadEnded: self._read_ended,
            WorkerLeft: self._worker_left,
            DrainBegun: self._drain_begun,
            DrainOver: self._stopped,
            Fenced: self._stopped,
            TimePassed: self._time_passed,
        }

    def _offered(self, event: CopyOffered, now_ms: int) -> list[Action]:
        """Somebody wants these blocks kept elsewhere as well."""
        offer = event.message
        why = Why.LEFT_BEHIND if offer.leaving else Why.COMPLETED
        claim = Claim(why, offer.deadline_ms, event.traceparent)
        if not self._is_of_use(offer, now_ms):
            return []
        return self._take(offer.source, offer.tenant, offer.block_hashes, claim, now_ms)

    def _wanted(self, event: CopyWanted, now_ms: int) -> list[Action]:
        """They are asked for here, and somebody waits for them."""
        claim = Claim(Why.WANTED, event.deadline_ms, event.traceparent)
        return self._take(event.source, event.tenant, event.block_hashes, claim, now_ms)

    def is_copying(self, contents: Iterable[Content]) -> bool:
        """Return whether any of these is still to be read, or being read."""
        left, coming = set(contents), self._in_flight()
        return not left.isdisjoint(coming) or any(not left.isdisjoint(each.claims) for each in self._sources.values())

    def _candidates(self, event: EvictionCandidates, now_ms: int) -> list[Action]:
        """Somebody will soon give these blocks up, the first of them first."""
        claim = Claim(Why.CANDIDATE, now_ms + self._limits.times.worker.read_within_ms)
        return self._take(event.worker_id, event.tenant, event.block_hashes, claim, now_ms)

    def _read_ended(self, event: ReadEnded, now_ms: int) -> list[Action]:
        """A read writes no more: keep what landed of it, and see what is still to be had of its source."""
        copy = self.reading.pop(event.read, None)
        if copy is None:
            return []
        num_landed = max(0, event.outcome.num_landed_tokens) // self._limits.block_size
        self._memory.keep(copy.tables, copy.hashes[:num_landed])
        worker_id, dropped = event.read.holder, list[Action]()
        source = self._sources[worker_id] = self._sources.pop(worker_id, Source())
        is_passed_over = event.refusal is RefusalReason.GONE or event.end is ReadEnd.CONTENT
        source.num_refused = source.num_refused + 1 if is_passed_over else 0
        if is_passed_over and source.num_refused <= MAX_COPY_REFUSALS:
            self._drop(worker_id, copy.contents[num_landed : num_landed + 1], "")
        elif event.end is not ReadEnd.LANDED:
            dropped = self._drop(worker_id, list(source.claims), event.reason)
        return dropped + self.start_reads(now_ms)

    def _worker_left(self, event: WorkerLeft, _: int) -> list[Action]:
        """A source is gone."""
        source = self._sources.get(event.worker_id, Source())
        dropped = self._drop(event.worker_id, list(source.claims), "it left")
        return [StopRead(read) for read in self.reading if read.holder == event.worker_id] + dropped

    def _drain_begun(self, event: DrainBegun, now_ms: int) -> list[Action]:
        """Take no more."""
        self.draining = True
        return self._stopped(event, now_ms)

    def _stopped(self, _: DrainBegun | DrainOver | Fenced, __: int) -> list[Action]:
        """End what is being read; what has landed is kept."""
        self._sources.clear()
        return [StopRead(read) for read in self.reading]

    def _time_passed(self, _: TimePassed, now_ms: int) -> list[Action]:
        """Forget what has waited for too long, and read what there is room for."""
        coming, actions = self._in_flight(), list[Action]()
        for worker_id, source in list(self._sources.items()):
            late = [each for each, claim in source.claims.items() if claim.deadline_ms <= now_ms and each not in coming]
            actions += self._drop(worker_id, late, "there was no room for them in time")
        return actions + self.start_reads(now_ms)

    def _is_of_use(self, offer: ReplicateBlocks, now_ms: int) -> bool:
        return offer.fingerprint == self._limits.fingerprint and offer.first_block >= 0 and offer.deadline_ms > now_ms

    def _take(self, worker_id: WorkerId, tenant: str, joined: bytes, claim: Claim, now_ms: int) -> list[Action]:
        """Note what is not here yet of what a holder offers, as far as the bounds allow."""
        source = self._sources.get(worker_id) or Source()
        is_offer = (
            not self.draining
            and not self._memory.layout.is_windowed
            and worker_id != self._limits.worker_id
            and is_subject_token(worker_id)
            and not len(joined) % BLOCK_HASH_BYTES
            and len(joined) <= MESSAGE_BLOCKS * BLOCK_HASH_BYTES
            and (source.claims or len(self._sources) < MAX_COPY_SOURCES)
        )
        if not is_offer:
            return []
        wanted = [Content(tenant, each) for each in split_hashes(joined) if not self._memory.holds(each, tenant)]
        for content in wanted:
            if content in source.claims or len(source.claims) < MAX_OFFERED_BLOCKS:
                source.claims[content] = claim
        if source.claims:
            self._sources[worker_id] = source
        return self.start_reads(now_ms)

    def _in_flight(self) -> set[Content]:
        return {content for copy in self.reading.values() for content in copy.contents}

    def start_reads(self, now_ms: int) -> list[Action]:
        """Begin to read what waits, as far as there is room: of each source in its turn."""
        actions: list[Action] = []
        for worker_id in list(self._sources):
            if len(self.reading) >= self._max_reads:
                break
            if not any(read.holder == worker_id for read in self.reading):
                actions += self._read_from(worker_id, now_ms)
        return actions

    def _read_from(self, worker_id: WorkerId, now_ms: int) -> list[Action]:
        """Begin to read some of one source's blocks: of one tenant, and offered for one reason."""
        claims, coming = self._sources[worker_id].claims, self._in_flight()
        # What has come meanwhile, from others, is wanted no more; what is coming is waited for.
        for content in [content for content in claims if self._is_here(content)]:
            del claims[content]
        if not claims:
            del self._sources[worker_id]
        # Keep the blocks whose reason leaves room now; the first of them decides the batch's tenant and reason.
        spare = {why: self._num_spare(why) for why in Why}
        waiting = [content for content, claim in claims.items() if content not in coming and spare[claim.why]]
        if not waiting:
            return []
        first, tenant = claims[waiting[0]], waiting[0].tenant
        alike = [each for each in waiting if each.tenant == tenant and claims[each].why is first.why]
        batch = alike[: min(MAX_COPY_BLOCKS, spare[first.why])]
        tables = self._memory.admit_spare(len(batch), tenant, evicts=first.why is Why.LEFT_BEHIND)
        if tables is None:
            return []
        # A worker gives up as much as it may for one that leaves, and then no more.
        dropped = self._drop(worker_id, alike[spare[first.why] :], "no room") if first.why is Why.LEFT_BEHIND else []
        # In the order of a sequence: so the holder lends all before the first that it has given up, and the last is
        # given up first here.
        if first.why is Why.CANDIDATE:
            batch.reverse()
        # No client's request stands behind a copy: its id is made of the reader's name and a number.
        self._num_read += 1
        hashes = tuple(content.block_hash for content in batch)
        key = (RequestId(f"{COPY_REQUEST}{self._limits.worker_id}-{self._num_read}"), 1)
        lease = RequestLease(
            request_id=key[0],
            attempt=key[1],
            deadline_ms=now_ms + self._limits.times.worker.read_within_ms,
            reader=self._limits.worker_id,
            fingerprint=self._limits.fingerprint,
            first_block=0,
            block_hashes=join_hashes(hashes),
            tenant=tenant,
            is_copy=True,
        )
        read = KVRead(key, worker_id, lease, tables, traceparent=first.traceparent)
        self.reading[read] = BlockCopy(hashes, tenant, tables, first.why, now_ms)
        return [StartRead(read), *dropped]

    def _is_here(self, content: Content) -> bool:
        return self._memory.holds(content.block_hash, content.tenant)

    def _drop(self, worker_id: WorkerId, contents: Iterable[Content], reason: str) -> list[Action]:
        """Ask this source for these blocks no more. Report how many there is nobody else for."""
        source, num_left = self._sources.get(worker_id, Source()), 0
        for content in contents:
            if source.claims.pop(content, None) is not None and not self._is_here(content):
                num_left += not any(content in other.claims for other in self._sources.values())
        if not source.claims:
            self._sources.pop(worker_id, None)
        return [NotTaken(worker_id, num_left, reason)] if num_left else []


def num_spare(cache: BlockCache, why: Why) -> int:
    """Return how many blocks a worker may take for copies now."""
    if why is Why.LEFT_BEHIND:
        return (cache.num_free + cache.num_cached) // LEAVING_SHARE
    return max(0, cache.num_free - cache.num_blocks // SPARE_SHARE)
