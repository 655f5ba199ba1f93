"""Windows, shards and tables of every shape: what arrives is what the holder has there, and nothing else is touched."""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import hypothesis.strategies as st
import ml_dtypes
import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from dataplane.blocks.layout import (
    ArenaShape,
    BlockTable,
    BlockTables,
    KVLayout,
    Segment,
    SlotSpan,
    num_blocks_for,
    segments_of,
)
from dataplane.carriers.shm import SharedHolder
from dataplane.carriers.tcp import TcpHolder
from dataplane.memory import frames
from dataplane.memory.checksum import FrameHash
from dataplane.memory.codec import BlockCodec
from dataplane.memory.extent import Extent, first_kept_block
from dataplane.memory.frames import FrameRows
from dataplane.protocol.stream import TransferFailedError, TransferStats
from tests.plane.harness import CARRIERS, DEADLINE_S, FROM_OR_TO_CARDS, KV, LAYOUT, Holder, Target, running, write_kv
from tests.share import examples

BLOCK, NUM_HEADS, HEAD_DIM = 4, 4, 4
HEAD_BYTES = HEAD_DIM * 2

quick = settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


class Case(NamedTuple):
    layout: KVLayout
    first_token: int
    num_tokens: int
    source: tuple[ArenaShape, BlockTables]
    target: tuple[ArenaShape, BlockTables]
    frame_bytes: int
    seed: int


