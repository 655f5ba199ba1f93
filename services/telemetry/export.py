"""Where spans go, and the thread that brings them there."""

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
    """Takes in spans in the order in which they were recorded: a parent before its children, where one process
    records both. Never raises. `close` comes from another thread, and ends an `export` that is still trying."""

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
        """Nothing is held open."""


class Background:
    """Hands spans to an exporter every half second, on a thread of its own."""

    def __init__(self, exporter: Exporter) -> None:
        self._exporter = exporter
        self._unsent: deque[SpanRecord] = deque()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._is_late = False
        self._num_lost = 0

    def put(self, span: SpanRecord) -> None:
        """Take a span in. Never waits."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="spans", daemon=True)
            self._thread.start()
        if len(self._unsent) >= MAX_UNSENT:
            self._lose(1)
        else:
            self._unsent.append(span)

    def close(self) -> None:
        """Export what is left, as far as it leaves within CLOSE_S."""
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
