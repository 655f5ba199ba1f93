"""What this worker tells the directory: which full blocks it holds, in numbered events. Pure."""

from collections.abc import Iterable, Sequence

from schemas.block import BlockHasher, join_hashes
from schemas.directory import BlocksEvicted, BlocksStored, Inventory
from schemas.ids import BlockHash, WorkerId

INVENTORY_PAGE_BLOCKS = 100_000
"""2.2 MB of JSON a page, far below the bus limit."""


class BlockLedger:
    """Block ids and the hashes of what lies in them. Several blocks may hold the same content; the directory hears of
    the first to come and the last to go."""

    def __init__(self, worker_id: WorkerId, incarnation: str) -> None:
        self._worker_id = worker_id
        self._incarnation = incarnation
        self._sequence = 0
        self._hash_of: dict[int, BlockHash] = {}
        self._num_copies: dict[BlockHash, int] = {}

    def record(
        self, hasher: BlockHasher, token_ids: Sequence[int], num_tokens: int, block_table: Sequence[int]
    ) -> BlocksStored | None:
        """Take in that the KV of `token_ids[:num_tokens]` lies in `block_table`; return the event for what is new."""
        first = hasher.num_hashed_blocks
        fresh: list[BlockHash] = []
        for at, block_hash in enumerate(hasher.extend(token_ids, num_tokens), start=first):
            if self._hash_of.get(block_table[at]) == block_hash:
                continue  # recorded before
            self._hash_of[block_table[at]] = block_hash
            copies = self._num_copies[block_hash] = self._num_copies.get(block_hash, 0) + 1
            if copies == 1:
                fresh.append(block_hash)
        if not fresh:
            return None
        return BlocksStored(
            worker_id=self._worker_id,
            incarnation=self._incarnation,
            sequence=self._next(),
            block_hashes=join_hashes(fresh),
        )

    def forget(self, block_ids: Iterable[int]) -> BlocksEvicted | None:
        """Take in that these blocks are free; return the event for content that is held no longer."""
        gone: list[BlockHash] = []
        for block_id in block_ids:
            block_hash = self._hash_of.pop(block_id, None)
            if block_hash is None:
                continue
            self._num_copies[block_hash] -= 1
            if not self._num_copies[block_hash]:
                del self._num_copies[block_hash]
                gone.append(block_hash)
        if not gone:
            return None
        return BlocksEvicted(
            worker_id=self._worker_id,
            incarnation=self._incarnation,
            sequence=self._next(),
            block_hashes=join_hashes(gone),
        )

    def inventory(self, offset: int) -> Inventory:
        """Return a page of all that is held now. The order is stable as long as `sequence` stays the same."""
        hashes = list(self._num_copies)
        page = hashes[offset : offset + INVENTORY_PAGE_BLOCKS]
        end = offset + len(page)
        return Inventory(
            worker_id=self._worker_id,
            incarnation=self._incarnation,
            sequence=self._sequence,
            block_hashes=join_hashes(page),
            next_offset=end if end < len(hashes) else None,
        )

    def _next(self) -> int:
        self._sequence += 1
        return self._sequence
