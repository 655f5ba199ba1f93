"""Where a frame's bytes lie in an arena, and how they are copied and digested.

A frame's bytes are, layer by layer, the keys of its tokens and then their values, in the order of the tokens: the same
on both ends however each has cut them into segments. Its digest is xxh3-64 over them.
"""

import time
from collections.abc import Sequence

import numpy as np
import xxhash

from dataplane.arena import ByteArray
from dataplane.layout import KEY, VALUE, ArenaShape, BlockTables, slot_spans
from dataplane.stream import Header, TransferStats

PIECE_BYTES = 512 << 10
"""What is copied before it is digested: it must still be in the core's cache then."""


class SequenceMemory:
    """One sequence's tokens in an arena of `num_blocks` blocks. Keeps the memory alive."""

    def __init__(self, array: ByteArray, shape: ArenaShape, tables: BlockTables) -> None:
        if shape.num_bytes > array.nbytes or len(tables) != len(shape.num_blocks):
            raise ValueError(f"{shape.num_blocks} blocks do not fit into {array.nbytes} bytes")
        for table, num_blocks in zip(tables, shape.num_blocks, strict=True):
            for first, size in table.segments:
                if first < 0 or size < 0 or first + size > num_blocks:
                    raise ValueError(f"no such blocks: {first}+{size} of {num_blocks}")
        self._array = array
        self._shape = shape
        self._layout = shape.layout
        self._tables = tables

    @property
    def num_slots(self) -> int:
        return self._tables[0].end_block * self._layout.block_size

    def views(self, data: Header) -> list[ByteArray]:
        """Return the frame's bytes as views, in the frame's order."""
        layout, array = self._layout, self._array
        token_bytes = layout.token_bytes
        views: list[ByteArray] = []
        for layer in range(data.layer, data.layer + data.num_layers):
            table = self._tables[layout.group_of_layer[layer]]
            spans = slot_spans(table, layout.block_size, data.first_token, data.first_token + data.num_tokens)
            for key_or_value in (KEY, VALUE):
                for slot, num_tokens in spans:
                    at = self._shape.offset(layer, key_or_value, slot)
                    views.append(array[at : at + num_tokens * token_bytes])
        return views


def digest(views: Sequence[ByteArray], stats: TransferStats) -> int:
    """Return the digest of a frame's bytes."""
    started = time.perf_counter_ns()
    hasher = xxhash.xxh3_64()
    for view in views:
        hasher.update(view.data)
    stats.verify_ns += time.perf_counter_ns() - started
    return hasher.intdigest()


def copy(sources: Sequence[ByteArray], targets: Sequence[ByteArray], stats: TransferStats, *, digests: bool) -> int:
    """Copy a frame's bytes from one arena to another and return the digest of what arrived (0 without `digests`)."""
    hasher = xxhash.xxh3_64()
    clock = time.perf_counter_ns
    for source, target in _pairs(sources, targets):
        started = clock()
        np.copyto(target, source)  # lets other threads run, which assigning to a memoryview does not
        copied = clock()
        stats.copy_ns += copied - started
        if digests:
            hasher.update(target.data)
            stats.verify_ns += clock() - copied
    return hasher.intdigest() if digests else 0


def _pairs(sources: Sequence[ByteArray], targets: Sequence[ByteArray]) -> list[tuple[ByteArray, ByteArray]]:
    """Cut both sides at each other's borders, and so that no piece is longer than PIECE_BYTES."""
    pairs: list[tuple[ByteArray, ByteArray]] = []
    remaining = iter(targets)
    target = next(remaining)
    for source in sources:
        while source.nbytes:
            if not target.nbytes:
                target = next(remaining)
            size = min(source.nbytes, target.nbytes, PIECE_BYTES)
            pairs.append((source[:size], target[:size]))
            source, target = source[size:], target[size:]
    return pairs
