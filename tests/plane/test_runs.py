"""Moves for a card mean the same bytes as the views of a host's memory, whatever the tables, windows and shards."""

from typing import NamedTuple

import hypothesis.strategies as st
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings

from dataplane.blocks.layout import ArenaShape, BlockTable, BlockTables, KVLayout, Segment, uniform_shape
from dataplane.cards.device import Moves
from dataplane.cards.moves import gather_moves, pair_moves, scatter_moves, unsuited
from dataplane.memory import frames
from dataplane.memory.checksum import Sum64, sum64
from dataplane.memory.extent import Extent, HeadRange, heads_of
from dataplane.memory.frames import SequenceMemory
from dataplane.memory.rows import SequenceRuns
from dataplane.protocol.stream import Header, Kind, TransferStats
from tests.plane.test_shapes import tables
from tests.share import examples

NUM_HEADS, HEAD_DIM = 4, 4
quick = settings(max_examples=examples(150), deadline=None)


class Case(NamedTuple):
    data: Header
    heads: HeadRange
    source: tuple[ArenaShape, BlockTables]
    target: tuple[ArenaShape, BlockTables]
    seed: int

    def place(self, end: tuple[ArenaShape, BlockTables]) -> SequenceRuns:
        return SequenceRuns(*end, self.heads)

    def memory(self, end: tuple[ArenaShape, BlockTables], seed: int) -> SequenceMemory:
        return SequenceMemory(random_bytes(end[0].num_bytes, seed), SequenceRuns(*end, self.heads))


