"""The spans that a gateway records of a request, and which traces it has kept."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from schemas.ids import WorkerId
from schemas.request import FirstTokenTimes
from services.gateway import limits
from services.gateway.observe.ttft_parts import Milestones, fit_clock, ttft_parts
from services.gateway.request.events import PlaceGranted, PlaceRefused, PlaceUnanswered
from services.gateway.request.job import Job
from services.telemetry import AttributeValue, Key, OpenSpan, SpanName, Telemetry


@dataclass(slots=True)
class AttemptClock:
    """When the attempt under way was to be placed, and was, in Unix ns."""

    submitted_ns: int = field(default_factory=lambda: time.time_ns())
    attempt: int = 0
    asked_ns: int = 0
    placed_ns: int = 0
    dispatched: set[str] = field(default_factory=set[str])
    """The roles whose workers are known to have taken it, or not."""

    def asks(self, attempt: int) -> int:
        """The attempt is to be placed, perhaps once more. Return the present time."""
        now_ns = time.time_ns() if attempt > 1 or self.attempt else self.submitted_ns
        if attempt != self.attempt:
            self.attempt, self.asked_ns, self.dispatched = attempt, now_ns, set()
        return now_ns


class Dispatch(NamedTuple):
    """An attempt sent to a worker."""

    attempt: int
    role: str
    worker_id: WorkerId
    sent_ns: int


@dataclass
class GatewaySpans:
    """One gateway's."""

    telemetry: Telemetry
    _second: int = 0
    _num_kept: int = 0

    def placed(self, job: Job, span_ns: tuple[int, int], event: PlaceGranted | PlaceRefused | PlaceUnanswered) -> None:
        attributes: dict[str, AttributeValue] = {Key.REQUEST_ID: job.request_id, Key.ATTEMPT: event.attempt}
        error = ""
        match event:
            case PlaceGranted():
                attributes[Key.PREFILL_WORKER] = event.prefill_worker
                attributes[Key.DECODE_WORKER] = event.decode_worker or ""
                attributes[Key.SOURCES] = ", ".join(
                    f"{s.worker_id}: blocks {s.first_block} to {s.first_block + s.num_blocks}" for s in event.sources
                )
                if event.terms is not None:
                    terms: dict[str, AttributeValue] = msgspec.structs.asdict(event.terms)
                    attributes |= {f"{Key.PLACE_TERM}.{name}": value for name, value in terms.items()}
            case PlaceRefused():
                error = event.reason
            case PlaceUnanswered():
                error = event.detail
        self.telemetry.record(SpanName.PLACE, job.traceparent, span_ns, attributes, error=error)

    def dispatched(self, job: Job, clock: AttemptClock, sent: Dispatch, accepted_ns: int, error: str = "") -> None:
        """A worker has taken an attempt, at this time by its own clock (0: unknown), or has not."""
        if sent.attempt == clock.attempt:
            if sent.role in clock.dispatched:
                return  # its first token came before its reply
            clock.dispatched.add(sent.role)
        now_ns = time.time_ns()
        attributes: dict[str, AttributeValue] = {
            Key.REQUEST_ID: job.request_id,
            Key.ATTEMPT: sent.attempt,
            Key.WORKER: sent.worker_id,
            Key.ROLE: sent.role,
        }
        span_ns = (sent.sent_ns, min(max(accepted_ns, sent.sent_ns), now_ns) if accepted_ns else now_ns)
        self.telemetry.record(SpanName.DISPATCH, job.traceparent, span_ns, attributes, error=error)

    def first_token(
        self, job: Job, clock: AttemptClock, times: FirstTokenTimes | None, read_ns: int, prefill_worker: WorkerId
    ) -> dict[str, float]:
        """Token 0 has been written just now. Return the parts of the TTFT in seconds; none where its worker sent no
        times."""
        written_ns = time.time_ns()
        fitted = fit_clock(times, clock.placed_ns, written_ns) if times else None
        if fitted is not None:
            sent = Dispatch(clock.attempt, "prefill", prefill_worker, clock.placed_ns)
            self.dispatched(job, clock, sent, fitted.accepted_ns)
        attributes: dict[str, AttributeValue] = {Key.REQUEST_ID: job.request_id, Key.ATTEMPT: clock.attempt}
        started_ns = fitted.computed_ns if fitted else written_ns
        self.telemetry.record(SpanName.FIRST_TOKEN, job.traceparent, (started_ns, written_ns), attributes)
        seen = Milestones(read_ns, clock.submitted_ns, clock.asked_ns, clock.placed_ns, written_ns)
        return ttft_parts(seen, fitted) if fitted else {}

    def keeps(self, root: OpenSpan, story: Mapping[str, bool]) -> str:
        """Return why the trace of a request that has ended is to be kept though it was not sampled; empty: it is not,
        or was sampled. `story`: reasons, and whether they apply."""
        reason = next((reason for reason, applies in story.items() if applies), "")
        if not reason or root.context.is_sampled:
            return ""
        second = time.time_ns() // 1_000_000_000
        self._num_kept = self._num_kept + 1 if second == self._second else 1
        self._second = second
        return reason if self._num_kept <= limits.MAX_KEEPS_PER_S else ""
