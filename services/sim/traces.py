"""Whether the spans of a simulation make whole trees. Pure."""

from collections import defaultdict
from typing import cast

from services.telemetry import Key, SpanName

Record = dict[str, object]
HTTP_ROOT = "POST "


def trace_problems(records: list[Record], *, with_kills: bool) -> list[str]:
    """Return what is wrong: a span whose parent nobody recorded, a lease granted and never released, a span that ends
    before it begins. Of a process that was killed the last spans are missing: `with_kills` asks for no whole trees."""
    problems: list[str] = []
    by_trace: defaultdict[str, list[Record]] = defaultdict(list)
    for record in records:
        by_trace[str(record["trace_id"])].append(record)
        if _ns(record, "end_ns") < _ns(record, "start_ns"):
            problems.append(f"span {record['name']} of {record['service']} ends before it begins")
    if with_kills:
        return problems
    for trace_id, spans in by_trace.items():
        roots = [span for span in spans if not span["parent_id"]]
        if not any(str(root["name"]).startswith(HTTP_ROOT) for root in roots) and len(spans) == len(roots):
            continue  # what a store reads for itself belongs to no request
        if len(roots) != 1:
            problems.append(f"trace {trace_id} has {len(roots)} roots")
        known = {span["span_id"] for span in spans}
        problems += [
            f"trace {trace_id}: {span['name']} of {span['service']} has no parent"
            for span in spans
            if span["parent_id"] and span["parent_id"] not in known
        ]
        problems += _unreleased(trace_id, spans)
    return problems


def _unreleased(trace_id: str, spans: list[Record]) -> list[str]:
    """Every lease under which a holder served a stream ends in a release: its absence is a leak."""
    served, released = set[tuple[str, str]](), set[tuple[str, str]]()
    for span in spans:
        attributes = cast("dict[str, object]", span["attributes"])
        lease = (str(span["service"]), str(attributes.get(Key.LEASE)))
        if span["name"] == SpanName.KV_TRANSFER and attributes.get(Key.END) == "source":
            served.add(lease)
        elif span["name"] == SpanName.KV_RELEASE:
            released.add(lease)
    return [f"trace {trace_id}: {service} never released {lease}" for service, lease in sorted(served - released)]


def _ns(record: Record, key: str) -> int:
    value = record[key]
    return value if isinstance(value, int) else 0
