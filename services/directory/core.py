"""Block → holders, from numbered worker events. Pure.

Each incarnation of a worker numbers its events from 1. An event out of turn means that something was missed: the
worker's inventory is read, page by page, and the events that came meanwhile are applied after it. A new incarnation's
first word drops what the old one held.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from schemas.block import BLOCK_HASH_BYTES
from schemas.directory import BlocksEvicted, BlocksStored, HolderPrefix, Tier
from schemas.ids import WorkerId
from services.directory import limits
from services.directory.events import (
    Action,
    BlocksChanged,
    Event,
    EventsMissed,
    PageMissing,
    PageRead,
    ReadPage,
    Sweep,
    WorkerGone,
    WorkerSeen,
)
from services.directory.map import TIERS, BlockMap, Owner
from services.times import DirectoryTimes

BlockEvent = BlocksStored | BlocksEvicted


@dataclass(slots=True, eq=False)
class Holder:
    """One incarnation of a worker."""

    worker_id: WorkerId
    incarnation: str
    seen_ms: int
    room: Mapping[Tier, int] | None = None
    """For how many blocks it has room on each tier that it has, as it reports; None: not reported."""
    num_of: dict[int, int] = field(default_factory=dict[int, int])
    """How many blocks have each of its bits."""
    sequence: int = 0
    """The number of the last event that its blocks contain."""
    bits: dict[Tier, int] = field(default_factory=dict[Tier, int])
    is_reading: bool = False
    """Its inventory is being read; events wait in `pending`."""
    must_read: bool = False
    """Its inventory is needed, and is read once the worker speaks again."""
    reading: int = 0
    """The number of its latest reading."""
    num_restarts: int = 0
    page_sequence: int | None = None
    """The event after which the reading's pages were written; None before the first page."""
    num_read: int = 0
    """Blocks in the pages so far, also those that are named twice or not believed."""
    page_bits: dict[Tier, int] = field(default_factory=dict[Tier, int])
    """Its blocks in the pages so far; they take the place of `bits` with the last page."""
    pending: dict[int, BlockEvent] = field(default_factory=dict[int, BlockEvent])
    """The events that cannot be applied yet, by their number."""
    num_pending_blocks: int = 0
    """Blocks in these events, at most."""

    def room_on(self, tier: Tier) -> int:
        """For how many blocks of this tier it is believed."""
        return limits.MAX_HOLDER_BLOCKS if self.room is None else min(self.room.get(tier, 0), limits.MAX_HOLDER_BLOCKS)

    @property
    def whole_room(self) -> int:
        return sum(map(self.room_on, TIERS))

    @property
    def is_over_room(self) -> bool:
        """More is known of it than it has room for by what it reports now."""
        return any(self.num_of.get(bit, 0) > self.room_on(tier) for tier, bit in self.bits.items())

    def queue_event(self, event: BlockEvent) -> bool:
        """Keep an event until it can be applied. Returns whether there was room for it; if not, the earlier ones are
        given up."""
        num_blocks = len(event.block_hashes) // BLOCK_HASH_BYTES
        has_room = (
            len(self.pending) < limits.MAX_PENDING_EVENTS
            and self.num_pending_blocks + num_blocks <= limits.MAX_PENDING_BLOCKS
        )
        if not has_room:
            self.pending, self.num_pending_blocks = {}, 0
        self.pending[event.sequence] = event
        self.num_pending_blocks += num_blocks
        return has_room

    def read_from(self, offset: int) -> list[Action]:
        return [ReadPage(self.worker_id, self.incarnation, offset, self.reading)]


