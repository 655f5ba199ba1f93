"""What a holder of KV measures: its blocks and the leases on them."""

from collections.abc import Callable

from schemas.kv import LeaseEnd
from schemas.request import Refused
from schemas.worker import WorkerLoad
from services import metric_names as names
from services.holder.core.leases import Grant, LeaseTable
from services.holder.limits import UNREAD_AFTER_MS
from services.metrics import Metrics
from services.runtime import now_ms


class HolderMetrics:
    """One worker's or store's. `load` returns how things stand."""

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
