"""What a holder tells the directory: which full blocks it has, in numbered events. Pure."""

from collections.abc import Sequence

from dataplane.blocks.kept import ContentChanges
from schemas.block import join_hashes
from schemas.directory import BlocksEvicted, BlocksStored, Inventory, Tier
from schemas.ids import BlockHash, WorkerId
from services.worker.limits import INVENTORY_PAGE_BLOCKS


class BlockLedger:
    """Numbers one incarnation's events, each incarnation's from 1."""

    def __init__(self, worker_id: WorkerId, incarnation: str) -> None:
        self._worker_id = worker_id
        self._incarnation = incarnation
        self._sequence = 0

    def begin(self, incarnation: str) -> None:
        """Go on as a new incarnation. What is held stays: its first event makes the directory ask for all of it."""
        self._incarnation = incarnation
        self._sequence = 0

    def events(self, changes: ContentChanges, tier: Tier = "arena") -> list[BlocksStored | BlocksEvicted]:
        """Return the events that say what has changed on a tier, at most one of each kind."""
        events: list[BlocksStored | BlocksEvicted] = []
        for kind, hashes in ((BlocksEvicted, changes.evicted), (BlocksStored, changes.stored)):
            if hashes:
                self._sequence += 1
                event = kind(
                    worker_id=self._worker_id,
                    incarnation=self._incarnation,
                    sequence=self._sequence,
                    block_hashes=join_hashes(hashes),
                    tier=tier,
                )
                events.append(event)
        return events

    def inventory(self, tiers: Sequence[tuple[Tier, Sequence[BlockHash]]], offset: int) -> Inventory:
        """Return a page of all that is held now, tier after tier, each page of one tier: from the `offset`-th block on.
        Each tier's blocks must keep their order as long as nothing changes."""
        total = sum(len(hashes) for _, hashes in tiers)
        page_tier, page, start = tiers[0][0], list[BlockHash](), 0
        for tier, hashes in tiers:
            if start <= offset < start + len(hashes):
                at = offset - start
                page_tier, page = tier, list(hashes[at : at + INVENTORY_PAGE_BLOCKS])
            start += len(hashes)
        end = offset + len(page)
        return Inventory(
            worker_id=self._worker_id,
            incarnation=self._incarnation,
            sequence=self._sequence,
            block_hashes=join_hashes(page),
            next_offset=end if page and end < total else None,
            tier=page_tier,
        )
