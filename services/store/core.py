"""What the store holds, takes, lends and gives up. Pure: the time is an argument.

A block of memory is referred to by the leases on it, the read that fills it, the write that has not ended; what none of
them needs goes when room is needed, the least recently used first. What lies behind memory is bounded by its bytes.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from dataplane.blocks.layout import BlockTable, KVLayout, block_ids, segments_of
from dataplane.blocks.lease import Lease, LeaseRefusedError, LeaseTable
from schemas.block import BLOCK_HASH_BYTES, join_hashes, split_hashes
from schemas.directory import BlocksEvicted, BlocksStored, Inventory, Tier
from schemas.ids import BlockHash, LeaseId, WorkerId, is_subject_token
from schemas.kv import ReplicateBlocks, RequestLease, ReturnLease, refuse_lease
from schemas.request import Refused, refuse
from schemas.worker import BlockCounts, WorkerLeft
from services.store.index import BackIndex, MemoryIndex

OPEN_WITHIN_MS = 5_000
MAX_LEASES = 256
MAX_OFFERED = 1_024
"""Blocks that may wait to be read from one worker; what it offers beyond is not taken."""
INVENTORY_PAGE_BLOCKS = 100_000
RETRY_AFTER_MS = 500


@dataclass(slots=True, frozen=True)
class StoreLimits:
    """`lease_ms`: how long one read may take. `max_bytes` bounds the tier behind memory, whose values have
    `value_bytes` each. `max_unwritten`: blocks that may wait to be written there."""

    store_id: WorkerId
    incarnation: str
    lease_ms: int
    value_bytes: int = 0
    max_bytes: int = 0
    max_unwritten: int = 0


class WriteBatch(NamedTuple):
    """Blocks to be written behind memory, a reference to each, after `evicted` has been deleted there."""

    hashes: list[BlockHash]
    blocks: list[int]
    evicted: list[BlockHash]


@dataclass(slots=True)
class StoreCounts:
    """Blocks that were let go as the store was slow, full or short of room: offered and not read, read and not written
    behind memory, damaged or gone there when they were asked for."""

    num_not_taken: int = 0
    num_unwritten: int = 0
    num_lost: int = 0


class StoreCore:
    """Every method is atomic. Not thread-safe; the leases are changed by `grant`, `started` and what ends one."""

    def __init__(self, limits: StoreLimits, layout: KVLayout, num_blocks: int, back_tier: Tier | None) -> None:
        self.limits = limits
        self.incarnation = limits.incarnation
        self.layout = layout
        self.memory = MemoryIndex(num_blocks)
        self.back_tier: Tier | None = back_tier
        self.back = BackIndex(limits.max_bytes // limits.value_bytes if back_tier else 0)
        self.leases = LeaseTable()
        self.counts = StoreCounts()
        self.draining = False
        self._sequence = 0
        self._num_asked = 0
        self._offers: dict[WorkerId, dict[BlockHash, None]] = {}
        self._spare: dict[WorkerId, dict[BlockHash, None]] = {}
        """What is among another worker's offers already: this one is asked should that one not give it."""
        self._heirs: list[WorkerId] = []
        self._unwritten: deque[tuple[BlockHash, int]] = deque()
        self._num_writing = 0

    # Taking in what workers are about to evict.

    @property
    def takes_blocks(self) -> bool:
        """Blocks of windowed layers are of no use by themselves: such a model's are not taken."""
        return not self.layout.is_windowed

    def offered(self, worker_id: WorkerId, joined: bytes) -> bool:
        """Note what a worker will evict soon, as far as it is wanted. Say whether to begin to pull from it: a pull goes
        on until nothing is left, so there is one at a time from each worker."""
        if self.draining or not self.takes_blocks:
            return False
        if len(joined) % BLOCK_HASH_BYTES or not is_subject_token(worker_id):
            self.counts.num_not_taken += 1
            return False
        offers, spare = self._offers.get(worker_id, {}), self._spare.get(worker_id, {})
        for block_hash in split_hashes(joined):
            if self._is_here(block_hash) or block_hash in offers or block_hash in spare:
                continue
            is_another_s = any(block_hash in others for others in self._offers.values())
            if len(offers) + len(spare) >= MAX_OFFERED:
                self.counts.num_not_taken += 1
            else:
                (spare if is_another_s else offers)[block_hash] = None
        if spare:
            self._spare[worker_id] = spare
        if not offers or worker_id in self._offers:
            return False
        self._offers[worker_id] = offers
        return True

    def replicated(self, offer: ReplicateBlocks) -> bool:
        """As `offered`, of what a worker keeps for now. A sequence's last blocks are given up before its first."""
        joined = offer.block_hashes
        if offer.fingerprint != self.layout.fingerprint or len(joined) % BLOCK_HASH_BYTES:
            self.counts.num_not_taken += 1
            return False
        return self.offered(offer.source, join_hashes(split_hashes(joined)[::-1]))

    def next_pull(self, worker_id: WorkerId, max_blocks: int) -> list[BlockHash]:
        """Return what to ask a worker for next, the one offered first in front; nothing: all is taken."""
        offers = self._offers[worker_id]
        for block_hash in [block_hash for block_hash in offers if self._is_here(block_hash)]:
            del offers[block_hash]
            for spare in self._spare.values():
                spare.pop(block_hash, None)
        return list(islice(offers, max_blocks))

    def passed_over(self, worker_id: WorkerId, hashes: Iterable[BlockHash]) -> None:
        """The worker has given these up before they could be read: whoever else has offered them is asked."""
        for block_hash in hashes:
            self._offers[worker_id].pop(block_hash, None)
            self._pass_on(block_hash)

    def end_pull(self, worker_id: WorkerId) -> int:
        """Forget what is left of a worker's offers that nobody else has offered, and return how much that is."""
        left = [block_hash for block_hash in self._offers.pop(worker_id) if not self._pass_on(block_hash)]
        self._spare = {each: spare for each, spare in self._spare.items() if spare}
        self.counts.num_not_taken += len(left)
        return len(left)

    def take_heirs(self) -> list[WorkerId]:
        """Return whom to begin to pull from, as others have not given what these had offered too."""
        heirs, self._heirs = self._heirs, []
        return heirs

    def _pass_on(self, block_hash: BlockHash) -> bool:
        """Let another who has offered it be asked. False: nobody has."""
        heir = next((worker_id for worker_id, spare in self._spare.items() if block_hash in spare), None)
        if heir is None:
            return False
        del self._spare[heir][block_hash]
        if heir not in self._offers:
            self._offers[heir] = {}
            self._heirs.append(heir)
        self._offers[heir][block_hash] = None
        return True

    def num_pullable(self, *, writes: bool) -> int:
        """Return how many blocks could be read from workers now, and also wait to be written where `writes`."""
        room = self.memory.num_free + self.memory.num_cached
        return max(0, min(room, self.limits.max_unwritten - self.num_unwritten)) if writes else room

    def pulled(self, blocks: Sequence[int], hashes: Sequence[BlockHash], *, writes: bool) -> None:
        """Take in that the first `len(hashes)` of these blocks are filled; the references are given back.

        Without `writes`, as there is nothing behind memory or it is down, they stay in memory alone.
        """
        for block, block_hash in zip(blocks, hashes, strict=False):
            self.memory.put(block, block_hash)
            if self.back_tier is None or block_hash in self.back:
                continue
            if not writes or self.num_unwritten >= self.limits.max_unwritten:
                self.counts.num_unwritten += 1
                continue
            self.memory.share([block])
            self._unwritten.append((block_hash, block))
        self.memory.release(blocks)  # the coldest first: so does the worker name them

    # Writing through.

    @property
    def num_unwritten(self) -> int:
        return len(self._unwritten) + self._num_writing

    def start_write(self, max_blocks: int) -> WriteBatch | None:
        """Return what to write next, if anything."""
        num_blocks = min(max_blocks, len(self._unwritten), self.back.max_values - self._num_writing)
        if num_blocks <= 0:
            return None
        batch = [self._unwritten.popleft() for _ in range(num_blocks)]
        self._num_writing += num_blocks
        evicted = self.back.make_room(self._num_writing)
        return WriteBatch([block_hash for block_hash, _ in batch], [block for _, block in batch], evicted)

    def end_write(self, batch: WriteBatch, written: Sequence[BlockHash], *, full: bool = False) -> list[BlockHash]:
        """Take in what of a batch was written. `full`: the rest had no room, so as much is given up; return what."""
        self._num_writing -= len(batch.hashes)
        self.counts.num_unwritten += len(batch.hashes) - len(written)
        for block_hash in written:
            self.back.put(block_hash)
        self.memory.release(batch.blocks)
        return self.back.give_up(len(batch.hashes) - len(written)) if full else []

    def drop_unwritten(self) -> None:
        """Leave what waits to be written in memory alone."""
        self.counts.num_unwritten += len(self._unwritten)
        self.memory.release([block for _, block in self._unwritten])
        self._unwritten.clear()

    # Lending.

    @property
    def open_within_ms(self) -> int:
        """Return how long a lease waits for its read to begin."""
        return min(OPEN_WITHIN_MS, self.limits.lease_ms)

    def check(self, request: RequestLease, now_ms: int) -> Refused | None:
        """Return why no lease can be had, whatever is here."""
        limits = self.limits
        if (refused := refuse_lease(request, limits.store_id, self.layout.fingerprint, now_ms)) is not None:
            return refused
        if self.draining:
            return refuse(request, "draining", f"{limits.store_id} is draining", RETRY_AFTER_MS)
        if len(self.leases) >= MAX_LEASES:
            return refuse(request, "overloaded", f"{MAX_LEASES} leases are open", RETRY_AFTER_MS)
        return None

    def take(self, hashes: Sequence[BlockHash]) -> list[int]:
        """Return the blocks of the leading run that is in memory, a reference to each."""
        blocks = self.memory.take(hashes)
        self.back.touch(hashes[: len(blocks)])
        return blocks

    def behind(self, hashes: Sequence[BlockHash]) -> list[BlockHash]:
        """Return the leading run that is behind memory and not in it."""
        run: list[BlockHash] = []
        for block_hash in hashes:
            if block_hash not in self.back or block_hash in self.memory:
                break
            run.append(block_hash)
        return run

    def allocate_up_to(self, num_blocks: int) -> list[int]:
        """Return blocks to be filled, fewer where there is less room, a reference to each."""
        room = self.memory.num_free + self.memory.num_cached
        blocks = self.memory.allocate(min(num_blocks, room))
        assert blocks is not None, "there is room"
        return blocks

    def loaded(self, blocks: Sequence[int], hashes: Sequence[BlockHash], lost: Sequence[BlockHash]) -> None:
        """Take in that the first `len(hashes)` of these blocks are filled from behind memory, and what was not there.

        The references are given back.
        """
        for block, block_hash in zip(blocks, hashes, strict=False):
            self.memory.put(block, block_hash)
        self.give_back(blocks)
        self.back.touch(hashes)
        self.counts.num_lost += sum(self.back.drop(block_hash) for block_hash in lost)

    def give_back(self, blocks: Sequence[int]) -> None:
        """Drop a reference to each of a sequence's blocks; its last are given up before its first."""
        self.memory.release(blocks[::-1])

    def grant(self, request: RequestLease, blocks: Sequence[int], now_ms: int) -> Lease | Refused:
        """Grant a lease on these blocks, which were taken for it, or give them back and say why not."""
        if not blocks:
            detail = f"{self.limits.store_id} does not have these blocks, or not in time"
            return self.check(request, now_ms) or refuse(request, "gone", detail)
        if (refused := self.check(request, now_ms)) is not None:
            self.give_back(blocks)
            return refused
        self._num_asked += 1
        block_size, first = self.layout.block_size, request.first_block
        return self.leases.grant(
            lease_id=LeaseId(f"read-{self.limits.store_id}-{self._num_asked}"),
            holder=self.limits.store_id,
            reader=request.reader,
            tables=(BlockTable(segments_of(blocks), first),),
            first_token=first * block_size,
            num_tokens=(first + len(blocks)) * block_size,
            expires_at_ms=now_ms + self.open_within_ms,
            granted_ms=now_ms,
            ends_by_ms=request.deadline_ms,
            tenant=request.tenant,
        )

    def started(self, lease_id: LeaseId, now_ms: int) -> None:
        """The read has begun: it may take its full time. Nothing where the lease has ended meanwhile."""
        with suppress(LeaseRefusedError):
            self.leases.renew(lease_id, now_ms, self.limits.lease_ms)

    def end_lease(self, lease_id: LeaseId, outcome: str) -> list[Lease]:
        """The read is over, however it ended. Return the lease, if it was still active."""
        lease = self.leases.end(lease_id, outcome)
        return [] if lease is None else self._freed([lease])

    def returned(self, event: ReturnLease) -> list[Lease]:
        """The reader does not read, or no more."""
        is_its_own = any(lease.lease_id == event.lease_id and lease.reader == event.reader for lease in self.leases)
        return self.end_lease(event.lease_id, "returned") if is_its_own else []

    def left(self, event: WorkerLeft) -> list[Lease]:
        """A reader is gone: its leases end. Return them."""
        lost = [lease for lease in self.leases if lease.reader == event.worker_id]
        return [ended for lease in lost for ended in self.end_lease(lease.lease_id, "the reader left")]

    def begin(self, incarnation: str) -> list[Lease]:
        """Others took this store for lost: go on as a new incarnation, with all that is here. Return the leases, which
        have ended: no reader waits for them any more."""
        self.incarnation, self._sequence = incarnation, 0
        return [ended for lease in self.leases for ended in self.end_lease(lease.lease_id, "the store was lost")]

    def expire(self, now_ms: int) -> list[Lease]:
        """End what is over its time. Return these leases."""
        return self._freed(self.leases.expire(now_ms))

    # What the others hear.

    def block_counts(self) -> BlockCounts:
        """Return the conservation law's terms; what is being filled or written counts as running."""
        memory, total = self.memory, self.memory.pool.num_blocks
        free, cached, leased = memory.num_free, memory.num_cached, self.leases.num_leased_blocks
        return BlockCounts(total=total, free=free, cached=cached, leased=leased, running=total - free - cached - leased)

    def take_events(self) -> list[BlocksStored | BlocksEvicted]:
        """Return the numbered events for what has changed since the last call."""
        events = self._events("memory", *self.memory.changes.take())
        if self.back_tier is not None:
            events += self._events(self.back_tier, *self.back.changes.take())
        return events

    def inventory(self, offset: int) -> Inventory:
        """Return a page of what is held now: memory's blocks, then those behind it."""
        held: list[tuple[Tier, list[BlockHash]]] = [("memory", self.memory.hashes())]
        if self.back_tier is not None:
            held.append((self.back_tier, self.back.hashes()))
        total = sum(len(hashes) for _, hashes in held)
        tier, page, passed = held[0][0], list[BlockHash](), 0
        for name, hashes in held:
            at = offset - passed
            passed += len(hashes)
            if 0 <= at < len(hashes):
                tier, page = name, hashes[at : at + INVENTORY_PAGE_BLOCKS]
                break
        end = offset + len(page)
        return Inventory(
            worker_id=self.limits.store_id,
            incarnation=self.incarnation,
            sequence=self._sequence,
            block_hashes=join_hashes(page),
            next_offset=end if page and end < total else None,
            tier=tier,
        )

    def check_integrity(self) -> None:
        """Assert conservation, and the bound."""
        self.memory.check_integrity()
        assert len(self.back) <= self.back.max_values, "the bound holds"
        assert self.block_counts().running >= 0, "every block is in one state"

    def _is_here(self, block_hash: BlockHash) -> bool:
        return block_hash in self.memory or block_hash in self.back

    def _freed(self, leases: list[Lease]) -> list[Lease]:
        for lease in leases:
            self.give_back(block_ids(lease.tables[0].segments))
        return leases

    def _events(
        self, tier: Tier, stored: Sequence[BlockHash], evicted: Sequence[BlockHash]
    ) -> list[BlocksStored | BlocksEvicted]:
        events: list[BlocksStored | BlocksEvicted] = []
        for kind, hashes in ((BlocksEvicted, evicted), (BlocksStored, stored)):
            if hashes:
                self._sequence += 1
                event = kind(
                    worker_id=self.limits.store_id,
                    incarnation=self.incarnation,
                    sequence=self._sequence,
                    block_hashes=join_hashes(hashes),
                    tier=tier,
                )
                events.append(event)
        return events