class DirectoryCore:
    """Who holds which block. `handle` and `tick` return what is to be done about it; `now_ms` never goes back much."""

    def __init__(self, times: DirectoryTimes) -> None:
        self._forget_after_ms = times.forget_after_ms
        self._map = BlockMap()
        self._holders: dict[WorkerId, Holder] = {}
        self._ended: dict[tuple[WorkerId, str], None] = {}
        """These incarnations are over, the oldest first: nothing late brings their blocks back."""
        self._asked: set[tuple[WorkerId, str]] = set()
        """Something has come from these of them since: an answer proves that they live, a late message does not."""
        self._is_sweeping = False
        self.num_passed_over = 0
        """Blocks that were announced beyond a bound, and holders beyond theirs."""

    @property
    def num_known_blocks(self) -> int:
        """Distinct blocks, with those of gone holders until they are swept."""
        return self._map.num_blocks

    @property
    def num_holders(self) -> int:
        return len(self._holders)

    @property
    def known_holders(self) -> tuple[WorkerId, ...]:
        """Those of which no inventory is wanted."""
        return tuple(
            worker_id
            for worker_id, holder in self._holders.items()
            if not (holder.is_reading or holder.must_read or holder.pending)
        )

    def handle(self, event: Event, now_ms: int) -> list[Action]:
        """React to what has happened: return what is to be done."""
        match event:
            case WorkerSeen():
                actions = self._seen(event, now_ms)
            case WorkerGone(worker_id=worker_id, incarnation=incarnation):
                actions = self._gone(worker_id, incarnation)
            case BlocksChanged(message=message):
                actions = self._changed(message, now_ms)
            case PageRead():
                actions = self._read(event, now_ms)
            case PageMissing(asked=asked):
                actions = self._missing(asked)
            case EventsMissed():
                actions = self._read_all_again()
        return [*actions, *self._start_sweep()]

    def tick(self, now_ms: int) -> list[Action]:
        """Forget the holders that have been silent for long."""
        for holder in list(self._holders.values()):
            if now_ms - holder.seen_ms > self._forget_after_ms:
                self._drop(holder)
        return self._start_sweep()

    def locate(self, joined: bytes) -> tuple[HolderPrefix, ...]:
        """Return who holds a prefix of these blocks (joined hashes), and who holds a run that begins later; the longest
        of each first (`BlockMap.locate`)."""
        return self._map.locate(joined)

    def heat(self, worker_id: WorkerId, joined: bytes) -> bytes:
        """Return how often each of these blocks (joined hashes) was asked for lately, a byte each; 0 for what this
        worker is not known to hold (`BlockMap.heat`)."""
        holder = self._holders.get(worker_id)
        return self._map.heat(sum(holder.bits.values()) if holder else 0, joined)

    def sweep(self, num_blocks: int | None = None) -> bool:
        """Clear what gone holders held from a slice of the map. Returns whether there is more to do.

        Their blocks are in no answer any more; this gives back memory, and bits for other holders.
        """
        self._is_sweeping = self._map.sweep(limits.SWEEP_BLOCKS if num_blocks is None else num_blocks)
        return self._is_sweeping

    def check_integrity(self) -> None:
        """Assert that the map shows what the holders have, and nobody else's."""
        self._map.check_integrity()
        shown = [bit for holder in self._holders.values() for bit in holder.bits.values()]
        assert self._map.shown_bits == sum(shown), "the holders' bits are shown, each once"

    def _seen(self, event: WorkerSeen, now_ms: int) -> list[Action]:
        """An incarnation that was not known before is asked for what it holds."""
        worker_id, incarnation = event.worker_id, event.incarnation
        if self._is_ended(worker_id, incarnation):
            return self._ask_ended(worker_id, incarnation)
        known = self._holders.get(worker_id)
        if known is not None and known.incarnation == incarnation:
            known.seen_ms = now_ms
            known.room = known.room if event.room is None else event.room
            known.must_read |= known.is_over_room
            return self._start_reading(known) if known.must_read and not known.is_reading else []
        if self._has_no_room_for(worker_id):
            return []
        holder = self._replace(worker_id, incarnation, now_ms)
        holder.room = event.room
        return self._start_reading(holder)

    def _has_no_room_for(self, worker_id: WorkerId) -> bool:
        """Return whether this would be one holder too many."""
        is_full = worker_id not in self._holders and len(self._holders) >= limits.MAX_HOLDERS
        self.num_passed_over += is_full
        return is_full

    def _gone(self, worker_id: WorkerId, incarnation: str) -> list[Action]:
        self._ended[(worker_id, incarnation)] = None
        self._asked.discard((worker_id, incarnation))
        if len(self._ended) > limits.MAX_ENDED:
            oldest = next(iter(self._ended))
            del self._ended[oldest]
            self._asked.discard(oldest)
        holder = self._holders.get(worker_id)
        if holder is not None and holder.incarnation == incarnation:
            self._drop(holder)
        return []

    def _changed(self, event: BlockEvent, now_ms: int) -> list[Action]:
        if self._is_ended(event.worker_id, event.incarnation):
            return []
        holder = self._holders.get(event.worker_id)
        if holder is None or holder.incarnation != event.incarnation:
            if self._has_no_room_for(event.worker_id):
                return []
            holder = self._replace(event.worker_id, event.incarnation, now_ms)
        holder.seen_ms = now_ms
        if event.sequence <= holder.sequence:
            return []  # received before, or in the inventory already
        has_room = holder.queue_event(event)
        if not holder.is_reading:
            self._apply_pending(holder)
        if not holder.pending or (holder.is_reading and has_room):
            return []
        return self._start_reading(holder)

    def _read(self, event: PageRead, now_ms: int) -> list[Action]:
        """Add a page, or a part of one. Pages of different moments make a new start."""
        asked, page = event.asked, event.page
        key = (page.worker_id, page.incarnation)
        # Another incarnation than the one that was asked has answered: its blocks are not what this reading is about.
        if key != (asked.worker_id, asked.incarnation):
            return self._missing(asked)
        # An incarnation that was declared dead has answered, so it lives: undo its end, and read all of it.
        if key in self._asked:
            self._asked.discard(key)
            self._ended.pop(key, None)
            return self._start_reading(self._replace(*key, now_ms))
        # Drop a page of a reading that was given up or begun anew since: its blocks may be outdated.
        holder = self._reader_of(asked)
        if holder is None:
            return []
        if holder.page_sequence not in (None, page.sequence):
            return self._restart_reading(holder, asked)
        # Mark the blocks under bits that are not shown yet: until the last page, `locate` answers with the old bits.
        holder.page_sequence = page.sequence
        self._add(holder, self._bit(holder, holder.page_bits, page.tier), page.tier, page.block_hashes)
        holder.num_read += len(page.block_hashes) // BLOCK_HASH_BYTES
        if event.is_part:
            return []
        # The page is complete: ask for the next one, unless the answers do not move on or exceed the holder's room.
        if page.next_offset is not None:
            if page.next_offset <= asked.offset or not page.block_hashes:
                return self._missing(asked)  # pages without end
            if holder.num_read <= holder.whole_room:
                return holder.read_from(page.next_offset)
            # It names more than it has room for: what it names further on would not be believed.
        self._adopt_pages(holder)
        return self._start_reading(holder) if holder.pending else []

    def _missing(self, asked: ReadPage) -> list[Action]:
        """The worker's next word has it asked again."""
        self._asked.discard((asked.worker_id, asked.incarnation))
        holder = self._reader_of(asked)
        if holder is not None:
            self._drop_pages(holder)
            holder.is_reading, holder.must_read = False, True
        return []

    def _read_all_again(self) -> list[Action]:
        """Each worker's next word has its inventory read."""
        for holder in self._holders.values():
            holder.must_read = True
        return []

    def _start_sweep(self) -> list[Action]:
        """One sweep at a time clears all that has gone, also what goes while it runs."""
        if self._is_sweeping or not self._map.needs_sweep:
            return []
        self._is_sweeping = True
        return [Sweep()]

    def _is_ended(self, worker_id: WorkerId, incarnation: str) -> bool:
        return (worker_id, incarnation) in self._ended

    def _ask_ended(self, worker_id: WorkerId, incarnation: str) -> list[Action]:
        """It was declared dead and speaks, or the message is late: only the worker can answer which."""
        if (worker_id, incarnation) in self._asked:
            return []
        self._asked.add((worker_id, incarnation))
        return [ReadPage(worker_id, incarnation)]

    def _replace(self, worker_id: WorkerId, incarnation: str, now_ms: int) -> Holder:
        old = self._holders.get(worker_id)
        if old is not None:
            self._drop(old)
            self._ended[(worker_id, old.incarnation)] = None
        holder = self._holders[worker_id] = Holder(worker_id, incarnation, now_ms)
        return holder

    def _drop(self, holder: Holder) -> None:
        self._drop_pages(holder)
        self._retire(holder, holder.bits)
        del self._holders[holder.worker_id]

    def _retire(self, holder: Holder, bits: dict[Tier, int]) -> None:
        self._map.retire(bits.values())
        for bit in bits.values():
            holder.num_of.pop(bit, None)  # the bit may be this holder's again, once it is swept

    def _drop_pages(self, holder: Holder) -> None:
        self._retire(holder, holder.page_bits)
        holder.page_bits, holder.page_sequence, holder.num_read = {}, None, 0

    def _reader_of(self, asked: ReadPage) -> Holder | None:
        """Return the holder whose reading under way this page belongs to."""
        holder = self._holders.get(asked.worker_id)
        if holder is None or not holder.is_reading:
            return None
        return holder if (holder.incarnation, holder.reading) == (asked.incarnation, asked.reading) else None

    def _start_reading(self, holder: Holder) -> list[Action]:
        self._drop_pages(holder)
        holder.is_reading, holder.must_read = True, False
        holder.reading += 1
        return holder.read_from(0)

    def _restart_reading(self, holder: Holder, asked: ReadPage) -> list[Action]:
        """Its contents have changed between two pages."""
        if holder.num_restarts >= limits.MAX_RESTARTS:
            holder.num_restarts = 0
            return self._missing(asked)
        holder.num_restarts += 1
        return self._start_reading(holder)

    def _adopt_pages(self, holder: Holder) -> None:
        """Make the inventory the truth, and apply what came after it."""
        assert holder.page_sequence is not None
        self._retire(holder, holder.bits)
        holder.bits, holder.page_bits = holder.page_bits, {}
        for bit in holder.bits.values():
            self._map.show(bit)
        holder.sequence = max(holder.sequence, holder.page_sequence)
        holder.is_reading, holder.page_sequence, holder.num_read, holder.num_restarts = False, None, 0, 0
        holder.pending = {n: event for n, event in holder.pending.items() if n > holder.sequence}
        self._apply_pending(holder)

    def _apply_pending(self, holder: Holder) -> None:
        """Apply the events that are next in turn; a gap leaves the rest."""
        while (event := holder.pending.pop(holder.sequence + 1, None)) is not None:
            holder.sequence += 1
            bit = self._bit(holder, holder.bits, event.tier)
            self._map.show(bit)
            if isinstance(event, BlocksStored):
                self._add(holder, bit, event.tier, event.block_hashes)
            else:
                num_removed, num_left = self._map.unmark(bit, event.block_hashes)
                holder.num_of[bit] = holder.num_of.get(bit, 0) - num_removed
                self.num_passed_over += num_left
        if not holder.pending:
            holder.num_pending_blocks = 0

    def _add(self, holder: Holder, bit: int, tier: Tier, joined: bytes) -> None:
        """Note what a holder reports that it has, as far as that may be."""
        known = holder.num_of.get(bit, 0)
        num_added, num_left = self._map.mark(bit, joined, max(0, holder.room_on(tier) - known))
        holder.num_of[bit] = known + num_added
        self.num_passed_over += num_left

    def _bit(self, holder: Holder, bits: dict[Tier, int], tier: Tier) -> int:
        if tier not in bits:
            bits[tier] = self._map.new_owner(Owner(holder.worker_id, holder.incarnation, tier))
        return bits[tier]
