"""What a holder of KV measures: its blocks, the leases on them, what it reads, what its engine does."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from dataplane.protocol.stream import TransferStats
from schemas.ids import LeaseId, WorkerId
from schemas.message import Message
from schemas.request import Refused
from schemas.worker import WorkerLoad
from services import metric_names as names
from services.engine.interface import StepResult
from services.metrics import Metrics
from services.runtime import now_ms

ReadKind = Literal["handover", "fetch"]

MAX_PAIRS = 64
"""Sources and carriers whose rate is told."""
UNREAD_AFTER_MS = 1_000
"""A reader opens its stream as soon as it has its ticket. A prompt that nobody has room for is given up sooner."""
_LEASE_OUTCOMES = {
    "landed": "landed",
    "returned": "returned",
    "the reader left": "reader_left",
    "expired": "expired",
    "the lease expired": "expired",
    "the stream has ended, and its reader said nothing more": "silent",
    "deadline": "deadline",
}
"""By the reasons that the cores give. What ends a lease otherwise is a cancellation, in words of its own."""


@dataclass(slots=True)
class _Leased:
    """`readable_ms`: since when all of it could be read; None: some of it is still being computed."""

    granted_ms: int
    num_blocks: int
    readable_ms: int | None
    is_read: bool = False


@dataclass
class LeaseBook:
    """The active leases of one holder, as far as they are measured."""

    metrics: Metrics
    _leases: dict[LeaseId, _Leased] = field(default_factory=dict[LeaseId, _Leased])

    def __post_init__(self) -> None:
        self.metrics.on_sample(self._sample)

    def granted(self, lease_id: LeaseId, num_blocks: int, *, is_computed: bool = True) -> None:
        """A lease was granted."""
        time_ms = now_ms()
        self._leases[lease_id] = _Leased(time_ms, num_blocks, time_ms if is_computed else None)

    def computed(self, lease_id: LeaseId) -> None:
        """All of it can be read now."""
        if leased := self._leases.get(lease_id):
            leased.readable_ms = now_ms()

    def reading(self, lease_id: LeaseId, *, is_read: bool) -> None:
        """A stream on it has begun, or ended."""
        if leased := self._leases.get(lease_id):
            leased.is_read = is_read

    def ended(self, lease_id: LeaseId, reason: str) -> None:
        """It has ended: only the first time counts."""
        leased = self._leases.pop(lease_id, None)
        if leased is None:
            return
        outcome = _LEASE_OUTCOMES.get(reason, "cancelled")
        self.metrics.inc(names.LEASES_ENDED, outcome)
        if outcome in names.STRANDED:
            self.metrics.inc(names.STRANDED_BLOCKS, outcome, by=leased.num_blocks)

    def _sample(self) -> None:
        time_ms = now_ms()
        ages_s = [(time_ms - leased.granted_ms) / 1000 for leased in self._leases.values()]
        self.metrics.put(names.LEASES, {(age,): count for age, count in names.by_age(ages_s).items()})
        waiting = [leased for leased in self._leases.values() if leased.readable_ms is not None and not leased.is_read]
        unread = sum(w.num_blocks for w in waiting if time_ms - (w.readable_ms or 0) > UNREAD_AFTER_MS)
        self.metrics.put(names.UNREAD_BLOCKS, {(): unread})


class HolderMetrics:
    """What a worker and the store have in common. `load` says how things stand."""

    def __init__(self, metrics: Metrics, load: Callable[[], WorkerLoad], block_bytes: int) -> None:
        self.metrics = metrics
        self.leases = LeaseBook(metrics)
        self._load = load
        self._block_bytes = block_bytes
        metrics.on_sample(self._sample)

    def refused(self, what: str, reply: Message) -> None:
        """Count a reply, where it is a refusal."""
        if isinstance(reply, Refused):
            self.metrics.inc(names.REFUSALS, what, reply.reason)

    def _sample(self) -> None:
        load, put = self._load(), self.metrics.put
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


class WorkerMetrics(HolderMetrics):
    """One worker's."""

    def __init__(self, metrics: Metrics, load: Callable[[], WorkerLoad], block_bytes: int) -> None:
        super().__init__(metrics, load, block_bytes)
        self._rates: dict[tuple[str, str], float] = {}
        """Bytes a second, by source and carrier; the one heard of last is at the end."""
        metrics.on_sample(lambda: metrics.put(names.TRANSFER_RATE, self._rates))

    def stepped(self, result: StepResult) -> None:
        """Take in an engine step."""
        num_prefill, num_decode = result.num_prefill_tokens, result.num_decode_tokens
        phase = "mixed" if num_prefill and num_decode else "prefill" if num_prefill else "decode"
        self.metrics.observe(names.STEP_SECONDS, (result.ended_ns - result.started_ns) / 1e9, phase)
        self.metrics.observe(names.BATCH_SIZE, len(result.computed))
        if num_prefill:
            self.metrics.inc(names.ENGINE_TOKENS, "prefill", by=num_prefill)
        if num_decode:
            self.metrics.inc(names.ENGINE_TOKENS, "decode", by=num_decode)

    def read(
        self,
        kind: ReadKind,
        source: WorkerId,
        started_ns: int,
        stats: TransferStats | None,
        failure: str,
        traceparent: str,
    ) -> None:
        """A read has ended that began at `started_ns`. `failure`: empty, or why, its code in front."""
        metrics = self.metrics
        metrics.inc(names.TRANSFERS, outcome_of(failure), traceparent=traceparent)
        if stats is None:
            return
        seconds = (time.time_ns() - started_ns) / 1e9
        metrics.inc(names.TRANSFER_BYTES, source, stats.carrier, by=stats.num_bytes, traceparent=traceparent)
        metrics.inc(names.TRANSFER_WIRE_BYTES, source, stats.carrier, by=stats.num_wire_bytes)
        metrics.observe(names.TRANSFER_SECONDS, seconds, kind, traceparent=traceparent)
        metrics.observe(names.TRANSFER_SIZE, stats.num_bytes, kind, traceparent=traceparent)
        self._rates.pop((source, stats.carrier), None)
        self._rates[(source, stats.carrier)] = stats.num_bytes / max(1e-6, stats.copy_ns / 1e9)
        if len(self._rates) > MAX_PAIRS:
            del self._rates[next(iter(self._rates))]

    def exposed(self, seconds: float, traceparent: str) -> None:
        """A hand-over landed so long after the prompt was computed."""
        self.metrics.observe(names.EXPOSED, seconds, traceparent=traceparent)

    def fenced(self) -> None:
        """It begins as a new incarnation."""
        self.metrics.inc(names.FENCES)


def outcome_of(failure: str) -> str:
    """Return a read's outcome (`metric_names.TRANSFER_OUTCOMES`) by the words that it failed with."""
    if not failure:
        return "landed"
    code = failure.partition(":")[0]
    if code in names.TRANSFER_OUTCOMES:
        return code
    return "refused" if code in names.REASONS or "did not answer" in failure else "other"
