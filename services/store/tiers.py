"""What lies behind the store's memory: the protocol that a folder and a server speak, and a tier that is a dict.

A tier knows values by their block's hash and nothing of bounds or recency; the core does. Its methods block: they are
called on threads of their own, one `write` or `delete` at a time, any number of `read`s.
"""

import threading
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from schemas.directory import Tier
from schemas.ids import BlockHash

Value = bytes | bytearray


class TierError(Exception):
    """The tier cannot do it now. `written`: what of a `write` is there all the same."""

    def __init__(self, reason: str, written: Sequence[BlockHash] = ()) -> None:
        super().__init__(reason)
        self.written = tuple(written)


class TierFullError(TierError):
    """There is no room, whatever the store's own bound says."""


class Entry(NamedTuple):
    """A value that a tier has."""

    block_hash: BlockHash
    num_bytes: int


class BackTier(Protocol):
    """Values that outlive the store."""

    @property
    def name(self) -> Tier: ...

    def scan(self) -> list[Entry]:
        """Return what is there, the least recently used in front. Raises TierError."""
        ...

    def write(self, values: Mapping[BlockHash, Value]) -> None:
        """Keep these values, in place of older ones. Raises TierError, TierFullError."""
        ...

    def read(self, hashes: Sequence[BlockHash]) -> list[bytes | None]:
        """Return the values, None for what is not there (any more), and note their use. Raises TierError."""
        ...

    def delete(self, hashes: Sequence[BlockHash]) -> None:
        """Forget these values; what is not there does not matter. Raises TierError."""
        ...

    def close(self) -> None:
        """Let go of files and connections. Idempotent."""
        ...


class DictTier:
    """A back tier that lies in this process and ends with it: for tests."""

    name: Tier = "disk"

    def __init__(self) -> None:
        self.values: dict[BlockHash, bytes] = {}
        self._lock = threading.Lock()

    def scan(self) -> list[Entry]:
        with self._lock:
            return [Entry(block_hash, len(value)) for block_hash, value in self.values.items()]

    def write(self, values: Mapping[BlockHash, Value]) -> None:
        with self._lock:
            for block_hash, value in values.items():
                self.values.pop(block_hash, None)
                self.values[block_hash] = bytes(value)

    def read(self, hashes: Sequence[BlockHash]) -> list[bytes | None]:
        with self._lock:
            found = [self.values.pop(block_hash, None) for block_hash in hashes]
            for block_hash, value in zip(hashes, found, strict=True):
                if value is not None:
                    self.values[block_hash] = value
            return found

    def delete(self, hashes: Sequence[BlockHash]) -> None:
        with self._lock:
            for block_hash in hashes:
                self.values.pop(block_hash, None)

    def close(self) -> None:
        """Nothing is held open."""
