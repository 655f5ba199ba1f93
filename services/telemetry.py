"""Traces. The only file that knows OpenTelemetry, and the one list of span names and attribute keys.

Spans of work that happens on other threads are recorded after the fact, with explicit times: no span is held open on
a hot path. A trace context travels as a W3C traceparent string. Without an OTLP endpoint spans go to one JSON-lines
file per process, which `kvmesh trace` reads.
"""

import contextlib
import functools
import json
import logging
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import Span, SpanContext, SpanKind, Status, StatusCode, TraceFlags
from opentelemetry.trace.propagation import set_span_in_context

from services.config import TelemetryConfig

AttributeValue = str | int | float | bool
Attributes = Mapping[str, AttributeValue]


class SpanName:
    """Every span of the mesh. The root is named after the HTTP route."""

    TOKENIZE = "tokenize"
    PLACE = "place"
    PREFILL = "prefill"
    PREFILL_QUEUE = "prefill.queue"
    PREFILL_COMPUTE = "prefill.compute"
    KV_TRANSFER = "kv.transfer"
    DECODE = "decode"
    DECODE_QUEUE = "decode.queue"
    DECODE_FIRST_STEP = "decode.first_step"
    DECODE_STREAM = "decode.stream"
    KV_RELEASE = "kv.release"


class Key:
    """Every attribute key of the mesh; `gen_ai.*` follow the semantic conventions."""

    REQUEST_ID = "kvmesh.request_id"
    ATTEMPT = "kvmesh.attempt"
    WORKER = "kvmesh.worker"
    LEASE = "kvmesh.lease_id"
    ROLE = "kvmesh.role"
    OUTCOME = "kvmesh.outcome"
    CARRIER = "kvmesh.carrier"
    NUM_BYTES = "kvmesh.num_bytes"
    NUM_WIRE_BYTES = "kvmesh.num_wire_bytes"
    WIRE_DTYPE = "kvmesh.wire_dtype"
    NUM_BLOCKS = "kvmesh.num_blocks"
    NUM_TOKENS = "kvmesh.num_tokens"
    GB_PER_S = "kvmesh.gb_per_s"
    LEASE_WAIT_MS = "kvmesh.lease_wait_ms"
    FIRST_BYTE_MS = "kvmesh.first_byte_ms"
    VERIFY_MS = "kvmesh.verify_ms"
    EXPOSED_MS = "kvmesh.exposed_ms"
    END = "kvmesh.transfer_end"
    SOURCE = "kvmesh.source"
    TTFT_MS = "kvmesh.ttft_ms"
    POLICY = "kvmesh.policy"
    SOURCES = "kvmesh.sources"
    PLACE_TERM = "kvmesh.place"
    """Prefix of the terms of a placement (`schemas.request.PlacementTerms`)."""
    PREFILL_WORKER = "kvmesh.prefill_worker"
    DECODE_WORKER = "kvmesh.decode_worker"
    MODEL = "gen_ai.request.model"
    INPUT_TOKENS = "gen_ai.usage.input_tokens"
    OUTPUT_TOKENS = "gen_ai.usage.output_tokens"


@dataclass
class OpenSpan:
    """A span that is still running."""

    span: Span
    attributes: dict[str, AttributeValue] = field(default_factory=dict[str, AttributeValue])

    @property
    def traceparent(self) -> str:
        return to_traceparent(self.span.get_span_context())

    @property
    def trace_id(self) -> str:
        return f"{self.span.get_span_context().trace_id:032x}"

    def end(self, attributes: Attributes | None = None, error: str = "") -> None:
        self.span.set_attributes({**self.attributes, **(attributes or {})})
        if error:
            self.span.set_status(Status(StatusCode.ERROR, error))
        self.span.end()


