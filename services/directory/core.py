"""Block → holders, from numbered worker events. Pure.

Each incarnation of a worker numbers its events from 1. An event out of turn means that something was missed: the
worker's inventory is read, and the events that came meanwhile are applied after it. A new incarnation's first word
drops what the old one held.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from schemas.block import split_hashes
from schemas.directory import BlocksEvicted, BlocksStored, HolderPrefix, Inventory, Tier
from schemas.ids import BlockHash, WorkerId
from schemas.worker import WorkerInfo, WorkerLeft
from services.directory.map import BlockMap, Owner

MAX_PENDING_EVENTS = 10_000
"""Events kept while an inventory is read; one more starts the reading anew."""
MAX_RESTARTS = 3
"""Of one reading whose pages were of different moments; after that the worker's next word begins another."""
SWEEP_BLOCKS = 20_000
"""A few milliseconds."""

BlockEvent = BlocksStored | BlocksEvicted


@dataclass(slots=True, frozen=True)
class ReadInventoryOf:
    """Ask this worker for its inventory from `offset` on, and bring the page, or say that it failed.

    `reading`: which reading of this worker the page belongs to; pages of one that was given up are not mixed in.
    """

    worker_id: WorkerId
    incarnation: str
    offset: int = 0
    reading: int = 0


@dataclass(slots=True, eq=False)
class Holder:
    """One incarnation of a worker. `sequence`: the last event in its blocks. While `is_reading`, what comes is kept.
    `unread`: its inventory is needed and could not be had. `is_heard`: since the last `forget_silent`."""

    worker_id: WorkerId
    incarnation: str
    sequence: int = 0
    bits: dict[Tier, int] = field(default_factory=dict[Tier, int])
    is_reading: bool = False
    unread: bool = False
    is_heard: bool = True
    reading: int = 0
    """Counts its readings."""
    num_restarts: int = 0
    page_sequence: int | None = None
    page_bits: dict[Tier, int] = field(default_factory=dict[Tier, int])
    """What the pages tell so far; takes the place of `bits` with the last of them."""
    pending: dict[int, BlockEvent] = field(default_factory=dict[int, BlockEvent])

    def read_from(self, offset: int) -> list[ReadInventoryOf]:
        return [ReadInventoryOf(self.worker_id, self.incarnation, offset, self.reading)]


