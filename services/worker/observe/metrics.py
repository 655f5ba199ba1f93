"""What a worker measures beside its blocks and leases: what it reads, what its engine does."""

import time
from collections.abc import Callable
from typing import Literal

from dataplane.protocol.stream import TransferStats
from schemas.ids import WorkerId
from schemas.kv import ReadEnd
from schemas.worker import WorkerLoad
from services import metric_names as names
from services.engine.messages import StepResult
from services.holder.limits import MAX_MEASURED_PAIRS
from services.metrics import Metrics

ReadKind = Literal["handover", "fetch"]


class WorkerMetrics:
    """One worker's. `load` returns how things stand."""

    def __init__(self, metrics: Metrics, load: Callable[[], WorkerLoad]) -> None:
        self.metrics = metrics
        self._load = load
        self._num_late = 0
        self._rates: dict[tuple[str, str], float] = {}
        """Bytes a second, by source and carrier; the one measured last is at the end."""
        metrics.on_sample(self._sample)

    def _sample(self) -> None:
        load, put = self._load(), self.metrics.set_series
        put(names.TRANSFER_RATE, self._rates)
        waiting = {
            ("compute",): load.num_uncomputed_tokens - load.num_unreceived_tokens,
            ("receive",): load.num_unreceived_tokens,
        }
        put(names.WAITING_TOKENS, waiting)
        put(names.ENGINE_STARTS, {(): load.engine.num_starts})
        put(names.ENGINE_DEATHS, {(): load.engine.num_deaths})
        put(names.ENGINE_SPARES, {(): load.engine.num_spares})
        put(names.ENGINE_READY_SECONDS, {(): load.engine.ready_ms / 1000})

    def dropped_late(self, num_late: int) -> None:
        """So many events in all have meant nothing (any more) to the attempts that they were about."""
        if num_late > self._num_late:
            self.metrics.inc(names.DROPPED, "late", by=num_late - self._num_late)
            self._num_late = num_late

    def stepped(self, result: StepResult) -> None:
        """Count an engine step."""
        num_prefill, num_decode = result.num_prefill_tokens, result.num_decode_tokens
        phase = "mixed" if num_prefill and num_decode else "prefill" if num_prefill else "decode"
        self.metrics.observe(names.STEP_SECONDS, (result.ended_ns - result.started_ns) / 1e9, phase)
        self.metrics.observe(names.BATCH_SIZE, len(result.computed))
        if num_prefill:
            self.metrics.inc(names.ENGINE_TOKENS, "prefill", by=num_prefill)
        if num_decode:
            self.metrics.inc(names.ENGINE_TOKENS, "decode", by=num_decode)

    def count_read(
        self,
        kind: ReadKind,
        source: WorkerId,
        started_ns: int,
        stats: TransferStats | None,
        end: ReadEnd,
        traceparent: str,
    ) -> None:
        """A read has ended that began at `started_ns`. `stats` None: it has not landed."""
        metrics = self.metrics
        metrics.inc(names.TRANSFERS, end, trace=traceparent)
        if stats is None:
            return
        seconds = (time.monotonic_ns() - started_ns) / 1e9
        metrics.inc(names.TRANSFER_BYTES, source, stats.carrier, by=stats.num_bytes, trace=traceparent)
        metrics.inc(names.TRANSFER_WIRE_BYTES, source, stats.carrier, by=stats.num_wire_bytes)
        metrics.observe(names.TRANSFER_SECONDS, seconds, kind, trace=traceparent)
        metrics.observe(names.TRANSFER_SIZE, stats.num_bytes, kind, trace=traceparent)
        self._rates.pop((source, stats.carrier), None)
        self._rates[(source, stats.carrier)] = stats.num_bytes / max(1e-6, stats.copy_ns / 1e9)
        if len(self._rates) > MAX_MEASURED_PAIRS:
            del self._rates[next(iter(self._rates))]

    def exposed(self, seconds: float, traceparent: str) -> None:
        """A hand-over landed so long after the prompt was computed."""
        self.metrics.observe(names.EXPOSED, seconds, trace=traceparent)
