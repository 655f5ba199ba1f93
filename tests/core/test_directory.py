"""The directory: whatever is lost, repeated or late, it converges to what the workers hold."""

from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.block import BlockHasher, hash_blocks, join_hashes
from schemas.directory import BlocksEvicted, BlocksStored, Inventory
from schemas.ids import BlockHash, WorkerId
from schemas.worker import WorkerInfo, WorkerLeft
from services.directory.core import BlockEvent, DirectoryCore, ReadInventoryOf
from services.worker.ledger import BlockLedger

A, B = WorkerId("a"), WorkerId("b")


def block(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(16, "little"))


def stored(worker: WorkerId, sequence: int, *numbers: int, incarnation: str = "1") -> BlocksStored:
    hashes = join_hashes([block(n) for n in numbers])
    return BlocksStored(worker_id=worker, incarnation=incarnation, sequence=sequence, block_hashes=hashes)


def evicted(worker: WorkerId, sequence: int, *numbers: int, incarnation: str = "1") -> BlocksEvicted:
    hashes = join_hashes([block(n) for n in numbers])
    return BlocksEvicted(worker_id=worker, incarnation=incarnation, sequence=sequence, block_hashes=hashes)


def page(
    worker: WorkerId, sequence: int, *numbers: int, incarnation: str = "1", following: int | None = None
) -> Inventory:
    hashes = join_hashes([block(n) for n in numbers])
    return Inventory(
        worker_id=worker, incarnation=incarnation, sequence=sequence, block_hashes=hashes, next_offset=following
    )


def info(worker: WorkerId, incarnation: str = "1") -> WorkerInfo:
    return WorkerInfo(
        worker_id=worker, incarnation=incarnation, role="prefill", model="m", fingerprint="f", num_blocks=1,
        block_size=16, context_length=1,
    )  # fmt: skip


def located(core: DirectoryCore, *numbers: int) -> dict[str, int]:
    core.check_integrity()
    return {holder.worker_id: holder.num_blocks for holder in core.locate([block(n) for n in numbers])}


def test_the_longest_prefix_of_each_holder_in_order() -> None:
    core = DirectoryCore()
    core.changed(stored(A, 1, 1, 2, 3))
    core.changed(stored(B, 1, 1, 3))
    assert located(core, 1, 2, 3, 4) == {"a": 3, "b": 1}
    assert [h.worker_id for h in core.locate([block(n) for n in (1, 2)])] == ["a", "b"]
    assert located(core, 9, 1) == {} and located(core) == {}


def test_evicted_blocks_are_gone() -> None:
    core = DirectoryCore()
    core.changed(stored(A, 1, 1, 2))
    core.changed(evicted(A, 2, 2))
    assert located(core, 1, 2) == {"a": 1}
    assert core.num_blocks == 1


def test_a_repeated_event_changes_nothing() -> None:
    core = DirectoryCore()
    core.changed(stored(A, 1, 1))
    core.changed(evicted(A, 2, 1))
    assert core.changed(stored(A, 1, 1)) == []
    assert located(core, 1) == {}


def test_a_gap_is_repaired_from_the_inventory() -> None:
    core = DirectoryCore()
    core.changed(stored(A, 1, 1))
    assert core.changed(stored(A, 3, 3)) == [ReadInventoryOf(A, "1")]
    assert core.changed(evicted(A, 4, 1)) == []  # kept; one reading at a time
    assert located(core, 1) == {"a": 1}
    assert core.inventory(page(A, 3, 1, 2, 3)) == []
    assert located(core, 2, 3) == {"a": 2} and located(core, 1) == {}


def test_a_gap_behind_the_inventory_is_read_again() -> None:
    core = DirectoryCore()
    core.changed(stored(A, 2, 2))
    core.changed(stored(A, 5, 5))
    assert core.inventory(page(A, 3, 2)) == [ReadInventoryOf(A, "1")]
    assert core.inventory(page(A, 5, 2, 5)) == []
    assert located(core, 2, 5) == {"a": 2}


def test_pages_of_different_moments_start_anew() -> None:
    core = DirectoryCore()
    assert core.heard(info(A)) == [ReadInventoryOf(A, "1")]
    assert core.inventory(page(A, 1, 1, following=1)) == [ReadInventoryOf(A, "1", 1)]
    assert core.inventory(page(A, 2, 2)) == [ReadInventoryOf(A, "1")]
    assert core.inventory(page(A, 2, 2, following=1)) == [ReadInventoryOf(A, "1", 1)]
    assert core.inventory(page(A, 2, 3)) == []
    assert located(core, 2, 3) == {"a": 2} and located(core, 1) == {}


