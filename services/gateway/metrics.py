"""The gateway's metrics: one registry per gateway, so that several may live in one process."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

TTFT_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
DURATION_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
ITL_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class GatewayMetrics:
    """`num_dropped` and `num_running` are read when the metrics are."""

    def __init__(self, num_dropped: Callable[[], float], num_running: Callable[[], float]) -> None:
        self._registry = CollectorRegistry()
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
