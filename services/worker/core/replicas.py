"""Copies that outlive their worker: a replica reads and keeps the blocks that others offer it, while it has room to
spare. Nobody waits for it. What a worker offers itself is in `replica_offer.py`. Pure.

Of layers with windows nothing is copied: such blocks are of no use by themselves.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from dataplane.blocks.cache import BlockCache
from dataplane.blocks.layout import BlockTables
from schemas.block import BLOCK_HASH_BYTES, split_hashes
from schemas.ids import BlockHash, RequestId, WorkerId, is_subject_token
from schemas.kv import ReplicateBlocks
from schemas.observe import HeldRequest
from schemas.worker import WorkerLeft
from services.worker.core.actions import Action, StartRead, StopRead
from services.worker.core.attempts import KVRead, WantedLease
from services.worker.core.checks import WorkerLimits
from services.worker.core.events import CopyOffered, DrainBegun, DrainOver, Fenced, ReadEnded, TimePassed
from services.worker.core.rules import RuleTable
from services.worker.limits import (
    LEAVING_SHARE,
    MAX_COPIES_WAITING,
    MAX_COPY_BLOCKS,
    MAX_COPY_READS,
    MESSAGE_BLOCKS,
    SPARE_SHARE,
)


@dataclass(slots=True)
class BlockCopy:
    """Blocks `first_block`, … of a sequence, that `source` has completed. `tables`: where they are read into."""

    source: WorkerId
    first_block: int
    hashes: tuple[BlockHash, ...]
    tenant: str
    deadline_ms: int
    traceparent: str
    leaving: bool = False
    """Their source leaves: they are worth more than what was not used for longest here."""
    tables: BlockTables = ()


class ReplicaCore:
    """What a worker copies of others' blocks."""

    def __init__(self, limits: WorkerLimits, cache: BlockCache) -> None:
        self.draining = False
        self.num_dropped = 0
        """Offers, in whole or in part, that there was no room for."""
        self.reading: dict[KVRead, BlockCopy] = {}
        self._limits = limits
        self._cache = cache
        self._waiting: deque[BlockCopy] = deque()
        self._num_read = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def held(self, now_ms: int) -> Iterator[HeldRequest]:
        """Yield the copies that are being read, for people; their age counts from their offer."""
        for read, copy in self.reading.items():
            yield HeldRequest(
                request_id=read.key[0],
                attempt=read.key[1],
                part="replica",
                stage="fetching",
                age_ms=max(0, now_ms - copy.deadline_ms + self._limits.times.worker.read_within_ms),
                reading_from=copy.source,
            )

    def rules(self) -> RuleTable:
        """Return what is done with which event."""
        return {
            CopyOffered: self._offered,
            ReadEnded: self._read_ended,
            WorkerLeft: self._worker_left,
            DrainBegun: self._drain_begun,
            DrainOver: self._stopped,
            Fenced: self._stopped,
            TimePassed: self._time_passed,
        }

    def _time_passed(self, _: TimePassed, now_ms: int) -> list[Action]:
        """Forget what has waited for too long, and read what there is room for."""
        self._waiting = deque(copy for copy in self._waiting if copy.deadline_ms > now_ms)
        return self._read(now_ms)

    def _offered(self, event: CopyOffered, now_ms: int) -> list[Action]:
        """Take the offered blocks that are neither here nor on their way, as far as there is room to spare."""
        offer = event.message
        if not self._is_wanted(offer, now_ms):
            self.num_dropped += 1
            return []
        under_way = (copy for copy in (*self._waiting, *self.reading.values()) if copy.tenant == offer.tenant)
        coming = {block_hash for copy in under_way for block_hash in copy.hashes}
        run: list[BlockHash] = []
        first = offer.first_block
        for at, block_hash in enumerate(split_hashes(offer.block_hashes), start=offer.first_block):
            if run and (len(run) == MAX_COPY_BLOCKS or at != first + len(run)):
                self._wait(event, first, run)
                run = []
            if block_hash in coming or self._cache.holds(block_hash, offer.tenant):
                continue
            first = first if run else at
            run.append(block_hash)
        self._wait(event, first, run)
        return self._read(now_ms)

    def _read_ended(self, event: ReadEnded, now_ms: int) -> list[Action]:
        """A read writes no more: keep what landed of it."""
        copy = self.reading.pop(event.read, None)
        if copy is None:
            return []
        num_landed = event.outcome.num_landed_tokens // self._limits.block_size - copy.first_block
        self._cache.keep(copy.tables, copy.hashes[: max(0, num_landed)])
        self._cache.free(copy.tables)
        return self._read(now_ms)

    def _worker_left(self, event: WorkerLeft, _: int) -> list[Action]:
        """A source is gone."""
        self._waiting = deque(copy for copy in self._waiting if copy.source != event.worker_id)
        return [StopRead(read) for read in self.reading if read.holder == event.worker_id]

    def _num_spare(self, *, leaving: bool) -> int:
        """Return how many blocks may be taken for copies now."""
        if leaving:
            return (self._cache.num_free + self._cache.num_cached) // LEAVING_SHARE
        return max(0, self._cache.num_free - self._cache.num_blocks // SPARE_SHARE)

    def _is_wanted(self, offer: ReplicateBlocks, now_ms: int) -> bool:
        joined = offer.block_hashes
        return (
            not self.draining
            and not self._cache.layout.is_windowed
            and offer.fingerprint == self._limits.fingerprint
            and offer.source != self._limits.worker_id
            and is_subject_token(offer.source)
            and offer.first_block >= 0
            and not len(joined) % BLOCK_HASH_BYTES
            and len(joined) <= MESSAGE_BLOCKS * BLOCK_HASH_BYTES
            and len(set(split_hashes(joined))) * BLOCK_HASH_BYTES == len(joined)
            and offer.deadline_ms > now_ms
            and self._num_spare(leaving=offer.leaving) > 0
        )

    def _wait(self, event: CopyOffered, first_block: int, run: list[BlockHash]) -> None:
        """Put blocks in line to be read."""
        if not run:
            return
        if len(self._waiting) >= MAX_COPIES_WAITING:
            self.num_dropped += 1
            return
        offer = event.message
        copy = BlockCopy(
            offer.source, first_block, tuple(run), offer.tenant, offer.deadline_ms, event.traceparent, offer.leaving
        )
        self._waiting.append(copy)

    def _read(self, now_ms: int) -> list[Action]:
        """Begin to read what waits; what there is no room for is dropped."""
        actions: list[Action] = []
        while self._waiting and len(self.reading) < MAX_COPY_READS:
            copy = self._waiting.popleft()
            hashes = tuple(islice(copy.hashes, self._num_spare(leaving=copy.leaving)))
            self.num_dropped += len(hashes) < len(copy.hashes)
            tables = self._cache.admit_spare(copy.first_block, len(hashes), tenant=copy.tenant, evicts=copy.leaving)
            if tables is None:
                continue
            self._num_read += 1
            key = (RequestId(f"replica-{self._limits.worker_id}-{self._num_read}"), 1)
            deadline_ms = min(copy.deadline_ms, now_ms + self._limits.times.worker.read_within_ms)
            lease = WantedLease(copy.first_block, hashes, deadline_ms, copy.tenant, is_copy=True)
            first_token = copy.first_block * self._limits.block_size
            copy.hashes, copy.tables = hashes, tables
            read = KVRead(key, copy.source, lease, tables, first_token, copy.traceparent)
            self.reading[read] = copy
            actions.append(StartRead(read))
        return actions

    def _drain_begun(self, event: DrainBegun, now_ms: int) -> list[Action]:
        """Take no more."""
        self.draining = True
        return self._stopped(event, now_ms)

    def _stopped(self, _: DrainBegun | DrainOver | Fenced, now_ms: int) -> list[Action]:
        """End what is being read; what has landed is kept."""
        self._waiting.clear()
        return [StopRead(read) for read in self.reading]
