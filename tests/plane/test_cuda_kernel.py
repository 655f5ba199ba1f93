"""move.cu: it compiles for the cards that there are, and as C++ it does on the host what numpy does."""

import ctypes
import re
from collections.abc import Iterator

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from dataplane.cards.cuda import kernel as cuda_kernel
from dataplane.cards.cuda.cuda_driver import import_cupy
from dataplane.cards.cuda.kernel import NUM_THREADS, SOURCE, VECTORS_PER_THREAD, compile_kernels, vector_bytes
from dataplane.cards.device import DeviceError, Moves
from dataplane.memory.checksum import sum64
from tests.plane.host_cuda import KERNELS, host_kernels, why_no_compiler
from tests.share import examples

compiled_for_the_host = pytest.mark.skipif(bool(why_no_compiler()), reason=why_no_compiler())


@pytest.fixture(scope="module")
def nvrtc():
    found = import_cupy().nvrtc
    try:
        found.getVersion()
    except RuntimeError as error:
        pytest.skip(f"no NVRTC: {error}")
    return found


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_it_compiles_for_the_cards_that_there_are(nvrtc, capability: int) -> None:
    image = compile_kernels(nvrtc, capability)
    assert image.startswith(b"\x7fELF")
    assert all(name.encode() in image for name in KERNELS)


def test_a_newer_card_gets_what_its_driver_can_translate(nvrtc) -> None:
    image = compile_kernels(nvrtc, 999).decode()
    assert all(f".entry {name}(" in image for name in KERNELS)


def test_a_card_that_is_too_old_is_said(nvrtc) -> None:
    with pytest.raises(DeviceError, match=r"3\.5 is too old"):
        compile_kernels(nvrtc, 35)


