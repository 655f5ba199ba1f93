"""A span that has ended, as it is kept, written and exported."""

from collections.abc import Mapping

import msgspec

AttributeValue = str | int | float | bool
Attributes = Mapping[str, AttributeValue]


class SpanRecord(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Times are Unix ns. `parent_id` is empty for the first of a trace, `error` for one that went well. `links`:
    traceparents of spans that it has to do with, in whatever trace."""

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
    """It stands for a request that came from outside."""
