"""The directory: numbered events, gaps and inventories, incarnations, tiers, and what `locate` says."""

from collections.abc import Iterable

import pytest

from schemas.block import join_hashes
from schemas.directory import BlocksEvicted, BlocksStored, HolderPrefix, Inventory, Tier
from schemas.ids import BlockHash, WorkerId
from services.directory import limits
from services.directory.core import DirectoryCore
from services.directory.events import (
    BlocksChanged,
    Event,
    PageMissing,
    PageRead,
    ReadPage,
    Sweep,
    WorkerGone,
    WorkerSeen,
)
from services.directory.limits import MAX_LATER_RUNS, MAX_PENDING_EVENTS, MAX_PREFIXES
from services.directory.map import TIERS
from services.times import DirectoryTimes

A, B = WorkerId("a"), WorkerId("b")


def block(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(16, "little"))


def joined(numbers: Iterable[int]) -> bytes:
    return join_hashes([block(n) for n in numbers])


def stored(
    worker: WorkerId, sequence: int, *numbers: int, incarnation: str = "1", tier: Tier = "arena"
) -> BlocksChanged:
    message = BlocksStored(
        worker_id=worker, incarnation=incarnation, sequence=sequence, block_hashes=joined(numbers), tier=tier
    )
    return BlocksChanged(message)


def evicted(
    worker: WorkerId, sequence: int, *numbers: int, incarnation: str = "1", tier: Tier = "arena"
) -> BlocksChanged:
    message = BlocksEvicted(
        worker_id=worker, incarnation=incarnation, sequence=sequence, block_hashes=joined(numbers), tier=tier
    )
    return BlocksChanged(message)


def page(
    worker: WorkerId,
    sequence: int,
    *numbers: int,
    incarnation: str = "1",
    following: int | None = None,
    tier: Tier = "arena",
) -> Inventory:
    return Inventory(
        worker_id=worker,
        incarnation=incarnation,
        sequence=sequence,
        block_hashes=joined(numbers),
        next_offset=following,
        tier=tier,
    )


def heard(worker: WorkerId, incarnation: str = "1") -> WorkerSeen:
    return WorkerSeen(worker, incarnation)


def handle(core: DirectoryCore, event: Event) -> list[ReadPage]:
    """Bring the core an event, and return the pages that it asks for."""
    return [action for action in core.handle(event, 0) if isinstance(action, ReadPage)]


def asked(worker: WorkerId, offset: int = 0, *, reading: int = 1, incarnation: str = "1") -> ReadPage:
    return ReadPage(worker, incarnation, offset, reading)


def locate(core: DirectoryCore, *numbers: int) -> tuple[HolderPrefix, ...]:
    core.check_integrity()
    return core.locate(joined(numbers))


def located(core: DirectoryCore, *numbers: int) -> dict[str, int]:
    """Prefixes only."""
    return {run.worker_id: run.num_blocks for run in locate(core, *numbers) if run.first_block == 0}


def runs(core: DirectoryCore, *numbers: int) -> list[tuple[str, int, int, str]]:
    return [(run.worker_id, run.first_block, run.num_blocks, run.tier) for run in locate(core, *numbers)]


def swept(core: DirectoryCore) -> DirectoryCore:
    while core.sweep(2):
        core.check_integrity()
    assert core.tick(0) == [], "there is no more to be swept"
    return core


def test_prefixes_first_then_runs_that_begin_later_the_longest_of_each_in_front() -> None:
    core = DirectoryCore(DirectoryTimes())
    handle(core, stored(A, 1, 1, 2, 4))
    handle(core, stored(B, 1, 1, 3, 4, 5))
    assert runs(core, 1, 2, 3, 4, 5) == [
        ("a", 0, 2, "arena"), ("b", 0, 1, "arena"), ("b", 2, 3, "arena"), ("a", 3, 1, "arena"),
    ]  # fmt: skip
    assert runs(core, 9, 1) == [("a", 1, 1, "arena"), ("b", 1, 1, "arena")]
    assert runs(core, 9) == [] and runs(core) == []


def test_a_worker_is_told_how_often_what_it_holds_was_asked_for() -> None:
    core = DirectoryCore(DirectoryTimes())
    handle(core, stored(A, 1, 1, 2, 3))
    handle(core, stored(A, 2, 4, tier="disk"))
    handle(core, stored(B, 1, 2, 5))
    for _ in range(3):
        locate(core, 1, 2)
    locate(core, 1, 2, 3, 4, 5, 9)
    assert list(core.heat(A, joined([4, 3, 2, 1, 5, 9]))) == [1, 1, 4, 4, 0, 0]
    assert list(core.heat(B, joined([1, 2, 5]))) == [0, 4, 1]
    assert core.heat(WorkerId("nobody"), joined([1, 2])) == b"\0\0"
    core.handle(WorkerGone(A, "1"), 0)
    assert core.heat(A, joined([1, 2])) == b"\0\0"