def random_bytes(size: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def sharded(draw: st.DrawFn, end: tuple[ArenaShape, BlockTables], heads: HeadRange) -> tuple[ArenaShape, BlockTables]:
    """Return the same blocks of a shard that has at least these heads."""
    first = draw(st.integers(0, heads.first))
    num_heads = draw(st.integers(heads.first + heads.num_heads - first, NUM_HEADS - first))
    layout = msgspec.structs.replace(end[0].layout, first_head=first, num_kv_heads=num_heads)
    return ArenaShape(layout=layout, num_blocks=end[0].num_blocks), end[1]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A frame of a few layers that both ends can have, and where it lies at each."""
    windows = tuple(draw(st.lists(st.sampled_from([0, 0, 1, 3, 4, 9, 16, 100]), min_size=1, max_size=4)))
    layout = KVLayout(
        weights="w",
        dtype="bfloat16",
        num_layers=len(windows),
        num_kv_heads=NUM_HEADS,
        head_dim=HEAD_DIM,
        block_size=4,
        windows=windows,
        total_kv_heads=NUM_HEADS,
    )
    num_tokens = draw(st.integers(1, 60))
    wanted = Extent(layout, draw(st.integers(0, num_tokens - 1)), num_tokens, heads_of(layout))
    layer = draw(st.integers(0, len(windows) - 1))
    num_layers = draw(st.integers(1, len(windows) - layer))
    first_token = draw(st.integers(max(wanted.layer_starts[layer : layer + num_layers]), num_tokens))
    end_token = draw(st.integers(first_token, num_tokens))
    data = Header(Kind.DATA, 0, layer, num_layers, first_token, end_token - first_token)
    first_head = draw(st.integers(0, NUM_HEADS - 1))
    heads = HeadRange(first_head, draw(st.integers(1, NUM_HEADS - first_head)))
    ends = [sharded(draw, draw(tables(layout, wanted)), heads) for _ in range(2)]
    return Case(data, heads, ends[0], ends[1], draw(st.integers(0, 999)))


def move(moves: Moves, source: np.ndarray, target: np.ndarray) -> None:
    """The definition of a move, row by row."""
    moves.check(source.nbytes, target.nbytes)
    for row in range(moves.num_rows):
        run = max(index for index, first_row in enumerate(moves.runs[:, 2]) if first_row <= row)
        from_byte, to_byte, first_row = moves.runs[run].tolist()
        at = from_byte + (row - first_row) * moves.source_stride
        to = to_byte + (row - first_row) * moves.target_stride
        target[to : to + moves.row_bytes] = source[at : at + moves.row_bytes]


@quick
@given(case=cases(), first_byte=st.sampled_from([0, 8, 4096]))
def test_gathered_rows_are_the_frame(case: Case, first_byte: int) -> None:
    source = case.memory(case.source, case.seed)
    moves = gather_moves(source.runs, case.data, first_byte)
    expected = random_bytes(first_byte + moves.num_bytes + 64, 1)
    packed = expected.copy()
    rows = source.rows(case.data)
    frames.gather(rows, expected[first_byte : first_byte + moves.num_bytes])
    move(moves, random_bytes(case.source[0].num_bytes, case.seed), packed)
    assert np.array_equal(packed, expected)
    assert moves.num_rows == 2 * case.data.num_layers * case.data.num_tokens
    gathered = packed[first_byte : first_byte + moves.num_bytes]
    assert sum64(gathered) == frames.digest(rows, TransferStats(), Sum64())


@quick
@given(case=cases(), first_byte=st.sampled_from([0, 8, 4096]))
def test_scattered_rows_are_where_they_belong(case: Case, first_byte: int) -> None:
    array = random_bytes(case.target[0].num_bytes, case.seed)
    target = SequenceMemory(array, SequenceRuns(*case.target, case.heads))
    moves = scatter_moves(target.runs, case.data, first_byte)
    packed = random_bytes(first_byte + moves.num_bytes, 1)
    moved = array.copy()
    frames.scatter(packed[first_byte:], target.rows(case.data))
    move(moves, packed, moved)
    assert np.array_equal(moved, array)


@quick
@given(case=cases())
def test_rows_go_from_one_arena_to_another(case: Case) -> None:
    source = random_bytes(case.source[0].num_bytes, case.seed)
    expected = random_bytes(case.target[0].num_bytes, case.seed + 1)
    moved = expected.copy()
    ends = (source, case.source), (expected, case.target)
    rows = [SequenceMemory(array, case.place(end)).rows(case.data) for array, end in ends]
    frames.copy(*rows, TransferStats(), None)
    move(pair_moves(case.place(case.source), case.place(case.target), case.data), source, moved)
    assert np.array_equal(moved, expected)


@quick
@given(case=cases())
def test_runs_are_whole_and_few(case: Case) -> None:
    """Every row in exactly one run, none of them empty, and no more runs than the borders of both ends need."""
    source, target = case.place(case.source), case.place(case.target)
    moves = pair_moves(source, target, case.data)
    num_rows = np.diff(moves.runs[:, 2], append=moves.num_rows)
    assert (num_rows > 0).all() and num_rows.sum() == moves.num_rows
    num_parts = len(gather_moves(source, case.data).runs) + len(scatter_moves(target, case.data).runs)
    assert len(moves.runs) <= num_parts
    assert moves.runs.dtype == np.int64 and moves.runs.flags.c_contiguous


def layout_of(head_dim: int, dtype: str = "bfloat16") -> KVLayout:
    return KVLayout(weights="w", dtype=dtype, num_layers=1, num_kv_heads=2, head_dim=head_dim, block_size=16)


@pytest.mark.parametrize(
    ("head_dim", "dtype", "suits"),
    [
        (64, "bfloat16", True),
        (4, "bfloat16", True),
        (6, "bfloat16", False),
        (6, "float32", True),
        (1, "float32", False),
    ],
)
def test_layouts_that_suit_a_card(head_dim: int, dtype: str, suits: bool) -> None:
    reason = unsuited(layout_of(head_dim, dtype))
    assert (reason is None) == suits
    assert reason is None or (str(head_dim) in reason and dtype in reason)


def test_rows_of_other_heads_are_not_paired() -> None:
    shape = uniform_shape(layout_of(64), 4)
    runs = [SequenceRuns(shape, (BlockTable((Segment(0, 4),)),), HeadRange(0, n)) for n in (1, 2)]
    with pytest.raises(ValueError, match="rows of"):
        pair_moves(*runs, Header(Kind.DATA, 0, 0, 1, 0, 4))


@pytest.mark.parametrize(
    "segment", [Segment(-1, 1), Segment(4, 1), Segment(3, 2), Segment(0, -1)], ids=lambda segment: str(tuple(segment))
)
def test_blocks_that_the_arena_does_not_have(segment: Segment) -> None:
    with pytest.raises(ValueError, match="no such blocks"):
        SequenceRuns(uniform_shape(layout_of(64), 4), (BlockTable((segment,)),))


@pytest.mark.parametrize("heads", [HeadRange(0, 0), HeadRange(-1, 1), HeadRange(1, 2), HeadRange(2, 1)])
def test_heads_that_the_arena_does_not_have(heads: HeadRange) -> None:
    with pytest.raises(ValueError, match="HeadRange"):
        SequenceRuns(uniform_shape(layout_of(64), 4), (BlockTable((Segment(0, 4),)),), heads)


@pytest.mark.parametrize(("first_token", "num_tokens"), [(0, 17), (15, 4), (60, 5), (64, 1), (200, 8)])
def test_tokens_that_the_tables_do_not_have(first_token: int, num_tokens: int) -> None:
    """Blocks 1 to 3: a card's moves and a host's views are refused alike."""
    shape = uniform_shape(layout_of(64), 4)
    runs = SequenceRuns(shape, (BlockTable((Segment(2, 2), Segment(0, 1)), first_block=1),))
    data = Header(Kind.DATA, 0, 0, 1, first_token, num_tokens)
    memory = SequenceMemory(np.zeros(shape.num_bytes, np.uint8), runs)
    for plan in (
        lambda: gather_moves(runs, data),
        lambda: scatter_moves(runs, data),
        lambda: pair_moves(runs, runs, data),
        lambda: memory.rows(data),
    ):
        with pytest.raises(ValueError, match="token"):
            plan()


def test_segments_without_blocks_are_no_runs() -> None:
    segments = (Segment(3, 0), Segment(2, 1), Segment(0, 0), Segment(0, 1), Segment(1, 0))
    runs = SequenceRuns(uniform_shape(layout_of(64), 4), (BlockTable(segments),))
    moves = gather_moves(runs, Header(Kind.DATA, 0, 0, 1, 0, 32))
    slot_bytes = runs.stride
    assert moves.runs[:2, [0, 2]].tolist() == [[32 * slot_bytes, 0], [0, 16]] and len(moves.runs) == 4


def test_a_frame_of_no_tokens_has_no_runs() -> None:
    runs = SequenceRuns(uniform_shape(layout_of(64), 4), (BlockTable((Segment(2, 2),)),))
    moves = gather_moves(runs, Header(Kind.DATA, 0, 0, 1, 8, 0))
    assert moves.runs.shape == (0, 3) and moves.num_rows == 0
    moves.check(0, 0)


RIGHT = Moves(np.array([[0, 64, 0], [128, 0, 2]], np.int64), 4, 32, 32, 32)
"""Two runs of two rows, in 192 bytes and 128."""
WRONG = {
    "before the source": RIGHT._replace(runs=np.array([[-8, 64, 0], [128, 0, 2]], np.int64)),
    "before the target": RIGHT._replace(runs=np.array([[0, -8, 0], [128, 0, 2]], np.int64)),
    "past the source": RIGHT._replace(runs=np.array([[0, 64, 0], [136, 0, 2]], np.int64)),
    "past the target": RIGHT._replace(runs=np.array([[0, 72, 0], [128, 0, 2]], np.int64)),
    "a last run that is too long": RIGHT._replace(num_rows=5),
    "rows before their run": RIGHT._replace(runs=np.array([[0, 64, 2], [128, 0, 0]], np.int64)),
    "a first row that is missing": RIGHT._replace(runs=np.array([[0, 64, 1], [128, 0, 2]], np.int64)),
    "fewer rows than runs begin with": RIGHT._replace(num_rows=1),
    "not aligned": RIGHT._replace(runs=np.array([[4, 64, 0], [128, 0, 2]], np.int64)),
    "rows not aligned": RIGHT._replace(row_bytes=28),
    "a stride that is not aligned": RIGHT._replace(source_stride=36),
    "rows that overlap": RIGHT._replace(target_stride=24),
    "no bytes": RIGHT._replace(row_bytes=0),
    "rows in no run": RIGHT._replace(runs=np.empty((0, 3), np.int64)),
    "runs of another type": RIGHT._replace(runs=np.array([[0, 64, 0], [128, 0, 2]], np.int32)),
}


@pytest.mark.parametrize("moves", WRONG.values(), ids=list(WRONG))
def test_moves_that_a_card_must_not_make(moves: Moves) -> None:
    RIGHT.check(192, 128)
    with pytest.raises(ValueError):
        moves.check(192, 128)


def test_moves_without_a_target_are_not_held_to_one() -> None:
    WRONG["past the target"].check(192, None)
    with pytest.raises(ValueError, match="outside"):
        WRONG["past the source"].check(192, None)
    RIGHT._replace(runs=np.empty((0, 3), np.int64), num_rows=0).check(0, 0)
