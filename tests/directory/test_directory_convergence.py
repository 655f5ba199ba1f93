"""Whatever is lost, doubled or late: once the workers are heard of and answer, the directory says what they hold.

The model is naive: a set of blocks by holder and tier, and a scan of it.
"""

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.directory import HolderPrefix, Inventory, Tier
from schemas.ids import WorkerId
from services.directory.core import DirectoryCore
from services.directory.events import (
    BlocksChanged,
    EventsMissed,
    PageMissing,
    PageRead,
    ReadPage,
    WorkerGone,
    WorkerSeen,
)
from services.directory.limits import MAX_LATER_RUNS, MAX_PREFIXES, MAX_RESTARTS
from services.directory.map import TIERS
from services.times import DirectoryTimes, Times
from tests.directory.test_directory import evicted, handle, heard, joined, stored
from tests.share import examples

FORGET_AFTER_MS = Times().directory.forget_after_ms

WORKERS = [WorkerId(name) for name in "abc"]
NUMBERS = st.integers(0, 11)
Said = BlocksChanged | WorkerSeen | WorkerGone


@dataclass
class ModelHolder:
    """One incarnation of a worker, as it is."""

    worker_id: WorkerId
    incarnation: str
    tiers: dict[Tier, set[int]] = field(default_factory=dict)
    sequence: int = 0

    def change(self, numbers: list[int], tier: Tier, *, store: bool) -> BlocksChanged:
        self.sequence += 1
        held = self.tiers.setdefault(tier, set())
        (held.update if store else held.difference_update)(numbers)
        event = stored if store else evicted
        return event(self.worker_id, self.sequence, *numbers, incarnation=self.incarnation, tier=tier)

    def inventory(self, offset: int, page: int = 3) -> Inventory:
        """A page of one tier, a few blocks long; the tiers one after the other."""
        pages: list[tuple[Tier, list[int]]] = [
            (tier, sorted(held)[at : at + page])
            for tier, held in sorted(self.tiers.items())
            for at in range(0, len(held), page)
        ] or [("arena", [])]
        tier, numbers = pages[offset]
        return Inventory(
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            sequence=self.sequence,
            block_hashes=joined(numbers),
            next_offset=offset + 1 if offset + 1 < len(pages) else None,
            tier=tier,
        )

    def fastest(self, number: int) -> int | None:
        return min((TIERS.index(tier) for tier, held in self.tiers.items() if number in held), default=None)


def scan(holders: list[ModelHolder], numbers: list[int]) -> set[tuple[str, str, int, int, str]]:
    """All maximal runs of all holders, block by block."""
    found = set()
    for holder in holders:
        start, slowest = None, 0
        for at, number in enumerate([*numbers, -1]):
            rank = holder.fastest(number)
            if rank is None:
                if start is not None:
                    found.add((holder.worker_id, holder.incarnation, start, at - start, TIERS[slowest]))
                start, slowest = None, 0
            else:
                start, slowest = at if start is None else start, max(slowest, rank)
    return found


def told(runs: tuple[HolderPrefix, ...]) -> set[tuple[str, str, int, int, str]]:
    return {(r.worker_id, r.incarnation, r.first_block, r.num_blocks, r.tier) for r in runs}


def settle(
    core: DirectoryCore,
    living: dict[WorkerId, ModelHolder],
    wanted: list[ReadPage],
    data: st.DataObject | None = None,
) -> None:
    """Carry out readings; with `data` in any order and some in vain. Those of incarnations that are gone always are."""
    for _ in range(500):
        if not wanted:
            return
        read = wanted.pop(data.draw(st.integers(0, len(wanted) - 1)) if data else 0)
        holder = living[read.worker_id]
        in_vain = data is not None and data.draw(st.integers(0, 9)) == 9
        if read.incarnation != holder.incarnation or in_vain:
            handle(core, PageMissing(read))
        else:
            wanted += handle(core, PageRead(read, holder.inventory(min(read.offset, holder_pages(holder) - 1))))
        core.check_integrity()
    raise AssertionError("reads without end")


