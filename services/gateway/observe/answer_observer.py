"""Records the spans and metrics of an HTTP request: it is notified of each moment once.

An answer has one `AnswerObserver`; the steps of its choices are seen by `ChoiceSpans`. Times are ns and seconds by the
monotonic clock.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import msgspec

from schemas.ids import RequestId, WorkerId
from schemas.request import FirstTokenTimes
from services import metric_names as names
from services.gateway import limits
from services.gateway.observe.metrics import GatewayMetrics
from services.gateway.observe.ttft_parts import Milestones, fit_clock, ttft_parts
from services.gateway.request.answer_usage import AnswerUsage
from services.gateway.request.events import (
    Abandon,
    Action,
    AskPlacement,
    Deliver,
    Event,
    FailRequest,
    Finish,
    PlaceEvent,
    PlaceGranted,
    PlaceRefused,
    PlaceUnanswered,
    SendAttempt,
    SendCancel,
    WorkerAccepted,
    WorkerRefused,
    WorkerSilent,
)
from services.gateway.request.live import Dispatch, LiveRequest
from services.telemetry import Attributes, AttributeValue, Key, SpanName, Telemetry, is_sampled, trace_id_of

OPERATIONS = {"/v1/completions": "text_completion", "/v1/chat/completions": "chat", "/v1/responses": "chat"}
"""Routes as the semantic conventions call them."""


@dataclass(slots=True)
class ChoiceSpans:
    """Records the spans of choices: it sees each step of their cores. What it needs of one stands in its `times`.
    `role_of`: a worker's role; empty where it is not known."""

    telemetry: Telemetry
    role_of: Callable[[WorkerId], str]

    def saw(self, live: LiveRequest, event: Event | None, actions: Sequence[Action]) -> None:
        """See one step: what has happened (None: time has passed), and what was decided on it."""
        # The event first: it ends the span of the question that it answers.
        match event:
            case PlaceGranted() | PlaceRefused() | PlaceUnanswered():
                self._placed(live, event)  # nothing where its request has ended meanwhile
            case WorkerAccepted(attempt=attempt, worker_id=worker_id, accepted_ns=accepted_ns):
                self._answered(live, attempt, worker_id, accepted_ns and self.telemetry.clock.at_ns(accepted_ns))
            case WorkerRefused(attempt=attempt, worker_id=worker_id, reason=error):
                self._answered(live, attempt, worker_id, error=error)
            case WorkerSilent(attempt=attempt, worker_id=worker_id, detail=error):
                self._answered(live, attempt, worker_id, error=error)
            case _:
                pass
        # Then the actions: tokens end a migration's span, and others begin a span, whose start `times` keeps.
        times = live.times
        for action in actions:
            match action:
                case Deliver():
                    self._goes_on(live)
                case SendAttempt(attempt=attempt, worker_id=worker_id, upstream=upstream):
                    part = "prefill" if upstream is None else "decode"
                    times.sent[attempt, worker_id] = Dispatch(part, times.placed_ns)
                # A request may end while a placement is asked for: that question's span ends with it.
                case Finish() | FailRequest() | Abandon():
                    self._placed(live, PlaceUnanswered(live.core.attempt, "the request has ended"))
                # A migration begins with the cancel already: the next placement may come only after a pause.
                case SendCancel() | AskPlacement():
                    if live.core.moved_by is not None and times.moved is None:
                        times.moved = live.core.moved_by, time.monotonic_ns()
                    if isinstance(action, AskPlacement):
                        self._asks(live, action.attempt)
                case _:
                    pass

    def _asks(self, live: LiveRequest, attempt: int) -> None:
        """The attempt is to be placed, perhaps once more."""
        times = live.times
        times.place_trace = self.telemetry.child_of(live.job.trace)
        times.asked_again_ns = time.monotonic_ns() if times.attempt else times.submitted_ns
        if attempt != times.attempt:
            times.attempt, times.asked_ns = attempt, times.asked_again_ns

    def _placed(self, live: LiveRequest, event: PlaceEvent) -> None:
        """A scheduler has answered, or has not. Once for each question, below which its own spans lie."""
        # Take the open question: once the request's end has recorded it, a late answer finds none.
        own, live.times.place_trace = live.times.place_trace, ""
        if not own:
            return
        now_ns, error = time.monotonic_ns(), ""
        attributes: dict[str, AttributeValue] = {Key.REQUEST_ID: live.job.request_id, Key.ATTEMPT: event.attempt}
        # Note the decision and its terms, so that a person can see in the trace why it was made.
        match event:
            case PlaceGranted(placement=placement):
                live.times.placed_ns = now_ns
                attributes[Key.PREFILL_WORKER] = placement.prefill_worker
                attributes[Key.DECODE_WORKER] = placement.decode_worker or ""
                attributes[Key.SOURCES] = ", ".join(
                    f"{s.worker_id}: blocks {s.first_block} to {s.first_block + s.num_blocks}"
                    for s in placement.sources
                )
                if placement.reuse is not None:
                    attributes[Key.REUSE] = placement.reuse
                if placement.terms is not None:
                    terms: dict[str, AttributeValue] = msgspec.structs.asdict(placement.terms)
                    attributes |= {f"{Key.PLACE_TERM}.{name}": value for name, value in terms.items()}
            case PlaceRefused():
                error = event.reason
            case PlaceUnanswered():
                error = event.detail
        # The span begins with this question, which may repeat an earlier one of the same attempt.
        span_ns = (live.times.asked_again_ns, now_ns)
        self.telemetry.record(
            SpanName.PLACE,
            live.job.trace,
            span_ns,
            attributes,
            error=error,
            own=own,
            peer="scheduler",
        )

    def _answered(
        self, live: LiveRequest, attempt: int, worker_id: WorkerId, accepted_ns: int = 0, error: str = ""
    ) -> None:
        """A worker has taken an attempt, at this time by the gateway's clock (0: unknown), or has not. Its first token
        may have come before its reply."""
        if (sent := live.times.sent.pop((attempt, worker_id), None)) is None:
            return
        now_ns = time.monotonic_ns()
        attributes: dict[str, AttributeValue] = {
            Key.REQUEST_ID: live.job.request_id,
            Key.ATTEMPT: attempt,
            Key.WORKER: worker_id,
            Key.ROLE: sent.role,
        }
        span_ns = (sent.sent_ns, min(max(accepted_ns, sent.sent_ns), now_ns) if accepted_ns else now_ns)
        role = self.role_of(worker_id)
        self.telemetry.record(SpanName.DISPATCH, live.job.trace, span_ns, attributes, error=error, peer=role)

    def _goes_on(self, live: LiveRequest) -> None:
        """Tokens are here: an answer that was migrated has moved."""
        if live.times.moved is None:
            return
        (worker_id, moved_ns), live.times.moved = live.times.moved, None
        attributes: dict[str, AttributeValue] = {
            Key.REQUEST_ID: live.job.request_id,
            Key.ATTEMPT: live.core.attempt,
            Key.WORKER: worker_id,
            Key.DECODE_WORKER: live.core.decode_worker or live.core.prefill_worker or "",
        }
        self.telemetry.record(SpanName.MOVE, live.job.trace, (moved_ns, time.monotonic_ns()), attributes)

    def first_token(self, live: LiveRequest, read_ns: int, written_ns: int) -> dict[str, float]:
        """Token 0 was written. Return the parts of the TTFT in seconds, from the request's body having been read; none
        where its worker sent no times."""
        core, times = live.core, live.times
        reports = (core.prefill_report, core.report)
        reported = next((r.first_token for r in reports if r is not None and r.first_token is not None), None)
        fitted = fit_clock(self._undated(reported), times.placed_ns, written_ns) if reported else None
        if fitted is not None and core.prefill_worker is not None:
            self._answered(live, times.attempt, core.prefill_worker, fitted.accepted_ns)
        attributes: dict[str, AttributeValue] = {Key.REQUEST_ID: live.job.request_id, Key.ATTEMPT: times.attempt}
        started_ns = fitted.computed_ns if fitted else written_ns
        self.telemetry.record(SpanName.FIRST_TOKEN, live.job.trace, (started_ns, written_ns), attributes)
        seen = Milestones(read_ns, times.submitted_ns, times.asked_ns, times.placed_ns, written_ns)
        return ttft_parts(seen, fitted) if fitted else {}

    def _undated(self, times: FirstTokenTimes) -> FirstTokenTimes:
        at_ns = self.telemetry.clock.at_ns
        return FirstTokenTimes(
            accepted_ns=at_ns(times.accepted_ns),
            first_step_ns=at_ns(times.first_step_ns),
            computed_ns=at_ns(times.computed_ns),
        )


