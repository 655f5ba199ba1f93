"""Exports spans by OTLP, over HTTP or gRPC. The only file that imports OpenTelemetry, which reads its own variables for
all but where to send to: headers, certificates, compression, time-out
(https://opentelemetry.io/docs/specs/otel/protocol/exporter).

A span that stands for a question to another service is of kind client and names that service (`peer.service`), from
which a back end draws its service graph.
"""

import functools
import logging
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import requests
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from dataplane.addresses import is_loopback
from services.config import OtlpTarget
from services.telemetry.context import parse_traceparent
from services.telemetry.names import Key, SpanName
from services.telemetry.record import SpanRecord

log = logging.getLogger(__name__)

_SCOPE = InstrumentationScope("kvmesh")
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)


class OtlpExporter:
    """Sends to `url`. What cannot be sent after a few tries is lost: the first of it is a line with the address, the
    rest is counted."""

    def __init__(self, target: OtlpTarget) -> None:
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        self._url = target.url
        self._num_lost = 0
        self._exporter = _over_grpc(target) if target.is_grpc else _over_http(target)

    def export(self, spans: Sequence[SpanRecord]) -> None:
        try:
            is_sent = self._exporter.export([_readable(span) for span in spans]) is SpanExportResult.SUCCESS
        except Exception:  # noqa: BLE001 - whatever the library raises, the service goes on
            is_sent = False
        if not is_sent:
            before, self._num_lost = self._num_lost, self._num_lost + len(spans)
            if before.bit_length() != self._num_lost.bit_length():  # the 1st, 2nd, 4th, 8th …
                log.warning("%d spans are lost: %s does not take them as OTLP", self._num_lost, self._url)

    def close(self) -> None:
        self._exporter.shutdown()


def _over_http(target: OtlpTarget) -> SpanExporter:
    session = requests.Session()
    session.trust_env = not _is_here(target)  # a proxy's loopback is another one
    return OTLPSpanExporter(endpoint=target.url, session=session, timeout=target.timeout_s)


def _over_grpc(target: OtlpTarget) -> SpanExporter:
    from opentelemetry.exporter.otlp.proto.grpc import trace_exporter  # noqa: PLC0415  (few need it)

    options: Any = (("grpc.enable_http_proxy", 0),) if _is_here(target) else None
    return trace_exporter.OTLPSpanExporter(endpoint=target.url, timeout=target.timeout_s, channel_options=options)


def _is_here(target: OtlpTarget) -> bool:
    return is_loopback(urlsplit(target.url).hostname or "")


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
