"""What this worker tells the directory: which full blocks it holds, in numbered events. Pure."""

from collections.abc import Sequence

from dataplane.blocks.cache import ContentChanges
from schemas.block import join_hashes
from schemas.directory import BlocksEvicted, BlocksStored, Inventory
from schemas.ids import BlockHash, WorkerId

INVENTORY_PAGE_BLOCKS = 100_000
"""2.2 MB of JSON a page, far below the bus limit."""


class BlockLedger:
    """Numbers one incarnation's events, each incarnation's from 1."""

    def __init__(self, worker_id: WorkerId, incarnation: str) -> None:
        self._worker_id = worker_id
        self._incarnation = incarnation
        self._sequence = 0

    def begin(self, incarnation: str) -> None:
        """Go on as a new incarnation. What is held stays: its first word makes the directory ask for all of it."""
        self._incarnation = incarnation
        self._sequence = 0

    def events(self, changes: ContentChanges) -> list[BlocksStored | BlocksEvicted]:
        """Return the events that say what has changed, at most one of each kind."""
        events: list[BlocksStored | BlocksEvicted] = []
        for kind, hashes in ((BlocksEvicted, changes.evicted), (BlocksStored, changes.stored)):
            if hashes:
                self._sequence += 1
                event = kind(
                    worker_id=self._worker_id,
                    incarnation=self._incarnation,
                    sequence=self._sequence,
                    block_hashes=join_hashes(hashes),
                )
                events.append(event)
        return events

    def inventory(self, contents: Sequence[BlockHash], offset: int) -> Inventory:
        """Return a page of all that is held now. `contents` must keep its order as long as nothing changes."""
        page = contents[offset : offset + INVENTORY_PAGE_BLOCKS]
        end = offset + len(page)
        return Inventory(
            worker_id=self._worker_id,
            incarnation=self._incarnation,
            sequence=self._sequence,
            block_hashes=join_hashes(page),
            next_offset=end if end < len(contents) else None,
        )
