"""Makes the spans of one service, and decides which of them are exported.

They are OpenTelemetry's, made after the fact, with what its SDK has for ids, sampling, batches and protocols. A span of
its tracer, which is open while the work is done, would take eight times as long.

Sampling is parent-based: whoever begins a trace decides for all, and the traceparent carries the decision. Spans of
traces that are not sampled wait in a ring, in case the trace is asked for later.
"""

import logging
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import TraceIdRatioBased
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from services.config import MeshConfig, TelemetryConfig, otlp_target
from services.telemetry.clock import MeshClock
from services.telemetry.context import parse_traceparent
from services.telemetry.export import FileExporter
from services.telemetry.limits import MAX_BATCH, MAX_UNSENT
from services.telemetry.names import Key, SpanName
from services.telemetry.record import PEER, Attributes, AttributeValue, traceparent_of
from services.telemetry.ring import Ring
from services.times import TelemetryTimes

log = logging.getLogger(__name__)

_SCOPE = InstrumentationScope("kvmesh")
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)


@dataclass(slots=True)
class OpenSpan:
    """A span that has not ended."""

    telemetry: "Telemetry"
    name: str
    traceparent: str
    parent: str
    start_ns: int
    is_server: bool
    attributes: dict[str, AttributeValue] = field(default_factory=dict[str, AttributeValue])

    def end(self, attributes: Attributes | None = None, error: str = "", *, end_ns: int = 0) -> None:
        """Record the span as having ended now, or at `end_ns`."""
        self.telemetry.record(
            self.name,
            self.parent,
            (self.start_ns, end_ns or time.monotonic_ns()),
            {**self.attributes, **(attributes or {})},
            error=error,
            own=self.traceparent,
            server=self.is_server,
        )


