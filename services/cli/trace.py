"""`kvmesh trace`: one request's spans, read from the files that the services wrote, as a waterfall."""

import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from services.errors import UserError
from services.telemetry import AttributeValue, Key, SpanName

_ROOT_PREFIX = "POST "
_ID_PREFIXES = ("req-", "cmpl-", "chatcmpl-")
_SETTLE_S = 2.0
"""Services export every half second; spans older than this are all there."""
_POLL_INTERVAL_S = 0.1
_PIPED_WIDTH = 140
_MIN_BAR, _MAX_BAR = 10, 80
_MIN_NOTES = 14
_GAP = 2
_ORPHAN = "orphan: its parent was not recorded"


class SpanRecord(msgspec.Struct, frozen=True):
    """A line of a span file. `parent_id` is empty for a span without a parent, `error` for one that went well."""

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    service: str
    start_ns: int
    end_ns: int
    error: str = ""
    attributes: dict[str, str | int | float | bool] = {}


@dataclass(frozen=True, slots=True)
class _Row:
    span: SpanRecord
    depth: int
    is_orphan: bool


def load_spans(folder: Path) -> list[SpanRecord]:
    """Return all spans of a folder's *.jsonl, in no order. Lines that are no span (a torn last one) are skipped; a
    folder that does not exist is empty."""
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
    """Return the spans of a request (as the gateway or the API calls it), or those of the request that started last.

    Where a client has put several requests into one trace, the others' spans are left out. Raises UserError.
    """
    by_id = {span.span_id: span for span in spans}
    if request_id is None:
        found = _tops(spans, by_id)
        if not found:
            raise UserError("no trace yet: send a request to a running mesh, or name its span files with --folder")
    else:
        wanted = _bare_id(request_id)
        found = [span for span in spans if _bare_id(str(span.attributes.get(Key.REQUEST_ID, ""))) == wanted]
        if not wanted or not found:
            raise UserError(
                f"no trace of {request_id!r}: take the id from the answer's x-request-id, "
                "or leave it out for the last request"
            )
    chosen = max(found, key=lambda span: span.start_ns)
    trace = [span for span in spans if span.trace_id == chosen.trace_id]
    root = _top_of(chosen, by_id)
    if not _is_root(root):
        return trace
    return [span for span in trace if (top := _top_of(span, by_id)) is root or not _is_root(top)]


def render_waterfall(spans: list[SpanRecord], console: Console) -> None:
    """Print one trace: a header, then a row for each span, children under their parents, in time order."""
    if not spans:
        return
    rows = _in_tree_order(spans)
    begin, end = min(span.start_ns for span in spans), max(span.end_ns for span in spans)
    console.print(_header(spans, rows), soft_wrap=True)
    cells = {
        "span": [_label(row) for row in rows],
        "service": [_plain(row.span.service) for row in rows],
        "start": [f"{(row.span.start_ns - begin) / 1e6:.1f}" for row in rows],
        "ms": [f"{(row.span.end_ns - row.span.start_ns) / 1e6:.1f}" for row in rows],
    }
    notes = [_notes(row) for row in rows]
    bar_width = _fit(cells, max(note.cell_len for note in notes), console.width)
    mark = "#" if console.options.ascii_only else "█"
    table = Table(box=None, padding=(0, _GAP, 0, 0), pad_edge=False, header_style="dim")
    for title in cells:
        table.add_column(title, no_wrap=True, justify="right" if title in ("start", "ms") else "left")
    if bar_width:
        table.add_column(_axis(bar_width, end - begin), no_wrap=True)
    table.add_column("", overflow="fold")
    for index, row in enumerate(rows):
        plain = "bold" if _is_root(row.span) else ""
        texts = [Text(column[index], style="dim" if title == "service" else plain) for title, column in cells.items()]
        if bar_width:
            texts.append(Text(_bar(row.span, begin, end, bar_width, mark), style="cyan"))
        if row.span.error:
            for text in texts:
                text.style = "red"
        table.add_row(*texts, notes[index])
    console.print(table)


