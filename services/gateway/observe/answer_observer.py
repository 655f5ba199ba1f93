"""Records the spans and metrics of an HTTP request: it hears of each moment once.

An answer has one `AnswerObserver`, and a `ChoiceObserver` for each of its choices. Times are ns and
seconds by the monotonic clock.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from schemas.ids import RequestId, WorkerId
from schemas.request import FirstTokenTimes
from services import metric_names as names
from services.gateway import limits
from services.gateway.observe.metrics import GatewayMetrics
from services.gateway.observe.ttft_parts import Milestones, fit_clock, ttft_parts
from services.gateway.request.answer_usage import AnswerUsage
from services.gateway.request.core import RequestCore
from services.gateway.request.events import PlaceEvent, PlaceGranted, PlaceRefused, PlaceUnanswered
from services.gateway.request.job import Job
from services.telemetry import AttributeValue, Key, SpanName, Telemetry, is_sampled, trace_id_of

OPERATIONS = {"/v1/completions": "text_completion", "/v1/chat/completions": "chat", "/v1/responses": "chat"}
"""Routes as the semantic conventions call them."""


class Dispatch(NamedTuple):
    """An attempt that was sent to a worker."""

    attempt: int
    role: str
    worker_id: WorkerId
    sent_ns: int


@dataclass(slots=True)
class ChoiceObserver:
    """Is told what happens to one choice's attempts."""

    telemetry: Telemetry
    job: Job
    core: RequestCore
    submitted_ns: int = field(default_factory=lambda: time.monotonic_ns())
    attempt: int = 0
    asked_ns: int = 0
    """When the attempt under way was to be placed."""
    placed_ns: int = 0
    """When the attempt under way was placed."""
    written_s: float = 0.0
    """When tokens were last written to the client."""
    _moved: tuple[WorkerId, int] | None = None
    """Who has given the answer away that has not gone on yet, and when."""
    _answered: set[str] = field(default_factory=set[str])
    """The roles whose workers are known to have taken the attempt under way, or not."""

    def asks(self, attempt: int) -> int:
        """The attempt is to be placed, perhaps once more. Return the present time."""
        now_ns = time.monotonic_ns() if attempt > 1 or self.attempt else self.submitted_ns
        if attempt != self.attempt:
            self.attempt, self.asked_ns, self._answered = attempt, now_ns, set()
        return now_ns

    def placed(self, event: PlaceEvent, asked_ns: int) -> None:
        """A scheduler has answered what it was asked at `asked_ns`, or has not."""
        now_ns, error = time.monotonic_ns(), ""
        attributes: dict[str, AttributeValue] = {Key.REQUEST_ID: self.job.request_id, Key.ATTEMPT: event.attempt}
        match event:
            case PlaceGranted(placement=placement):
                self.placed_ns = now_ns
                attributes[Key.PREFILL_WORKER] = placement.prefill_worker
                attributes[Key.DECODE_WORKER] = placement.decode_worker or ""
                attributes[Key.SOURCES] = ", ".join(
                    f"{s.worker_id}: blocks {s.first_block} to {s.first_block + s.num_blocks}"
                    for s in placement.sources
                )
                if placement.terms is not None:
                    terms: dict[str, AttributeValue] = msgspec.structs.asdict(placement.terms)
                    attributes |= {f"{Key.PLACE_TERM}.{name}": value for name, value in terms.items()}
            case PlaceRefused():
                error = event.reason
            case PlaceUnanswered():
                error = event.detail
        self.telemetry.record(SpanName.PLACE, self.job.trace, (asked_ns, now_ns), attributes, error=error)

    def dispatched(self, sent: Dispatch, accepted_ns: int = 0, error: str = "") -> None:
        """A worker has taken an attempt, at this time by the gateway's clock (0: unknown), or has not."""
        if sent.attempt == self.attempt:
            if sent.role in self._answered:
                return  # its first token came before its reply
            self._answered.add(sent.role)
        now_ns = time.monotonic_ns()
        attributes: dict[str, AttributeValue] = {
            Key.REQUEST_ID: self.job.request_id,
            Key.ATTEMPT: sent.attempt,
            Key.WORKER: sent.worker_id,
            Key.ROLE: sent.role,
        }
        span_ns = (sent.sent_ns, min(max(accepted_ns, sent.sent_ns), now_ns) if accepted_ns else now_ns)
        self.telemetry.record(SpanName.DISPATCH, self.job.trace, span_ns, attributes, error=error)

    def is_moved(self) -> None:
        """An attempt begins, perhaps because a worker has given the one before away."""
        if self.core.moved_by is not None and self._moved is None:
            self._moved = (self.core.moved_by, time.monotonic_ns())

    def goes_on(self) -> None:
        """Tokens are here: an answer that was given away has moved."""
        if self._moved is None:
            return
        (worker_id, moved_ns), self._moved = self._moved, None
        attributes: dict[str, AttributeValue] = {
            Key.REQUEST_ID: self.job.request_id,
            Key.ATTEMPT: self.core.attempt,
            Key.WORKER: worker_id,
            Key.DECODE_WORKER: self.core.decode_worker or self.core.prefill_worker or "",
        }
        self.telemetry.record(SpanName.MOVE, self.job.trace, (moved_ns, time.monotonic_ns()), attributes)

    def first_token(self, read_ns: int) -> dict[str, float]:
        """Token 0 was written just now. Return the parts of the TTFT in seconds; none where its worker sent no times.

        `read_ns`: when the request's body had been read.
        """
        written_ns, core = time.monotonic_ns(), self.core
        reports = (core.prefill_report, core.report)
        times = next((r.first_token for r in reports if r is not None and r.first_token is not None), None)
        fitted = fit_clock(self._undated(times), self.placed_ns, written_ns) if times else None
        if fitted is not None:
            worker_id = core.prefill_worker or WorkerId("")
            self.dispatched(Dispatch(self.attempt, "prefill", worker_id, self.placed_ns), fitted.accepted_ns)
        attributes: dict[str, AttributeValue] = {Key.REQUEST_ID: self.job.request_id, Key.ATTEMPT: self.attempt}
        started_ns = fitted.computed_ns if fitted else written_ns
        self.telemetry.record(SpanName.FIRST_TOKEN, self.job.trace, (started_ns, written_ns), attributes)
        seen = Milestones(read_ns, self.submitted_ns, self.asked_ns, self.placed_ns, written_ns)
        return ttft_parts(seen, fitted) if fitted else {}

    def _undated(self, times: FirstTokenTimes) -> FirstTokenTimes:
        at_ns = self.telemetry.clock.at_ns
        return FirstTokenTimes(
            accepted_ns=at_ns(times.accepted_ns),
            first_step_ns=at_ns(times.first_step_ns),
            computed_ns=at_ns(times.computed_ns),
        )