def test_a_run_names_the_slowest_of_its_blocks_tiers() -> None:
    core = DirectoryCore(DirectoryTimes())
    handle(core, stored(A, 1, 1, 2, 3, 4, tier="disk"))
    handle(core, stored(A, 2, 1, 2, tier="memory"))
    assert runs(core, 1, 2) == [("a", 0, 2, "memory")]
    assert runs(core, 1, 2, 3) == [("a", 0, 3, "disk")]
    handle(core, evicted(A, 3, 1, 2, tier="disk"))
    assert runs(core, 1, 2, 3, 4) == [("a", 0, 4, "disk")]
    handle(core, evicted(A, 4, 1, tier="memory"))
    assert runs(core, 1, 2, 3, 4) == [("a", 1, 3, "disk")]


def test_long_lists_are_cut_to_the_longest() -> None:
    core = DirectoryCore(DirectoryTimes())
    numbers = list(range(1, 101))
    for n in numbers:
        handle(core, stored(WorkerId(f"p{n}"), 1, *numbers[:n]))
        handle(core, stored(WorkerId(f"q{n}"), 1, *numbers[n:]))
    found = locate(core, *numbers)
    assert [run.num_blocks for run in found[:MAX_PREFIXES]] == list(range(100, 100 - MAX_PREFIXES, -1))
    later = found[MAX_PREFIXES:]
    assert [run.num_blocks for run in later] == list(range(99, 99 - MAX_LATER_RUNS, -1))
    assert all(run.first_block + run.num_blocks == 100 for run in later)


def test_evicted_blocks_are_gone() -> None:
    core = DirectoryCore(DirectoryTimes())
    handle(core, stored(A, 1, 1, 2))
    handle(core, evicted(A, 2, 2))
    assert located(core, 1, 2) == {"a": 1}
    assert core.num_known_blocks == 1


def test_evicted_from_one_tier_is_still_in_the_other() -> None:
    core = DirectoryCore(DirectoryTimes())
    handle(core, stored(A, 1, 1, tier="memory"))
    handle(core, stored(A, 2, 1, tier="disk"))
    handle(core, evicted(A, 3, 1, tier="memory"))
    assert runs(core, 1) == [("a", 0, 1, "disk")]


def test_a_repeated_event_changes_nothing() -> None:
    core = DirectoryCore(DirectoryTimes())
    handle(core, stored(A, 1, 1))
    handle(core, evicted(A, 2, 1))
    assert handle(core, stored(A, 1, 1)) == []
    assert located(core, 1) == {}


def test_a_gap_is_repaired_from_the_inventory() -> None:
    core = DirectoryCore(DirectoryTimes())
    handle(core, stored(A, 1, 1))
    assert handle(core, stored(A, 3, 3)) == [asked(A)]
    assert handle(core, evicted(A, 4, 1)) == []  # kept; one reading at a time
    assert located(core, 1) == {"a": 1}
    assert handle(core, PageRead(asked(A), page(A, 3, 1, 2, 3))) == []
    assert located(core, 2, 3) == {"a": 2} and located(core, 1) == {}


def test_a_gap_behind_the_inventory_is_read_again() -> None:
    core = DirectoryCore(DirectoryTimes())
    handle(core, stored(A, 2, 2))
    handle(core, stored(A, 5, 5))
    assert handle(core, PageRead(asked(A), page(A, 3, 2))) == [asked(A, reading=2)]
    assert handle(core, PageRead(asked(A, reading=2), page(A, 5, 2, 5))) == []
    assert located(core, 2, 5) == {"a": 2}


def test_pages_of_different_moments_start_anew() -> None:
    core = DirectoryCore(DirectoryTimes())
    assert handle(core, heard(A)) == [asked(A)]
    assert handle(core, PageRead(asked(A), page(A, 1, 1, following=1))) == [asked(A, 1)]
    assert handle(core, PageRead(asked(A, 1), page(A, 2, 2))) == [asked(A, reading=2)]
    assert handle(core, PageRead(asked(A, reading=2), page(A, 2, 2, following=1))) == [asked(A, 1, reading=2)]
    assert located(core, 2) == {}, "half an inventory is not shown"
    assert handle(core, PageRead(asked(A, 1, reading=2), page(A, 2, 3))) == []
    assert located(core, 2, 3) == {"a": 2} and located(core, 1) == {}


