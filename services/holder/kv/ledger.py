"""What a holder reports to the directory: which full blocks it has, in numbered events. Pure."""

from collections.abc import Callable, Sequence

from dataplane.blocks.kept import ContentChanges
from schemas.block import BLOCK_HASH_BYTES, join_hashes
from schemas.directory import BlocksEvicted, BlocksStored, Inventory, Tier
from schemas.ids import BlockHash, WorkerId
from services.bus.limits import MAX_PAYLOAD_BYTES
from services.holder.limits import INVENTORY_PAGE_BLOCKS, MESSAGE_BLOCKS

Contents = Sequence[tuple[Tier, Sequence[BlockHash]]]
"""What is held on each tier."""

_ENVELOPE_BYTES = 1_024
"""What a message of block hashes needs beside them."""


def blocks_in(max_bytes: int) -> int:
    """Return how many block hashes fit into a message of so many bytes: they are written in base64."""
    return (max_bytes - _ENVELOPE_BYTES) // 4 * 3 // BLOCK_HASH_BYTES


class BlockLedger:
    """Numbers one incarnation's events, each incarnation's from 1. Keeps what an inventory reported while its pages are
    read, so that what comes and goes meanwhile does not spoil them."""

    def __init__(self, worker_id: WorkerId, incarnation: str) -> None:
        self._worker_id = worker_id
        self._incarnation = incarnation
        self._sequence = 0
        self._snapshot: tuple[int, Contents] | None = None
        """What is being read, and the number of the last event before."""

    def renew(self, incarnation: str) -> None:
        """Go on as a new incarnation. What is held stays: its first event makes the directory ask for all of it."""
        self._incarnation = incarnation
        self._sequence = 0
        self._snapshot = None

    def events(self, changes: ContentChanges, tier: Tier = Tier.ARENA) -> list[BlocksStored | BlocksEvicted]:
        """Return the events that report what has changed on a tier: first what has gone. Each fits into any message."""
        events: list[BlocksStored | BlocksEvicted] = []
        for kind, hashes in ((BlocksEvicted, changes.evicted), (BlocksStored, changes.stored)):
            for at in range(0, len(hashes), MESSAGE_BLOCKS):
                self._sequence += 1
                event = kind(
                    worker_id=self._worker_id,
                    incarnation=self._incarnation,
                    sequence=self._sequence,
                    block_hashes=join_hashes(hashes[at : at + MESSAGE_BLOCKS]),
                    tier=tier,
                )
                events.append(event)
        return events

    def inventory(self, contents: Callable[[], Contents], offset: int, max_bytes: int = MAX_PAYLOAD_BYTES) -> Inventory:
        """Return a page of all that was held when the first page was asked for, tier after tier, each page of one tier:
        from the `offset`-th block on, as many as fit into a message of `max_bytes`."""
        # The first page takes the snapshot and the number of the last event before it; later pages are cut from it.
        if self._snapshot is None or offset == 0:
            self._snapshot = self._sequence, contents()
        sequence, tiers = self._snapshot
        num_blocks = min(INVENTORY_PAGE_BLOCKS, blocks_in(max_bytes))
        total = sum(len(hashes) for _, hashes in tiers)
        # Find the tier in which the offset lies: offsets count over all tiers, and a page ends where its tier ends.
        page_tier, page, start = tiers[0][0], list[BlockHash](), 0
        for tier, hashes in tiers:
            if start <= offset < start + len(hashes):
                at = offset - start
                page_tier, page = tier, list(hashes[at : at + num_blocks])
            start += len(hashes)
        # The last page drops the snapshot. An offset beyond the end gives an empty last page.
        end = offset + len(page)
        next_offset = end if page and end < total else None
        if next_offset is None:
            self._snapshot = None
        return Inventory(
            worker_id=self._worker_id,
            incarnation=self._incarnation,
            sequence=sequence,
            block_hashes=join_hashes(page),
            next_offset=next_offset,
            tier=page_tier,
        )
