"""Metrics: one registry for each service, and the server that Prometheus scrapes. The only file that imports
prometheus_client.

Events are counted as they happen (`inc`, `observe`). The present state (blocks, queues, ages) is read by the service's
own loop twice a second (`sample`), which replaces all values at once; the server's thread reads only these values.
Names and labels: `services/metric_names.py`.
"""

import asyncio
import contextlib
import itertools
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from socketserver import ThreadingMixIn
from typing import Any, Literal, NamedTuple, cast
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import (
    REGISTRY,
    CollectorRegistry,
    Counter,
    Histogram,
    Metric,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
    make_wsgi_app,  # pyright: ignore[reportUnknownVariableType]
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from dataplane.lasting import lasting_thread
from services.telemetry.context import parse_traceparent
from services.telemetry.limits import ACCEPT_PAUSE_S, MAX_SCRAPES, MAX_SERIES, SCRAPE_HEAD_S

log = logging.getLogger(__name__)

Kind = Literal["counter", "gauge", "histogram"]
Labels = tuple[str, ...]

OTHER = "other"

disable_created_metrics()  # twice the series, for what `process_start_time_seconds` says


class MetricName(NamedTuple):
    """One metric: its kind, name, text and labels. A counter's name is written without `_total`.

    `values`: what each label can be, where that is known: such series begin at 0, so that the first event is an
    increase. `roles`: who serves it; empty: everybody. `is_sampled`: set by `sample`, not counted. `is_own`: it has a
    label `worker`, filled with the service's own name.
    """

    kind: Kind
    name: str
    text: str
    labels: Labels = ()
    values: tuple[Labels, ...] = ()
    buckets: tuple[float, ...] = ()
    roles: Labels = ()
    is_sampled: bool = False
    is_own: bool = False

    @property
    def shown_labels(self) -> Labels:
        return ("worker", *self.labels) if self.is_own else self.labels


class Metrics:
    """One service's metrics. Thread-safe except `sample`, which is for the loop that the service runs on."""

    def __init__(self, worker: str = "") -> None:
        self._worker = (worker,)
        self._registry = CollectorRegistry()
        self._sampled = _Sampled()
        self._registry.register(self._sampled)
        self._instruments: dict[str, Counter | Histogram] = {}
        self._children: dict[tuple[str, Labels], Counter | Histogram] = {}
        self._num_series: dict[str, int] = {}
        self._samplers: list[Callable[[], None]] = []

    def inc(self, metric: MetricName, *labels: str, by: float = 1, trace: str = "") -> None:
        """Count. A span of a sampled trace becomes the exemplar."""
        child = self._child(metric, labels)
        assert isinstance(child, Counter)
        child.inc(by, exemplar_of(trace))

    def observe(self, metric: MetricName, value: float, *labels: str, trace: str = "") -> None:
        """Add a value to a histogram. A span of a sampled trace becomes the exemplar of its bucket."""
        child = self._child(metric, labels)
        assert isinstance(child, Histogram)
        child.observe(value, exemplar_of(trace))

    def set_series(self, metric: MetricName, values: Mapping[Labels, float]) -> None:
        """Set all series of a sampled metric; those that are not named are removed."""
        assert metric.is_sampled, f"{metric.name} is counted as it happens"
        assert all(len(labels) == len(metric.labels) for labels in values), f"{metric.name} has {metric.labels}"
        own = self._worker if metric.is_own else ()
        bounded = itertools.islice(values.items(), MAX_SERIES)
        self._sampled.set_series(metric, {(*own, *labels): value for labels, value in bounded})

    def show_library(self, read: Callable[[], str]) -> None:
        """Show also what a library has counted, in whatever process: `read` returns it, in the text format."""
        self._registry.register(_OfLibrary(read))

    def on_sample(self, sampler: Callable[[], None]) -> None:
        """Have `sampler` called whenever it is time to `set_series`."""
        self._samplers.append(sampler)

    def sample(self) -> None:
        """Call every sampler. One that raises is logged."""
        for sampler in self._samplers:
            try:
                sampler()
            except Exception:  # a figure that is lacking must not end a service
                log.exception("sampling the metrics failed")

    def prepare(self, metrics: tuple[MetricName, ...]) -> None:
        """Begin at 0 what is counted and has known labels, and add the process's own metrics."""
        ProcessCollector(registry=self._registry)
        for metric in metrics:
            if not metric.is_sampled and len(metric.values) == len(metric.labels):
                for labels in itertools.product(*metric.values):
                    self._child(metric, labels)

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """Return the text and its content type: OpenMetrics, with exemplars, where it is accepted."""
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type

    def start_server(self, host: str, port: int) -> WSGIServer | None:
        """Serve on a thread of its own; port 0 finds one. None where the port cannot be had: a service runs on
        without."""
        app = cast("Any", make_wsgi_app(self._registry))
        try:
            server = make_server(host, port, app, _Server6 if ":" in host else _Server, _Handler)
        except OSError as error:
            log.error("no metrics on %s:%d: %s", host, port, error.strerror or error)
            return None
        lasting_thread(server.serve_forever, "metrics", lambda: server.is_over).start()
        log.info("metrics on http://%s:%d/metrics", host, server.server_port)
        return server

    async def keep_sampling(self, interval_s: float) -> None:
        """Sample every `interval_s` until cancelled."""
        while True:
            self.sample()
            await asyncio.sleep(interval_s)

    def _child(self, metric: MetricName, labels: Labels) -> Counter | Histogram:
        child = self._children.get((metric.name, labels))
        return child if child is not None else self._open(metric, labels)

    def _open(self, metric: MetricName, labels: Labels) -> Counter | Histogram:
        assert not metric.is_sampled, f"{metric.name} is put, not counted"
        num_series = self._num_series.get(metric.name, 0)
        if num_series >= MAX_SERIES and any(label != OTHER for label in labels):
            return self._child(metric, (OTHER,) * len(labels))
        instrument = self._instruments.get(metric.name)
        if instrument is None:
            instrument = self._instruments[metric.name] = self._instrument(metric)
        shown = (*self._worker, *labels) if metric.is_own else labels
        child = instrument.labels(*shown) if shown else instrument
        self._num_series[metric.name] = num_series + 1
        self._children[(metric.name, labels)] = child
        return child

    def _instrument(self, metric: MetricName) -> Counter | Histogram:
        if metric.kind == "counter":
            return Counter(metric.name, metric.text, metric.shown_labels, registry=self._registry)
        labels, buckets = metric.shown_labels, metric.buckets
        return Histogram(metric.name, metric.text, labels, registry=self._registry, buckets=buckets)


class _Handler(WSGIRequestHandler):
    """One connection, and one request on it."""

    timeout = SCRAPE_HEAD_S

    def log_message(self, format: str, *args: object) -> None:
        """Nobody wants a line for each scrape."""


class _Server(ThreadingMixIn, WSGIServer):
    """A thread for each of `MAX_SCRAPES` connections; for one more the oldest is closed."""

    daemon_threads = True
    request_queue_size = MAX_SCRAPES

    def __init__(self, *args: Any) -> None:
        self._open: dict[socket.socket, None] = {}
        self._lock = threading.Lock()
        self.is_over = False
        super().__init__(*args)

    def shutdown(self) -> None:
        self.is_over = True
        super().shutdown()

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            return super().get_request()
        except OSError:  # no descriptor is to be had, and it would be asked for again at once
            time.sleep(ACCEPT_PAUSE_S)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._open[request] = None
            if len(self._open) > MAX_SCRAPES:
                oldest = next(iter(self._open))
                del self._open[oldest]
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("a scrape by %s failed", client_address, exc_info=True)


class _Server6(_Server):
    address_family = socket.AF_INET6


class _OfPrefix(Collector):
    """What others keep in the registry that all of a process share, of names that begin so."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix

    def collect(self) -> Iterator[Metric]:
        return (metric for metric in REGISTRY.collect() if metric.name.startswith(self._prefix))


def library_text(prefix: str) -> str:
    """Return what libraries have counted in this process, of names that begin so, in Prometheus' text format."""
    return generate_latest(_OfPrefix(prefix)).decode()


class _OfLibrary(Collector):
    """What a library reports of itself."""

    def __init__(self, read: Callable[[], str]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        return iter(text_string_to_metric_families(self._read()))


class _Sampled(Collector):
    """The values that were set last. Another thread collects: nothing is changed in place."""

    def __init__(self) -> None:
        self._values: dict[MetricName, dict[Labels, float]] = {}

    def set_series(self, metric: MetricName, values: dict[Labels, float]) -> None:
        self._values = {**self._values, metric: values}

    def collect(self) -> Iterator[Metric]:
        for metric, values in self._values.items():
            kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            family = kind(metric.name, metric.text, labels=metric.shown_labels)
            for labels, value in values.items():
                family.add_metric(labels, value)
            yield family


def exemplar_of(trace: str) -> dict[str, str] | None:
    """Return a span's ids as labels of an exemplar; None where there is no span, or its trace is not sampled."""
    context = parse_traceparent(trace)
    if context is None or not context.trace_flags.sampled:
        return None
    return {"trace_id": f"{context.trace_id:032x}", "span_id": f"{context.span_id:016x}"}
