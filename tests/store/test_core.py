"""What the store decides, with no bus, no thread and no tier."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dataplane.blocks.kept import Content
from dataplane.blocks.layout import block_ids
from schemas.block import join_hashes, split_hashes
from schemas.directory import BlocksEvicted, BlocksStored
from schemas.ids import BlockHash, RequestId, WorkerId
from schemas.kv import BlocksCooling, RequestLease
from schemas.request import RefusalReason, Refused
from schemas.worker import WorkerLeft
from services.store.blocks import StoreLimits, StoreMemory, WriteBatch
from services.store.core import Action, BlocksGone, NotTaken, PullEnded, StartPull, StoreCore, StoreDrainBegun
from services.store.limits import MAX_OFFERED_BLOCKS
from services.store.tiers import key_of
from services.times import Times
from services.worker.core.actions import Action as LeaseAction
from services.worker.core.actions import CloseLease
from services.worker.core.events import Fenced, StreamEnded, StreamStarted
from services.worker.core.leases import Grant, LeaseTable
from services.worker.core.lending import LendCore
from services.worker.kv import ledger as ledger_module
from services.worker.kv.ledger import BlockLedger
from services.worker.limits import MAX_LENT_LEASES
from tests.share import examples
from tests.store.rig import LAYOUT, WINDOWED, contents_at, hash_of, hashes_of, key_at, keys_at
from tests.worker import worker_cases as case

OPEN_LEASE_WITHIN_MS = Times().worker.open_lease_within_ms

WORKER, READER, STORE = WorkerId("prefill-0"), WorkerId("decode-0"), WorkerId("store-0")
NOW = 1_000_000
LEASE_MS = 30_000


def make_core(num_blocks: int = 8, max_values: int = 100, *, behind: bool = True, layout=LAYOUT) -> StoreCore:
    limits = StoreLimits(
        worker_id=STORE,
        fingerprint=layout.fingerprint,
        block_size=layout.block_size,
        lease_ms=LEASE_MS,
        times=Times(),
        value_bytes=10,
        max_bytes=10 * max_values + 9,
        max_unwritten=max(1, num_blocks // 2),
    )
    return StoreCore(StoreMemory(limits, layout, num_blocks, "disk" if behind else None))


def pull(core: StoreCore, *numbers: int, writes: bool = True) -> None:
    """Take these blocks in, as if a worker had given them."""
    blocks = core.memory.kept.allocate(len(numbers))
    assert blocks is not None
    core.memory.pulled(blocks, hashes_of(*numbers), writes=writes)


def write_all(core: StoreCore) -> None:
    while (batch := core.memory.start_write(4)) is not None:
        core.memory.end_write(batch, batch.keys)


def ask(*numbers: int, first_block: int = 0, **changes) -> RequestLease:
    fields = {
        "request_id": RequestId("r"),
        "attempt": 1,
        "deadline_ms": NOW + 60_000,
        "reader": READER,
        "fingerprint": LAYOUT.fingerprint,
        "first_block": first_block,
        "block_hashes": join_hashes(hashes_of(*numbers)),
    }
    return RequestLease(**(fields | changes))


def lending(core: StoreCore) -> LendCore:
    return LendCore(core.memory.limits, core.memory, LeaseTable())


def lend(lender: LendCore, *numbers: int, first_block: int = 0) -> Grant:
    lease = lender.answer(ask(*numbers, first_block=first_block), NOW)
    assert isinstance(lease, Grant)
    return lease


def num_running(core: StoreCore, leases: LeaseTable) -> int:
    return core.memory.num_blocks - core.memory.num_free - core.memory.num_cached - leases.num_leased_blocks


def events_of(core: StoreCore, ledger: BlockLedger) -> list[BlocksStored | BlocksEvicted]:
    return [event for tier, changes in core.memory.take_changes() for event in ledger.events(changes, tier)]


def offer(core: StoreCore, worker: str, *numbers: int) -> bool:
    """Return whether a pull from this worker begins."""
    actions = core.handle(cooling(worker, join_hashes(hashes_of(*numbers))), NOW)
    assert actions in ([], [StartPull(WorkerId(worker))])
    return bool(actions)


def cooling(worker: str, joined: bytes) -> BlocksCooling:
    return BlocksCooling(worker_id=WorkerId(worker), incarnation="i", block_hashes=joined)


def end_pull(core: StoreCore, worker: str) -> tuple[int, list[str]]:
    """Return how many blocks are left, and from whom a pull begins instead."""
    first, *begun = core.handle(PullEnded(WorkerId(worker)), NOW)
    assert isinstance(first, NotTaken) and first.worker_id == worker
    return first.num_blocks, begun_from(begun)


def begun_from(actions: list[Action]) -> list[str]:
    started = [action.worker_id for action in actions if isinstance(action, StartPull)]
    assert len(started) == len(actions)
    return [*started]


# Taking.


def test_a_store_that_drains_begins_no_pull_for_what_another_one_did_not_give() -> None:
    core = make_core()
    assert offer(core, "a", 1)
    assert not offer(core, "b", 1), "somebody is asked for it already"
    core.handle(StoreDrainBegun(), NOW)
    assert end_pull(core, "a") == (1, [])


def test_only_what_is_nowhere_is_wanted() -> None:
    core = make_core()
    pull(core, 1)
    core.memory.back.put(key_at(2))
    assert offer(core, "a", 1, 2, 3, 3, 4)
    assert core.next_pull(WorkerId("a"), 10) == contents_at(3, 4)
    assert not offer(core, "b", 1, 2)


def test_there_is_one_pull_from_a_worker_and_it_takes_later_offers_along() -> None:
    core = make_core()
    assert offer(core, "a", 1, 2)
    assert not offer(core, "a", 3)
    assert core.next_pull(WorkerId("a"), 2) == contents_at(1, 2)
    pull(core, 1, 2)
    assert core.next_pull(WorkerId("a"), 2) == contents_at(3)
    assert core.handle(BlocksGone(WorkerId("a"), tuple(contents_at(3))), NOW) == []
    assert core.next_pull(WorkerId("a"), 2) == []
    assert end_pull(core, "a") == (0, [])
    assert offer(core, "a", 4)


def test_what_one_worker_gives_is_not_asked_of_another() -> None:
    core = make_core()
    assert offer(core, "a", 1, 2) and offer(core, "b", 2, 3)
    assert core.next_pull(WorkerId("b"), 10) == contents_at(3)
    assert end_pull(core, "a") == (1, []), "the other is still to be had, from a pull that is under way"
    assert core.next_pull(WorkerId("b"), 10) == contents_at(3, 2), "now it is"


@pytest.mark.parametrize("how", ["passed over", "pull ended"])
def test_what_one_worker_does_not_give_is_asked_of_who_offered_it_meanwhile(how: str) -> None:
    core = make_core()
    assert offer(core, "a", 1, 2)
    assert not offer(core, "b", 2) and not offer(core, "c", 2)
    if how == "passed over":
        assert begun_from(core.handle(BlocksGone(WorkerId("a"), tuple(contents_at(2))), NOW)) == ["b"]
    else:
        assert end_pull(core, "a") == (1, ["b"])
    assert core.next_pull(WorkerId("b"), 10) == contents_at(2)
    assert end_pull(core, "b") == (0, ["c"])
    assert end_pull(core, "c") == (1, []), "nobody has it"


def test_what_one_worker_gave_is_wanted_of_no_other_until_it_is_gone_again() -> None:
    core = make_core(num_blocks=1, behind=False)
    assert offer(core, "a", 1) and not offer(core, "b", 1)
    pull(core, 1)
    assert core.next_pull(WorkerId("a"), 10) == []
    assert end_pull(core, "a") == (0, [])
    pull(core, 2)  # there is room for one
    assert offer(core, "b", 1), "nothing is left of the first offer"


def test_offers_that_wait_for_another_are_bounded_too() -> None:
    core = make_core()
    offer(core, "a", *range(20))
    offer(core, "b", *range(MAX_OFFERED_BLOCKS + 10))
    assert core.num_not_taken == 10


def test_offers_that_are_left_are_counted_and_bounded() -> None:
    core = make_core()
    offer(core, "a", *range(MAX_OFFERED_BLOCKS + 10))
    assert core.num_not_taken == 10
    assert end_pull(core, "a") == (MAX_OFFERED_BLOCKS, [])
    assert core.num_not_taken == MAX_OFFERED_BLOCKS + 10


def test_an_offer_that_is_no_list_of_hashes_is_not_taken() -> None:
    core = make_core()
    assert core.handle(cooling(WORKER, b"seventeen bytes!!"), NOW) == []
    assert core.num_not_taken == 1


def test_windowed_layers_are_not_taken() -> None:
    core = make_core(layout=WINDOWED)
    assert not core.takes_blocks
    assert not offer(core, "a", 1)


def test_a_store_that_leaves_takes_nothing() -> None:
    core = make_core()
    core.handle(StoreDrainBegun(), NOW)
    assert not offer(core, "a", 1)


def test_a_slow_tier_slows_the_taking_not_the_worker() -> None:
    core = make_core(num_blocks=8)
    pull(core, 1, 2, 3)
    assert core.memory.num_pullable(writes=True) == 1
    assert core.memory.num_pullable(writes=False) == 5
    batch = core.memory.start_write(8)
    assert batch is not None
    assert core.memory.num_pullable(writes=True) == 1, "what is being written still waits"
    core.memory.end_write(batch, batch.keys)
    assert core.memory.num_pullable(writes=True) == 4


def test_the_worker_names_the_coldest_first_and_so_they_go() -> None:
    core = make_core(num_blocks=3, behind=False)
    pull(core, 3, 2, 1, writes=False)
    pull(core, 9, writes=False)
    assert set(core.memory.kept.block_of) == set(contents_at(9, 1, 2))


def test_while_the_tier_is_down_memory_takes_blocks_alone() -> None:
    core = make_core(num_blocks=4)
    pull(core, 1, 2, writes=False)
    assert core.memory.start_write(4) is None
    assert core.memory.num_not_written == 2
    assert core.memory.num_pullable(writes=False) == 4


# Writing through.


def test_what_waits_to_be_written_is_not_given_up() -> None:
    core = make_core(num_blocks=4)
    pull(core, 1, 2)
    assert core.memory.kept.allocate(3) is None
    write_all(core)
    assert core.memory.kept.allocate(4) is not None
    assert core.memory.behind(hashes_of(1, 2)) == hashes_of(1, 2)


def test_the_bound_holds_and_the_coldest_goes_first() -> None:
    core = make_core(num_blocks=8, max_values=3)
    for number in range(1, 6):
        pull(core, number)
        if number == 4:
            core.memory.give_back(core.memory.take(hashes_of(2)))
        write_all(core)
        core.memory.check_integrity()
    assert set(core.memory.back.hashes()) == set(hashes_of(2, 4, 5))


def test_a_batch_is_never_larger_than_the_bound() -> None:
    core = make_core(num_blocks=8, max_values=2)
    pull(core, 1, 2, 3)
    batch = core.memory.start_write(8)
    assert batch is not None and batch.keys == keys_at(1, 2)
    core.memory.end_write(batch, batch.keys)
    batch = core.memory.start_write(8)
    assert batch == WriteBatch(batch.blocks if batch else [], keys_at(1))


def test_a_full_tier_gives_up_as_much_as_it_lacked() -> None:
    core = make_core(num_blocks=8)
    pull(core, 1, 2, 3)
    write_all(core)
    pull(core, 4, 5)
    batch = core.memory.start_write(4)
    assert batch is not None and not batch.evicted
    assert core.memory.end_write(batch, batch.keys[:1], full=True) == keys_at(1)
    assert core.memory.back.hashes() == hashes_of(2, 3, 4)
    assert core.memory.num_not_written == 1
    core.memory.check_integrity()


def test_what_cannot_be_written_stays_in_memory() -> None:
    core = make_core(num_blocks=8)
    pull(core, 1, 2, 3)
    batch = core.memory.start_write(1)
    assert batch is not None
    core.memory.end_write(batch, [])
    core.memory.drop_unwritten()
    assert core.memory.start_write(4) is None and core.memory.num_not_written == 3
    assert len(core.memory.take(hashes_of(1, 2, 3))) == 3
    core.memory.check_integrity()


# Lending.


def test_a_lease_is_on_the_readers_own_positions() -> None:
    core = make_core()
    pull(core, 1, 2, 3)
    lease = lend(lending(core), 1, 2, 7, first_block=5)
    assert (lease.first_token, lease.num_tokens) == (5 * 8, 7 * 8)
    (table,) = lease.tables
    assert (table.first_block, table.end_block) == (5, 7)
    assert lease.expires_at_ms == NOW + OPEN_LEASE_WITHIN_MS


def test_leased_blocks_outlast_any_pressure() -> None:
    core = make_core(num_blocks=4, behind=False)
    pull(core, 1, 2, writes=False)
    lease = lend(lending(core), 1, 2)
    for number in range(10, 20):
        pull(core, number, writes=False)
    assert core.memory.kept.take(hashes_of(1, 2)) == block_ids(lease.tables[0].segments)
    assert core.memory.kept.allocate(3) is None


def closed(actions: list[LeaseAction]) -> list[Grant]:
    leases = [action.lease for action in actions if isinstance(action, CloseLease)]
    assert len(leases) == len(actions)
    return leases


def test_a_lease_ends_once_whichever_way_it_ends() -> None:
    core = make_core()
    lender = lending(core)
    pull(core, 1, 2, 3, writes=False)
    first, second, third = lend(lender, 1), lend(lender, 1, 2), lend(lender, 3)
    assert lender.leases.num_leased_blocks == 3
    assert closed(case.decide(lender, StreamEnded(first), NOW)) == [first]
    assert case.decide(lender, StreamEnded(first, "again"), NOW) == []
    case.decide(lender, StreamStarted(third), NOW)
    assert closed(case.tick(lender, NOW + OPEN_LEASE_WITHIN_MS)) == [second]
    assert case.tick(lender, NOW + LEASE_MS - 1) == []
    left = WorkerLeft(worker_id=READER, incarnation="x", reason="gone")
    assert closed(case.decide(lender, left, NOW)) == [third]
    case.decide(lender, StreamStarted(third), NOW)
    assert (core.memory.num_free, core.memory.num_cached, lender.leases.num_leased_blocks) == (5, 3, 0)
    assert num_running(core, lender.leases) == 0


def test_only_the_leavers_leases_end() -> None:
    core = make_core()
    lender = lending(core)
    pull(core, 1)
    lend(lender, 1)
    assert case.decide(lender, WorkerLeft(worker_id=WorkerId("decode-1"), incarnation="x", reason="gone"), NOW) == []
    assert len(lender.leases) == 1


def refusal(core: StoreCore, request: RequestLease) -> str:
    refused = lending(core).refusal(request, NOW)
    assert isinstance(refused, Refused)
    return refused.reason


def test_what_is_refused_whatever_is_here() -> None:
    core = make_core()
    assert refusal(core, ask(1, fingerprint="another")) == RefusalReason.FINGERPRINT
    assert refusal(core, ask()) == RefusalReason.INVALID
    assert refusal(core, ask(1, first_block=-1)) == RefusalReason.INVALID
    assert refusal(core, ask(1, block_hashes=b"cut")) == RefusalReason.INVALID
    assert refusal(core, ask(1, 2, 1)) == RefusalReason.INVALID
    assert refusal(core, ask(1, deadline_ms=NOW)) == RefusalReason.DEADLINE
    assert lending(core).refusal(ask(1), NOW) is None
    core.handle(StoreDrainBegun(), NOW)
    assert lending(core).refusal(ask(1), NOW) is None, "as long as it drains it lends"


def test_there_is_a_bound_on_open_leases() -> None:
    core = make_core()
    lender = lending(core)
    pull(core, 1)
    for number in range(MAX_LENT_LEASES):
        asked = ask(1, request_id=RequestId(f"r{number}"), reader=WorkerId(f"d{number}"))
        assert isinstance(lender.answer(asked, NOW), Grant)
    refused = lender.answer(ask(1), NOW)
    assert isinstance(refused, Refused) and refused.reason == RefusalReason.OVERLOADED
    assert len(case.decide(lender, Fenced("over"), NOW)) == MAX_LENT_LEASES
    write_all(core)
    assert core.memory.num_cached == 1, "nothing was taken for the refused one"


def test_what_is_not_here_is_gone() -> None:
    refused = lending(make_core()).answer(ask(1), NOW)
    assert isinstance(refused, Refused) and refused.reason == RefusalReason.GONE


def test_loading_brings_back_what_memory_gave_up() -> None:
    core = make_core(num_blocks=4)
    pull(core, 1, 2)
    write_all(core)
    pull(core, 3, 4)
    write_all(core)
    pull(core, 5, 6, writes=False)
    assert core.memory.take(hashes_of(1, 2)) == []
    run = core.memory.behind(hashes_of(1, 2, 9))
    assert run == hashes_of(1, 2)
    blocks = core.memory.allocate_up_to(len(run))
    keys = [key_of("", block_hash) for block_hash in run]
    core.memory.loaded(blocks, keys, [b"tag"], lost=keys[1:])
    assert core.memory.behind(hashes_of(2)) == [] and core.memory.num_lost == 1
    assert core.memory.take(hashes_of(1, 2)) == blocks[:1]
    core.memory.check_integrity()


def test_a_run_behind_memory_ends_where_memory_goes_on() -> None:
    core = make_core()
    pull(core, 1, 2, 3)
    write_all(core)
    pull(core, 4, writes=False)
    core.memory.back.put(key_at(5))
    assert core.memory.behind(hashes_of(5, 4)) == hashes_of(5)


def test_no_more_is_loaded_than_there_is_room_for() -> None:
    core = make_core(num_blocks=4)
    assert len(core.memory.allocate_up_to(9)) == 4
    assert core.memory.allocate_up_to(9) == []


# What the directory hears.


def test_events_are_numbered_and_of_one_tier_each() -> None:
    core = make_core(num_blocks=4, max_values=1)
    pull(core, 1, 2)
    write_all(core)
    ledger = BlockLedger(STORE, "i")
    events = events_of(core, ledger)
    assert [(type(e), e.sequence, e.tier, split_hashes(e.block_hashes)) for e in events] == [
        (BlocksStored, 1, "memory", hashes_of(1, 2)),
        (BlocksStored, 2, "disk", hashes_of(2)),
    ]
    pull(core, 3, 4)
    write_all(core)
    assert [(type(e), e.sequence, e.tier, split_hashes(e.block_hashes)) for e in events_of(core, ledger)] == [
        (BlocksStored, 3, "memory", hashes_of(3, 4)),
        (BlocksEvicted, 4, "disk", hashes_of(2)),
        (BlocksStored, 5, "disk", hashes_of(4)),
    ]
    assert events_of(core, ledger) == []


def test_an_inventory_has_pages_of_one_tier_each(monkeypatch) -> None:
    monkeypatch.setattr(ledger_module, "INVENTORY_PAGE_BLOCKS", 2)
    core, ledger = make_core(), BlockLedger(STORE, "i")
    core.memory.back.restore(keys_at(11, 12, 13))
    pull(core, 1, 2, 3, writes=False)
    events_of(core, ledger)
    pages = []
    offset: int | None = 0
    while offset is not None:
        page = ledger.inventory(core.memory.contents, offset)
        pages.append((page.tier, split_hashes(page.block_hashes), page.sequence))
        offset = page.next_offset
    assert pages == [
        ("memory", hashes_of(1, 2), 1),
        ("memory", hashes_of(3), 1),
        ("disk", hashes_of(11, 12), 1),
        ("disk", hashes_of(13), 1),
    ]


def test_an_empty_stores_inventory_is_one_empty_page() -> None:
    page = BlockLedger(STORE, "i").inventory(make_core().memory.contents, 0)
    assert (page.block_hashes, page.next_offset, page.sequence) == (b"", None, 0)


def test_an_inventory_of_a_tier_alone() -> None:
    core = make_core()
    core.memory.back.restore(keys_at(1))
    page = BlockLedger(STORE, "i").inventory(core.memory.contents, 0)
    assert (page.tier, split_hashes(page.block_hashes), page.next_offset) == ("disk", hashes_of(1), None)


class StoreMachine(RuleBasedStateMachine):
    """Any order of pulls, writes, losses, loads and leases, against what the leases were promised."""

    numbers = st.lists(st.integers(0, 11), min_size=1, max_size=5, unique=True)

    def __init__(self) -> None:
        super().__init__()
        self.core = make_core(num_blocks=8, max_values=3)
        self.content: dict[int, BlockHash] = {}
        self.writing: list[WriteBatch] = []
        self.leased: dict[str, list[BlockHash]] = {}
        self.told: dict[str, set[BlockHash]] = {"memory": set(), "disk": set()}
        self.last_sequence = 0
        self.lender, self.ledger = lending(self.core), BlockLedger(STORE, "i")

    def in_use(self) -> set[int]:
        leased = {b for lease in self.lender.leases for b in block_ids(lease.tables[0].segments)}
        return leased | {each.block for batch in self.writing for each in batch.blocks}

    @rule(numbers=numbers, writes=st.booleans(), landed=st.integers(0, 5))
    def pull(self, numbers: list[int], writes: bool, landed: int) -> None:
        if not offer(self.core, WORKER, *numbers):
            return
        pulled = self.core.next_pull(WORKER, self.core.memory.num_pullable(writes=writes))
        hashes = [content.block_hash for content in pulled]
        self.core.handle(PullEnded(WORKER), NOW)
        blocks = self.core.memory.kept.allocate(len(hashes))
        if blocks is None:
            return
        assert not self.in_use() & set(blocks)
        self.content.update(zip(blocks, hashes, strict=True))
        self.core.memory.pulled(blocks, hashes[:landed], writes=writes)

    @rule(size=st.integers(1, 4))
    def start_write(self, size: int) -> None:
        if (batch := self.core.memory.start_write(size)) is not None:
            assert [key_of("", self.content[each.block]) for each in batch.blocks] == batch.keys
            self.writing.append(batch)

    @precondition(lambda self: self.writing)
    @rule(written=st.integers(0, 4), full=st.booleans())
    def end_write(self, written: int, full: bool) -> None:
        batch = self.writing.pop(0)
        self.core.memory.end_write(batch, batch.keys[:written], full=full)

    @rule()
    def drop_unwritten(self) -> None:
        self.core.memory.drop_unwritten()

    @rule(numbers=numbers, filled=st.integers(0, 5), is_lost=st.booleans())
    def load(self, numbers: list[int], filled: int, is_lost: bool) -> None:
        run = self.core.memory.behind(hashes_of(*numbers))
        blocks = self.core.memory.allocate_up_to(len(run))
        assert not self.in_use() & set(blocks)
        run = run[: len(blocks)]
        self.content.update(zip(blocks, run, strict=True))
        keys = [key_of("", block_hash) for block_hash in run]
        tags = [b"tag"] * min(filled, len(keys))
        self.core.memory.loaded(blocks, keys, tags, keys[filled : filled + 1] if is_lost else [])

    @rule(numbers=numbers, first_block=st.integers(0, 3))
    def lend(self, numbers: list[int], first_block: int) -> None:
        lease = self.lender.answer(ask(*numbers, first_block=first_block), NOW)
        if isinstance(lease, Grant):
            self.leased[lease.lease_id] = hashes_of(*numbers)[: lease.num_blocks]

    @precondition(lambda self: self.leased)
    @rule(data=st.data())
    def end_lease(self, data: st.DataObject) -> None:
        lease_id = data.draw(st.sampled_from(list(self.leased)))  # not by id: that is random
        del self.leased[lease_id]
        for lease in self.lender.leases:
            if lease.lease_id == lease_id:
                assert closed(case.decide(self.lender, StreamEnded(lease), NOW)) == [lease]

    @invariant()
    def leases_hold_what_they_were_granted_on(self) -> None:
        for lease in self.lender.leases:
            blocks = block_ids(lease.tables[0].segments)
            assert [self.content[block] for block in blocks] == self.leased[lease.lease_id]

    @invariant()
    def the_bounds_hold(self) -> None:
        self.core.memory.check_integrity()
        assert (
            len(self.core.memory.back) <= 3 and self.core.memory.num_unwritten <= self.core.memory.limits.max_unwritten
        )
        assert num_running(self.core, self.lender.leases) >= 0

    @invariant()
    def the_events_tell_the_truth(self) -> None:
        for event in events_of(self.core, self.ledger):
            assert event.sequence == self.last_sequence + 1
            self.last_sequence += 1
            hashes = set(split_hashes(event.block_hashes))
            if isinstance(event, BlocksStored):
                self.told[event.tier] |= hashes
            else:
                self.told[event.tier] -= hashes
        assert self.told == {
            "memory": {content.block_hash for content in self.core.memory.kept.block_of},
            "disk": set(self.core.memory.back.hashes()),
        }


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)


# Tenants.


def test_one_lease_reads_one_tenants_blocks() -> None:
    core = make_core()
    for tenant in ("a", "b"):
        joined = join_hashes(hashes_of(1, 2))
        core.handle(BlocksCooling(worker_id=WORKER, incarnation="i", block_hashes=joined, tenant=tenant), NOW)
    assert core.next_pull(WORKER, 10) == [Content("a", block_hash) for block_hash in hashes_of(1, 2)]
    core.handle(BlocksGone(WORKER, tuple(core.next_pull(WORKER, 10))), NOW)
    assert core.next_pull(WORKER, 10) == [Content("b", block_hash) for block_hash in hashes_of(1, 2)]


@pytest.mark.parametrize("tier", ["memory", "behind"])
def test_what_is_one_tenants_is_lent_to_no_other(tier: str) -> None:
    """In memory, and loaded again from behind it: though the other names the very hashes."""
    core = make_core(num_blocks=4)
    blocks = core.memory.allocate_up_to(2, "acme")
    core.memory.pulled(blocks, hashes_of(1, 2), writes=True)
    write_all(core)
    if tier == "behind":
        pull(core, 3, 4, 5, 6, writes=False)
        for tenant in ("", "other"):
            assert core.memory.behind(hashes_of(1, 2), tenant) == []
        run = core.memory.behind(hashes_of(1, 2), "acme")
        assert run == hashes_of(1, 2)
        blocks = core.memory.allocate_up_to(2, "acme")
        core.memory.loaded(blocks, [key_of("acme", each) for each in run], [b"tag"] * len(run), [])
    for tenant in ("", "other"):
        refused = lending(core).answer(ask(1, 2, tenant=tenant), NOW)
        assert isinstance(refused, Refused) and refused.reason == RefusalReason.GONE
        assert not core.memory.holds(hash_of(1), tenant)
    granted = lending(core).answer(ask(1, 2, tenant="acme"), NOW)
    assert isinstance(granted, Grant) and granted.tenant == "acme"


def test_what_was_on_its_way_while_all_was_forgotten_is_not_kept() -> None:
    core = make_core(num_blocks=4)
    blocks = core.memory.allocate_up_to(2)
    core.memory.forget()
    core.memory.pulled(blocks, hashes_of(1, 2), writes=True)
    assert not core.memory.kept.block_of and not core.memory.num_unwritten and core.memory.num_free == 4
    core.memory.check_integrity()
