"""What a gateway measures: its requests as they end, and those under way when it is asked."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from schemas.ids import WorkerId
from schemas.worker import BlockCounts
from services import metric_names as names
from services.gateway.request.prompt_sources import PromptSources
from services.metrics import Metrics

OPERATIONS = {"/v1/completions": "text_completion", "/v1/chat/completions": "chat"}
"""Routes as the semantic conventions call them."""


class Observed(Protocol):
    """What is looked at (`Requests`)."""

    num_resumes: int
    num_progress_asked: int

    @property
    def num_live(self) -> int: ...

    def ages_s(self) -> list[float]: ...

    def overdue_s(self) -> float: ...

    def block_counts(self) -> dict[WorkerId, BlockCounts]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedRequest:
    """One HTTP request, as it ended. `ttft_s` None: it never had a token. `last_s`: from the body being read to the
    last token being written."""

    route: str
    status: int
    outcome: str
    traceparent: str
    duration_s: float
    ttft_s: float | None
    last_s: float
    num_prompt_tokens: int
    num_completion_tokens: int
    num_choices: int
    num_retries: int
    sources: PromptSources


class GatewayMetrics:
    """`model`: what clients call it."""

    def __init__(self, metrics: Metrics, model: str, observed: Observed) -> None:
        self._metrics = metrics
        self._model = model
        self._observed = observed
        metrics.on_sample(self._sample)

    def refused(self, route: str, status: int, outcome: str) -> None:
        """A request ended before it was placed."""
        self._metrics.inc(names.REQUESTS, route, str(status), outcome)

    def first_token(self, route: str, ttft_s: float, traceparent: str) -> None:
        """Token 0 was written."""
        self._metrics.observe(names.TTFT, ttft_s, *self._gen_ai(route), traceparent=traceparent)

    def observe_ttft_parts(self, parts: Mapping[str, float], traceparent: str = "") -> None:
        """Take in where a time to first token went: seconds by part (`metric_names.TTFT_PARTS`)."""
        for part, seconds in parts.items():
            self._metrics.observe(names.TTFT_PART, seconds, part, traceparent=traceparent)

    def token_gap(self, gap_s: float) -> None:
        """Two writes of tokens of one choice lay this far apart."""
        self._metrics.observe(names.ITL, gap_s)

    def ended(self, request: EndedRequest) -> None:
        """A request that was placed has ended, however it did."""
        metrics, labels, trace = self._metrics, self._gen_ai(request.route), request.traceparent
        error_type = "" if request.outcome == "ok" else request.outcome
        metrics.inc(names.REQUESTS, request.route, str(request.status), request.outcome, traceparent=trace)
        metrics.observe(names.DURATION, request.duration_s, *labels, error_type, traceparent=trace)
        metrics.observe(names.TOKEN_USAGE, request.num_prompt_tokens, *labels, "input", traceparent=trace)
        metrics.observe(names.TOKEN_USAGE, request.num_completion_tokens, *labels, "output", traceparent=trace)
        num_after_first = request.num_completion_tokens // request.num_choices - 1
        if request.ttft_s is not None and num_after_first > 0:
            tpot_s = max(0.0, request.last_s - request.ttft_s) / num_after_first
            metrics.observe(names.TPOT, tpot_s, *labels, traceparent=trace)
        sources = request.sources
        metrics.inc(names.PROMPT_TOKENS, "cached", by=sources.cached_tokens)
        metrics.inc(names.PROMPT_TOKENS, "transferred", by=sources.transferred_tokens)
        metrics.inc(names.PROMPT_TOKENS, "recomputed", by=sources.recomputed_tokens)
        metrics.inc(names.RETRIES, by=request.num_retries)

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """Return the text and its content type."""
        self._metrics.sample()
        return self._metrics.render(accept)

    def _gen_ai(self, route: str) -> tuple[str, str, str]:
        return OPERATIONS[route], names.PROVIDER, self._model

    def _sample(self) -> None:
        observed, put = self._observed, self._metrics.put
        ages_s = observed.ages_s()
        put(names.RESUMES, {(): observed.num_resumes})
        put(names.PROGRESS_ASKED, {(): observed.num_progress_asked})
        put(names.RUNNING, {(): observed.num_live})
        put(names.UNFINISHED, {(age,): count for age, count in names.by_age(ages_s).items()})
        put(names.OLDEST_REQUEST, {(): max(ages_s, default=0.0)})
        put(names.OVERDUE, {(): observed.overdue_s()})
        put(
            names.KV_BLOCKS, {key: n for w, counts in observed.block_counts().items() for key, n in by_state(w, counts)}
        )


def by_state(worker_id: str, counts: BlockCounts) -> list[tuple[tuple[str, str], int]]:
    """Return ((worker, state), blocks) of one worker."""
    return [((worker_id, state), getattr(counts, state)) for state in names.BLOCK_STATES]
