"""Traces: names of spans and attributes, how spans are made and sampled, and where they are exported.

Spans of work on other threads are recorded after the fact, with explicit times: no span is held open on a hot path. A
span is named by its W3C traceparent. OpenTelemetry is imported here alone.
"""

from services.telemetry.clock import MeshClock
from services.telemetry.context import is_sampled, parse_traceparent, trace_id_of
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
    "Telemetry",
    "is_sampled",
    "open_telemetry",
    "parse_traceparent",
    "trace_id_of",
]
