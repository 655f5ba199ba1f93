"""Exporters of spans, and the thread that calls them."""

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from services.telemetry.limits import CLOSE_S, EXPORT_INTERVAL_S, MAX_BATCH, MAX_UNSENT
from services.telemetry.record import SpanRecord

log = logging.getLogger(__name__)


class Exporter(Protocol):
    """Takes spans in the order in which they were recorded: a parent before its children where one process records
    both.

    `export` never raises. `close` is called from another thread, and ends an `export` that still tries.
    """

    def export(self, spans: Sequence[SpanRecord]) -> None: ...
    def close(self) -> None: ...


class ListExporter:
    """Appends spans to a list, for a simulation or a test."""

    def __init__(self, records: list[SpanRecord]) -> None:
        self._records = records

    def export(self, spans: Sequence[SpanRecord]) -> None:
        self._records += spans

    def close(self) -> None:
        """Does nothing: nothing is held open."""


class FileExporter:
    """Appends one JSON object for each span to `{dir}/{service}-{started}.jsonl`, which `kvmesh trace` reads."""

    def __init__(self, folder: Path, service: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"{service}-{time.time_ns()}.jsonl"
        self._encoder = msgspec.json.Encoder()
        self._has_failed = False

    def export(self, spans: Sequence[SpanRecord]) -> None:
        try:
            with self._path.open("ab") as file:
                file.write(self._encoder.encode_lines(spans))
        except OSError as error:
            if not self._has_failed:  # more lines would not help a full disk
                log.warning("spans are lost: cannot write %s: %s", self._path, error.strerror or error)
            self._has_failed = True

    def close(self) -> None:
        """Does nothing: nothing is held open."""


class Background:
    """Passes spans to an exporter every EXPORT_INTERVAL_S, on a thread of its own."""

    def __init__(self, exporter: Exporter) -> None:
        self._exporter = exporter
        self._unsent: deque[SpanRecord] = deque()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._is_late = False
        self._num_lost = 0

    def put(self, span: SpanRecord) -> None:
        """Queue a span for export. Never waits; where MAX_UNSENT wait already the span is dropped and counted."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="spans", daemon=True)
            self._thread.start()
        if len(self._unsent) >= MAX_UNSENT:
            self._lose(1)
        else:
            self._unsent.append(span)

    def close(self) -> None:
        """Export what is left, as far as this takes no longer than CLOSE_S."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join(CLOSE_S)
        self._is_late = True
        self._exporter.close()
        if self._unsent:
            self._lose(len(self._unsent))

    def _run(self) -> None:
        while not self._closing.wait(EXPORT_INTERVAL_S):
            self._export()
        self._export()

    def _export(self) -> None:
        while self._unsent and not self._is_late:
            batch = [self._unsent.popleft() for _ in range(min(MAX_BATCH, len(self._unsent)))]
            self._exporter.export(batch)

    def _lose(self, num: int) -> None:
        before, self._num_lost = self._num_lost, self._num_lost + num
        if before.bit_length() != self._num_lost.bit_length():  # the 1st, 2nd, 4th, 8th …
            log.warning("%d spans are lost: they come faster than they can be exported", self._num_lost)
