"""What the store keeps, gives up and lends, with no bus, no thread and no tier."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dataplane.blocks.layout import BlockTable, BlockTables, block_ids, segments_of
from schemas.block import join_hashes, split_hashes
from schemas.directory import BlocksEvicted, BlocksStored
from schemas.ids import BlockHash, RequestId, WorkerId
from schemas.kv import RequestLease
from schemas.request import RefusalReason, Refused
from schemas.worker import WorkerLeft
from services.holder.core.actions import Action, CloseLease
from services.holder.core.events import Fenced, StreamEnded, StreamStarted
from services.holder.core.leases import Grant, LeaseTable
from services.holder.core.lending import LendCore
from services.holder.kv import ledger as ledger_module
from services.holder.kv.ledger import BlockLedger
from services.holder.limits import MAX_LENT_LEASES
from services.store.blocks import StoreLimits, StoreMemory, WriteBatch
from services.store.tiers import key_of
from services.times import Times
from tests.share import examples
from tests.store.rig import LAYOUT, contents_at, hash_of, hashes_of, key_at, keys_at
from tests.worker import worker_cases as case

OPEN_LEASE_WITHIN_MS = Times().worker.open_lease_within_ms

WORKER, READER, STORE = WorkerId("prefill-0"), WorkerId("decode-0"), WorkerId("store-0")
NOW = 1_000_000
LEASE_MS = 30_000


def make_memory(num_blocks: int = 8, max_values: int = 100, *, behind: bool = True, layout=LAYOUT) -> StoreMemory:
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
    memory = StoreMemory(limits, layout, num_blocks, "disk" if behind else None)
    memory.writes = True
    return memory


def pull(memory: StoreMemory, *numbers: int, writes: bool = True) -> None:
    """Take these blocks in, as if a worker had given them."""
    blocks = memory.kept.allocate(len(numbers))
    assert blocks is not None
    memory.writes = writes
    memory.keep(tables_of(blocks), hashes_of(*numbers))
    memory.writes = True


def tables_of(blocks: list[int]) -> BlockTables:
    return (BlockTable(segments_of(blocks)),)


def write_all(memory: StoreMemory) -> None:
    while (batch := memory.start_write(4)) is not None:
        memory.end_write(batch, batch.keys)


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


def lending(memory: StoreMemory) -> LendCore:
    return LendCore(memory.limits, memory, LeaseTable())


def lend(lender: LendCore, *numbers: int, first_block: int = 0) -> Grant:
    lease = lender.answer(ask(*numbers, first_block=first_block), NOW)
    assert isinstance(lease, Grant)
    return lease


def num_running(memory: StoreMemory, leases: LeaseTable) -> int:
    return memory.num_blocks - memory.num_free - memory.num_cached - leases.num_leased_blocks


def events_of(memory: StoreMemory, ledger: BlockLedger) -> list[BlocksStored | BlocksEvicted]:
    return [event for tier, changes in memory.take_changes() for event in ledger.events(changes, tier)]


# Taking.


def test_a_slow_tier_slows_the_taking_not_the_worker() -> None:
    memory = make_memory(num_blocks=8)
    pull(memory, 1, 2, 3)
    assert memory.num_spare == 1
    assert memory.admit_spare(2, "", evicts=True) is None
    memory.writes = False
    assert memory.num_spare == 5
    memory.writes = True
    batch = memory.start_write(8)
    assert batch is not None
    assert memory.num_spare == 1, "what is being written still waits"
    memory.end_write(batch, batch.keys)
    assert memory.num_spare == 4


def test_the_last_of_what_was_read_at_a_time_goes_first() -> None:
    memory = make_memory(num_blocks=3, behind=False)
    pull(memory, 1, 2, 3, writes=False)
    pull(memory, 9, writes=False)
    assert set(memory.kept.block_of) == set(contents_at(9, 1, 2))


def test_while_the_tier_is_down_memory_takes_blocks_alone() -> None:
    memory = make_memory(num_blocks=4)
    pull(memory, 1, 2, writes=False)
    assert memory.start_write(4) is None
    memory.writes = False
    assert memory.num_not_written == 2 and memory.num_spare == 4


# Writing through.


def test_what_waits_to_be_written_is_not_given_up() -> None:
    memory = make_memory(num_blocks=4)
    pull(memory, 1, 2)
    assert memory.kept.allocate(3) is None
    write_all(memory)
    assert memory.kept.allocate(4) is not None
    assert memory.behind(hashes_of(1, 2)) == hashes_of(1, 2)


def test_the_bound_holds_and_the_coldest_goes_first() -> None:
    memory = make_memory(num_blocks=8, max_values=3)
    for number in range(1, 6):
        pull(memory, number)
        if number == 4:
            memory.give_back(memory.take(hashes_of(2)))
        write_all(memory)
        memory.check_integrity()
    assert set(memory.back.hashes()) == set(hashes_of(2, 4, 5))


def test_a_batch_is_never_larger_than_the_bound() -> None:
    memory = make_memory(num_blocks=8, max_values=2)
    pull(memory, 1, 2, 3)
    batch = memory.start_write(8)
    assert batch is not None and batch.keys == keys_at(1, 2)
    memory.end_write(batch, batch.keys)
    batch = memory.start_write(8)
    assert batch == WriteBatch(batch.blocks if batch else [], keys_at(1))


def test_a_full_tier_gives_up_as_much_as_it_lacked() -> None:
    memory = make_memory(num_blocks=8)
    pull(memory, 1, 2, 3)
    write_all(memory)
    pull(memory, 4, 5)
    batch = memory.start_write(4)
    assert batch is not None and not batch.evicted
    assert memory.end_write(batch, batch.keys[:1], full=True) == keys_at(1)
    assert memory.back.hashes() == hashes_of(2, 3, 4)
    assert memory.num_not_written == 1
    memory.check_integrity()


def test_what_cannot_be_written_stays_in_memory() -> None:
    memory = make_memory(num_blocks=8)
    pull(memory, 1, 2, 3)
    batch = memory.start_write(1)
    assert batch is not None
    memory.end_write(batch, [])
    memory.drop_unwritten()
    assert memory.start_write(4) is None and memory.num_not_written == 3
    assert len(memory.take(hashes_of(1, 2, 3))) == 3
    memory.check_integrity()


# Lending.


def test_a_lease_is_on_the_readers_own_positions() -> None:
    memory = make_memory()
    pull(memory, 1, 2, 3)
    lease = lend(lending(memory), 1, 2, 7, first_block=5)
    assert (lease.first_token, lease.num_tokens) == (5 * 8, 7 * 8)
    (table,) = lease.tables
    assert (table.first_block, table.end_block) == (5, 7)
    assert lease.expires_at_ms == NOW + OPEN_LEASE_WITHIN_MS


def test_leased_blocks_outlast_any_pressure() -> None:
    memory = make_memory(num_blocks=4, behind=False)
    pull(memory, 1, 2, writes=False)
    lease = lend(lending(memory), 1, 2)
    for number in range(10, 20):
        pull(memory, number, writes=False)
    assert memory.kept.take(hashes_of(1, 2)) == block_ids(lease.tables[0].segments)
    assert memory.kept.allocate(3) is None


def closed(actions: list[Action]) -> list[Grant]:
    leases = [action.lease for action in actions if isinstance(action, CloseLease)]
    assert len(leases) == len(actions)
    return leases


def test_a_lease_ends_once_whichever_way_it_ends() -> None:
    memory = make_memory()
    lender = lending(memory)
    pull(memory, 1, 2, 3, writes=False)
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
    assert (memory.num_free, memory.num_cached, lender.leases.num_leased_blocks) == (5, 3, 0)
    assert num_running(memory, lender.leases) == 0


def test_only_the_leavers_leases_end() -> None:
    memory = make_memory()
    lender = lending(memory)
    pull(memory, 1)
    lend(lender, 1)
    assert case.decide(lender, WorkerLeft(worker_id=WorkerId("decode-1"), incarnation="x", reason="gone"), NOW) == []
    assert len(lender.leases) == 1


def test_there_is_a_bound_on_open_leases() -> None:
    memory = make_memory()
    lender = lending(memory)
    pull(memory, 1)
    for number in range(MAX_LENT_LEASES):
        asked = ask(1, request_id=RequestId(f"r{number}"), reader=WorkerId(f"d{number}"))
        assert isinstance(lender.answer(asked, NOW), Grant)
    refused = lender.answer(ask(1), NOW)
    assert isinstance(refused, Refused) and refused.reason == RefusalReason.OVERLOADED
    assert len(case.decide(lender, Fenced("over"), NOW)) == MAX_LENT_LEASES
    write_all(memory)
    assert memory.num_cached == 1, "nothing was taken for the refused one"


def test_what_is_not_here_is_gone() -> None:
    refused = lending(make_memory()).answer(ask(1), NOW)
    assert isinstance(refused, Refused) and refused.reason == RefusalReason.GONE


def test_loading_brings_back_what_memory_gave_up() -> None:
    memory = make_memory(num_blocks=4)
    pull(memory, 1, 2)
    write_all(memory)
    pull(memory, 3, 4)
    write_all(memory)
    pull(memory, 5, 6, writes=False)
    assert memory.take(hashes_of(1, 2)) == []
    run = memory.behind(hashes_of(1, 2, 9))
    assert run == hashes_of(1, 2)
    blocks = memory.allocate_up_to(len(run))
    keys = [key_of("", block_hash) for block_hash in run]
    memory.loaded(blocks, keys, [b"tag"], lost=keys[1:])
    assert memory.behind(hashes_of(2)) == [] and memory.num_lost == 1
    assert memory.take(hashes_of(1, 2)) == blocks[:1]
    memory.check_integrity()


def test_a_run_behind_memory_ends_where_memory_goes_on() -> None:
    memory = make_memory()
    pull(memory, 1, 2, 3)
    write_all(memory)
    pull(memory, 4, writes=False)
    memory.back.put(key_at(5))
    assert memory.behind(hashes_of(5, 4)) == hashes_of(5)


def test_no_more_is_loaded_than_there_is_room_for() -> None:
    memory = make_memory(num_blocks=4)
    assert len(memory.allocate_up_to(9)) == 4
    assert memory.allocate_up_to(9) == []


# What the directory hears.


def test_events_are_numbered_and_of_one_tier_each() -> None:
    memory = make_memory(num_blocks=4, max_values=1)
    pull(memory, 1, 2)
    write_all(memory)
    ledger = BlockLedger(STORE, "i")
    events = events_of(memory, ledger)
    assert [(type(e), e.sequence, e.tier, split_hashes(e.block_hashes)) for e in events] == [
        (BlocksStored, 1, "memory", hashes_of(1, 2)),
        (BlocksStored, 2, "disk", hashes_of(2)),
    ]
    pull(memory, 3, 4)
    write_all(memory)
    assert [(type(e), e.sequence, e.tier, split_hashes(e.block_hashes)) for e in events_of(memory, ledger)] == [
        (BlocksStored, 3, "memory", hashes_of(3, 4)),
        (BlocksEvicted, 4, "disk", hashes_of(2)),
        (BlocksStored, 5, "disk", hashes_of(4)),
    ]
    assert events_of(memory, ledger) == []


def test_an_inventory_has_pages_of_one_tier_each(monkeypatch) -> None:
    monkeypatch.setattr(ledger_module, "INVENTORY_PAGE_BLOCKS", 2)
    memory, ledger = make_memory(), BlockLedger(STORE, "i")
    memory.back.restore(keys_at(11, 12, 13))
    pull(memory, 1, 2, 3, writes=False)
    events_of(memory, ledger)
    pages = []
    offset: int | None = 0
    while offset is not None:
        page = ledger.inventory(memory.contents, offset)
        pages.append((page.tier, split_hashes(page.block_hashes), page.sequence))
        offset = page.next_offset
    assert pages == [
        ("memory", hashes_of(1, 2), 1),
        ("memory", hashes_of(3), 1),
        ("disk", hashes_of(11, 12), 1),
        ("disk", hashes_of(13), 1),
    ]


def test_an_empty_stores_inventory_is_one_empty_page() -> None:
    page = BlockLedger(STORE, "i").inventory(make_memory().contents, 0)
    assert (page.block_hashes, page.next_offset, page.sequence) == (b"", None, 0)


def test_an_inventory_of_a_tier_alone() -> None:
    memory = make_memory()
    memory.back.restore(keys_at(1))
    page = BlockLedger(STORE, "i").inventory(memory.contents, 0)
    assert (page.tier, split_hashes(page.block_hashes), page.next_offset) == ("disk", hashes_of(1), None)


class StoreMachine(RuleBasedStateMachine):
    """Any order of pulls, writes, losses, loads and leases, against what the leases were promised."""

    numbers = st.lists(st.integers(0, 11), min_size=1, max_size=5, unique=True)

    def __init__(self) -> None:
        super().__init__()
        self.memory = make_memory(num_blocks=8, max_values=3)
        self.content: dict[int, BlockHash] = {}
        self.writing: list[WriteBatch] = []
        self.leased: dict[str, list[BlockHash]] = {}
        self.told: dict[str, set[BlockHash]] = {"memory": set(), "disk": set()}
        self.last_sequence = 0
        self.lender, self.ledger = lending(self.memory), BlockLedger(STORE, "i")

    def in_use(self) -> set[int]:
        leased = {b for lease in self.lender.leases for b in block_ids(lease.tables[0].segments)}
        return leased | {each.block for batch in self.writing for each in batch.blocks}

    @rule(numbers=numbers, writes=st.booleans(), landed=st.integers(0, 5))
    def pull(self, numbers: list[int], writes: bool, landed: int) -> None:
        self.memory.writes = writes
        hashes = [each for each in hashes_of(*numbers) if not self.memory.holds(each, "")][: self.memory.num_spare]
        tables = self.memory.admit_spare(len(hashes), "", evicts=False)
        assert tables is not None, "no more than there is room for"
        blocks = block_ids(tables[0].segments)
        assert not self.in_use() & set(blocks)
        self.content.update(zip(blocks, hashes, strict=True))
        self.memory.keep(tables, hashes[:landed])

    @rule(size=st.integers(1, 4))
    def start_write(self, size: int) -> None:
        if (batch := self.memory.start_write(size)) is not None:
            assert [key_of("", self.content[each.block]) for each in batch.blocks] == batch.keys
            self.writing.append(batch)

    @precondition(lambda self: self.writing)
    @rule(written=st.integers(0, 4), full=st.booleans())
    def end_write(self, written: int, full: bool) -> None:
        batch = self.writing.pop(0)
        self.memory.end_write(batch, batch.keys[:written], full=full)

    @rule()
    def drop_unwritten(self) -> None:
        self.memory.drop_unwritten()

    @rule(numbers=numbers, filled=st.integers(0, 5), is_lost=st.booleans())
    def load(self, numbers: list[int], filled: int, is_lost: bool) -> None:
        run = self.memory.behind(hashes_of(*numbers))
        blocks = self.memory.allocate_up_to(len(run))
        assert not self.in_use() & set(blocks)
        run = run[: len(blocks)]
        self.content.update(zip(blocks, run, strict=True))
        keys = [key_of("", block_hash) for block_hash in run]
        tags = [b"tag"] * min(filled, len(keys))
        self.memory.loaded(blocks, keys, tags, keys[filled : filled + 1] if is_lost else [])

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
        self.memory.check_integrity()
        assert len(self.memory.back) <= 3 and self.memory.num_unwritten <= self.memory.limits.max_unwritten
        assert num_running(self.memory, self.lender.leases) >= 0

    @invariant()
    def the_events_tell_the_truth(self) -> None:
        for event in events_of(self.memory, self.ledger):
            assert event.sequence == self.last_sequence + 1
            self.last_sequence += 1
            hashes = set(split_hashes(event.block_hashes))
            if isinstance(event, BlocksStored):
                self.told[event.tier] |= hashes
            else:
                self.told[event.tier] -= hashes
        assert self.told == {
            "memory": {content.block_hash for content in self.memory.kept.block_of},
            "disk": set(self.memory.back.hashes()),
        }


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)


# Tenants.


@pytest.mark.parametrize("tier", ["memory", "behind"])
def test_what_is_one_tenants_is_lent_to_no_other(tier: str) -> None:
    """In memory, and loaded again from behind it: though the other names the very hashes."""
    memory = make_memory(num_blocks=4)
    blocks = memory.allocate_up_to(2, "acme")
    memory.keep(tables_of(blocks), hashes_of(1, 2))
    write_all(memory)
    if tier == "behind":
        pull(memory, 3, 4, 5, 6, writes=False)
        for tenant in ("", "other"):
            assert memory.behind(hashes_of(1, 2), tenant) == []
        run = memory.behind(hashes_of(1, 2), "acme")
        assert run == hashes_of(1, 2)
        blocks = memory.allocate_up_to(2, "acme")
        memory.loaded(blocks, [key_of("acme", each) for each in run], [b"tag"] * len(run), [])
    for tenant in ("", "other"):
        refused = lending(memory).answer(ask(1, 2, tenant=tenant), NOW)
        assert isinstance(refused, Refused) and refused.reason == RefusalReason.GONE
        assert not memory.holds(hash_of(1), tenant)
    granted = lending(memory).answer(ask(1, 2, tenant="acme"), NOW)
    assert isinstance(granted, Grant) and granted.tenant == "acme"


def test_blocks_that_are_forgotten_go_behind_memory_too() -> None:
    memory = make_memory()
    pull(memory, 1)
    batch = memory.start_write(1)
    assert batch is not None
    assert memory.end_write(batch, batch.keys) == []
    pull(memory, 2, 3, 4)
    batch = memory.start_write(1)
    assert batch is not None and [each.content.block_hash for each in batch.blocks] == hashes_of(2)
    assert memory.forget_blocks(hashes_of(1, 2, 3, 9), "") == 3
    assert memory.is_behind and memory.take_forgotten() == [key_of("", hash_of(1))]
    # What is being written then, or waits for it, is deleted once it is written.
    assert memory.end_write(batch, batch.keys) == [key_of("", hash_of(2))]
    batch = memory.start_write(2)
    assert batch is not None
    assert memory.end_write(batch, batch.keys) == [key_of("", hash_of(3))]
    assert not memory.is_behind and [number for number in range(1, 5) if memory.holds(hash_of(number), "")] == [4]
    memory.check_integrity()


def test_what_was_on_its_way_while_all_was_forgotten_is_not_kept() -> None:
    memory = make_memory(num_blocks=4)
    blocks = memory.allocate_up_to(2)
    memory.forget()
    memory.keep(tables_of(blocks), hashes_of(1, 2))
    assert not memory.kept.block_of and not memory.num_unwritten and memory.num_free == 4
    memory.check_integrity()
