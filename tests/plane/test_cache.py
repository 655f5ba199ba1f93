"""The block cache against a model that knows what lies in every slot of the arena."""

from dataclasses import dataclass, field

import hypothesis.strategies as st
import pytest
from hypothesis import given
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dataplane.blocks.cache import Allocation, BlockCache, max_sequence_tokens, ring_blocks
from dataplane.blocks.kept import Content
from dataplane.blocks.layout import ArenaShape, BlockTables, KVLayout, block_ids, slot_spans, uniform_shape
from schemas.block import hash_blocks
from schemas.ids import BlockHash

BLOCK, CHUNK = 4, 8


def layout(*windows: int) -> KVLayout:
    return KVLayout(
        weights="w", dtype="float32", num_layers=len(windows), num_kv_heads=1, head_dim=4, block_size=BLOCK,
        windows=windows if any(windows) else (),
    )  # fmt: skip


def hashes_of(tokens: list[int]) -> list[BlockHash]:
    return hash_blocks(tokens, BLOCK, model_fingerprint="f")


def slots(tables: BlockTables, group: int, start: int, end: int) -> list[int]:
    spans = slot_spans(tables[group], BLOCK, start, end)
    return [slot for first, count in spans for slot in range(first, first + count)]


def can_hold(cache: BlockCache, num_tokens: int) -> bool:
    """Say whether an empty arena holds a sequence this long, as the worker's limits would."""
    longest = max_sequence_tokens(cache.shape, CHUNK)
    return not longest or num_tokens <= longest


@dataclass(eq=False)
class Running:
    """A sequence on the worker. `num_computed`: tokens whose KV was written."""

    tokens: list[int]
    tables: BlockTables
    num_computed: int
    num_landed: int = 0
    num_stored_blocks: int = 0


@dataclass
class Arena:
    """What was last written into each slot: (token, position, all before it), which is what KV depends on."""

    cache: BlockCache
    written: list[dict[int, tuple[int, ...]]] = field(init=False)

    def __post_init__(self) -> None:
        self.written = [{} for _ in self.cache.layout.groups]

    def write(self, tokens: list[int], tables: BlockTables, start: int, end: int) -> None:
        for group in range(len(self.written)):
            for position, slot in zip(range(start, end), slots(tables, group, start, end), strict=True):
                self.written[group][slot] = tuple(tokens[: position + 1])

    def check(self, tokens: list[int], tables: BlockTables, end: int, first: int = 0) -> None:
        """Assert that whoever goes on after `end` tokens sees the right KV in every group."""
        for group, (window, _) in enumerate(self.cache.layout.groups):
            start = max(first, end - window + 1) if window else first
            for position, slot in zip(range(start, end), slots(tables, group, start, end), strict=True):
                assert self.written[group].get(slot) == tuple(tokens[: position + 1]), (group, position)


