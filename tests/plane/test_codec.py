"""What is packed for a wire and what is read back of it."""

import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given

from dataplane.memory.codec import LARGEST, BlockCodec, KVNotFiniteError, PackedDtype, _pack_fp8

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
PACKED = ("int8", "fp8")
CAST_ERROR = {"float32": (2**-24, 0), "bfloat16": (2**-8, 2**-134), "float16": (2**-11, 2**-25)}
"""Of a number, and of the smallest numbers."""


def as_bytes(numbers: np.ndarray) -> np.ndarray:
    """Return [token, head, dim] as rows of bytes."""
    return np.ascontiguousarray(numbers).reshape(len(numbers), -1).view(np.uint8)


def numbers_for(kind: str, shape: tuple[int, ...], dtype: str, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    if kind == "zeros":
        return np.zeros(shape, DTYPES[dtype])
    if kind == "normal":
        return rng.standard_normal(shape).astype(DTYPES[dtype])
    if kind == "outliers":
        return (rng.standard_normal(shape) * 10.0 ** rng.integers(-3, 4, shape)).astype(DTYPES[dtype])
    numbers = np.frombuffer(rng.bytes(int(np.prod(shape)) * np.dtype(DTYPES[dtype]).itemsize), DTYPES[dtype])
    finite = np.isfinite(numbers.astype(np.float32))  # "bits": every finite number there is
    return np.where(finite, numbers, numbers.dtype.type(0)).reshape(shape)


@given(
    packed=st.sampled_from(PACKED),
    dtype=st.sampled_from(sorted(DTYPES)),
    kind=st.sampled_from(["zeros", "normal", "outliers", "bits"]),
    num_heads=st.integers(1, 4),
    head_dim=st.sampled_from([1, 3, 8, 64]),
    block_size=st.sampled_from([1, 4, 16]),
    first_token=st.integers(0, 40),
    num_tokens=st.integers(0, 90),
    seed=st.integers(0, 2**32 - 1),
)
@example("int8", "float32", "bits", 2, 64, 16, 5, 300, 1)
def test_round_trip_stays_in_its_bounds(
    packed, dtype, kind, num_heads, head_dim, block_size, first_token, num_tokens, seed
) -> None:
    codec = BlockCodec(packed, dtype, num_heads, head_dim, block_size)
    numbers = numbers_for(kind, (num_tokens, num_heads, head_dim), dtype, seed)
    wire = np.full(codec.wire_bytes(first_token, num_tokens), 0xCC, np.uint8)
    codec.encode(as_bytes(numbers) if num_tokens else np.empty((0, 1), np.uint8), first_token, wire)
    rows = np.full((num_tokens, num_heads * head_dim * numbers.itemsize), 0xCC, np.uint8)
    codec.decode(wire, first_token, rows)

    exact = numbers.astype(np.float64)
    decoded = rows.reshape(-1).view(DTYPES[dtype]).reshape(numbers.shape).astype(np.float64)
    of_number, of_smallest = CAST_ERROR[dtype]
    for block in {(first_token + i) // block_size for i in range(num_tokens)}:
        start, end = (max(0, at * block_size - first_token) for at in (block, block + 1))
        for head in range(num_heads):
            x, y = exact[start:end, head], decoded[start:end, head]
            scale = abs(x).max() / LARGEST[packed]
            if scale < np.finfo(np.float32).tiny * (1 - 1e-6):
                assert not y.any(), "too small for a scale"
                continue
            step = scale / 2 if packed == "int8" else np.maximum(abs(x) / 16, scale * 2**-10)
            assert (abs(x - y) <= step * (1 + 1e-5) + abs(y) * of_number + of_smallest).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("packed", PACKED)
def test_what_fits_its_scale_is_read_back_exactly(packed: PackedDtype, dtype: str) -> None:
    codec = BlockCodec(packed, dtype, 1, 256, 16)
    codes = np.arange(256, dtype=np.uint8)
    if packed == "int8":
        exact = np.maximum(codes.view(np.int8), -127).astype(DTYPES[dtype])
    else:
        values = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        exact = np.where(np.isfinite(values), values, 0).astype(DTYPES[dtype])
    wire = np.empty(codec.wire_bytes(0, 1), np.uint8)
    codec.encode(as_bytes(exact.reshape(1, 1, 256)), 0, wire)
    rows = np.empty((1, 256 * exact.itemsize), np.uint8)
    codec.decode(wire, 0, rows)
    assert np.array_equal(rows.reshape(-1).view(DTYPES[dtype]), exact)
    assert len(wire) == 4 + 256


def test_ties_go_to_even() -> None:
    codec = BlockCodec("int8", "float32", 1, 6, 16)
    numbers = np.array([127, 0.5, 1.5, 2.5, -0.5, -1.5], np.float32).reshape(1, 1, 6)
    wire = np.empty(codec.wire_bytes(0, 1), np.uint8)
    codec.encode(as_bytes(numbers), 0, wire)
    assert wire[4:].view(np.int8).tolist() == [127, 0, 2, 2, 0, -2]
    assert wire[:4].view("<f4")[0] == 1


def test_fp8_is_what_ml_dtypes_makes_of_it() -> None:
    """Every float16 up to 448 and every border between two codes, with the numbers right beside it."""
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
    codes = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    codes = np.unique(codes[np.isfinite(codes)])
    borders = (codes[1:] + codes[:-1]) / 2
    numbers = np.concatenate([halves, borders, np.nextafter(borders, np.inf), np.nextafter(borders, -np.inf)])
    numbers = numbers[np.isfinite(numbers) & (abs(numbers) <= 448)].astype(np.float32)
    packed = np.empty(numbers.shape, np.uint8)
    _pack_fp8(numbers.copy(), packed)
    assert np.array_equal(packed, numbers.astype(ml_dtypes.float8_e4m3fn).view(np.uint8))


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("packed", PACKED)
@pytest.mark.parametrize("at", [0, 37, 99])
def test_what_is_not_finite_is_refused(packed: PackedDtype, dtype: str, number: float, at: int) -> None:
    codec = BlockCodec(packed, dtype, 2, 4, 16)
    numbers = np.ones((100, 2, 4), DTYPES[dtype])
    numbers[at, 1, 3] = number
    with pytest.raises(KVNotFiniteError):
        codec.encode(as_bytes(numbers), 7, np.empty(codec.wire_bytes(7, 100), np.uint8))


@pytest.mark.parametrize("scale", [np.nan, np.inf, -1.0, 3.4e38])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("packed", PACKED)
def test_scale_that_cannot_be_is_refused_and_nothing_written(packed: PackedDtype, dtype: str, scale: float) -> None:
    codec = BlockCodec(packed, dtype, 2, 4, 16)
    wire = np.zeros(codec.wire_bytes(0, 40), np.uint8)
    wire[8:12] = np.array([scale], "<f4").view(np.uint8)
    rows = np.full((40, 8 * np.dtype(DTYPES[dtype]).itemsize), 0xCC, np.uint8)
    with pytest.raises(KVNotFiniteError):
        codec.decode(wire, 0, rows)
    assert (rows == 0xCC).all()


def test_the_largest_numbers_of_all_stay_finite() -> None:
    for packed in PACKED:
        for dtype, numbers in DTYPES.items():
            codec = BlockCodec(packed, dtype, 1, 2, 16)
            largest = ml_dtypes.finfo(numbers).max
            wire = np.empty(codec.wire_bytes(0, 1), np.uint8)
            codec.encode(as_bytes(np.array([largest, -largest], numbers).reshape(1, 1, 2)), 0, wire)
            rows = np.empty((1, 2 * np.dtype(numbers).itemsize), np.uint8)
            codec.decode(wire, 0, rows)
            decoded = rows.reshape(-1).view(numbers).astype(np.float64)
            assert np.isfinite(decoded).all() and np.allclose(decoded, [float(largest), -float(largest)])
