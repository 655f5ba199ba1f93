"""Exports spans as OTLP over HTTP. The only file that imports OpenTelemetry.

A span that stands for a question to another service is of kind client and names that service (`peer.service`), from
which a back end draws its service graph.
"""

import functools
import logging
from collections.abc import Sequence

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from services.telemetry.context import parse_traceparent
from services.telemetry.names import Key, SpanName
from services.telemetry.record import SpanRecord

_SCOPE = InstrumentationScope("kvmesh")
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)


class OtlpExporter:
    """Sends to `{endpoint}/v1/traces`. What cannot be sent after a few tries is lost."""

    def __init__(self, endpoint: str) -> None:
        logging.getLogger("opentelemetry").setLevel(logging.ERROR)
        self._exporter = OTLPSpanExporter(endpoint=endpoint.rstrip("/") + "/v1/traces")

    def export(self, spans: Sequence[SpanRecord]) -> None:
        self._exporter.export([_readable(span) for span in spans])

    def close(self) -> None:
        self._exporter.shutdown()


def _readable(span: SpanRecord) -> ReadableSpan:
    peer = peer_of(span)
    kind = SpanKind.CLIENT if peer else SpanKind.SERVER if span.is_server else SpanKind.INTERNAL
    return ReadableSpan(
        name=span.name,
        context=_context(span.trace_id, span.span_id),
        parent=_context(span.trace_id, span.parent_id) if span.parent_id else None,
        resource=_resource(span.service),
        attributes={**span.attributes, "peer.service": _service_name(peer)} if peer else span.attributes,
        links=[
            Link(_context(linked.trace_id, linked.span_id))
            for link in span.links
            if (linked := parse_traceparent(link)) is not None
        ],
        kind=kind,
        status=Status(StatusCode.ERROR, span.error) if span.error else Status(StatusCode.UNSET),
        start_time=span.start_ns,
        end_time=span.end_ns,
        instrumentation_scope=_SCOPE,
    )


def peer_of(span: SpanRecord) -> str:
    """Return the service that a span's service asked; empty where it asked none."""
    match span.name:
        case SpanName.PLACE:
            return "scheduler"
        case SpanName.DISPATCH:
            return str(span.attributes.get(Key.WORKER, ""))
        case SpanName.KV_TRANSFER if span.attributes.get(Key.END) == "target":
            return str(span.attributes.get(Key.SOURCE, ""))
        case _:
            return ""


def _context(trace_id: str, span_id: str) -> SpanContext:
    return SpanContext(int(trace_id, 16), int(span_id, 16), is_remote=False, trace_flags=_SAMPLED)


@functools.cache
def _resource(service: str) -> Resource:
    """Return the resource that describes the process. Cached: it does not change."""
    return Resource.create({"service.name": _service_name(service), "service.instance.id": service})


def _service_name(service: str) -> str:
    return f"kvmesh-{service}"
