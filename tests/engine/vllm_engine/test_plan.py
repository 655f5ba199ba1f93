"""Each block of a sequence is saved once, after its tokens; what vLLM takes for computed is loaded; what is announced
is there."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.blocks.layout import BlockTable, KVLayout, Segment
from schemas.ids import RequestId
from schemas.request import SamplingParams
from services.engine.interface import EngineLostError, Sequence
from services.engine.vllm_engine.plan import NO_BLOCK, Copies, GroupPair, TrackedSequence
from services.engine.vllm_engine.runs import Run, runs_of

SIZE = 4
LAYOUT = KVLayout(
    weights="w", dtype="float32", num_layers=2, num_kv_heads=1, head_dim=4, block_size=SIZE, whole_blocks=True
)


class Listener:
    def advance(self, layer: int, num_tokens: int, mark: int = 0) -> None: ...


def tracked(num_tokens: int, num_present: int = 0, *, is_leased: bool = False) -> TrackedSequence:
    sequence = Sequence(
        RequestId("r"), 1, list(range(num_tokens)), num_tokens, SamplingParams(max_tokens=100),
        (BlockTable((Segment(100, 100),)),), num_computed_tokens=num_present,
        layer_listener=Listener() if is_leased else None,
    )  # fmt: skip
    return TrackedSequence(sequence, LAYOUT, [GroupPair(0, 0)])


def engine_blocks(first: int = 7) -> range:
    return range(first, first + 100)


def plan(one: TrackedSequence, start: int, num_tokens: int, blocks: range) -> Copies:
    """Return the copies of the only pair."""
    copies = one.plan(start, num_tokens, [blocks])
    return copies._replace(loads=copies.loads[0], saves=copies.saves[0])  # type: ignore[arg-type]


def test_a_prompt_in_chunks() -> None:
    """Of a hand-over the last block is saved as it is, and announced to its end."""
    one = tracked(11, is_leased=True)
    first, second = plan(one, 0, 6, engine_blocks()), plan(one, 6, 5, engine_blocks())
    assert (first.saves, first.announced) == ((Run(100, 7, 1),), 4)
    assert (second.saves, second.announced) == ((Run(101, 8, 2),), 12)
    assert (first.loads, second.loads) == ((), ())
    assert one.num_present == 11


def test_a_prompt_that_nobody_reads_keeps_whole_blocks() -> None:
    one = tracked(11)
    copies = plan(one, 0, 11, engine_blocks())
    assert (copies.saves, copies.announced, one.num_present) == ((Run(100, 7, 2),), 8, 8)
    assert plan(one, 11, 1, engine_blocks()).saves == (Run(102, 9, 1),), "its answer has filled the next one"


def test_a_decode_worker_loads_what_landed_and_computes_one_token() -> None:
    one = tracked(12, 11)
    assert one.num_matched(12, 0) == 11
    one.promised(12, 11)
    copies = plan(one, 11, 1, engine_blocks())
    assert (copies.loads, copies.start, copies.end) == ((Run(100, 7, 3),), 11, 12)
    assert copies.saves == (Run(102, 9, 1),), "the block that it filled is its own"


def test_the_last_token_is_always_computed() -> None:
    assert tracked(12, 11).num_matched(8, 0) == 7
    assert tracked(12, 4).num_matched(12, 8) == 0, "vLLM has more itself"


def test_what_vllm_had_cached_is_saved_in_the_step_that_uses_it() -> None:
    """Not before: a request of the same step may be computing it."""
    one = tracked(13, 4)
    assert one.num_matched(13, 8) == 0
    one.promised(13, 0)
    copies = plan(one, 8, 5, engine_blocks())
    assert (copies.loads, copies.saves) == ((), (Run(101, 8, 2),))


def test_one_that_begins_again_loads_what_it_had_saved() -> None:
    one = tracked(10)
    plan(one, 0, 10, engine_blocks())
    assert one.num_present == 8
    assert one.num_matched(11, 0) == 8
    one.promised(11, 8)
    copies = plan(one, 8, 3, engine_blocks(50))
    assert (copies.loads, copies.saves) == ((Run(100, 50, 2),), ()), "what somebody may be reading is not written again"


def test_runs() -> None:
    assert runs_of([]) == []
    assert runs_of([(1, 5), (2, 6), (4, 7), (5, 9)]) == [Run(1, 5, 2), Run(4, 7, 1), Run(5, 9, 1)]


@given(st.data(), st.integers(1, 60), st.booleans())
def test_whatever_is_scheduled(data: st.DataObject, num_tokens: int, is_leased: bool) -> None:
    one = tracked(num_tokens, data.draw(st.integers(0, num_tokens - 1)), is_leased=is_leased)
    present = -(-one.num_present // SIZE)
    has: dict[int, int] = dict.fromkeys(range(present), one.num_present)
    """The arena's blocks by number, and how many of the sequence's tokens were computed when each was saved."""
    length, computed, blocks, announced = num_tokens, 0, engine_blocks(), 0
    filled: set[int] = set()
    """vLLM's blocks that have what they should."""
    begins = True
    for _ in range(data.draw(st.integers(1, 12))):
        if begins:
            local = data.draw(st.integers(0, (length - 1) // SIZE)) * SIZE
            filled = set(range(local // SIZE))
            external = one.num_matched(length, local)
            one.promised(length, external)
            computed, begins = local + external, False
        count = data.draw(st.integers(1, length - computed))
        before = one.num_present
        copies = plan(one, computed, count, blocks)
        for arena, engine, number in copies.loads:
            assert arena - 100 == engine - blocks[0], "block n goes to block n"
            assert all(block in has for block in range(arena - 100, arena - 100 + number))
            filled |= set(range(arena - 100, arena - 100 + number))
        assert filled >= set(range(computed // SIZE)), "all that vLLM takes for computed is there"
        computed += count
        filled |= set(range(computed // SIZE)) | ({computed // SIZE} if computed % SIZE else set())
        for arena, engine, number in copies.saves:
            for block in range(arena - 100, arena - 100 + number):
                assert block in filled and block - 0 == engine - blocks[0] + (block - (arena - 100))
                assert block * SIZE >= before - SIZE, "what was whole before is not written again"
                has[block] = computed
        assert copies.announced <= max(computed, -(-num_tokens // SIZE) * SIZE)
        if is_leased:
            assert all(block in has for block in range(copies.announced // SIZE))
            announced = max(announced, copies.announced)
        assert one.num_present <= max(computed, before)
        assert all(block in has for block in range(one.num_present // SIZE))
        if computed == length:
            if is_leased:
                assert announced >= num_tokens
            length += 1
        begins = data.draw(st.integers(0, 4)) == 0
        if begins:
            blocks = engine_blocks(data.draw(st.integers(1, 500)))


def windowed(window: int, num_tokens: int, num_present: int, table: BlockTable) -> TrackedSequence:
    """A sequence of two layers: the first sees all tokens, the second `window` of them."""
    layout = KVLayout(
        weights="w", dtype="float32", num_layers=2, num_kv_heads=1, head_dim=4, block_size=SIZE, whole_blocks=True,
        windows=(0, window),
    )  # fmt: skip
    sequence = Sequence(
        RequestId("r"), 1, list(range(num_tokens)), num_tokens, SamplingParams(max_tokens=100),
        (BlockTable((Segment(100, 100),)), table), num_computed_tokens=num_present,
    )  # fmt: skip
    return TrackedSequence(sequence, layout, [GroupPair(0, 0), GroupPair(1, 1)])


def test_of_a_window_only_what_it_sees_is_loaded() -> None:
    """The arena has it from block 3 on, in a ring of three; vLLM has no blocks before it."""
    ring = BlockTable((Segment(5, 3), Segment(5, 3)), first_block=3)
    one = windowed(7, 23, 22, ring)
    one.promised(23, one.num_matched(23, 0))
    copies = one.plan(22, 1, [engine_blocks(), [NO_BLOCK] * 4 + [30, 31]])
    assert copies.loads == ((Run(100, 7, 6),), (Run(6, 30, 2),)), "blocks 4 and 5 of a window over tokens 16 to 22"
    assert copies.saves == ((), ())


def test_a_ring_is_saved_block_by_block() -> None:
    one = windowed(7, 30, 0, BlockTable((Segment(5, 3),) * 4))
    copies = one.plan(0, 10, [engine_blocks(), engine_blocks(40)])
    assert copies.saves == ((Run(100, 7, 2),), (Run(5, 40, 2),))
    copies = one.plan(10, 7, [engine_blocks(), [NO_BLOCK, *range(41, 50)]])
    assert copies.saves == ((Run(102, 9, 2),), (Run(7, 42, 1), Run(5, 43, 1)))


@pytest.mark.parametrize(
    ("table", "engine_blocks_of_window"),
    [
        pytest.param(BlockTable((Segment(5, 3),), first_block=5), [NO_BLOCK] * 4 + [30, 31], id="arena"),
        pytest.param(BlockTable((Segment(5, 3),), first_block=3), [NO_BLOCK] * 5 + [31], id="vllm"),
    ],
)
def test_a_window_s_block_that_one_side_lacks_ends_the_engine(
    table: BlockTable, engine_blocks_of_window: list[int]
) -> None:
    one = windowed(7, 23, 22, table)
    one.promised(23, one.num_matched(23, 0))
    with pytest.raises(EngineLostError):
        one.plan(22, 1, [engine_blocks(), engine_blocks_of_window])


def test_a_layer_is_told_from_its_name() -> None:
    connector = pytest.importorskip("vllm", reason="vLLM is not installed here: make vllm-test")
    assert connector
    from services.engine.vllm_engine.connector import layer_of

    assert layer_of("model.layers.13.self_attn.attn") == 13
