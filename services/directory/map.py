"""Block → who holds it, a bit for each holder and tier. Pure.

A block's holders are one integer. Blocks that the same holders have share it, under a number in the table of blocks.
Beside that number, in the same four bytes, stands how often the block was asked for: its heat. A holder that goes is
out of every answer at once: its bit is. The bit itself is cleared from the blocks by `sweep`, a slice at a time, and
used again after that.
"""

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from schemas.block import BLOCK_HASH_BYTES, split_hashes
from schemas.directory import HolderPrefix, Tier
from schemas.ids import WorkerId
from services.directory import limits
from services.directory.holder_sets import NOBODY, HolderSets
from services.directory.table import BlockTable, Slots

TIERS: tuple[Tier, ...] = (Tier.ARENA, Tier.MEMORY, Tier.DISK, Tier.REMOTE, Tier.OTHER)
"""All tiers, the fastest first."""
_TIER_BITS: dict[Tier, int] = {tier: 1 << rank for rank, tier in enumerate(TIERS)}


FEW_BLOCKS = 16
"""So many are looked up one by one: an operation on arrays costs as much as some of them."""

NUMBER = np.uint32(2**24 - 1)
"""These bits of a value in the table are the number of a set, of which there are far fewer; the others are the heat."""
MAX_HEAT = 255

Numbers = NDArray[np.uint32]


class Owner(NamedTuple):
    """Whose a bit is."""

    worker_id: WorkerId
    incarnation: str
    tier: Tier


@dataclass(slots=True)
class Run:
    """A holder's run of blocks, while `locate` walks along it and after. `tiers`: where it has the latest block;
    `slowest`: the rank of the slowest tier that any block of it must be read from."""

    owner: Owner
    first_block: int
    tiers: int = 0
    slowest: int = 0
    num_blocks: int = 0

    def as_message(self) -> HolderPrefix:
        return HolderPrefix(
            worker_id=self.owner.worker_id,
            incarnation=self.owner.incarnation,
            first_block=self.first_block,
            num_blocks=self.num_blocks,
            tier=TIERS[self.slowest],
        )


class Changed(NamedTuple):
    """In how many blocks a bit was set or cleared, and in how many it was not, as a bound is reached."""

    num_changed: int
    num_left: int


