"""Where a frame's rows lie in an arena. Pure.

A row is one token's keys (or values) in one layer. A frame's rows are, layer by layer, the keys of its tokens and then
their values, in the order of the tokens: the same on both ends, however each has cut them into segments. `frames.py`
makes views of host memory from it.
"""

import numpy as np
import numpy.typing as npt

from dataplane.blocks.layout import (
    ArenaShape,
    BlockTables,
    SlotSpan,
    num_blocks_for,
    slot_spans,
)
from dataplane.memory.extent import Extent, Frame, first_kept_block

Int64s = npt.NDArray[np.int64]


Part = tuple[int, list[SlotSpan]]
"""The keys or the values of one layer of a frame: where the row of slot 0 begins in the arena, in bytes, and in which
slots they lie, one object for all parts of which it is the same."""


class SequenceRuns:
    """Where one sequence's tokens lie in an arena of this shape. `row_bytes`: of a row. Raises ValueError when there
    are no such blocks."""

    def __init__(self, shape: ArenaShape, tables: BlockTables) -> None:
        _check_tables(shape, tables)
        self.shape = shape
        self.row_bytes = shape.layout.token_bytes
        self._tables = tables
        self._slot_spans: dict[int, tuple[int, int, list[SlotSpan]]] = {}
        """By cache group, those of the last frame: the next layers have the same."""

    def covers(self, extent: Extent, end_token: int) -> bool:
        """Return whether the tables have all the extent, written up to `end_token`: a ring has only its last round."""
        size = self.shape.layout.block_size
        for group, table, start in zip(self.shape.layout.groups, self._tables, extent.group_starts, strict=True):
            if start >= extent.num_tokens:
                continue
            end_block = num_blocks_for(end_token, size)
            first_block = first_kept_block(table, end_block) if group.window else table.first_block
            if start < first_block * size or extent.num_tokens > table.end_block * size:
                return False
        return True

    def parts(self, frame: Frame) -> list[Part]:
        """Return the frame's parts: layer by layer, keys and values apart."""
        parts: list[Part] = []
        for layer in range(frame.layer, frame.layer + frame.num_layers):
            spans = self._spans(self.shape.layout.group_of_layer[layer], frame)
            parts += [(first_byte, spans) for first_byte in self.shape.first_bytes[layer]]
        return parts

    def _spans(self, group: int, frame: Frame) -> list[SlotSpan]:
        """Return where a cache group's tokens of the frame lie; the same object for frames of the same tokens."""
        first_token, num_tokens, spans = self._slot_spans.get(group, (0, -1, []))
        if (first_token, num_tokens) != (frame.first_token, frame.num_tokens):
            first_token, num_tokens = frame.first_token, frame.num_tokens
            size = self.shape.layout.block_size
            spans = slot_spans(self._tables[group], size, first_token, first_token + num_tokens)
            self._slot_spans[group] = first_token, num_tokens, spans
        return spans


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
