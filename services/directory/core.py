"""Block → holders, from numbered worker events. Pure.

Each incarnation of a worker numbers its events from 1. An event out of turn means that something was missed: the
worker's inventory is read, and the events that came meanwhile are applied after it. A new incarnation's first word
drops what the old one held.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from schemas.block import split_hashes
from schemas.directory import BlocksEvicted, BlocksStored, HolderPrefix, Inventory
from schemas.ids import BlockHash, WorkerId
from schemas.worker import WorkerInfo, WorkerLeft

MAX_PENDING_EVENTS = 10_000
"""Events kept while an inventory is read; one more starts the reading anew."""

BlockEvent = BlocksStored | BlocksEvicted


@dataclass(slots=True, frozen=True)
class ReadInventoryOf:
    """Ask this worker for its inventory from `offset` on, and bring the page, or say that it failed."""

    worker_id: WorkerId
    incarnation: str
    offset: int = 0


@dataclass(slots=True, eq=False)
class Holder:
    """One incarnation of a worker. `sequence`: the last event in `blocks`. While `reading`, what comes is kept.
    `unread`: its inventory is needed and could not be had."""

    worker_id: WorkerId
    incarnation: str
    sequence: int = 0
    blocks: set[BlockHash] = field(default_factory=set[BlockHash])
    reading: bool = False
    unread: bool = False
    page_sequence: int | None = None
    page_blocks: set[BlockHash] = field(default_factory=set[BlockHash])
    pending: dict[int, BlockEvent] = field(default_factory=dict[int, BlockEvent])


class DirectoryCore:
    """The map. Every method returns the inventories to be read for it to be whole."""

    def __init__(self) -> None:
        self._holders: dict[WorkerId, Holder] = {}
        self._holders_of: dict[BlockHash, tuple[Holder, ...]] = {}
        self._ended: dict[tuple[WorkerId, str], None] = {}
        self._asked: set[tuple[WorkerId, str]] = set()
        """Ended incarnations that were heard of since: an answer proves that they live, a late message does not."""

    @property
    def num_blocks(self) -> int:
        """Distinct blocks that somebody holds."""
        return len(self._holders_of)

    @property
    def num_holders(self) -> int:
        return len(self._holders)

    def heard(self, info: WorkerInfo) -> list[ReadInventoryOf]:
        """A worker has said that it lives. An incarnation not known before is asked for what it holds."""
        if self._is_ended(info.worker_id, info.incarnation):
            return self._ask_ended(info.worker_id, info.incarnation)
        known = self._holders.get(info.worker_id)
        if known is not None and known.incarnation == info.incarnation:
            return self._start_reading(known) if known.unread else []
        return self._start_reading(self._replace(info.worker_id, info.incarnation))

    def changed(self, event: BlockEvent) -> list[ReadInventoryOf]:
        """Take in what a worker stored or evicted."""
        if self._is_ended(event.worker_id, event.incarnation):
            return []
        holder = self._holders.get(event.worker_id)
        if holder is None or holder.incarnation != event.incarnation:
            holder = self._replace(event.worker_id, event.incarnation)
        if event.sequence <= holder.sequence:
            return []  # heard before, or in the inventory already
        holder.pending[event.sequence] = event
        if not holder.reading:
            self._apply_pending(holder)
        if not holder.pending:
            return []
        if holder.reading and len(holder.pending) <= MAX_PENDING_EVENTS:
            return []
        return self._start_reading(holder)

    def inventory(self, page: Inventory) -> list[ReadInventoryOf]:
        """Take in a page of an inventory that was asked for. Pages of different moments make a new start."""
        key = (page.worker_id, page.incarnation)
        if key in self._asked:
            self._asked.discard(key)
            self._ended.pop(key, None)
            return self._start_reading(self._replace(*key))
        holder = self._holders.get(page.worker_id)
        if holder is None or holder.incarnation != page.incarnation or not holder.reading:
            return []
        if holder.page_sequence not in (None, page.sequence):
            return self._start_reading(holder)
        holder.page_sequence = page.sequence
        holder.page_blocks.update(split_hashes(page.block_hashes))
        if page.next_offset is not None:
            return [ReadInventoryOf(holder.worker_id, holder.incarnation, page.next_offset)]
        self._adopt_pages(holder)
        return self._start_reading(holder) if holder.pending else []

    def inventory_failed(self, failed: ReadInventoryOf) -> None:
        """The worker did not answer. Its next word asks again."""
        self._asked.discard((failed.worker_id, failed.incarnation))
        holder = self._holders.get(failed.worker_id)
        if holder is not None and holder.incarnation == failed.incarnation:
            holder.reading, holder.unread = False, True

    def left(self, event: WorkerLeft) -> None:
        """This incarnation is over: what it held is gone, and nothing late brings it back."""
        self._ended[(event.worker_id, event.incarnation)] = None
        self._asked.discard((event.worker_id, event.incarnation))
        if len(self._ended) > MAX_PENDING_EVENTS:
            oldest = next(iter(self._ended))
            del self._ended[oldest]
            self._asked.discard(oldest)
        holder = self._holders.get(event.worker_id)
        if holder is not None and holder.incarnation == event.incarnation:
            self._drop(holder)

    def locate(self, hashes: Sequence[BlockHash]) -> tuple[HolderPrefix, ...]:
        """Return how long a prefix of these blocks each holder has; the longest first, holders of nothing left out."""
        found: list[HolderPrefix] = []
        holding: tuple[Holder, ...] = self._holders_of.get(hashes[0], ()) if hashes else ()
        for length, block_hash in enumerate(hashes[1:], start=1):
            still = set(self._holders_of.get(block_hash, ()))
            found += [_prefix(holder, length) for holder in holding if holder not in still]
            holding = tuple(holder for holder in holding if holder in still)
            if not holding:
                break
        found += [_prefix(holder, len(hashes)) for holder in holding]
        return tuple(reversed(found))

    def check_integrity(self) -> None:
        """Assert that both maps say the same."""
        pairs = {(holder.worker_id, b) for holder in self._holders.values() for b in holder.blocks}
        assert pairs == {(h.worker_id, b) for b, holders in self._holders_of.items() for h in holders}
        assert all(self._holders_of.values())

    def _is_ended(self, worker_id: WorkerId, incarnation: str) -> bool:
        return (worker_id, incarnation) in self._ended

    def _ask_ended(self, worker_id: WorkerId, incarnation: str) -> list[ReadInventoryOf]:
        """It was declared dead and speaks, or the message is late: only the worker can say which."""
        if (worker_id, incarnation) in self._asked:
            return []
        self._asked.add((worker_id, incarnation))
        return [ReadInventoryOf(worker_id, incarnation)]

    def _replace(self, worker_id: WorkerId, incarnation: str) -> Holder:
        old = self._holders.get(worker_id)
        if old is not None:
            self._drop(old)
            self._ended[(worker_id, old.incarnation)] = None
        holder = self._holders[worker_id] = Holder(worker_id, incarnation)
        return holder

    def _drop(self, holder: Holder) -> None:
        for block_hash in list(holder.blocks):
            self._remove(holder, block_hash)
        del self._holders[holder.worker_id]

    def _start_reading(self, holder: Holder) -> list[ReadInventoryOf]:
        holder.reading = True
        holder.page_sequence = None
        holder.page_blocks = set()
        while len(holder.pending) > MAX_PENDING_EVENTS:
            del holder.pending[min(holder.pending)]
        return [ReadInventoryOf(holder.worker_id, holder.incarnation)]

    def _adopt_pages(self, holder: Holder) -> None:
        """Make the inventory the truth, and apply what came after it."""
        assert holder.page_sequence is not None
        for block_hash in holder.blocks - holder.page_blocks:
            self._remove(holder, block_hash)
        for block_hash in holder.page_blocks - holder.blocks:
            self._add(holder, block_hash)
        holder.sequence = max(holder.sequence, holder.page_sequence)
        holder.reading, holder.unread, holder.page_sequence, holder.page_blocks = False, False, None, set()
        holder.pending = {n: event for n, event in holder.pending.items() if n > holder.sequence}
        self._apply_pending(holder)

    def _apply_pending(self, holder: Holder) -> None:
        """Apply the events that are next in turn; a gap leaves the rest."""
        while (event := holder.pending.pop(holder.sequence + 1, None)) is not None:
            holder.sequence += 1
            for block_hash in split_hashes(event.block_hashes):
                if isinstance(event, BlocksStored):
                    self._add(holder, block_hash)
                else:
                    self._remove(holder, block_hash)

    def _add(self, holder: Holder, block_hash: BlockHash) -> None:
        if block_hash not in holder.blocks:
            holder.blocks.add(block_hash)
            self._holders_of[block_hash] = (*self._holders_of.get(block_hash, ()), holder)

    def _remove(self, holder: Holder, block_hash: BlockHash) -> None:
        if block_hash not in holder.blocks:
            return
        holder.blocks.remove(block_hash)
        left = tuple(h for h in self._holders_of[block_hash] if h is not holder)
        if left:
            self._holders_of[block_hash] = left
        else:
            del self._holders_of[block_hash]


def _prefix(holder: Holder, num_blocks: int) -> HolderPrefix:
    return HolderPrefix(worker_id=holder.worker_id, incarnation=holder.incarnation, num_blocks=num_blocks)
