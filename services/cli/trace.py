"""`kvmesh trace`: one request's spans as a waterfall, from the files that the services wrote (`recorded.py`)."""

import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from services.cli.limits import TRACE_POLL_INTERVAL_S, TRACE_SETTLE_S
from services.cli.recorded import (
    RecordedRequest,
    SpanRecord,
    choose,
    find_trace,
    has_failed,
    is_root,
    load_spans,
    recorded_requests,
)
from services.errors import UserError
from services.telemetry import AttributeValue, Key, SpanName

_PIPED_WIDTH = 140
_MIN_BAR, _MAX_BAR = 10, 80
_MIN_NOTES, _WIDE_NOTES = 14, 48
_GAP = 2
_TTFT_PART = f"{Key.TTFT_PART}."
"""Prefix of the root's attributes that hold the parts of its TTFT."""
_PART_MS_MIN = 0.05
_ORPHAN = "orphan: its parent was not recorded"


@dataclass(frozen=True, slots=True)
class _Row:
    span: SpanRecord
    depth: int
    is_orphan: bool
    has_children: bool = False


def render_waterfall(
    spans: list[SpanRecord], console: Console, recorded: Mapping[str, SpanRecord] | None = None
) -> None:
    """Print one trace: a header, then a row for each span, children under their parents, in order of time.

    `recorded`: all spans by their id, to name those that are linked to.
    """
    if not spans:
        return
    rows = _in_tree_order(spans)
    begin, end = min(span.start_ns for span in spans), max(span.end_ns for span in spans)
    console.print(_header(spans, rows), soft_wrap=True)
    if parts := _ttft_parts(rows[0].span):
        console.print(Text(parts, style="dim"), soft_wrap=True)
    # Make the texts first: their widths decide how much room is left for the bars.
    cells = {
        "span": [_label(row) for row in rows],
        "service": [_plain(row.span.service) for row in rows],
        "start": [f"{(row.span.start_ns - begin) / 1e6:.1f}" for row in rows],
        "ms": [f"{(row.span.end_ns - row.span.start_ns) / 1e6:.1f}" for row in rows],
    }
    # Notes name linked spans, which may be of other traces: an engine step has a trace of its own.
    known = {span.span_id: span for span in spans} | dict(recorded or {})
    notes = [_notes(row, known) for row in rows]
    # Make the columns after `_fit`: it removes from `cells` a column for which there is no room.
    bar_width = _fit(cells, max(note.cell_len for note in notes), console.width)
    mark = "#" if console.options.ascii_only else "█"
    table = Table(box=None, padding=(0, _GAP, 0, 0), pad_edge=False, header_style="dim")
    for title in cells:
        table.add_column(title, no_wrap=True, justify="right" if title in ("start", "ms") else "left")
    if bar_width:
        table.add_column(_axis(bar_width, end - begin), no_wrap=True)
    table.add_column("", overflow="fold")
    # A root is bold, and a failed span is red in all its cells.
    for index, row in enumerate(rows):
        plain = "bold" if is_root(row.span) else ""
        texts = [Text(column[index], style="dim" if title == "service" else plain) for title, column in cells.items()]
        if bar_width:
            texts.append(Text(_bar(row.span, begin, end, bar_width, mark), style="cyan"))
        if row.span.error:
            for text in texts:
                text.style = "red"
        table.add_row(*texts, notes[index])
    console.print(table)


def _fit(cells: dict[str, list[str]], widest_notes: int, width: int) -> int:
    """Return the width of the bars, 0 where there is no room for them. Removes from `cells` the column for which
    there is no room either."""

    def room() -> int:
        return width - sum(max(len(title), *map(len, column)) + _GAP for title, column in cells.items())

    if (left := room() - _GAP - min(widest_notes, _MIN_NOTES)) >= _MIN_BAR:
        return max(_MIN_BAR, min(_MAX_BAR, left, room() - _GAP - min(widest_notes, _WIDE_NOTES)))
    if room() < _MIN_NOTES:
        del cells["service"]
    return 0


def show_trace(folder: Path, request_id: str | None, settle_s: float = TRACE_SETTLE_S) -> None:
    """Print a request's trace, or the last request's for None. Waits a moment for spans that are not written yet.
    Raises UserError."""
    spans, trace = _load_settled(folder, request_id, settle_s)
    render_waterfall(trace, _console(), {span.span_id: span for span in spans})


def show_chosen(folder: Path, *, slowest: bool, failed: bool, rejected: bool, limit: int) -> None:
    """Print the trace of the slowest or the last failed request; with a `limit`, a list of so many requests.
    `rejected`: of the failed ones, those too in which the client was wrong. Raises UserError where there is none."""
    spans = load_spans(folder)
    recorded = recorded_requests(spans)
    chosen = choose(recorded, slowest=slowest, failed=failed, rejected=rejected, limit=limit or 1)
    if not chosen:
        num_rejected = sum(request.is_rejected for request in recorded)
        hint = f"; {num_rejected} were refused for what the client sent: --rejected" if num_rejected else ""
        raise UserError(f"no request has failed yet{hint}" if failed else "no request has ended yet")
    console = _console()
    if limit:
        console.print(list_requests(chosen))
        return
    trace = find_trace(spans, chosen[0].request_id)
    render_waterfall(trace, console, {span.span_id: span for span in spans})


