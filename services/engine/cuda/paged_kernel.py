"""Triton kernels of paged attention: keys and values of an arena, `[slot, kv_head, dim]`, found through block tables.

All kernels know a step's tokens by rows of the flat batch. An item's table entries are ints of one array; the entry of
its block b is at `base + b`, so a table may begin late (a sliding window) or name a block twice (a ring). Nothing is
read beyond what a query sees: slots there may hold anything, NaN included. Accumulation is in float32, powers are of 2.

Chunks: flash attention (Dao, FlashAttention-2, 2023), a program per head and tile of queries. Single tokens:
flash-decoding (Dao et al., 2023), a program per KV head and part of a sequence, all its query heads at once; a second
kernel joins the parts. How many parts there are is known without knowing the lengths, so that the launch is the same
at each replay of a CUDA graph.

Triton compiles a kernel anew for a number that is 1 or a multiple of 16, and for memory that is not aligned. Numbers
that change from step to step are exempt: a step must never wait for a compiler.
"""

# Triton finds its constants by their annotations, which are not evaluated: its language is not there before `kernels`.
# pyright: basic, reportInvalidTypeForm=false, reportMissingParameterType=false, reportUnknownParameterType=false
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
from __future__ import annotations

import functools
import importlib
from typing import Any

tl: Any = None
"""Triton's language, which is Python to the parser only. Machines without a card need not have it."""