class BlockMap:
    """Bits are passed around as integers with one bit set, hashes joined. A worker has at most one incarnation among
    the shown."""

    def __init__(self) -> None:
        self._table = BlockTable(limits.MAX_BLOCKS)
        self._heat = self._table.values.view(np.uint8)[3::4]
        """The last byte of each slot's value."""
        self._num_asked = 0
        """So many blocks were asked for since heat was halved."""
        self._sets = HolderSets()
        self._owners: list[Owner | None] = []
        self._shown = 0
        self._tiers_of: dict[WorkerId, int] = {}
        """Each worker's bits among the shown."""
        self._several_tiers = 0
        """The shown bits of workers with more than one; also one that is left of several."""
        self._gone = 0
        """These bits are to be cleared from the blocks."""
        self._swept_bits = 0
        """The sweep under way clears these bits; those that go meanwhile wait for the next."""
        self._next_slot = 0

    @property
    def num_blocks(self) -> int:
        """Distinct blocks, with those of gone holders until they are swept."""
        return self._table.num_blocks

    @property
    def needs_sweep(self) -> bool:
        return bool(self._gone)

    @property
    def shown_bits(self) -> int:
        return self._shown

    def new_owner(self, owner: Owner) -> int:
        """Return a bit for this holder and tier. Nobody sees its blocks until `show`."""
        if None in self._owners:
            at = self._owners.index(None)
            self._owners[at] = owner
        else:
            at = len(self._owners)
            self._owners.append(owner)
        return 1 << at

    def show(self, bit: int) -> None:
        """Let `locate` answer with this bit's blocks."""
        self._shown |= bit
        (owner,) = self._owners_of(bit)
        self._tiers_of[owner.worker_id] = bits = self._tiers_of.get(owner.worker_id, 0) | bit
        if bits != bit:
            self._several_tiers |= bits

    def retire(self, bits: Iterable[int]) -> None:
        """Take these bits out of all answers, for good."""
        for bit in bits:
            (owner,) = self._owners_of(bit)
            if bit & self._shown:
                self._tiers_of[owner.worker_id] &= ~bit
                if not self._tiers_of[owner.worker_id]:
                    del self._tiers_of[owner.worker_id]
            self._shown &= ~bit
            self._several_tiers &= ~bit
            self._gone |= bit

    def mark(self, bit: int, joined: bytes, room: int) -> Changed:
        """Set this bit in these blocks, in at most `room` that do not have it."""
        num_blocks = len(joined) // BLOCK_HASH_BYTES
        if num_blocks <= FEW_BLOCKS or num_blocks > min(room, limits.MAX_BLOCKS - self.num_blocks):
            return self._add_one_by_one(bit, joined, room)
        slots = self._find(joined)
        num_added, num_left = self._change(slots[slots >= 0], lambda mask: mask | bit)
        new = _chosen(joined, slots < 0)
        if new:
            number = self._sets.number_of(bit)
            if number is None:
                num_left += len(new) // BLOCK_HASH_BYTES
            else:
                num_new = self._table.insert(new, number)
                self._sets.count(number, num_new)
                num_added += num_new
        return Changed(num_added, num_left)

    def unmark(self, bit: int, joined: bytes) -> Changed:
        """Clear this bit from these blocks."""
        if len(joined) // BLOCK_HASH_BYTES <= FEW_BLOCKS:
            slots_of_few = (self._table.slot_of(block_hash) for block_hash in split_hashes(joined))
            outcomes = [self._change_one(slot, lambda mask: mask & ~bit) for slot in slots_of_few if slot >= 0]
            return Changed(outcomes.count(True), outcomes.count(None))
        slots = self._find(joined)
        return self._change(slots[slots >= 0], lambda mask: mask & ~bit)

    def sweep(self, num_slots: int) -> bool:
        """Clear gone bits from the blocks in that many slots of the table. Returns whether there is more to do.

        One round goes over all slots: nobody adds a bit that is gone to one that is behind it.
        """
        if not self._swept_bits:
            self._swept_bits, self._next_slot = self._gone, self._table.first_slot
        bits, masks = self._swept_bits, self._sets.masks
        slots = self._table.used(self._next_slot, num_slots)
        numbers = self._table.values[slots] & NUMBER
        touched = [number for number in np.unique(numbers).tolist() if masks[number] & bits]
        if touched:
            self._change(slots[np.isin(numbers, touched)], lambda mask: mask & ~bits, is_bounded=False)
        self._next_slot = min(self._next_slot + num_slots, 0) if self._next_slot < 0 else self._next_slot + num_slots
        if self._next_slot >= self._table.end_slot:
            self._release(bits)
            self._swept_bits = 0
        return bool(self._gone)

    def locate(self, joined: bytes) -> tuple[HolderPrefix, ...]:
        """Return the prefixes of these blocks that somebody holds, then the runs that begin later; of each the longest
        first, and no more than `MAX_PREFIXES` and `MAX_LATER_RUNS`. A run is as long as it can be, but for prompts
        whose holders change so often that the walk ends before the prompt does (`MAX_RUN_ENDS`). It counts what it is
        asked for (`heat`)."""
        # Look up each block's set of holders, and count the question as heat of the blocks that are known.
        slots = self._find(joined)
        numbers = self._numbers_in(slots)
        self._warm(slots[slots >= 0])
        # `prefixes`: bits of the one-tier holders that have every block so far. All other runs are in `open_runs`.
        runs: list[Run] = []
        open_runs: dict[WorkerId, Run] = {}
        ended_prefixes: list[tuple[int, int]] = []
        before, prefixes, num_ends, end_block = 0, 0, 0, len(slots)
        # Along the prompt the set of holders changes rarely; only where it does, runs begin and end. Most of them are
        # prefixes of holders with one tier: these are followed all at once, in one integer.
        places = np.flatnonzero(np.diff(numbers, prepend=NOBODY))
        at: int
        number: int
        for at, number in zip(places.tolist(), numbers[places].tolist(), strict=True):
            # Two sets may differ only in bits that are not shown: then no run begins or ends here.
            mask = self._sets.masks[number] & self._shown
            changed, before = mask ^ before, mask
            if not changed:
                continue
            if num_ends > limits.MAX_RUN_ENDS:
                end_block = at
                break
            num_ends += changed.bit_count()
            # At block 0 each holder with one tier begins a prefix; later a prefix can only end.
            if at == 0:
                prefixes = mask & ~self._several_tiers
                changed ^= prefixes
            elif ended := prefixes & ~mask:
                ended_prefixes.append((at, ended))
                prefixes ^= ended
                changed ^= ended
            if changed:
                runs += self._follow(open_runs, changed, at)
        # Whatever is still open ends where the walk has ended.
        for run in open_runs.values():
            run.num_blocks = end_block - run.first_block
        runs += open_runs.values()
        # Make runs of the prefix bits, the longest first, and look up no more owners than the answer has room for.
        num_left = limits.MAX_PREFIXES
        for at, ended in [(end_block, prefixes), *reversed(ended_prefixes)]:
            if num_left > 0:
                owners = self._owners_of(ended)
                runs += [Run(owner, 0, slowest=TIERS.index(owner.tier), num_blocks=at) for owner in owners]
                num_left -= len(owners)
        longest = (
            *heapq.nsmallest(limits.MAX_PREFIXES, (run for run in runs if run.first_block == 0), _longest_first),
            *heapq.nsmallest(limits.MAX_LATER_RUNS, (run for run in runs if run.first_block > 0), _longest_first),
        )
        return tuple(run.as_message() for run in longest)

    def heat(self, bits: int, joined: bytes) -> bytes:
        """Return how often `locate` asked for each of these blocks lately, a byte each, `MAX_HEAT` at most; 0 for one
        that has none of these bits.

        Who asks for a block asks for those before it in its prompt too: these are as hot, unless they came later.
        """
        if not joined:
            return b""
        slots = self._find(joined)
        distinct, which = _distinct(self._numbers_in(slots))
        numbers: list[int] = distinct.tolist()
        is_held = np.array([self._sets.masks[number] & bits != 0 for number in numbers])[which]
        return (self._heat[slots] * is_held).tobytes()

    def check_integrity(self) -> None:
        """Assert that every block is somebody's, and every bit too."""
        owned = sum(1 << at for at, owner in enumerate(self._owners) if owner is not None)
        assert not self._shown & self._gone, "a bit is shown or gone"
        assert not (self._shown | self._gone) & ~owned, "every bit has an owner"
        self._table.check_integrity()
        numbers, counts = np.unique(self._table.values[self._table.all_used()] & NUMBER, return_counts=True)
        self._sets.check_integrity(dict(zip(numbers.tolist(), counts.tolist(), strict=True)))
        assert all(not self._sets.masks[number] & ~owned for number in numbers.tolist()), "no block of nobody"

    def _find(self, joined: bytes) -> Slots:
        return self._table.find(joined) if joined else np.zeros(0, np.int64)

    def _numbers_in(self, slots: Slots) -> Numbers:
        """Return the set of each of these blocks; of one that nobody has `NOBODY`."""
        return np.where(slots < 0, np.uint32(NOBODY), self._table.values[slots] & NUMBER)

    def _warm(self, slots: Slots) -> None:
        """Count that the blocks in these slots were asked for; all counts are halved now and then, so that heat fades,
        and together, so that they still compare."""
        heat = self._heat[slots]
        self._heat[slots] = heat + (heat < MAX_HEAT)
        self._num_asked += len(slots)
        if self._num_asked > limits.FADE_AFTER * self.num_blocks:
            self._num_asked = 0
            for part in (slice(0, self._table.end_slot), self._table.spares):
                self._heat[part] >>= 1

    def _add_one_by_one(self, bit: int, joined: bytes, room: int) -> Changed:
        """As `mark`: quicker for few blocks, and in order, so that the first are known where not all may be."""
        num_added = num_left = 0
        for block_hash in split_hashes(joined):
            slot = self._table.slot_of(block_hash)
            if slot >= 0:
                if self._sets.masks[self._table.values[slot] & NUMBER] & bit:
                    continue
                is_added = num_added < room and self._change_one(slot, lambda mask: mask | bit)
            elif is_added := num_added < room and self.num_blocks < limits.MAX_BLOCKS:
                number = self._sets.number_of(bit)
                if is_added := number is not None:
                    self._table.put(block_hash, number)
                    self._sets.count(number, 1)
            num_added += bool(is_added)
            num_left += not is_added
        return Changed(num_added, num_left)

    def _change_one(self, slot: int, change: Callable[[int], int]) -> bool | None:
        """As `_change`, for one block. Returns whether its set is another now; None: that would be one too many."""
        sets, value = self._sets, int(self._table.values[slot])
        old = value & int(NUMBER)
        mask = change(sets.masks[old])
        if mask == sets.masks[old]:
            return False
        new = sets.number_of(mask)
        if new is None:
            return None
        sets.count(new, 1)
        sets.count(old, -1)
        self._table.values[slot] = value - old + new
        if new == NOBODY:
            self._table.free(np.array([slot]))
        return True

    def _change(self, slots: Slots, change: Callable[[int], int], *, is_bounded: bool = True) -> Changed:
        """Give the blocks in these slots other sets. One that is named twice is changed once. A block that nobody has
        any more goes. Those whose new set would be one too many keep theirs."""
        if not len(slots):
            return Changed(0, 0)
        # Compute the new set once for each distinct old one, and keep only the blocks whose set changes.
        values, sets = self._table.values, self._sets
        before = values[slots]
        distinct, which = _distinct(before & NUMBER)
        old_numbers: list[int] = distinct.tolist()
        new_masks = [change(sets.masks[number]) for number in old_numbers]
        is_other = np.array([new != sets.masks[old] for old, new in zip(old_numbers, new_masks, strict=True)])[which]
        slots, which, before = slots[is_other], which[is_other], before[is_other]
        # Whoever is named more than once writes here, and the last finds its own: the others are passed over.
        order = np.arange(len(slots), dtype=values.dtype)
        values[slots] = order
        is_last = values[slots] == order
        slots, which, before = slots[is_last], which[is_last], before[is_last]
        # Count the blocks into new sets before they leave the old ones: the number of a set without blocks is reused.
        new_numbers, num_left = list[int](), 0
        counts = np.bincount(which, minlength=len(old_numbers)).tolist()
        for old, mask, num_blocks in zip(old_numbers, new_masks, counts, strict=True):
            new = sets.number_of(mask, is_bounded=is_bounded) if num_blocks else old
            if new is None:
                new, num_left = old, num_left + num_blocks
            elif num_blocks:
                sets.count(new, num_blocks)
            new_numbers.append(new)
        for old, new, num_blocks in zip(old_numbers, new_numbers, counts, strict=True):
            if new != old:
                sets.count(old, -num_blocks)
        # Write the new numbers and keep the heat beside them; free the slots of blocks that nobody has any more.
        numbers = np.array(new_numbers, dtype=values.dtype)[which]
        values[slots] = numbers | (before & ~NUMBER)
        self._table.free(slots[numbers == NOBODY])
        return Changed(len(slots) - num_left, num_left)

    def _follow(self, open_runs: dict[WorkerId, Run], changed: int, at: int) -> list[Run]:
        """Begin, go on with or end the runs of those whose bits change at block `at`; return what has ended.

        A holder has a bit for each tier, so a run goes on while any of its bits is set: a block may lie in another tier
        than the one before it.
        """
        toggled: list[Run] = []
        for owner in self._owners_of(changed):
            run = open_runs.get(owner.worker_id)
            if run is None:
                run = open_runs[owner.worker_id] = Run(owner, at)
            run.tiers ^= _TIER_BITS[owner.tier]
            toggled.append(run)
        ended: list[Run] = []
        for run in toggled:
            if run.tiers:
                run.slowest = max(run.slowest, _fastest(run.tiers))
            elif not run.num_blocks:
                run.num_blocks = at - run.first_block
                ended.append(open_runs.pop(run.owner.worker_id))
        return ended

    def _owners_of(self, bits: int) -> list[Owner]:
        found: list[Owner] = []
        while bits:
            place = bits.bit_length() - 1
            bits ^= 1 << place
            owner = self._owners[place]
            assert owner is not None
            found.append(owner)
        return found

    def _release(self, bits: int) -> None:
        self._gone &= ~bits
        self._owners = [None if bits >> at & 1 else owner for at, owner in enumerate(self._owners)]


def _chosen(joined: bytes, which: NDArray[np.bool_]) -> bytes:
    """Return those of these hashes, joined."""
    if not which.any():
        return b""
    return joined if which.all() else np.frombuffer(joined, f"V{BLOCK_HASH_BYTES}")[which].tobytes()


def _distinct(numbers: Numbers) -> tuple[Numbers, NDArray[np.int64]]:
    """Return the distinct ones of some numbers, and which of these each number is."""
    if (numbers == numbers[0]).all():  # as most of what comes in one message
        return numbers[:1], np.zeros(len(numbers), np.int64)
    return np.unique(numbers, return_inverse=True)


def _fastest(tiers: int) -> int:
    return (tiers & -tiers).bit_length() - 1


def _longest_first(run: Run) -> tuple[int, int, WorkerId]:
    return (-run.num_blocks, run.first_block, run.owner.worker_id)
