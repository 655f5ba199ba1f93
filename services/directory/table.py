"""Block hash → a number, for ten million blocks in arrays. Pure.

A hash belongs to one bucket of `BUCKET_SLOTS` slots, so that any number of hashes is looked up in the same few
operations on arrays. What finds its bucket full lies in a spare slot, under a dict: hashes that somebody has chosen to
fall into one bucket cost what a dict costs. The table grows by splitting a few buckets with each addition (linear
hashing): it is never moved as a whole. Its arrays are mapped for the largest size at once, and take memory only as far
as they are written.
"""

import numpy as np
from numpy.typing import NDArray

from schemas.block import BLOCK_HASH_BYTES

BUCKET_SLOTS = 16
FULL_BUCKET = 10.5
"""With so many blocks a bucket, on average, the number of buckets begins to double."""
SPLITS_A_BLOCK = 4
"""Buckets that are split with each block that is added, until their number has doubled: quickly, as those that are not
split yet fill up meanwhile."""
FIRST_BUCKETS = 4

Slots = NDArray[np.int64]
"""Where blocks lie. Good until the next `insert`, which may split their buckets."""


class BlockTable:
    """`values` has a number for each slot in use, never 0."""

    def __init__(self, max_blocks: int) -> None:
        self._max_buckets = FIRST_BUCKETS
        while self._max_buckets * FULL_BUCKET < max_blocks:
            self._max_buckets *= 2
        self._first_spare = self._max_buckets * BUCKET_SLOTS
        num_slots = self._first_spare + max_blocks
        self._low = np.zeros(num_slots, "<u8")
        """The hashes' first halves; 0 in a bucket: the slot is free. A hash that begins so lies in a spare slot."""
        self._high = np.zeros(num_slots, "<u8")
        self.values = np.zeros(num_slots, "<u4")
        self._has_spilled = np.zeros(self._max_buckets, np.bool_)
        """Some block of this bucket, or of the one it was split from, has come to lie in a spare slot."""
        self._spilled: dict[bytes, int] = {}
        """Spare slots by hash."""
        self._free_spares: list[int] = []
        self._num_spares = 0
        self._level = FIRST_BUCKETS
        self._num_split = 0
        """So many of the first `_level` buckets are split: each into itself and the one `_level` further on."""
        self.num_blocks = 0

    @property
    def first_slot(self) -> int:
        """Where `used` begins."""
        return -self._num_spares

    @property
    def end_slot(self) -> int:
        return (self._level + self._num_split) * BUCKET_SLOTS

    @property
    def spares(self) -> slice:
        """The spare slots that were ever in use; those of buckets are the first `end_slot`."""
        return slice(self._first_spare, self._first_spare + self._num_spares)

    def used(self, first: int, num_slots: int) -> Slots:
        """Return those slots in use of `num_slots` that follow `first`, beginning at `first_slot`, up to `end_slot`.

        The spare ones come first: from there blocks are never moved, and from a bucket only to a later one.
        """
        if first < 0:
            end = self._first_spare - first
            start = max(self._first_spare, end - num_slots)
        else:
            start, end = first, min(first + num_slots, self.end_slot)
        return np.flatnonzero(self.values[start:end]) + start

    def all_used(self) -> Slots:
        """Return all slots in use."""
        return np.concatenate([self.used(0, self.end_slot), self.used(self.first_slot, self._num_spares)])

    def find(self, joined: bytes) -> Slots:
        """Return the slot of each of these hashes; -1: it is not in the table."""
        low, high = _halves(joined)
        buckets = self._buckets_of(low)
        slots = buckets * BUCKET_SLOTS + (self._rows[buckets] == low[:, None]).argmax(axis=1)
        is_absent = (self._low[slots] != low) | (self._high[slots] != high) | (low == 0)
        slots[is_absent] = -1
        if self._spilled:
            for at in np.flatnonzero(is_absent & self._has_spilled[buckets]).tolist():
                slots[at] = self._spilled.get(_hash_at(joined, at), -1)
        return slots

    def slot_of(self, block_hash: bytes) -> int:
        """Return the slot of one hash, -1: it is not in the table. `find` is quicker for more than a few."""
        low = int.from_bytes(block_hash[:8], "little")
        if low:
            first = self._bucket_of(low) * BUCKET_SLOTS
            row = self._low[first : first + BUCKET_SLOTS].tolist()
            if low in row and self._high[slot := first + row.index(low)] == int.from_bytes(block_hash[8:], "little"):
                return slot
        return self._spilled.get(block_hash, -1)

    def put(self, block_hash: bytes, value: int) -> None:
        """Put one hash in, which is not there. `insert` is quicker for more than a few."""
        self._grow(1)
        low = int.from_bytes(block_hash[:8], "little")
        bucket = self._bucket_of(low)
        row = self._low[bucket * BUCKET_SLOTS : (bucket + 1) * BUCKET_SLOTS].tolist()
        if not low or low in row or 0 not in row:
            self._spill(block_hash, value)
            self._has_spilled[bucket] = True
            return
        slot = bucket * BUCKET_SLOTS + row.index(0)
        self._low[slot], self._high[slot], self.values[slot] = low, int.from_bytes(block_hash[8:], "little"), value
        self.num_blocks += 1

    def insert(self, joined: bytes, value: int) -> int:
        """Put these hashes in, none of which is there, and return how many: one that is named twice is put in once."""
        num_before = self.num_blocks
        self._grow(len(joined) // BLOCK_HASH_BYTES)
        low, high = _halves(joined)
        buckets = self._buckets_of(low)
        waiting, spilled = np.flatnonzero(low), [np.flatnonzero(low == 0)]
        while len(waiting):
            rows, mine = self._rows[buckets[waiting]], low[waiting]
            # One with the same first half is the same hash, which has come a round earlier, or is in the way.
            can_take = (rows == 0).any(axis=1) & ~(rows == mine[:, None]).any(axis=1)
            looked_for = mine * ~can_take
            chosen = buckets[waiting] * BUCKET_SLOTS + (rows == looked_for[:, None]).argmax(axis=1)
            self._take(chosen[can_take], mine[can_take], high[waiting[can_take]], value)
            # Of several that have chosen one slot, one has it; the others try the next.
            is_in = (self._low[chosen] == mine) & (self._high[chosen] == high[waiting])
            spilled.append(waiting[~is_in & ~can_take])
            waiting = waiting[~is_in & can_take]
        for at in np.concatenate(spilled).tolist():
            self._spill(_hash_at(joined, at), value)
            self._has_spilled[buckets[at]] = True
        return self.num_blocks - num_before

    def free(self, slots: Slots) -> None:
        """Take out what is in these slots, each of which is in use and named once."""
        spares = slots[slots >= self._first_spare].tolist()
        for slot in spares:
            del self._spilled[self._low[slot : slot + 1].tobytes() + self._high[slot : slot + 1].tobytes()]
        self._free_spares += spares
        self._low[slots] = 0
        self.values[slots] = 0
        self.num_blocks -= len(slots)

    def check_integrity(self) -> None:
        """Assert that each block is found where it lies, and nothing lies anywhere else."""
        slots = self.all_used()
        assert len(slots) == self.num_blocks
        joined = np.stack([self._low[slots], self._high[slots]], axis=1).tobytes()
        assert np.array_equal(self.find(joined), slots) if joined else not self._spilled
        assert np.array_equal(np.flatnonzero(self._low[: self.end_slot]), slots[slots < self._first_spare])
        assert len(self._spilled) + len(self._free_spares) == self._num_spares

    @property
    def _rows(self) -> NDArray[np.uint64]:
        return self._low[: self._first_spare].reshape(-1, BUCKET_SLOTS)

    def _buckets_of(self, low: NDArray[np.uint64]) -> Slots:
        buckets = (low & np.uint64(self._level - 1)).astype(np.int64)
        if self._num_split:
            buckets += np.where(buckets < self._num_split, (low & np.uint64(self._level)).astype(np.int64), 0)
        return buckets

    def _bucket_of(self, low: int) -> int:
        bucket = low & (self._level - 1)
        return low & (2 * self._level - 1) if bucket < self._num_split else bucket

    def _take(self, slots: Slots, low: NDArray[np.uint64], high: NDArray[np.uint64], value: int) -> None:
        """Put a hash in each of these free slots. Of several for one slot only the last is put in."""
        order = np.arange(len(slots), dtype=np.uint32)
        self.values[slots] = order
        self.num_blocks += int(np.count_nonzero(self.values[slots] == order))
        self._low[slots], self._high[slots], self.values[slots] = low, high, value

    def _spill(self, block_hash: bytes, value: int) -> None:
        if block_hash in self._spilled:
            return  # named twice
        if not self._free_spares:
            self._free_spares.append(self._first_spare + self._num_spares)
            self._num_spares += 1
        slot = self._spilled[block_hash] = self._free_spares.pop()
        self._low[slot], self._high[slot] = (half[0] for half in _halves(block_hash))
        self.values[slot] = value
        self.num_blocks += 1

    def _grow(self, num_more: int) -> None:
        """Split buckets before that many blocks are added."""
        num_blocks = self.num_blocks + num_more
        num_missing = int(num_blocks / FULL_BUCKET) - self._level - self._num_split
        num_splits = max(num_missing, SPLITS_A_BLOCK * num_more)
        while num_splits > 0 and self._level < self._max_buckets:
            if not self._num_split and num_blocks <= FULL_BUCKET * self._level:
                return
            num_now = min(num_splits, self._level - self._num_split)
            self._split(self._num_split, self._num_split + num_now)
            num_splits -= num_now

    def _split(self, first: int, end: int) -> None:
        """Give half of the blocks of each of these buckets to a new one: each to the same slot there."""
        old = slice(first * BUCKET_SLOTS, end * BUCKET_SLOTS)
        new = slice((first + self._level) * BUCKET_SLOTS, (end + self._level) * BUCKET_SLOTS)
        goes = (self._low[old] & np.uint64(self._level)) != 0
        self._high[new] = self._high[old]
        for array in (self._low, self.values):
            array[new] = array[old] * goes
            array[old] *= ~goes
        self._has_spilled[first + self._level : end + self._level] = self._has_spilled[first:end]
        self._num_split = end
        if end == self._level:
            self._level, self._num_split = 2 * self._level, 0


def _halves(joined: bytes) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    halves = np.frombuffer(joined, "<u8")
    return halves[::2], halves[1::2]


def _hash_at(joined: bytes, at: int) -> bytes:
    return joined[at * BLOCK_HASH_BYTES : (at + 1) * BLOCK_HASH_BYTES]
