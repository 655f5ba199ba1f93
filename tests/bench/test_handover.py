"""The phases of a hand-over, as they are read from a trace: the simulator's, and one with times that are known."""

import pytest

from services.telemetry import Key, SpanName, SpanRecord
from tests.bench.bench_handover import Phases, early_start, phases_of, table
from tests.sim.trees import CASES, spans_of

MS = 1_000_000


def span(name: str, start_ms: int, end_ms: int, **attributes: str | float) -> SpanRecord:
    return SpanRecord(
        trace_id="t",
        span_id=name,
        parent_id="",
        name=name,
        service="s",
        start_ns=start_ms * MS,
        end_ns=end_ms * MS,
        attributes={getattr(Key, key): value for key, value in attributes.items()},
    )


def trace(last_byte_ms: int) -> list[SpanRecord]:
    """Return a request's spans: token 0 is computed after 100 ms, all has landed after 112."""
    return [
        span("POST /v1/completions", 0, 200, TTFT_MS=101.0),
        span(SpanName.DISPATCH, 1, 3, ROLE="decode"),
        span(SpanName.DISPATCH, 1, 9, ROLE="prefill"),
        span(SpanName.PREFILL_COMPUTE, 5, 100),
        span(SpanName.KV_TRANSFER, 7, 112, END="target", COPY_MS=4.0, VERIFY_MS=2.0),
        span(SpanName.KV_TRANSFER, 8, 112, END="source", COPY_MS=9.0, VERIFY_MS=9.0),
        span(SpanName.KV_LEASE_WAIT, 7, 10),
        span(SpanName.KV_FIRST_BYTE, 10, 16),
        span(SpanName.KV_STREAM, 16, last_byte_ms),
        span(SpanName.KV_VERIFY, last_byte_ms, 112),
        span(SpanName.DECODE, 113, 180),
        span(SpanName.DECODE_QUEUE, 113, 115),
        span(SpanName.DECODE_FIRST_STEP, 115, 121),
    ]


def test_phases_before_and_after_token_0() -> None:
    assert phases_of(trace(last_byte_ms=107)) == Phases(
        ttft_ms=101.0, reserve_ms=2.0, offer_ms=4.0, open_ms=3.0, first_byte_ms=6.0, stream_ms=91.0, copy_ms=4.0,
        digest_ms=2.0, late_ms=7.0, commit_ms=5.0, submit_ms=1.0, engine_wait_ms=2.0, first_step_ms=6.0,
    )  # fmt: skip
    assert phases_of(trace(last_byte_ms=107)).exposed_ms == 15.0


def test_nothing_is_late_that_was_there_before_token_0() -> None:
    found = phases_of(trace(last_byte_ms=98))
    assert (found.late_ms, found.commit_ms, found.exposed_ms) == (0.0, 12.0, 15.0)
    assert "at most 0.00 ms (the largest of all requests: 7.00 ms)" in early_start(
        100, [found, found, phases_of(trace(last_byte_ms=107))]
    )
    assert table({100: [found]}).row_count == 14


def test_a_real_trace_has_all_phases() -> None:
    spans = [each for each in spans_of(CASES[0]) if each.name != SpanName.ENGINE_STEP]
    found = phases_of(spans)
    assert found.ttft_ms > 0 and found.first_step_ms > 0 and found.stream_ms >= 0


def test_a_request_without_a_hand_over_has_none() -> None:
    with pytest.raises(KeyError):
        phases_of([each for each in trace(107) if each.name != SpanName.DECODE])
