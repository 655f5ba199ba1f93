"""A span's name between processes and in files: its W3C traceparent (https://www.w3.org/TR/trace-context)."""

import functools

from opentelemetry.context import Context
from opentelemetry.trace import SpanContext, get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

_PROPAGATOR = TraceContextTextMapPropagator()
_LENGTH = 55


def parse_traceparent(text: str) -> SpanContext | None:
    """Return the ids that it has, and whether their trace is sampled; None where it is empty or malformed."""
    return _parse(text) if len(text) == _LENGTH else None  # what is longer is not remembered


@functools.lru_cache(4_096)  # a request's spans all hang from a few
def _parse(text: str) -> SpanContext | None:
    context = get_current_span(_PROPAGATOR.extract({"traceparent": text}, Context())).get_span_context()
    return context if context.is_valid else None


def is_sampled(traceparent: str) -> bool:
    """Return whether the trace of a span is sampled; not where there is no span."""
    context = parse_traceparent(traceparent)
    return context is not None and context.trace_flags.sampled


def trace_id_of(traceparent: str) -> str:
    """Return the id of a span's trace, in hexadecimal digits."""
    return traceparent.split("-")[1]