def list_requests(requests: list[RecordedRequest]) -> Table:
    """Return a table with a row for each request, times in milliseconds."""
    table = Table(box=None, padding=(0, _GAP, 0, 0), pad_edge=False, header_style="dim")
    for title in ("started", "request", "TTFT", "total", "workers", "outcome"):
        table.add_column(title, no_wrap=title != "outcome", justify="right" if title in ("TTFT", "total") else "left")
    for request in requests:
        attributes = request.root.attributes
        workers = [_plain(attributes[key]) for key in (Key.PREFILL_WORKER, Key.DECODE_WORKER) if attributes.get(key)]
        table.add_row(
            time.strftime("%H:%M:%S", time.localtime(request.root.start_ns / 1e9)),
            _plain(request.request_id),
            "" if request.ttft_ms is None else f"{request.ttft_ms:.1f}",
            f"{request.total_ms:.1f}",
            " → ".join(dict.fromkeys(workers)),
            Text(_plain(request.outcome), style="red" if request.has_failed else "green"),
        )
    return table


def _console() -> Console:
    console = Console(highlight=False)
    if console.is_terminal:
        return console
    return Console(highlight=False, width=_PIPED_WIDTH)  # a file has no width: one that no row is folded at


def _load_settled(folder: Path, request_id: str | None, settle_s: float) -> tuple[list[SpanRecord], list[SpanRecord]]:
    """Return all spans, and the request's. Waits up to `settle_s` for spans that are not written yet."""
    deadline = time.monotonic() + settle_s
    while True:
        spans = load_spans(folder)
        is_last = time.monotonic() >= deadline or not folder.exists()
        try:
            trace = find_trace(spans, request_id)
        except UserError:
            if is_last or not _is_fresh(spans, settle_s):
                raise
        else:
            has_ended = {SpanName.DECODE, SpanName.KV_RELEASE} <= {span.name for span in trace}
            if is_last or has_ended or not _is_fresh(trace, settle_s):
                return spans, trace
        time.sleep(TRACE_POLL_INTERVAL_S)


def _is_fresh(spans: list[SpanRecord], settle_s: float) -> bool:
    """Return whether more spans may be on their way."""
    return not spans or time.time_ns() - max(span.end_ns for span in spans) < settle_s * 1e9


def _in_tree_order(spans: list[SpanRecord]) -> list[_Row]:
    """Return every span once, children after their parents, siblings by time, spans without a recorded parent last."""
    ids = {span.span_id for span in spans}
    children: defaultdict[str, list[SpanRecord]] = defaultdict(list)
    for span in _by_time(spans):
        children[span.parent_id].append(span)
    roots = [span for span in spans if is_root(span) or not span.parent_id]
    orphans = [span for span in spans if span.parent_id not in ids and not is_root(span) and span.parent_id]
    rows: list[_Row] = []
    seen: set[int] = set()
    # The spans themselves come last: damaged files may hold a circle of parents, which has no top.
    for tops, are_orphans in ((roots, False), (orphans, True), (spans, True)):
        for top in _by_time(tops):
            stack = [_Row(top, 0, are_orphans)]
            while stack:
                row = stack.pop()
                if id(row.span) in seen:
                    continue
                seen.add(id(row.span))
                below = children[row.span.span_id]
                rows.append(replace(row, has_children=bool(below)))
                stack += [_Row(child, row.depth + 1, False) for child in reversed(below)]
    return rows


def _by_time(spans: Iterable[SpanRecord]) -> list[SpanRecord]:
    return sorted(spans, key=lambda span: (span.start_ns, -span.end_ns))


def _header(spans: list[SpanRecord], rows: list[_Row]) -> Text:
    """Return the header: the request's id, trace, TTFT, workers and outcome, as far as the root span has them."""
    first = rows[0].span
    ids = (span.attributes[Key.REQUEST_ID] for span in spans if Key.REQUEST_ID in span.attributes)
    request_id = first.attributes.get(Key.REQUEST_ID) or next(ids, "unknown request")
    header = Text.assemble((_plain(request_id), "bold"), f"  trace {_plain(first.trace_id)}")
    if not is_root(first):
        why = "not finished yet (try again in a second), or its gateway was lost"
        return header.append(f"  no root span: {why}", style="yellow")
    attributes = first.attributes
    ttft = attributes.get(Key.TTFT_MS)
    header.append(f"  TTFT {ttft:.1f} ms" if isinstance(ttft, int | float) else "  no first token")
    workers = [_plain(attributes[key]) for key in (Key.PREFILL_WORKER, Key.DECODE_WORKER) if attributes.get(key)]
    if workers:
        header.append("  " + " → ".join(dict.fromkeys(workers)))
    outcome = _plain(attributes.get(Key.OUTCOME, "")) or "no outcome"
    return header.append(f"  {outcome}", style="red" if has_failed(first) else "green")


