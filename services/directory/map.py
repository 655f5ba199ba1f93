"""Block → who holds it, a bit for each holder and tier. Pure.

A block's holders are one integer. Equal integers are one object, so that a million blocks cost little more than their
hashes. A holder that goes is out of every answer at once: its bit is. The bit itself is cleared from the blocks by
`sweep`, a slice at a time, and used again after that.
"""

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from schemas.directory import HolderPrefix, Tier
from schemas.ids import BlockHash, WorkerId
from services.directory import limits

TIERS: tuple[Tier, ...] = ("arena", "memory", "disk", "remote")
"""All tiers, the fastest first."""
_TIER_BITS: dict[Tier, int] = {tier: 1 << rank for rank, tier in enumerate(TIERS)}


class Owner(NamedTuple):
    """Whose a bit is."""

    worker_id: WorkerId
    incarnation: str
    tier: Tier


@dataclass(slots=True)
class OpenRun:
    """A holder's run of blocks while `locate` walks along it. `tiers`: where it has the latest block; `slowest`: the
    rank of the slowest tier that any block of it must be read from."""

    owner: Owner
    first_block: int
    tiers: int = 0
    slowest: int = 0

    def close(self, end_block: int) -> HolderPrefix:
        return HolderPrefix(
            worker_id=self.owner.worker_id,
            incarnation=self.owner.incarnation,
            first_block=self.first_block,
            num_blocks=end_block - self.first_block,
            tier=TIERS[self.slowest],
        )


