"""The bookkeeping of both tiers: bounds, recency, references."""

from hypothesis import given
from hypothesis import strategies as st

from dataplane.blocks.kept import ContentChanges, KeptBlocks
from schemas.ids import BlockHash
from services.store.index import BackIndex
from services.store.tiers import key_of
from tests.store.rig import contents_at, hash_of, hashes_of, key_at, keys_at


def filled(num_blocks: int, *numbers: int) -> KeptBlocks:
    memory = KeptBlocks(num_blocks)
    for number in numbers:
        blocks = memory.allocate(1)
        assert blocks
        memory.put(blocks[0], hash_of(number))
        memory.release(blocks)
    memory.changes.drain()
    return memory


def test_the_least_recently_used_goes_first() -> None:
    memory = filled(3, 1, 2, 3)
    memory.release(memory.take([hash_of(1)]))
    assert memory.allocate(2) is not None
    assert list(memory.block_of) == contents_at(1)
    assert memory.changes.drain() == ContentChanges([], hashes_of(2, 3))


def test_what_is_referred_to_is_never_given_up() -> None:
    memory = filled(2, 1, 2)
    held = memory.take(hashes_of(1, 2))
    assert len(held) == 2
    assert memory.allocate(1) is None
    memory.release(held[1:])
    assert memory.allocate(2) is None
    assert memory.allocate(1) == held[1:]
    memory.check_integrity()


def test_a_run_ends_at_the_first_that_is_not_here() -> None:
    memory = filled(4, 1, 3)
    assert len(memory.take(hashes_of(1, 2, 3))) == 1
    assert memory.take(hashes_of(2, 3)) == []


def test_the_same_content_is_kept_once() -> None:
    memory = filled(4, 1)
    again = memory.allocate(1)
    assert again
    memory.put(again[0], hash_of(1))
    memory.release(again)
    assert memory.pool.num_free == 3
    assert memory.changes.drain() == ContentChanges()


def test_what_came_and_went_between_two_looks_is_not_mentioned() -> None:
    memory = filled(1, 1)
    for number in (2, 3):
        blocks = memory.allocate(1)
        assert blocks
        memory.put(blocks[0], hash_of(number))
        memory.release(blocks)
    assert memory.changes.drain() == ContentChanges(hashes_of(3), hashes_of(1))


def test_a_used_value_stays_behind_memory() -> None:
    back = BackIndex(3)
    for number in (1, 2, 3):
        back.put(key_at(number))
    back.touch(keys_at(1))
    assert back.make_room(2) == keys_at(2, 3)
    assert back.make_room(2) == []


def test_of_a_used_sequence_the_end_is_given_up_first() -> None:
    back = BackIndex(3)
    for number in (1, 2, 3):
        back.put(key_at(number))
    back.touch(keys_at(1, 2, 3))
    assert back.give_up(2) == keys_at(3, 2)


def test_what_was_there_is_cut_to_the_bound() -> None:
    back = BackIndex(2)
    assert back.restore(keys_at(1, 2, 3)) == keys_at(1)
    assert back.hashes() == hashes_of(2, 3)
    assert back.changes.drain() == ContentChanges(), "the inventory tells, not an event"


Step = tuple[str, int, int]
KINDS = ["fill", "take", "release", "back", "touch", "drop"]
steps = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 9), st.integers(1, 4)), max_size=60)


@given(steps)
def test_whatever_happens_nothing_leased_changes_and_the_events_tell_the_truth(history: list[Step]) -> None:
    """A model of each tier: content by hash, told from its events alone; blocks that are held keep their content."""
    memory, back = KeptBlocks(6), BackIndex(5)
    content: dict[int, BlockHash] = {}
    held: list[tuple[list[int], list[BlockHash]]] = []
    told: dict[str, set[BlockHash]] = {"memory": set(), "back": set()}
    for kind, number, count in history:
        hashes = hashes_of(*range(number, number + count))
        if kind == "fill" and (blocks := memory.allocate(count)) is not None:
            for block, block_hash in zip(blocks, hashes, strict=True):
                assert not any(block in kept for kept, _ in held), "a block under a lease was given to somebody else"
                content[block] = block_hash
                memory.put(block, block_hash)
            memory.release(blocks)
        elif kind == "take":
            blocks = memory.take(hashes)
            assert [content[block] for block in blocks] == hashes[: len(blocks)]
            held.append((blocks, hashes[: len(blocks)]))
        elif kind == "release" and held:
            memory.release(held.pop(number % len(held))[0])
        elif kind == "back":
            back.make_room(min(count, back.max_values))
            for block_hash in hashes[: back.max_values]:
                back.put(key_of("", block_hash))
        elif kind == "touch":
            back.touch([key_of("", block_hash) for block_hash in hashes])
        elif kind == "drop":
            back.drop(key_of("", hashes[0]))
        tiers = (
            ("memory", memory.changes, [content.block_hash for content in memory.block_of]),
            ("back", back.changes, back.hashes()),
        )
        for name, log, present in tiers:
            changes = log.drain()
            stored, evicted = changes.stored, changes.evicted
            assert not told[name] & set(stored), "nothing comes twice"
            assert told[name] >= set(evicted), "only what was there goes"
            told[name] = (told[name] | set(stored)) - set(evicted)
            assert told[name] == set(present)
        assert len(back) <= back.max_values
        for blocks, expected in held:
            assert [content[block] for block in blocks] == expected
        memory.check_integrity()
