"""What lies on the tier behind memory. Pure bookkeeping."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from dataplane.blocks.kept import ChangeLog
from schemas.ids import BlockHash
from services.store.tiers import StoreKey, hash_of


class BackIndex:
    """What lies on the tier behind memory, the least recently used in front. Values are of one size."""

    def __init__(self, max_values: int) -> None:
        self.max_values = max_values
        self.changes = ChangeLog()
        self._keys: OrderedDict[StoreKey, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: StoreKey) -> bool:
        return key in self._keys

    def hashes(self) -> list[BlockHash]:
        return [hash_of(key) for key in self._keys]

    def restore(self, keys: Iterable[StoreKey]) -> list[StoreKey]:
        """Note what was there before the start, in the order of use; return what goes, as it is over the bound."""
        self._keys = OrderedDict.fromkeys(keys)
        num_surplus = len(self) - self.max_values
        return [self._keys.popitem(last=False)[0] for _ in range(num_surplus)]

    def put(self, key: StoreKey) -> None:
        """Note a new value. The caller has made room."""
        if key not in self._keys:
            self._keys[key] = None
            self.changes.note(hash_of(key), came=True)

    def touch(self, keys: Sequence[StoreKey]) -> None:
        """Note a use; a sequence's last blocks are given up before its first, which more prompts share."""
        for key in reversed(keys):
            if key in self._keys:
                self._keys.move_to_end(key)

    def drop(self, key: StoreKey) -> bool:
        """Forget a value; return whether it was known."""
        if key not in self._keys:
            return False
        del self._keys[key]
        self.changes.note(hash_of(key), came=False)
        return True

    def forget(self, mark: bytes | None) -> list[StoreKey]:
        """Forget the values of the tenant of this mark (`tiers.mark_of`), all for None, and return which."""
        forgotten = [key for key in self._keys if mark is None or key.endswith(mark)]
        for key in forgotten:
            self.drop(key)
        return forgotten

    def give_up(self, num_values: int) -> list[StoreKey]:
        """Forget so many values (fewer where there are fewer), and return which."""
        coldest = [key for key, _ in zip(self._keys, range(num_values), strict=False)]
        for key in coldest:
            self.drop(key)
        return coldest

    def make_room(self, num_values: int) -> list[StoreKey]:
        """Forget what must go for so many new values to stay in bounds, and return which."""
        return self.give_up(max(0, len(self) + num_values - self.max_values))
