"""The map in arrays says what a dict of sets says, whatever hashes somebody chooses; and what it may not hold."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.block import join_hashes
from schemas.directory import HolderPrefix, Tier
from schemas.ids import BlockHash, WorkerId
from services.directory import limits
from services.directory.map import MAX_HEAT, TIERS, BlockMap, Changed, Owner
from services.directory.table import BUCKET_SLOTS, BlockTable
from tests.share import examples

OWNERS = [Owner(WorkerId(f"w{at % 5}"), "1", TIERS[at // 5]) for at in range(8)]
"""Five workers, three of them with two tiers."""


def chosen_hash(number: int) -> BlockHash:
    """Hashes as nobody's text has them: of one bucket, of one first half, of an empty one; and some as they are."""
    low, high = [
        (0, number),
        (7, number),
        (number << 40 | 3, number),
        (number * 0x9E3779B97F4A7C15 % 2**64, number * 0xD1B54A32D192ED03 % 2**64),
    ][number % 4]
    return BlockHash(low.to_bytes(8, "little") + high.to_bytes(8, "little"))


class SimpleMap:
    """A dict of sets, one block at a time: what `BlockMap` is to say."""

    def __init__(self) -> None:
        self.owners_of: dict[BlockHash, set[Owner]] = {}
        self.gone: set[Owner] = set()
        self.heat: dict[BlockHash, int] = {}
        self.num_asked = 0

    def add(self, owner: Owner, hashes: list[BlockHash], room: int) -> Changed:
        num_added = num_left = 0
        for block_hash in hashes:
            if owner in self.owners_of.get(block_hash, ()):
                continue
            is_new = block_hash not in self.owners_of
            if num_added == room or (is_new and len(self.owners_of) >= limits.MAX_BLOCKS):
                num_left += 1
                continue
            self.owners_of.setdefault(block_hash, set()).add(owner)
            num_added += 1
        return Changed(num_added, num_left)

    def remove(self, owner: Owner, hashes: list[BlockHash]) -> Changed:
        num_removed = 0
        for block_hash in hashes:
            owners = self.owners_of.get(block_hash, set())
            num_removed += owner in owners
            owners.discard(owner)
            if not owners:
                self.owners_of.pop(block_hash, None)
                self.heat.pop(block_hash, None)
        return Changed(num_removed, 0)

    def sweep(self) -> None:
        for owner in self.gone:
            self.remove(owner, list(self.owners_of))
        self.gone.clear()

    def locate(self, hashes: list[BlockHash]) -> set[tuple[str, int, int, Tier]]:
        """All runs of all workers, block by block."""
        known = [block_hash for block_hash in hashes if block_hash in self.owners_of]
        for block_hash in set(known):
            self.heat[block_hash] = min(self.heat.get(block_hash, 0) + 1, MAX_HEAT)
        self.num_asked += len(known)
        if self.num_asked > limits.FADE_AFTER * len(self.owners_of):
            self.num_asked = 0
            self.heat = {block_hash: heat // 2 for block_hash, heat in self.heat.items()}
        found: set[tuple[str, int, int, Tier]] = set()
        for worker_id in {owner.worker_id for owner in OWNERS}:
            first, slowest = -1, 0
            for at, block_hash in enumerate([*hashes, None]):
                owners = self.owners_of.get(block_hash, set()) - self.gone if block_hash else set[Owner]()
                rank = min((TIERS.index(o.tier) for o in owners if o.worker_id == worker_id), default=None)
                if rank is None:
                    if first >= 0:
                        found.add((worker_id, first, at - first, TIERS[slowest]))
                    first, slowest = -1, 0
                else:
                    first, slowest = at if first < 0 else first, max(slowest, rank)
        return found

    def heat_for(self, owner: Owner, block_hash: BlockHash) -> int:
        return self.heat.get(block_hash, 0) if owner in self.owners_of.get(block_hash, ()) else 0


def runs_of(located: tuple[HolderPrefix, ...]) -> set[tuple[str, int, int, Tier]]:
    return {(run.worker_id, run.first_block, run.num_blocks, run.tier) for run in located}


NUMBERS = st.lists(st.integers(0, 199), max_size=60)


@settings(max_examples=examples(200), deadline=None)
@given(st.data())
def test_it_says_what_a_dict_of_sets_says(data: st.DataObject) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(limits, "MAX_BLOCKS", data.draw(st.sampled_from([25, 10_000])))
        blocks, model, bits = BlockMap(), SimpleMap(), dict[Owner, int]()
        for _ in range(data.draw(st.integers(1, 25))):
            owner = data.draw(st.sampled_from(OWNERS))
            hashes = [chosen_hash(number) for number in data.draw(NUMBERS)]
            if owner not in bits:
                bits[owner] = blocks.new_owner(owner)
                blocks.show(bits[owner])
            match data.draw(st.sampled_from(["add", "add", "add", "remove", "remove", "retire"])):
                case "add":
                    room = data.draw(st.sampled_from([0, 1, 7, 1_000_000]))
                    assert blocks.mark(bits[owner], join_hashes(hashes), room) == model.add(owner, hashes, room)
                case "remove":
                    assert blocks.unmark(bits[owner], join_hashes(hashes)) == model.remove(owner, hashes)
                case _:
                    blocks.retire([bits.pop(owner)])
                    model.gone.add(owner)
            asked = [chosen_hash(number) for number in data.draw(NUMBERS)]
            for _ in range(data.draw(st.sampled_from([1, 1, 9]))):
                assert runs_of(blocks.locate(join_hashes(asked))) == model.locate(asked)
            told = {owner: list(blocks.heat(bit, join_hashes(asked))) for owner, bit in bits.items()}
            assert told == {owner: [model.heat_for(owner, h) for h in asked] for owner in bits}
            if model.gone:  # the next holder of the bit has nothing of the one before
                while blocks.sweep(data.draw(st.integers(1, 500))):
                    blocks.check_integrity()
                model.sweep()
            blocks.check_integrity()
            assert blocks.num_blocks == len(model.owners_of)


def test_blocks_stay_found_while_the_table_grows_by_parts_and_shrinks() -> None:
    rng, table = random.Random(1), BlockTable(100_000)
    present: dict[bytes, int] = {}
    spilled_before = 0
    for value in range(1, 600):
        added = [rng.randbytes(16) for _ in range(rng.choice([1, 16, 300]))]
        assert table.insert(b"".join(added + added[:5]), value) == len(added)
        present.update(dict.fromkeys(added, value))
        if value % 3 == 0:
            dropped = rng.sample(sorted(present), len(present) // 4)
            table.free(table.find(b"".join(dropped)))
            for block_hash in dropped:
                del present[block_hash]
        if value % 20 == 0:
            table.check_integrity()
            assert table.values[table.find(b"".join(present))].tolist() == list(present.values())
        assert (table.find(rng.randbytes(16 * 50)) == -1).all()
        spilled_before = max(spilled_before, -table.first_slot)
    assert table.num_blocks == len(present) and 0 < spilled_before < 0.05 * len(present)


def test_hashes_that_are_all_of_one_bucket_cost_what_a_dict_costs() -> None:
    """Somebody with a holder's key chooses them."""
    table = BlockTable(200_000)
    hashes = [(number << 32 | 1).to_bytes(16, "little") for number in range(1, 20_001)]
    for first in range(0, len(hashes), 5_000):
        table.insert(b"".join(hashes[first : first + 5_000]), 1)
    assert table.num_blocks == 20_000 and -table.first_slot == 20_000 - BUCKET_SLOTS
    table.check_integrity()
    table.free(table.find(b"".join(hashes)))
    assert table.num_blocks == 0
    table.insert(b"".join(hashes), 2)
    assert -table.first_slot <= 20_000, "spare slots are used again"
    table.check_integrity()


def hashes_of(numbers: range) -> list[BlockHash]:
    return [chosen_hash(4 * number + 3) for number in numbers]


@pytest.mark.parametrize("num_at_once", [3, 70])
def test_a_sweep_clears_everything_also_while_the_table_grows_under_it(num_at_once: int) -> None:
    rng, blocks = random.Random(num_at_once), BlockMap()
    gone, stays = (blocks.new_owner(owner) for owner in OWNERS[:2])
    blocks.show(gone)
    blocks.show(stays)
    of_gone = [BlockHash(rng.randbytes(16)) for _ in range(3_000)]
    blocks.mark(gone, join_hashes(of_gone), 1_000_000)
    blocks.mark(stays, join_hashes(of_gone[::3]), 1_000_000)
    blocks.retire([gone])
    num_stored = 0
    while blocks.sweep(197):
        added = [BlockHash(rng.randbytes(16)) for _ in range(num_at_once)]
        assert blocks.mark(stays, join_hashes(added), 1_000_000) == Changed(num_at_once, 0)
        num_stored += num_at_once
    assert num_stored > 100 and blocks.num_blocks == 1_000 + num_stored
    blocks.check_integrity()  # the bit has no owner now: no block has it


def held_by(owner: Owner, *hashes: list[BlockHash]) -> tuple[BlockMap, int]:
    blocks = BlockMap()
    bit = blocks.new_owner(owner)
    blocks.show(bit)
    for each in hashes:
        blocks.mark(bit, join_hashes(each), 1_000_000)
    return blocks, bit


def test_heat_ends_at_a_byte_and_what_is_asked_for_less_stays_colder() -> None:
    many = [BlockHash(random.Random(at).randbytes(16)) for at in range(1_000)]
    blocks, bit = held_by(OWNERS[0], many)
    for times in range(MAX_HEAT + 50):
        blocks.locate(join_hashes(many[: 2 if times % 2 else 1]))
    assert list(blocks.heat(bit, join_hashes(many[:3]))) == [MAX_HEAT, (MAX_HEAT + 50) // 2, 0]
    blocks.check_integrity()


@pytest.mark.parametrize("hashes", [hashes_of(range(40)), [chosen_hash(4 * at + 1) for at in range(40)]])
def test_old_heat_fades_as_others_are_asked_for_and_the_beginning_of_a_prompt_stays_as_hot(
    hashes: list[BlockHash],
) -> None:
    """Also of those that lie in spare slots."""
    blocks, bit = held_by(OWNERS[0], hashes)
    old, new = join_hashes(hashes[:20]), join_hashes(hashes[20:])
    for at in range(12):
        blocks.locate(old[: 16 * (20 - at)])
    before = blocks.heat(bit, old)
    assert before[0] == 12 and before == bytes(sorted(before, reverse=True))
    heats = list[int]()
    for _ in range(200):
        blocks.locate(new)
        told = blocks.heat(bit, old)
        assert told == bytes(sorted(told, reverse=True))
        heats.append(told[0])
    assert heats == sorted(heats, reverse=True) and heats[-1] == 0, "nobody has asked for it since"
    assert min(blocks.heat(bit, new)) >= limits.FADE_AFTER // 2


def test_heat_stays_with_a_block_while_the_table_grows_and_its_holders_change() -> None:
    rng = random.Random(1)
    hashes = [BlockHash(rng.randbytes(16)) for _ in range(100)]
    blocks, first = held_by(OWNERS[0], hashes)
    second = blocks.new_owner(OWNERS[1])
    blocks.show(second)
    for at in range(7):
        blocks.locate(join_hashes(hashes[: 100 - at]))
    before = blocks.heat(first, join_hashes(hashes))
    assert set(before[:90]) == {7} and before[99] == 1
    for _ in range(20):
        blocks.mark(second, join_hashes([BlockHash(rng.randbytes(16)) for _ in range(500)]), 1_000_000)
    assert blocks.heat(first, join_hashes(hashes)) == before
    assert not any(blocks.heat(second, join_hashes(hashes))), "it holds none of them"
    for at in range(0, 100, 10):
        blocks.mark(second, join_hashes(hashes[at : at + 10]), 1_000_000)
    blocks.unmark(first, join_hashes(hashes))
    assert blocks.heat(second, join_hashes(hashes)) == before
    blocks.unmark(second, join_hashes(hashes[:50]))
    blocks.mark(second, join_hashes(hashes[:50]), 1_000_000)
    assert blocks.heat(second, join_hashes(hashes)) == bytes(50) + before[50:], "who was gone comes back cold"
    assert blocks.heat(second, b"") == b""
    blocks.check_integrity()


def test_different_sets_of_holders_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_SETS", 2)
    blocks = BlockMap()
    a, b, c = (blocks.new_owner(owner) for owner in OWNERS[:3])
    for bit in (a, b, c):
        blocks.show(bit)
    prompt = join_hashes(hashes_of(range(6)))
    assert blocks.mark(a, prompt, 99) == Changed(6, 0)
    assert blocks.mark(b, prompt[:32], 99) == Changed(2, 0)
    assert blocks.mark(c, prompt[16:48], 99) == Changed(0, 2), "a third set of holders"
    assert blocks.mark(c, join_hashes(hashes_of(range(10, 12))), 99) == Changed(0, 2)
    assert blocks.unmark(a, prompt[:16]) == Changed(0, 1), "it goes on being named for what it has evicted"
    assert runs_of(blocks.locate(prompt)) == {("w0", 0, 6, "arena"), ("w1", 0, 2, "arena")}
    blocks.retire([a])
    while blocks.sweep(7):
        blocks.check_integrity()
    assert runs_of(blocks.locate(prompt)) == {("w1", 0, 2, "arena")}
    assert blocks.mark(c, prompt[16:48], 99) == Changed(1, 1), "what nobody has any more makes room"
    blocks.check_integrity()


def test_holders_of_every_other_block_do_not_keep_everybody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_RUN_ENDS", 20)
    blocks = BlockMap()
    bits = [blocks.new_owner(owner) for owner in OWNERS[:3]]
    for bit in bits:
        blocks.show(bit)
    hashes = hashes_of(range(100))
    blocks.mark(bits[0], join_hashes(hashes), 999)
    blocks.mark(bits[1], join_hashes(hashes[::2]), 999)
    located = blocks.locate(join_hashes(hashes))
    assert runs_of(located) >= {("w0", 0, 20, "arena"), ("w1", 0, 1, "arena"), ("w1", 2, 1, "arena")}
    assert all(run.first_block + run.num_blocks <= 20 for run in located), "no further than it was followed"
