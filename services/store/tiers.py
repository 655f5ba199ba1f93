"""What lies behind the store's memory: the protocol that a folder and a server speak.

A tier knows values by their keys and nothing of bounds or recency; the core does. Its methods block: they are
called on threads of their own, one `write` or `delete` at a time, any number of `read`s.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple, NewType, Protocol

from schemas.block import BLOCK_HASH_BYTES
from schemas.directory import Tier
from schemas.ids import BlockHash

Value = bytes | bytearray

StoreKey = NewType("StoreKey", bytes)
"""What a value is known by behind memory: its block's hash, and a mark of its tenant."""
_MARK_BYTES = 8
KEY_BYTES = _MARK_BYTES + BLOCK_HASH_BYTES


def key_of(tenant: str, block_hash: BlockHash) -> StoreKey:
    """Return the key of a tenant's block. Keys of two tenants differ, whatever hashes either gives."""
    return StoreKey(block_hash + mark_of(tenant))


def mark_of(tenant: str) -> bytes:
    """Return how a tenant's keys end."""
    return hashlib.blake2b(tenant.encode(), digest_size=_MARK_BYTES).digest()


def hash_of(key: StoreKey) -> BlockHash:
    """Return the hash of a key's block."""
    return BlockHash(key[:BLOCK_HASH_BYTES])


class TierError(Exception):
    """The tier cannot do it now. `written`: what of a `write` is there all the same."""

    def __init__(self, reason: str, written: Sequence[StoreKey] = ()) -> None:
        super().__init__(reason)
        self.written = tuple(written)


class TierFullError(TierError):
    """There is no room, whatever the store's own bound says."""


class Entry(NamedTuple):
    """A value that a tier has."""

    key: StoreKey
    num_bytes: int


class BackTier(Protocol):
    """Values that outlive the store."""

    @property
    def name(self) -> Tier: ...

    def scan(self) -> list[Entry]:
        """Return what is there, the least recently used in front. Raises TierError."""
        ...

    def write(self, values: Mapping[StoreKey, Value]) -> None:
        """Keep these values, in place of older ones. Raises TierError, TierFullError."""
        ...

    def read(self, keys: Sequence[StoreKey]) -> list[bytes | None]:
        """Return the values, None for what is not there (any more), and note their use. Raises TierError."""
        ...

    def delete(self, keys: Sequence[StoreKey]) -> None:
        """Forget these values; what is not there does not matter. Raises TierError."""
        ...

    def delete_all(self) -> None:
        """Delete all that is there of this model, also of earlier formats. Raises TierError."""
        ...

    def close(self) -> None:
        """Let go of files and connections. Idempotent."""
        ...
