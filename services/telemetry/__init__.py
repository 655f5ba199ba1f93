"""Traces: names of spans and attributes, how spans are made and sampled, and where they are exported.

Spans of work on other threads are recorded after the fact, with explicit times: no span is held open on a hot path. A
trace context travels as a W3C traceparent string. Only `otlp.py` imports OpenTelemetry.
"""

from services.telemetry.context import TraceContext, parse_traceparent
from services.telemetry.export import FileExporter, ListExporter
from services.telemetry.names import Key, SpanName
from services.telemetry.record import Attributes, AttributeValue, SpanRecord
from services.telemetry.spans import OpenSpan, Telemetry, open_telemetry

__all__ = [
    "AttributeValue",
    "Attributes",
    "FileExporter",
    "Key",
    "ListExporter",
    "OpenSpan",
    "SpanName",
    "SpanRecord",
    "Telemetry",
    "TraceContext",
    "open_telemetry",
    "parse_traceparent",
]