def test_a_late_page_of_a_reading_that_was_given_up_is_not_mixed_in() -> None:
    core = DirectoryCore(DirectoryTimes())
    assert handle(core, heard(A)) == [asked(A)]
    handle(core, PageRead(asked(A), page(A, 0, 1, 2, following=2)))
    for number in range(MAX_PENDING_EVENTS):
        assert handle(core, stored(A, 2 + number)) == []
    assert handle(core, stored(A, 2 + MAX_PENDING_EVENTS)) == [asked(A, reading=2)]
    assert handle(core, PageRead(asked(A, 2), page(A, 0, 3))) == []  # the last page of the first reading, late
    assert located(core, 1) == {} and located(core, 3) == {}
    handle(core, PageRead(asked(A, reading=2), page(A, 2 + MAX_PENDING_EVENTS, 1, 2, 3)))
    assert located(core, 1, 2, 3) == {"a": 3}


def test_pages_are_of_one_tier_each() -> None:
    core = DirectoryCore(DirectoryTimes())
    handle(core, heard(A))
    handle(core, PageRead(asked(A), page(A, 1, 1, tier="memory", following=1)))
    handle(core, PageRead(asked(A, 1), page(A, 1, 1, 2, tier="disk")))
    assert runs(core, 1, 2) == [("a", 0, 2, "disk")] and runs(core, 1) == [("a", 0, 1, "memory")]


def test_an_inventory_replaces_what_was_known() -> None:
    core = DirectoryCore(DirectoryTimes())
    handle(core, stored(A, 1, 1, 2, 3))
    handle(core, stored(A, 3, 9))
    handle(core, PageRead(asked(A), page(A, 3, 2, 9)))
    assert located(core, 1) == {} and located(core, 2) == {"a": 1} and located(core, 9) == {"a": 1}
    assert swept(core).num_known_blocks == 2


def test_a_restarted_directory_reads_each_worker_it_hears_once() -> None:
    core = DirectoryCore(DirectoryTimes())
    assert handle(core, heard(A)) == [asked(A)]
    assert handle(core, heard(A)) == []
    handle(core, PageRead(asked(A), page(A, 7, 1, 2)))
    assert handle(core, stored(A, 8, 3)) == []
    assert located(core, 1, 2, 3) == {"a": 3}


def test_an_inventory_that_fails_is_asked_for_by_the_next_event() -> None:
    core = DirectoryCore(DirectoryTimes())
    wanted = handle(core, stored(A, 2, 2))
    handle(core, PageMissing(wanted[0]))
    assert handle(core, stored(A, 3, 3)) == [asked(A, reading=2)]


def test_an_answer_of_another_incarnation_is_a_failure() -> None:
    core = DirectoryCore(DirectoryTimes())
    handle(core, heard(A))
    assert handle(core, PageRead(asked(A), page(A, 1, 1, incarnation="2"))) == []
    assert located(core, 1) == {}
    assert handle(core, heard(A)) == [asked(A, reading=2)]


def test_a_restarted_worker_loses_its_old_entries_at_once_and_for_good() -> None:
    core = DirectoryCore(DirectoryTimes())
    handle(core, stored(A, 1, 1, 2))
    handle(core, stored(A, 1, 9, incarnation="2"))
    assert located(core, 1) == {} and located(core, 9) == {"a": 1}
    assert handle(core, stored(A, 2, 3)) == []  # late, of the old incarnation
    questions = handle(core, heard(A, "1"))  # late, or declared dead too early: only the worker can say
    assert questions == [ReadPage(A, "1")] and handle(core, heard(A, "1")) == []
    handle(core, PageMissing(questions[0]))
    assert located(core, 3) == {} and located(core, 9) == {"a": 1}
    assert swept(core).num_known_blocks == 1


def test_a_worker_that_was_declared_dead_and_speaks_is_believed_once_it_answers() -> None:
    core = DirectoryCore(DirectoryTimes())
    handle(core, stored(A, 1, 1))
    handle(core, WorkerGone(A, "1"))
    assert handle(core, heard(A)) == [ReadPage(A, "1")]
    assert handle(core, PageRead(ReadPage(A, "1"), page(A, 1, 1))) == [asked(A)]
    assert handle(core, PageRead(asked(A), page(A, 1, 1))) == []
    assert located(core, 1) == {"a": 1}


