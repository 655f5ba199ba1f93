"""The steps of vLLM: it decides what a step computes; what came of it is told as of any engine."""

import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any, Protocol

from dataplane.blocks.layout import KVLayout
from schemas.ids import RequestId
from schemas.logprobs import TokenLogprob
from services.engine.interface import (
    EngineLoad,
    EngineLostError,
    FailedSequence,
    GrammarError,
    InvalidSequenceError,
    SampledToken,
    Sequence,
    StepFailedError,
    StepResult,
)
from services.engine.rules import append_token, check_sequence, check_work, num_tokens_left
from services.engine.turns import TenantTurns
from services.engine.vllm_engine.formats import MAX_SEQUENCES
from services.engine.vllm_engine.link import EngineLink, sequence_name
from services.engine.vllm_engine.plan import TrackedSequence

Key = tuple[RequestId, int]


class Output(Protocol):
    """What is used of vLLM's RequestOutput, of the tokens since the last one."""

    request_id: str
    finished: bool
    outputs: list[Any]
    prompt_logprobs: Seq[Any] | None


class LocalEngine(Protocol):
    """vLLM's engine in this process, as `loading.py` makes it."""

    def add_request(self, name: str, sequence: Sequence, num_tokens: int) -> str:
        """Add a request for at most `num_tokens` tokens; return vLLM's own name for it."""
        ...

    def abort(self, name: str) -> None:
        """End a request by vLLM's name. No hook names it any more when this returns."""
        ...

    def engine_step(self) -> list[Output]: ...
    def close(self) -> None: ...