def test_a_restarted_directory_reads_each_worker_it_hears_once() -> None:
    core = DirectoryCore()
    assert core.heard(info(A)) == [ReadInventoryOf(A, "1")]
    assert core.heard(info(A)) == []
    core.inventory(page(A, 7, 1, 2))
    assert core.changed(stored(A, 8, 3)) == []
    assert located(core, 1, 2, 3) == {"a": 3}


def test_an_inventory_that_fails_is_asked_for_by_the_next_event() -> None:
    core = DirectoryCore()
    wanted = core.changed(stored(A, 2, 2))
    core.inventory_failed(wanted[0])
    assert core.changed(stored(A, 3, 3)) == [ReadInventoryOf(A, "1")]


def test_a_restarted_worker_loses_its_old_entries_at_once_and_for_good() -> None:
    core = DirectoryCore()
    core.changed(stored(A, 1, 1, 2))
    core.changed(stored(A, 1, 9, incarnation="2"))
    assert located(core, 1) == {} and located(core, 9) == {"a": 1}
    assert core.changed(stored(A, 2, 3)) == []  # late, of the old incarnation
    asked = core.heard(info(A, "1"))  # late, or declared dead too early: only the worker can say
    assert asked == [ReadInventoryOf(A, "1")] and core.heard(info(A, "1")) == []
    core.inventory_failed(asked[0])
    assert located(core, 3) == {} and located(core, 9) == {"a": 1}


def test_a_worker_that_was_declared_dead_and_speaks_is_believed_once_it_answers() -> None:
    core = DirectoryCore()
    core.changed(stored(A, 1, 1))
    core.left(WorkerLeft(worker_id=A, incarnation="1", reason="silent"))
    assert core.heard(info(A)) == [ReadInventoryOf(A, "1")]
    assert core.inventory(page(A, 1, 1)) == [ReadInventoryOf(A, "1")]
    assert core.inventory(page(A, 1, 1)) == []
    assert located(core, 1) == {"a": 1}


def test_a_worker_that_left_is_gone_but_its_successor_is_not() -> None:
    core = DirectoryCore()
    core.changed(stored(A, 1, 1, incarnation="2"))
    core.left(WorkerLeft(worker_id=A, incarnation="1", reason="silent"))
    assert located(core, 1) == {"a": 1}
    core.left(WorkerLeft(worker_id=A, incarnation="2", reason="stopped"))
    assert located(core, 1) == {} and core.num_holders == 0
    assert core.changed(stored(A, 2, 1, incarnation="2")) == []


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_loss_repetition_and_order_converges(data: st.DataObject) -> None:
    """A real ledger makes the events; some are lost, repeated or late; the last event and readings bring it right."""
    ledger, core = BlockLedger(A, "1"), DirectoryCore()
    events: list[BlockEvent] = []
    held: dict[int, list[int]] = {}
    for number in range(data.draw(st.integers(1, 12))):
        if held and data.draw(st.booleans()):
            gone = data.draw(st.sampled_from(sorted(held)))
            del held[gone]
            event: BlockEvent | None = ledger.forget([gone])
        else:
            held[number] = [number] * 4
            event = ledger.record(BlockHasher(4, model_fingerprint="f"), [number] * 4, 4, [number])
        assert event is not None
        events.append(event)
    kept = [event for event in events[:-1] if data.draw(st.booleans())]
    sent = [*data.draw(st.permutations(kept + kept[: data.draw(st.integers(0, 3))])), events[-1]]
    wanted: list[ReadInventoryOf] = []
    for event in sent:
        wanted += core.changed(event)
        if wanted and data.draw(st.booleans()):
            wanted = core.inventory(ledger.inventory(wanted.pop().offset))
    for _ in range(20):
        if not wanted:
            break
        wanted = core.inventory(ledger.inventory(wanted.pop().offset))
    core.check_integrity()
    hashes = {hash_blocks(tokens, 4, model_fingerprint="f")[0] for tokens in held.values()}
    assert {h for h in hashes if core.locate([h])} == hashes
    assert core.num_blocks == len(hashes)