def test_a_worker_that_left_is_gone_but_its_successor_is_not() -> None:
    core = DirectoryCore(DirectoryTimes())
    handle(core, stored(A, 1, 1, incarnation="2"))
    handle(core, WorkerGone(A, "1"))
    assert located(core, 1) == {"a": 1}
    handle(core, WorkerGone(A, "2"))
    assert located(core, 1) == {} and core.num_holders == 0
    assert handle(core, stored(A, 2, 1, incarnation="2")) == []


def test_a_bit_is_used_again_only_after_its_blocks_are_swept() -> None:
    """Else what a gone holder had would be said to lie with the next one."""
    core = DirectoryCore(DirectoryTimes())
    handle(core, stored(A, 1, *range(10)))
    assert core.handle(WorkerGone(A, "1"), 0) == [Sweep()]
    assert core.handle(stored(B, 1, 50), 0) == [], "one sweep at a time"
    assert located(core, 0) == {}
    assert core.sweep(3), "half way"
    handle(core, stored(WorkerId("c"), 1, 51))
    assert [located(core, n) for n in range(10)] == [{}] * 10
    swept(core)
    handle(core, stored(WorkerId("d"), 1, 52))
    assert [located(core, n) for n in range(10)] == [{}] * 10
    assert (located(core, 50), located(core, 52)) == ({"b": 1}, {"d": 1})
    assert core.num_known_blocks == 3


# Bounds.


def numbered(first: int, count: int) -> range:
    return range(first, first + count)


def test_a_holder_is_known_to_have_no_more_than_it_has_room_for() -> None:
    core = DirectoryCore(DirectoryTimes())
    handle(core, WorkerSeen(A, "1", {"arena": 4}))
    handle(core, PageRead(asked(A), page(A, 0)))
    handle(core, stored(A, 1, *numbered(1, 3)))
    handle(core, stored(A, 2, *numbered(2, 9)))
    assert located(core, *numbered(1, 20)) == {"a": 4} and core.num_known_blocks == 4 and core.num_passed_over == 6
    handle(core, evicted(A, 3, 1, 2))
    handle(core, stored(A, 4, 30, 31, 32))
    assert located(core, 30, 31, 32) == {"a": 2}, "what has gone makes room"
    handle(core, WorkerSeen(A, "1", {"arena": 5}))
    handle(core, stored(A, 5, 33, 34))
    assert located(core, 33, 34) == {"a": 1}


def test_the_same_blocks_again_and_again_and_those_it_never_had_make_no_room() -> None:
    core = DirectoryCore(DirectoryTimes())
    handle(core, WorkerSeen(A, "1", {"arena": 4}))
    handle(core, PageRead(asked(A), page(A, 0)))
    handle(core, stored(A, 1, *[1, 2, 3] * 50))
    handle(core, stored(A, 2, *[1, 2, 3] * 50))
    handle(core, evicted(A, 3, *numbered(100, 9), *numbered(100, 9)))
    assert core.num_passed_over == 0 and core.num_known_blocks == 3
    handle(core, stored(A, 4, *numbered(1, 9)))
    assert located(core, *numbered(1, 9)) == {"a": 4} and core.num_passed_over == 5
    handle(core, evicted(A, 5, *[1] * 50))
    handle(core, stored(A, 6, 20, 21))
    assert located(core, 20, 21) == {"a": 1}, "what was named fifty times has gone once"


@pytest.mark.parametrize("tier", TIERS)
def test_each_tier_is_bounded_by_its_own_room_and_one_that_the_holder_does_not_have_is_not_believed(tier: Tier) -> None:
    core = DirectoryCore(DirectoryTimes())
    handle(core, WorkerSeen(A, "1", {tier: 4}))
    handle(core, PageRead(asked(A), page(A, 0, *numbered(1, 9), tier=tier)))
    for sequence, other in enumerate(TIERS, 1):
        handle(core, stored(A, sequence, *numbered(100, 9), tier=other))
    assert runs(core, *numbered(1, 9)) == [("a", 0, 4, tier)]
    assert core.num_known_blocks == 4 and core.num_passed_over == 5 + len(TIERS) * 9


def test_what_is_known_beyond_the_room_that_a_holder_says_it_has_is_read_again() -> None:
    """Its events came before it had said anything, or it has said less since."""
    core = DirectoryCore(DirectoryTimes())
    handle(core, stored(A, 1, *numbered(1, 9)))
    assert located(core, *numbered(1, 9)) == {"a": 9}
    assert handle(core, WorkerSeen(A, "1", {"arena": 9})) == []
    assert handle(core, WorkerSeen(A, "1", {"arena": 4})) == [asked(A)]
    handle(core, PageRead(asked(A), page(A, 1, *numbered(1, 9))))
    assert located(core, *numbered(1, 9)) == {"a": 4}
    assert handle(core, WorkerSeen(A, "1", {"arena": 4})) == []
    assert swept(core).num_known_blocks == 4