class DirectoryCore:
    """The map. Methods that take in what was said return the inventories to be read for it to be whole."""

    def __init__(self) -> None:
        self._map = BlockMap()
        self._holders: dict[WorkerId, Holder] = {}
        self._ended: dict[tuple[WorkerId, str], None] = {}
        self._asked: set[tuple[WorkerId, str]] = set()
        """Ended incarnations that were heard of since: an answer proves that they live, a late message does not."""

    @property
    def num_blocks(self) -> int:
        """Distinct blocks, with those of gone holders until they are swept."""
        return self._map.num_blocks

    @property
    def num_holders(self) -> int:
        return len(self._holders)

    @property
    def needs_sweep(self) -> bool:
        return self._map.needs_sweep

    def heard(self, info: WorkerInfo) -> list[ReadInventoryOf]:
        """A worker has said that it lives. An incarnation not known before is asked for what it holds."""
        if self._is_ended(info.worker_id, info.incarnation):
            return self._ask_ended(info.worker_id, info.incarnation)
        known = self._holders.get(info.worker_id)
        if known is not None and known.incarnation == info.incarnation:
            known.is_heard = True
            return self._start_reading(known) if known.unread and not known.is_reading else []
        return self._start_reading(self._replace(info.worker_id, info.incarnation))

    def changed(self, event: BlockEvent) -> list[ReadInventoryOf]:
        """Take in what a worker stored or evicted."""
        if self._is_ended(event.worker_id, event.incarnation):
            return []
        holder = self._holders.get(event.worker_id)
        if holder is None or holder.incarnation != event.incarnation:
            holder = self._replace(event.worker_id, event.incarnation)
        holder.is_heard = True
        if event.sequence <= holder.sequence:
            return []  # heard before, or in the inventory already
        holder.pending[event.sequence] = event
        if not holder.is_reading:
            self._apply_pending(holder)
        if not holder.pending:
            return []
        if holder.is_reading and len(holder.pending) <= MAX_PENDING_EVENTS:
            return []
        return self._start_reading(holder)

    def inventory(self, asked: ReadInventoryOf, page: Inventory) -> list[ReadInventoryOf]:
        """Take in the page that was asked for. Pages of different moments make a new start."""
        key = (page.worker_id, page.incarnation)
        if key != (asked.worker_id, asked.incarnation):
            self.inventory_failed(asked)
            return []
        if key in self._asked:
            self._asked.discard(key)
            self._ended.pop(key, None)
            return self._start_reading(self._replace(*key))
        holder = self._reader_of(asked)
        if holder is None:
            return []
        if holder.page_sequence not in (None, page.sequence):
            return self._restart_reading(holder, asked)
        holder.page_sequence = page.sequence
        self._map.add(self._bit(holder, holder.page_bits, page.tier), split_hashes(page.block_hashes))
        if page.next_offset is not None:
            return holder.read_from(page.next_offset)
        self._adopt_pages(holder)
        return self._start_reading(holder) if holder.pending else []

    def inventory_failed(self, asked: ReadInventoryOf) -> None:
        """The worker did not answer. Its next word asks again."""
        self._asked.discard((asked.worker_id, asked.incarnation))
        holder = self._reader_of(asked)
        if holder is not None:
            self._drop_pages(holder)
            holder.is_reading, holder.unread = False, True

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

    def doubt_all(self) -> None:
        """Events may have been lost without another after them to show it: each worker's next word has its inventory
        read."""
        for holder in self._holders.values():
            holder.unread = True

    def forget_silent(self) -> None:
        """Drop the holders not heard of since the last call. Whoever would say that they have left may have ended too;
        one that speaks again is read again."""
        for holder in list(self._holders.values()):
            if not holder.is_heard:
                self._drop(holder)
            holder.is_heard = False

    def locate(self, hashes: Sequence[BlockHash]) -> tuple[HolderPrefix, ...]:
        """Return who holds a prefix of these blocks, and who holds a run that begins later; the longest of each first
        (`BlockMap.locate`)."""
        return self._map.locate(hashes)

    def sweep(self, num_blocks: int = SWEEP_BLOCKS) -> bool:
        """Clear what gone holders held from a slice of the map. Returns whether there is more to do."""
        return self._map.sweep(num_blocks)

    def check_integrity(self) -> None:
        """Assert that the map shows what the holders have, and nobody else's."""
        self._map.check_integrity()
        shown = [bit for holder in self._holders.values() for bit in holder.bits.values()]
        assert self._map.shown_bits == sum(shown), "the holders' bits are shown, each once"

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
        self._drop_pages(holder)
        self._map.retire(holder.bits.values())
        del self._holders[holder.worker_id]

    def _drop_pages(self, holder: Holder) -> None:
        self._map.retire(holder.page_bits.values())
        holder.page_bits, holder.page_sequence = {}, None

    def _reader_of(self, asked: ReadInventoryOf) -> Holder | None:
        """Return the holder whose reading under way this page belongs to."""
        holder = self._holders.get(asked.worker_id)
        if holder is None or not holder.is_reading:
            return None
        return holder if (holder.incarnation, holder.reading) == (asked.incarnation, asked.reading) else None

    def _start_reading(self, holder: Holder) -> list[ReadInventoryOf]:
        self._drop_pages(holder)
        holder.is_reading, holder.unread = True, False
        holder.reading += 1
        while len(holder.pending) > MAX_PENDING_EVENTS:
            del holder.pending[min(holder.pending)]
        return holder.read_from(0)

    def _restart_reading(self, holder: Holder, asked: ReadInventoryOf) -> list[ReadInventoryOf]:
        """Its contents changed between two pages. A worker that changes all the time must not be asked all the time."""
        if holder.num_restarts >= MAX_RESTARTS:
            holder.num_restarts = 0
            self.inventory_failed(asked)
            return []
        holder.num_restarts += 1
        return self._start_reading(holder)

    def _adopt_pages(self, holder: Holder) -> None:
        """Make the inventory the truth, and apply what came after it."""
        assert holder.page_sequence is not None
        self._map.retire(holder.bits.values())
        holder.bits, holder.page_bits = holder.page_bits, {}
        for bit in holder.bits.values():
            self._map.show(bit)
        holder.sequence = max(holder.sequence, holder.page_sequence)
        holder.is_reading, holder.page_sequence, holder.num_restarts = False, None, 0
        holder.pending = {n: event for n, event in holder.pending.items() if n > holder.sequence}
        self._apply_pending(holder)

    def _apply_pending(self, holder: Holder) -> None:
        """Apply the events that are next in turn; a gap leaves the rest."""
        while (event := holder.pending.pop(holder.sequence + 1, None)) is not None:
            holder.sequence += 1
            bit = self._bit(holder, holder.bits, event.tier)
            self._map.show(bit)
            change = self._map.add if isinstance(event, BlocksStored) else self._map.remove
            change(bit, split_hashes(event.block_hashes))

    def _bit(self, holder: Holder, bits: dict[Tier, int], tier: Tier) -> int:
        if tier not in bits:
            bits[tier] = self._map.open(Owner(holder.worker_id, holder.incarnation, tier))
        return bits[tier]