def _fit(cells: dict[str, list[str]], widest_notes: int, width: int) -> int:
    """Return how wide the bars may be, 0 where there is no room for them; take out the column that then has to go."""

    def room() -> int:
        return width - sum(max(len(title), *map(len, column)) + _GAP for title, column in cells.items())

    if (left := room() - _GAP - min(widest_notes, _MIN_NOTES)) >= _MIN_BAR:
        return max(_MIN_BAR, min(_MAX_BAR, left, room() - _GAP - widest_notes))
    if room() < _MIN_NOTES:
        del cells["service"]
    return 0


def show_trace(folder: Path, request_id: str | None) -> None:
    """Print a request's trace, the last one's for None, waiting a moment for spans on their way. Raises UserError."""
    trace = _load_settled(folder, request_id)
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_PIPED_WIDTH)  # a file has no width: one that no row is folded at
    render_waterfall(trace, console)


def _load_settled(folder: Path, request_id: str | None) -> list[SpanRecord]:
    """Return the trace, at the latest after the time that exporting takes."""
    deadline = time.monotonic() + _SETTLE_S
    while True:
        spans = load_spans(folder)
        is_last = time.monotonic() >= deadline or not folder.exists()
        try:
            trace = find_trace(spans, request_id)
        except UserError:
            if is_last or not _is_fresh(spans):
                raise
        else:
            if is_last or not _is_fresh(trace) or {SpanName.DECODE, SpanName.KV_RELEASE} <= {s.name for s in trace}:
                return trace
        time.sleep(_POLL_INTERVAL_S)


def _is_fresh(spans: list[SpanRecord]) -> bool:
    """Say whether more spans may be on their way."""
    return not spans or time.time_ns() - max(span.end_ns for span in spans) < _SETTLE_S * 1e9


def _is_root(span: SpanRecord) -> bool:
    """The gateway's span of a request. It has a parent that we never see where the client sent a traceparent."""
    return span.name.startswith(_ROOT_PREFIX)


def _tops(spans: list[SpanRecord], by_id: dict[str, SpanRecord]) -> list[SpanRecord]:
    """Return the topmost spans that stand for requests: one that has no parent and is no root belongs to none, so it
    counts only where there is nothing else."""
    tops = [span for span in spans if _is_root(span) or span.parent_id not in by_id]
    return [span for span in tops if _is_root(span) or span.parent_id] or tops


def _top_of(span: SpanRecord, by_id: dict[str, SpanRecord]) -> SpanRecord:
    """Return the root above a span, or the highest recorded span where there is none."""
    seen: set[str] = set()
    while not _is_root(span) and span.parent_id in by_id and span.span_id not in seen:
        seen.add(span.span_id)
        span = by_id[span.parent_id]
    return span


def _bare_id(request_id: str) -> str:
    """The gateway's id and the API's differ in their prefix only."""
    for prefix in _ID_PREFIXES:
        if request_id.startswith(prefix):
            return request_id.removeprefix(prefix)
    return request_id


def _in_tree_order(spans: list[SpanRecord]) -> list[_Row]:
    """Return every span exactly once, children after their parents, siblings by time; roots before orphans."""
    ids = {span.span_id for span in spans}
    children: defaultdict[str, list[SpanRecord]] = defaultdict(list)
    for span in _by_time(spans):
        children[span.parent_id].append(span)
    roots = [span for span in spans if _is_root(span) or not span.parent_id]
    orphans = [span for span in spans if span.parent_id not in ids and not _is_root(span) and span.parent_id]
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
                rows.append(row)
                stack += [_Row(child, row.depth + 1, False) for child in reversed(children[row.span.span_id])]
    return rows


def _by_time(spans: Iterable[SpanRecord]) -> list[SpanRecord]:
    return sorted(spans, key=lambda span: (span.start_ns, -span.end_ns))


