"""Traces: names of spans and attributes, how spans are made and sampled, and where they are exported.

Spans of work on other threads are recorded after the fact, with explicit times: no span is held open on a hot path. A
span's ids are a `TraceContext`; between processes they travel as a W3C traceparent. Only `otlp.py` imports
OpenTelemetry.
"""

from services.telemetry.clock import MeshClock
from services.telemetry.context import SpanRef, TraceContext, context_of, parse_traceparent
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
    "MeshClock",
    "OpenSpan",
    "SpanName",
    "SpanRecord",
    "SpanRef",
    "Telemetry",
    "TraceContext",
    "context_of",
    "open_telemetry",
    "parse_traceparent",
]