def test_an_error_says_where_it_is(nvrtc, monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    broken = tmp_path / "broken.cu"
    broken.write_text(SOURCE.read_text().replace("num_blocks_done", "num_blocks_lost", 1))
    monkeypatch.setattr(cuda_kernel, "SOURCE", broken)
    with pytest.raises(DeviceError, match=r"broken\.cu\(\d+\): error"):
        compile_kernels(nvrtc, 90)


def test_sixteen_bytes_are_loaded_and_stored_at_once(nvrtc) -> None:
    text = compile_kernels(nvrtc, 999).decode()
    wide = text[text.index(f".entry {KERNELS[1]}(") :]
    assert len(re.findall(r"ld\.global\.v2\.(?:u|b)64", wide)) >= VECTORS_PER_THREAD
    assert len(re.findall(r"st\.global\.v2\.(?:u|b)64", wide)) >= VECTORS_PER_THREAD


def test_what_the_launch_counts_with_is_what_the_kernel_has() -> None:
    defined = dict(re.findall(r"#define (\w+) (\d+)", SOURCE.read_text()))
    assert int(defined["VECTORS_PER_THREAD"]) == VECTORS_PER_THREAD
    assert NUM_THREADS % 32 == 0 and int(defined["MAX_WARPS"]) >= NUM_THREADS // 32


@st.composite
def moved(draw: st.DrawFn) -> tuple[Moves, int, int]:
    """Return moves, and the sizes of their source and target: runs in any order at both ends, none overlapping."""
    unit = draw(st.sampled_from([8, 16]))
    row_bytes = unit * draw(st.integers(1, 9))
    strides = [row_bytes + unit * draw(st.sampled_from([0, 0, 1, 5])) for _ in range(2)]
    num_rows = draw(st.lists(st.sampled_from([1, 1, 2, 3, 16, 40, 200]), min_size=0, max_size=12))
    ends, sizes = [], []
    for stride in strides:
        at = draw(st.sampled_from([0, unit, 256]))
        first_bytes = [0] * len(num_rows)
        for run in draw(st.permutations(range(len(num_rows)))):
            first_bytes[run] = at
            at += num_rows[run] * stride + unit * draw(st.integers(0, 2))
        ends.append(first_bytes)
        sizes.append(at + row_bytes)
    first_rows = np.cumsum([0, *num_rows])[:-1].tolist()
    runs = np.array([ends[0], ends[1], first_rows], np.int64).T.copy().reshape(-1, 3)
    return Moves(runs, sum(num_rows), row_bytes, strides[0], strides[1]), sizes[0], sizes[1]


def by_numpy(moves: Moves, source: np.ndarray, target: np.ndarray) -> int:
    """Move the rows one by one and return their digest."""
    rows = np.empty((moves.num_rows, moves.row_bytes), np.uint8)
    num_rows = np.diff(moves.runs[:, 2], append=moves.num_rows)
    for (at, to, first), size in zip(moves.runs.tolist(), num_rows.tolist(), strict=True):
        for row in range(size):
            piece = source[at + row * moves.source_stride :][: moves.row_bytes]
            rows[first + row] = target[to + row * moves.target_stride :][: moves.row_bytes] = piece
    return sum64(rows.reshape(-1))


class Launch:
    """One launch of a kernel of the host's, with guards around all that it may write."""

    def __init__(self, library: ctypes.CDLL, num_blocks: int, num_threads: int) -> None:
        self._library = library
        self._size = (num_blocks, num_threads)

    def __call__(
        self, kernel: str, moves: Moves, source: np.ndarray, target: np.ndarray | None, *, digest: bool
    ) -> int:
        words = np.zeros(2 + 3 * len(moves.runs), np.int64)
        words[2:] = moves.runs.reshape(-1)
        result = np.full(3, 0xDEAD, np.uint64)
        vector = int(kernel.rpartition("_")[2])
        values = np.array(
            [
                source.ctypes.data,
                0 if target is None else target.ctypes.data,
                words.ctypes.data,
                len(moves.runs),
                moves.num_rows,
                moves.row_bytes // vector,
                moves.source_stride,
                moves.target_stride,
                result.ctypes.data + 8 if digest else 0,
            ],
            np.uint64,
        )
        addresses = values.ctypes.data + 8 * np.arange(len(values))
        getattr(self._library, f"launch_{kernel}")(*self._size, ctypes.c_void_p(addresses.ctypes.data))
        assert result[0] == result[2] == 0xDEAD
        assert np.array_equal(words[2:], moves.runs.reshape(-1))
        return int(result[1])


SIZES = [(1, 32), (2, 32), (3, 64)]
"""Blocks and threads: fewer than there are vectors, so that each takes several turns, and more."""


@pytest.fixture(scope="module")
def library() -> Iterator[ctypes.CDLL]:
    yield host_kernels()


def aligned(size: int, seed: int) -> np.ndarray:
    """Return random bytes that begin at a multiple of 64, as a card's memory does."""
    memory = np.random.default_rng(seed).integers(0, 256, size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size]


@compiled_for_the_host
@settings(max_examples=examples(60), deadline=None)
@given(case=moved(), size=st.sampled_from(SIZES), seed=st.integers(0, 99))
def test_the_kernel_moves_and_digests_as_numpy_does(
    library: ctypes.CDLL, case: tuple[Moves, int, int], size: tuple[int, int], seed: int
) -> None:
    moves, source_bytes, target_bytes = case
    source, target = aligned(source_bytes, seed), aligned(target_bytes, seed + 1)
    expected = target.copy()
    moves.check(source_bytes, target_bytes)
    right = by_numpy(moves, source, expected)
    before = target.copy()
    for kernel in KERNELS:
        if kernel == KERNELS[1] and vector_bytes(moves, with_target=True) == 8:
            continue
        launch = Launch(library, *size)
        target[:] = before
        assert launch(kernel, moves, source, target, digest=True) == right
        assert np.array_equal(target, expected)
        target[:] = before
        assert launch(kernel, moves, source, target, digest=False) == 0xDEAD
        assert np.array_equal(target, expected)
        assert launch(kernel, moves, source, None, digest=True) == right


@compiled_for_the_host
def test_a_whole_block_and_many_turns(library: ctypes.CDLL) -> None:
    """As a card launches it, and with rows enough that each block takes several turns."""
    num_rows, row_bytes = 3 * NUM_THREADS * VECTORS_PER_THREAD // 4 + 7, 80
    runs = np.array([[0, 0, 0], [num_rows * row_bytes, num_rows * row_bytes, num_rows]], np.int64)
    moves = Moves(runs, 2 * num_rows, row_bytes, row_bytes, row_bytes)
    source, target = aligned(moves.num_bytes, 1), aligned(moves.num_bytes, 2)
    assert Launch(library, 2, NUM_THREADS)(KERNELS[1], moves, source, target, digest=True) == sum64(source)
    assert np.array_equal(source, target)


MUTANTS = {
    "a run too far": ("runs[middle].first_row <= row", "runs[middle].first_row <= row + 1"),
    "a run that is gone on with": ("runs[run + 1].first_row <= row", "runs[run + 1].first_row < row"),
    "the wrong stride": ("row_of_run * target_stride", "row_of_run * source_stride"),
    "positions from 0": ("word + 1) * GOLDEN", "word) * GOLDEN"),
    "a warp that is left out": ("warp < blockDim.x / 32", "warp + 1 < blockDim.x / 32"),
    "half a warp": ("distance = 16", "distance = 8"),
    "the first block's sum": ("== gridDim.x - 1", "== 0"),
    "a vector that is not copied": ("if (target) {", "if (target && index) {"),
}


@compiled_for_the_host
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_kernel_that_is_wrong_is_seen(mutant: str) -> None:
    """The tests above can fail: what they compare differs for each of these."""
    right, wrong = MUTANTS[mutant]
    text = SOURCE.read_text()
    assert right in text
    launch = Launch(host_kernels(text.replace(right, wrong)), 2, 64)
    runs = np.array([[512, 0, 0], [0, 640, 5], [1600, 1280, 7], [24000, 20000, 301]], np.int64)
    moves = Moves(runs, 600, 32, 32, 48)
    source, target = aligned(40000, 1), aligned(40000, 2)
    moves.check(source.nbytes, target.nbytes)
    expected = target.copy()
    digest = by_numpy(moves, source, expected)
    got = launch(KERNELS[1], moves, source, target, digest=True)
    assert got != digest or not np.array_equal(target, expected)
