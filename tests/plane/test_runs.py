"""Rows on a card mean the same bytes as the views of a host's memory, whatever the tables, windows and shards."""

from typing import NamedTuple

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from dataplane.blocks.layout import ArenaShape, BlockTable, BlockTables, KVLayout, Segment, uniform_shape
from dataplane.cards.card import WORD_BYTES, rows_of, unsuited
from dataplane.memory import frames
from dataplane.memory.checksum import Sum64, sum64
from dataplane.memory.extent import Extent
from dataplane.memory.frames import SequenceMemory
from dataplane.memory.rows import SequenceRuns
from dataplane.protocol.stream import Header, Kind, TransferStats
from tests.plane.test_shapes import tables
from tests.share import examples

NUM_HEADS, HEAD_DIM = 4, 4
quick = settings(max_examples=examples(150), deadline=None)


class Case(NamedTuple):
    data: Header
    source: tuple[ArenaShape, BlockTables]
    target: tuple[ArenaShape, BlockTables]
    seed: int

    def place(self, end: tuple[ArenaShape, BlockTables]) -> SequenceRuns:
        return SequenceRuns(*end)

    def memory(self, end: tuple[ArenaShape, BlockTables], seed: int) -> SequenceMemory:
        return SequenceMemory(random_bytes(end[0].arena_bytes, seed), SequenceRuns(*end))


def random_bytes(size: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


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
    )
    num_tokens = draw(st.integers(1, 60))
    wanted = Extent(layout, draw(st.integers(0, num_tokens - 1)), num_tokens)
    layer = draw(st.integers(0, len(windows) - 1))
    num_layers = draw(st.integers(1, len(windows) - layer))
    first_token = draw(st.integers(max(wanted.layer_starts[layer : layer + num_layers]), num_tokens))
    end_token = draw(st.integers(first_token, num_tokens))
    data = Header(Kind.DATA, 0, layer, num_layers, first_token, end_token - first_token)
    return Case(data, draw(tables(layout, wanted)), draw(tables(layout, wanted)), draw(st.integers(0, 999)))


@quick
@given(case=cases())
def test_rows_on_a_card_are_the_frame(case: Case) -> None:
    source = case.memory(case.source, case.seed)
    rows, views = rows_of(source.runs, case.data), source.rows(case.data)
    expected = np.empty(rows.total_bytes, np.uint8)
    frames.gather(views, expected)
    at = rows.starts[:, None] + np.arange(rows.num_words)
    assert np.array_equal(source.array.view(np.uint64)[at].reshape(-1), expected.view(np.uint64))
    assert len(rows.starts) == 2 * case.data.num_layers * case.data.num_tokens
    assert sum64(expected) == frames.digest(views, TransferStats(), Sum64())
    assert rows.packed.total_bytes == rows.total_bytes and (np.diff(rows.packed.starts) == rows.num_words).all()
    assert rows.num_words * WORD_BYTES == source.runs.row_bytes


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


@pytest.mark.parametrize(
    "segment", [Segment(-1, 1), Segment(4, 1), Segment(3, 2), Segment(0, -1)], ids=lambda segment: str(tuple(segment))
)
def test_blocks_that_the_arena_does_not_have(segment: Segment) -> None:
    with pytest.raises(ValueError, match="no such blocks"):
        SequenceRuns(uniform_shape(layout_of(64), 4), (BlockTable((segment,)),))


@pytest.mark.parametrize(("first_token", "num_tokens"), [(0, 17), (15, 4), (60, 5), (64, 1), (200, 8)])
def test_tokens_that_the_tables_do_not_have(first_token: int, num_tokens: int) -> None:
    """Blocks 1 to 3: a card's rows and a host's views are refused alike."""
    shape = uniform_shape(layout_of(64), 4)
    runs = SequenceRuns(shape, (BlockTable((Segment(2, 2), Segment(0, 1)), first_block=1),))
    data = Header(Kind.DATA, 0, 0, 1, first_token, num_tokens)
    memory = SequenceMemory(np.zeros(shape.arena_bytes, np.uint8), runs)
    for plan in (lambda: rows_of(runs, data), lambda: memory.rows(data)):
        with pytest.raises(ValueError, match="token"):
            plan()