def _header(spans: list[SpanRecord], rows: list[_Row]) -> Text:
    """Return the line over the waterfall: what the root says, or that there is none."""
    first = rows[0].span
    ids = (span.attributes[Key.REQUEST_ID] for span in spans if Key.REQUEST_ID in span.attributes)
    request_id = first.attributes.get(Key.REQUEST_ID) or next(ids, "unknown request")
    header = Text.assemble((_plain(request_id), "bold"), f"  trace {_plain(first.trace_id)}")
    if not _is_root(first):
        return header.append("  not finished, or its gateway was lost: no root span", style="yellow")
    attributes = first.attributes
    ttft = attributes.get(Key.TTFT_MS)
    header.append(f"  TTFT {ttft:.1f} ms" if isinstance(ttft, int | float) else "  no first token")
    workers = [_plain(attributes[key]) for key in (Key.PREFILL_WORKER, Key.DECODE_WORKER) if attributes.get(key)]
    if workers:
        header.append("  " + " → ".join(dict.fromkeys(workers)))
    outcome = _plain(attributes.get(Key.OUTCOME, "")) or "no outcome"
    return header.append(f"  {outcome}", style="red" if first.error else "green")


def _label(row: _Row) -> str:
    return "  " * row.depth + ("? " if row.is_orphan else "") + _plain(row.span.name)


def _notes(row: _Row) -> Text:
    """Return the end of a row: the attributes that matter, in short."""
    span = row.span
    parts = [text for key, write in _SHORT.items() if (text := _short(span.attributes.get(key), write))]
    outcome = _plain(span.attributes.get(Key.OUTCOME, ""))
    notes = Text(" ".join(parts), style="dim")
    if outcome and not span.error:
        notes.append(f" {outcome}" if parts else outcome)
    for extra, style in ((_plain(span.error), "red"), (_ORPHAN if row.is_orphan else "", "yellow")):
        if extra:
            notes.append(" " * bool(notes.plain)).append(extra, style=style)
    return notes


_SHORT = {
    Key.END: "{}",
    Key.CARRIER: "{}",
    Key.NUM_BYTES: "bytes",
    Key.GB_PER_S: "{:.2f} GB/s",
    Key.NUM_BLOCKS: "{} blocks",
    Key.NUM_TOKENS: "{} tokens",
    f"{Key.PLACE_TERM}.ttft_ms": "predicted {:.1f} ms:",
    f"{Key.PLACE_TERM}.cached_tokens": "{} cached,",
    f"{Key.PLACE_TERM}.pulled_tokens": "{} read,",
    f"{Key.PLACE_TERM}.computed_tokens": "{} computed",
    Key.SOURCE: "from {}",
    Key.EXPOSED_MS: "exposed {:.1f} ms",
}
"""How an attribute is written at the end of a row, in this order."""


def _short(value: AttributeValue | None, write: str) -> str:
    if value is None or value == "":
        return ""
    if isinstance(value, str):
        return _plain(value)
    return _size(value) if write == "bytes" else write.format(value)


def _size(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} GiB"


def _axis(width: int, length_ns: int) -> str:
    """Return the bars' heading: the common time axis."""
    end = f"{length_ns / 1e6:.0f} ms"
    return "0" + end.rjust(width - 1)


def _bar(span: SpanRecord, begin: int, end: int, width: int, mark: str) -> str:
    """Return a span's bar: never empty, never over the axis."""
    length = max(1, end - begin)
    first = min(width - 1, (span.start_ns - begin) * width // length)
    last = min(width, max(first + 1, -(-(span.end_ns - begin) * width // length)))
    return " " * first + mark * (last - first)


def _plain(value: AttributeValue) -> str:
    """Return text for one line of a terminal: what a span says may come from a client."""
    return "".join(char if char.isprintable() else " " for char in str(value))
