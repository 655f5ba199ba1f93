"""A span that has ended, as it is kept, written and exported."""

from collections.abc import Mapping

import msgspec

AttributeValue = str | int | float | bool
Attributes = Mapping[str, AttributeValue]


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
