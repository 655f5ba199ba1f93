"""Exports spans by OTLP, over HTTP or gRPC. OpenTelemetry reads its own variables for all but where to send to:
headers, certificates, compression, time-out (https://opentelemetry.io/docs/specs/otel/protocol/exporter)."""

import logging
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import requests
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from dataplane.addresses import is_loopback
from services.config import OtlpTarget

log = logging.getLogger(__name__)


class OtlpExporter(SpanExporter):
    """Sends to `url`. What cannot be sent after a few tries is lost: the first of it is a line with the address, the
    rest is counted."""

    def __init__(self, target: OtlpTarget) -> None:
        logging.getLogger("opentelemetry.exporter").setLevel(logging.CRITICAL)
        self._url = target.url
        self._num_lost = 0
        self._exporter = _over_grpc(target) if target.is_grpc else _over_http(target)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        try:
            result = self._exporter.export(spans)
        except Exception:  # noqa: BLE001 - whatever the library raises, the service goes on
            result = SpanExportResult.FAILURE
        if result is not SpanExportResult.SUCCESS:
            before, self._num_lost = self._num_lost, self._num_lost + len(spans)
            if before.bit_length() != self._num_lost.bit_length():  # the 1st, 2nd, 4th, 8th …
                log.warning("%d spans are lost: %s does not take them as OTLP", self._num_lost, self._url)
        return result

    def shutdown(self) -> None:
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