def _label(row: _Row) -> str:
    return "  " * row.depth + ("? " if row.is_orphan else "") + _plain(row.span.name)


def _notes(row: _Row, known: Mapping[str, SpanRecord]) -> Text:
    """Return the text at the end of a row: selected attributes, links, outcome or error."""
    span = row.span
    # Where the phases of a transfer are spans of their own, its row need not show them.
    short = _SHORT if row.has_children else _SHORT | _PHASES
    parts = [text for key, write in short.items() if (text := _short(span.attributes.get(key), write))]
    parts += _links(span, known)
    outcome = _plain(span.attributes.get(Key.OUTCOME, ""))
    notes = Text(" ".join(parts), style="dim")
    if outcome and not span.error:
        notes.append(f" {outcome}" if parts else outcome)
    why = span.error or span.attributes.get(Key.REFUSAL, "")
    for extra, style in ((_plain(why), "red"), (_ORPHAN if row.is_orphan else "", "yellow")):
        if extra:
            notes.append(" " * bool(notes.plain)).append(extra, style=style)
    return notes


_SHORT = {
    Key.END: "{}",
    Key.CARRIER: "{}",
    Key.CARRIER_REASON: "({})",
    Key.NUM_BYTES: "bytes",
    Key.GB_PER_S: "{:.2f} GB/s",
    Key.NUM_BLOCKS: "{} blocks",
    Key.NUM_TOKENS: "{} tokens",
    f"{Key.PLACE_TERM}.ttft_ms": "predicted {:.1f} ms:",
    f"{Key.PLACE_TERM}.cached_tokens": "{} cached,",
    f"{Key.PLACE_TERM}.pulled_tokens": "{} read,",
    f"{Key.PLACE_TERM}.computed_tokens": "{} computed",
    Key.SOURCE: "from {}",
    Key.NUM_HOLDERS: "{} holders",
    Key.LOCATE_MS: "directory {:.1f} ms",
    Key.REUSE: "reuse: {}",
    Key.EXPOSED_MS: "exposed {:.1f} ms",
}
"""How attributes are written at the end of a row, in this order."""


_PHASES = {
    Key.LEASE_WAIT_MS: "lease wait {:.1f}",
    Key.FIRST_BYTE_MS: "first byte {:.1f}",
    Key.VERIFY_MS: "verify {:.1f} ms",
}
"""The phases of a transfer, in milliseconds."""


def _links(span: SpanRecord, known: Mapping[str, SpanRecord]) -> list[str]:
    """Return a span's links: how many there are to spans of each name, or to which service where they have its own
    name."""
    counts: defaultdict[str, int] = defaultdict(int)
    for traceparent in span.links:
        linked = known.get(traceparent.split("-")[2] if traceparent.count("-") == 3 else "")
        if linked is None:
            counts["unrecorded"] += 1
        else:
            counts[linked.service if linked.name == span.name else linked.name] += 1
    return [f"↔ {_plain(name)}" if count == 1 else f"↔ {count} {_plain(name)}" for name, count in counts.items()]


def _ttft_parts(root: SpanRecord) -> str:
    """Return the parts of the TTFT as a sum; empty where the root has none."""
    parts = {
        key.removeprefix(_TTFT_PART).removesuffix("_ms"): value
        for key, value in root.attributes.items()
        if key.startswith(_TTFT_PART) and isinstance(value, int | float)
    }
    total = " + ".join(f"{_plain(name)} {value:.1f}" for name, value in parts.items() if value >= _PART_MS_MIN)
    return f"TTFT = {total} ms" if total else ""


def _short(value: AttributeValue | None, write: str) -> str:
    if value is None or value == "":
        return ""
    if isinstance(value, str):
        return write.format(_plain(value)) if "{}" in write else _plain(value)  # a damaged file may have anything
    return _size(value) if write == "bytes" else write.format(value)


def _size(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} GiB"


def _axis(width: int, length_ns: int) -> str:
    """Return the heading of the bars: the time axis."""
    end = f"{length_ns / 1e6:.0f} ms"
    return "0" + end.rjust(width - 1)


def _bar(span: SpanRecord, begin: int, end: int, width: int, mark: str) -> str:
    """Return a span's bar, at least one character long and within the axis."""
    length = max(1, end - begin)
    first = min(width - 1, (span.start_ns - begin) * width // length)
    last = min(width, max(first + 1, -(-(span.end_ns - begin) * width // length)))
    return " " * first + mark * (last - first)


def _plain(value: AttributeValue) -> str:
    """Return the value as printable text on one line: a span may contain what a client sent."""
    return "".join(char if char.isprintable() else " " for char in str(value))
