"""How KV lies in an arena: `[layer, k/v, block, token, head, dim]`, so that one layer of a run of blocks is one copy
and attention on the CPU reads a view.

Layers that see the same window form a cache group. Each group has blocks of its own, numbered from 0, and a sequence
has one block table per group. A sliding-window layer needs only what its window can still see: its table may begin
late, and may name a physical block again where an older one is not needed any more (a ring).
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property, lru_cache
from typing import NamedTuple

import msgspec

FORMAT_VERSION = 2
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
KEY, VALUE = 0, 1


class Segment(NamedTuple):
    """A contiguous run of blocks."""

    first_block: int
    num_blocks: int


class BlockTable(NamedTuple):
    """Where one cache group's blocks of a sequence lie: its blocks `first_block`, `first_block` + 1, … in order.

    Whoever makes one makes as few segments as can be (`segments_of`), so that nobody has to join them again.
    """

    segments: tuple[Segment, ...]
    first_block: int = 0

    @property
    def end_block(self) -> int:
        return self.first_block + sum(segment.num_blocks for segment in self.segments)


BlockTables = tuple[BlockTable, ...]
"""One table per cache group, in the order of `KVLayout.groups`."""


class SlotSpan(NamedTuple):
    """A contiguous run of token slots of an arena; slot = block_id · block_size + offset in the block."""

    first_slot: int
    num_tokens: int


class CacheGroup(NamedTuple):
    """Layers that see the same `window` of tokens, the query itself included; 0: all tokens."""

    window: int
    layers: tuple[int, ...]


class KVLayout(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """The shape of one model's KV on one worker. Two arenas may exchange KV only when their fingerprints are equal."""

    weights: str
    """Identity of the weights that computed the KV."""
    dtype: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    windows: tuple[int, ...] = ()
    """Per layer how many tokens a query sees, itself included; 0: all. Empty: all layers see all tokens."""
    whole_blocks: bool = False
    """A block's bytes are of use only together: how tokens and heads lie in it is its engine's own affair. Which
    engine's, `weights` says."""

    @cached_property
    def token_bytes(self) -> int:
        """Bytes of one token's keys (or values) in one layer."""
        return self.num_kv_heads * self.head_dim * ITEM_BYTES[self.dtype]

    @property
    def layer_block_bytes(self) -> int:
        """Bytes of one block in one layer, keys and values."""
        return 2 * self.block_size * self.token_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers, keys and values."""
        return self.num_layers * self.layer_block_bytes

    @cached_property
    def groups(self) -> tuple[CacheGroup, ...]:
        """The cache groups: the layers that see all tokens first, then by window."""
        windows = self.windows or (0,) * self.num_layers
        return tuple(
            CacheGroup(window, tuple(layer for layer, w in enumerate(windows) if w == window))
            for window in sorted(set(windows))
        )

    @cached_property
    def group_of_layer(self) -> tuple[int, ...]:
        """Index into `groups`, per layer."""
        indexes = {layer: index for index, group in enumerate(self.groups) for layer in group.layers}
        return tuple(indexes[layer] for layer in range(self.num_layers))

    @property
    def is_windowed(self) -> bool:
        """Return whether any layer forgets."""
        return any(self.windows)

    @cached_property
    def fingerprint(self) -> str:
        """Hex digest over the format version and every field but `whole_blocks`, which follows from `weights`."""
        heads = self.num_kv_heads
        parts = (self.weights, self.dtype, self.num_layers, heads, self.head_dim, self.block_size, self.windows)
        text = msgspec.json.encode((FORMAT_VERSION, parts))
        return hashlib.blake2b(text, digest_size=16).hexdigest()

    def padded(self, num_tokens: int) -> int:
        """Return how many tokens' slots cross where `num_tokens` are wanted: up to the block border where blocks are
        only whole of use."""
        return num_blocks_for(num_tokens, self.block_size) * self.block_size if self.whole_blocks else num_tokens

    def usable(self, num_tokens: int) -> int:
        """Return how many of the first `num_tokens` tokens, after which nothing has come, are of use: those in full
        blocks where blocks are only whole of use."""
        return num_tokens - num_tokens % self.block_size if self.whole_blocks else num_tokens

    def first_needed_block(self, group: int, num_tokens: int) -> int:
        """Return the first block that a cache group still needs of a sequence of `num_tokens` tokens.

        Enough for the next token, and for a prefix hit at the sequence's last block border. Where blocks are only whole
        of use the tokens may be padded ones, of a sequence that ends anywhere in its last block.
        """
        window = self.groups[group].window
        if not window:
            return 0
        border = max(0, num_tokens - self.whole_blocks) // self.block_size * self.block_size
        return max(0, border - window + 1) // self.block_size


class ArenaShape(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """A layout and how many blocks each of its cache groups has: everything about where bytes lie in an arena."""

    layout: KVLayout
    num_blocks: tuple[int, ...]

    @cached_property
    def first_bytes(self) -> tuple[tuple[int, int], ...]:
        """Per layer the byte offsets at which its keys (KEY) and its values (VALUE) begin."""
        first_bytes: list[tuple[int, int]] = []
        first_key = 0
        for group in self.layout.group_of_layer:
            num_key_bytes = self.num_blocks[group] * self.layout.block_size * self.layout.token_bytes
            first_bytes.append((first_key, first_key + num_key_bytes))
            first_key += 2 * num_key_bytes
        return tuple(first_bytes)

    @cached_property
    def arena_bytes(self) -> int:
        return sum(self.num_blocks[group] for group in self.layout.group_of_layer) * self.layout.layer_block_bytes

    def offset(self, layer: int, key_or_value: int, slot: int) -> int:
        """Return the byte offset of a slot's keys (KEY) or values (VALUE)."""
        return self.first_bytes[layer][key_or_value] + slot * self.layout.token_bytes