class VllmSteps:
    """As `Steps`. A step that raises is vLLM's end: it does not say what it had done until then.

    vLLM serves first come first served. So it is given what its next step can compute, tenants in turn, and the rest
    waits here.
    """

    def __init__(
        self,
        engine: LocalEngine,
        link: EngineLink,
        *,
        vocab_size: int,
        context_length: int,
        token_budget: int,
    ) -> None:
        self._engine = engine
        self._link = link
        self._vocab_size = vocab_size
        self._context_length = context_length
        self._token_budget = token_budget
        self._names: dict[Key, str] = {}
        """vLLM's name of each sequence."""
        self._started: set[Key] = set()
        self._lines: dict[str, deque[Sequence]] = {}
        """What vLLM has not been given yet, by tenant."""
        self._turns = TenantTurns()
        """Of the tenants, in tokens to compute."""
        self.on_begin: Callable[[Seq[Sequence]], None] = lambda _: None
        link.on_begin = lambda sequences: self.on_begin(sequences)

    def __len__(self) -> int:
        return len(self._names) + sum(map(len, self._lines.values()))

    @property
    def layout(self) -> KVLayout:
        return self._link.layout

    def check(self, sequence: Sequence) -> None:
        check_sequence(
            sequence,
            self.layout,
            vocab_size=self._vocab_size,
            context_length=self._context_length,
            token_budget=self._token_budget,
        )

    def add(self, sequence: Sequence) -> None:
        check_work(sequence)
        key = _key(sequence)
        if key in self._names or self._waiting(key) is not None:
            raise InvalidSequenceError(f"{key} is in the engine already")
        if self._lines or not self._has_room:
            self._lines.setdefault(sequence.tenant, deque()).append(sequence)
        else:
            self._give(sequence)

    def _waiting(self, key: Key) -> Sequence | None:
        return next((each for line in self._lines.values() for each in line if _key(each) == key), None)

    @property
    def _has_room(self) -> bool:
        """Whether vLLM's next step could compute some of one more."""
        num_tokens = sum(sequence.num_uncomputed_tokens for sequence in self._link.sequences.values())
        return len(self._names) < MAX_SEQUENCES and num_tokens < self._token_budget

    def _give_waiting(self) -> list[FailedSequence]:
        """Give vLLM what has waited, as much as it has room for; return what it does not take."""
        failed: list[FailedSequence] = []
        while self._lines and self._has_room:
            tenant = self._turns.order(self._lines)[0]
            sequence = self._lines[tenant][0]
            self._leave_line(sequence)
            try:
                self._give(sequence)
            except InvalidSequenceError as error:
                failed.append(FailedSequence(sequence, str(error)))
        return failed

    def _leave_line(self, sequence: Sequence) -> None:
        line = self._lines[sequence.tenant]
        line.remove(sequence)
        if not line:
            del self._lines[sequence.tenant]

    def _give(self, sequence: Sequence) -> None:
        """Give vLLM a sequence. Raises InvalidSequenceError."""
        key, ours = _key(sequence), sequence_name(sequence)
        self._turns.gave(sequence.tenant, sequence.num_uncomputed_tokens)
        try:
            theirs = self._engine.add_request(ours, sequence, num_tokens_left(sequence, self._context_length))
        except ValueError as error:
            raise InvalidSequenceError(f"vLLM does not take {ours}: {error}") from error
        self._link.tracked[theirs] = TrackedSequence(sequence, self.layout, self._link.group_pairs)
        self._names[key] = theirs
        self._link.sequences[ours] = sequence

    def remove(self, request_id: RequestId, attempt: int) -> Sequence | None:
        key = (request_id, attempt)
        if (waiting := self._waiting(key)) is not None:
            self._leave_line(waiting)
            return waiting
        if (theirs := self._names.get(key)) is None:
            return None
        self._engine.abort(theirs)
        return self._forget(key)

    def clear(self) -> list[Sequence]:
        """Take all out. vLLM is not told: no step follows."""
        waiting = [sequence for line in self._lines.values() for sequence in line]
        self._lines.clear()
        return [*(self._forget(key) for key in list(self._names)), *waiting]

    def load(self) -> EngineLoad:
        waiting = [sequence for line in self._lines.values() for sequence in line]
        sequences = [*self._link.sequences.values(), *waiting]
        prefill = [sequence for sequence in sequences if sequence.num_uncomputed_tokens > 1]
        num_queued = sum(_key(sequence) not in self._started for sequence in sequences)
        return EngineLoad(
            num_running=len(sequences) - num_queued,
            num_queued=num_queued,
            num_uncomputed_tokens=sum(sequence.num_uncomputed_tokens for sequence in prefill),
        )

    def run_step(self) -> StepResult | None:
        failed = self._give_waiting()
        if not (self._names or failed):
            return None
        started_ns = time.monotonic_ns()
        try:
            self._link.begin_step([], 0)
            return self._result(self._engine.engine_step(), started_ns, failed)
        except Exception as error:
            lost = EngineLostError(f"vLLM failed: {type(error).__name__}: {error}")
            raise StepFailedError(self.clear(), lost) from error

    def close(self) -> None:
        self._link.close()
        self._engine.close()

    def _result(self, outputs: list[Output], started_ns: int, failed: list[FailedSequence]) -> StepResult:
        num_prefill = num_decode = 0
        computed: list[tuple[Sequence, int]] = []
        for copies in self._link.step:
            sequence, num_tokens = copies.tracked.sequence, copies.end - copies.start
            if num_tokens == 1 and copies.end == len(sequence.token_ids):
                num_decode += 1
            else:
                num_prefill += num_tokens
            if _key(sequence) not in self._started:
                sequence.num_reused_tokens = max(0, copies.start - sequence.num_computed_tokens)
            # One that vLLM had put aside begins again: what is in the arena stays.
            sequence.num_computed_tokens = max(sequence.num_computed_tokens, copies.end)
            self._started.add(_key(sequence))
            computed.append((sequence, sequence.num_computed_tokens))
        sampled: list[SampledToken] = []
        for output in outputs:
            self._take(output, sampled, failed)
        return StepResult(
            started_ns=started_ns,
            ended_ns=time.monotonic_ns(),
            num_prefill_tokens=num_prefill,
            num_decode_tokens=num_decode,
            computed=tuple(computed),
            sampled=tuple(sampled),
            num_preempted=self._link.num_preempted,
            failed=tuple(failed),
        )

    def _take(self, output: Output, sampled: list[SampledToken], failed: list[FailedSequence]) -> None:
        """Take in what vLLM says of one request. Raises EngineLostError where it is not what was chosen here, or not
        what the request's rules say."""
        sequence, name = self._link.sequences.get(output.request_id), output.request_id
        if sequence is None:
            return
        if output.prompt_logprobs and not sequence.prompt_logprobs:
            sequence.prompt_logprobs += _prompt_logprobs(sequence, output.prompt_logprobs)
        token_ids, outcome = [*output.outputs[0].token_ids], self._link.outcomes.get(name)
        if isinstance(outcome, GrammarError):
            if not output.finished:
                self._engine.abort(self._names[_key(sequence)])
            failed.append(FailedSequence(self._forget(_key(sequence)), str(outcome), outcome.is_spent))
            return
        if token_ids != ([] if outcome is None else [outcome.token_id]):
            raise EngineLostError(f"vLLM gives {name} tokens {token_ids}, and what was chosen is {outcome}")
        tokens = [] if outcome is None else [append_token(sequence, outcome, self._context_length)]
        sampled += tokens
        ended = any(token.local_end for token in tokens)
        if ended != output.finished:
            raise EngineLostError(
                f"vLLM {'ended' if output.finished else 'goes on with'} {name} after "
                f"{sequence.index} tokens, which the request's rules do not"
            )
        if ended:
            self._forget(_key(sequence))

    def _forget(self, key: Key) -> Sequence:
        sequence = self._link.tracked.pop(self._names.pop(key)).sequence
        self._started.discard(key)
        return self._link.sequences.pop(sequence_name(sequence))


def _key(sequence: Sequence) -> Key:
    return sequence.request_id, sequence.attempt


def _prompt_logprobs(sequence: Sequence, found: Seq[Any]) -> list[TokenLogprob]:
    """Return a prompt's logarithms as ours. `found`: vLLM's, by position, a token's id to what it says of it; None at
    the first, before which there is nothing. Which of several equal ones are among the likeliest is its choice."""
    num_top = sequence.sampling.prompt_logprobs or 0
    logprobs: list[TokenLogprob] = []
    for token_id, by_id in zip(sequence.token_ids[1:], found[1:], strict=True):
        likeliest = sorted((-one.logprob, other) for other, one in by_id.items())[:num_top]
        logprobs.append(TokenLogprob(by_id[token_id].logprob, tuple((other, -value) for value, other in likeliest)))
    return logprobs
