import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given

from dataplane.layout import KEY, VALUE, KVLayout, Segment, block_ids, num_blocks_for, slot_spans

LAYOUT = KVLayout(weights="w", dtype="bfloat16", num_layers=3, num_kv_heads=2, head_dim=8, block_size=16)


def segments_of(sizes: list[tuple[int, int]]) -> list[Segment]:
    """Return segments with gaps between them."""
    segments, at = [], 0
    for gap, size in sizes:
        segments.append(Segment(at + gap, size))
        at += gap + size
    return segments


segment_lists = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 6)), min_size=1, max_size=6).map(segments_of)


@given(segments=segment_lists, data=st.data())
def test_spans_are_the_slots_of_the_block_table(segments: list[Segment], data: st.DataObject) -> None:
    table = block_ids(segments)
    end = data.draw(st.integers(0, len(table) * 4))
    start = data.draw(st.integers(0, end))
    slots = [slot for first, count in slot_spans(segments, 4, start, end) for slot in range(first, first + count)]
    assert slots == [table[token // 4] * 4 + token % 4 for token in range(start, end)]


def test_spans_past_the_end_are_refused() -> None:
    with pytest.raises(ValueError, match="token 33"):
        slot_spans([Segment(0, 2)], 16, 0, 33)


def test_offsets_are_layer_major_and_fill_the_arena() -> None:
    num_blocks = 5
    offsets = [
        LAYOUT.offset(num_blocks, layer, key_or_value, slot)
        for layer in range(LAYOUT.num_layers)
        for key_or_value in (KEY, VALUE)
        for slot in range(num_blocks * LAYOUT.block_size)
    ]
    assert offsets == list(range(0, num_blocks * LAYOUT.block_bytes, LAYOUT.token_bytes))


@pytest.mark.parametrize("field", KVLayout.__struct_fields__)
def test_fingerprint_covers_every_field(field: str) -> None:
    changed = {"weights": "v", "dtype": "float16"}.get(field, 64)
    assert msgspec.structs.replace(LAYOUT, **{field: changed}).fingerprint != LAYOUT.fingerprint


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (16, 1), (17, 2)])
def test_num_blocks_for(num_tokens: int, num_blocks: int) -> None:
    assert num_blocks_for(num_tokens, 16) == num_blocks
