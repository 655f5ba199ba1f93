"""The spans of what moves between workers: both ends of a transfer, and the end of the lease under which it went."""

import time
from dataclasses import dataclass, field

from dataplane.protocol.stream import TransferStats
from schemas.ids import LeaseId
from services.telemetry import Attributes, AttributeValue, Key, SpanName, Telemetry
from services.worker.core.attempts import AttemptTimes
from services.worker.core.content import AttemptKey
from services.worker.observe.spans import error_of

MAX_LEASE_TRACES = 1_024
"""A lease that no reader ever opened has no stream that could end."""


@dataclass(slots=True)
class TransferSpan:
    """The reader's end of a transfer under way: named before it is recorded, so that the holder can link to it."""

    telemetry: Telemetry
    worker_id: str
    traceparent: str
    """Of what it belongs to; empty: it begins a trace."""
    started_ns: int = field(default_factory=lambda: time.time_ns())
    stats: TransferStats = field(default_factory=TransferStats)

    def __post_init__(self) -> None:
        self.stats.traceparent = self.telemetry.child_of(self.traceparent)

    @property
    def story(self) -> str:
        """The traceparent for the holder's words of the lease."""
        return self.traceparent or self.stats.traceparent

    def end(self, attributes: Attributes, outcome: str) -> None:
        """Record it, with the phases that it came to."""
        stats, end_ns = self.stats, time.time_ns()
        described = dict(attributes) | {Key.END: "target", Key.WORKER: self.worker_id, Key.OUTCOME: outcome}
        if stats.accepted_ns:
            described[Key.LEASE_WAIT_MS] = (stats.accepted_ns - self.started_ns) / 1e6
        if stats.first_byte_ns:
            described[Key.FIRST_BYTE_MS] = (stats.first_byte_ns - stats.accepted_ns) / 1e6
        parent = self.telemetry.record(
            SpanName.KV_TRANSFER,
            self.traceparent,
            (self.started_ns, end_ns),
            described | described_by(stats),
            error=error_of(outcome),
            own=stats.traceparent,
            links=links_of(stats),
        )
        reached_ns = self.started_ns
        for name, phase_ns in (
            (SpanName.KV_LEASE_WAIT, stats.accepted_ns),
            (SpanName.KV_FIRST_BYTE, stats.first_byte_ns or stats.landed_ns),
            (SpanName.KV_STREAM, stats.landed_ns and (stats.last_byte_ns or stats.landed_ns)),
            (SpanName.KV_VERIFY, stats.landed_ns),
        ):
            if not phase_ns:
                self.telemetry.record(name, parent, (reached_ns, end_ns), {}, error=error_of(outcome))
                return
            self.telemetry.record(name, parent, (reached_ns, phase_ns), {})
            reached_ns = phase_ns


def described_by(stats: TransferStats) -> dict[str, AttributeValue]:
    """Return what either end's span says of its stream; nothing where there was none."""
    if not stats.num_frames:
        return {}
    seconds = max(1, stats.last_byte_ns - stats.first_byte_ns) / 1e9
    chosen = {Key.CARRIER_REASON: stats.reason} if stats.reason else {}  # it is the reader who chooses
    return {
        Key.CARRIER: stats.carrier,
        **chosen,
        Key.NUM_BYTES: stats.num_bytes,
        Key.WIRE_DTYPE: stats.wire_dtype,
        Key.NUM_WIRE_BYTES: stats.num_wire_bytes,
        Key.VERIFY_MS: stats.verify_ns / 1e6,
        Key.GB_PER_S: stats.num_bytes / seconds / 1e9,
    }


def links_of(stats: TransferStats) -> tuple[str, ...]:
    return (stats.peer_traceparent,) if stats.peer_traceparent else ()


@dataclass
class HolderSpans:
    """What a holder records of its leases."""

    telemetry: Telemetry
    worker_id: str

    def served(self, traceparent: str, stats: TransferStats, attributes: Attributes, error: str) -> None:
        """Record the holder's end of a transfer."""
        outcome = error or "landed"
        described = dict(attributes) | {Key.END: "source", Key.WORKER: self.worker_id, Key.OUTCOME: outcome}
        if stats.first_byte_ns:
            described[Key.FIRST_BYTE_MS] = (stats.first_byte_ns - stats.opened_ns) / 1e6
        self.telemetry.record(
            SpanName.KV_TRANSFER,
            traceparent,
            (stats.opened_ns, time.time_ns()),
            described | described_by(stats),
            error=error_of(outcome),
            own=stats.traceparent,
            links=links_of(stats),
        )

    def released(self, traceparent: str, since_ns: int, lease_id: LeaseId, num_blocks: int, outcome: str) -> None:
        """Record the end of a lease. Its absence from a trace is a leak."""
        attributes = {
            Key.WORKER: self.worker_id,
            Key.LEASE: lease_id,
            Key.NUM_BLOCKS: num_blocks,
            Key.OUTCOME: outcome,
        }
        span_ns = (since_ns, time.time_ns())
        self.telemetry.record(SpanName.KV_RELEASE, traceparent, span_ns, attributes, error=error_of(outcome))


@dataclass(slots=True)
class LeaseTrace:
    """What the spans of a lease need: of its stream, and of its release."""

    key: AttemptKey
    traceparent: str
    granted_ns: int
    computed: AttemptTimes | None = None
    """Of the attempt that computes it; None: it was lent, and all of it was here."""
    is_served: bool = False
    is_released: bool = False


@dataclass
class LeaseTraces:
    """The leases that are granted, as far as their spans are not recorded."""

    telemetry: Telemetry
    worker_id: str
    _traces: dict[LeaseId, LeaseTrace] = field(default_factory=dict[LeaseId, LeaseTrace])

    def __post_init__(self) -> None:
        self._holder = HolderSpans(self.telemetry, self.worker_id)

    def granted(self, lease_id: LeaseId, trace: LeaseTrace) -> None:
        self._traces[lease_id] = trace
        if len(self._traces) > MAX_LEASE_TRACES:
            del self._traces[next(iter(self._traces))]

    def name_stream(self, lease_id: LeaseId) -> str:
        """Return what this end of a stream is called that begins now. On any thread."""
        trace = self._traces.get(lease_id)
        return self.telemetry.child_of(trace.traceparent) if trace else ""

    def served(self, lease_id: LeaseId, stats: TransferStats, error: str) -> None:
        """Record the source's end of a transfer."""
        trace = self._traces.get(lease_id)
        if trace is None:
            return
        attributes = {Key.REQUEST_ID: trace.key[0], Key.ATTEMPT: trace.key[1], Key.LEASE: lease_id}
        self._holder.served(trace.traceparent, stats, attributes, error)
        trace.is_served = True
        self._drop(lease_id, trace)

    def ended(self, lease_id: LeaseId, num_blocks: int, reason: str) -> None:
        """Record a lease's release."""
        trace = self._traces.get(lease_id)
        if trace is None:
            return
        since_ns = trace.granted_ns if trace.computed is None else trace.computed.first_token_ns or time.time_ns()
        self._holder.released(trace.traceparent, since_ns, lease_id, num_blocks, reason)
        trace.is_released = True
        self._drop(lease_id, trace)

    def _drop(self, lease_id: LeaseId, trace: LeaseTrace) -> None:
        """Forget it once the lease has ended and its stream as well; either may come first, and a stream that broke
        before its reader heard a word may be followed by another."""
        if trace.is_served and trace.is_released:
            self._traces.pop(lease_id, None)