class CacheMachine(RuleBasedStateMachine):
    """Sequences with common prefixes are admitted, computed in chunks, lent, ended, in any order, in a tight arena."""

    @initialize(
        windows=st.sampled_from([(0,), (0, 0), (0, 6), (5, 0, 6), (6,), (4, 9)]),
        num_blocks=st.integers(10, 30),
    )
    def start(self, windows: tuple[int, ...], num_blocks: int) -> None:
        self.cache = BlockCache(uniform_shape(layout(*windows), num_blocks), chunk_tokens=CHUNK)
        self.arena = Arena(self.cache)
        self.running: list[Running] = []
        self.lent: list[tuple[list[int], Allocation, int]] = []
        self.known: set[BlockHash] = set()

    @rule(
        choice=st.lists(st.integers(0, 1), min_size=2, max_size=9),
        rest=st.integers(0, 5),
        answer=st.integers(1, 9),
        landed=st.floats(0, 1),
    )
    def admit(self, choice: list[int], rest: int, answer: int, landed: float) -> None:
        prompt = [token for bit in choice for token in [bit] * BLOCK] + [7] * rest
        tokens = prompt + [9] * answer
        before = self.cache.num_free + self.cache.num_cached
        allocation = self.cache.admit(hashes_of(prompt), len(tokens), len(prompt) - 1)
        if allocation is None:
            fits = can_hold(self.cache, len(tokens))
            assert self.running or self.lent or not fits, "an idle arena takes any sequence that fits"
            assert self.cache.num_free + self.cache.num_cached == before
            return
        assert allocation.num_cached_tokens < len(prompt)
        self.arena.check(prompt, allocation.tables, allocation.num_cached_tokens)
        cached = allocation.num_cached_tokens
        start = max(cached, int(landed * len(prompt)))
        self.land(tokens, allocation.tables, cached, start)
        self.running.append(Running(tokens, allocation.tables, start, start))

    def land(self, tokens: list[int], tables: BlockTables, first: int, end: int) -> None:
        """Read from elsewhere: of windowed groups only what is still needed."""
        layout = self.cache.layout
        for group in range(len(tables)):
            start = max(first, layout.first_needed_block(group, end) * BLOCK)
            for position, slot in zip(range(start, end), slots(tables, group, start, end), strict=True):
                self.arena.written[group][slot] = tuple(tokens[: position + 1])

    @precondition(lambda self: self.running)
    @rule(data=st.data(), size=st.integers(1, CHUNK))
    def compute(self, data: st.DataObject, size: int) -> None:
        run = data.draw(st.sampled_from(self.running))
        end = min(run.num_computed + size, len(run.tokens))
        self.arena.write(run.tokens, run.tables, run.num_computed, end)
        self.arena.check(run.tokens, run.tables, end, first=0)
        run.num_computed = end
        self.store(run, ended=False)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        run = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.store(run, ended=True)
        self.cache.free(run.tables)

    @rule(choice=st.lists(st.integers(0, 1), min_size=1, max_size=9), first=st.integers(0, 3))
    def lend(self, choice: list[int], first: int) -> None:
        tokens = [token for bit in choice for token in [bit] * BLOCK]
        lent = self.cache.lend(hashes_of(tokens)[first:], first)
        if lent is not None:
            assert first * BLOCK < lent.num_cached_tokens <= len(tokens)
            self.arena.check(tokens, lent.tables, lent.num_cached_tokens, first=first * BLOCK)
            self.lent.append((tokens, lent, first))

    @precondition(lambda self: self.lent)
    @rule()
    def give_back(self) -> None:
        tokens, lent, first = self.lent.pop()
        self.arena.check(tokens, lent.tables, lent.num_cached_tokens, first=first * BLOCK)
        self.cache.free(lent.tables)

    def store(self, run: Running, *, ended: bool) -> None:
        self.cache.store(
            run.tables, hashes_of(run.tokens), run.num_stored_blocks, run.num_computed, run.num_landed, ended=ended
        )
        run.num_stored_blocks = run.num_computed // BLOCK

    @invariant()
    def keeps_its_books(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.cache.check_integrity()
        [(_, changes)] = self.cache.take_changes()
        assert not self.known & set(changes.stored) and set(changes.evicted) <= self.known
        self.known = (self.known | set(changes.stored)) - set(changes.evicted)
        [(_, here)] = self.cache.contents()
        assert self.known == set(here), "the events tell exactly what is here"

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            for run in self.running:
                self.cache.free(run.tables)
            for _, lent, _ in self.lent:
                self.cache.free(lent.tables)
            assert self.cache.num_free + self.cache.num_cached == self.cache.num_blocks, "nothing is lost"


TestCache = CacheMachine.TestCase


def computed(cache: BlockCache, tokens: list[int], num_tokens: int | None = None) -> Allocation:
    """Admit, compute and end a sequence."""
    allocation = cache.admit(hashes_of(tokens), num_tokens or len(tokens), len(tokens) - 1)
    assert allocation is not None
    cache.store(allocation.tables, hashes_of(tokens), 0, len(tokens), 0, ended=True)
    cache.free(allocation.tables)
    return allocation


def test_a_second_prompt_begins_with_the_blocks_of_the_first() -> None:
    cache = BlockCache(uniform_shape(layout(0), 8), chunk_tokens=CHUNK)
    first = computed(cache, list(range(10)))
    second = cache.admit(hashes_of([*range(8), 50, 51, 52]), 11, 10)
    assert second is not None and second.num_cached_tokens == 8
    assert block_ids(second.tables[0].segments)[:2] == block_ids(first.tables[0].segments)[:2]


def test_a_hit_is_never_the_whole_prompt() -> None:
    cache = BlockCache(uniform_shape(layout(0), 8), chunk_tokens=CHUNK)
    computed(cache, list(range(8)))
    again = cache.admit(hashes_of(list(range(8))), 8, 7)
    assert again is not None and again.num_cached_tokens == 4


def test_the_least_recently_used_goes_first_and_of_one_sequence_its_end() -> None:
    cache = BlockCache(uniform_shape(layout(0), 4), chunk_tokens=CHUNK)
    computed(cache, [1] * 8)
    computed(cache, [2] * 8)
    coldest = [*reversed(hashes_of([1] * 8)), *reversed(hashes_of([2] * 8))]
    assert cache.coldest(4) == [Content("", each) for each in coldest]
    assert cache.admit(hashes_of([3] * 4), 4, 3) is not None
    assert cache.contents() == [("arena", [hashes_of([1] * 8)[0], *hashes_of([2] * 8)])]


def test_without_caching_nothing_is_kept() -> None:
    cache = BlockCache(uniform_shape(layout(0), 4), chunk_tokens=CHUNK, caching=False)
    computed(cache, [1] * 8)
    assert (cache.num_free, cache.num_cached, cache.contents()) == (4, 0, [("arena", [])])


def test_a_windowed_group_needs_a_ring_only() -> None:
    shape = ArenaShape(layout=layout(0, 6), num_blocks=(100, ring_blocks(6, CHUNK, BLOCK)))
    cache = BlockCache(shape, chunk_tokens=CHUNK)
    allocation = cache.admit([], 400, 0)
    assert allocation is not None
    own = set(block_ids(allocation.tables[1].segments))
    assert len(own) == ring_blocks(6, CHUNK, BLOCK) and allocation.tables[1].end_block == 100


@pytest.mark.parametrize(
    ("windows", "num_blocks", "longest"),
    [((0,), (10,), 40), ((0, 6), (10, 6), 40), ((0, 6), (10, 3), 12), ((6,), (6,), 0), ((6,), (4,), 16)],
)
def test_the_longest_sequence_is_bound_by_the_smallest_group(
    windows: tuple[int, ...], num_blocks: tuple[int, ...], longest: int
) -> None:
    shape = ArenaShape(layout=layout(*windows), num_blocks=num_blocks)
    assert max_sequence_tokens(shape, CHUNK) == longest


@given(num_blocks=st.integers(1, 20), num_tokens=st.integers(1, 100), windows=st.sampled_from([(0,), (0, 6), (6,)]))
def test_what_fits_into_an_empty_arena_is_admitted(num_blocks: int, num_tokens: int, windows: tuple[int, ...]) -> None:
    cache = BlockCache(uniform_shape(layout(*windows), num_blocks), chunk_tokens=CHUNK)
    assert (cache.admit([], num_tokens, 0) is not None) == can_hold(cache, num_tokens)
