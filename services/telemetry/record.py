"""A span that has ended, as it is written to a file and read again."""

from collections.abc import Mapping
from typing import cast

import msgspec
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanContext, SpanKind, TraceFlags

AttributeValue = str | int | float | bool
Attributes = Mapping[str, AttributeValue]
PEER = "peer.service"
"""The attribute from which a back end draws its graph of services. A file's reader knows it from the others."""


class SpanRecord(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One span. Times are Unix ns. `parent_id` is empty for the first span of a trace, `error` for success. `links`:
    traceparents of related spans, in any trace."""

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    service: str
    start_ns: int
    end_ns: int
    error: str = ""
    attributes: dict[str, AttributeValue]
    links: tuple[str, ...] = ()
    is_server: bool = False
    """It stands for a request from outside the mesh."""


def traceparent_of(context: SpanContext) -> str:
    """Return what names the span to others."""
    flags = context.trace_flags & TraceFlags.SAMPLED
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{flags:02x}"


def context_of(span: ReadableSpan) -> SpanContext:
    """Return the span's ids."""
    assert span.context is not None, "`Telemetry` makes no span without"
    return span.context


def record_of(span: ReadableSpan) -> SpanRecord:
    """Return the same as a record."""
    context = context_of(span)
    attributes = cast(Attributes, span.attributes or {})
    return SpanRecord(
        trace_id=f"{context.trace_id:032x}",
        span_id=f"{context.span_id:016x}",
        parent_id=f"{span.parent.span_id:016x}" if span.parent else "",
        name=span.name,
        service=str(span.resource.attributes["service.instance.id"]),
        start_ns=span.start_time or 0,
        end_ns=span.end_time or 0,
        error=span.status.description or "",
        attributes={name: value for name, value in attributes.items() if name != PEER},
        links=tuple(traceparent_of(link.context) for link in span.links),
        is_server=span.kind is SpanKind.SERVER,
    )
