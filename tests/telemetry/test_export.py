"""Spans on their way out: nothing that is in their way keeps a service waiting, and what is lost is said."""

import threading
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import SpanContext

from services.cli.recorded import load_spans
from services.telemetry import SpanName, SpanRecord, Telemetry
from services.telemetry import spans as spans_module
from services.telemetry.export import FileExporter, ListExporter
from services.telemetry.record import record_of
from services.times import TelemetryTimes


def span(number: int = 1) -> ReadableSpan:
    context = SpanContext(number, 1, is_remote=False)
    resource = Resource({"service.instance.id": "s"})
    return ReadableSpan("place", context, resource=resource, attributes={}, start_time=1, end_time=2)


def record(telemetry: Telemetry, number: int) -> None:
    telemetry.record(SpanName.PLACE, "", (1, 2), {}, own=f"00-{number:032x}-{1:016x}-01")


class Stuck(SpanExporter):
    """A back end that takes the first batch for ever, until it is closed."""

    def __init__(self) -> None:
        self.closed = threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.closed.wait()
        return SpanExportResult.FAILURE

    def shutdown(self) -> None:
        self.closed.set()


def test_what_is_left_leaves_at_the_end() -> None:
    records: list[SpanRecord] = []
    telemetry = Telemetry("s", [ListExporter(records)])
    for number in range(1, 2_000):
        record(telemetry, number)
    telemetry.close()
    assert [record.trace_id for record in records] == [f"{number:032x}" for number in range(1, 2_000)]


def test_a_stuck_back_end_does_not_keep_a_service_from_its_end(caplog: pytest.LogCaptureFixture) -> None:
    stuck = Stuck()
    telemetry = Telemetry("s", [stuck], times=TelemetryTimes(close_s=0.1))
    for number in range(1, 2_000):
        record(telemetry, number)
    telemetry.close()
    assert stuck.closed.is_set()
    assert "the last spans are lost" in caplog.text


def test_spans_that_come_too_fast_are_lost_aloud(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(spans_module, "MAX_UNSENT", 10)
    monkeypatch.setattr(spans_module, "MAX_BATCH", 10)
    stuck = Stuck()
    telemetry = Telemetry("s", [stuck], times=TelemetryTimes(close_s=0.1))
    for number in range(1, 100):
        record(telemetry, number)
    telemetry.close()
    assert "Queue full, dropping Span" in caplog.text


def test_a_file_that_cannot_be_written_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    exporter = FileExporter(tmp_path / "traces", "s")
    (tmp_path / "traces").rmdir()
    exporter.export([span()])
    exporter.export([span()])
    assert caplog.text.count("spans are lost") == 1


def test_a_services_files_stay_within_their_bound_and_the_oldest_go(tmp_path: Path) -> None:
    size = len(msgspec.json.encode(record_of(span()))) + 1
    max_bytes = 80 * size
    earlier, others = tmp_path / "s-1.jsonl", [tmp_path / "s-1-1.jsonl", tmp_path / "t-1.jsonl"]
    for path in (earlier, *others):
        path.write_bytes(b"x" * (size - 1) + b"\n")
    exporter = FileExporter(tmp_path, "s", max_bytes)
    for number in range(1, 301):
        exporter.export([span(number)])
        own = [path for path in tmp_path.glob("s-*.jsonl") if path not in others]
        assert sum(path.stat().st_size for path in own) <= max_bytes
    assert not earlier.exists() and all(path.exists() for path in others)
    kept = sorted(int(record.trace_id, 16) for record in load_spans(tmp_path))
    assert kept == list(range(301 - len(kept), 301)) and len(kept) >= 60, "the last ones, without a gap"
