"""Prompts that begin alike, at one time on one worker: what one attempt fills, no other fills as well. Pure.

An attempt in the queue waits for the other one, its twin, and holds nothing meanwhile. A twin has its blocks, so nobody
waits for one who waits. It is over when the blocks are there; when the twin ends without them, or they will not be
kept; or when the wait has taken its time. Whoever waited then looks again: for another twin, else it goes on itself.

Not for layers with windows: what lies in their blocks is known at the end of a sequence only.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from dataplane.blocks.cache import BlockCache
from dataplane.blocks.layout import block_ids
from schemas.observe import RunStage
from services.holder.core.attempt import Attempt, Twin
from services.holder.core.content import AttemptKey
from services.holder.limits import TWIN_READ_SHARE

_READING = (RunStage.RESERVED, RunStage.FETCHING, RunStage.RECEIVING)
"""Its blocks come, and all of them at once, when the read has ended."""


def _is_filling(attempt: Attempt) -> bool:
    is_computed = attempt.stage is RunStage.COMPUTING and not attempt.awaits_grammar
    return bool(attempt.tables) and (is_computed or attempt.stage in _READING)


@dataclass
class Twins:
    """The twins among one worker's attempts. `waits` False: nobody waits."""

    cache: BlockCache
    attempts: Mapping[AttemptKey, Attempt]
    waits: bool = True

    def find(self, attempt: Attempt) -> Twin | None:
        """Return who fills the next block of this prompt that is not here, and most of those after it; None: nobody.
        The prompt's last token is always computed."""
        hashes, size = attempt.hasher.hashes, self.cache.layout.block_size
        last = (attempt.num_prompt_tokens - 1) // size
        others = self._filling(attempt) if last and self.waits and self.cache.keeps_what_is_computed else []
        if not others:
            return None
        first = self.cache.num_cached_blocks(hashes[:last], attempt.request.tenant)
        found: Twin | None = None
        for other in others:
            theirs = other.hasher.hashes
            most = min(last, len(theirs))
            # Each hash names all before it as well.
            if not other.num_stored_blocks <= first < most or theirs[first] != hashes[first]:
                continue
            end = next((at for at in range(first + 1, most) if theirs[at] != hashes[at]), most)
            if other.stage in _READING and (end - first) * TWIN_READ_SHARE < len(theirs) - first:
                continue  # most of what it waits for is not wanted here
            twin = Twin(other, end, block_ids(other.tables[0].segments)[end - 1])
            if self.fills(twin) and (found is None or found.end_block < end):
                found = twin
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

    def fills(self, twin: Twin) -> bool:
        """Say whether a twin's blocks are still to come."""
        other = twin.attempt
        return (
            other.num_stored_blocks < twin.end_block
            and _is_filling(other)
            and not self.cache.kept.is_barred(twin.last_block)
        )
