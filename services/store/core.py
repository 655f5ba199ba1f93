"""What the store holds, takes, lends and gives up. Pure: the time is an argument.

A block of memory is referred to by the leases on it, the read that fills it, the write that has not ended; what none of
them needs goes when room is needed, the least recently used first. What lies behind memory is bounded by its bytes.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from dataplane.blocks.cache import Allocation, ContentChanges
from dataplane.blocks.layout import BlockTable, BlockTables, KVLayout, block_ids, segments_of
from schemas.block import BLOCK_HASH_BYTES, join_hashes, split_hashes
from schemas.directory import Tier
from schemas.ids import BlockHash, WorkerId, is_subject_token
from schemas.kv import ReplicateBlocks
from services.store.index import BackIndex, MemoryIndex
from services.store.limits import MAX_OFFERED_BLOCKS


@dataclass(slots=True, frozen=True)
class StoreLimits:
    """`lease_ms`: how long one read may take. `max_bytes` bounds the tier behind memory, whose values have
    `value_bytes` each. `max_unwritten`: blocks that may wait to be written there. With what `LendCore` needs."""

    worker_id: WorkerId
    fingerprint: str
    block_size: int
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
    """The memory of `LendCore`, and what keeps it filled. Every method is atomic. Not thread-safe."""

    def __init__(self, limits: StoreLimits, layout: KVLayout, num_blocks: int, back_tier: Tier | None) -> None:
        self.limits = limits
        self.layout = layout
        self.memory = MemoryIndex(num_blocks)
        self.back_tier: Tier | None = back_tier
        self.back = BackIndex(limits.max_bytes // limits.value_bytes if back_tier else 0)
        self.counts = StoreCounts()
        self.draining = False
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
            if len(offers) + len(spare) >= MAX_OFFERED_BLOCKS:
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

    # Lending: the blocks of `LendCore`.

    @property
    def num_blocks(self) -> int:
        return self.memory.pool.num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that hold nothing."""
        return self.memory.num_free

    @property
    def num_cached(self) -> int:
        """Blocks that nobody uses and that are kept for their content."""
        return self.memory.num_cached

    def lend(self, hashes: Sequence[BlockHash], first_block: int) -> Allocation | None:
        """Return the leading run of these blocks that is in memory, a reference to each, at a reader's positions from
        `first_block` on; None: not even the first."""
        blocks = self.take(hashes)
        if not blocks:
            return None
        table = BlockTable(segments_of(blocks), first_block)
        return Allocation((table,), (first_block + len(blocks)) * self.layout.block_size)

    def free(self, tables: BlockTables) -> None:
        """Drop a reference to each block."""
        self.give_back(block_ids(tables[0].segments))

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

    # What the others hear.

    def take_changes(self) -> list[tuple[Tier, ContentChanges]]:
        """Return what came to each tier and what went since the last call."""
        changes: list[tuple[Tier, ContentChanges]] = [("memory", self.memory.changes.take())]
        return changes if self.back_tier is None else [*changes, (self.back_tier, self.back.changes.take())]

    def contents(self) -> list[tuple[Tier, list[BlockHash]]]:
        """Return what each tier has now: memory's blocks, then those behind it."""
        held: list[tuple[Tier, list[BlockHash]]] = [("memory", self.memory.hashes())]
        return held if self.back_tier is None else [*held, (self.back_tier, self.back.hashes())]

    def check_integrity(self) -> None:
        """Assert conservation, and the bound."""
        self.memory.check_integrity()
        assert len(self.back) <= self.back.max_values, "the bound holds"
        assert self.num_free + self.num_cached <= self.num_blocks, "every block is in one state"

    def _is_here(self, block_hash: BlockHash) -> bool:
        return block_hash in self.memory or block_hash in self.back
