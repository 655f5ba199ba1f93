"""The gateway's metrics: one registry per gateway, so that several may live in one process."""

from collections.abc import Callable, Iterator
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from schemas.ids import WorkerId
from schemas.worker import BlockCounts

TTFT_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
DURATION_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
ITL_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class Observed(Protocol):
    """What is read when the metrics are (`Requests`)."""

    num_resumes: int
    num_progress_asked: int

    @property
    def oldest_s(self) -> float: ...

    def block_counts(self) -> dict[WorkerId, BlockCounts]: ...


class GatewayMetrics:
    """`num_dropped`, `num_running` and `observed` are read when the metrics are."""

    def __init__(
        self, num_dropped: Callable[[], float], num_running: Callable[[], float], observed: Observed | None = None
    ) -> None:
        self._registry = CollectorRegistry()
        if observed is not None:
            self._registry.register(ObservedCollector(observed))
        labels = ("route", "status", "outcome")
        self.requests = Counter(
            "kvmesh_gateway_requests", "HTTP requests that have ended", labels, registry=self._registry
        )
        self.ttft = self._histogram("ttft_seconds", "From the body being read to token 0 being written", TTFT_BUCKETS)
        self.duration = self._histogram("request_seconds", "From the body being read to the end", DURATION_BUCKETS)
        self.itl = self._histogram("itl_seconds", "Gap between two writes of tokens of one choice", ITL_BUCKETS)
        self._tokens = Counter(
            "kvmesh_gateway_tokens", "Prompt and completion tokens", ("kind",), registry=self._registry
        )
        self._sources = Counter(
            "kvmesh_gateway_prompt_tokens_by_source",
            "Where the KV of prompts came from",
            ("source",),
            registry=self._registry,
        )
        self._retries = Counter("kvmesh_gateway_retries", "Attempts after a request's first", registry=self._registry)
        running = Gauge("kvmesh_gateway_running_requests", "Requests under way", registry=self._registry)
        running.set_function(num_running)
        dropped = Gauge("kvmesh_gateway_dropped_messages", "Messages that did not decode", registry=self._registry)
        dropped.set_function(num_dropped)
        self.prompt_tokens = self._tokens.labels("prompt")
        self.completion_tokens = self._tokens.labels("completion")
        self.cached_tokens = self._sources.labels("cached")
        self.transferred_tokens = self._sources.labels("transferred")
        self.recomputed_tokens = self._sources.labels("recomputed")
        self.retries = self._retries

    def render(self) -> bytes:
        """Return the Prometheus text format."""
        return generate_latest(self._registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"kvmesh_gateway_{name}", text, registry=self._registry, buckets=buckets)


class ObservedCollector(Collector):
    """Metrics of what others keep, among them the workers' blocks, whose conservation anybody can check here."""

    def __init__(self, observed: Observed) -> None:
        self._observed = observed

    def collect(self) -> Iterator[Metric]:
        observed = self._observed
        resumes = CounterMetricFamily("kvmesh_resumes", "Attempts that went on with an answer")
        resumes.add_metric((), observed.num_resumes)
        asked = CounterMetricFamily("kvmesh_progress_asked", "Questions after requests that had been quiet")
        asked.add_metric((), observed.num_progress_asked)
        oldest = GaugeMetricFamily("kvmesh_unfinished_requests_oldest_seconds", "Age of the oldest request under way")
        oldest.add_metric((), observed.oldest_s)
        blocks = GaugeMetricFamily("kvmesh_kv_blocks", "KV blocks of each worker", labels=("worker", "state"))
        for worker_id, counts in observed.block_counts().items():
            for state in ("free", "cached", "running", "leased", "orphaned"):
                blocks.add_metric((worker_id, state), getattr(counts, state))
        yield from (resumes, asked, oldest, blocks)
