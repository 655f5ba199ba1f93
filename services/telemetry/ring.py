"""Spans of traces that are not sampled, kept for a while in case they are asked for. Pure."""

from opentelemetry.sdk.trace import ReadableSpan

from services.telemetry.limits import MAX_KEPT_TRACES, MAX_SPANS
from services.telemetry.record import context_of


class Ring:
    """Holds up to `MAX_SPANS` spans, by their traces' ids. Where there is no room the oldest trace is dropped."""

    def __init__(self) -> None:
        self._spans: dict[int, list[ReadableSpan]] = {}
        self._kept: dict[int, None] = {}
        self._num_spans = 0

    def __len__(self) -> int:
        return self._num_spans

    def is_kept(self, trace_id: int) -> bool:
        return trace_id in self._kept

    def append(self, span: ReadableSpan) -> None:
        self._spans.setdefault(context_of(span).trace_id, []).append(span)
        self._num_spans += 1
        while self._num_spans > MAX_SPANS:
            self._num_spans -= len(self._spans.pop(next(iter(self._spans))))

    def keep_trace(self, trace_id: int) -> list[ReadableSpan]:
        """Return what there is of a trace, and remember that its later spans are wanted."""
        self._kept[trace_id] = None
        if len(self._kept) > MAX_KEPT_TRACES:
            del self._kept[next(iter(self._kept))]
        found = self._spans.pop(trace_id, [])
        self._num_spans -= len(found)
        return found
