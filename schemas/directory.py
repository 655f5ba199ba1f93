"""Who holds which block. Soft state: each worker numbers its events, a gap is repaired from its inventory."""

import msgspec

from schemas.ids import WorkerId
from schemas.message import Message, RequestMessage


class BlocksStored(Message, frozen=True, kw_only=True):
    """`sequence` counts this incarnation's events from 1 without gaps. `block_hashes` are joined (16 bytes each)."""

    worker_id: WorkerId
    incarnation: str
    sequence: int
    block_hashes: bytes


class BlocksEvicted(Message, frozen=True, kw_only=True):
    worker_id: WorkerId
    incarnation: str
    sequence: int
    block_hashes: bytes


class ReadInventory(Message, frozen=True, kw_only=True):
    """Asks a worker for all that it holds, a page at a time."""

    offset: int = 0


class Inventory(Message, frozen=True, kw_only=True):
    """What the worker held after its event `sequence`. A page whose `sequence` differs from the first's is stale.

    `next_offset` None: this was the last page.
    """

    worker_id: WorkerId
    incarnation: str
    sequence: int
    block_hashes: bytes
    next_offset: int | None = None


class LocateBlocks(RequestMessage, frozen=True, kw_only=True):
    """Who holds a prefix of these blocks?"""

    block_hashes: bytes


class HolderPrefix(msgspec.Struct, frozen=True, kw_only=True):
    """`worker_id` held the first `num_blocks` blocks in a row, as far as the directory knows."""

    worker_id: WorkerId
    incarnation: str
    num_blocks: int


class BlocksLocated(RequestMessage, frozen=True, kw_only=True):
    """A hint: the holder decides at the lease. Longest prefix first; holders of nothing are left out."""

    holders: tuple[HolderPrefix, ...]
