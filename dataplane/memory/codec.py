"""KV compressed for a wire: one float32 scale per block and head, and a byte per number. Pure.

The keys (or values) of one layer, tokens [first, first + n), become their scales, block by block and head by head, and
then their numbers, token by token. A block is `block_size` positions of the sequence, at ragged ends a part of one.
A number is read back as its byte times its scale: as int8 within half a step, which is 1/254 of the largest number of
its block and head; as float8_e4m3fn within 1/16 of itself or, where it is small, 2^-10 of the scale. What is so small
that its scale would be no normal float32 becomes 0.
"""

from functools import lru_cache
from typing import Literal, NamedTuple

import ml_dtypes
import numpy as np
import numpy.typing as npt

WireDtype = Literal["same", "int8", "fp8"]
PackedDtype = Literal["int8", "fp8"]

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

LARGEST: dict[PackedDtype, int] = {"int8": 127, "fp8": 448}
SCALE_BYTES = 4
_TILE_NUMBERS = 128 << 10
"""What is worked on at once: its intermediate results stay in the core's cache."""
_FLOAT32_MAX = float(np.finfo(np.float32).max)
_FLOAT32_TINY = float(np.finfo(np.float32).tiny)


class KVNotFiniteError(ValueError):
    """An infinity or a NaN: no scale fits it. In what is to be compressed, or among the scales that came."""


class _Storage(NamedTuple):
    """How an arena's numbers are stored. `magnitude`: all bits but the sign; `infinity`: its bits."""

    numbers: npt.DTypeLike
    bits: npt.DTypeLike
    magnitude: int
    infinity: int


_STORAGE = {
    "float32": _Storage(np.float32, np.uint32, 0x7FFF_FFFF, 0x7F80_0000),
    "bfloat16": _Storage(ml_dtypes.bfloat16, np.uint16, 0x7FFF, 0x7F80),
    "float16": _Storage(np.float16, np.uint16, 0x7FFF, 0x7C00),
}


