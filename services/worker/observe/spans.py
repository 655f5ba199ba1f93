"""The spans that a worker records of each attempt, after the fact and off the engine's thread."""

import time
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from schemas.request import AttemptEnd, FirstTokenTimes, RequestTokens
from services.engine.interface import Sequence, StepResult
from services.telemetry import AttributeValue, Key, SpanName, Telemetry, parse_traceparent
from services.worker.core.actions import AttemptKey
from services.worker.core.attempts import EndedAttempt

MAX_ATTEMPTS = 4_096
MAX_LINKED_STEPS = 16
"""So many steps of a prompt, and of an answer, are recorded and linked: a long answer has thousands."""

Asked = Literal["prefill", "decode"]


@dataclass(slots=True)
class AttemptTimes:
    """When what happened, in Unix ns; 0: not yet. `compute` and `stream` name the spans that steps are linked to."""

    traceparent: str
    asked: Asked
    accepted_ns: int
    is_sampled: bool
    num_prompt_tokens: int = 0
    submitted_ns: int = 0
    computes_prompt: bool = False
    decodes: bool = False
    """All of the answer is to be decoded here, not its first token alone."""
    first_step_ns: int = 0
    first_token_ns: int = 0
    last_step_ns: int = 0
    num_tokens: int = 0
    compute: str = ""
    stream: str = ""
    compute_steps: list[str] = field(default_factory=list[str])
    stream_steps: list[str] = field(default_factory=list[str])
    has_prefill: bool = False
    has_decode: bool = False


