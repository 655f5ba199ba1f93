import itertools

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given

from dataplane.blocks.layout import (
    KEY,
    VALUE,
    ArenaShape,
    BlockTable,
    CacheGroup,
    KVLayout,
    Segment,
    block_ids,
    num_blocks_for,
    segments_of,
    slot_spans,
    uniform_shape,
)

LAYOUT = KVLayout(weights="w", dtype="bfloat16", num_layers=3, num_kv_heads=2, head_dim=8, block_size=16)
WINDOWED = msgspec.structs.replace(LAYOUT, num_layers=6, windows=(32, 0, 32, 32, 0, 8))


def scattered(sizes: list[tuple[int, int]]) -> tuple[Segment, ...]:
    """Return segments with gaps between them."""
    segments, at = [], 0
    for gap, size in sizes:
        segments.append(Segment(at + gap, size))
        at += gap + size
    return tuple(segments)


tables = st.builds(
    BlockTable,
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 6)), min_size=1, max_size=6).map(scattered),
    st.integers(0, 9),
)


@given(table=tables, data=st.data())
def test_spans_are_the_slots_of_the_block_table(table: BlockTable, data: st.DataObject) -> None:
    blocks, first = block_ids(table.segments), table.first_block
    assert table.end_block == first + len(blocks)
    end = data.draw(st.integers(first * 4, table.end_block * 4))
    start = data.draw(st.integers(first * 4, end))
    slots = [slot for at, count in slot_spans(table, 4, start, end) for slot in range(at, at + count)]
    assert slots == [blocks[token // 4 - first] * 4 + token % 4 for token in range(start, end)]


def test_a_ring_names_its_blocks_again() -> None:
    table = BlockTable(segments_of([5, 6, 5, 6, 5]), first_block=2)
    assert slot_spans(table, 4, 12, 22) == [(24, 4), (20, 6)]


@pytest.mark.parametrize(("start", "end", "error"), [(16, 49, "token 49"), (15, 20, "token 15"), (0, 60, "token 0")])
def test_spans_outside_the_table_are_refused(start: int, end: int, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        slot_spans(BlockTable((Segment(0, 2),), first_block=1), 16, start, end)


def test_no_tokens_lie_anywhere() -> None:
    assert slot_spans(BlockTable((), first_block=3), 16, 20, 20) == []


@given(st.lists(st.integers(0, 50)))
def test_segments_are_the_blocks_and_few(blocks: list[int]) -> None:
    segments = segments_of(blocks)
    assert block_ids(segments) == blocks
    for left, right in itertools.pairwise(segments):
        assert left.first_block + left.num_blocks != right.first_block


def test_layers_of_one_window_are_a_group() -> None:
    assert LAYOUT.groups == (CacheGroup(0, (0, 1, 2)),)
    assert not LAYOUT.is_windowed
    assert WINDOWED.groups == (CacheGroup(0, (1, 4)), CacheGroup(8, (5,)), CacheGroup(32, (0, 2, 3)))
    assert WINDOWED.group_of_layer == (2, 0, 2, 2, 0, 1)
    assert WINDOWED.is_windowed


@given(window=st.integers(1, 70), num_tokens=st.integers(0, 200))
def test_first_needed_block_is_what_the_next_token_and_the_last_border_see(window: int, num_tokens: int) -> None:
    layout = msgspec.structs.replace(LAYOUT, num_layers=2, windows=(0, window))
    assert layout.first_needed_block(0, num_tokens) == 0
    first = layout.first_needed_block(1, num_tokens)
    border = num_tokens // 16 * 16
    seen_from_border = [token for token in range(border) if token > border - window]
    assert first == (seen_from_border[0] if seen_from_border else border) // 16
    assert first * 16 <= max(0, num_tokens - window + 1), "the next token sees no less"


@given(window=st.integers(1, 70), num_tokens=st.integers(1, 200))
def test_of_padded_tokens_no_less_is_needed_than_of_those_that_were_padded(window: int, num_tokens: int) -> None:
    """A decode worker goes on behind the last real token, whatever the border is to which its lease was padded."""
    plain = msgspec.structs.replace(LAYOUT, num_layers=2, windows=(0, window))
    whole = msgspec.structs.replace(plain, whole_blocks=True)
    assert whole.first_needed_block(1, whole.padded(num_tokens)) <= plain.first_needed_block(1, num_tokens)


@pytest.mark.parametrize("layout", [LAYOUT, WINDOWED])
def test_offsets_are_layer_major_and_fill_the_arena(layout: KVLayout) -> None:
    shape = ArenaShape(layout=layout, num_blocks=tuple(range(3, 3 + len(layout.groups))))
    offsets = [
        shape.offset(layer, key_or_value, slot)
        for layer in range(layout.num_layers)
        for key_or_value in (KEY, VALUE)
        for slot in range(shape.num_blocks[layout.group_of_layer[layer]] * layout.block_size)
    ]
    assert offsets == list(range(0, shape.arena_bytes, layout.token_bytes))


def test_uniform_shape_has_as_many_blocks_in_each_group() -> None:
    shape = uniform_shape(WINDOWED, 5)
    assert shape.num_blocks == (5, 5, 5)
    assert shape.arena_bytes == 5 * WINDOWED.block_bytes == 5 * 6 * WINDOWED.layer_block_bytes


SHARD_FIELDS = {"num_kv_heads", "first_head", "total_kv_heads"}
FOLLOWS_FROM_WEIGHTS = {"whole_blocks"}


@pytest.mark.parametrize("field", sorted(set(KVLayout.__struct_fields__) - SHARD_FIELDS - FOLLOWS_FROM_WEIGHTS))
def test_fingerprint_covers_every_field_but_the_shard_s(field: str) -> None:
    changed = {"weights": "v", "dtype": "float16", "windows": (0, 0, 8)}.get(field, 64)
    assert msgspec.structs.replace(LAYOUT, **{field: changed}).fingerprint != LAYOUT.fingerprint


@given(st.integers(0, 100))
def test_whole_blocks_end_at_a_border(num_tokens: int) -> None:
    whole = msgspec.structs.replace(LAYOUT, whole_blocks=True)
    assert whole.padded(num_tokens) == num_blocks_for(num_tokens, 16) * 16
    assert whole.usable(num_tokens) == num_tokens // 16 * 16
    assert LAYOUT.padded(num_tokens) == LAYOUT.usable(num_tokens) == num_tokens
    assert whole.fingerprint == LAYOUT.fingerprint, "the name of their format is part of `weights`"


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (16, 1), (17, 2)])
def test_num_blocks_for(num_tokens: int, num_blocks: int) -> None:
    assert num_blocks_for(num_tokens, 16) == num_blocks
