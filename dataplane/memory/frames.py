"""Where a frame's bytes lie in an arena, and how they are copied and digested.

A frame's bytes are, layer by layer, the keys of its tokens and then their values, in the order of the tokens: the same
on both ends however each has cut them into segments. Its digest is over them in this order.
"""

import mmap
import time
from collections.abc import Iterator
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from dataplane.blocks.layout import SlotSpan
from dataplane.memory.arena import ByteArray
from dataplane.memory.checksum import Hasher
from dataplane.memory.extent import Frame
from dataplane.memory.rows import Part, SequenceRuns

PIECE_BYTES = 512 << 10
"""What is copied before it is digested: it must still be in the core's cache then."""

Rows = npt.NDArray[np.uint8]
"""[token, byte]."""


class CopyTimes(Protocol):
    """Nanoseconds spent so far, to which whoever copies and digests adds its own."""

    copy_ns: int
    verify_ns: int


class FrameRows(NamedTuple):
    """A frame's rows in host memory; those of neighbouring slots follow each other."""

    array: ByteArray
    parts: list[Part]
    row_bytes: int

    def views(self) -> list[Rows]:
        """Return the rows as views, one for each span."""
        return [piece.reshape(-1, self.row_bytes) for piece in self.pieces()]

    def pieces(self) -> Iterator[ByteArray]:
        """Yield the bytes, a piece for each span."""
        for first_byte, spans in self.parts:
            for slot, num_rows in spans:
                at = first_byte + slot * self.row_bytes
                yield self.array[at : at + num_rows * self.row_bytes]


class Memory(Protocol):
    """Where a sequence's rows are, as the host reads and writes them. For one thread."""

    def rows(self, frame: Frame) -> FrameRows:
        """Return where the host finds a frame's bytes, or puts them, until the next call. Raises MemoryFailedError."""
        ...

    def written(self, frame: Frame) -> None:
        """The host has put the bytes of the last frame there. Raises MemoryFailedError."""
        ...

    def close(self) -> None:
        """Nothing of it is used any more."""
        ...


class SequenceMemory:
    """A sequence's rows in host memory, an arena that they keep alive. Raises ValueError when that is smaller than its
    shape says."""

    def __init__(self, array: ByteArray, runs: SequenceRuns) -> None:
        if runs.shape.arena_bytes > array.nbytes:
            raise ValueError(f"{runs.shape.num_blocks} blocks do not fit into {array.nbytes} bytes")
        self.array = array
        self.runs = runs

    def rows(self, frame: Frame) -> FrameRows:
        """Return where the frame's bytes are."""
        return FrameRows(self.array, self.runs.parts(frame), self.runs.row_bytes)

    def written(self, frame: Frame) -> None:
        """It is where it belongs."""

    def close(self) -> None:
        """Nothing is held."""


class Staging:
    """Memory between an arena and a wire, used again for each frame. For one thread.

    It begins at a page's start, as an arena does: AMD's processors copy half as fast, or slower, to where the target
    lies a few bytes behind the source, counted from their pages' starts (`rep movsb`, glibc's choice from 2 KiB on).
    """

    def __init__(self) -> None:
        self._memory: ByteArray = np.empty(0, np.uint8)

    def borrow(self, num_bytes: int) -> ByteArray:
        """Return that many bytes; what was taken before is void."""
        if self._memory.nbytes < num_bytes:
            memory = np.empty(num_bytes + mmap.PAGESIZE, np.uint8)
            self._memory = memory[-memory.ctypes.data % mmap.PAGESIZE :]
        return self._memory[:num_bytes]


def packed_rows(array: ByteArray, row_bytes: int, num_parts: int = 1) -> FrameRows:
    """Return rows that fill the array, one behind the other."""
    num_rows = array.nbytes // row_bytes // num_parts
    spans = [SlotSpan(0, num_rows)]
    return FrameRows(array, [(part * num_rows * row_bytes, spans) for part in range(num_parts)], row_bytes)


def gather(source: FrameRows, target: ByteArray) -> None:
    """Copy the rows into `target`, which has room for exactly these."""
    at = 0
    for piece in source.pieces():
        target[at : at + piece.nbytes] = piece
        at += piece.nbytes
    assert at == target.nbytes, f"{at} bytes in {target.nbytes}"


def scatter(source: ByteArray, target: FrameRows) -> None:
    """Copy `source`, which has exactly their bytes, into the rows."""
    for _ in _copied(packed_rows(source, target.row_bytes, len(target.parts)), target):
        pass


def digest(rows: FrameRows, times: CopyTimes, hasher: Hasher | None) -> int:
    """Return the digest of a frame's bytes (0 without a `hasher`, which is new)."""
    if hasher is None:
        return 0
    started = time.perf_counter_ns()
    for piece in rows.pieces():
        hasher.update(piece.data)
    times.verify_ns += time.perf_counter_ns() - started
    return hasher.intdigest()


def copy(source: FrameRows, target: FrameRows, times: CopyTimes, hasher: Hasher | None) -> int:
    """Copy a frame's bytes from one arena to another and return the digest of what arrived (0 without a `hasher`, which
    is new)."""
    clock = time.perf_counter_ns
    started, verify_ns = clock(), 0
    for arrived in _copied(source, target):
        if hasher is not None:
            copied = clock()
            hasher.update(arrived.data)
            verify_ns += clock() - copied
    times.verify_ns += verify_ns
    times.copy_ns += clock() - started - verify_ns
    return 0 if hasher is None else hasher.intdigest()


def _copied(source: FrameRows, target: FrameRows) -> Iterator[ByteArray]:
    """Copy the rows; yield what has arrived, piece by piece, a piece until the next one."""
    row_bytes = source.row_bytes
    pairs: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    for (first_byte, spans), (target_byte, target_spans) in zip(source.parts, target.parts, strict=True):
        key = (id(spans), id(target_spans))
        if key not in pairs:
            pairs[key] = _pairs(spans, target_spans, max(1, PIECE_BYTES // row_bytes))
        for slot, target_slot, num_rows in pairs[key]:
            at, into = first_byte + slot * row_bytes, target_byte + target_slot * row_bytes
            arrived = target.array[into : into + num_rows * row_bytes]
            arrived[...] = source.array[at : at + num_rows * row_bytes]  # a memoryview would not let other threads run
            yield arrived


def _pairs(spans: list[SlotSpan], others: list[SlotSpan], max_rows: int) -> list[tuple[int, int, int]]:
    """Return both cut at each other's borders, and so that none has more than `max_rows`: the slots, and how many."""
    pairs: list[tuple[int, int, int]] = []
    remaining = iter(others)
    other_slot, num_others = next(remaining, (0, 0))
    for slot, num_rows in spans:
        while num_rows:
            if not num_others:
                other_slot, num_others = next(remaining)
            size = min(num_rows, num_others, max_rows)
            pairs.append((slot, other_slot, size))
            slot, num_rows = slot + size, num_rows - size
            other_slot, num_others = other_slot + size, num_others - size
    return pairs