@dataclass
class WorkerSpans:
    """One worker's spans. An attempt is forgotten once it has ended here."""

    telemetry: Telemetry
    worker_id: str
    _times: dict[AttemptKey, AttemptTimes] = field(default_factory=dict[AttemptKey, AttemptTimes])

    def accepted(self, key: AttemptKey, traceparent: str, asked: Asked) -> int:
        """An attempt has come, perhaps not for the first time. Return when it first did."""
        times = self._times.get(key)
        if times is None:
            context = parse_traceparent(traceparent)
            is_sampled = context is not None and context.is_sampled
            times = self._times[key] = AttemptTimes(traceparent, asked, time.time_ns(), is_sampled)
            times.decodes = asked == "decode"
            if len(self._times) > MAX_ATTEMPTS:
                del self._times[next(iter(self._times))]
        return times.accepted_ns

    def submitted(self, sequence: Sequence) -> None:
        if times := self._times.get((sequence.request_id, sequence.attempt)):
            times.submitted_ns = time.time_ns()
            times.num_prompt_tokens = sequence.num_prompt_tokens
            times.decodes = sequence.max_local_tokens is None
            # An answer that goes on after a hand-over has its prompt's KV, and its last token to compute.
            is_handed_over = times.asked == "decode" and sequence.index > 0 and sequence.num_uncomputed_tokens == 1
            times.computes_prompt = not is_handed_over

    def traceparent(self, key: AttemptKey | None) -> str:
        times = self._times.get(key) if key else None
        return times.traceparent if times else ""

    def stepped(self, result: StepResult) -> None:
        """Note the step's times for its sequences, and record the step where one of them is traced."""
        linked: list[tuple[list[str], str]] = []
        for sequence, _ in result.computed:
            times = self._times.get((sequence.request_id, sequence.attempt))
            if times is None:
                continue
            times.first_step_ns = times.first_step_ns or result.started_ns
            times.last_step_ns = result.ended_ns
            if times.is_sampled:
                self._link(times, linked)
        if linked:
            step = self.telemetry.record_apart(
                SpanName.ENGINE_STEP,
                (result.started_ns, result.ended_ns),
                {
                    Key.WORKER: self.worker_id,
                    Key.BATCH_SIZE: len(result.computed),
                    Key.NUM_PREFILL_TOKENS: result.num_prefill_tokens,
                    Key.NUM_DECODE_TOKENS: result.num_decode_tokens,
                },
                links=[traceparent for _, traceparent in linked],
            )
            for steps, _ in linked:
                steps.append(step)
        for sampled in result.sampled:
            if times := self._times.get((sampled.sequence.request_id, sampled.sequence.attempt)):
                times.first_token_ns = times.first_token_ns or result.ended_ns
                times.num_tokens += 1

    def timed(self, tokens: RequestTokens) -> RequestTokens:
        """Add to the first word of an attempt how it came to its token, if its prompt was computed here."""
        times = self._times.get((tokens.request_id, tokens.attempt))  # type: ignore[arg-type]
        if times is None or tokens.report is None or not times.computes_prompt or not times.first_token_ns:
            return tokens
        first = FirstTokenTimes(
            accepted_ns=times.accepted_ns, first_step_ns=times.first_step_ns, computed_ns=times.first_token_ns
        )
        return msgspec.structs.replace(tokens, report=msgspec.structs.replace(tokens.report, first_token=first))

    def prefilled(self, sequence: Sequence) -> None:
        """Record a prompt's computation, if this was it."""
        key = (sequence.request_id, sequence.attempt)
        times = self._times.get(key)
        if times is not None and times.first_step_ns and times.computes_prompt and not times.has_prefill:
            self._record_prefill(key, times, times.first_token_ns)

    def decoded(self, sequence: Sequence, finish_reason: str) -> None:
        """Record an answer's computation, which has come to its end."""
        key = (sequence.request_id, sequence.attempt)
        times = self._times.get(key)
        if times is not None and times.first_step_ns:
            self._record_decode(key, times, times.last_step_ns, finish_reason)

    def ended(self, ended: EndedAttempt) -> None:
        """An attempt goes on here no more: record what of it has not been, and forget it."""
        key, end, outcome = ended
        times = self._times.pop(key, None)
        if times is None:
            return
        now_ns, error = time.time_ns(), "" if end is AttemptEnd.COMPLETE else outcome
        if not times.has_prefill and (times.asked == "prefill" or times.computes_prompt):
            self._record_prefill(key, times, now_ns, outcome, error)
        is_begun = bool(times.submitted_ns if times.asked == "decode" else times.first_token_ns)
        if times.decodes and not times.has_decode and (is_begun or (times.asked == "decode" and outcome)):
            self._record_decode(key, times, now_ns, outcome, error)

    def forget(self, key: AttemptKey) -> None:
        """Nothing came of it."""
        self._times.pop(key, None)

    def _link(self, times: AttemptTimes, linked: list[tuple[list[str], str]]) -> None:
        """Note what a step is to be linked to, within the bounds."""
        if times.computes_prompt and not times.first_token_ns:
            if len(times.compute_steps) < MAX_LINKED_STEPS:
                times.compute = times.compute or self.telemetry.child_of(times.traceparent)
                linked.append((times.compute_steps, times.compute))
        elif len(times.stream_steps) < MAX_LINKED_STEPS:
            times.stream = times.stream or self.telemetry.child_of(times.traceparent)
            linked.append((times.stream_steps, times.stream))

    def _record_prefill(
        self, key: AttemptKey, times: AttemptTimes, end_ns: int, outcome: str = "", error: str = ""
    ) -> None:
        times.has_prefill = True
        record, first_step_ns = self.telemetry.record, times.first_step_ns or end_ns
        span_ns = (times.accepted_ns, end_ns)
        attributes = self._attributes(key, outcome) | {Key.NUM_TOKENS: times.num_prompt_tokens}
        parent = record(SpanName.PREFILL, times.traceparent, span_ns, attributes, error=error)
        record(SpanName.PREFILL_QUEUE, parent, (times.accepted_ns, first_step_ns), {})
        if times.first_step_ns:
            compute_ns = (first_step_ns, end_ns)
            record(SpanName.PREFILL_COMPUTE, parent, compute_ns, {}, own=times.compute, links=times.compute_steps)

    def _record_decode(self, key: AttemptKey, times: AttemptTimes, end_ns: int, outcome: str, error: str = "") -> None:
        times.has_decode = True
        record, started_ns = self.telemetry.record, times.submitted_ns or times.accepted_ns
        first_step_ns = times.first_step_ns or end_ns
        first_end_ns = times.first_token_ns or times.last_step_ns or end_ns
        attributes = self._attributes(key, outcome) | {Key.NUM_TOKENS: times.num_tokens}
        parent = record(SpanName.DECODE, times.traceparent, (started_ns, end_ns), attributes, error=error)
        record(SpanName.DECODE_QUEUE, parent, (started_ns, first_step_ns), {})
        if times.first_step_ns:
            stream_ns = (first_end_ns, end_ns)
            record(SpanName.DECODE_FIRST_STEP, parent, (first_step_ns, first_end_ns), {})
            record(SpanName.DECODE_STREAM, parent, stream_ns, {}, own=times.stream, links=times.stream_steps)

    def _attributes(self, key: AttemptKey, outcome: str) -> dict[str, AttributeValue]:
        attributes: dict[str, AttributeValue] = {
            Key.REQUEST_ID: key[0],
            Key.ATTEMPT: key[1],
            Key.WORKER: self.worker_id,
        }
        return attributes | {Key.OUTCOME: outcome} if outcome else attributes
