"""W3C Trace Context, as far as the mesh needs it: ids, and whether a trace is sampled.

Inside a process a span is named by its `TraceContext`; the `traceparent` string is for messages and files.
"""

import functools
import random
import re
from typing import NamedTuple

_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})")
_SAMPLED = 1


class TraceContext(NamedTuple):
    """A span's ids, in lower-case hexadecimal digits, and its trace's sampling decision."""

    trace_id: str
    span_id: str
    is_sampled: bool

    @property
    def traceparent(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{self.is_sampled:02x}"

    def child(self) -> "TraceContext":
        """Return the ids of a new span of this trace."""
        return TraceContext(self.trace_id, new_span_id(), self.is_sampled)


SpanRef = TraceContext | str
"""How a span is named to others: by its ids, or by the traceparent that came with a message (empty: none)."""


@functools.lru_cache(4_096)  # a request's spans all hang from a few
def parse_traceparent(text: str) -> TraceContext | None:
    """Return what a `traceparent` says; None where it is empty or malformed."""
    match = _TRACEPARENT.fullmatch(text)
    if match is None:
        return None
    return TraceContext(match[1], match[2], bool(int(match[3], 16) & _SAMPLED))


def context_of(span: SpanRef) -> TraceContext | None:
    """Return the span's ids; None where no span is named, or what should name it is malformed."""
    return parse_traceparent(span) if isinstance(span, str) else span


def new_trace(ratio: float) -> TraceContext:
    """Return the ids of a new trace's first span. The trace id decides whether it is sampled: this ratio of all are, as
    with OpenTelemetry's ratio-based sampler."""
    number = random.getrandbits(128) or 1
    return TraceContext(f"{number:032x}", new_span_id(), number % 2**64 < ratio * 2**64)


def new_span_id() -> str:
    return f"{random.getrandbits(64) or 1:016x}"