class Telemetry:
    """One service's spans, named by their traceparents. `exporter` None: spans have ids, so that contexts travel, and
    are not kept.

    `at_once`: each span is exported as it ends, on the caller's thread. Not thread-safe, except `child_of`.
    """

    def __init__(
        self,
        service: str,
        exporter: SpanExporter | None,
        config: TelemetryConfig | None = None,
        times: TelemetryTimes | None = None,
        *,
        at_once: bool = False,
    ) -> None:
        self.service = service
        self.config = config or TelemetryConfig()
        self.clock = MeshClock()
        self._times = times or TelemetryTimes()
        self._ids = RandomIdGenerator()
        self._sampler = TraceIdRatioBased(self.config.sample_ratio)
        self._ring = Ring()
        self._exporter = exporter
        self._processor: SimpleSpanProcessor | BatchSpanProcessor | None = None
        if exporter is not None:
            self._resource = _resource(service)
            interval_ms = self._times.export_interval_s * 1000
            self._processor = (
                SimpleSpanProcessor(exporter)
                if at_once
                else BatchSpanProcessor(exporter, MAX_UNSENT, interval_ms, MAX_BATCH)
            )

    def begin_span(
        self,
        name: str,
        parent: str = "",
        attributes: Attributes | None = None,
        *,
        start_ns: int = 0,
        server: bool = False,
    ) -> OpenSpan:
        """Start a span under `parent` (in a new trace where there is none), now or at `start_ns`."""
        own = self.child_of(parent)
        return OpenSpan(self, name, own, parent, start_ns or time.monotonic_ns(), server, dict(attributes or {}))

    def child_of(self, parent: str) -> str:
        """Return the traceparent of a span that will be recorded under `parent` later, so that others can link to it
        meanwhile. Without a parent it is the first span of a new trace. Thread-safe."""
        return traceparent_of(self._below(parse_traceparent(parent)))

    def record(
        self,
        name: str,
        parent: str,
        times_ns: tuple[int, int],
        attributes: Attributes,
        *,
        error: str = "",
        own: str = "",
        links: Iterable[str] = (),
        server: bool = False,
    ) -> str:
        """Record a span that has ended. `times_ns`: its start and end by `time.monotonic_ns`. Return its traceparent.

        `own`: what `child_of` or `begin_span` has given it. `links`: traceparents. Without a parent it begins a trace.
        """
        above = parse_traceparent(parent)
        context = parse_traceparent(own) or self._below(above)
        if self._processor is None:
            return own or traceparent_of(context)
        peer = peer_of(name, attributes)
        span = ReadableSpan(
            name=name,
            context=SpanContext(context.trace_id, context.span_id, is_remote=False, trace_flags=_SAMPLED),
            parent=above,
            resource=self._resource,
            attributes={**attributes, PEER: _service_name(peer)} if peer else dict(attributes),
            links=[Link(linked) for link in links if (linked := parse_traceparent(link)) is not None],
            kind=SpanKind.CLIENT if peer else SpanKind.SERVER if server else SpanKind.INTERNAL,
            status=Status(StatusCode.ERROR, error) if error else Status(StatusCode.UNSET),
            start_time=self.clock.date_ns(times_ns[0]),
            end_time=self.clock.date_ns(max(times_ns)),
            instrumentation_scope=_SCOPE,
        )
        if context.trace_flags.sampled or self._ring.is_kept(context.trace_id):
            self._processor.on_end(span)
        else:
            self._ring.append(span)
        return own or traceparent_of(context)

    def record_apart(
        self, name: str, times_ns: tuple[int, int], attributes: Attributes, *, links: Iterable[str] = ()
    ) -> str:
        """Record a span in a trace of its own, sampled because what it links to is. Return its traceparent."""
        own = SpanContext(self._ids.generate_trace_id(), self._ids.generate_span_id(), False, _SAMPLED)
        return self.record(name, "", times_ns, attributes, own=traceparent_of(own), links=links)

    def keep_trace(self, trace_id: str) -> None:
        """Export what there is of a trace that was not sampled, and for a while its later spans."""
        number = int(trace_id, 16)
        if self._processor is not None and not self._ring.is_kept(number):
            for span in self._ring.keep_trace(number):
                self._processor.on_end(span)

    def close(self) -> None:
        """Export what is pending, as far as this takes no longer than `close_s`, and close the exporter."""
        if self._processor is None or self._exporter is None:
            return
        ending = threading.Thread(target=self._processor.shutdown, name="last spans", daemon=True)
        ending.start()
        ending.join(self._times.close_s)
        if ending.is_alive():
            log.warning("the last spans are lost: nobody has taken them within %.0f s", self._times.close_s)
            self._exporter.shutdown()

    def _below(self, above: SpanContext | None) -> SpanContext:
        """Return the ids of a new span."""
        if above is not None:
            return SpanContext(above.trace_id, self._ids.generate_span_id(), False, above.trace_flags)
        trace_id = self._ids.generate_trace_id()
        is_sampled = self._sampler.should_sample(None, trace_id, "").decision.is_sampled()
        return SpanContext(trace_id, self._ids.generate_span_id(), False, TraceFlags(is_sampled))


def peer_of(name: str, attributes: Attributes) -> str:
    """Return the service that a span's service asked; empty where it asked none. Of such a span back ends draw their
    graph of services: its kind is client, and it names that service (`peer.service`)."""
    match name:
        case SpanName.PLACE:
            return "scheduler"
        case SpanName.DISPATCH:
            return str(attributes.get(Key.WORKER, ""))
        case SpanName.KV_TRANSFER if attributes.get(Key.END) == "target":
            return str(attributes.get(Key.SOURCE, ""))
        case _:
            return ""


def open_telemetry(service: str, mesh: MeshConfig) -> Telemetry:
    """Return the service's telemetry: to OTLP where an endpoint is configured, else to a file where a folder is, else
    nowhere."""
    config, times = mesh.telemetry, mesh.times.telemetry
    if (target := otlp_target(config)) is not None:
        from services.telemetry.otlp import OtlpExporter  # noqa: PLC0415  (slow import)

        return Telemetry(service, OtlpExporter(target), config, times)
    if config.trace_dir:
        return Telemetry(service, FileExporter(Path(config.trace_dir), service, config.trace_mib << 20), config, times)
    return Telemetry(service, None, config, times)


def _resource(service: str) -> Resource:
    """Return what describes the process: what OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES say of it goes first."""
    said = OTELResourceDetector().detect().attributes
    return Resource.create({"service.name": _service_name(service), **said, "service.instance.id": service})


def _service_name(service: str) -> str:
    return f"kvmesh-{service}"
