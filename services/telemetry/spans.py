"""Makes the spans of one service, and decides which of them are exported.

They are OpenTelemetry's, made after the fact, with what its SDK has for ids, sampling, batches and protocols. A span of
its tracer, which is open while the work is done, would take eight times as long.

Sampling is parent-based: whoever begins a trace decides for all, and the traceparent carries the decision. Spans of
traces that are not sampled wait in a ring, in case the trace is asked for later.
"""

import logging
import threading
import time
from collections.abc import Iterable, Sequence
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
    """One service's spans, named by their traceparents. Each of `exporters` has a thread of its own. Without any, spans
    have ids, so that contexts travel, and are not kept.

    `service` is the instance, as decode-0; to a back end all of one `role` are one service (left out: it is one of its
    own). `at_once`: each span is exported as it ends, on the caller's thread. Not thread-safe, except `child_of`.
    """

    def __init__(
        self,
        service: str,
        exporters: Sequence[SpanExporter] = (),
        config: TelemetryConfig | None = None,
        times: TelemetryTimes | None = None,
        *,
        role: str = "",
        at_once: bool = False,
    ) -> None:
        self.service = service
        self.config = config or TelemetryConfig()
        self.clock = MeshClock()
        self._times = times or TelemetryTimes()
        self._ids = RandomIdGenerator()
        self._sampler = TraceIdRatioBased(self.config.sample_ratio)
        self._ring = Ring()
        self._exporters = exporters
        # Without exporters no span is made, so nothing reads the resource.
        if exporters:
            self._resource = _resource(role or service, service)
        interval_ms = self._times.export_interval_s * 1000
        self._processors = [
            SimpleSpanProcessor(exporter)
            if at_once
            else BatchSpanProcessor(exporter, MAX_UNSENT, interval_ms, MAX_BATCH)
            for exporter in exporters
        ]

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
        peer: str = "",
    ) -> str:
        """Record a span that has ended. `times_ns`: its start and end by `time.monotonic_ns`. Return its traceparent.

        `own`: what `child_of` or `begin_span` has given it. `links`: traceparents. Without a parent it begins a trace.
        `peer`: the role of the service that was asked; empty: none was, or it is not known. Of such spans back ends
        draw their graph of services: their kind is client, and they name that service (`peer.service`).
        """
        # Take the ids that were given out before, or make new ones; without exporters the ids are all that is needed.
        above = parse_traceparent(parent)
        context = parse_traceparent(own) or self._below(above)
        if not self._processors:
            return own or traceparent_of(context)
        # Each span has the sampled flag, or the SDK's processors would drop it. What is exported is decided below.
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
        # Export a span if its trace is sampled or was asked for; else the ring keeps it for a later question.
        if context.trace_flags.sampled or self._ring.is_kept(context.trace_id):
            self._export(span)
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
        if self._processors and not self._ring.is_kept(number):
            for span in self._ring.keep_trace(number):
                self._export(span)

    def close(self) -> None:
        """Export what is pending, as far as this takes no longer than `close_s`, and close the exporters."""
        if not self._processors:
            return
        ending = threading.Thread(target=self._shut_down, name="last spans", daemon=True)
        ending.start()
        ending.join(self._times.close_s)
        if ending.is_alive():
            log.warning("the last spans are lost: nobody has taken them within %.0f s", self._times.close_s)
            for exporter in self._exporters:
                exporter.shutdown()

    def _shut_down(self) -> None:
        for processor in self._processors:
            processor.shutdown()

    def _export(self, span: ReadableSpan) -> None:
        for processor in self._processors:
            processor.on_end(span)

    def _below(self, above: SpanContext | None) -> SpanContext:
        """Return the ids of a new span."""
        if above is not None:
            return SpanContext(above.trace_id, self._ids.generate_span_id(), False, above.trace_flags)
        trace_id = self._ids.generate_trace_id()
        is_sampled = self._sampler.should_sample(None, trace_id, "").decision.is_sampled()
        return SpanContext(trace_id, self._ids.generate_span_id(), False, TraceFlags(is_sampled))


def open_telemetry(role: str, service: str, mesh: MeshConfig) -> Telemetry:
    """Return the telemetry of a service of this role: to a file where a folder is configured, to OTLP where an endpoint
    is, to both, or nowhere."""
    config, times = mesh.telemetry, mesh.times.telemetry
    exporters: list[SpanExporter] = []
    if config.trace_dir:
        exporters.append(FileExporter(Path(config.trace_dir), service, config.trace_mib << 20))
    if (target := otlp_target(config)) is not None:
        from services.telemetry.otlp import OtlpExporter  # noqa: PLC0415  (slow import)

        exporters.append(OtlpExporter(target))
    return Telemetry(service, exporters, config, times, role=role)


def _resource(role: str, service: str) -> Resource:
    """Return what describes the process: what OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES set goes first."""
    detected = OTELResourceDetector().detect().attributes
    return Resource.create({"service.name": _service_name(role), **detected, "service.instance.id": service})


def _service_name(role: str) -> str:
    return f"kvmesh-{role}"
