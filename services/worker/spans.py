"""The spans that a worker records of each attempt, after the fact and off the engine's thread."""

import time
from dataclasses import dataclass, field

from dataplane.stream import TransferStats
from schemas.ids import LeaseId
from services.engine.base import Sequence, StepResult
from services.telemetry import Attributes, Key, SpanName, Telemetry
from services.worker.actions import AttemptKey

MAX_ATTEMPTS = 4_096
"""An attempt that ends before it reaches the engine has nothing to record, and is dropped here at last."""

MAX_LEASE_TRACES = 1_024
"""A lease that no reader ever opened has no stream that could end."""


@dataclass(slots=True)
class AttemptTimes:
    """When what happened, in Unix ns; 0: not yet."""

    traceparent: str
    accepted_ns: int
    submitted_ns: int = 0
    computes_prompt: bool = False
    first_step_ns: int = 0
    first_token_ns: int = 0
    last_step_ns: int = 0
    num_computed_tokens: int = 0
    num_tokens: int = 0


@dataclass
class WorkerSpans:
    """One worker's spans. An attempt is forgotten once it is recorded."""

    telemetry: Telemetry
    worker_id: str
    _times: dict[AttemptKey, AttemptTimes] = field(default_factory=dict[AttemptKey, AttemptTimes])

    def accepted(self, key: AttemptKey, traceparent: str) -> None:
        self._times.setdefault(key, AttemptTimes(traceparent, time.time_ns()))
        if len(self._times) > MAX_ATTEMPTS:
            del self._times[next(iter(self._times))]

    def submitted(self, sequence: Sequence) -> None:
        if times := self._times.get((sequence.request_id, sequence.attempt)):
            times.submitted_ns = time.time_ns()
            # An answer that goes on after a hand-over has its prompt's KV, and its last token to compute.
            times.computes_prompt = sequence.index == 0 or sequence.num_uncomputed_tokens > 1

    def traceparent(self, key: AttemptKey | None) -> str:
        times = self._times.get(key) if key else None
        return times.traceparent if times else ""

    def stepped(self, result: StepResult) -> None:
        """Note the step's times for its sequences."""
        for sequence, num_tokens in result.computed:
            times = self._times.get((sequence.request_id, sequence.attempt))
            if times is None:
                continue
            times.first_step_ns = times.first_step_ns or result.started_ns
            times.last_step_ns = result.ended_ns
            times.num_computed_tokens = num_tokens
        for sampled in result.sampled:
            if times := self._times.get((sampled.sequence.request_id, sampled.sequence.attempt)):
                times.first_token_ns = times.first_token_ns or result.ended_ns
                times.num_tokens += 1

    def prefilled(self, sequence: Sequence) -> None:
        """Record a prompt's computation, if this was it: queue and compute."""
        times = self._times.get((sequence.request_id, sequence.attempt))
        if times is None or not times.first_step_ns or not times.computes_prompt or times.num_tokens != 1:
            return
        attributes: Attributes = {
            Key.REQUEST_ID: sequence.request_id,
            Key.ATTEMPT: sequence.attempt,
            Key.WORKER: self.worker_id,
            Key.NUM_TOKENS: sequence.num_prompt_tokens,
        }
        span = (times.accepted_ns, times.first_token_ns)
        parent = self.telemetry.record(SpanName.PREFILL, times.traceparent, span, attributes)
        self.telemetry.record(SpanName.PREFILL_QUEUE, parent, (times.accepted_ns, times.first_step_ns), {})
        self.telemetry.record(SpanName.PREFILL_COMPUTE, parent, (times.first_step_ns, times.first_token_ns), {})

    def decoded(self, sequence: Sequence, outcome: str) -> None:
        """Record an answer's computation: queue, first step, stream."""
        times = self._times.get((sequence.request_id, sequence.attempt))
        if times is None or not times.first_step_ns:
            return
        attributes: Attributes = {
            Key.REQUEST_ID: sequence.request_id,
            Key.ATTEMPT: sequence.attempt,
            Key.WORKER: self.worker_id,
            Key.NUM_TOKENS: times.num_tokens,
            Key.OUTCOME: outcome,
        }
        started = times.submitted_ns or times.accepted_ns
        first_end = times.first_token_ns or times.last_step_ns
        parent = self.telemetry.record(
            SpanName.DECODE, times.traceparent, (started, times.last_step_ns), attributes, error=_error_of(outcome)
        )
        self.telemetry.record(SpanName.DECODE_QUEUE, parent, (started, times.first_step_ns), {})
        self.telemetry.record(SpanName.DECODE_FIRST_STEP, parent, (times.first_step_ns, first_end), {})
        self.telemetry.record(SpanName.DECODE_STREAM, parent, (first_end, times.last_step_ns), {})

    def transferred(
        self, traceparent: str, end: str, span_ns: tuple[int, int], stats: TransferStats | None, attributes: Attributes
    ) -> None:
        """Record one end of a transfer. `end` is `source` or `target`; without stats it failed before its start."""
        described = dict(attributes) | {Key.END: end, Key.WORKER: self.worker_id}
        if stats is not None:
            seconds = max(1, stats.last_byte_ns - stats.first_byte_ns) / 1e9
            described |= {
                Key.CARRIER: stats.carrier,
                Key.NUM_BYTES: stats.num_bytes,
                Key.WIRE_DTYPE: stats.wire_dtype,
                Key.NUM_WIRE_BYTES: stats.num_wire_bytes,
                Key.LEASE_WAIT_MS: (stats.opened_ns - span_ns[0]) / 1e6,
                Key.FIRST_BYTE_MS: (stats.first_byte_ns - stats.opened_ns) / 1e6,
                Key.VERIFY_MS: stats.verify_ns / 1e6,
                Key.GB_PER_S: stats.num_bytes / seconds / 1e9,
            }
        error = _error_of(str(described.get(Key.OUTCOME, "")))
        self.telemetry.record(SpanName.KV_TRANSFER, traceparent, span_ns, described, error=error)

    def released(self, traceparent: str, since_ns: int, lease_id: LeaseId, num_blocks: int, outcome: str) -> None:
        """Record the end of a lease. Its absence from a trace is a leak."""
        self.telemetry.record(
            SpanName.KV_RELEASE,
            traceparent,
            (since_ns, time.time_ns()),
            {
                Key.WORKER: self.worker_id,
                Key.LEASE: lease_id,
                Key.NUM_BLOCKS: num_blocks,
                Key.OUTCOME: outcome,
            },
            error=_error_of(outcome),
        )

    def first_token_ns(self, key: AttemptKey) -> int:
        """Return when the prompt's last step ended, or now where it has not."""
        times = self._times.get(key)
        return times.first_token_ns if times and times.first_token_ns else time.time_ns()

    def forget(self, key: AttemptKey) -> None:
        self._times.pop(key, None)


