"""Exporters of spans that need no back end: to files and to a list."""

import logging
import re
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from services.files import open_private, private_folder
from services.telemetry.limits import TRACE_FILES
from services.telemetry.record import SpanRecord, record_of

log = logging.getLogger(__name__)


class ListExporter(SpanExporter):
    """Appends spans to a list, for a simulation or a test."""

    def __init__(self, records: list[SpanRecord]) -> None:
        self._records = records

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self._records += map(record_of, spans)
        return SpanExportResult.SUCCESS


class FileExporter(SpanExporter):
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

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        try:
            with open_private(self._path, "ab") as file:
                file.write(self._encoder.encode_lines(map(record_of, spans)))
                is_full = file.tell() >= self._file_bytes
            if is_full:
                self._path = self._new_path()
                self._remove_oldest()
        except OSError as error:
            if not self._has_failed:  # more lines would not help a full disk
                log.warning("spans are lost: cannot write %s: %s", self._path, error.strerror or error)
            self._has_failed = True
            return SpanExportResult.FAILURE
        return SpanExportResult.SUCCESS

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
