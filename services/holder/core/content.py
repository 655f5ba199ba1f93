"""How much of a prompt's KV is in place on a worker, and where it came from. Pure."""

from collections import deque
from dataclasses import dataclass, field

from schemas.ids import RequestId, WorkerId
from schemas.request import FirstTokenTimes, KVSource, SourceTokens, TransferReport

AttemptKey = tuple[RequestId, int]
"""One attempt at one request."""


@dataclass(slots=True, frozen=True)
class PromptPiece:
    """Blocks [first_block, first_block + num_blocks) of a prompt, to be read from `source`."""

    source: WorkerId
    first_block: int
    num_blocks: int


@dataclass(slots=True, frozen=True)
class ReadOutcome:
    """What a read brought: the contiguous, verified prefix in tokens of the sequence, and by which carrier ('': it
    never started). A hand-over in whole blocks ends at the border of the prompt's last one. `is_whole`: all that the
    holder granted. `has_more`: it will grant more when it is asked again."""

    num_landed_tokens: int
    num_bytes: int = 0
    carrier: str = ""
    is_whole: bool = False
    has_more: bool = False


@dataclass(slots=True)
class PromptKV:
    """How much of one prompt's KV is in place on a worker, and where it came from.

    `keeps_parts` False: what a read brought counts only when it came whole (layers with windows).
    """

    num_prompt_tokens: int
    block_size: int
    num_cached_tokens: int
    keeps_parts: bool = True
    sources: deque[KVSource] = field(default_factory=deque[KVSource])
    num_present_tokens: int = 0
    carrier: str = ""
    transferred: dict[WorkerId, int] = field(default_factory=dict[WorkerId, int])

    def __post_init__(self) -> None:
        self.num_present_tokens = self.num_cached_tokens

    def next_piece(self, reader: WorkerId) -> PromptPiece | None:
        """Return what to read next; drop the sources that have nothing to add. The last token is always computed."""
        first = self.num_present_tokens // self.block_size
        last = (self.num_prompt_tokens - 1) // self.block_size
        while self.sources:
            source = self.sources.popleft()
            end = min(source.first_block + source.num_blocks, last)
            if source.worker_id != reader and source.first_block <= first and end > first:
                self.keep_at_most(first * self.block_size)  # what of that block is here is written over
                return PromptPiece(source.worker_id, first, end - first)
        return None

    def landed(self, source: WorkerId, outcome: ReadOutcome) -> None:
        """Add what a read has brought. What fills up the prompt's last block counts as nothing."""
        if not outcome.is_whole and not self.keeps_parts:
            self.num_present_tokens = self.num_cached_tokens
            self.transferred.clear()
            self.sources.clear()
            return
        num_landed_tokens = min(outcome.num_landed_tokens, self.num_prompt_tokens)
        gained = num_landed_tokens - self.num_present_tokens
        if gained <= 0:
            return
        self.num_present_tokens = num_landed_tokens
        self.transferred[source] = self.transferred.get(source, 0) + gained
        self.carrier = outcome.carrier or self.carrier

    def keep_at_most(self, num_tokens: int) -> None:
        """Forget what lies beyond: those tokens are computed again."""
        surplus = self.num_present_tokens - num_tokens
        if surplus <= 0:
            return
        self.num_present_tokens = num_tokens
        for source in reversed(self.transferred):
            taken = min(surplus, self.transferred[source])
            self.transferred[source] -= taken
            surplus -= taken
        self.transferred = {source: count for source, count in self.transferred.items() if count}

    def report(
        self, *, num_reused_tokens: int = 0, is_prefill: bool = False, first_token: FirstTokenTimes | None = None
    ) -> TransferReport:
        """Return where it came from, and how the prompt came to its first token; what is not in place is computed, but
        for `num_reused_tokens` that the engine had itself."""
        num_transferred = sum(self.transferred.values())
        num_missing = self.num_prompt_tokens - self.num_present_tokens
        num_reused = min(num_reused_tokens, num_missing)
        return TransferReport(
            cached_tokens=self.num_present_tokens - num_transferred + num_reused,
            transferred_tokens=num_transferred,
            recomputed_tokens=num_missing - num_reused,
            transferred_from=tuple(
                SourceTokens(worker_id=source, num_tokens=count) for source, count in self.transferred.items()
            ),
            carrier=self.carrier,
            is_prefill=is_prefill,
            first_token=first_token,
        )