class BlockCodec:
    """Packs and unpacks runs of tokens of one layer's keys or values: rows of `num_heads` × `head_dim` numbers."""

    def __init__(self, packed: PackedDtype, dtype: str, num_heads: int, head_dim: int, block_size: int) -> None:
        self._packed: PackedDtype = packed
        self._storage = _STORAGE[dtype]
        self._num_heads = num_heads
        self._head_dim = head_dim
        self._block_size = block_size
        self._tile_blocks = max(1, _TILE_NUMBERS // (block_size * num_heads * head_dim))

    def wire_bytes(self, first_token: int, num_tokens: int) -> int:
        """Return how many bytes these tokens become."""
        return self._scale_bytes(first_token, num_tokens) + num_tokens * self._num_heads * self._head_dim

    def encode(self, rows: Bytes, first_token: int, out: Bytes) -> None:
        """Pack contiguous rows [token, byte] into `out`. Raises KVNotFiniteError."""
        num_tokens = len(rows)
        scales, packed = self._split(out, first_token, num_tokens)
        numbers = rows.reshape(-1).view(self._storage.numbers).reshape(packed.shape)
        block = 0
        for start, end, tile_shape in self._tiles(first_token, num_tokens):
            tile = numbers[start:end].reshape(tile_shape)
            tile_scales, inverses = self._scales(tile)
            scales[block : block + len(tile)] = tile_scales
            scaled = np.multiply(tile, inverses[:, None, :, None], dtype=np.float32)
            _PACK[self._packed](scaled, packed[start:end].reshape(tile_shape))
            block += len(tile)

    def decode(self, wire: Bytes, first_token: int, rows: Bytes) -> None:
        """Unpack into contiguous rows [token, byte]. Raises KVNotFiniteError, before it writes anything."""
        num_tokens = len(rows)
        scales, packed = self._split(wire, first_token, num_tokens)
        with np.errstate(over="ignore", invalid="ignore"):
            reach = (scales * LARGEST[self._packed]).astype(self._storage.numbers)
        if not np.isfinite(reach.astype(np.float32)).all() or (scales < 0).any():
            raise KVNotFiniteError("a scale is negative, not finite, or too large for the arena's numbers")
        numbers = rows.reshape(-1).view(self._storage.numbers).reshape(packed.shape)
        block = 0
        for start, end, tile_shape in self._tiles(first_token, num_tokens):
            tile = _UNPACK[self._packed](packed[start:end].reshape(tile_shape))
            tile *= scales[block : block + tile_shape[0], None, :, None]
            numbers[start:end].reshape(tile_shape)[...] = tile
            block += tile_shape[0]

    def _scale_bytes(self, first_token: int, num_tokens: int) -> int:
        if not num_tokens:
            return 0
        last_block = (first_token + num_tokens - 1) // self._block_size
        return (last_block - first_token // self._block_size + 1) * self._num_heads * SCALE_BYTES

    def _split(self, wire: Bytes, first_token: int, num_tokens: int) -> tuple[Floats, Bytes]:
        """Return the scales [block, head] and the packed numbers [token, head, dim] as views."""
        assert wire.nbytes == self.wire_bytes(first_token, num_tokens), "the length was checked before"
        border = self._scale_bytes(first_token, num_tokens)
        scales = wire[:border].view("<f4").reshape(-1, self._num_heads)
        return scales, wire[border:].reshape(num_tokens, self._num_heads, self._head_dim)

    def _tiles(self, first_token: int, num_tokens: int) -> list[tuple[int, int, tuple[int, int, int, int]]]:
        """Cut [0, num_tokens) at block borders into tiles of whole blocks and ragged ends: start, end, shape."""
        size, tiles, start = self._block_size, list[tuple[int, int, tuple[int, int, int, int]]](), 0
        while start < num_tokens:
            left = min(num_tokens - start, size - (first_token + start) % size)
            num_blocks = 1
            if left == size:
                num_blocks = min((num_tokens - start) // size, self._tile_blocks)
            end = start + num_blocks * left
            tiles.append((start, end, (num_blocks, left, self._num_heads, self._head_dim)))
            start = end
        return tiles

    def _scales(self, tile: npt.NDArray[np.generic]) -> tuple[Floats, Floats]:
        """Return each block and head's scale, and what to multiply its numbers with. Raises KVNotFiniteError."""
        storage = self._storage
        magnitudes = tile.view(storage.bits) & storage.magnitude  # floats without sign are ordered as their bits are
        peaks = magnitudes.max(axis=1).max(axis=-1)
        if (peaks >= storage.infinity).any():
            raise KVNotFiniteError("KV that is not finite cannot be compressed")
        largest = LARGEST[self._packed]
        scales = peaks.view(storage.numbers).astype(np.float32) / np.float32(largest)
        # Rounded up, the largest number of all would be read back as an infinity.
        too_far = scales.astype(np.float64) * largest > _FLOAT32_MAX
        scales -= np.where(too_far, np.spacing(scales), np.float32(0))
        scales[scales < _FLOAT32_TINY] = 0
        inverses = np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=scales > 0)
        return scales, inverses


def _pack_int8(scaled: Floats, packed: Bytes) -> None:
    np.copyto(packed.view(np.int8), np.rint(scaled, out=scaled), casting="unsafe")


def _pack_fp8(scaled: Floats, packed: Bytes) -> None:
    """Round to float8_e4m3fn, ties to even, of numbers up to 448: what `astype` does, five times as fast.

    A number's upper half, odd where the lower half is not zero, is rounded as the whole is: so a table can do it.
    """
    bits = scaled.view(np.uint32)
    upper = (bits >> 16).astype(np.uint16)
    upper |= (bits & 0xFFFF) != 0
    np.take(_fp8_codes(), upper, out=packed, mode="clip")


def _unpack_int8(packed: Bytes) -> Floats:
    return packed.view(np.int8).astype(np.float32)


def _unpack_fp8(packed: Bytes) -> Floats:
    return np.take(_fp8_numbers(), packed, mode="clip")


@lru_cache(maxsize=1)
def _fp8_numbers() -> Floats:
    return np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)


@lru_cache(maxsize=1)
def _fp8_codes() -> Bytes:
    """Return the code of each upper half of a float32."""
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    with np.errstate(invalid="ignore", over="ignore"):
        return upper.view(np.float32).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)


_PACK = {"int8": _pack_int8, "fp8": _pack_fp8}
_UNPACK = {"int8": _unpack_int8, "fp8": _unpack_fp8}