class Telemetry:
    """Makes spans for one service. `exporter` None: spans are made (so that contexts travel) and kept nowhere.

    `at_once`: each span is exported as it ends, on the caller's thread.
    """

    def __init__(self, service: str, exporter: SpanExporter | None, *, at_once: bool = False) -> None:
        self._provider = TracerProvider(resource=_resource(service), shutdown_on_exit=False)
        if exporter is not None:
            processor = (
                SimpleSpanProcessor(exporter) if at_once else BatchSpanProcessor(exporter, schedule_delay_millis=500)
            )
            self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("kvmesh")

    def start(
        self, name: str, parent: str = "", attributes: Attributes | None = None, *, server: bool = False
    ) -> OpenSpan:
        """Start a span under a traceparent (a new trace where it is empty or malformed)."""
        kind = SpanKind.SERVER if server else SpanKind.INTERNAL
        return OpenSpan(self._tracer.start_span(name, context_of(parent), kind=kind, attributes=dict(attributes or {})))

    @contextlib.contextmanager
    def span(self, name: str, parent: str = "", attributes: Attributes | None = None) -> Generator[OpenSpan]:
        """A span around a block; an exception marks it as failed."""
        open_span = self.start(name, parent, attributes)
        try:
            yield open_span
        except BaseException as error:
            open_span.end(error=type(error).__name__)
            raise
        open_span.end()

    def record(
        self, name: str, parent: str, times_ns: tuple[int, int], attributes: Attributes, *, error: str = ""
    ) -> str:
        """Record a span that has happened, from Unix time to Unix time in ns. Return its traceparent."""
        span = self._tracer.start_span(name, context_of(parent), start_time=times_ns[0], attributes=dict(attributes))
        if error:
            span.set_status(Status(StatusCode.ERROR, error))
        span.end(max(times_ns))
        return to_traceparent(span.get_span_context())

    def close(self) -> None:
        """Export what is pending."""
        self._provider.shutdown()


@functools.cache
def _resource(service: str) -> Resource:
    """Which process speaks. Made once: what is found out about the process does not change."""
    return Resource.create({"service.name": f"kvmesh-{service}", "service.instance.id": service})


class ListExporter(SpanExporter):
    """Keeps the records of what has ended in a list, for a simulation to look at."""

    def __init__(self, records: list[dict[str, object]]) -> None:
        self._records = records

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self._records += map(span_record, spans)
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        """Nothing is held open."""


class FileExporter(SpanExporter):
    """Appends one JSON object a span to `{dir}/{service}-{started}.jsonl`."""

    def __init__(self, folder: Path, service: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"{service}-{time.time_ns()}.jsonl"

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        lines = [json.dumps(span_record(span), default=str) for span in spans]
        try:
            with self._path.open("a") as file:
                file.write("\n".join(lines) + "\n")
        except OSError:
            return SpanExportResult.FAILURE
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        """Nothing is held open."""


def span_record(span: ReadableSpan) -> dict[str, object]:
    """Return what `kvmesh trace` needs of a span. Times are Unix ns."""
    context, parent = span.get_span_context(), span.parent
    assert context is not None
    return {
        "trace_id": f"{context.trace_id:032x}",
        "span_id": f"{context.span_id:016x}",
        "parent_id": f"{parent.span_id:016x}" if parent else "",
        "name": span.name,
        "service": span.resource.attributes.get("service.instance.id", ""),
        "start_ns": span.start_time,
        "end_ns": span.end_time,
        "error": span.status.description or "error" if span.status.status_code is StatusCode.ERROR else "",
        "attributes": dict(span.attributes or {}),
    }


def open_telemetry(service: str, config: TelemetryConfig) -> Telemetry:
    """Return the service's telemetry: OTLP where an endpoint is configured, else a file, else nothing kept."""
    logging.getLogger("opentelemetry").setLevel(logging.ERROR)
    if config.otlp_endpoint:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # noqa: PLC0415  (slow import)

        return Telemetry(service, OTLPSpanExporter(endpoint=config.otlp_endpoint.rstrip("/") + "/v1/traces"))
    if config.trace_dir:
        return Telemetry(service, FileExporter(Path(config.trace_dir), service))
    return Telemetry(service, None)


def to_traceparent(context: SpanContext) -> str:
    """Return a W3C Trace Context `traceparent` value."""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def context_of(traceparent: str) -> Context:
    """Return the library's context for a traceparent; an empty one for what is empty or malformed."""
    try:
        _version, trace_id, span_id, flags = traceparent.split("-")
        span = SpanContext(int(trace_id, 16), int(span_id, 16), is_remote=True, trace_flags=TraceFlags(int(flags, 16)))
    except ValueError:
        return Context()
    return set_span_in_context(trace.NonRecordingSpan(span), Context())