class AnswerObserver:
    """Is notified of what happens to one HTTP request, from its body having been read to its end.

    `parent`: the client's traceparent. `asked`: what its span has of the request's own words. `keep` has a trace
    exported that was not sampled (its id, and why), and returns whether it has.
    """

    def __init__(
        self,
        request_id: RequestId,
        route: str,
        parent: str,
        asked: Attributes,
        metrics: GatewayMetrics,
        spans: ChoiceSpans,
        keep: Callable[[str, str], bool],
    ) -> None:
        self.request_id = request_id
        self._route = route
        self._metrics = metrics.registry
        self._model = metrics.model
        self._gen_ai = (OPERATIONS[route], names.PROVIDER, metrics.model)
        self._config = spans.telemetry.config
        self._spans = spans
        self._keep = keep
        self._last_written_s = 0.0
        self._ttft_s: float | None = None
        # The root span begins now, and tokenizing with it. TTFT counts from the same moment: the body has been read.
        telemetry, named = spans.telemetry, {Key.REQUEST_ID: request_id}
        described = {
            Key.HTTP_METHOD: "POST",
            Key.HTTP_ROUTE: str(route),
            Key.OPERATION: OPERATIONS[route],
            Key.PROVIDER: names.PROVIDER,
        }
        self._root = telemetry.begin_span(f"POST {route}", parent, {**named, **described, **asked}, server=True)
        self._read_s = self._root.start_ns / 1e9
        self.trace = self._root.traceparent
        self._tokenize = telemetry.begin_span(SpanName.TOKENIZE, self.trace, named, start_ns=self._root.start_ns)

    def refused(self, status: int, outcome: str, message: str) -> None:
        """The request has ended before it was understood, or placed."""
        self._metrics.inc(names.REQUESTS, self._route, str(status), outcome)
        self._tokenize.end({Key.OUTCOME: outcome}, "" if _is_clients(status, outcome) else outcome)
        self._end(status, outcome, message, {})

    def broke(self, error: BaseException) -> None:
        """The gateway itself has failed over the request; its error goes on to whoever reports it."""
        self._tokenize.end(error=type(error).__name__)
        self._end(500, "failed", type(error).__name__, {})

    def submitted(self, num_prompt_tokens: int, submitted_ns: int) -> None:
        """The request was understood, and is being placed since then."""
        self._root.attributes[Key.MODEL] = self._model
        self._tokenize.end({Key.NUM_TOKENS: num_prompt_tokens}, end_ns=submitted_ns)

    def wrote(self, choices: Iterable[LiveRequest]) -> None:
        """Tokens of these choices were written just now, all at once."""
        now_s = (now_ns := time.monotonic_ns()) / 1e9
        for choice in choices:
            if 0.0 < choice.times.written_s < now_s:
                self._metrics.observe(names.ITL, now_s - choice.times.written_s)
            choice.times.written_s = self._last_written_s = now_s
            if self._ttft_s is None:
                self._ttft_s = now_s - self._read_s
                self._metrics.observe(names.TTFT, self._ttft_s, *self._gen_ai, trace=self.trace)
                for part, seconds in self._spans.first_token(choice, self._root.start_ns, now_ns).items():
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
        }
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
        self._end(status, outcome, error, attributes)

    def _end(self, status: int, outcome: str, error: str, attributes: Attributes) -> None:
        """Record the root span. By the semantic conventions a server's is an error where the server has failed, and not
        for what the client has done (https://opentelemetry.io/docs/specs/semconv/http/http-spans)."""
        ended: dict[str, AttributeValue] = {**attributes, Key.OUTCOME: outcome}
        if status:
            ended[Key.HTTP_STATUS] = status
        if error and _is_clients(status, outcome):
            ended[Key.REFUSAL], error = error, ""
        elif error:
            ended[Key.ERROR_TYPE] = outcome
        self._root.end(ended, error)

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


def _is_clients(status: int, outcome: str) -> bool:
    """Return whether what has gone wrong is the client's."""
    return 400 <= status < 500 or outcome in ("client_gone", "slow_client")


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
