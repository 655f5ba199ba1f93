"""The steps of vLLM: it decides what a step computes; what came of it is reported as of any engine."""

import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any, Protocol

from dataplane.blocks.layout import KVLayout
from schemas.logprobs import TokenLogprob
from services.engine.interface import EngineLostError, GrammarError, InvalidSequenceError, Sequence, StepFailedError
from services.engine.messages import FailedSequence, SampledToken, StepResult
from services.engine.rules import append_token, check_sequence, num_tokens_left
from services.engine.turns import TenantTurns
from services.engine.vllm_engine.formats import MAX_SEQUENCES
from services.engine.vllm_engine.link import EngineLink, sequence_name
from services.engine.vllm_engine.plan import TrackedSequence


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
    """As `Steps`. A step that raises is vLLM's end: it does not report what it had done until then.

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
        self._names: dict[int, str] = {}
        """vLLM's name of each sequence."""
        self._started: set[int] = set()
        self._lines: dict[str, deque[Sequence]] = {}
        """What vLLM has not been given yet, by tenant."""
        self._turns = TenantTurns()
        """Of the tenants, in tokens to compute."""
        self.on_begin: Callable[[Seq[int]], None] = lambda _: None
        link.on_begin = lambda numbers: self.on_begin(numbers)

    def __len__(self) -> int:
        return len(self._names) + sum(map(len, self._lines.values()))

    @property
    def layout(self) -> KVLayout:
        return self._link.layout

    def add(self, sequence: Sequence) -> None:
        number = sequence.number
        assert number not in self._names and self._waiting(number) is None, f"{sequence.request_id} is here already"
        check_sequence(
            sequence,
            self.layout,
            vocab_size=self._vocab_size,
            context_length=self._context_length,
            token_budget=self._token_budget,
        )
        if self._lines or not self._has_room:
            self._lines.setdefault(sequence.tenant, deque()).append(sequence)
        else:
            self._give(sequence)

    def _waiting(self, number: int) -> Sequence | None:
        return next((each for line in self._lines.values() for each in line if each.number == number), None)

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
                failed.append(FailedSequence(sequence.number, str(error)))
        return failed

    def _leave_line(self, sequence: Sequence) -> None:
        line = self._lines[sequence.tenant]
        line.remove(sequence)
        if not line:
            del self._lines[sequence.tenant]

    def _give(self, sequence: Sequence) -> None:
        """Give vLLM a sequence. Raises InvalidSequenceError."""
        ours = sequence_name(sequence)
        self._turns.gave(sequence.tenant, sequence.num_uncomputed_tokens)
        try:
            theirs = self._engine.add_request(ours, sequence, num_tokens_left(sequence, self._context_length))
        except ValueError as error:
            raise InvalidSequenceError(f"vLLM does not take {ours}: {error}") from error
        self._link.tracked[theirs] = TrackedSequence(sequence, self.layout, self._link.group_pairs)
        self._names[sequence.number] = theirs
        self._link.sequences[ours] = sequence

    def remove(self, number: int) -> bool:
        if (waiting := self._waiting(number)) is not None:
            self._leave_line(waiting)
            return True
        if (theirs := self._names.get(number)) is None:
            return False
        self._engine.abort(theirs)
        self._forget(number)
        return True

    def clear(self) -> None:
        """Take all out. vLLM is not notified: no step follows."""
        self._lines.clear()
        for number in list(self._names):
            self._forget(number)

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
            had = [*self._names, *(sequence.number for line in self._lines.values() for sequence in line)]
            self.clear()
            raise StepFailedError(had, lost) from error

    def close(self) -> None:
        self._link.close()
        self._engine.close()

    def _result(self, outputs: list[Output], started_ns: int, failed: list[FailedSequence]) -> StepResult:
        # Note what was computed before any token is appended: a decode is recognized by the end of `token_ids`.
        num_prefill = num_decode = 0
        computed: list[tuple[int, int]] = []
        for copies in self._link.step:
            sequence, num_tokens = copies.tracked.sequence, copies.end - copies.start
            if num_tokens == 1 and copies.end == len(sequence.token_ids):
                num_decode += 1
            else:
                num_prefill += num_tokens
            # In its first step a sequence starts behind the tokens that vLLM had in its own prefix cache.
            if sequence.number not in self._started:
                sequence.num_reused_tokens = max(0, copies.start - sequence.num_computed_tokens)
            # One that vLLM had put aside begins again: what is in the arena stays.
            sequence.num_computed_tokens = max(sequence.num_computed_tokens, copies.end)
            self._started.add(sequence.number)
            computed.append((sequence.number, sequence.num_computed_tokens))
        # Then the tokens: `_take` appends them, and forgets the sequences that end.
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
        """Take in what vLLM returns of one request. Raises EngineLostError where it is not what was chosen here, or not
        what the request's rules say."""
        sequence, name = self._link.sequences.get(output.request_id), output.request_id
        if sequence is None:
            return
        # The prompt's logprobs come first: `append_token` sends them with the answer's first token.
        if output.prompt_logprobs and not sequence.prompt_logprobs:
            sequence.prompt_logprobs += _prompt_logprobs(sequence, output.prompt_logprobs)
        # Where no token could be chosen vLLM has taken token 0, and may go on with it: abort the request.
        token_ids, outcome = [*output.outputs[0].token_ids], self._link.outcomes.get(name)
        if isinstance(outcome, GrammarError):
            if not output.finished:
                self._engine.abort(self._names[sequence.number])
            self._forget(sequence.number)
            failed.append(FailedSequence(sequence.number, str(outcome), outcome.is_spent))
            return
        # vLLM must have taken the token that our sampler has chosen, and none where the step computed prompt only.
        if token_ids != ([] if outcome is None else [outcome.token_id]):
            raise EngineLostError(f"vLLM gives {name} tokens {token_ids}, and what was chosen is {outcome}")
        tokens = [] if outcome is None else [append_token(sequence, outcome, self._context_length)]
        sampled += tokens
        # Both sides must agree on the end: otherwise one of them keeps a request that the other has dropped.
        ended = any(token.local_end for token in tokens)
        if ended != output.finished:
            raise EngineLostError(
                f"vLLM {'ended' if output.finished else 'goes on with'} {name} after "
                f"{sequence.index} tokens, which the request's rules do not"
            )
        if ended:
            self._forget(sequence.number)

    def _forget(self, number: int) -> None:
        sequence = self._link.tracked.pop(self._names.pop(number)).sequence
        self._started.discard(number)
        del self._link.sequences[sequence_name(sequence)]


def _prompt_logprobs(sequence: Sequence, found: Seq[Any]) -> list[TokenLogprob]:
    """Return a prompt's logprobs as ours. `found`: vLLM's, by position, a token's id to what it returns of it; None at
    the first, before which there is nothing. Which of several equal ones are among the likeliest is its choice."""
    num_top = sequence.sampling.prompt_logprobs or 0
    logprobs: list[TokenLogprob] = []
    for token_id, by_id in zip(sequence.token_ids[1:], found[1:], strict=True):
        likeliest = sorted((-one.logprob, other) for other, one in by_id.items())[:num_top]
        logprobs.append(TokenLogprob(by_id[token_id].logprob, tuple((other, -value) for value, other in likeliest)))
    return logprobs
