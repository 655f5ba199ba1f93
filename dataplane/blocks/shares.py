"""Whose blocks are whose, and which of those that nobody uses are given up first. Pure bookkeeping.

A tenant's equal share is the pool over the number of tenants that have blocks in it. Who has more than that gives up
its own first: a flood by one tenant leaves the others their shares.
"""

import heapq
from collections.abc import Iterable, Iterator, Sequence


class TenantShares:
    """The blocks of one pool that are not free, by tenant, and those of them that are idle: kept for their content
    only. Not thread-safe."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._tenant_of: dict[int, str] = {}
        self._num_of: dict[str, int] = {}
        self._idle: dict[int, None] = {}
        """The least recently used in front; so are those of each tenant."""
        self._idle_of: dict[str, dict[int, None]] = {}

    def __len__(self) -> int:
        """Return how many blocks are idle."""
        return len(self._idle)

    def __iter__(self) -> Iterator[int]:
        return iter(self._idle)

    def __reversed__(self) -> Iterator[int]:
        """Iterate from the one that was used last."""
        return reversed(self._idle)

    def __contains__(self, block: int) -> bool:
        """Return whether a block is idle."""
        return block in self._idle

    def tenant_of(self, block: int) -> str:
        """Return whose a block is. Asserts that it is not free."""
        assert block in self._tenant_of, "a block that is not in use is nobody's"
        return self._tenant_of[block]

    def num_of(self, tenant: str) -> int:
        """Return how many blocks a tenant uses or keeps."""
        return self._num_of.get(tenant, 0)

    def took(self, tenant: str, blocks: Sequence[int]) -> None:
        """Free blocks are this tenant's from now on."""
        if blocks:
            self._tenant_of.update(dict.fromkeys(blocks, tenant))
            self._num_of[tenant] = self.num_of(tenant) + len(blocks)

    def freed(self, blocks: Iterable[int]) -> None:
        """These are nobody's any more."""
        for block in blocks:
            self.uses(block)
            tenant = self._tenant_of.pop(block)
            self._num_of[tenant] -= 1
            if not self._num_of[tenant]:
                del self._num_of[tenant]

    def idles(self, block: int) -> None:
        """Nobody uses the block any more; it is the last to be given up of those that are idle now."""
        self._idle[block] = None
        self._idle_of.setdefault(self._tenant_of[block], {})[block] = None

    def uses(self, block: int) -> None:
        """The block is not idle (any more)."""
        if block not in self._idle:
            return
        del self._idle[block]
        tenant = self._tenant_of[block]
        idle = self._idle_of[tenant]
        del idle[block]
        if not idle:
            del self._idle_of[tenant]

    def victims(self, num_blocks: int, *, tenant: str | None = None, num_wanted: int = 0) -> list[int]:
        """Return the idle blocks to give up first, so that `tenant` can take `num_wanted` blocks.

        While a tenant with idle blocks is over its share it is the one that is furthest over it, with those that it
        used least recently; then the least recently used of all.
        """
        # Count the wanted blocks as the tenant's already: with them it may be over its share.
        num_of = dict(self._num_of)
        if tenant is not None:
            num_of[tenant] = num_of.get(tenant, 0) + num_wanted
        found: dict[int, None] = {}
        # Of several tenants, rank those over their share. Counts are negative: `heapq` has the smallest on top.
        if len(num_of) > 1:
            share = self._num_blocks / len(num_of)
            rank = [(-num_of[name], name) for name in self._idle_of if num_of[name] > share]
            heapq.heapify(rank)
            left = {name: iter(self._idle_of[name]) for _, name in rank}
            # Take one block at a time and count it off: tenants that are equally far over take turns.
            while rank and len(found) < num_blocks:
                count, name = rank[0]
                block = next(left[name], None)
                if block is None or -count <= share:
                    heapq.heappop(rank)
                    continue
                found[block] = None
                heapq.heapreplace(rank, (count + 1, name))
        # Where that is not enough, take the least recently used of all tenants; `found` has each block once.
        for block in self._idle:
            if len(found) >= num_blocks:
                break
            found[block] = None
        return list(found)

    def check_integrity(self, in_use: set[int], idle: set[int]) -> None:
        """Assert that every block in use is somebody's, and that what is idle is."""
        assert set(self._tenant_of) == in_use, "every block that is not free is somebody's"
        assert set(self._idle) == idle, "idle is what is kept for its content only"
        counted: dict[str, int] = {}
        for tenant in self._tenant_of.values():
            counted[tenant] = counted.get(tenant, 0) + 1
        assert counted == self._num_of, "the counts are right"
        by_tenant: dict[str, list[int]] = {}
        for block in self._idle:
            by_tenant.setdefault(self._tenant_of[block], []).append(block)
        assert {tenant: list(blocks) for tenant, blocks in self._idle_of.items()} == by_tenant, "in one order"