class AnswerObserver:
    """Is told what happens to one HTTP request, from its body having been read to its end.

    `parent`: the client's traceparent. `keep` has a trace exported that was not sampled (its id, and why), and says
    whether it has.
    """

    def __init__(
        self,
        request_id: RequestId,
        route: str,
        parent: str,
        metrics: GatewayMetrics,
        telemetry: Telemetry,
        keep: Callable[[str, str], bool],
    ) -> None:
        self.request_id = request_id
        self._route = route
        self._metrics = metrics.registry
        self._model = metrics.model
        self._gen_ai = (OPERATIONS[route], names.PROVIDER, metrics.model)
        self._config = telemetry.config
        self._keep = keep
        self._read_s = time.monotonic()
        self._last_written_s = 0.0
        self._ttft_s: float | None = None
        named = {Key.REQUEST_ID: request_id}
        self._root = telemetry.start(f"POST {route}", parent, named, server=True)
        self.trace = self._root.traceparent
        self._tokenize = telemetry.start(SpanName.TOKENIZE, self.trace, named, start_ns=self._root.start_ns)

    def refused(self, status: int, outcome: str, message: str) -> None:
        """The request has ended before it was understood, or placed."""
        self._metrics.inc(names.REQUESTS, self._route, str(status), outcome)
        self._tokenize.end(error=outcome)
        self._root.end({Key.OUTCOME: outcome, Key.HTTP_STATUS: status}, message)

    def broke(self, error: BaseException) -> None:
        """The gateway itself has failed over the request; its error goes on to whoever reports it."""
        self._tokenize.end(error=type(error).__name__)
        self._root.end({Key.OUTCOME: "failed", Key.HTTP_STATUS: 500}, type(error).__name__)

    def tokenized(self, num_prompt_tokens: int) -> None:
        """The request is understood, and is placed now."""
        self._root.attributes[Key.MODEL] = self._model
        self._tokenize.end({Key.NUM_TOKENS: num_prompt_tokens})

    def wrote(self, choices: Iterable[ChoiceObserver]) -> None:
        """Tokens of these choices were written just now, all at once."""
        now_s = time.monotonic()
        for choice in choices:
            if 0.0 < choice.written_s < now_s:
                self._metrics.observe(names.ITL, now_s - choice.written_s)
            choice.written_s = self._last_written_s = now_s
            if self._ttft_s is None:
                self._ttft_s = now_s - self._read_s
                self._metrics.observe(names.TTFT, self._ttft_s, *self._gen_ai, trace=self.trace)
                for part, seconds in choice.first_token(self._root.start_ns).items():
                    self._root.attributes[f"{Key.TTFT_PART}.{part}_ms"] = seconds * 1000
                    self._metrics.observe(names.TTFT_PART, seconds, part, trace=self.trace)

    def ended(self, status: int, outcome: str, error: str, served: AnswerUsage) -> None:
        """A request that was placed has ended, however it did. `status`: of the response, 0 where none has begun.
        `error`: for people; empty where all went well."""
        duration_s = time.monotonic() - self._read_s
        self._count(status, outcome, duration_s, served)
        attributes: dict[str, AttributeValue] = {
            Key.INPUT_TOKENS: served.num_prompt_tokens,
            Key.OUTPUT_TOKENS: served.num_completion_tokens,
            Key.PREFILL_WORKER: served.prefill_worker or "",
            Key.DECODE_WORKER: served.decode_worker or "",
            Key.ATTEMPT: served.attempt,
            Key.OUTCOME: outcome,
        }
        if status:
            attributes[Key.HTTP_STATUS] = status
        if self._ttft_s is not None:
            attributes[Key.TTFT_MS] = self._ttft_s * 1000
        reasons = {
            "failed": bool(error) and outcome != "client_gone",
            "resumed": served.num_retries > 0,
            "slow first token": self._ttft_s is not None and self._ttft_s * 1000 > self._config.slow_ttft_ms,
            "slow": duration_s * 1000 > self._config.slow_request_ms,
        }
        why = next((reason for reason, applies in reasons.items() if applies), "")
        if why and not is_sampled(self.trace) and self._keep(trace_id_of(self.trace), why):
            attributes[Key.KEPT] = why
        self._root.end(attributes, error)

    def _count(self, status: int, outcome: str, duration_s: float, served: AnswerUsage) -> None:
        metrics, labels, trace = self._metrics, self._gen_ai, self.trace
        error_type = "" if outcome == "ok" else outcome
        metrics.inc(names.REQUESTS, self._route, str(status), outcome, trace=trace)
        metrics.observe(names.DURATION, duration_s, *labels, error_type, trace=trace)
        metrics.observe(names.TOKEN_USAGE, served.num_prompt_tokens, *labels, "input", trace=trace)
        metrics.observe(names.TOKEN_USAGE, served.num_completion_tokens, *labels, "output", trace=trace)
        num_after_first = served.num_completion_tokens // served.num_choices - 1
        if self._ttft_s is not None and num_after_first > 0:
            tpot_s = max(0.0, self._last_written_s - self._read_s - self._ttft_s) / num_after_first
            metrics.observe(names.TPOT, tpot_s, *labels, trace=trace)
        sources = served.sources
        metrics.inc(names.PROMPT_TOKENS, "cached", by=sources.cached_tokens)
        metrics.inc(names.PROMPT_TOKENS, "transferred", by=sources.transferred_tokens)
        metrics.inc(names.PROMPT_TOKENS, "recomputed", by=sources.recomputed_tokens)
        metrics.inc(names.RETRIES, by=served.num_retries)


@dataclass
class KeepRate:
    """How many traces that were not sampled a gateway has kept in the present second."""

    _second: int = 0
    _num_kept: int = 0

    def allows_one_more(self) -> bool:
        """Count a trace that is to be kept. False: there were enough of them in this second."""
        second = time.monotonic_ns() // 1_000_000_000
        self._num_kept = self._num_kept + 1 if second == self._second else 1
        self._second = second
        return self._num_kept <= limits.MAX_KEEPS_PER_S
