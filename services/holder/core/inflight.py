"""Finds the in-flight duplicate of a prompt: another attempt of this worker that fills the blocks which the prompt
begins with. Pure.

The later attempt waits in the queue and holds nothing meanwhile. The one that it waits for has its blocks already, so
nobody waits for an attempt that waits. The wait ends when the blocks are there, when the duplicate ends without them,
when they will not be kept, or at its deadline. Then the attempt looks for another duplicate, and else computes.

Not for layers with windows: what lies in their blocks is known at the end of a sequence only.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from dataplane.blocks.cache import BlockCache
from dataplane.blocks.layout import block_ids
from schemas.observe import RunStage
from services.holder.core.attempt import Attempt, InFlightDuplicate
from services.holder.core.content import AttemptKey
from services.holder.limits import DUPLICATE_READ_SHARE

_READING = (RunStage.RESERVED, RunStage.FETCHING, RunStage.RECEIVING)
"""Its blocks come, and all of them at once, when the read has ended."""


def _is_filling(attempt: Attempt) -> bool:
    is_computed = attempt.stage is RunStage.COMPUTING and not attempt.awaits_grammar
    return bool(attempt.tables) and (is_computed or attempt.stage in _READING)


@dataclass
class InFlightDuplicates:
    """Finds duplicates among one worker's attempts. `waits` False: nobody waits."""

    cache: BlockCache
    attempts: Mapping[AttemptKey, Attempt]
    waits: bool = True

    def find(self, attempt: Attempt) -> InFlightDuplicate | None:
        """Return who fills the next block of this prompt that is not here, and most of those after it; None: nobody.
        The prompt's last token is always computed."""
        hashes, size = attempt.hasher.hashes, self.cache.layout.block_size
        last = (attempt.num_prompt_tokens - 1) // size
        others = self._filling(attempt) if last and self.waits and self.cache.keeps_what_is_computed else []
        if not others:
            return None
        first = self.cache.num_cached_blocks(hashes[:last], attempt.request.tenant)
        found: InFlightDuplicate | None = None
        for other in others:
            theirs = other.hasher.hashes
            most = min(last, len(theirs))
            # Each hash names all before it as well.
            if not other.num_stored_blocks <= first < most or theirs[first] != hashes[first]:
                continue
            end = next((at for at in range(first + 1, most) if theirs[at] != hashes[at]), most)
            if other.stage in _READING and (end - first) * DUPLICATE_READ_SHARE < len(theirs) - first:
                continue  # most of what it waits for is not wanted here
            duplicate = InFlightDuplicate(other, end, block_ids(other.tables[0].segments)[end - 1])
            if self.fills(duplicate) and (found is None or found.end_block < end):
                found = duplicate
        return found

    def _filling(self, attempt: Attempt) -> list[Attempt]:
        """Return who fills blocks of a prompt that begins as this one does."""
        first = attempt.hasher.hashes[0]
        return [
            other
            for other in self.attempts.values()
            if other.num_stored_blocks < len(other.hasher.hashes)
            and _is_filling(other)
            and other.hasher.hashes[0] == first
        ]

    def fills(self, duplicate: InFlightDuplicate) -> bool:
        """Return whether a duplicate's blocks are still to come."""
        other = duplicate.attempt
        return (
            other.num_stored_blocks < duplicate.end_block
            and _is_filling(other)
            and not self.cache.kept.is_barred(duplicate.last_block)
        )
