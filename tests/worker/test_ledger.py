"""What the directory hears of a worker's blocks."""

from dataplane.blocks.kept import ContentChanges
from schemas.block import hash_blocks, split_hashes
from schemas.directory import BlocksEvicted, BlocksStored
from schemas.ids import WorkerId
from schemas.message import encode
from services.bus.limits import MIN_PAYLOAD_BYTES
from services.holder.kv.ledger import BlockLedger
from services.holder.limits import MESSAGE_BLOCKS

HASHES = hash_blocks(range(24), 4, model_fingerprint="f")


def test_events_are_numbered_without_gaps_and_nothing_says_nothing() -> None:
    ledger = BlockLedger(WorkerId("w"), "a")
    assert ledger.events(ContentChanges()) == []
    first = ledger.events(ContentChanges(stored=HASHES[:3]))
    second = ledger.events(ContentChanges(stored=HASHES[3:], evicted=HASHES[:1]))
    assert [type(event) for event in (*first, *second)] == [BlocksStored, BlocksEvicted, BlocksStored]
    assert [event.sequence for event in (*first, *second)] == [1, 2, 3]
    assert split_hashes(second[0].block_hashes) == HASHES[:1] and split_hashes(second[1].block_hashes) == HASHES[3:]


def test_a_long_change_is_several_events_that_fit_into_any_message() -> None:
    ledger, many = BlockLedger(WorkerId("w"), "a"), hash_blocks(range(3 * MESSAGE_BLOCKS - 1), 1, model_fingerprint="f")
    events = ledger.events(ContentChanges(stored=many, evicted=HASHES))
    assert [event.sequence for event in events] == [1, 2, 3, 4]
    assert [h for event in events[1:] for h in split_hashes(event.block_hashes)] == many
    assert all(len(encode(event)) <= MIN_PAYLOAD_BYTES for event in events)


def test_the_inventory_comes_in_pages_of_one_moment() -> None:
    """As long as a message may be; what changes between two pages comes as events, whose numbers are above theirs."""
    ledger, held = BlockLedger(WorkerId("w"), "a"), hash_blocks(range(5_000), 1, model_fingerprint="f")
    ledger.events(ContentChanges(stored=held[:1]))
    pages = [ledger.inventory(lambda: [("arena", held)], 0, MIN_PAYLOAD_BYTES)]
    while (offset := pages[-1].next_offset) is not None:
        ledger.events(ContentChanges(stored=HASHES))
        pages.append(ledger.inventory(lambda: [("arena", held[1:])], offset, MIN_PAYLOAD_BYTES))
    assert [h for page in pages for h in split_hashes(page.block_hashes)] == held
    assert {page.sequence for page in pages} == {1}
    sizes = [len(encode(page)) for page in pages]
    assert len(pages) == 4 and all(MIN_PAYLOAD_BYTES - 1_200 < size <= MIN_PAYLOAD_BYTES for size in sizes[:-1])
    assert ledger.inventory(lambda: [("arena", held)], 4_990).sequence == 4, "nothing is being read any more"


def test_who_begins_anew_reads_what_is_there_now() -> None:
    ledger = BlockLedger(WorkerId("w"), "a")
    for number in range(1, 3):
        ledger.events(ContentChanges(stored=HASHES[:number]))
        page = ledger.inventory(lambda: [("arena", HASHES * 1_000)], 0, MIN_PAYLOAD_BYTES)
        assert page.sequence == number and page.next_offset is not None
    ledger.renew("b")
    assert ledger.inventory(lambda: [("arena", HASHES)], page.next_offset or 0).sequence == 0
