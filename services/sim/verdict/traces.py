"""Checks that the spans of a simulation make whole trees and that the parts of a TTFT add up to it. Pure."""

from collections import defaultdict

from services.holder.core.copies import COPY_REQUEST
from services.telemetry import Key, SpanName, SpanRecord

HTTP_ROOT = "POST "
TTFT_PARTS = (
    SpanName.TOKENIZE, SpanName.PLACE, SpanName.DISPATCH, SpanName.PREFILL_QUEUE, SpanName.PREFILL_COMPUTE,
    SpanName.FIRST_TOKEN,
)  # fmt: skip


def trace_problems(
    records: list[SpanRecord], *, with_kills: bool, with_corruption: bool = False, clock_ns: float = 0
) -> list[str]:
    """Return what is wrong: a span whose parent was not recorded, a link to no recorded span, a lease granted and never
    released, a span that ends before it begins, a TTFT that its parts do not add up to.

    `with_kills`: killed processes lose their last spans, so trees need not be whole. `with_corruption`: the span ids
    that the two ends of a stream exchange have no digest, so links between them are not checked. `clock_ns`: by so
    much dates of two services may differ.
    """
    by_trace: defaultdict[str, list[SpanRecord]] = defaultdict(list)
    problems: list[str] = []
    for span in records:
        by_trace[span.trace_id].append(span)
        if span.end_ns < span.start_ns:
            problems.append(f"span {span.name} of {span.service} ends before it begins")
    # A span's two ids must be unique: equal pairs become one in the set.
    known = {(span.trace_id, span.span_id) for span in records}
    unfinished = _last_reads_of_stores(records)
    if len(known) < len(records):
        problems.append(f"{len(records) - len(known)} spans have another's name")
    if with_kills:
        return problems
    for trace_id, spans in by_trace.items():
        # Each trace is one tree: it has a single root, and every parent was recorded.
        roots = [span for span in spans if not span.parent_id]
        if not roots and {span.name for span in spans} <= {SpanName.KV_TRANSFER, SpanName.KV_RELEASE}:
            continue  # a store reads on by itself when the simulation ends
        if len(roots) != 1:
            problems.append(f"trace {trace_id} has {len(roots)} roots: {', '.join(root.name for root in roots)}")
        problems += [
            f"trace {trace_id}: {span.name} of {span.service} has no parent"
            for span in spans
            if span.parent_id and (trace_id, span.parent_id) not in known
        ]
        # A lease that served a stream is released. A link leads to a recorded span, unless its reader may read on.
        problems += _unreleased(trace_id, spans)
        problems += [
            f"trace {trace_id}: a link of {span.name} of {span.service} leads nowhere"
            for span in spans
            for link in span.links
            if not (span.name == SpanName.KV_TRANSFER and (with_corruption or span.error))  # its reader may read on
            and span.span_id not in unfinished
            and tuple(link.split("-")[1:3]) not in known
        ]
        # The stream brings the holder's span id to the reader: a read without an error has a link.
        if not with_corruption:
            problems += [
                f"trace {trace_id}: a transfer to {span.service} is linked to no holder's"
                for span in spans
                if span.name == SpanName.KV_TRANSFER
                and span.attributes.get(Key.END) == "target"
                and not (span.error or span.links)
            ]
        if roots and (residual := ttft_residual(spans, clock_ns)) is not None and abs(residual) > MAX_RESIDUAL:
            problems.append(f"trace {trace_id}: the parts of the TTFT lack {residual:.1%} of it")
    return problems


MAX_RESIDUAL = 0.001
"""Both ends of a part are dates that its neighbours and the TTFT have too."""
CLOCK_NS = 1_000_000
"""What two services' dates may differ by: each knows the mesh's clock to half of what a message takes at most."""


def out_of_order(records: list[SpanRecord]) -> list[str]:
    """Return the spans that seem to begin before what they belong to has."""
    known = {(span.trace_id, span.span_id): span for span in records}
    return [
        f"trace {span.trace_id}: {span.name} of {span.service} begins {early_ns / 1e6:.1f} ms before {parent.name} does"
        for span in records
        if (parent := known.get((span.trace_id, span.parent_id))) is not None
        and (early_ns := parent.start_ns - span.start_ns) > CLOCK_NS
    ]


def ttft_residual(spans: list[SpanRecord], clock_ns: float = 0) -> float | None:
    """Return which share of the root's TTFT its parts lack, beyond what clocks explain. None where there is no TTFT, or
    more than one attempt or choice."""
    root = next((span for span in spans if span.name.startswith(HTTP_ROOT)), None)
    ttft_ms = root.attributes.get(Key.TTFT_MS) if root else None
    if not isinstance(ttft_ms, float) or not ttft_ms:
        return None
    parts = [s for s in spans if s.name in TTFT_PARTS and s.attributes.get(Key.ROLE) != "decode"]
    names = [span.name for span in parts if not span.error]
    if sorted(names) != sorted(TTFT_PARTS) or len(parts) > len(names):
        return None
    lacking_ms = ttft_ms - sum(span.end_ns - span.start_ns for span in parts) / 1e6
    return 0.0 if abs(lacking_ms) <= clock_ns / 1e6 else lacking_ms / ttft_ms


def _unreleased(trace_id: str, spans: list[SpanRecord]) -> list[str]:
    """Return the leases under which a holder served a stream and that have no release span: each is a leak."""
    served, released = set[tuple[str, str]](), set[tuple[str, str]]()
    for span in spans:
        lease = (span.service, str(span.attributes.get(Key.LEASE)))
        if span.name == SpanName.KV_TRANSFER and span.attributes.get(Key.END) == "source":
            served.add(lease)
        elif span.name == SpanName.KV_RELEASE:
            released.add(lease)
    return [f"trace {trace_id}: {service} never released {lease}" for service, lease in sorted(served - released)]


def _last_reads_of_stores(records: list[SpanRecord]) -> set[str]:
    """Return the holders' spans of the last read of a store from each: a store reads one after another from a holder,
    and records its end of the last one only after the simulation, where it still waits for the bytes."""
    last: dict[str, SpanRecord] = {}
    for span in sorted(records, key=lambda span: span.start_ns):
        is_source = span.name == SpanName.KV_TRANSFER and span.attributes.get(Key.END) == "source"
        if is_source and str(span.attributes.get(Key.REQUEST_ID, "")).startswith(f"{COPY_REQUEST}store-"):
            last[span.service] = span
    return {span.span_id for span in last.values()}
