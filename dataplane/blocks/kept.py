"""The blocks of one pool, and the content that some of them are kept for. Pure bookkeeping.

A full block whose content is known by its hash stays after its last use, and is given up, the least recently used
first, when room is needed; of several tenants the one that has more than its share (`shares.py`).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from dataplane.blocks.pool import BlockPool
from dataplane.blocks.shares import TenantShares
from schemas.ids import BlockHash


@dataclass(slots=True)
class ContentChanges:
    """Content that came, and content that went, since it was last asked for."""

    stored: list[BlockHash] = field(default_factory=list[BlockHash])
    evicted: list[BlockHash] = field(default_factory=list[BlockHash])


class ChangeLog:
    """What came and what went since it was last asked for; what did both is forgotten."""

    def __init__(self) -> None:
        self._changes: dict[BlockHash, bool] = {}

    def note(self, block_hash: BlockHash, *, came: bool) -> None:
        """Note a change of what is there: nothing comes that is there already, nothing goes that is not."""
        if self._changes.pop(block_hash, came) == came:
            self._changes[block_hash] = came

    def drain(self) -> ContentChanges:
        """Return what came and what went, each in order, and begin anew."""
        changes, self._changes = self._changes, {}
        stored = [block_hash for block_hash, came in changes.items() if came]
        return ContentChanges(stored, [block_hash for block_hash, came in changes.items() if not came])


class Content(NamedTuple):
    """What a block is known by. The hash is keyed by the tenant already; but a hash may be passed on, and who names
    another tenant's must not get its block."""

    tenant: str
    block_hash: BlockHash


class KeptBlocks:
    """The blocks of one pool and what is known of their content. It holds one reference of its own to each block whose
    content it knows; where that is the last one the block is idle, and goes when room is needed.

    `block_of`: where content is. `tags`: by which some blocks prove it (`memory/content_macs.py`), until these are
    filled anew. A block's tenant is whom it was allocated for. Every method is atomic. Not thread-safe.
    """

    def __init__(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.idle = TenantShares(num_blocks)
        self.block_of: dict[Content, int] = {}
        self.tags: dict[int, bytes] = {}
        self.changes = ChangeLog()
        self._content_of: dict[int, Content] = {}
        self._barred: set[int] = set()
        """Blocks in use that were forgotten: until they are filled anew they are not kept for any content."""

    def room(self, besides: Iterable[int] = ()) -> int:
        """Return how many blocks can be allocated now, where those `besides` are shared first."""
        return self.pool.num_free + len(self.idle) - sum(block in self.idle for block in besides)

    def allocate(self, num_blocks: int, tenant: str = "") -> list[int] | None:
        """Return blocks to be filled, a reference to each; None where there is no room now."""
        num_missing = num_blocks - self.pool.num_free
        if num_missing > len(self.idle):
            return None
        if num_missing > 0:
            for block in self.idle.victims(num_missing, tenant=tenant, num_wanted=num_blocks):
                self._evict(block)
        blocks = self.pool.allocate(num_blocks)
        assert blocks is not None, "there is room"
        self.idle.took(tenant, blocks)
        for block in blocks:
            self.tags.pop(block, None)
            self._barred.discard(block)
        return blocks

    def take(self, hashes: Sequence[BlockHash], tenant: str = "") -> list[int]:
        """Return the blocks of the leading run of this content that is here, a reference to each."""
        blocks: list[int] = []
        for block_hash in hashes:
            if (block := self.block_of.get(Content(tenant, block_hash))) is None:
                break
            blocks.append(block)
        self.share(blocks)
        return blocks

    def share(self, blocks: Sequence[int]) -> None:
        """Add a reference to each block."""
        self.pool.share(blocks)
        for block in blocks:
            self.idle.uses(block)

    def release(self, blocks: Sequence[int]) -> None:
        """Drop a reference to each block; of those that become idle the first is given up first."""
        self.idle.freed(self.pool.free(blocks))
        for block in blocks:
            if block in self._content_of and self.pool.num_references(block) == 1:
                self.idle.idles(block)

    def put(self, block: int, block_hash: BlockHash) -> None:
        """Keep a block in use for its content, unless the same content is kept already."""
        content = Content(self.idle.tenant_of(block), block_hash)
        if content in self.block_of or block in self._barred:
            return
        assert block not in self._content_of, "a block that is known by its content was written"
        self.pool.share([block])
        self.block_of[content] = block
        self._content_of[block] = content
        self.changes.note(block_hash, came=True)

    def is_barred(self, block: int) -> bool:
        """Return whether a block in use was forgotten: what lies in it is not to be kept."""
        return block in self._barred

    def forget(self, tenant: str | None = None) -> None:
        """Give up the content of this tenant's blocks, of all for None. Who uses a block goes on with it, and leaves
        nothing in it that is kept."""
        in_use = (block for block in range(self.pool.num_blocks) if self.pool.num_references(block))
        meant = [block for block in in_use if tenant is None or self.idle.tenant_of(block) == tenant]
        for block in meant:
            if block in self._content_of:
                self._evict(block)
        self._barred.update(block for block in meant if self.pool.num_references(block))

    def forget_block(self, block: int) -> None:
        """Give up what a block is kept for, if it is: its bytes were found wrong. Who uses it goes on with it, and
        leaves nothing in it that is kept."""
        if block in self._content_of:
            self._evict(block)
            if self.pool.num_references(block):
                self._barred.add(block)

    def content_of(self, block: int) -> Content | None:
        """Return what a block is kept for."""
        return self._content_of.get(block)

    def coldest(self, num_blocks: int) -> list[Content]:
        """Return the content of the blocks that would be given up first."""
        return [self._content_of[block] for block in self.idle.victims(num_blocks)]

    def used_last(self, num_blocks: int) -> list[Content]:
        """Return the content of the idle blocks that were used last, the last one in front."""
        return [self._content_of[block] for block in islice(reversed(self.idle), num_blocks)]

    def check_integrity(self) -> None:
        """Assert conservation."""
        self.pool.check_integrity()
        assert {content: b for b, content in self._content_of.items()} == self.block_of, "both maps say the same"
        assert all(self.idle.tenant_of(b) == c.tenant for b, c in self._content_of.items()), "each tenant its own"
        idle = {block for block in self._content_of if self.pool.num_references(block) == 1}
        in_use = {block for block in range(self.pool.num_blocks) if self.pool.num_references(block)}
        self.idle.check_integrity(in_use, idle)

    def _evict(self, block: int) -> None:
        content = self._content_of.pop(block)
        del self.block_of[content]
        self.idle.freed(self.pool.free([block]))
        self.changes.note(content.block_hash, came=False)