@dataclass(slots=True)
class LeaseTrace:
    """What the spans of a lease need: of its stream, and of its release."""

    key: AttemptKey
    traceparent: str
    granted_ns: int
    is_lent: bool = False
    """Not of a hand-over: the attempt is another worker's, or still under way here."""
    is_served: bool = False
    is_released: bool = False


@dataclass
class LeaseTraces:
    """The leases that are granted, as far as their spans are not recorded."""

    spans: WorkerSpans
    _traces: dict[LeaseId, LeaseTrace] = field(default_factory=dict[LeaseId, LeaseTrace])

    def granted(self, lease_id: LeaseId, trace: LeaseTrace) -> None:
        self._traces[lease_id] = trace
        if len(self._traces) > MAX_LEASE_TRACES:
            del self._traces[next(iter(self._traces))]

    def served(self, lease_id: LeaseId, stats: TransferStats | None, error: str) -> None:
        """Record the source's end of a transfer."""
        trace = self._traces.get(lease_id)
        if trace is None:
            return
        attributes = {
            Key.REQUEST_ID: trace.key[0],
            Key.ATTEMPT: trace.key[1],
            Key.LEASE: lease_id,
            Key.OUTCOME: error or "landed",
        }
        self.spans.transferred(trace.traceparent, "source", (trace.granted_ns, time.time_ns()), stats, attributes)
        trace.is_served = True
        self._drop(lease_id, trace)

    def ended(self, lease_id: LeaseId, num_blocks: int, reason: str) -> None:
        """Record a lease's release."""
        trace = self._traces.get(lease_id)
        if trace is None:
            return
        since_ns = trace.granted_ns if trace.is_lent else self.spans.first_token_ns(trace.key)
        self.spans.released(trace.traceparent, since_ns, lease_id, num_blocks, reason)
        if not trace.is_lent:
            self.spans.forget(trace.key)
        trace.is_released = True
        self._drop(lease_id, trace)

    def _drop(self, lease_id: LeaseId, trace: LeaseTrace) -> None:
        """Forget it once the lease has ended and its stream as well; either may come first, and a stream that broke
        before its reader heard a word may be followed by another."""
        if trace.is_served and trace.is_released:
            self._traces.pop(lease_id, None)


def _error_of(outcome: str) -> str:
    return "" if outcome in ("", "landed", "stop", "length") else outcome
