"""What a holder of KV measures: its blocks, the leases on them, what it reads, what its engine does."""

import time
from collections.abc import Callable
from typing import Literal

from dataplane.protocol.stream import TransferStats
from schemas.ids import WorkerId
from schemas.kv import LeaseEnd, ReadEnd
from schemas.request import Refused
from schemas.worker import WorkerLoad
from services import metric_names as names
from services.engine.interface import StepResult
from services.metrics import Metrics
from services.runtime import now_ms
from services.worker.core.leases import Grant, LeaseTable
from services.worker.limits import MAX_MEASURED_PAIRS, UNREAD_AFTER_MS

ReadKind = Literal["handover", "fetch"]


class HolderMetrics:
    """What a worker and the store have in common. `load` says how things stand."""

    def __init__(self, metrics: Metrics, load: Callable[[], WorkerLoad], leases: LeaseTable, block_bytes: int) -> None:
        self.metrics = metrics
        self._leases = leases
        self._load = load
        self._block_bytes = block_bytes
        metrics.on_sample(self._sample)
        metrics.on_sample(self._sample_leases)

    def refused(self, what: str, reply: object) -> None:
        """Count a reply, where it is a refusal."""
        if isinstance(reply, Refused):
            self.metrics.inc(names.REFUSALS, what, reply.reason)

    def fenced(self) -> None:
        """It begins as a new incarnation."""
        self.metrics.inc(names.FENCES)

    def lease_ended(self, lease: Grant) -> None:
        """Count how a lease has ended, and its blocks where they were held for nobody."""
        end = LeaseEnd.CANCELLED if lease.end is None or lease.end is LeaseEnd.UNNEEDED else lease.end
        self.metrics.inc(names.LEASES_ENDED, end)
        if end in names.STRANDED:
            self.metrics.inc(names.STRANDED_BLOCKS, end, by=lease.num_blocks)

    def _sample_leases(self) -> None:
        time_ms, leases = now_ms(), list(self._leases)
        ages_s = [(time_ms - lease.granted_ms) / 1000 for lease in leases]
        self.metrics.set_series(names.LEASES, {(age,): count for age, count in names.by_age(ages_s).items()})
        waiting = [lease for lease in leases if lease.readable_ns and not lease.is_read]
        unread = sum(w.num_blocks for w in waiting if time_ms - w.readable_ns // 1_000_000 > UNREAD_AFTER_MS)
        self.metrics.set_series(names.UNREAD_BLOCKS, {(): unread})

    def _sample(self) -> None:
        load, put = self._load(), self.metrics.set_series
        worker_id = load.worker.worker_id
        put(names.KV_BLOCKS, {(worker_id, s): getattr(load.blocks, s) for s in names.BLOCK_STATES})
        put(names.ORPHANED_BYTES, {(): load.blocks.orphaned * self._block_bytes})
        put(names.REFUSED_READS, {(): load.num_refused_reads})
        put(names.WORKER_REQUESTS, {("running",): load.num_running, ("queued",): load.num_queued})
        if load.worker.role == "store":
            return
        waiting = {
            ("compute",): load.num_uncomputed_tokens - load.num_unreceived_tokens,
            ("receive",): load.num_unreceived_tokens,
        }
        put(names.WAITING_TOKENS, waiting)
        put(names.ENGINE_STARTS, {(): load.engine.num_starts})
        put(names.ENGINE_DEATHS, {(): load.engine.num_deaths})
        put(names.ENGINE_SPARES, {(): load.engine.num_spares})
        put(names.ENGINE_READY_SECONDS, {(): load.engine.ready_ms / 1000})


class WorkerMetrics(HolderMetrics):
    """One worker's."""

    def __init__(self, metrics: Metrics, load: Callable[[], WorkerLoad], leases: LeaseTable, block_bytes: int) -> None:
        super().__init__(metrics, load, leases, block_bytes)
        self._rates: dict[tuple[str, str], float] = {}
        """Bytes a second, by source and carrier; the one heard of last is at the end."""
        metrics.on_sample(lambda: metrics.set_series(names.TRANSFER_RATE, self._rates))

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