class BlockMap:
    """Bits are passed around as integers with one bit set. A worker has at most one incarnation among the shown."""

    def __init__(self) -> None:
        self._masks: dict[BlockHash, int] = {}
        self._shared: dict[int, int] = {}
        self._owners: list[Owner | None] = []
        self._shown = 0
        self._gone = 0
        """These bits are to be cleared from the blocks."""
        self._sweeping: list[BlockHash] = []
        self._swept_bits = 0
        """The sweep under way clears these bits; those that go meanwhile wait for the next."""

    @property
    def num_blocks(self) -> int:
        """Distinct blocks, with those of gone holders until they are swept."""
        return len(self._masks)

    @property
    def needs_sweep(self) -> bool:
        return bool(self._gone)

    @property
    def shown_bits(self) -> int:
        return self._shown

    def open(self, owner: Owner) -> int:
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

    def retire(self, bits: Iterable[int]) -> None:
        """Take these bits out of all answers, for good."""
        for bit in bits:
            self._shown &= ~bit
            self._gone |= bit

    def add(self, bit: int, hashes: Iterable[BlockHash], room: int) -> tuple[int, int]:
        """Set this bit in these blocks, in at most `room` that do not have it. Return in how many it was set, and in
        how many more there was no room for it."""
        num_added = num_left = 0
        masks, shared = self._masks, self._shared
        if len(shared) > limits.MAX_SHARED_MASKS:
            shared.clear()
        for block_hash in hashes:
            before = masks.get(block_hash, 0)
            mask = before | bit
            if mask == before:
                continue
            if num_added == room or (not before and len(masks) >= limits.MAX_BLOCKS):
                num_left += 1
                continue
            masks[block_hash] = shared.setdefault(mask, mask)
            num_added += 1
        return num_added, num_left

    def remove(self, bit: int, hashes: Iterable[BlockHash]) -> int:
        """Clear this bit from these blocks; return from how many."""
        num_removed = 0
        masks, shared = self._masks, self._shared
        if len(shared) > limits.MAX_SHARED_MASKS:
            shared.clear()
        for block_hash in hashes:
            before = masks.get(block_hash, 0)
            mask = before & ~bit
            if mask == before:
                continue
            if mask:
                masks[block_hash] = shared.setdefault(mask, mask)
            else:
                del masks[block_hash]
            num_removed += 1
        return num_removed

    def sweep(self, num_blocks: int) -> bool:
        """Clear gone bits from this many blocks. Returns whether there is more to do.

        One round goes over the blocks that there were at its beginning: nobody adds a bit that is gone to a later one.
        """
        if not self._swept_bits:
            self._swept_bits, self._sweeping = self._gone, list(self._masks) if self._gone else []
        self.remove(self._swept_bits, self._sweeping[-num_blocks:])
        del self._sweeping[-num_blocks:]
        if not self._sweeping:
            self._release(self._swept_bits)
            self._swept_bits = 0
        return bool(self._gone)

    def locate(self, hashes: Sequence[BlockHash]) -> tuple[HolderPrefix, ...]:
        """Return the prefixes of these blocks that somebody holds, then the runs that begin later; of each the longest
        first, and no more than `MAX_PREFIXES` and `MAX_LATER_RUNS`. A run is as long as it can be."""
        runs: list[HolderPrefix] = []
        open_runs: dict[WorkerId, OpenRun] = {}
        stored_before, before = 0, 0
        # Along the prompt the set of holders changes rarely; only where it does, runs begin and end. Equal sets are one
        # object (see above), so that a block is passed with one comparison of identities. Where sharing has begun anew
        # two equal sets may be two objects: then `changed` is 0, and nothing is missed.
        for at, block_hash in enumerate(hashes):
            stored = self._masks.get(block_hash, 0)
            if stored is stored_before:
                continue
            stored_before, mask = stored, stored & self._shown
            if changed := mask ^ before:
                runs += self._follow(open_runs, changed, at)
                before = mask
        runs += [run.close(len(hashes)) for run in open_runs.values()]
        prefixes = [run for run in runs if run.first_block == 0]
        later = [run for run in runs if run.first_block > 0]
        return (
            *heapq.nsmallest(limits.MAX_PREFIXES, prefixes, _longest_first),
            *heapq.nsmallest(limits.MAX_LATER_RUNS, later, _longest_first),
        )

    def check_integrity(self) -> None:
        """Assert that every block is somebody's, and every bit too."""
        owned = sum(1 << at for at, owner in enumerate(self._owners) if owner is not None)
        assert not self._shown & self._gone, "a bit is shown or gone"
        assert not (self._shown | self._gone) & ~owned, "every bit has an owner"
        assert all(mask and not mask & ~owned for mask in self._masks.values()), "no block without a holder"

    def _follow(self, open_runs: dict[WorkerId, OpenRun], changed: int, at: int) -> list[HolderPrefix]:
        """Begin, go on with or end the runs of those whose bits change at block `at`; return what has ended.

        A holder has a bit for each tier, so a run goes on while any of its bits is set: a block may lie in another tier
        than the one before it.
        """
        toggled: dict[WorkerId, int] = {}
        while changed:
            lowest = changed & -changed
            changed ^= lowest
            owner = self._owners[lowest.bit_length() - 1]
            assert owner is not None
            toggled[owner.worker_id] = toggled.get(owner.worker_id, 0) | _TIER_BITS[owner.tier]
            if owner.worker_id not in open_runs:
                open_runs[owner.worker_id] = OpenRun(owner, at)
        ended: list[HolderPrefix] = []
        for worker_id, tiers in toggled.items():
            run = open_runs[worker_id]
            run.tiers ^= tiers
            if run.tiers:
                run.slowest = max(run.slowest, _fastest(run.tiers))
            else:
                ended.append(open_runs.pop(worker_id).close(at))
        return ended

    def _release(self, bits: int) -> None:
        self._gone &= ~bits
        while bits:
            lowest = bits & -bits
            bits ^= lowest
            self._owners[lowest.bit_length() - 1] = None


def _fastest(tiers: int) -> int:
    return (tiers & -tiers).bit_length() - 1


def _longest_first(run: HolderPrefix) -> tuple[int, int, WorkerId]:
    return (-run.num_blocks, run.first_block, run.worker_id)
