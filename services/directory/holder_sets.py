"""Sets of holders by number: blocks that the same holders have share one set. Pure."""

from services.directory import limits

NOBODY = 0
"""The number of the empty set."""


class HolderSets:
    """A set is an integer with a bit for each holder and tier. One that no block has is forgotten."""

    def __init__(self) -> None:
        self.masks = [0]
        """The set of each number."""
        self._numbers: dict[int, int] = {}
        self._num_blocks = [0]
        """How many blocks have the set of each number."""
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self._numbers)

    def number_of(self, mask: int, *, is_bounded: bool = True) -> int | None:
        """Return the number of this set; None, if it would be one too many. One that is new is to be counted next."""
        if not mask:
            return NOBODY
        number = self._numbers.get(mask)
        if number is not None:
            return number
        if is_bounded and len(self._numbers) >= limits.MAX_SETS:
            return None
        if self._free:
            number = self._free.pop()
            self.masks[number] = mask
        else:
            number = len(self.masks)
            self.masks.append(mask)
            self._num_blocks.append(0)
        self._numbers[mask] = number
        return number

    def count(self, number: int, num_blocks: int) -> None:
        """So many more blocks have this set, or fewer."""
        if number == NOBODY:
            return
        self._num_blocks[number] += num_blocks
        if not self._num_blocks[number]:
            del self._numbers[self.masks[number]]
            self.masks[number] = 0
            self._free.append(number)

    def check_integrity(self, num_blocks: dict[int, int]) -> None:
        """Assert that these are the sets that there are, and how many blocks have each."""
        assert {number: self._num_blocks[number] for number in self._numbers.values()} == num_blocks
        assert all(self.masks[number] == mask and mask for mask, number in self._numbers.items())
        assert len(self._numbers) + len(self._free) + 1 == len(self.masks)
