"""What a worker needs of an engine: sequences go in, KV is written in place, tokens come out.

`Steps` is all that the engine's thread knows. `Engine` is for those whose steps we plan ourselves (`batch.py`). Nothing
here knows torch or who computes.
"""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from dataplane.blocks.layout import BlockTables, KVLayout
from dataplane.carriers.carrier import KVArena
from schemas.ids import RequestId
from schemas.logprobs import TokenLogprob
from schemas.request import SamplingParams
from services.engine.counts import TokenCounts
from services.engine.messages import StepResult


class LayerListener(Protocol):
    """Is notified, on the engine's thread, that one layer's keys and values of tokens [0, num_tokens) are in the arena,
    or will be once the arena's `mark` is reached (0: they are)."""

    def advance(self, layer: int, num_tokens: int, mark: int = 0) -> None: ...


class Grammar(Protocol):
    """What one answer must be. The engine's thread is its only user."""

    def allowed(self, answer: Seq[int]) -> npt.NDArray[np.bool_]:
        """Return which tokens may follow `answer`, an answer's tokens from its first on: `[vocab]`.

        Whatever it remembers is made of these tokens, so that any worker can go on with anybody's answer. Raises
        GrammarError where these tokens are no beginning of what the answer must be, or its limits are reached.
        """
        ...


@dataclass(slots=True, eq=False)
class Sequence:
    """One request in the engine, which goes by the `number` that its worker gave it. Owned by the engine's thread.

    `token_ids` is the prompt and what was generated; keys and values of `token_ids[:num_computed_tokens]` are in the
    arena, as far as a cache group's window still needs them: `tables` says where, one table per group of the layout.
    A windowed group's table may be a ring, which the engine need not know: each block table entry is where that block
    lies, and no step writes a block that a query of the same step still sees.

    `max_local_tokens` bounds what is generated *here* (1 on a prefill worker that hands over).
    `stop_token_ids` are the model's EOS ids; `sampling` may say to ignore them, its own stop tokens always end.
    `index` is the answer's index of the next token to be sampled.
    """

    request_id: RequestId
    number: int
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    tables: BlockTables
    num_computed_tokens: int = 0
    max_local_tokens: int | None = None
    layer_listener: LayerListener | None = None
    num_local_tokens: int = 0
    stop_token_ids: frozenset[int] = field(default_factory=frozenset[int])
    tenant: str = ""
    """Whose request it is: an engine that keeps KV of its own shares it within a tenant only."""
    num_reused_tokens: int = 0
    """So many tokens behind the `num_computed_tokens` that it came with were not computed: the engine had them."""
    grammar: "Future[Grammar] | None" = None
    """What its answer must be, while that is being understood; its first token waits for it."""
    wants_prompt_logprobs: bool = False
    """The prompt's own logprobs are wanted, and nothing of it is in place yet."""
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list[TokenLogprob])
    """Of the prompt's second token to the last computed one, where they are wanted. Complete when the answer's first
    token is sampled."""
    counts: TokenCounts | None = None
    """What penalties have counted of its tokens so far, where there are any."""

    @property
    def index(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens


@dataclass(slots=True, frozen=True)
class StepItem:
    """Compute tokens [start, start + num_tokens) of a sequence; sample where `samples` (its last known token)."""

    sequence: Sequence
    start: int
    num_tokens: int
    samples: bool


class ChosenToken(NamedTuple):
    """A token that was chosen; its logprob where its request wants it."""

    token_id: int
    logprob: TokenLogprob | None = None


class GrammarError(ValueError):
    """What an answer must be cannot be understood, or its limits are reached. The message is for the client.
    `is_spent`: others may have reached them, and an attempt that goes on begins with a grammar of its own."""

    def __init__(self, message: str, *, is_spent: bool = False) -> None:
        super().__init__(message)
        self.is_spent = is_spent


Outcome = ChosenToken | GrammarError
"""What came of a sampling item: a token, or why its request can have none, which fails that request alone."""


class Engine(Protocol):
    """Runs one step at a time on one thread. `layout` is the shape of the KV that it writes.

    Token ids lie in [0, vocab_size).
    """

    layout: KVLayout
    vocab_size: int

    def compute(self, items: Seq[StepItem]) -> list[Outcome]:
        """Compute the items, write their KV, call the layer listeners, and return one outcome per sampling item. Where
        a prompt's logprobs are wanted, append those of what was computed."""
        ...

    def close(self) -> None:
        """Let go of the arena's memory. No step may follow."""
        ...


class Steps(Protocol):
    """The sequences that are computed on one worker, step by step: what `EngineLoop` drives.

    Its thread is the only user. `on_begin`: called with the numbers of those in a step, before it writes anything.
    """

    on_begin: Callable[[Seq[int]], None]

    def add(self, sequence: Sequence) -> None:
        """Put a sequence in line. Raises InvalidSequenceError unless it can be computed to its end here."""
        ...

    def remove(self, number: int) -> bool:
        """Take a sequence out; False: it is not (or no longer) here."""
        ...

    def clear(self) -> None:
        """Take all sequences out."""
        ...

    def __len__(self) -> int: ...

    def run_step(self) -> StepResult | None:
        """Compute a step and notify the layer listeners; None: there was nothing to do.

        Sequences that ended here have left when this returns. Raises StepFailedError.
        """
        ...

    def close(self) -> None:
        """Let go of the arena's memory. No step may follow."""
        ...


class PlacedEngine(NamedTuple):
    """An engine, and the arena that it writes to. `device`: what is reported of where they are: "cpu", or a card's
    number and name."""

    arena: KVArena
    engine: Engine
    device: str


class StepFailedError(RuntimeError):
    """A step has raised. `numbers`: of what was in it, which has left. `is_lost`: no later step will succeed."""

    def __init__(self, numbers: Iterable[int], error: Exception) -> None:
        super().__init__(f"{type(error).__name__}: {error}")
        self.numbers = tuple(numbers)
        self.is_lost = isinstance(error, EngineLostError)


class EngineFailedError(RuntimeError):
    """A step raised; the sequences that were in it have no result."""


class InvalidSequenceError(ValueError):
    """The sequence cannot be computed, and would fail the step of everybody who is in it."""


class EngineLostError(RuntimeError):
    """What the engine computes on has failed: no later step will succeed."""


CompileGrammar = Callable[[str], "Future[Grammar]"]
"""Begins to understand a grammar's text for one answer; the future has a GrammarError where it cannot be."""
