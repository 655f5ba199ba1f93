"""The spans that a worker records of each attempt, after the fact and off the engine's thread."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from schemas.observe import Part
from schemas.request import AttemptEnd
from services.engine.messages import StepResult
from services.holder.core.attempt import Attempt, AttemptTimes
from services.holder.core.content import AttemptKey
from services.holder.limits import MAX_LINKED_STEPS
from services.telemetry import AttributeValue, Key, SpanName, Telemetry, is_sampled


def times_of(traceparent: str, ahead_ns: int) -> AttemptTimes:
    """Return the times of an attempt that is asked for now, in a trace that a message came with. `ahead_ns`: of the
    mesh's clock."""
    return AttemptTimes(time.monotonic_ns(), is_sampled(traceparent), ahead_ns)


@dataclass
class WorkerSpans:
    """Records one worker's spans. What they need of an attempt stands in its `times`."""

    telemetry: Telemetry
    worker_id: str

    def stepped(self, result: StepResult, find: Callable[[int], Attempt | None]) -> None:
        """Record an engine step where one of its attempts is traced, and what of them it has brought to its end."""
        # Find the traced attempts of the step, and count the sequences whose first step it is.
        linked: list[tuple[list[str], str]] = []
        num_new = 0
        for number, _ in result.computed:
            attempt = find(number)
            if attempt is None:
                continue
            num_new += attempt.times.first_step_ns == result.started_ns
            if attempt.times.is_sampled:
                self._link(attempt, result.ended_ns, linked)
        # Record the step once, in a trace of its own, with links to the attempts' spans and from them.
        if linked:
            step = self.telemetry.record_apart(
                SpanName.ENGINE_STEP,
                (result.started_ns, result.ended_ns),
                {
                    Key.WORKER: self.worker_id,
                    Key.BATCH_SIZE: len(result.computed),
                    Key.NUM_NEW_SEQUENCES: num_new,
                    Key.NUM_PREEMPTED_SEQUENCES: result.num_preempted,
                    Key.NUM_PREFILL_TOKENS: result.num_prefill_tokens,
                    Key.NUM_DECODE_TOKENS: result.num_decode_tokens,
                },
                links=[traceparent for _, traceparent in linked],
            )
            for steps, _ in linked:
                steps.append(step)
        # Record what ends with this step: a prompt's computation at its first token, an answer's decoding at its last.
        for sampled in result.sampled:
            attempt = find(sampled.number)
            if attempt is None or not attempt.times.first_step_ns:
                continue
            times = attempt.times
            if times.computes_prompt and not times.has_prefill:
                self._record_prefill(attempt, times.first_token_ns)
            if sampled.local_end and times.decodes:
                self._record_decode(attempt, times.last_step_ns, sampled.finish_reason or "")

    def ended(self, attempt: Attempt) -> None:
        """An attempt goes on here no more: record what of it has not been."""
        times, outcome, is_decode = attempt.times, attempt.outcome, attempt.part == Part.DECODE
        now_ns, error = time.monotonic_ns(), "" if attempt.end is AttemptEnd.COMPLETE else outcome
        if (wait := attempt.wait) is not None:
            end_ns = now_ns if wait.duplicate is not None else wait.ended_ms * 1_000_000
            attributes = self._attributes(attempt.key, "") | {Key.DUPLICATE: wait.request_id}
            self.telemetry.record(
                SpanName.DUPLICATE_WAIT, attempt.traceparent, (wait.began_ms * 1_000_000, end_ns), attributes
            )
        if not times.has_prefill and (not is_decode or times.computes_prompt):
            self._record_prefill(attempt, now_ns, outcome, error)
        is_begun = bool(times.submitted_ns if is_decode else times.first_token_ns)
        if (is_decode or times.decodes) and not times.has_decode and (is_begun or (is_decode and outcome)):
            self._record_decode(attempt, now_ns, outcome, error)

    def _link(self, attempt: Attempt, ended_ns: int, linked: list[tuple[list[str], str]]) -> None:
        """Note what a step that ended then is to be linked to, within the bounds: the step with the first token is the
        prompt's."""
        times = attempt.times
        if times.computes_prompt and times.first_token_ns in (0, ended_ns):
            if len(times.compute_steps) < MAX_LINKED_STEPS:
                times.compute = times.compute or self.telemetry.child_of(attempt.traceparent)
                linked.append((times.compute_steps, times.compute))
        elif len(times.stream_steps) < MAX_LINKED_STEPS:
            times.stream = times.stream or self.telemetry.child_of(attempt.traceparent)
            linked.append((times.stream_steps, times.stream))

    def _record_prefill(self, attempt: Attempt, end_ns: int, outcome: str = "", error: str = "") -> None:
        times = attempt.times
        times.has_prefill = True
        record, first_step_ns = self.telemetry.record, times.first_step_ns or end_ns
        span_ns = (times.accepted_ns, end_ns)
        attributes = self._attributes(attempt.key, outcome) | {Key.NUM_TOKENS: times.num_prompt_tokens}
        parent = record(SpanName.PREFILL, attempt.traceparent, span_ns, attributes, error=error)
        record(SpanName.PREFILL_QUEUE, parent, (times.accepted_ns, first_step_ns), {})
        if times.first_step_ns:
            compute_ns = (first_step_ns, end_ns)
            record(SpanName.PREFILL_COMPUTE, parent, compute_ns, {}, own=times.compute, links=times.compute_steps)

    def _record_decode(self, attempt: Attempt, end_ns: int, outcome: str, error: str = "") -> None:
        times = attempt.times
        times.has_decode = True
        record, started_ns = self.telemetry.record, times.submitted_ns or times.accepted_ns
        first_step_ns = times.first_step_ns or end_ns
        first_end_ns = times.first_token_ns or times.last_step_ns or end_ns
        attributes = self._attributes(attempt.key, outcome) | {Key.NUM_TOKENS: times.num_tokens}
        parent = record(SpanName.DECODE, attempt.traceparent, (started_ns, end_ns), attributes, error=error)
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
