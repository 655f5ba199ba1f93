"""Which of a running sequence's blocks its replica is offered, and when. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass

from schemas.block import BlockHasher, join_hashes
from schemas.ids import WorkerId
from schemas.kv import ReplicateBlocks
from schemas.request import RunAttempt
from services.holder.limits import MESSAGE_BLOCKS, OFFER_BLOCKS
from services.times import WorkerTimes


@dataclass(slots=True)
class ReplicaOffer:
    """What `replica` has been offered so far of the blocks that a sequence of `source` fills: at most one message in
    `offer_interval_ms`, or for `OFFER_BLOCKS`."""

    request: RunAttempt
    hasher: BlockHasher
    replica: WorkerId
    source: WorkerId
    fingerprint: str
    times: WorkerTimes
    num_offered: int = 0
    """Blocks."""
    offered_ms: int | None = None

    def due(self, num_stored_blocks: int, now_ms: int, *, ended: bool = False) -> list[ReplicateBlocks]:
        """Return the messages that are to go out now: of the `num_stored_blocks` that the worker has, those
        since the last ones. `ended`: the sequence fills no more blocks."""
        num_new = num_stored_blocks - self.num_offered
        has_waited = self.offered_ms is None or now_ms - self.offered_ms >= self.times.offer_interval_ms
        is_due = num_new > 0 and (ended or num_new >= OFFER_BLOCKS or has_waited)
        return list(self._messages(num_stored_blocks, now_ms)) if is_due else []

    def _messages(self, end: int, now_ms: int) -> Iterator[ReplicateBlocks]:
        first, self.num_offered, self.offered_ms = self.num_offered, end, now_ms
        for at in range(first, end, MESSAGE_BLOCKS):
            yield ReplicateBlocks(
                request_id=self.request.request_id,
                attempt=self.request.attempt,
                deadline_ms=now_ms + self.times.read_within_ms,
                source=self.source,
                fingerprint=self.fingerprint,
                first_block=at,
                block_hashes=join_hashes(self.hasher.hashes[at : min(at + MESSAGE_BLOCKS, end)]),
                tenant=self.request.tenant,
            )
