"""What a worker and its engine send each other, whatever lies between them: a pair of sockets, or nothing.

A sequence goes by the `number` that the worker gave it. What only a process of its own needs besides is in `ipc.py`.
"""

from typing import NamedTuple

import msgspec

from dataplane.blocks.layout import BlockTables
from schemas.block import TokenIds
from schemas.ids import RequestId
from schemas.logprobs import TokenLogprob
from schemas.request import FinishReason, SamplingParams


class EngineMessage(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """One message."""


class SubmitSequence(EngineMessage, frozen=True, kw_only=True):
    """Compute a sequence, as `Sequence` has it. `row`: by which its layers are announced; -1: nobody wants to know.
    The engine answers one that cannot be computed with `SequencesFailed`."""

    number: int
    request_id: RequestId
    tokens: TokenIds
    num_prompt_tokens: int
    sampling: SamplingParams
    tables: BlockTables
    num_computed_tokens: int = 0
    max_local_tokens: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    tenant: str = ""
    wants_prompt_logprobs: bool = False
    row: int = -1


class CancelSequence(EngineMessage, frozen=True):
    """Take a sequence out after the running step. `SequenceLeft` follows, unless it has ended before."""

    number: int


class StartGrammar(EngineMessage, frozen=True):
    """Begin to understand a grammar, even while a step runs; `GrammarStarted` follows with this number."""

    number: int
    text: str


class AskLibrary(EngineMessage, frozen=True):
    """What has the engine's library counted, of names that begin so? `LibraryCounted` follows."""

    prefix: str


class StopEngine(EngineMessage, frozen=True):
    """End after the running step."""


class SampledToken(msgspec.Struct, frozen=True, array_like=True):
    """A token of a sequence's answer, whose index there is `index`. `local_end`: the sequence has left this engine
    (finished, or ready to be handed over)."""

    number: int
    index: int
    token_id: int
    finish_reason: FinishReason | None
    local_end: bool
    logprob: TokenLogprob | None = None
    """Where its request wants it."""
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    """The prompt's, from its second token on, with the answer's first token; None where they are not wanted."""
    num_reused_tokens: int = 0
    """So many tokens behind those that the sequence came with were not computed: the engine had them."""


class FailedSequence(NamedTuple):
    """A sequence for which no token could be chosen, and why, for the client: it has left the engine. What was computed
    of it is right. `is_spent`: as GrammarError has it."""

    number: int
    reason: str
    is_spent: bool = False


class StepResult(EngineMessage, frozen=True):
    """One engine step. Times are `time.monotonic_ns()`."""

    started_ns: int
    ended_ns: int
    num_prefill_tokens: int
    num_decode_tokens: int
    computed: tuple[tuple[int, int], ...]
    """Each sequence of the step, by number, and how many of its tokens are computed after it."""
    sampled: tuple[SampledToken, ...]
    num_preempted: int = 0
    """Sequences that the engine has put aside in this step, to begin again later."""
    failed: tuple[FailedSequence, ...] = ()


class SequencesFailed(EngineMessage, frozen=True):
    """The engine has let go of sequences that it cannot compute."""

    numbers: tuple[int, ...]
    reason: str


class SequenceLeft(EngineMessage, frozen=True):
    """The engine has let go of a sequence that was cancelled."""

    number: int


class GrammarStarted(EngineMessage, frozen=True):
    """The grammar is understood, and kept. `error`: why it cannot be."""

    number: int
    error: str = ""


class LibraryCounted(EngineMessage, frozen=True):
    """In Prometheus' text format."""

    text: str


ToEngine = SubmitSequence | CancelSequence | StartGrammar | AskLibrary | StopEngine
ToWorker = StepResult | SequencesFailed | SequenceLeft | GrammarStarted | LibraryCounted
