"""What the store holds: in memory, and on the tier behind it. Pure bookkeeping.

A block of memory is referred to by the leases on it, the read that fills it, the write that has not ended; what none of
them needs goes when room is needed, the least recently used first. What lies behind memory is bounded by its bytes.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dataplane.blocks.cache import Allocation
from dataplane.blocks.kept import Content, ContentChanges, KeptBlocks
from dataplane.blocks.layout import BlockTable, BlockTables, KVLayout, block_ids, segments_of
from schemas.directory import Tier
from schemas.ids import BlockHash
from services.holder.core.checks import HolderLimits
from services.store.index import BackIndex
from services.store.tiers import StoreKey, hash_of, key_of, mark_of


@dataclass(slots=True, frozen=True, kw_only=True)
class StoreLimits(HolderLimits):
    """`max_bytes` bounds the tier behind memory, whose values have `value_bytes` each. `max_unwritten`: blocks that may
    wait to be written there."""

    value_bytes: int = 0
    max_bytes: int = 0
    max_unwritten: int = 0


class Unwritten(NamedTuple):
    """A block that is to be written behind memory, with a reference to it. `tag`: by which it proves its content; None:
    its tag is yet to be made."""

    content: Content
    block: int
    tag: bytes | None

    @property
    def key(self) -> StoreKey:
        return key_of(*self.content)


class WriteBatch(NamedTuple):
    """What is to be written behind memory after `evicted` has been deleted there."""

    blocks: list[Unwritten]
    evicted: list[StoreKey]

    @property
    def keys(self) -> list[StoreKey]:
        return [each.key for each in self.blocks]


class StoreMemory:
    """The blocks of the arena and what is known of the tier behind them. Every method is atomic. Not thread-safe.

    `writes`: what is read from workers is to be written behind memory, as there is a tier and it is up.
    `num_not_written`: blocks that were read and not written there, as it was slow or down. `num_lost`: those that were
    damaged or gone there when they were asked for.
    """

    def __init__(self, limits: StoreLimits, layout: KVLayout, num_blocks: int, back_tier: Tier | None) -> None:
        self.limits = limits
        self.layout = layout
        self.kept = KeptBlocks(num_blocks)
        self.back_tier: Tier | None = back_tier
        self.back = BackIndex(limits.max_bytes // limits.value_bytes if back_tier else 0)
        self.writes = False
        self.num_not_written = 0
        self.num_lost = 0
        self._unwritten: deque[Unwritten] = deque()
        self._num_writing = 0
        self._forgotten: list[StoreKey] = []

    def holds(self, block_hash: BlockHash, tenant: str) -> bool:
        """Return whether a tenant's block is in memory or behind it."""
        return Content(tenant, block_hash) in self.kept.block_of or key_of(tenant, block_hash) in self.back

    # Blocks that are read from workers.

    @property
    def num_spare(self) -> int:
        """Blocks that could be read from workers now, and also wait to be written where it `writes`."""
        room = self.kept.room()
        return max(0, min(room, self.limits.max_unwritten - self.num_unwritten)) if self.writes else room

    def admit_spare(self, num_blocks: int, tenant: str, *, evicts: bool) -> BlockTables | None:
        """Return so many blocks to be read into, a reference to each; None where there is no room. A store always gives
        up what was not used for longest."""
        blocks = self.kept.allocate(num_blocks, tenant) if num_blocks <= self.num_spare else None
        return (BlockTable(segments_of(blocks)),) if blocks is not None else None

    def keep(self, tables: BlockTables, hashes: Sequence[BlockHash]) -> None:
        """Note that the first `len(hashes)` of these blocks are filled, and drop the reference to each. Unless it
        `writes` they stay in memory alone."""
        blocks = block_ids(tables[0].segments)
        for block, block_hash in zip(blocks, hashes, strict=False):
            if self.kept.is_barred(block):
                continue  # all was forgotten while it was being read
            self.kept.put(block, block_hash)
            content = Content(self.kept.idle.tenant_of(block), block_hash)
            if self.back_tier is None or key_of(*content) in self.back:
                continue
            if not self.writes or self.num_unwritten >= self.limits.max_unwritten:
                self.num_not_written += 1
                continue
            self.kept.share([block])
            self._unwritten.append(Unwritten(content, block, self.kept.tags.get(block)))
        self.give_back(blocks)

    # Writing through.

    @property
    def num_unwritten(self) -> int:
        return len(self._unwritten) + self._num_writing

    @property
    def is_behind(self) -> bool:
        """Return whether there is something to write behind memory, or to delete there."""
        return bool(self.num_unwritten or self._forgotten)

    def start_write(self, max_blocks: int) -> WriteBatch | None:
        """Return what to write next, if anything."""
        num_blocks = min(max_blocks, len(self._unwritten), self.back.max_values - self._num_writing)
        if num_blocks <= 0:
            return None
        batch = [self._unwritten.popleft() for _ in range(num_blocks)]
        self._num_writing += num_blocks
        evicted = self.back.make_room(self._num_writing)
        return WriteBatch(batch, evicted)

    def end_write(self, batch: WriteBatch, written: Sequence[StoreKey], *, full: bool = False) -> list[StoreKey]:
        """Note what of a batch was written; return what is to be deleted. `full`: the rest had no room, so as much is
        given up."""
        self._num_writing -= len(batch.blocks)
        self.num_not_written += len(batch.blocks) - len(written)
        barred = {each.key for each in batch.blocks if self.kept.is_barred(each.block)}
        for key in written:
            if key not in barred:
                self.back.put(key)
        self.kept.release([each.block for each in batch.blocks])
        given_up = self.back.give_up(len(batch.blocks) - len(written)) if full else []
        return [*given_up, *barred.intersection(written)]

    def forget(self, tenant: str | None = None) -> None:
        """Give up the content of this tenant's blocks, of all for None, also behind memory: `take_forgotten` returns
        what is to be deleted there. What is being written now is given up when that ends."""
        self.kept.forget(tenant)
        unwritten, self._unwritten = self._unwritten, deque[Unwritten]()
        for each in unwritten:
            if tenant in (None, each.content.tenant):
                self.kept.release([each.block])
            else:
                self._unwritten.append(each)
        self._forgotten += self.back.forget(None if tenant is None else mark_of(tenant))

    def forget_blocks(self, hashes: Iterable[BlockHash], tenant: str) -> int:
        """Give up these blocks of a tenant's, also behind memory (see `forget`). Return how many there were."""
        num_forgotten = 0
        for block_hash in hashes:
            content, key = Content(tenant, block_hash), key_of(tenant, block_hash)
            num_forgotten += self.holds(block_hash, tenant)
            if (block := self.kept.block_of.get(content)) is not None:
                self.kept.forget_block(block)
            if self.back.drop(key):
                self._forgotten.append(key)
        return num_forgotten

    def take_forgotten(self) -> list[StoreKey]:
        """Return what was forgotten and lies behind memory."""
        forgotten, self._forgotten = self._forgotten, []
        return forgotten

    def drop_unwritten(self) -> None:
        """Leave what waits to be written in memory alone."""
        self.num_not_written += len(self._unwritten)
        self.kept.release([each.block for each in self._unwritten])
        self._unwritten.clear()

    # Lending: the blocks of `LendCore`.

    @property
    def num_blocks(self) -> int:
        return self.kept.pool.num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that hold nothing."""
        return self.kept.pool.num_free

    @property
    def num_cached(self) -> int:
        """Blocks that nobody uses and that are kept for their content."""
        return len(self.kept.idle)

    def lend(self, hashes: Sequence[BlockHash], first_block: int, tenant: str) -> Allocation | None:
        """Return the leading run of this tenant's blocks that is in memory, a reference to each, at a reader's
        positions from `first_block` on; None: not even the first."""
        blocks = self.take(hashes, tenant)
        if not blocks:
            return None
        table = BlockTable(segments_of(blocks), first_block)
        return Allocation((table,), (first_block + len(blocks)) * self.layout.block_size)

    def free(self, tables: BlockTables) -> None:
        """Drop a reference to each block."""
        self.give_back(block_ids(tables[0].segments))

    def take(self, hashes: Sequence[BlockHash], tenant: str = "") -> list[int]:
        """Return the blocks of the leading run that is in memory, a reference to each."""
        blocks = self.kept.take(hashes, tenant)
        self.back.touch([key_of(tenant, block_hash) for block_hash in hashes[: len(blocks)]])
        return blocks

    def num_leading(self, hashes: Sequence[BlockHash], tenant: str = "") -> int:
        """Return how many blocks of this run, from its first on, are in memory."""
        contents = (Content(tenant, block_hash) for block_hash in hashes)
        return next((at for at, content in enumerate(contents) if content not in self.kept.block_of), len(hashes))

    def behind(self, hashes: Sequence[BlockHash], tenant: str = "") -> list[BlockHash]:
        """Return the leading run that is behind memory and not in it."""
        run: list[BlockHash] = []
        for block_hash in hashes:
            if key_of(tenant, block_hash) not in self.back or Content(tenant, block_hash) in self.kept.block_of:
                break
            run.append(block_hash)
        return run

    def allocate_up_to(self, num_blocks: int, tenant: str = "") -> list[int]:
        """Return blocks of a tenant's to be filled, fewer where there is less room, a reference to each."""
        blocks = self.kept.allocate(min(num_blocks, self.kept.room()), tenant)
        assert blocks is not None, "there is room"
        return blocks

    def loaded(
        self, blocks: Sequence[int], keys: Sequence[StoreKey], tags: Sequence[bytes], lost: Sequence[StoreKey]
    ) -> None:
        """Note that the first `len(tags)` of these blocks are filled from behind memory, and what was not there.

        The references are given back.
        """
        for block, key, tag in zip(blocks, keys, tags, strict=False):
            self.kept.put(block, hash_of(key))
            self.kept.tags[block] = tag
        self.give_back(blocks)
        self.back.touch(keys[: len(tags)])
        self.num_lost += sum(self.back.drop(key) for key in lost)

    def give_back(self, blocks: Sequence[int]) -> None:
        """Drop a reference to each of a sequence's blocks; its last are given up before its first."""
        self.kept.release(blocks[::-1])

    # What the others receive.

    def take_changes(self) -> list[tuple[Tier, ContentChanges]]:
        """Return what came to each tier and what went since the last call."""
        changes: list[tuple[Tier, ContentChanges]] = [(Tier.MEMORY, self.kept.changes.drain())]
        return changes if self.back_tier is None else [*changes, (self.back_tier, self.back.changes.drain())]

    def contents(self) -> list[tuple[Tier, list[BlockHash]]]:
        """Return what each tier has now: memory's blocks, then those behind it."""
        held: list[tuple[Tier, list[BlockHash]]] = [
            (Tier.MEMORY, [content.block_hash for content in self.kept.block_of])
        ]
        return held if self.back_tier is None else [*held, (self.back_tier, self.back.hashes())]

    def check_integrity(self) -> None:
        """Assert conservation, and the bound."""
        self.kept.check_integrity()
        assert len(self.back) <= self.back.max_values, "the bound holds"
        assert self.num_free + self.num_cached <= self.num_blocks, "every block is in one state"