@lru_cache(maxsize=64)
def shape_of(layout: KVLayout, num_blocks: tuple[int, ...]) -> ArenaShape:
    """Return the shape of an arena of so many blocks: the same object for the same arena, which is asked for often."""
    return ArenaShape(layout=layout, num_blocks=num_blocks)


def uniform_shape(layout: KVLayout, num_blocks: int) -> ArenaShape:
    """Return the shape of an arena that has `num_blocks` blocks in every cache group."""
    return ArenaShape(layout=layout, num_blocks=(num_blocks,) * len(layout.groups))


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """Return how many blocks `num_tokens` tokens need."""
    return -(-num_tokens // block_size)


def slot_spans(table: BlockTable, block_size: int, start: int, end: int) -> list[SlotSpan]:
    """Return where tokens [start, end) of a sequence lie, in order.

    Raises ValueError when the table does not cover them.
    """
    if start < end and start < table.first_block * block_size:
        raise ValueError(f"token {start} lies before this table, which begins at block {table.first_block}")
    spans: list[SlotSpan] = []
    passed = table.first_block * block_size
    for segment in table.segments:
        size = segment.num_blocks * block_size
        first, last = max(start, passed), min(end, passed + size)
        if first < last:
            spans.append(SlotSpan(segment.first_block * block_size + first - passed, last - first))
        passed += size
    if end > passed:
        raise ValueError(f"token {end} lies past the {passed} slots of this request")
    return spans


def block_ids(segments: Iterable[Segment]) -> list[int]:
    """Return the blocks that the segments stand for."""
    return list(iter_blocks(segments))


def iter_blocks(segments: Iterable[Segment]) -> Iterator[int]:
    """Yield the same, one by one."""
    return (block for s in segments for block in range(s.first_block, s.first_block + s.num_blocks))


def num_distinct_blocks(tables: Iterable[BlockTables]) -> int:
    """Return how many blocks these are, each counted once however many share it."""
    extents = {
        (group, segment.first_block, segment.first_block + segment.num_blocks)
        for of_one in tables
        for group, table in enumerate(of_one)
        for segment in table.segments
    }
    num_blocks, reached = 0, (0, 0)
    for group, first, end in sorted(extents):
        start = max(first, reached[1]) if group == reached[0] else first
        num_blocks += max(0, end - start)
        reached = (group, max(end, start))
    return num_blocks


def segments_of(block_ids: Sequence[int]) -> tuple[Segment, ...]:
    """Return the blocks as segments, joining neighbours that follow each other."""
    runs: list[Segment] = []
    for block in block_ids:
        if runs and runs[-1].first_block + runs[-1].num_blocks == block:
            runs[-1] = Segment(runs[-1].first_block, runs[-1].num_blocks + 1)
        else:
            runs.append(Segment(block, 1))
    return tuple(runs)
