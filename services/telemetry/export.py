"""Where spans go, and the thread that brings them there."""

import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from services.telemetry.record import SpanRecord

EXPORT_INTERVAL_S = 0.5
MAX_UNSENT = 65_536
"""Spans that wait to be exported; more are dropped, and counted."""
MAX_BATCH = 512


class Exporter(Protocol):
    """Takes in spans in the order in which they were recorded: a parent before its children, where one process
    records both. Never raises."""

    def export(self, spans: Sequence[SpanRecord]) -> None: ...
    def close(self) -> None: ...


class ListExporter:
    """Keeps what has ended in a list, for a simulation or a test to look at."""

    def __init__(self, records: list[SpanRecord]) -> None:
        self._records = records

    def export(self, spans: Sequence[SpanRecord]) -> None:
        self._records += spans

    def close(self) -> None:
        """Nothing is held open."""


class FileExporter:
    """Appends one JSON object a span to `{dir}/{service}-{started}.jsonl`, which `kvmesh trace` reads."""

    def __init__(self, folder: Path, service: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"{service}-{time.time_ns()}.jsonl"
        self._encoder = msgspec.json.Encoder()
        self.num_lost = 0

    def export(self, spans: Sequence[SpanRecord]) -> None:
        try:
            with self._path.open("ab") as file:
                file.write(self._encoder.encode_lines(spans))
        except OSError:
            self.num_lost += len(spans)

    def close(self) -> None:
        """Nothing is held open."""


class Background:
    """Hands spans to an exporter every half second, on a thread of its own."""

    def __init__(self, exporter: Exporter) -> None:
        self._exporter = exporter
        self._unsent: deque[SpanRecord] = deque()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self.num_dropped = 0

    def put(self, span: SpanRecord) -> None:
        """Take a span in. Never waits."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="spans", daemon=True)
            self._thread.start()
        if len(self._unsent) >= MAX_UNSENT:
            self.num_dropped += 1
        else:
            self._unsent.append(span)

    def close(self) -> None:
        """Export what is left, and wait for it."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()
        self._exporter.close()

    def _run(self) -> None:
        while not self._closing.wait(EXPORT_INTERVAL_S):
            self._export()
        self._export()

    def _export(self) -> None:
        while self._unsent:
            batch = [self._unsent.popleft() for _ in range(min(MAX_BATCH, len(self._unsent)))]
            self._exporter.export(batch)
