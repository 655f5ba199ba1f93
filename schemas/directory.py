"""Who holds which block. Soft state: each worker numbers its events, a gap is repaired from its inventory."""

import msgspec

from schemas.ids import WorkerId
from schemas.message import Message, OpenEnum, RequestMessage
from schemas.numbers import Count, Number


class Tier(OpenEnum):
    """Where a holder keeps a block. What is not known counts as the slowest."""

    ARENA = "arena"
    """A worker's."""
    MEMORY = "memory"
    """A store's, of its host."""
    DISK = "disk"
    REMOTE = "remote"
    """A server behind a store."""
    OTHER = "other"


class BlocksStored(Message, frozen=True, kw_only=True):
    """`sequence` counts this incarnation's events from 1 without gaps. `block_hashes` are joined (16 bytes each)."""

    worker_id: WorkerId
    incarnation: str
    sequence: Number
    block_hashes: bytes
    tier: Tier = Tier.ARENA


class BlocksEvicted(Message, frozen=True, kw_only=True):
    """Gone from this tier; another tier of the same holder may still have them."""

    worker_id: WorkerId
    incarnation: str
    sequence: Number
    block_hashes: bytes
    tier: Tier = Tier.ARENA


class ReadInventory(Message, frozen=True, kw_only=True):
    """Asks a worker for all that it holds, a page at a time."""

    offset: Number = 0


class Inventory(Message, frozen=True, kw_only=True):
    """What the worker held after its event `sequence`. A page whose `sequence` differs from the first's is stale.

    A page is of one tier; a holder with several sends a page or more for each. `next_offset` None: this was the last.
    """

    worker_id: WorkerId
    incarnation: str
    sequence: Number
    block_hashes: bytes
    next_offset: Number | None = None
    tier: Tier = Tier.ARENA


class LocateBlocks(RequestMessage, frozen=True, kw_only=True):
    """Who holds a prefix of these blocks?"""

    block_hashes: bytes


class HolderPrefix(msgspec.Struct, frozen=True, kw_only=True):
    """`worker_id` held blocks [first_block, first_block + num_blocks) of those asked for, all in this tier or a faster
    one, as far as the directory knows."""

    worker_id: WorkerId
    incarnation: str
    num_blocks: Count
    first_block: Count = 0
    tier: Tier = Tier.ARENA


class AskHeat(Message, frozen=True, kw_only=True):
    """How often were these blocks (joined hashes), that this worker holds, asked for lately? A worker that leaves asks
    it."""

    worker_id: WorkerId
    block_hashes: bytes


class BlockHeat(Message, frozen=True, kw_only=True):
    """A hint: a byte for each of the blocks asked about, in their order, the larger the more often; 0 also for what the
    worker is not known to hold. Of a long list the end is left out."""

    heat: bytes


class DescribeDirectory(Message, frozen=True, kw_only=True):
    """Asks the directory whose blocks it knows (`kvmesh up`)."""


class DirectoryDescribed(Message, frozen=True, kw_only=True):
    """`holders`: the workers and stores of which it has read all that they hold, and missed nothing since."""

    holders: tuple[WorkerId, ...]


class BlocksLocated(RequestMessage, frozen=True, kw_only=True):
    """A hint: the holder decides at the lease. Prefixes first, the longest in front; then runs that begin later, which
    continue somebody else's prefix. Holders of nothing are left out; a long list is cut."""

    holders: tuple[HolderPrefix, ...]
