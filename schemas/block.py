"""Block identity and token packing.

A full block's identity is blake2b-128 over its parent's identity and its token ids, keyed by model and tenant: equal
hashes mean equal text from the first token on, under the same weights and the same tenant, in every process.
"""

import hashlib
import sys
from array import array
from collections.abc import Sequence

from schemas.ids import BlockHash, TokenIds

BLOCK_HASH_BYTES = 16
TOKEN_BYTES = 4
"""Of one token id as it is packed."""


def pack_tokens(token_ids: Sequence[int]) -> TokenIds:
    """Return the ids as little-endian u32. Raises OverflowError for an id outside 0 … 2³²-1."""
    return TokenIds(_little_endian(array("I", token_ids)).tobytes())


def unpack_tokens(packed: TokenIds) -> list[int]:
    """Return the ids. Raises ValueError when the length is no multiple of four bytes."""
    tokens = array("I")
    tokens.frombytes(packed)
    return _little_endian(tokens).tolist()


class BlockHasher:
    """The identities of one sequence's full blocks, as they fill up, each chained to the one before it."""

    __slots__ = ("_key", "block_size", "hashes")

    def __init__(self, block_size: int, *, model_fingerprint: str, tenant: str = "") -> None:
        salt = f"{model_fingerprint}\0{tenant}\0{block_size}".encode()
        self._key = hashlib.blake2b(salt, digest_size=32).digest()
        self.block_size = block_size
        self.hashes: list[BlockHash] = []

    def extend(self, token_ids: Sequence[int], num_tokens: int) -> list[BlockHash]:
        """Hash the blocks of `token_ids[:num_tokens]` that are full and not hashed yet; return all hashes so far.

        `token_ids` is always the whole sequence from its first token.
        """
        while (end := (len(self.hashes) + 1) * self.block_size) <= num_tokens:
            parent = self.hashes[-1] if self.hashes else b""
            block = pack_tokens(token_ids[end - self.block_size : end])
            digest = hashlib.blake2b(parent + block, digest_size=BLOCK_HASH_BYTES, key=self._key).digest()
            self.hashes.append(BlockHash(digest))
        return self.hashes


def hash_blocks(
    token_ids: Sequence[int], block_size: int, *, model_fingerprint: str, tenant: str = ""
) -> list[BlockHash]:
    """Return the identities of the full blocks of `token_ids`, in order; a last, partial block has none."""
    hasher = BlockHasher(block_size, model_fingerprint=model_fingerprint, tenant=tenant)
    return hasher.extend(token_ids, len(token_ids))


def join_hashes(hashes: Sequence[BlockHash]) -> bytes:
    """Return the hashes as one field: 16 bytes each, in order."""
    return b"".join(hashes)


def split_hashes(joined: bytes) -> list[BlockHash]:
    """Return the hashes of a joined field. Raises ValueError when its length is no multiple of 16."""
    if len(joined) % BLOCK_HASH_BYTES:
        raise ValueError(f"{len(joined)} bytes are no whole number of block hashes")
    return [BlockHash(joined[at : at + BLOCK_HASH_BYTES]) for at in range(0, len(joined), BLOCK_HASH_BYTES)]


def _little_endian(tokens: "array[int]") -> "array[int]":
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens
