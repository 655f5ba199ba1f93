"""Where a frame's bytes lie in an arena, and how they are copied and digested.

A frame's bytes are, layer by layer, the keys of its tokens and then their values, in the order of the tokens, of each
token the heads asked for: the same on both ends however each has cut them into segments and shards. Its digest is
over them in this order.
"""

import math
import mmap
import time
from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from dataplane.blocks.layout import SlotSpan
from dataplane.memory.arena import ByteArray
from dataplane.memory.checksum import Hasher
from dataplane.memory.extent import Frame
from dataplane.memory.rows import Int64s, Part, SequenceRuns

PIECE_BYTES = 512 << 10
"""What is copied before it is digested: it must still be in the core's cache then."""
STAGED_BYTES = 256 << 10
"""The same of parts of rows, which make a stop on their way."""

Rows = npt.NDArray[np.uint8]
"""[token, byte]. Contiguous where all heads of the arena are meant, else a part of each of its rows."""


class CopyTimes(Protocol):
    """Nanoseconds spent so far, to which whoever copies and digests adds its own."""

    copy_ns: int
    verify_ns: int


class FrameRows(NamedTuple):
    """A frame's rows in host memory. `stride`: from a row to the next."""

    array: ByteArray
    parts: list[Part]
    row_bytes: int
    stride: int

    @property
    def is_contiguous(self) -> bool:
        """Say whether rows of neighbouring slots follow each other: all heads of the arena are meant."""
        return self.stride == self.row_bytes

    def views(self) -> list[Rows]:
        """Return the rows as views, one for each span."""
        strides = (self.stride, 1)
        return [
            np.ndarray((num_rows, self.row_bytes), np.uint8, self.array, first_byte + slot * self.stride, strides)
            for first_byte, spans in self.parts
            for slot, num_rows in spans
        ]

    def pieces(self) -> Iterator[ByteArray]:
        """Yield the bytes piece by piece, a piece until the next one."""
        if self.is_contiguous:
            for first_byte, spans in self.parts:
                for slot, num_rows in spans:
                    at = first_byte + slot * self.stride
                    yield self.array[at : at + num_rows * self.stride]
        else:
            memory, indices = self.cells(self.cell_bytes)
            yield from (cells.view(np.uint8) for cells, _ in _staged(memory, indices))

    @property
    def cell_bytes(self) -> int:
        """The largest size of cells of which all rows are made, and what lies between them."""
        return math.gcd(self.row_bytes, self.stride, *(first_byte for first_byte, _ in self.parts))

    def cells(self, size: int) -> tuple[npt.NDArray[np.void], Int64s]:
        """Return the memory as cells of this size, and which of them are the frame's, in its order."""
        of_row = np.arange(self.row_bytes // size)
        of_spans: dict[int, Int64s] = {}
        indices: list[Int64s] = []
        for first_byte, spans in self.parts:
            if id(spans) not in of_spans:
                slots = np.fromiter(chain.from_iterable(range(slot, slot + num) for slot, num in spans), np.int64)
                of_spans[id(spans)] = (slots[:, np.newaxis] * (self.stride // size) + of_row).reshape(-1)
            indices.append(of_spans[id(spans)] + first_byte // size)
        memory = self.array[: self.array.nbytes // size * size]
        return memory.view(f"V{size}"), np.concatenate(indices)


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
        return FrameRows(self.array, self.runs.parts(frame), self.runs.row_bytes, self.runs.stride)

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
    return FrameRows(array, [(part * num_rows * row_bytes, spans) for part in range(num_parts)], row_bytes, row_bytes)


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
    if not source.is_contiguous or not target.is_contiguous:  # what is digested lies in one piece
        size = math.gcd(source.cell_bytes, target.cell_bytes)
        (memory, indices), (target_memory, target_indices) = source.cells(size), target.cells(size)
        for cells, at in _staged(memory, indices):
            np.put(target_memory, target_indices[at : at + len(cells)], cells, mode="clip")
            yield cells.view(np.uint8)
        return
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


def _staged(memory: npt.NDArray[np.void], indices: Int64s) -> Iterator[tuple[npt.NDArray[np.void], int]]:
    """Yield these cells one behind the other, as many as are staged at once, until the next, and which the first is."""
    size = memory.itemsize
    staging = Staging().borrow(max(size, STAGED_BYTES // size * size)).view(memory.dtype)
    for at in range(0, len(indices), len(staging)):
        taken = indices[at : at + len(staging)]
        cells = staging[: len(taken)]
        np.take(memory, taken, out=cells, mode="clip")  # "clip", here and above: into `out` itself; none is outside
        yield cells, at
