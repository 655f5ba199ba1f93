"""A step's numbers, looked up one by one in what was packed, are those that the block tables say."""

from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataplane.blocks.layout import BlockTable, KVLayout, Segment, block_ids, segments_of
from schemas.ids import RequestId
from schemas.request import SamplingParams
from services.engine.cuda.step_plan import (
    BufferTooSmallError,
    StepFields,
    StepLimits,
    StepPlanner,
    field_view,
    largest_step_bytes,
    pack,
)
from services.engine.interface import Sequence, StepItem
from services.engine.sampler import uniform
from tests.share import examples

BLOCK_SIZE = 4


def layout(*windows: int, block_size: int = BLOCK_SIZE) -> KVLayout:
    return KVLayout(
        weights="w", dtype="float32", num_layers=len(windows), num_kv_heads=1, head_dim=16, block_size=block_size,
        windows=windows if any(windows) else (),
    )  # fmt: skip


class Drawn(NamedTuple):
    start: int
    count: int
    samples: bool
    lateness: int
    """Blocks by which a windowed table begins before what is seen."""
    temperature: float


drawn = st.builds(
    Drawn, st.integers(0, 40), st.integers(1, 25), st.booleans(), st.integers(0, 2), st.sampled_from([0.0, 0.7])
)


def make_items(kv: KVLayout, wanted: list[Drawn], rng: np.random.Generator) -> list[StepItem]:
    items: list[StepItem] = []
    for number, (start, count, samples, lateness, temperature) in enumerate(wanted):
        end = start + count
        tables: list[BlockTable] = []
        for group in kv.groups:
            first = max(0, max(0, start - group.window + 1) // BLOCK_SIZE - lateness) if group.window else 0
            num_blocks = -(-end // BLOCK_SIZE) - first + int(rng.integers(0, 3))
            tables.append(BlockTable(segments_of(rng.integers(0, 1000, num_blocks).tolist()), first))
        tokens = rng.integers(0, 500, end + 3).tolist()
        sampling = SamplingParams(max_tokens=9, temperature=temperature, seed=number, top_k=3, top_p=0.5)
        sequence = Sequence(RequestId(f"r{number}"), 0, tokens, end, sampling, tuple(tables))
        items.append(StepItem(sequence, start, count, samples))
    return items


def packed(kv: KVLayout, items: list[StepItem], *, padding: int = 0, tile: int = 8) -> tuple[np.ndarray, StepFields]:
    plan = StepPlanner(kv).plan(items)
    host = np.full(1 << 15, 0xEE, np.uint8)
    return host, pack(plan, host, num_rows=plan.num_rows + padding, tile_tokens=tile)


@settings(max_examples=examples(150), deadline=None)
@given(wanted=st.lists(drawn, max_size=6), seed=st.integers(0, 99), padding=st.integers(0, 3))
def test_everything_is_what_the_tables_say(wanted: list[Drawn], seed: int, padding: int) -> None:
    kv = layout(0, 6, 6)
    items = make_items(kv, wanted, np.random.default_rng(seed))
    host, fields = packed(kv, items, padding=padding)
    view = {name: field_view(host, field) for name, field in zip(fields._fields[:-1], fields[:-1], strict=True)}
    rows = [(item, position) for item in items for position in range(item.start, item.start + item.num_tokens)]
    num_rows = len(rows)
    assert view["token_ids"].tolist() == [item.sequence.token_ids[p] for item, p in rows] + [0] * padding
    assert view["positions"].tolist() == [p for _, p in rows] + [0] * padding
    for group in range(len(kv.groups)):
        entry = {
            id(item): dict(enumerate(block_ids(table.segments), table.first_block))
            for item in items
            for table in [item.sequence.tables[group]]
        }
        slots = [entry[id(i)][p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for i, p in rows]
        assert view["slots"][group].tolist() == slots + [-1] * padding
        window = kv.groups[group].window
        singles, chunks = ([i for i in items if (i.num_tokens == 1) == single] for single in (True, False))
        for kind, name in ((singles, "single_bases"), (chunks, "chunk_bases")):
            for item, base in zip(kind, view[name][group].tolist(), strict=False):
                first = max(0, item.start - window + 1) if window else 0
                seen = range(first // BLOCK_SIZE, -(-(item.start + item.num_tokens) // BLOCK_SIZE))
                assert [view["table"][base + b] for b in seen] == [entry[id(item)][b] for b in seen]
    first_rows = {id(item): sum(i.num_tokens for i in items[:at]) for at, item in enumerate(items)}
    assert view["singles"].T.tolist() == [[first_rows[id(i)], i.start + 1] for i in singles] + [
        [num_rows + at, 0] for at in range(padding)
    ]
    assert view["chunks"].T.tolist() == [[first_rows[id(i)], i.num_tokens, i.start + i.num_tokens] for i in chunks]
    tiles = [[at, first] for at, item in enumerate(chunks) for first in range(0, item.num_tokens, 8)]
    assert view["tiles"].T.tolist() == tiles
    sampled = [item for item in items if item.samples]
    assert view["sample_rows"].tolist() == [first_rows[id(i)] + i.num_tokens - 1 for i in sampled]
    draws = [
        [at, 0.7, 3, 0.5, uniform(i.sequence.sampling.seed, i.sequence.index)]
        for at, i in enumerate(sampled)
        if i.sequence.sampling.temperature
    ]
    assert view["draws"].T.tolist() == draws


@settings(max_examples=examples(100), deadline=None)
@given(
    wanted=st.lists(drawn, min_size=1, max_size=6),
    seed=st.integers(0, 99),
    tile=st.sampled_from([1, 8, 64]),
    room=st.integers(0, 2),
)
def test_no_step_within_the_limits_is_larger_than_the_largest(
    wanted: list[Drawn], seed: int, tile: int, room: int
) -> None:
    kv = layout(0, 6, 6)
    items = make_items(kv, wanted, np.random.default_rng(seed))
    num_rows = sum(item.num_tokens for item in items)
    longest = max(item.start + item.num_tokens for item in items)
    limits = StepLimits(num_rows, len(items), longest)
    assert packed(kv, items, tile=tile)[1].num_bytes <= largest_step_bytes(kv, limits)
    for item in [item for item in items if item.num_tokens == 1][: room + 1]:  # a decode, padded to a graph's size
        _, fields = packed(kv, [item], padding=room, tile=tile)
        assert fields.num_bytes <= largest_step_bytes(kv, StepLimits(1, 1 + room, longest))


def test_what_comes_before_a_decode_s_table_is_where_it_was_recorded() -> None:
    """However long the sequences, however many of the rows are padding, and whatever is sampled."""
    kv, rng = layout(0, 6), np.random.default_rng(1)
    _, empty = packed(kv, [], padding=4)
    for count in (1, 2, 4):
        items = make_items(kv, [Drawn(37 * n, 1, bool(n % 2), 0, 0.7) for n in range(count)], rng)
        _, fields = packed(kv, items, padding=4 - count)
        assert fields[: fields._fields.index("table")] == empty[: fields._fields.index("table")]
        assert fields.table.first_byte == empty.table.first_byte


def test_every_field_begins_at_a_multiple_of_16_bytes() -> None:
    _, fields = packed(
        layout(0, 6), make_items(layout(0, 6), [Drawn(3, 5, True, 0, 0.7)] * 3, np.random.default_rng(0))
    )
    assert all(field.first_byte % 16 == 0 for field in fields[:-1])
    ends = [field.first_byte + field.num_bytes for field in fields[:-1]]
    assert all(end <= field.first_byte for end, field in zip(ends, fields[1:-1], strict=False)), (
        "none overlaps the next"
    )


def test_tables_are_kept_from_step_to_step_and_seen_to_change() -> None:
    kv, planner = layout(0), StepPlanner(layout(0))
    (item,) = make_items(kv, [Drawn(9, 1, True, 0, 0.0)], np.random.default_rng(0))
    first = planner.plan([item])
    item.sequence.tables = (BlockTable((Segment(7, 3),)),)
    assert planner.plan([item]).groups[0].slots.tolist() == [(7 + 9 // BLOCK_SIZE) * BLOCK_SIZE + 9 % BLOCK_SIZE]
    assert first.groups[0].slots.tolist() != planner.plan([item]).groups[0].slots.tolist()
    assert len(planner._known) == 1, "what no item of the last step has is let go"


def test_what_a_table_does_not_cover_is_refused() -> None:
    kv = layout(8)

    def item(table: BlockTable, start: int, count: int) -> StepItem:
        sequence = Sequence(RequestId("r"), 0, list(range(99)), 99, SamplingParams(max_tokens=1), (table,))
        return StepItem(sequence, start, count, True)

    good = item(BlockTable((Segment(0, 2),), 4), 23, 1)
    StepPlanner(kv).plan([good])
    with pytest.raises(ValueError, match="r: token 25 lies past the 24 slots"):
        StepPlanner(kv).plan([good, item(BlockTable((Segment(0, 2),), 4), 24, 1)])
    with pytest.raises(ValueError, match="r: block 3 lies before this table, which begins at 4"):
        StepPlanner(kv).plan([good, item(BlockTable((Segment(0, 2),), 4), 22, 1)])


def test_a_buffer_that_is_too_small_says_what_is_needed() -> None:
    kv = layout(0)
    plan = StepPlanner(kv).plan(make_items(kv, [Drawn(0, 20, True, 0, 0.0)], np.random.default_rng(0)))
    with pytest.raises(BufferTooSmallError) as raised:
        pack(plan, np.empty(64, np.uint8), num_rows=20, tile_tokens=8)
    host = np.empty(raised.value.num_bytes, np.uint8)
    assert pack(plan, host, num_rows=20, tile_tokens=8).num_bytes == host.size
