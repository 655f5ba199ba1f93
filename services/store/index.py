"""What lies on the tier behind memory. Pure bookkeeping."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from dataplane.blocks.kept import ChangeLog
from schemas.ids import BlockHash


class BackIndex:
    """What lies on the tier behind memory, the least recently used in front. Values are of one size."""

    def __init__(self, max_values: int) -> None:
        self.max_values = max_values
        self.changes = ChangeLog()
        self._hashes: OrderedDict[BlockHash, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._hashes)

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self._hashes

    def hashes(self) -> list[BlockHash]:
        return list(self._hashes)

    def restore(self, hashes: Iterable[BlockHash]) -> list[BlockHash]:
        """Note what was there before the start, in the order of use; return what goes, as it is over the bound."""
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
