"""Where a frame's rows lie in an arena, and the moves that copy them on a card. Pure.

A row is one token's keys (or values) of the heads asked for in one layer. A frame's rows are, layer by layer, the
keys of its tokens and then their values, in the order of the tokens: the same on both ends, however each has cut them
into segments and shards. `frames.py` makes views of host memory of the same geometry.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dataplane.device import ALIGNMENT, Moves
from dataplane.extent import Extent, HeadRange, first_kept_block, heads_of
from dataplane.layout import (
    ITEM_BYTES,
    KEY,
    VALUE,
    ArenaShape,
    BlockTables,
    KVLayout,
    SlotSpan,
    num_blocks_for,
    slot_spans,
)
from dataplane.stream import Header

Int64s = npt.NDArray[np.int64]


class Part(NamedTuple):
    """The keys or the values of one layer of a frame. `first_byte`: where the row of slot 0 begins in the arena.
    `group`: the layer's cache group; parts of one group have the same spans."""

    first_byte: int
    group: int
    spans: list[SlotSpan]


class SequenceRuns:
    """Where some heads of one sequence's tokens lie in an arena of this shape: all that it holds, by default.

    `row_bytes`: of a row. `stride`: from a row to the next. Raises ValueError when there are no such blocks or heads.
    """

    def __init__(self, shape: ArenaShape, tables: BlockTables, heads: HeadRange | None = None) -> None:
        layout = shape.layout
        heads = heads_of(layout) if heads is None else heads
        if not heads_of(layout).holds(heads):
            raise ValueError(f"{heads} of {heads_of(layout)}")
        _check_tables(shape, tables)
        head_bytes = layout.head_dim * ITEM_BYTES[layout.dtype]
        self.shape = shape
        self.stride = layout.token_bytes
        self.row_bytes = heads.num_heads * head_bytes
        self.row_offset = (heads.first - layout.first_head) * head_bytes
        """Bytes of a token's row in the arena that come before the heads asked for."""
        self._tables = tables

    @property
    def is_contiguous(self) -> bool:
        """Say whether rows of neighbouring slots follow each other: all heads of the arena are meant."""
        return self.row_bytes == self.stride

    def covers(self, extent: Extent, end_token: int) -> bool:
        """Say whether the tables have all of the extent, written up to `end_token`: a ring has only its last round."""
        size = self.shape.layout.block_size
        for group, table, start in zip(self.shape.layout.groups, self._tables, extent.group_starts, strict=True):
            if start >= extent.num_tokens:
                continue
            end_block = num_blocks_for(end_token, size)
            first_block = first_kept_block(table, end_block) if group.window else table.first_block
            if start < first_block * size or extent.num_tokens > table.end_block * size:
                return False
        return True

    def parts(self, data: Header) -> Iterator[Part]:
        """Yield where the frame's rows lie, layer by layer, keys and values apart."""
        layout = self.shape.layout
        end_token = data.first_token + data.num_tokens
        spans: dict[int, list[SlotSpan]] = {}
        for layer in range(data.layer, data.layer + data.num_layers):
            group = layout.group_of_layer[layer]
            if group not in spans:
                spans[group] = slot_spans(self._tables[group], layout.block_size, data.first_token, end_token)
            for key_or_value in (KEY, VALUE):
                yield Part(self.shape.offset(layer, key_or_value, 0) + self.row_offset, group, spans[group])


def unsuited(layout: KVLayout) -> str | None:
    """Say why KV of this layout cannot live on a card, or None: it can."""
    head_bytes = layout.head_dim * ITEM_BYTES[layout.dtype]
    if head_bytes % ALIGNMENT:
        return f"a head of {layout.head_dim} {layout.dtype} has {head_bytes} bytes, not a multiple of {ALIGNMENT}"
    return None


def gather_moves(source: SequenceRuns, data: Header, first_byte: int = 0) -> Moves:
    """Return the moves that pack a frame's rows, the first at `first_byte` of the target."""
    first_bytes, num_rows = _runs(source, data)
    first_rows = _starts(num_rows)
    runs = np.stack((first_bytes, first_byte + first_rows * source.row_bytes, first_rows), axis=1)
    return Moves(runs, int(num_rows.sum()), source.row_bytes, source.stride, source.row_bytes)


def scatter_moves(target: SequenceRuns, data: Header, first_byte: int = 0) -> Moves:
    """Return the moves that put a frame's packed rows, the first at `first_byte` of the source, where they belong."""
    first_bytes, num_rows = _runs(target, data)
    first_rows = _starts(num_rows)
    runs = np.stack((first_byte + first_rows * target.row_bytes, first_bytes, first_rows), axis=1)
    return Moves(runs, int(num_rows.sum()), target.row_bytes, target.row_bytes, target.stride)


def pair_moves(source: SequenceRuns, target: SequenceRuns, data: Header) -> Moves:
    """Return the moves that copy a frame's rows from one arena to another, whatever the tables and shards of each.
    Raises ValueError when the rows are not of the same heads."""
    if source.row_bytes != target.row_bytes:
        raise ValueError(f"rows of {source.row_bytes} and {target.row_bytes} bytes")
    source_bytes, source_rows = _runs(source, data)
    target_bytes, target_rows = _runs(target, data)
    source_starts, target_starts = _starts(source_rows), _starts(target_rows)
    starts = np.union1d(source_starts, target_starts)  # each is cut at the other's borders
    at_source = np.searchsorted(source_starts, starts, side="right") - 1
    at_target = np.searchsorted(target_starts, starts, side="right") - 1
    runs = np.stack(
        (
            source_bytes[at_source] + (starts - source_starts[at_source]) * source.stride,
            target_bytes[at_target] + (starts - target_starts[at_target]) * target.stride,
            starts,
        ),
        axis=1,
    )
    return Moves(runs, int(source_rows.sum()), source.row_bytes, source.stride, target.stride)


def _runs(sequence: SequenceRuns, data: Header) -> tuple[Int64s, Int64s]:
    """Return the byte offset of each run of rows, and its number of rows."""
    spans: dict[int, Int64s] = {}
    first_bytes: list[Int64s] = []
    num_rows: list[Int64s] = []
    for part in sequence.parts(data):
        if part.group not in spans:
            spans[part.group] = np.array(part.spans, np.int64).reshape(-1, 2)
        slots = spans[part.group]
        first_bytes.append(part.first_byte + slots[:, 0] * sequence.stride)
        num_rows.append(slots[:, 1])
    if not first_bytes:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    return np.concatenate(first_bytes), np.concatenate(num_rows)


def _starts(num_rows: Int64s) -> Int64s:
    """Return the number of each run's first row."""
    return np.cumsum(num_rows) - num_rows


def _check_tables(shape: ArenaShape, tables: BlockTables) -> None:
    """Raises ValueError when the arena has no such blocks."""
    if min(shape.num_blocks) < 0 or len(tables) != len(shape.num_blocks):
        raise ValueError(f"{len(tables)} tables for cache groups of {shape.num_blocks} blocks")
    for table, num_blocks in zip(tables, shape.num_blocks, strict=True):
        if table.first_block < 0:
            raise ValueError(f"a table that begins at block {table.first_block}")
        for first, size in table.segments:
            if first < 0 or size < 0 or first + size > num_blocks:
                raise ValueError(f"no such blocks: {first}+{size} of {num_blocks}")