@st.composite
def tables(draw: st.DrawFn, layout: KVLayout, wanted: Extent) -> tuple[ArenaShape, BlockTables]:
    """Return an arena's shape and tables in it that have what is wanted: scattered, begun late, some of them rings."""
    num_blocks, made = [], []
    end_block = num_blocks_for(wanted.num_tokens, BLOCK)
    for group, start in zip(layout.groups, wanted.group_starts, strict=True):
        first_needed = min(start // BLOCK, end_block)
        first_block = draw(st.integers(0, first_needed))
        size = end_block - first_block
        ring = draw(st.integers(max(1, end_block - first_needed), max(1, size))) if group.window else size
        blocks = draw(st.permutations(range(ring + 4)))[:ring]
        ids = [blocks[i % ring] for i in range(first_block, end_block)]
        num_blocks.append(ring + 4)
        made.append(BlockTable(segments_of(ids), first_block))
    return ArenaShape(layout=layout, num_blocks=tuple(num_blocks)), tuple(made)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    windows = tuple(draw(st.lists(st.sampled_from([0, 0, 1, 3, 4, 9, 16, 100]), min_size=1, max_size=4)))
    layout = KVLayout(
        weights="w",
        dtype="bfloat16",
        num_layers=len(windows),
        num_kv_heads=NUM_HEADS,
        head_dim=HEAD_DIM,
        block_size=BLOCK,
        windows=windows if any(windows) else draw(st.sampled_from([(), windows])),
    )
    num_tokens = draw(st.integers(0, 60))
    first_token = draw(st.integers(0, num_tokens))
    wanted = Extent(layout=layout, first_token=first_token, num_tokens=num_tokens)
    return Case(
        layout,
        first_token,
        num_tokens,
        draw(tables(layout, wanted)),
        draw(tables(layout, wanted)),
        draw(st.sampled_from([64, 1000, 1 << 20])),
        draw(st.integers(0, 1000)),
    )


@contextlib.contextmanager
def holding(carrier: str, case: Case, kv: KV) -> Iterator[Holder]:
    """A holder of `kv`, all computed: in a ring the last round has overwritten the earlier ones."""
    shape = case.source[0]
    holder = Holder((carrier,), case.num_tokens, shape=shape, tables=case.source[1], kv=kv)
    try:
        for layer in range(shape.layout.num_layers):
            start = case.source[1][shape.layout.group_of_layer[layer]].first_block * BLOCK
            write = functools.partial(write_kv, holder.array, shape, holder.tables, kv, layer, start)
            mark = holder.memory.compute(functools.partial(write, case.num_tokens))
            holder.progress.advance(layer, case.num_tokens, mark)
        holder.progress.complete(b"token 0")
        yield holder
    finally:
        holder.close()


def expected(case: Case, before: np.ndarray, kv: KV) -> np.ndarray:
    """Return the arena as it should be, token by token."""
    after, shape = before.copy(), case.target[0]
    layout = shape.layout
    starts = Extent(layout=layout, first_token=case.first_token, num_tokens=case.num_tokens).layer_starts
    for layer, group in enumerate(layout.group_of_layer):
        table = case.target[1][group]
        ids = [block for first, size in table.segments for block in range(first, first + size)]
        for token in range(starts[layer], case.num_tokens):
            slot = ids[token // BLOCK - table.first_block] * BLOCK + token % BLOCK
            for key_or_value in (0, 1):
                at = shape.offset(layer, key_or_value, slot)
                after[at : at + layout.token_bytes] = kv[layer, key_or_value, token]
    return after


def read_all(carrier: str, case: Case, kv: KV, **changes) -> tuple[Target, TransferStats]:
    """Read into the target, and return it to be closed."""
    target = Target(shape=case.target[0], tables=case.target[1])
    target.array[:] = before_read(case)
    with holding(carrier, case, kv) as holder:
        landed = target.read_from(holder, carrier, first_token=case.first_token, deadline_s=60, **changes)
    assert (landed.trailer, landed.num_tokens) == (b"token 0", case.num_tokens)
    return target, landed.stats


def before_read(case: Case) -> np.ndarray:
    return np.random.default_rng(case.seed + 1).integers(0, 256, case.target[0].arena_bytes, np.uint8)


@pytest.mark.parametrize("carrier", [*CARRIERS, *FROM_OR_TO_CARDS], indirect=True)
@quick
@given(case=cases())
def test_what_arrives_is_what_is_there(carrier: str, case: Case) -> None:
    shape = (NUM_HEADS * HEAD_BYTES,)
    kv = np.random.default_rng(case.seed).integers(
        0, 256, (case.layout.num_layers, 2, case.num_tokens, *shape), np.uint8
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SharedHolder, "frame_bytes", case.frame_bytes)
        patch.setattr(TcpHolder, "frame_bytes", case.frame_bytes)
        target, stats = read_all(carrier, case, kv)
        try:
            assert np.array_equal(target.array, expected(case, before_read(case), kv))
            starts = Extent(case.layout, case.first_token, case.num_tokens).layer_starts
            num_rows = sum(case.num_tokens - start for start in starts)
            assert stats.num_bytes == 2 * num_rows * case.layout.token_bytes
        finally:
            target.close()


@pytest.mark.parametrize("carrier", ["tcp", "card>card:tcp"], indirect=True)
@quick
@given(case=cases(), wire_dtype=st.sampled_from(["int8", "fp8"]))
def test_what_is_compressed_arrives_as_its_codec_says(carrier: str, case: Case, wire_dtype) -> None:
    """Scales are per block of the sequence, whatever the frames and the tables are."""
    size = (case.layout.num_layers, 2, case.num_tokens, NUM_HEADS * HEAD_DIM)
    numbers = np.random.default_rng(case.seed).standard_normal(size).astype(ml_dtypes.bfloat16)
    kv = numbers.view(np.uint8) if numbers.size else np.empty((*size[:-1], NUM_HEADS * HEAD_BYTES), np.uint8)
    frame_bytes = max(case.frame_bytes, BLOCK * 2 * NUM_HEADS * HEAD_BYTES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TcpHolder, "frame_bytes", frame_bytes)
        target, stats = read_all(carrier, case, kv, wire_dtype=wire_dtype)
        try:
            assert np.array_equal(target.array, expected(case, before_read(case), squeezed(case, kv, wire_dtype)))
            assert stats.wire_dtype == wire_dtype
        finally:
            target.close()


def squeezed(case: Case, kv: KV, wire_dtype) -> KV:
    """Return what is left of `kv`, block by block."""
    codec = BlockCodec(wire_dtype, "bfloat16", NUM_HEADS, HEAD_DIM, BLOCK)
    wanted = Extent(case.layout, case.first_token, case.num_tokens)
    out = kv.copy()
    for layer, start in enumerate(wanted.layer_starts):
        for first in range(start // BLOCK * BLOCK, case.num_tokens, BLOCK):
            tokens = slice(max(first, start), min(first + BLOCK, case.num_tokens))
            for key_or_value in (0, 1):
                rows = np.ascontiguousarray(kv[layer, key_or_value, tokens])
                wire = np.empty(codec.wire_bytes(tokens.start, len(rows)), np.uint8)
                codec.encode(rows, tokens.start, wire)
                codec.decode(wire, tokens.start, rows)
                out[layer, key_or_value, tokens] = rows
    return out


# What is refused, by the holder and by the reader.

WINDOWED = msgspec.structs.replace(LAYOUT, windows=(0, 32, 0))
"""Of 300 tokens the window's layer needs those from block 16 on."""


def code_of(read: Callable[[], object]) -> str:
    with pytest.raises(TransferFailedError) as raised:
        read()
    return raised.value.code


def test_other_number_of_heads_is_another_model(carrier: str, make_holder: Callable[..., Holder]) -> None:
    holder = make_holder((carrier,))
    target = Target(msgspec.structs.replace(LAYOUT, num_kv_heads=8))
    assert code_of(lambda: target.read_from(holder, carrier)) == "fingerprint"
    target.close()


def test_tokens_before_the_lease_are_refused(carrier: str, make_holder: Callable[..., Holder], target: Target) -> None:
    holder = make_holder((carrier,), first_token=200)
    holder.compute_all()
    assert code_of(lambda: target.read_from(holder, carrier)) == "range"
    assert code_of(lambda: target.read_from(holder, carrier, first_token=199)) == "range"
    assert target.read_from(holder, carrier, first_token=200).num_tokens == 300
    assert np.array_equal(target.landed(300, 200), holder.kv[:, :, 200:])


def ring(num_blocks: int, size: int) -> BlockTable:
    return BlockTable(segments_of([i % size for i in range(num_blocks)]))


def test_what_a_window_has_left_behind_is_refused(carrier: str, make_holder: Callable[..., Holder]) -> None:
    """The table of the ring still names the older blocks, but newer tokens lie there."""
    target = Target(WINDOWED)
    full = BlockTable((Segment(0, 19),))
    for windowed in (ring(19, 5), BlockTable((Segment(20, 3),), first_block=16)):
        holder = make_holder((carrier,), layout=WINDOWED, tables=(full, windowed))
        for layer in range(3):
            start = windowed.first_block * 16 if layer == 1 else 0
            holder.compute_layer(layer, start, 300)
        holder.progress.complete(b"")
        assert code_of(lambda holder=holder: target.read_from(holder, carrier, num_tokens=200)) == "range"
        landed = target.read_from(holder, carrier, num_tokens=300)
        assert landed.stats.num_bytes == (300 * 2 + 300 - 16 * 16) * 2 * LAYOUT.token_bytes
    target.close()


def test_ring_too_small_for_its_window_is_the_callers_error(carrier: str, make_holder: Callable[..., Holder]) -> None:
    holder, target = make_holder((carrier,), layout=WINDOWED), Target(WINDOWED)
    with pytest.raises(ValueError, match="no slot"):
        target.read_from(holder, carrier, tables=(BlockTable((Segment(0, 19),)), ring(19, 2)))
    target.close()


@given(num_blocks=st.integers(0, 30), size=st.integers(1, 40), first_block=st.integers(0, 9), end=st.integers(0, 50))
def test_first_kept_block_of_a_ring(num_blocks: int, size: int, first_block: int, end: int) -> None:
    table = BlockTable(ring(num_blocks, size).segments, first_block)
    last = min(end, table.end_block)
    assert first_kept_block(table, end) == max(first_block, last - size)


@pytest.mark.parametrize("first_token", [0, 40, 270])
def test_broken_read_of_windows_keeps_nothing(
    carrier: str, make_holder: Callable[..., Holder], first_token: int
) -> None:
    """All but the last tokens of one layer have come, and been committed."""
    holder, target = make_holder((carrier,), layout=WINDOWED), Target(WINDOWED)
    errors: list[TransferFailedError] = []

    def attempt() -> None:
        with pytest.raises(TransferFailedError) as raised:
            target.read_from(holder, carrier, first_token=first_token)
        errors.append(raised.value)

    rechecked = threading.Event()
    holder.gate.before_recheck = lambda num_rechecks: rechecked.set()
    with running(attempt):
        for layer, end in [(0, 300), (1, 300), (2, 290)]:
            holder.compute_layer(layer, 0, end)
        assert rechecked.wait(DEADLINE_S)
        holder.progress.fail("gone")
    assert (errors[0].code, errors[0].num_landed_tokens) == ("holder", first_token)
    target.close()


@pytest.mark.parametrize("digests", [True, False])
def test_what_is_digested_is_what_arrived(digests: bool) -> None:
    """A copy that goes wrong has another digest than its source."""
    parts, arrays = [(0, [SlotSpan(0, 40)])], np.random.default_rng(1).integers(0, 256, (2, 40 * 64), np.uint8)
    source, target = (FrameRows(array, parts, 64) for array in arrays)
    stats = TransferStats()
    frame_hash = FrameHash("gmac" if digests else None, bytes(32))
    right = frames.digest(source, stats, frame_hash.new(1))
    assert frames.copy(source, target, stats, frame_hash.new(1)) == right and bool(right) is digests
    assert np.array_equal(source.views()[0], target.views()[0])

    class Damaged(np.ndarray):
        def __setitem__(self, at: Any, what: Any) -> None:
            super().__setitem__(at, what)
            self.view(np.ndarray)[3] ^= 1

    target = target._replace(array=target.array.view(Damaged))
    assert not digests or frames.copy(source, target, stats, frame_hash.new(1)) != right
