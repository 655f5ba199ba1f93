"""Which blocks of an arena are in use, and by how many. Pure bookkeeping: it never touches the memory."""

from array import array
from bisect import bisect_left, insort
from collections.abc import Sequence

from dataplane.blocks.layout import segments_of


class BlockPool:
    """Hands out blocks in contiguous runs where it can, and counts the references to each.

    Every method is atomic: it does all that it says or asserts before it has changed anything. Not thread-safe.
    """

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks > 0, "a pool needs blocks"
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self._num_references = array("I", bytes(4 * num_blocks))
        # The free runs, maximal: no two of them touch.
        self._run_starts: list[int] = [0]
        self._run_sizes: dict[int, int] = {0: num_blocks}

    def allocate(self, num_blocks: int) -> list[int] | None:
        """Return `num_blocks` blocks with one reference each, or None when fewer are free.

        The smallest free run that holds them all, else the fewest runs, largest first.
        """
        assert num_blocks >= 0, f"cannot allocate {num_blocks} blocks"
        if num_blocks > self.num_free:
            return None
        fitting = [(size, start) for start, size in self._run_sizes.items() if size >= num_blocks]
        runs = [min(fitting)] if fitting else sorted(((size, start) for start, size in self._run_sizes.items()))
        blocks: list[int] = []
        while len(blocks) < num_blocks:
            size, start = runs.pop()
            blocks += self._take(start, min(size, num_blocks - len(blocks)))
        return blocks

    def share(self, blocks: Sequence[int]) -> None:
        """Add a reference to each block. Asserts that all are in use and that none is named twice."""
        self._check_in_use(blocks)
        for block in blocks:
            self._num_references[block] += 1

    def free(self, blocks: Sequence[int]) -> list[int]:
        """Drop a reference to each block and return the blocks that are free now, in the order given.

        Asserts that all are in use and that none is named twice.
        """
        self._check_in_use(blocks)
        freed: list[int] = []
        for block in blocks:
            self._num_references[block] -= 1
            if not self._num_references[block]:
                freed.append(block)
        for first, size in segments_of(sorted(freed)):
            self._give_back(first, size)
        return freed

    def num_references(self, block: int) -> int:
        """Return how many references there are to a block; 0: it is free."""
        return self._num_references[block]

    def check_integrity(self) -> None:
        """Assert conservation: every block is free, in exactly one maximal run, or referenced."""
        free: set[int] = set()
        previous_end = -1
        assert self._run_starts == sorted(self._run_sizes), "run index and sizes differ"
        for start in self._run_starts:
            size = self._run_sizes[start]
            assert size > 0 and start > previous_end, f"free run at {start} is empty or touches the one before it"
            previous_end = start + size
            free.update(range(start, previous_end))
        unreferenced = {block for block in range(self.num_blocks) if not self._num_references[block]}
        assert free == unreferenced, f"free runs and references disagree on blocks {sorted(free ^ unreferenced)[:8]}"
        assert self.num_free == len(free), f"{self.num_free} counted free, {len(free)} are"

    def _check_in_use(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            assert 0 <= block < self.num_blocks, f"no such block: {block}"
            assert self._num_references[block], "a block that is not in use was shared or freed"
        assert len(set(blocks)) == len(blocks), "a block is named twice"

    def _take(self, start: int, num_blocks: int) -> range:
        """Cut blocks off the start of the free run that begins there."""
        end, run_end = start + num_blocks, start + self._run_sizes.pop(start)
        index = bisect_left(self._run_starts, start)
        if end < run_end:
            self._run_starts[index] = end
            self._run_sizes[end] = run_end - end
        else:
            del self._run_starts[index]
        for block in range(start, end):
            self._num_references[block] = 1
        self.num_free -= num_blocks
        return range(start, end)

    def _give_back(self, first: int, size: int) -> None:
        """Add a free run and join it with its neighbours."""
        end = first + size
        index = bisect_left(self._run_starts, first)
        if index < len(self._run_starts) and self._run_starts[index] == end:
            end += self._run_sizes.pop(self._run_starts.pop(index))
        if index and (before := self._run_starts[index - 1]) + self._run_sizes[before] == first:
            self._run_sizes[before] = end - before
        else:
            insort(self._run_starts, first)
            self._run_sizes[first] = end - first
        self.num_free += size
