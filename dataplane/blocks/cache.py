"""Which blocks of an arena a sequence gets, and which of them others have filled already. Pure bookkeeping.

A sequence is admitted with all the blocks that it can come to need, so that it never waits half way. What stays of it
afterwards, and for how long, is in `kept.py`.

Each cache group (`KVLayout.groups`) has blocks of its own. In a group with a window a sequence's own blocks form a
ring: they are written over once no query can see them any more, so their content is only known for sure, and kept, at
its end.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from dataplane.blocks.kept import Content, ContentChanges, KeptBlocks
from dataplane.blocks.layout import ArenaShape, BlockTable, BlockTables, block_ids, num_blocks_for, segments_of
from schemas.directory import Tier
from schemas.ids import BlockHash


@dataclass(slots=True, frozen=True)
class Allocation:
    """A sequence's blocks. The KV of its first `num_cached_tokens` tokens is in them already."""

    tables: BlockTables
    num_cached_tokens: int


class BlockCache:
    """The blocks of one arena. Every method is atomic. Not thread-safe.

    `chunk_tokens`: the most tokens that an engine step writes of one sequence; a ring has room for them beside its
    window. `caching` False: nothing is kept.
    """

    def __init__(self, shape: ArenaShape, *, chunk_tokens: int, caching: bool = True) -> None:
        self.shape = shape
        self.layout = shape.layout
        self._chunk_tokens = chunk_tokens
        self._caching = caching
        self._groups = [KeptBlocks(num_blocks) for num_blocks in shape.num_blocks]

    @property
    def kept(self) -> KeptBlocks:
        """The blocks of the first group: all, where no layer has a window."""
        return self._groups[0]

    @property
    def num_blocks(self) -> int:
        return sum(group.pool.num_blocks for group in self._groups)

    @property
    def num_free(self) -> int:
        """Blocks that hold nothing."""
        return sum(group.pool.num_free for group in self._groups)

    @property
    def keeps_what_is_computed(self) -> bool:
        """A sequence's full blocks can be shared before its end: not where layers have windows."""
        return self._caching and not self.layout.is_windowed

    @property
    def num_cached(self) -> int:
        """Blocks that nobody uses and that are kept for their content."""
        return sum(len(group.idle) for group in self._groups)

    def admit(
        self, hashes: Sequence[BlockHash], num_tokens: int, max_cached_tokens: int, *, tenant: str = ""
    ) -> Allocation | None:
        """Return blocks for `num_tokens` tokens, a reference to each; None where there is no room now.

        They begin with what is cached of the blocks `hashes` (of the sequence, from its first on), at most
        `max_cached_tokens` tokens of it.
        """
        # Find how many leading blocks are cached, and how many blocks of its own each group must add to them.
        block_size = self.layout.block_size
        num_blocks = num_blocks_for(num_tokens, block_size)
        num_cached = self._num_matching(hashes[: min(max_cached_tokens // block_size, num_blocks)], tenant)
        shared = [self._blocks_of(index, hashes, tenant, 0, num_cached) for index in range(len(self._groups))]
        sizes = self._sizes(num_cached, num_blocks)
        if any(len(b) + n > g.pool.num_blocks for g, b, n in zip(self._groups, shared, sizes, strict=True)):
            # A ring and the window before it together are more than there is: it could wait for ever.
            num_cached, shared, sizes = 0, [list[int]() for _ in self._groups], self._sizes(0, num_blocks)
        # Check every group before the first allocation: nothing has to be undone when one group is full.
        for group, blocks, size in zip(self._groups, shared, sizes, strict=True):
            if size > group.room(besides=blocks):
                return None
        # Reference the shared blocks before own ones are allocated: the allocation could evict idle ones.
        tables: list[BlockTable] = []
        for group, blocks, size in zip(self._groups, shared, sizes, strict=True):
            group.share(blocks)
            own = group.allocate(size, tenant)
            assert own is not None, "there is room"
            # A ring has fewer own blocks than positions: its table names them again, round after round.
            rest = num_blocks - num_cached
            rounds = num_blocks_for(rest, size) if size else 0
            table = [*blocks, *(own * rounds)[:rest]]
            tables.append(BlockTable(segments_of(table), num_cached - len(blocks)))
        return Allocation(tuple(tables), num_cached * block_size)

    def lend(self, hashes: Sequence[BlockHash], first_block: int, tenant: str = "") -> Allocation | None:
        """Find this tenant's blocks `first_block`, `first_block` + 1, … of a sequence by these hashes; add a reference
        to each.

        Returns as many from the first on as a reader could go on from; `num_cached_tokens` is where they end. None: not
        even the first is here.
        """
        num_found = self._num_matching(hashes, tenant, first_block)
        if not num_found:
            return None
        tables: list[BlockTable] = []
        for index, group in enumerate(self._groups):
            blocks = self._blocks_of(index, hashes, tenant, first_block, first_block + num_found)
            group.share(blocks)
            tables.append(BlockTable(segments_of(blocks), first_block + num_found - len(blocks)))
        return Allocation(tuple(tables), (first_block + num_found) * self.layout.block_size)

    def num_cached_blocks(self, hashes: Sequence[BlockHash], tenant: str = "") -> int:
        """Return how many of a sequence's first blocks, with these hashes, are here of this tenant."""
        return self._num_matching(hashes, tenant)

    def holds(self, block_hash: BlockHash, tenant: str = "") -> bool:
        """Return whether a block of this tenant with this content is here."""
        return Content(tenant, block_hash) in self._groups[0].block_of

    def admit_spare(self, num_blocks: int, tenant: str = "", *, evicts: bool = False) -> BlockTables | None:
        """Return empty blocks, with a reference to each, into which others' are to be copied. No cached block is
        evicted for them unless it `evicts`: None where fewer are free. Not for layouts with windows."""
        assert not self.layout.is_windowed, "blocks of windowed layers are of no use by themselves"
        group = self._groups[0]
        if not 0 < num_blocks <= (group.room() if evicts else group.pool.num_free):
            return None
        blocks = group.allocate(num_blocks, tenant)
        assert blocks is not None, "there is room"
        return (BlockTable(segments_of(blocks)),)

    def keep(self, tables: BlockTables, hashes: Sequence[BlockHash]) -> None:
        """Note that the first `len(hashes)` blocks of spare tables are filled, and drop the reference to each."""
        if self._caching:
            for block, block_hash in zip(block_ids(tables[0].segments), hashes, strict=False):
                self._groups[0].put(block, block_hash)
        self.free(tables)

    def is_computed_from(self, tables: BlockTables, first_block: int) -> None:
        """Note that a sequence's blocks from this one on are filled here: what tags they have are of other bytes."""
        table = tables[0]
        for block in block_ids(table.segments)[max(0, first_block - table.first_block) :]:
            self.kept.tags.pop(block, None)

    def share(self, tables: BlockTables) -> None:
        """Add a reference to each block."""
        for group, table in zip(self._groups, tables, strict=True):
            group.share(_distinct(table))

    def free(self, tables: BlockTables) -> None:
        """Drop a reference to each block. What is known by its content stays as long as there is room: a sequence's
        first blocks, which more prompts share, for longer than its last."""
        for group, table in zip(self._groups, tables, strict=True):
            group.release(_distinct(table)[::-1])

    def store(
        self,
        tables: BlockTables,
        hashes: Sequence[BlockHash],
        first_block: int,
        num_tokens: int,
        num_landed_tokens: int,
        *,
        ended: bool,
    ) -> None:
        """Note that the KV of a sequence's first `num_tokens` tokens is in place; `hashes` are its blocks'.

        Blocks before `first_block` were noted before. The first `num_landed_tokens` were not computed here: of
        groups with a window only what these still need is in place. `ended`: nothing of it will be written any more.
        """
        if not self._caching:
            return
        # Only full blocks whose hash is known can be kept.
        block_size = self.layout.block_size
        num_full = min(num_tokens // block_size, len(hashes))
        for index, (group, table) in enumerate(zip(self._groups, tables, strict=True)):
            # `at` below is a block's position in the sequence, counted from its beginning; `blocks[at - first_block of
            # the table]` is the block that holds it.
            window = self.layout.groups[index].window
            if window and not ended:
                continue  # its ring is still being written over: what lies where is known only at the end
            # A ring is noted once, from the first block that its landed tokens need; others go on at `first_block`.
            blocks = block_ids(table.segments)
            in_place = self.layout.first_needed_block(index, num_landed_tokens)
            first = max(table.first_block, in_place if window else first_block)
            if window:
                # The table names a ring's blocks again and again, a later position over an earlier one: a block holds
                # the last position that was written to it, and what it had before is gone. The block that was begun
                # last counts as written too, or a full one that it has begun to write over would be kept.
                last_written = num_blocks_for(num_tokens, block_size)
                position_of = {blocks[at - table.first_block]: at for at in range(table.first_block, last_written)}
                kept = [at for at in range(first, num_full) if position_of[blocks[at - table.first_block]] == at]
            else:
                kept = list(range(first, num_full))
            for at in kept:
                group.put(blocks[at - table.first_block], hashes[at])

    def forget(self, tenant: str | None = None) -> None:
        """Give up the content of this tenant's blocks, of all for None (`KeptBlocks.forget`)."""
        for group in self._groups:
            group.forget(tenant)

    def take_changes(self) -> list[tuple[Tier, ContentChanges]]:
        """Return what came to the first group and went since the last call; content that did both is in neither
        list."""
        for group in self._groups[1:]:
            group.changes.drain()
        return [(Tier.ARENA, self._groups[0].changes.drain())]

    def coldest(self, num_blocks: int) -> list[Content]:
        """Return the content of the blocks that would be given up first."""
        return self._groups[0].coldest(num_blocks)

    def num_of(self, tenant: str) -> int:
        """Return how many blocks a tenant's sequences use or have left here."""
        return sum(group.idle.num_of(tenant) for group in self._groups)

    def contents(self) -> list[tuple[Tier, list[BlockHash]]]:
        """Return the hashes of all that is here."""
        return [(Tier.ARENA, [content.block_hash for content in self._groups[0].block_of])]

    def check_integrity(self) -> None:
        """Assert conservation in every group."""
        for group in self._groups:
            group.check_integrity()

    def _sizes(self, num_cached: int, num_blocks: int) -> list[int]:
        """Return how many blocks of its own a sequence needs in each group, beside its first `num_cached`."""
        block_size = self.layout.block_size
        rest = num_blocks - num_cached
        return [
            min(rest, ring_blocks(group.window, self._chunk_tokens, block_size)) if group.window else rest
            for group in self.layout.groups
        ]

    def _num_matching(self, hashes: Sequence[BlockHash], tenant: str, first_block: int = 0) -> int:
        """Return how many of these blocks, the first of which is `first_block`, are here, so that one can go on."""
        num_found = len(hashes)
        for index, group in enumerate(self._groups):
            if not self.layout.groups[index].window:
                found = 0
                while found < num_found and Content(tenant, hashes[found]) in group.block_of:
                    found += 1
                num_found = found
        while num_found and not all(
            Content(tenant, hashes[at - first_block]) in group.block_of
            for index, group in enumerate(self._groups)
            if self.layout.groups[index].window
            for at in self._needed(index, first_block, first_block + num_found)
        ):
            num_found -= 1
        return num_found

    def _needed(self, group: int, first_block: int, end_block: int) -> range:
        """Return the blocks that a group needs of [first_block, end_block) to go on from there."""
        needed = self.layout.first_needed_block(group, end_block * self.layout.block_size)
        return range(min(max(first_block, needed), end_block), end_block)

    def _blocks_of(
        self, group: int, hashes: Sequence[BlockHash], tenant: str, first_block: int, end_block: int
    ) -> list[int]:
        block_of = self._groups[group].block_of
        return [
            block_of[Content(tenant, hashes[at - first_block])] for at in self._needed(group, first_block, end_block)
        ]


def _distinct(table: BlockTable) -> list[int]:
    """Return a table's blocks, each once: a ring names them again and again."""
    return list(dict.fromkeys(block_ids(table.segments)))


def max_sequence_tokens(shape: ArenaShape, chunk_tokens: int) -> int:
    """Return how many tokens the longest sequence may have that an empty arena can hold, 0 where there is no bound."""
    block_size = shape.layout.block_size
    bounds = [
        num_blocks * block_size
        for group, num_blocks in zip(shape.layout.groups, shape.num_blocks, strict=True)
        if not group.window or ring_blocks(group.window, chunk_tokens, block_size) > num_blocks
    ]
    return min(bounds, default=0)


def ring_blocks(window: int, chunk_tokens: int, block_size: int) -> int:
    """Return the blocks of a ring in which a chunk can be written while its first token still sees its window."""
    return num_blocks_for(window + chunk_tokens, block_size) + 2
