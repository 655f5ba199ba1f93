"""The digest that cards compute: the same number however the bytes come, another one for other bytes."""

import itertools

import hypothesis.strategies as st
import numpy as np
from hypothesis import given, settings

from dataplane.memory import checksum
from dataplane.memory.checksum import Sum64, sum64
from tests.share import examples

MASK = (1 << 64) - 1
quick = settings(max_examples=examples(200), deadline=None)


def by_the_book(data: bytes) -> int:
    """The definition, word by word."""
    data += bytes(-len(data) % 8)
    total = 0
    for i in range(len(data) // 8):
        x = int.from_bytes(data[8 * i : 8 * i + 8], "little") ^ ((i + 1) * 0x9E3779B97F4A7C15 & MASK)
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK
        total += x ^ (x >> 31)
    return total & MASK


def random_bytes(size: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(size)


def test_known_values() -> None:
    """What cards and hosts of other versions say of the same bytes. The first words of splitmix64 from the seed 0 are
    mix(k · GOLDEN), which is what words of zeros add."""
    stream = (0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F)
    assert [sum64(bytes(8 * n)) for n in range(4)] == [sum(stream[:n]) & MASK for n in range(4)]
    assert sum64(bytes(range(24))) == by_the_book(bytes(range(24))) == 833534554273266203
    assert sum64(b"abc") == sum64(b"abc" + bytes(5))


@quick
@given(data=st.binary(max_size=300))
def test_it_is_what_the_book_says(data: bytes) -> None:
    assert sum64(data) == by_the_book(data)
    assert sum64(np.frombuffer(data, np.uint8)) == by_the_book(data)


def test_long_data_is_what_the_book_says() -> None:
    """Longer than what is mixed at a time."""
    for size in (8 * checksum._PIECE_WORDS, 8 * checksum._PIECE_WORDS + 8, 20 * checksum._PIECE_WORDS + 5):
        data = random_bytes(size)
        assert sum64(data) == by_the_book(data), size


@quick
@given(data=st.binary(max_size=400), cuts=st.lists(st.integers(0, 400), max_size=8))
def test_pieces_of_any_lengths(data: bytes, cuts: list[int]) -> None:
    hasher = Sum64()
    borders = sorted({0, len(data), *(min(cut, len(data)) for cut in cuts)})
    for start, end in itertools.pairwise(borders):
        hasher.update(data[start:end])
        assert hasher.intdigest() == sum64(data[:end])
    assert hasher.intdigest() == by_the_book(data)


def test_pieces_around_what_is_mixed_at_a_time() -> None:
    data = random_bytes(3 * 8 * checksum._PIECE_WORDS + 3)
    for step in (8 * checksum._PIECE_WORDS - 3, 8 * checksum._PIECE_WORDS + 5, 1 << 20):
        hasher = Sum64()
        for at in range(0, len(data), step):
            hasher.update(memoryview(data)[at : at + step])
        assert hasher.intdigest() == by_the_book(data)


@quick
@given(size=st.integers(1, 200), seed=st.integers(0, 99), choose=st.data())
def test_it_sees_a_bit_a_swap_and_a_shift(size: int, seed: int, choose: st.DataObject) -> None:
    data = random_bytes(8 * size, seed)
    right = sum64(data)
    bit = choose.draw(st.integers(0, 64 * size - 1))
    flipped = bytearray(data)
    flipped[bit // 8] ^= 1 << bit % 8
    assert sum64(flipped) != right
    first, second = choose.draw(st.integers(0, size - 1)), choose.draw(st.integers(0, size - 1))
    words = np.frombuffer(data, np.uint64).copy()
    words[[first, second]] = words[[second, first]]
    assert (sum64(words.view(np.uint8)) == right) == (first == second)
    assert sum64(bytes(8) + data) != right
    assert sum64(data + random_bytes(8, seed + 1)) != right


def test_changes_that_cancel_in_a_plain_sum_are_seen() -> None:
    """One more here and one less there; the same word twice instead of two others."""
    words = np.arange(1, 65, dtype=np.uint64) << np.uint64(20)
    right = sum64(words.view(np.uint8))
    for other in range(1, 64):
        changed = words.copy()
        changed[0] += np.uint64(1)
        changed[other] -= np.uint64(1)
        assert sum64(changed.view(np.uint8)) != right


def test_flipped_bits_spread_over_the_whole_digest() -> None:
    """On average half of the digest's bits change: a part of it is as good a digest, but shorter."""
    data = random_bytes(4096)
    right = sum64(data)
    changed = []
    for bit in range(0, 8 * len(data), 131):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        changed.append((sum64(flipped) ^ right).bit_count())
    assert 28 < np.mean(changed) < 36
    assert min(changed) > 8