def holder_pages(holder: ModelHolder) -> int:
    return max(1, sum(-(-len(held) // 3) for held in holder.tiers.values()))


@settings(max_examples=examples(150), deadline=None)
@given(st.data())
def test_it_converges_to_what_the_workers_hold(data: st.DataObject) -> None:
    core, wanted = DirectoryCore(DirectoryTimes()), list[ReadPage]()
    said: list[Said] = []
    living: dict[WorkerId, ModelHolder] = {}
    for worker_id in WORKERS:
        for incarnation in data.draw(st.sampled_from([["1"], ["1", "2"], ["1", "2", "3"]])):
            holder = living[worker_id] = ModelHolder(worker_id, incarnation)
            for _ in range(data.draw(st.integers(0, 6))):
                numbers = data.draw(st.lists(NUMBERS, min_size=1, max_size=6))
                tier = data.draw(st.sampled_from(TIERS[:3]))
                event = holder.change(numbers, tier, store=data.draw(st.integers(0, 2)) > 0)
                said += [event] * data.draw(st.sampled_from([0, 1, 1, 1, 2]))  # lost, once, twice
            said.append(heard(worker_id, incarnation))
            if data.draw(st.integers(0, 3)) == 0:  # rightly or not
                said.append(WorkerGone(worker_id, incarnation))
    in_order = data.draw(st.booleans())
    for message in said if in_order else data.draw(st.permutations(said)):  # else late
        wanted += handle(core, message)
        core.check_integrity()
        match data.draw(st.integers(0, 5)):
            case 0:
                settle(core, living, wanted, data)
            case 1:
                core.sweep(data.draw(st.integers(1, 5)))
            case 2 if data.draw(st.integers(0, 5)) == 0:
                core, wanted = DirectoryCore(DirectoryTimes()), []  # its own restart
            case 3 if data.draw(st.integers(0, 3)) == 0:
                core.tick(FORGET_AFTER_MS + 1)
            case 4 if data.draw(st.integers(0, 3)) == 0:
                handle(core, EventsMissed())
    for _ in range(4):  # the living go on speaking
        for worker_id, holder in living.items():
            wanted += handle(core, heard(worker_id, holder.incarnation))
            wanted += handle(core, holder.change([99], "arena", store=True))
        settle(core, living, wanted)
    while core.sweep(3):
        core.check_integrity()
    holders = list(living.values())
    numbers = data.draw(st.lists(st.integers(0, 12), max_size=12, unique=True))
    assert told(core.locate(joined(numbers))) == scan(holders, numbers)
    assert all(told(core.locate(joined([n]))) == scan(holders, [n]) for n in (*range(12), 99))
    assert core.num_known_blocks == len({n for holder in holders for held in holder.tiers.values() for n in held})


@settings(max_examples=examples(150), deadline=None)
@given(st.data())
def test_locate_equals_a_scan_of_every_holder(data: st.DataObject) -> None:
    """More holders than are named: those named are the longest, and each is right."""
    core = DirectoryCore(DirectoryTimes())
    holders: list[ModelHolder] = []
    numbers = list(range(data.draw(st.integers(0, 20))))
    for at in range(data.draw(st.integers(1, 60))):
        holder = ModelHolder(WorkerId(f"w{at}"), "1")
        holders.append(holder)
        for tier in data.draw(st.sets(st.sampled_from(TIERS), min_size=1)):
            start = data.draw(st.integers(0, 20)) if data.draw(st.booleans()) else 0
            gaps = data.draw(st.sets(st.integers(0, 19), max_size=5))
            held = [n for n in range(start, 20) if n not in gaps]
            handle(core, holder.change(held, tier, store=True))
    runs = core.locate(joined(numbers))
    truth = scan(holders, numbers)
    assert told(runs) <= truth and len(told(runs)) == len(runs)
    prefixes = [r.num_blocks for r in runs if r.first_block == 0]
    later = [r.num_blocks for r in runs if r.first_block > 0]
    assert list(runs) == sorted(runs, key=lambda r: (r.first_block > 0, -r.num_blocks, r.first_block, r.worker_id))
    assert prefixes == sorted((length for *_, first, length, _ in truth if first == 0), reverse=True)[:MAX_PREFIXES]
    assert later == sorted((length for *_, first, length, _ in truth if first > 0), reverse=True)[:MAX_LATER_RUNS]


@settings(max_examples=examples(100), deadline=None)
@given(st.data())
def test_two_directories_that_hear_the_same_in_any_order_say_the_same(data: st.DataObject) -> None:
    """Every word of every incarnation, doubled and out of order; then the living speak once more."""
    cores = [DirectoryCore(DirectoryTimes()) for _ in range(2)]
    said: list[Said] = []
    living: dict[WorkerId, ModelHolder] = {}
    for worker_id in WORKERS:
        for incarnation in ("1", "2"):
            holder = living[worker_id] = ModelHolder(worker_id, incarnation)
            said.append(heard(worker_id, incarnation))
            said += [holder.change(data.draw(st.lists(NUMBERS, min_size=1)), "arena", store=True) for _ in range(2)]
        said.append(WorkerGone(worker_id, "1"))
    for core in cores:
        wanted = list[ReadPage]()
        for message in data.draw(st.permutations(said + data.draw(st.lists(st.sampled_from(said), max_size=9)))):
            wanted += handle(core, message)
            if data.draw(st.booleans()):
                settle(core, living, wanted, data)
        for _ in range(3):
            for worker_id, holder in living.items():
                wanted += handle(core, heard(worker_id, holder.incarnation))
            settle(core, living, wanted)
    for number in range(12):
        truth = scan(list(living.values()), [number])
        assert [told(core.locate(joined([number]))) for core in cores] == [truth, truth]


def test_an_outage_makes_every_inventory_be_read_again_for_events_that_nothing_shows_to_be_lost() -> None:
    core, holder = DirectoryCore(DirectoryTimes()), ModelHolder(WORKERS[0], "1")
    living = {WORKERS[0]: holder}
    settle(core, living, handle(core, heard(WORKERS[0], "1")))
    holder.change([1, 2], "arena", store=True)  # nobody hears it, and nothing comes after it
    assert handle(core, heard(WORKERS[0], "1")) == [] and core.locate(joined([1])) == ()
    handle(core, EventsMissed())
    settle(core, living, handle(core, heard(WORKERS[0], "1")))
    assert told(core.locate(joined([1, 2]))) == scan([holder], [1, 2])
    assert handle(core, heard(WORKERS[0], "1")) == []


def test_an_outage_during_a_reading_makes_it_be_read_once_more() -> None:
    core, holder = DirectoryCore(DirectoryTimes()), ModelHolder(WORKERS[0], "1")
    (read,) = handle(core, heard(WORKERS[0], "1"))
    page = holder.inventory(0)
    holder.change([1], "arena", store=True)
    handle(core, EventsMissed())
    assert handle(core, PageRead(read, page)) == []
    settle(core, {WORKERS[0]: holder}, handle(core, heard(WORKERS[0], "1")))
    assert told(core.locate(joined([1]))) == scan([holder], [1])


def test_a_worker_that_changes_all_the_time_is_not_asked_all_the_time() -> None:
    core, holder = DirectoryCore(DirectoryTimes()), ModelHolder(WORKERS[0], "1")
    holder.change(list(range(9)), "arena", store=True)
    num_pages = 0
    wanted = handle(core, heard(WORKERS[0], "1"))
    while wanted:
        (read,) = wanted
        num_pages += 1
        wanted = handle(core, PageRead(read, holder.inventory(read.offset)))
        holder.sequence += 1
    assert num_pages == 2 * (MAX_RESTARTS + 1)
    holder.sequence += 1
    settle(core, {WORKERS[0]: holder}, handle(core, heard(WORKERS[0], "1")))
    assert told(core.locate(joined([1]))) == scan([holder], [1])


def test_a_holder_that_nobody_has_heard_of_for_long_is_forgotten_and_read_again_when_it_speaks() -> None:
    core, holder = DirectoryCore(DirectoryTimes()), ModelHolder(WORKERS[0], "1")
    holder.change([1], "arena", store=True)
    living = {WORKERS[0]: holder}
    settle(core, living, handle(core, heard(WORKERS[0], "1")))
    core.tick(FORGET_AFTER_MS)
    assert told(core.locate(joined([1]))) == scan([holder], [1])
    core.tick(FORGET_AFTER_MS + 1)
    assert core.locate(joined([1])) == () and core.num_holders == 0
    settle(core, living, handle(core, heard(WORKERS[0], "1")))
    assert told(core.locate(joined([1]))) == scan([holder], [1])
