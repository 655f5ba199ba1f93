"""Where a frame's bytes lie in an arena, and how they are copied and digested.

A frame's bytes are, layer by layer, the keys of its tokens and then their values, in the order of the tokens, of each
token the heads asked for: the same on both ends however each has cut them into segments and shards. Its digest is
over them in this order.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from dataplane.blocks.layout import SlotSpan
from dataplane.memory.arena import ByteArray
from dataplane.memory.checksum import Hasher
from dataplane.memory.extent import Frame
from dataplane.memory.rows import SequenceRuns

PIECE_BYTES = 512 << 10
"""What is copied before it is digested: it must still be in the core's cache then."""

Rows = npt.NDArray[np.uint8]
"""[token, byte]. Contiguous where all heads of the arena are meant, else a part of each of its rows."""


class CopyTimes(Protocol):
    """Nanoseconds spent so far, to which whoever copies and digests adds its own."""

    copy_ns: int
    verify_ns: int


class SequenceMemory:
    """A sequence's rows as views of an arena in host memory, which they keep alive. Raises ValueError when the arena is
    smaller than its shape says."""

    def __init__(self, array: ByteArray, runs: SequenceRuns) -> None:
        if runs.shape.num_bytes > array.nbytes:
            raise ValueError(f"{runs.shape.num_blocks} blocks do not fit into {array.nbytes} bytes")
        self.runs = runs
        self.is_contiguous = self.runs.is_contiguous
        num_rows = runs.shape.num_bytes // runs.stride
        end = runs.row_offset + runs.row_bytes
        self._rows: Rows = array[: runs.shape.num_bytes].reshape(num_rows, runs.stride)[:, runs.row_offset : end]
        """All rows of the arena: a part begins at one of them, as each is a whole number of rows long."""

    def views(self, frame: Frame) -> list[Rows]:
        """Return the frame's bytes as views, in the frame's order."""
        return [rows for part in self.parts(frame) for rows in part]

    def parts(self, frame: Frame) -> Iterator[list[Rows]]:
        """Yield the views layer by layer, keys and values apart."""
        runs, all_rows = self.runs, self._rows
        spans: dict[int, list[SlotSpan]] = {}
        for part in runs.parts(frame):
            if part.group not in spans:
                spans[part.group] = runs.slot_spans(part.group, frame)
            first = (part.first_byte - runs.row_offset) // runs.stride
            yield [all_rows[first + slot : first + slot + num_tokens] for slot, num_tokens in spans[part.group]]


class Staging:
    """Memory between an arena and a wire, used again for each frame. For one thread."""

    def __init__(self) -> None:
        self._memory: ByteArray = np.empty(0, np.uint8)

    def take(self, num_bytes: int) -> ByteArray:
        """Return that many bytes; what was taken before is void."""
        if self._memory.nbytes < num_bytes:
            self._memory = np.empty(num_bytes, np.uint8)
        return self._memory[:num_bytes]


def gather(views: Iterable[Rows], target: ByteArray) -> None:
    """Copy the views' bytes into `target`, which has room for exactly these."""
    at = 0
    for rows in views:
        np.copyto(target[at : at + rows.size].reshape(rows.shape), rows)
        at += rows.size
    assert at == target.nbytes, f"{at} bytes in {target.nbytes}"


def scatter(source: ByteArray, views: Iterable[Rows]) -> None:
    """Copy `source`, which has exactly their bytes, into the views."""
    at = 0
    for rows in views:
        np.copyto(rows, source[at : at + rows.size].reshape(rows.shape))
        at += rows.size
    assert at == source.nbytes, f"{at} bytes of {source.nbytes}"


def digest(views: Sequence[Rows], times: CopyTimes, hasher: Hasher | None) -> int:
    """Return the digest of a frame's bytes (0 without a `hasher`, which is new)."""
    if hasher is None:
        return 0
    started = time.perf_counter_ns()
    for rows in views:
        if rows.flags.c_contiguous:
            hasher.update(rows.data)
        else:
            for piece in pieces(rows):
                hasher.update(np.ascontiguousarray(piece).data)
    times.verify_ns += time.perf_counter_ns() - started
    return hasher.intdigest()


def copy(sources: Iterable[Rows], targets: Sequence[Rows], times: CopyTimes, hasher: Hasher | None) -> int:
    """Copy a frame's bytes from one arena to another and return the digest of what arrived (0 without a `hasher`, which
    is new)."""
    clock = time.perf_counter_ns
    staging = Staging()
    for source, target in _pairs(sources, targets):
        started = clock()
        arrived = target
        if hasher is not None and not target.flags.c_contiguous:  # what is digested lies in one piece
            arrived = staging.take(source.size).reshape(source.shape)
            np.copyto(arrived, source)
            np.copyto(target, arrived)
        else:
            np.copyto(target, source)  # lets other threads run, which assigning to a memoryview does not
        copied = clock()
        times.copy_ns += copied - started
        if hasher is not None:
            hasher.update(arrived.data)
            times.verify_ns += clock() - copied
    return 0 if hasher is None else hasher.intdigest()


def pieces(rows: Rows) -> Iterator[Rows]:
    """Cut into pieces of at most PIECE_BYTES, or of one row."""
    size = max(1, PIECE_BYTES // rows.shape[1])
    for at in range(0, len(rows), size):
        yield rows[at : at + size]


def _pairs(sources: Iterable[Rows], targets: Sequence[Rows]) -> Iterator[tuple[Rows, Rows]]:
    """Cut both sides at each other's borders, and so that no piece is longer than PIECE_BYTES, or one row."""
    remaining = iter(targets)
    target = next(remaining)
    max_rows, nothing = max(1, PIECE_BYTES // target.shape[1]), target[:0]
    for source in sources:
        while size := len(source):
            if not len(target):
                target = next(remaining)
            if size == len(target) <= max_rows:  # most are alike: blocks that lie scattered on both sides
                yield source, target
                target = nothing
                break
            size = min(size, len(target), max_rows)
            yield source[:size], target[:size]
            source, target = source[size:], target[size:]
