"""Makes the spans of one service, and decides which of them are exported.

Sampling is parent-based: whoever begins a trace decides for all, and the traceparent carries the decision. Spans of
traces that are not sampled wait in a ring, in case the trace is asked for later.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from services.config import MeshConfig, TelemetryConfig, otlp_target
from services.telemetry.clock import MeshClock
from services.telemetry.context import SpanRef, TraceContext, context_of, new_trace
from services.telemetry.export import Background, Exporter, FileExporter
from services.telemetry.record import Attributes, AttributeValue, SpanRecord
from services.telemetry.ring import Ring
from services.times import TelemetryTimes


@dataclass(slots=True)
class OpenSpan:
    """A span that has not ended."""

    telemetry: "Telemetry"
    name: str
    context: TraceContext
    parent: SpanRef
    start_ns: int
    is_server: bool
    attributes: dict[str, AttributeValue] = field(default_factory=dict[str, AttributeValue])

    def end(self, attributes: Attributes | None = None, error: str = "") -> None:
        self.telemetry.record(
            self.name,
            self.parent,
            (self.start_ns, time.monotonic_ns()),
            {**self.attributes, **(attributes or {})},
            error=error,
            own=self.context,
            server=self.is_server,
        )


class Telemetry:
    """One service's spans. `exporter` None: spans have ids, so that contexts travel, and are not kept.

    `at_once`: each span is exported as it ends, on the caller's thread. Not thread-safe, except `child_of`.
    """

    def __init__(
        self,
        service: str,
        exporter: Exporter | None,
        config: TelemetryConfig | None = None,
        times: TelemetryTimes | None = None,
        *,
        at_once: bool = False,
    ) -> None:
        self.service = service
        self.config = config or TelemetryConfig()
        self.clock = MeshClock()
        self._exporter = exporter
        self._background = None if exporter is None or at_once else Background(exporter, times or TelemetryTimes())
        self._ring = Ring()

    def start(
        self,
        name: str,
        parent: SpanRef = "",
        attributes: Attributes | None = None,
        *,
        start_ns: int = 0,
        server: bool = False,
    ) -> OpenSpan:
        """Start a span under `parent` (in a new trace where there is none), now or at `start_ns`."""
        context = self._below(context_of(parent))
        return OpenSpan(self, name, context, parent, start_ns or time.monotonic_ns(), server, dict(attributes or {}))

    def child_of(self, parent: SpanRef) -> str:
        """Return the traceparent of a span that will be recorded under `parent` later, so that others can link to it
        meanwhile. Without a parent it is the first span of a new trace. Thread-safe."""
        return self._below(context_of(parent)).traceparent

    def record(
        self,
        name: str,
        parent: SpanRef,
        times_ns: tuple[int, int],
        attributes: Attributes,
        *,
        error: str = "",
        own: SpanRef = "",
        links: Iterable[str] = (),
        server: bool = False,
    ) -> TraceContext:
        """Record a span that has ended. `times_ns`: its start and end by `time.monotonic_ns`. Return its
        ids.

        `own`: what `child_of` or `start` has given it. `links`: traceparents. Without a parent it begins a trace.
        """
        above = context_of(parent)
        context = context_of(own) or self._below(above)
        if self._exporter is None:
            return context
        start_ns, end_ns = times_ns
        span = SpanRecord(
            trace_id=context.trace_id,
            span_id=context.span_id,
            parent_id=above.span_id if above else "",
            name=name,
            service=self.service,
            start_ns=self.clock.date_ns(start_ns),
            end_ns=self.clock.date_ns(max(start_ns, end_ns)),
            error=error,
            attributes=dict(attributes),
            links=tuple(links),
            is_server=server,
        )
        if context.is_sampled or self._ring.is_kept(span.trace_id):
            self._send(span)
        else:
            self._ring.add(span)
        return context

    def record_apart(
        self, name: str, times_ns: tuple[int, int], attributes: Attributes, *, links: Iterable[str] = ()
    ) -> str:
        """Record a span in a trace of its own, sampled because what it links to is. Return its traceparent."""
        return self.record(name, "", times_ns, attributes, own=new_trace(1.0), links=links).traceparent

    def keep(self, trace_id: str) -> None:
        """Export what there is of a trace that was not sampled, and for a while its later spans."""
        if self._exporter is not None and not self._ring.is_kept(trace_id):
            for span in self._ring.keep(trace_id):
                self._send(span)

    def close(self) -> None:
        """Export what is pending, and close the exporter."""
        if self._background is not None:
            self._background.close()
        elif self._exporter is not None:
            self._exporter.close()

    def _below(self, above: TraceContext | None) -> TraceContext:
        return above.child() if above else new_trace(self.config.sample_ratio)

    def _send(self, span: SpanRecord) -> None:
        if self._background is not None:
            self._background.put(span)
        elif self._exporter is not None:
            self._exporter.export([span])


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
