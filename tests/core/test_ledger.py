"""What the directory hears of a worker's blocks."""

from schemas.block import BlockHasher, hash_blocks, split_hashes
from schemas.directory import BlocksEvicted, BlocksStored
from schemas.ids import WorkerId
from services.worker.ledger import BlockLedger


def hasher() -> BlockHasher:
    return BlockHasher(4, model_fingerprint="f")


def stored(ledger: BlockLedger, tokens: list[int], table: list[int], num_tokens: int | None = None) -> BlocksStored:
    event = ledger.record(hasher(), tokens, num_tokens or len(tokens), table)
    assert event is not None
    return event


def test_only_full_blocks_are_stored_and_each_once() -> None:
    ledger, chain, tokens = BlockLedger(WorkerId("w"), "a"), hasher(), list(range(10))
    assert ledger.record(chain, tokens, 3, [5, 6, 7]) is None
    first = ledger.record(chain, tokens, 4, [5, 6, 7])
    second = ledger.record(chain, tokens, 10, [5, 6, 7])
    assert first is not None and second is not None and (first.sequence, second.sequence) == (1, 2)
    both = split_hashes(first.block_hashes) + split_hashes(second.block_hashes)
    assert both == hash_blocks(tokens, 4, model_fingerprint="f")


def test_content_held_twice_is_told_once_and_gone_with_its_last_copy() -> None:
    ledger, tokens = BlockLedger(WorkerId("w"), "a"), list(range(8))
    stored(ledger, tokens, [0, 1])
    assert ledger.record(hasher(), tokens, 8, [4, 5]) is None
    assert ledger.forget([0, 1]) is None
    gone = ledger.forget([4, 5, 6])
    assert isinstance(gone, BlocksEvicted) and gone.sequence == 2
    assert split_hashes(gone.block_hashes) == hash_blocks(tokens, 4, model_fingerprint="f")
    assert ledger.forget([4, 5]) is None


def test_the_inventory_is_what_was_stored_and_not_evicted() -> None:
    ledger = BlockLedger(WorkerId("w"), "a")
    stored(ledger, list(range(8)), [0, 1])
    stored(ledger, list(range(100, 108)), [2, 3])
    ledger.forget([0, 1])
    page = ledger.inventory(0)
    assert (page.sequence, page.next_offset) == (3, None)
    assert split_hashes(page.block_hashes) == hash_blocks(range(100, 108), 4, model_fingerprint="f")


def test_recording_a_block_again_counts_it_once() -> None:
    ledger, tokens = BlockLedger(WorkerId("w"), "a"), list(range(8))
    stored(ledger, tokens, [0, 1])
    assert ledger.record(hasher(), tokens, 8, [0, 1]) is None
    assert ledger.forget([0, 1]) is not None
    assert ledger.inventory(0).block_hashes == b""
