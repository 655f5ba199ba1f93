"""Paged attention as torch operators, `torch.ops.kvmesh.*`: what launches the kernels of `paged_kernel.py`.

Operators, not plain functions, so that a step can be run without a card on torch's fake tensors, which have a device
and shapes and nothing else. On CPU tensors they work under Triton's interpreter only.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from services.engine.cuda import paged_kernel

LOG2_E = 1.4426950408889634
MIN_QUERY_ROWS = 16
"""A matrix product on the card takes so many rows, padding included."""
MAX_PARTS = 64
TARGET_PROGRAMS = 1024
"""A decode's keys are parted until so many programs run: several for each multiprocessor of the largest cards."""


class Launch(NamedTuple):
    """How a kernel is tiled: tokens of queries and of keys per tile, warps, stages of its pipeline."""

    queries: int
    keys: int
    num_warps: int
    num_stages: int


def chunks_launch(head_dim: int, item_bytes: int) -> Launch:
    """Return the tiling of chunks. All fit the 99 KiB of shared memory that the smallest cards (sm_86, sm_89) have."""
    padded = padded_dim(head_dim)
    if item_bytes > 2:
        return Launch(32, 32, 4, 2) if padded <= 128 else Launch(16, 16, 4, 2)
    if padded > 128:
        return Launch(64, 32, 8, 2)
    return Launch(128, 64, 8 if padded == 128 else 4, 2)


def singles_launch(head_dim: int, item_bytes: int) -> Launch:
    """Return the tiling of single tokens: they wait for memory, so more is under way at a time."""
    padded = padded_dim(head_dim)
    if item_bytes > 2:
        return Launch(MIN_QUERY_ROWS, 32 if padded <= 128 else 16, 4, 2)
    return Launch(MIN_QUERY_ROWS, 64 if padded <= 128 else 32, 4, 3 if padded <= 128 else 2)


def padded_dim(head_dim: int) -> int:
    """Return the power of two that a head's dimensions fill: tiles have no other sizes. At least 16."""
    return max(16, 1 << (head_dim - 1).bit_length())


def num_parts(num_singles: int, num_kv_heads: int) -> int:
    """Return into how many parts each sequence of a decode is cut. Depends on shapes only, never on lengths."""
    wanted = -(-TARGET_PROGRAMS // max(1, num_singles * num_kv_heads))
    return min(MAX_PARTS, 1 << (wanted - 1).bit_length())


_torch_library = cast(Any, torch.library)
_library = _torch_library.Library("kvmesh", "DEF")
_SCHEMAS = {
    "write_kv": "(Tensor key, Tensor value, Tensor(a!) keys, Tensor(b!) values, Tensor slots) -> ()",
    "attend_chunks": (
        "(Tensor query, Tensor keys, Tensor values, Tensor(a!) output, Tensor table, Tensor tiles, Tensor chunks, "
        "Tensor bases, float scale, int window, int block_size) -> ()"
    ),
    "attend_singles": (
        "(Tensor query, Tensor keys, Tensor values, Tensor(a!) output, Tensor table, Tensor singles, Tensor bases, "
        "float scale, int window, int block_size) -> ()"
    ),
}


def _write_kv(key: Tensor, value: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
    """Put k and v `[rows, kv_heads, dim]` into their slots of `[slot, kv_heads, dim]`."""
    num_rows, num_heads, head_dim = key.shape
    _kernel("write_kernel")[(num_rows,)](
        key, value, keys, values, slots, key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        HEADS=num_heads, HEADS_PADDED=1 << (num_heads - 1).bit_length(), DIM=head_dim, DIM_PADDED=padded_dim(head_dim),
        num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip


def _attend_chunks(
    query: Tensor, keys: Tensor, values: Tensor, output: Tensor, table: Tensor, tiles: Tensor, chunks: Tensor,
    bases: Tensor, scale: float, window: int, block_size: int,
) -> None:  # fmt: skip
    """Fill the chunks' rows of `output` for queries `[rows, heads, dim]`. `window` 0: a query sees all before it."""
    _, num_heads, head_dim = query.shape
    launch = chunks_launch(head_dim, query.itemsize)
    _kernel("chunks_kernel")[(num_heads, tiles.shape[1])](
        query, keys, values, output, table, tiles, chunks, bases, scale * LOG2_E, window,
        query.stride(0), query.stride(1), tiles.shape[1], chunks.shape[1],
        HEADS=num_heads, KV_HEADS=keys.shape[1], DIM=head_dim, DIM_PADDED=padded_dim(head_dim), BLOCK_SIZE=block_size,
        QUERIES=launch.queries, KEYS=launch.keys, WINDOWED=window > 0,
        num_warps=launch.num_warps, num_stages=launch.num_stages, enable_fp_fusion=True,
    )  # fmt: skip


def _attend_singles(
    query: Tensor, keys: Tensor, values: Tensor, output: Tensor, table: Tensor, singles: Tensor, bases: Tensor,
    scale: float, window: int, block_size: int,
) -> None:  # fmt: skip
    """Fill the single tokens' rows of `output` for queries `[rows, heads, dim]`."""
    _, num_heads, head_dim = query.shape
    num_singles, num_kv_heads = singles.shape[1], keys.shape[1]
    launch = singles_launch(head_dim, query.itemsize)
    parts = num_parts(num_singles, num_kv_heads)
    sizes = (num_singles, num_heads, parts) if parts > 1 else (0, 0, 0)
    partial = query.new_empty((*sizes, head_dim), dtype=torch.float32)
    sums = query.new_empty((2, *sizes), dtype=torch.float32)
    _kernel("singles_kernel")[(num_singles, num_kv_heads, parts)](
        query, keys, values, output, partial, sums, table, singles, bases, scale * LOG2_E, window,
        query.stride(0), query.stride(1), num_singles, parts,
        HEADS=num_heads, KV_HEADS=num_kv_heads,
        GROUP_PADDED=max(MIN_QUERY_ROWS, 1 << (num_heads // num_kv_heads - 1).bit_length()),
        DIM=head_dim, DIM_PADDED=padded_dim(head_dim), BLOCK_SIZE=block_size, KEYS=launch.keys,
        WINDOWED=window > 0, WHOLE=parts == 1,
        num_warps=launch.num_warps, num_stages=launch.num_stages, enable_fp_fusion=True,
    )  # fmt: skip
    if parts > 1:
        _kernel("join_kernel")[(num_singles, num_heads)](
            output, partial, sums, singles, window, num_singles, parts,
            HEADS=num_heads, DIM=head_dim, DIM_PADDED=padded_dim(head_dim), KEYS=launch.keys, WINDOWED=window > 0,
            num_warps=1, enable_fp_fusion=True,
        )  # fmt: skip


def _kernel(name: str) -> Any:
    return paged_kernel.kernels()[name]


def _nothing(*_: object) -> None:
    """What an operator does to fake tensors: it only writes into what it is given."""


for _name, _function in (
    ("write_kv", _write_kv),
    ("attend_chunks", _attend_chunks),
    ("attend_singles", _attend_singles),
):
    _library.define(_name + _SCHEMAS[_name])
    for _key in ("CPU", "CUDA"):
        _library.impl(_name, _function, _key)
    _torch_library.register_fake(f"kvmesh::{_name}", _nothing, lib=_library)

write_kv = cast(Callable[..., None], torch.ops.kvmesh.write_kv.default)
attend_chunks = cast(Callable[..., None], torch.ops.kvmesh.attend_chunks.default)
attend_singles = cast(Callable[..., None], torch.ops.kvmesh.attend_singles.default)
