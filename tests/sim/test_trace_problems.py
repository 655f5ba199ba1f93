"""What the simulator says of links that lead nowhere."""

from services.sim.verdict.traces import trace_problems
from services.telemetry import Key, SpanName, SpanRecord

TRACE = "1" * 32


def lent(number: int, request_id: str) -> SpanRecord:
    """A holder's end of a read whose reader has recorded nothing."""
    attributes = {Key.END: "source", Key.REQUEST_ID: request_id}
    return SpanRecord(
        trace_id=TRACE, span_id=f"{number:016x}", parent_id="f" * 16, name=SpanName.KV_TRANSFER, service="decode-0",
        start_ns=number, end_ns=number + 1, attributes=attributes, links=(f"00-{TRACE}-{number:015x}e-01",),
    )  # fmt: skip


def root() -> SpanRecord:
    return SpanRecord(
        trace_id=TRACE, span_id="f" * 16, parent_id="", name="place", service="gateway", start_ns=0, end_ns=9,
        attributes={},
    )  # fmt: skip


def num_lost(*spans: SpanRecord) -> int:
    return sum("leads nowhere" in problem for problem in trace_problems([root(), *spans], with_kills=False))


def test_a_store_may_still_read_when_a_simulation_ends() -> None:
    assert num_lost(lent(1, "copy-store-0-1")) == 0


def test_no_other_read_may_go_unrecorded() -> None:
    assert num_lost(lent(1, "req-a")) == 1
    assert num_lost(lent(1, "copy-store-0-1"), lent(2, "copy-store-0-2")) == 1, (
        "the first one has ended: another followed"
    )
