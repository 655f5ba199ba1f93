"""What the directory hears of a worker's blocks."""

from dataplane.blocks.kept import ContentChanges
from schemas.block import hash_blocks, split_hashes
from schemas.directory import BlocksEvicted, BlocksStored
from schemas.ids import WorkerId
from services.worker.kv import ledger as ledger_module
from services.worker.kv.ledger import BlockLedger

HASHES = hash_blocks(range(24), 4, model_fingerprint="f")


def test_events_are_numbered_without_gaps_and_nothing_says_nothing() -> None:
    ledger = BlockLedger(WorkerId("w"), "a")
    assert ledger.events(ContentChanges()) == []
    first = ledger.events(ContentChanges(stored=HASHES[:3]))
    second = ledger.events(ContentChanges(stored=HASHES[3:], evicted=HASHES[:1]))
    assert [type(event) for event in (*first, *second)] == [BlocksStored, BlocksEvicted, BlocksStored]
    assert [event.sequence for event in (*first, *second)] == [1, 2, 3]
    assert split_hashes(second[0].block_hashes) == HASHES[:1] and split_hashes(second[1].block_hashes) == HASHES[3:]


def test_the_inventory_comes_in_pages_of_one_moment(monkeypatch) -> None:
    monkeypatch.setattr(ledger_module, "INVENTORY_PAGE_BLOCKS", 4)
    ledger = BlockLedger(WorkerId("w"), "a")
    ledger.events(ContentChanges(stored=HASHES))
    first = ledger.inventory([("arena", HASHES)], 0)
    assert (first.sequence, first.next_offset, split_hashes(first.block_hashes)) == (1, 4, HASHES[:4])
    last = ledger.inventory([("arena", HASHES)], 4)
    assert (last.sequence, last.next_offset, split_hashes(last.block_hashes)) == (1, None, HASHES[4:])
