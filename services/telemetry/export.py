"""Exporters of spans, and the thread that calls them."""

import logging
import re
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from services.files import open_private, private_folder
from services.telemetry.limits import MAX_BATCH, MAX_UNSENT, TRACE_FILES
from services.telemetry.record import SpanRecord
from services.times import TelemetryTimes

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
    """Appends one JSON object for each span to `{dir}/{service}-{Unix ns}.jsonl`, which `kvmesh trace` reads.

    A file that is full is followed by another, and the service's oldest files go once all of them together have more
    than `max_bytes`, those of its earlier lives included.
    """

    def __init__(self, folder: Path, service: str, max_bytes: int = 64 << 20) -> None:
        private_folder(folder)
        self._folder, self._service, self._max_bytes = folder, service, max_bytes
        self._file_bytes = max(1, max_bytes // TRACE_FILES)
        self._encoder = msgspec.json.Encoder()
        self._has_failed = False
        self._path = self._new_path()

    def export(self, spans: Sequence[SpanRecord]) -> None:
        try:
            with open_private(self._path, "ab") as file:
                file.write(self._encoder.encode_lines(spans))
                is_full = file.tell() >= self._file_bytes
            if is_full:
                self._path = self._new_path()
                self._remove_oldest()
        except OSError as error:
            if not self._has_failed:  # more lines would not help a full disk
                log.warning("spans are lost: cannot write %s: %s", self._path, error.strerror or error)
            self._has_failed = True

    def close(self) -> None:
        """Does nothing: nothing is held open."""

    def _new_path(self) -> Path:
        return self._folder / f"{self._service}-{time.time_ns()}.jsonl"

    def _remove_oldest(self) -> None:
        """Remove this service's oldest files, so that the others and the next one stay within the bound."""
        own = re.compile(re.escape(self._service) + r"-(\d+)\.jsonl")
        found = {int(match[1]): path for path in self._folder.iterdir() if (match := own.fullmatch(path.name))}
        left = self._max_bytes - self._file_bytes
        for started in sorted(found, reverse=True):
            left -= found[started].stat().st_size
            if left < 0:
                found[started].unlink(missing_ok=True)


class Background:
    """Passes spans to an exporter every `export_interval_s`, on a thread of its own."""

    def __init__(self, exporter: Exporter, times: TelemetryTimes) -> None:
        self._exporter = exporter
        self._times = times
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
        """Export what is left, as far as this takes no longer than `close_s`."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join(self._times.close_s)
        self._is_late = True
        self._exporter.close()
        if self._unsent:
            self._lose(len(self._unsent))

    def _run(self) -> None:
        while not self._closing.wait(self._times.export_interval_s):
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
