"""Token packing and block identity."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.block import (
    BLOCK_HASH_BYTES,
    BlockHasher,
    hash_blocks,
    join_hashes,
    pack_tokens,
    split_hashes,
    unpack_tokens,
)
from schemas.ids import TokenIds

token_ids = st.lists(st.integers(0, 2**32 - 1), max_size=40)
few_tokens = st.lists(st.integers(0, 1), max_size=20)
"""Of two values only, so that equal prefixes are common."""


@given(token_ids)
def test_tokens_come_out_as_they_went_in(tokens: list[int]) -> None:
    packed = pack_tokens(tokens)
    assert unpack_tokens(packed) == tokens
    assert len(packed) == 4 * len(tokens)
    assert packed == b"".join(token.to_bytes(4, "little") for token in tokens)


@pytest.mark.parametrize("token", [-1, 2**32])
def test_a_token_outside_u32_is_refused(token: int) -> None:
    with pytest.raises(OverflowError):
        pack_tokens([token])


@pytest.mark.parametrize("num_bytes", [1, 2, 3, 5])
def test_half_a_token_is_refused(num_bytes: int) -> None:
    with pytest.raises(ValueError):
        unpack_tokens(TokenIds(bytes(num_bytes)))


def test_known_answer() -> None:
    """The identity must be the same in every process, on every machine, in every release."""
    hashes = hash_blocks(range(40), 16, model_fingerprint="model", tenant="tenant")
    assert [block_hash.hex() for block_hash in hashes] == KNOWN_ANSWER


KNOWN_ANSWER = ["488fbb2d821cde8893e37547a1672502", "0ab65fb83b9ba3425a47593917f02f0d"]


@given(few_tokens, few_tokens, st.integers(1, 4))
def test_hashes_are_equal_as_far_as_the_blocks_from_the_first_on(one: list[int], other: list[int], size: int) -> None:
    ones, others = (hash_blocks(tokens, size, model_fingerprint="m") for tokens in (one, other))
    assert len(ones) == len(one) // size
    for at, (a, b) in enumerate(zip(ones, others, strict=False), start=1):
        assert len(a) == BLOCK_HASH_BYTES
        assert (a == b) == (one[: at * size] == other[: at * size])


@given(few_tokens, st.integers(1, 4), st.data())
def test_hashing_as_the_tokens_come_is_hashing_them_at_once(tokens: list[int], size: int, data: st.DataObject) -> None:
    hasher, length = BlockHasher(size, model_fingerprint="m", tenant="t"), 0
    while length < len(tokens):
        length += data.draw(st.integers(1, len(tokens) - length))
        assert hasher.extend(tokens, length) is hasher.hashes
        assert len(hasher.hashes) == length // size
    assert hasher.hashes == hash_blocks(tokens, size, model_fingerprint="m", tenant="t")


salts = st.tuples(st.text(max_size=3), st.text(max_size=3), st.integers(1, 3))


@given(salts, salts)
def test_models_tenants_and_block_sizes_never_share(one: tuple[str, str, int], other: tuple[str, str, int]) -> None:
    """Also where their names, run together, are equal."""
    if "\0" in one[0] + one[1] + other[0] + other[1]:
        return
    hashes = [
        set(hash_blocks([1] * 6, size, model_fingerprint=model, tenant=tenant)) for model, tenant, size in (one, other)
    ]
    assert one == other or not hashes[0] & hashes[1]


@given(token_ids)
def test_joined_hashes_come_apart(tokens: list[int]) -> None:
    hashes = hash_blocks(tokens, 3, model_fingerprint="m")
    assert split_hashes(join_hashes(hashes)) == hashes


def test_a_cut_hash_is_refused() -> None:
    with pytest.raises(ValueError, match="no whole number"):
        split_hashes(bytes(17))