def write_kernel(
    key, value, keys, values, slots, key_row, key_head, value_row, value_head,
    HEADS: tl.constexpr, HEADS_PADDED: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr,
):  # fmt: skip
    """Put a row's keys and values into its slot; a slot below 0 is none."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    if slot >= 0:
        head = tl.arange(0, HEADS_PADDED)[:, None]
        dim = tl.arange(0, DIM_PADDED)[None, :]
        there = (head < HEADS) & (dim < DIM)
        at = slot * (HEADS * DIM) + head * DIM + dim
        tl.store(keys + at, tl.load(key + row * key_row + head * key_head + dim, mask=there), mask=there)
        tl.store(values + at, tl.load(value + row * value_row + head * value_head + dim, mask=there), mask=there)


def _attend_tile(
    query, best, total, result, keys, values, table, base, kv_head, position, seen, low, high, scale, window,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    MASKED: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """Return (best, total, result) after one tile of keys at the tokens `seen` [n], for queries at `position` [m].

    Of a masked tile only the tokens of [low, high) are read, and a query sees those up to its own within its window.
    """
    dim = tl.arange(0, DIM_PADDED)
    if MASKED:
        there = (seen >= low) & (seen < high)
        block = tl.load(table + base + seen // BLOCK_SIZE, mask=there, other=0).to(tl.int64)
    else:
        block = tl.load(table + base + seen // BLOCK_SIZE).to(tl.int64)
    slot = block * BLOCK_SIZE + seen % BLOCK_SIZE
    at = (slot * KV_HEADS + kv_head)[:, None] * DIM + dim[None, :]
    if MASKED:
        mask = there[:, None] & (dim < DIM)[None, :]
        key = tl.load(keys + at, mask=mask, other=0.0)
        value = tl.load(values + at, mask=mask, other=0.0)
    elif DIM == DIM_PADDED:
        key = tl.load(keys + at)
        value = tl.load(values + at)
    else:
        key = tl.load(keys + at, mask=(dim < DIM)[None, :], other=0.0)
        value = tl.load(values + at, mask=(dim < DIM)[None, :], other=0.0)
    scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
    if MASKED:
        sees = there[None, :] & (seen[None, :] <= position[:, None])
        if WINDOWED:
            sees = sees & (seen[None, :] > position[:, None] - window)
        scores = tl.where(sees, scores, float("-inf"))
    higher = tl.maximum(best, tl.max(scores, 1))
    # A query that has seen no key yet: -inf - -inf would be no number.
    shift = tl.where(higher == float("-inf"), 0.0, higher)
    weights = tl.exp2(scores - shift[:, None])
    shrink = tl.exp2(best - shift)
    total = total * shrink + tl.sum(weights, 1)
    result = tl.dot(weights.to(value.dtype), value, result * shrink[:, None], input_precision="ieee")
    return higher, total, result


def chunks_kernel(
    query, keys, values, output, table, tiles, chunks, bases, scale, window, query_row, query_head,
    num_tiles, num_chunks,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """Causal attention of chunks over all their tokens before them: one head, one tile of queries of one chunk.

    `tiles` [2, num_tiles]: a tile's chunk, its first query. `chunks` [3, num_chunks]: first row, tokens, end.
    """
    head = tl.program_id(0)
    tile = tl.program_id(1)
    chunk = tl.load(tiles + tile)
    first = tl.load(tiles + num_tiles + tile)
    first_row = tl.load(chunks + chunk)
    num_tokens = tl.load(chunks + num_chunks + chunk)
    end = tl.load(chunks + 2 * num_chunks + chunk)
    base = tl.load(bases + chunk)
    kv_head = head // (HEADS // KV_HEADS)

    index = first + tl.arange(0, QUERIES)
    dim = tl.arange(0, DIM_PADDED)
    row = (first_row + index).to(tl.int64)
    there = (index < num_tokens)[:, None] & (dim < DIM)[None, :]
    asked = tl.load(query + row[:, None] * query_row + head * query_head + dim[None, :], mask=there, other=0.0)

    first_position = end - num_tokens + first
    position = first_position + tl.arange(0, QUERIES)
    high = tl.minimum(first_position + QUERIES, end)
    best = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    result = tl.zeros([QUERIES, DIM_PADDED], tl.float32)
    low = 0
    masked_from = (first_position + 1) // KEYS * KEYS
    if WINDOWED:
        low = tl.maximum(first_position - window + 1, 0)
        masked_from = low
    else:
        for at in range(0, masked_from, KEYS):
            best, total, result = _attend_tile(
                asked, best, total, result, keys, values, table, base, kv_head, position, at + tl.arange(0, KEYS),
                0, high, scale, window, KV_HEADS, DIM, DIM_PADDED, BLOCK_SIZE, False, False,
            )  # fmt: skip
    for at in range(masked_from, high, KEYS):
        best, total, result = _attend_tile(
            asked, best, total, result, keys, values, table, base, kv_head, position, at + tl.arange(0, KEYS),
            low, high, scale, window, KV_HEADS, DIM, DIM_PADDED, BLOCK_SIZE, True, WINDOWED,
        )  # fmt: skip
    # A row beyond the chunk's end has seen nothing.
    result = result / tl.where(total == 0.0, 1.0, total)[:, None]
    at = row[:, None] * (HEADS * DIM) + head * DIM + dim[None, :]
    tl.store(output + at, result.to(output.dtype.element_ty), mask=there)


def singles_kernel(
    query, keys, values, output, parts, sums, table, singles, bases, scale, window, query_row, query_head,
    num_singles, num_parts,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP_PADDED: tl.constexpr, DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr, BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr, WINDOWED: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """Attention of single tokens, one part of one sequence's keys, for the query heads of one KV head.

    `singles` [2, num_singles]: row, end; an end of 0 is a row of padding, whose output is 0. WHOLE: there is one part,
    and it is the output. Else `parts` [single, head, part, dim] and `sums` [2, single, head, part] (best, total) in
    float32 are for `join_kernel`.
    """
    single = tl.program_id(0)
    kv_head = tl.program_id(1)
    part = tl.program_id(2)
    row = tl.load(singles + single).to(tl.int64)
    end = tl.load(singles + num_singles + single)
    base = tl.load(bases + single)
    low = 0
    if WINDOWED:
        low = tl.maximum(end - window, 0)
    num_tokens = tl.cdiv(tl.cdiv(end - low, num_parts), KEYS) * KEYS
    first = low + part * num_tokens
    high = tl.minimum(first + num_tokens, end)
    if WHOLE or first < high:
        GROUP: tl.constexpr = HEADS // KV_HEADS
        member = tl.arange(0, GROUP_PADDED)
        dim = tl.arange(0, DIM_PADDED)
        head = kv_head * GROUP + member
        there = (member < GROUP)[:, None] & (dim < DIM)[None, :]
        asked = tl.load(query + row * query_row + head[:, None] * query_head + dim[None, :], mask=there, other=0.0)
        position = tl.full([GROUP_PADDED], 0, tl.int32) + end
        best = tl.full([GROUP_PADDED], float("-inf"), tl.float32)
        total = tl.zeros([GROUP_PADDED], tl.float32)
        result = tl.zeros([GROUP_PADDED, DIM_PADDED], tl.float32)
        masked_from = first + (high - first) // KEYS * KEYS
        for at in range(first, masked_from, KEYS):
            best, total, result = _attend_tile(
                asked, best, total, result, keys, values, table, base, kv_head, position, at + tl.arange(0, KEYS),
                first, high, scale, window, KV_HEADS, DIM, DIM_PADDED, BLOCK_SIZE, False, False,
            )  # fmt: skip
        for at in range(masked_from, high, KEYS):
            best, total, result = _attend_tile(
                asked, best, total, result, keys, values, table, base, kv_head, position, at + tl.arange(0, KEYS),
                first, high, scale, window, KV_HEADS, DIM, DIM_PADDED, BLOCK_SIZE, True, False,
            )  # fmt: skip
        if WHOLE:
            result = result / tl.where(total == 0.0, 1.0, total)[:, None]
            at = row * (HEADS * DIM) + head[:, None] * DIM + dim[None, :]
            tl.store(output + at, result.to(output.dtype.element_ty), mask=there)
        else:
            sum_at = (single.to(tl.int64) * HEADS + head) * num_parts + part
            tl.store(parts + sum_at[:, None] * DIM + dim[None, :], result, mask=there)
            tl.store(sums + sum_at, best, mask=member < GROUP)
            totals = sums + num_singles.to(tl.int64) * HEADS * num_parts
            tl.store(totals + sum_at, total, mask=member < GROUP)


def join_kernel(
    output, parts, sums, singles, window, num_singles, num_parts,
    HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr, KEYS: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """Join the parts of one single and head; only those that `singles_kernel` wrote are read."""
    single = tl.program_id(0)
    head = tl.program_id(1)
    row = tl.load(singles + single).to(tl.int64)
    end = tl.load(singles + num_singles + single)
    length = end
    if WINDOWED:
        length = tl.minimum(end, window)
    num_tokens = tl.cdiv(tl.cdiv(length, num_parts), KEYS) * KEYS
    num_written = tl.cdiv(length, tl.maximum(num_tokens, 1))
    dim = tl.arange(0, DIM_PADDED)
    first = (single.to(tl.int64) * HEADS + head) * num_parts
    totals = sums + num_singles.to(tl.int64) * HEADS * num_parts
    best = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    result = tl.zeros([DIM_PADDED], tl.float32)
    for part in range(num_written):
        at = first + part
        other = tl.load(sums + at)
        higher = tl.maximum(best, other)
        own, its = tl.exp2(best - higher), tl.exp2(other - higher)
        total = total * own + tl.load(totals + at) * its
        result = result * own + tl.load(parts + at * DIM + dim, mask=dim < DIM, other=0.0) * its
        best = higher
    result = result / tl.where(total == 0.0, 1.0, total)
    tl.store(output + row * (HEADS * DIM) + head * DIM + dim, result.to(output.dtype.element_ty), mask=dim < DIM)


@functools.cache
def kernels() -> dict[str, Any]:
    """Return the kernels by name, as Triton launches them. Raises ImportError where it is not installed."""
    global tl, _attend_tile
    triton: Any = importlib.import_module("triton")
    tl = importlib.import_module("triton.language")
    _attend_tile = triton.jit(_attend_tile)
    return {
        "write_kernel": triton.jit(write_kernel, do_not_specialize_on_alignment=["slots"]),
        "chunks_kernel": triton.jit(
            chunks_kernel,
            do_not_specialize=["window", "num_tiles", "num_chunks"],
            do_not_specialize_on_alignment=["bases"],
        ),
        "singles_kernel": triton.jit(
            singles_kernel,
            do_not_specialize=["window", "num_singles", "num_parts"],
            do_not_specialize_on_alignment=["singles", "bases"],
        ),
        "join_kernel": triton.jit(
            join_kernel,
            do_not_specialize=["window", "num_singles", "num_parts"],
            do_not_specialize_on_alignment=["singles"],
        ),
    }
