"""Reads span files and finds the spans of a request in them."""

from dataclasses import dataclass
from pathlib import Path

import msgspec

from services.errors import UserError
from services.telemetry import Key, SpanName, SpanRecord

_ROOT_PREFIX = "POST "
_ID_PREFIXES = ("req-", "cmpl-", "chatcmpl-")
_STEP = SpanName.ENGINE_STEP
"""An engine step is in a trace of its own, linked to the requests of its batch."""


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """A request whose root span was recorded. Times in milliseconds; `ttft_ms` None: it had no token."""

    root: SpanRecord
    request_id: str
    ttft_ms: float | None
    total_ms: float
    outcome: str

    @property
    def has_failed(self) -> bool:
        return has_failed(self.root)

    @property
    def is_rejected(self) -> bool:
        """Whether it failed for what its client sent: any 4xx but the 429 of a mesh that is full."""
        status = self.root.attributes.get(Key.HTTP_STATUS, 0)
        return isinstance(status, int) and 400 <= status < 500 and status != 429

    @property
    def slowness_ms(self) -> float:
        """The time to the first token, or to the end where there was none."""
        return self.total_ms if self.ttft_ms is None else self.ttft_ms


def has_failed(root: SpanRecord) -> bool:
    """Return whether a request has got an error for an answer. Its span is none where the client was wrong."""
    status = root.attributes.get(Key.HTTP_STATUS, 0)
    return bool(root.error) or (isinstance(status, int) and status >= 400)


def recorded_requests(spans: list[SpanRecord]) -> list[RecordedRequest]:
    """Return the requests by their start."""
    return [_recorded(span) for span in sorted(spans, key=lambda span: span.start_ns) if is_root(span)]


def _recorded(root: SpanRecord) -> RecordedRequest:
    ttft_ms = root.attributes.get(Key.TTFT_MS)
    return RecordedRequest(
        root=root,
        request_id=str(root.attributes.get(Key.REQUEST_ID, "")),
        ttft_ms=float(ttft_ms) if isinstance(ttft_ms, int | float) else None,
        total_ms=(root.end_ns - root.start_ns) / 1e6,
        outcome=str(root.attributes.get(Key.OUTCOME, "")),
    )


def choose(
    requests: list[RecordedRequest], *, slowest: bool, failed: bool, rejected: bool, limit: int
) -> list[RecordedRequest]:
    """Return up to `limit` requests: of the failed ones only (those that were `rejected` too, or not), or of all; the
    slowest first, or the last ones by start."""
    chosen = [
        request for request in requests if not failed or (request.has_failed and (rejected or not request.is_rejected))
    ]
    if slowest:
        return sorted(chosen, key=lambda request: -request.slowness_ms)[:limit]
    return chosen[-limit:]


def load_spans(folder: Path) -> list[SpanRecord]:
    """Return all spans of a folder's *.jsonl, in no order. Lines that do not decode are skipped (the last may be cut
    short); a missing folder has none."""
    decoder = msgspec.json.Decoder(SpanRecord)
    spans: list[SpanRecord] = []
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_bytes().splitlines():
            try:
                spans.append(decoder.decode(line))
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue
    return spans


def find_trace(spans: list[SpanRecord], request_id: str | None) -> list[SpanRecord]:
    """Return the spans of a request, by the gateway's id or the API's, or of the request that started last.

    Where a client has put several requests into one trace, the spans of the others are left out; so are the engine's
    steps, which belong to many requests. Raises UserError where there is no such request.
    """
    spans = [span for span in spans if span.name != _STEP]
    by_id = {span.span_id: span for span in spans}
    # Find the spans that carry the id; without an id the topmost span of each request.
    if request_id is None:
        found = _tops(spans, by_id)
        if not found:
            raise UserError("no trace yet: send a request to a running mesh, or name its span files with --folder")
    else:
        wanted = bare_id(request_id)
        found = [span for span in spans if bare_id(str(span.attributes.get(Key.REQUEST_ID, ""))) == wanted]
        if not wanted or not found:
            raise UserError(
                f"no trace of {request_id!r}: take the id from the answer's x-request-id, "
                "or leave it out for the last request"
            )
    # Several spans may fit: the one that started last decides which trace is meant.
    chosen = max(found, key=lambda span: span.start_ns)
    trace = [span for span in spans if span.trace_id == chosen.trace_id]
    root = _top_of(chosen, by_id)
    # Without a recorded root the requests of one trace cannot be separated: return all of it.
    if not is_root(root):
        return trace
    # Leave out what is below another root; spans below no root may belong to this request, and stay.
    return [span for span in trace if (top := _top_of(span, by_id)) is root or not is_root(top)]


def is_root(span: SpanRecord) -> bool:
    """Return whether this is a gateway's span of a request. Where the client sent a traceparent its parent is the
    client's span, which is not recorded here."""
    return span.name.startswith(_ROOT_PREFIX)


def _tops(spans: list[SpanRecord], by_id: dict[str, SpanRecord]) -> list[SpanRecord]:
    """Return the topmost spans that stand for requests. A span without a parent that is no root belongs to no
    request, and counts only where there is no other."""
    tops = [span for span in spans if is_root(span) or span.parent_id not in by_id]
    return [span for span in tops if is_root(span) or span.parent_id] or tops


def _top_of(span: SpanRecord, by_id: dict[str, SpanRecord]) -> SpanRecord:
    """Return the root above a span, or the highest recorded span where there is none."""
    seen: set[str] = set()
    while not is_root(span) and span.parent_id in by_id and span.span_id not in seen:
        seen.add(span.span_id)
        span = by_id[span.parent_id]
    return span


def bare_id(request_id: str) -> str:
    """Return a request's id without its prefix, in which the gateway's and the API's differ."""
    for prefix in _ID_PREFIXES:
        if request_id.startswith(prefix):
            return request_id.removeprefix(prefix)
    return request_id
