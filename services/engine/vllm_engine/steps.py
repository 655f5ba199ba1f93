"""The steps of vLLM: it decides what a step computes; what came of it is told as of any engine."""

import time
from typing import Any, Protocol

from dataplane.blocks.layout import KVLayout
from schemas.ids import RequestId
from services.engine.interface import (
    EngineLoad,
    EngineLostError,
    InvalidSequenceError,
    SampledToken,
    Sequence,
    StepFailedError,
    StepResult,
)
from services.engine.rules import append_token, check_sequence, check_work, num_tokens_left
from services.engine.vllm_engine.link import EngineLink
from services.engine.vllm_engine.plan import TrackedSequence

Key = tuple[RequestId, int]


class Output(Protocol):
    """What is used of vLLM's RequestOutput, of the tokens since the last one."""

    request_id: str
    finished: bool
    outputs: list[Any]


class LocalEngine(Protocol):
    """vLLM's engine in this process, as `loading.py` makes it."""

    def add(self, name: str, sequence: Sequence, num_tokens: int) -> str:
        """Add a request for at most `num_tokens` tokens; return vLLM's own name for it."""
        ...

    def abort(self, name: str) -> None:
        """End a request by vLLM's name. No hook names it any more when this returns."""
        ...

    def step(self) -> list[Output]: ...
    def close(self) -> None: ...


class VllmSteps:
    """As `Steps`. A step that raises is vLLM's end: it does not say what it had done until then."""

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
        self._sequences: dict[str, Sequence] = {}
        """By the name that we gave it."""
        self._started: set[Key] = set()

    def __len__(self) -> int:
        return len(self._names)

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
        if key in self._names:
            raise InvalidSequenceError(f"{key} is in the engine already")
        ours = _name(key)
        try:
            theirs = self._engine.add(ours, sequence, num_tokens_left(sequence, self._context_length))
        except ValueError as error:
            raise InvalidSequenceError(f"vLLM does not take {ours}: {error}") from error
        self._link.tracked[theirs] = TrackedSequence(sequence, self.layout, self._link.group_pairs)
        self._names[key] = theirs
        self._sequences[ours] = sequence

    def remove(self, request_id: RequestId, attempt: int) -> Sequence | None:
        key = (request_id, attempt)
        if (theirs := self._names.get(key)) is None:
            return None
        self._engine.abort(theirs)
        return self._forget(key)

    def clear(self) -> list[Sequence]:
        """Take all out. vLLM is not told: no step follows."""
        return [self._forget(key) for key in list(self._names)]

    def load(self) -> EngineLoad:
        sequences = self._sequences.values()
        prefill = [sequence for sequence in sequences if sequence.num_uncomputed_tokens > 1]
        num_queued = sum(_key(sequence) not in self._started for sequence in sequences)
        return EngineLoad(
            num_running=len(sequences) - num_queued,
            num_queued=num_queued,
            num_uncomputed_tokens=sum(sequence.num_uncomputed_tokens for sequence in prefill),
        )

    def step(self) -> StepResult | None:
        if not self._names:
            return None
        started_ns = time.time_ns()
        try:
            self._link.begin([], 0)
            return self._result(self._engine.step(), started_ns)
        except Exception as error:
            lost = EngineLostError(f"vLLM failed: {type(error).__name__}: {error}")
            raise StepFailedError(self.clear(), lost) from error

    def close(self) -> None:
        self._link.close()
        self._engine.close()

    def _result(self, outputs: list[Output], started_ns: int) -> StepResult:
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
        sampled = [token for output in outputs for token in self._sampled(output)]
        return StepResult(
            started_ns=started_ns,
            ended_ns=time.time_ns(),
            num_prefill_tokens=num_prefill,
            num_decode_tokens=num_decode,
            computed=tuple(computed),
            sampled=tuple(sampled),
            num_preempted=self._link.num_preempted,
        )

    def _sampled(self, output: Output) -> list[SampledToken]:
        sequence = self._sequences.get(output.request_id)
        if sequence is None:
            return []
        tokens = [append_token(sequence, token, self._context_length) for token in output.outputs[0].token_ids]
        ended = bool(tokens) and tokens[-1].local_end
        if ended != output.finished or any(token.local_end for token in tokens[:-1]):
            raise EngineLostError(
                f"vLLM {'ended' if output.finished else 'goes on with'} {output.request_id} after "
                f"{sequence.index} tokens, which the request's rules do not"
            )
        if ended:
            self._forget(_key(sequence))
        return tokens

    def _forget(self, key: Key) -> Sequence:
        self._link.tracked.pop(self._names.pop(key))
        self._started.discard(key)
        return self._sequences.pop(_name(key))


def _key(sequence: Sequence) -> Key:
    return sequence.request_id, sequence.attempt


def _name(key: Key) -> str:
    return f"{key[0]}.{key[1]}"
