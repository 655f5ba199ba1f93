"""Which blocks of an arena are in use, and by how many. Pure bookkeeping: it never touches the memory."""

from array import array
from bisect import bisect_left, insort
from collections.abc import Iterable

from dataplane.blocks.layout import Segment, segments_of


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

    def allocate(self, num_blocks: int) -> tuple[Segment, ...] | None:
        """Return `num_blocks` blocks with one reference each, or None when fewer are free.

        The smallest free run that holds them all, else the fewest runs, largest first.
        """
        assert num_blocks >= 0, f"cannot allocate {num_blocks} blocks"
        if num_blocks > self.num_free:
            return None
        fitting = [(size, start) for start, size in self._run_sizes.items() if size >= num_blocks]
        runs = [min(fitting)] if fitting else sorted(((size, start) for start, size in self._run_sizes.items()))
        segments: list[Segment] = []
        missing = num_blocks
        while missing:
            size, start = runs.pop()
            taken = Segment(start, min(size, missing))
            self._take(taken)
            segments.append(taken)
            missing -= taken.num_blocks
        return tuple(segments)

    def share(self, segments: Iterable[Segment]) -> None:
        """Add a reference to each block. Asserts that all are in use and that none is named twice."""
        blocks = self._check_in_use(segments)
        for block in blocks:
            self._num_references[block] += 1

    def free(self, segments: Iterable[Segment]) -> list[int]:
        """Drop a reference to each block and return the blocks that are free now, in the order given.

        Asserts that all are in use and that none is named twice.
        """
        blocks = self._check_in_use(segments)
        freed: list[int] = []
        for block in blocks:
            self._num_references[block] -= 1
            if not self._num_references[block]:
                freed.append(block)
        for segment in segments_of(freed):
            self._give_back(segment)
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

    def _check_in_use(self, segments: Iterable[Segment]) -> list[int]:
        blocks: list[int] = []
        for first, size in segments:
            assert first >= 0 and size >= 0 and first + size <= self.num_blocks, f"no such blocks: {first}+{size}"
            blocks += range(first, first + size)
        assert all(self._num_references[block] for block in blocks), "a block that is not in use was shared or freed"
        assert len(set(blocks)) == len(blocks), "a block is named twice"
        return blocks

    def _take(self, segment: Segment) -> None:
        """Cut the segment off the start of its free run."""
        size = self._run_sizes.pop(segment.first_block)
        index = bisect_left(self._run_starts, segment.first_block)
        rest = Segment(segment.first_block + segment.num_blocks, size - segment.num_blocks)
        if rest.num_blocks:
            self._run_starts[index] = rest.first_block
            self._run_sizes[rest.first_block] = rest.num_blocks
        else:
            del self._run_starts[index]
        for block in range(segment.first_block, rest.first_block):
            self._num_references[block] = 1
        self.num_free -= segment.num_blocks

    def _give_back(self, segment: Segment) -> None:
        """Add a free run and join it with its neighbours."""
        first, end = segment.first_block, segment.first_block + segment.num_blocks
        index = bisect_left(self._run_starts, first)
        if index < len(self._run_starts) and self._run_starts[index] == end:
            end += self._run_sizes.pop(self._run_starts.pop(index))
        if index and (before := self._run_starts[index - 1]) + self._run_sizes[before] == first:
            self._run_sizes[before] = end - before
        else:
            insort(self._run_starts, first)
            self._run_sizes[first] = end - first
        self.num_free += segment.num_blocks
