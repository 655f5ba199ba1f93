"""What lies where: in the arena's blocks, and on the tier behind them. Pure bookkeeping."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from dataplane.blocks.cache import ContentChanges
from dataplane.blocks.layout import block_ids, segments_of
from dataplane.blocks.pool import BlockPool
from schemas.ids import BlockHash


class TierChanges:
    """What came to a tier and what went, since it was last asked for; what did both is forgotten."""

    def __init__(self) -> None:
        self._changes: dict[BlockHash, bool] = {}

    def note(self, block_hash: BlockHash, *, came: bool) -> None:
        """Note a change of what is there: nothing comes that is there already, nothing goes that is not."""
        if self._changes.pop(block_hash, came) == came:
            self._changes[block_hash] = came

    def take(self) -> ContentChanges:
        """Return what came and what went."""
        changes, self._changes = self._changes, {}
        stored = [block_hash for block_hash, came in changes.items() if came]
        return ContentChanges(stored, [block_hash for block_hash, came in changes.items() if not came])


class MemoryIndex:
    """The blocks of the arena. The index itself holds one reference to each block whose content it knows; where that
    is the last one the block is given up when room is needed, the least recently used first."""

    def __init__(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.changes = TierChanges()
        self._block_of: dict[BlockHash, int] = {}
        self._hash_of: dict[int, BlockHash] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self._block_of

    @property
    def num_free(self) -> int:
        """Blocks that hold nothing."""
        return self.pool.num_free

    @property
    def num_cached(self) -> int:
        """Blocks that are kept for their content only."""
        return len(self._idle)

    def hashes(self) -> list[BlockHash]:
        return list(self._block_of)

    def allocate(self, num_blocks: int) -> list[int] | None:
        """Return blocks to be filled, a reference to each; None where there is no room now."""
        if num_blocks > self.num_free + self.num_cached:
            return None
        while self.pool.num_free < num_blocks:
            self._evict(next(iter(self._idle)))
        segments = self.pool.allocate(num_blocks)
        assert segments is not None, "there is room"
        return block_ids(segments)

    def take(self, hashes: Sequence[BlockHash]) -> list[int]:
        """Return the blocks of the leading run that is here, a reference to each."""
        blocks: list[int] = []
        for block_hash in hashes:
            if (block := self._block_of.get(block_hash)) is None:
                break
            blocks.append(block)
        self.share(blocks)
        return blocks

    def share(self, blocks: Sequence[int]) -> None:
        """Add a reference to each block."""
        self.pool.share(segments_of(blocks))
        for block in blocks:
            self._idle.pop(block, None)

    def release(self, blocks: Sequence[int]) -> None:
        """Drop a reference to each block; of those that nobody else uses the first is given up first."""
        self.pool.free(segments_of(blocks))
        for block in blocks:
            if block in self._hash_of and self.pool.num_references(block) == 1:
                self._idle[block] = None

    def put(self, block: int, block_hash: BlockHash) -> None:
        """Keep a block in use for its content, unless the same content is kept already."""
        if block_hash in self._block_of:
            return
        assert block not in self._hash_of, "a block that is known by its content was filled again"
        self.share([block])
        self._block_of[block_hash] = block
        self._hash_of[block] = block_hash
        self.changes.note(block_hash, came=True)

    def check_integrity(self) -> None:
        """Assert conservation."""
        self.pool.check_integrity()
        assert {h: b for b, h in self._hash_of.items()} == self._block_of, "both maps say the same"
        idle = {block for block in self._hash_of if self.pool.num_references(block) == 1}
        assert idle == set(self._idle), "idle is what only the index refers to"

    def _evict(self, block: int) -> None:
        del self._idle[block]
        block_hash = self._hash_of.pop(block)
        del self._block_of[block_hash]
        self.pool.free(segments_of([block]))
        self.changes.note(block_hash, came=False)


class BackIndex:
    """What lies on the tier behind memory, the least recently used in front. Values are of one size."""

    def __init__(self, max_values: int) -> None:
        self.max_values = max_values
        self.changes = TierChanges()
        self._hashes: OrderedDict[BlockHash, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._hashes)

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self._hashes

    def hashes(self) -> list[BlockHash]:
        return list(self._hashes)

    def restore(self, hashes: Iterable[BlockHash]) -> list[BlockHash]:
        """Take in what was there before the start, in the order of use; return what goes, as it is over the bound."""
        self._hashes = OrderedDict.fromkeys(hashes)
        num_surplus = len(self) - self.max_values
        return [self._hashes.popitem(last=False)[0] for _ in range(num_surplus)]

    def put(self, block_hash: BlockHash) -> None:
        """Note a new value. The caller has made room."""
        if block_hash not in self._hashes:
            self._hashes[block_hash] = None
            self.changes.note(block_hash, came=True)

    def touch(self, hashes: Sequence[BlockHash]) -> None:
        """Note a use; a sequence's last blocks are given up before its first, which more prompts share."""
        for block_hash in reversed(hashes):
            if block_hash in self._hashes:
                self._hashes.move_to_end(block_hash)

    def drop(self, block_hash: BlockHash) -> bool:
        """Forget a value; say whether it was known."""
        if block_hash not in self._hashes:
            return False
        del self._hashes[block_hash]
        self.changes.note(block_hash, came=False)
        return True

    def give_up(self, num_values: int) -> list[BlockHash]:
        """Forget so many values (fewer where there are fewer), and return which."""
        coldest = [h for h, _ in zip(self._hashes, range(num_values), strict=False)]
        for block_hash in coldest:
            self.drop(block_hash)
        return coldest

    def make_room(self, num_values: int) -> list[BlockHash]:
        """Forget what must go for so many new values to stay in bounds, and return which."""
        return self.give_up(max(0, len(self) + num_values - self.max_values))
