"""Makes the spans of one service, and decides which of them are exported.

Sampling is parent-based: whoever begins a trace decides for all, and the traceparent carries the decision. Spans of
traces that are not sampled wait in a ring, in case the trace is asked for later.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from services.config import TelemetryConfig
from services.telemetry.context import TraceContext, new_trace, parse_traceparent
from services.telemetry.export import Background, Exporter, FileExporter
from services.telemetry.record import Attributes, AttributeValue, SpanRecord
from services.telemetry.ring import Ring


@dataclass(slots=True)
class OpenSpan:
    """A span that has not ended."""

    telemetry: "Telemetry"
    name: str
    context: TraceContext
    parent_id: str
    start_ns: int
    is_server: bool
    attributes: dict[str, AttributeValue] = field(default_factory=dict[str, AttributeValue])

    @property
    def traceparent(self) -> str:
        return self.context.traceparent

    @property
    def trace_id(self) -> str:
        return self.context.trace_id

    def end(self, attributes: Attributes | None = None, error: str = "") -> None:
        self.telemetry.take(
            SpanRecord(
                trace_id=self.context.trace_id,
                span_id=self.context.span_id,
                parent_id=self.parent_id,
                name=self.name,
                service=self.telemetry.service,
                start_ns=self.start_ns,
                end_ns=max(self.start_ns, time.time_ns()),
                error=error,
                attributes={**self.attributes, **(attributes or {})},
                is_server=self.is_server,
            ),
            is_sampled=self.context.is_sampled,
        )


class Telemetry:
    """One service's spans. `exporter` None: spans have ids, so that contexts travel, and are not kept.

    `at_once`: each span is exported as it ends, on the caller's thread. Not thread-safe, except `child_of`.
    """

    def __init__(
        self, service: str, exporter: Exporter | None, config: TelemetryConfig | None = None, *, at_once: bool = False
    ) -> None:
        self.service = service
        self.config = config or TelemetryConfig()
        self._exporter = exporter
        self._background = None if exporter is None or at_once else Background(exporter)
        self._ring = Ring()

    def start(
        self,
        name: str,
        parent: str = "",
        attributes: Attributes | None = None,
        *,
        start_ns: int = 0,
        server: bool = False,
    ) -> OpenSpan:
        """Start a span under a traceparent (in a new trace where that is empty or malformed), now or at `start_ns`."""
        above = parse_traceparent(parent)
        context = above.child() if above else new_trace(self.config.sample_ratio)
        parent_id = above.span_id if above else ""
        return OpenSpan(self, name, context, parent_id, start_ns or time.time_ns(), server, dict(attributes or {}))

    def child_of(self, parent: str) -> str:
        """Return the traceparent of a span that will be recorded under `parent` later, so that others can link to it
        meanwhile. Without a parent it is the first span of a new trace. Thread-safe."""
        above = parse_traceparent(parent)
        return (above.child() if above else new_trace(self.config.sample_ratio)).traceparent

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
    ) -> str:
        """Record a span that has ended. `times_ns`: its start and end in Unix ns. Return its traceparent.

        `own`: what `child_of` returned for it. `links`: traceparents. Without a parent it begins a trace.
        """
        above = parse_traceparent(parent)
        context = parse_traceparent(own) or (above.child() if above else new_trace(self.config.sample_ratio))
        self._record(name, context, above.span_id if above else "", times_ns, attributes, error, tuple(links))
        return context.traceparent

    def record_apart(
        self, name: str, times_ns: tuple[int, int], attributes: Attributes, *, links: Iterable[str] = ()
    ) -> str:
        """Record a span in a trace of its own, sampled because what it links to is. Return its traceparent."""
        context = new_trace(1.0)
        self._record(name, context, "", times_ns, attributes, "", tuple(links))
        return context.traceparent

    def keep(self, trace_id: str) -> None:
        """Export what there is of a trace that was not sampled, and for a while its later spans."""
        if self._exporter is not None and not self._ring.is_kept(trace_id):
            for span in self._ring.keep(trace_id):
                self._send(span)

    def take(self, span: SpanRecord, *, is_sampled: bool) -> None:
        """Export a span that has ended, or keep it in the ring."""
        if self._exporter is None:
            return
        if is_sampled or self._ring.is_kept(span.trace_id):
            self._send(span)
        else:
            self._ring.add(span)

    def close(self) -> None:
        """Export what is pending, and close the exporter."""
        if self._background is not None:
            self._background.close()
        elif self._exporter is not None:
            self._exporter.close()

    def _record(
        self,
        name: str,
        context: TraceContext,
        parent_id: str,
        times_ns: tuple[int, int],
        attributes: Attributes,
        error: str,
        links: tuple[str, ...],
    ) -> None:
        if self._exporter is None:
            return
        start_ns, end_ns = times_ns
        span = SpanRecord(
            trace_id=context.trace_id,
            span_id=context.span_id,
            parent_id=parent_id,
            name=name,
            service=self.service,
            start_ns=start_ns,
            end_ns=max(start_ns, end_ns),
            error=error,
            attributes=dict(attributes),
            links=links,
        )
        self.take(span, is_sampled=context.is_sampled)

    def _send(self, span: SpanRecord) -> None:
        if self._background is not None:
            self._background.put(span)
        elif self._exporter is not None:
            self._exporter.export([span])


def open_telemetry(service: str, config: TelemetryConfig) -> Telemetry:
    """Return the service's telemetry: to OTLP where an endpoint is configured, else to a file where a folder is, else
    nowhere."""
    if config.otlp_endpoint:
        from services.telemetry.otlp import OtlpExporter  # noqa: PLC0415  (slow import)

        return Telemetry(service, OtlpExporter(config.otlp_endpoint), config)
    if config.trace_dir:
        return Telemetry(service, FileExporter(Path(config.trace_dir), service), config)
    return Telemetry(service, None, config)