def test_an_inventory_is_bounded_as_well_and_nobody_is_known_to_have_more_than_the_directorys_own_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "MAX_HOLDER_BLOCKS", 6)
    core = DirectoryCore(DirectoryTimes())
    handle(core, WorkerSeen(A, "1", {"memory": 4, "disk": 2**40}))
    handle(core, PageRead(asked(A), page(A, 0, *numbered(1, 9), following=9, tier="memory")))
    handle(core, PageRead(asked(A, 9), page(A, 0, *numbered(100, 9), tier="disk")))
    assert located(core, *numbered(1, 9)) == {"a": 4} and located(core, *numbered(100, 9)) == {"a": 6}


def test_an_inventory_without_end_is_read_to_what_its_holder_has_room_for() -> None:
    core = DirectoryCore(DirectoryTimes())
    (wanted,) = handle(core, WorkerSeen(A, "1", {"arena": 10}))
    num_pages = 0
    while wanted is not None:
        num_pages += 1
        assert num_pages < 9
        following = handle(core, PageRead(wanted, page(A, 0, 1, 2, 3, following=wanted.offset + 3)))
        wanted = following[0] if following else None
    assert located(core, 1, 2, 3) == {"a": 3}
    assert handle(core, WorkerSeen(A, "1", {"arena": 10})) == []


@pytest.mark.parametrize(("numbers", "following"), [((), 5), ((1,), 0), ((1,), -7)])
def test_a_page_after_which_the_reading_would_be_no_further_ends_it(numbers: tuple[int, ...], following: int) -> None:
    core = DirectoryCore(DirectoryTimes())
    handle(core, heard(A))
    assert handle(core, PageRead(asked(A), page(A, 0, *numbers, following=following))) == []
    assert located(core, 1) == {}
    assert handle(core, heard(A)) == [asked(A, reading=2)], "its next word has it asked again"


def test_a_page_may_come_in_parts_and_none_of_it_is_shown_before_the_last() -> None:
    core = DirectoryCore(DirectoryTimes())
    handle(core, heard(A))
    assert handle(core, PageRead(asked(A), page(A, 0, 1, 2, following=4), is_part=True)) == []
    assert located(core, 1) == {}
    assert handle(core, PageRead(asked(A), page(A, 0, 3, 4, following=4))) == [asked(A, 4)]
    assert handle(core, PageRead(asked(A, 4), page(A, 0, 5), is_part=True)) == []
    assert located(core, 1) == {}
    assert handle(core, PageRead(asked(A, 4), page(A, 0, 6))) == []
    assert located(core, *numbered(1, 9)) == {"a": 6}


def test_what_waits_for_an_inventory_is_bounded_by_its_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_PENDING_BLOCKS", 10)
    core = DirectoryCore(DirectoryTimes())
    handle(core, heard(A))
    assert handle(core, stored(A, 2, *numbered(1, 5))) == []
    assert handle(core, stored(A, 3, *numbered(11, 5))) == []
    assert handle(core, stored(A, 4, 21)) == [asked(A, reading=2)], "the earlier two are given up"
    assert handle(core, stored(A, 5, *numbered(31, 9))) == [], "once for many, not once for each"
    handle(core, PageRead(asked(A, reading=2), page(A, 3, *numbered(1, 5), *numbered(11, 5))))
    assert all(located(core, number) == {"a": 1} for number in (1, 15, 21, 31, 39))


def test_all_holders_together_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_BLOCKS", 5)
    monkeypatch.setattr(limits, "MAX_HOLDERS", 2)
    core = DirectoryCore(DirectoryTimes())
    for number, worker in enumerate((A, B, WorkerId("c"))):
        handle(core, stored(worker, 1, *numbered(10 * number, 3)))
    assert core.num_known_blocks == 5 and core.num_holders == 2
    handle(core, heard(WorkerId("c")))
    assert core.num_holders == 2
    handle(core, stored(A, 2, *numbered(10, 2)))
    assert located(core, 10, 11) == {"a": 2, "b": 2}, "a block that is known costs no more"
    handle(core, WorkerGone(A, "1"))
    handle(core, heard(WorkerId("c")))
    assert core.num_holders == 2
    swept(core)
