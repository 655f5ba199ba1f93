"""What is recorded of what moves between workers: the spans of both ends of a transfer, and of the end of the lease
under which it went."""

import time
from dataclasses import dataclass, field

from dataplane.protocol.stream import TransferStats
from schemas.kv import ReadEnd
from services.holder.core.leases import Grant
from services.telemetry import Attributes, AttributeValue, Key, SpanName, Telemetry


@dataclass(slots=True)
class TransferSpan:
    """The reader's end of a transfer under way: named before it is recorded, so that the holder can link to it."""

    telemetry: Telemetry
    worker_id: str
    traceparent: str
    """Of what it belongs to; empty: it begins a trace."""
    holder_role: str = ""
    """Empty: not known (yet)."""
    started_ns: int = field(default_factory=lambda: time.monotonic_ns())
    stats: TransferStats = field(default_factory=TransferStats)

    def __post_init__(self) -> None:
        self.stats.traceparent = self.telemetry.child_of(self.traceparent)

    @property
    def story(self) -> str:
        """The traceparent that the holder is asked for a lease with."""
        return self.traceparent or self.stats.traceparent

    def finished(self, attributes: Attributes, end: ReadEnd, detail: str = "") -> None:
        """Record it, with the phases that it came to. `detail`: how it ended for people, where there is more to say."""
        # Describe only the phases that were reached: a time of 0 means never.
        stats, end_ns, outcome = self.stats, time.monotonic_ns(), detail or end.value
        error = "" if end is ReadEnd.LANDED else outcome
        described = dict(attributes) | {Key.END: "target", Key.WORKER: self.worker_id, Key.OUTCOME: outcome}
        if stats.accepted_ns:
            described[Key.LEASE_WAIT_MS] = (stats.accepted_ns - self.started_ns) / 1e6
        if stats.first_byte_ns:
            described[Key.FIRST_BYTE_MS] = (stats.first_byte_ns - stats.accepted_ns) / 1e6
        # Record the span under the traceparent that was sent to the holder, so that the holder's link to it is right.
        parent = self.telemetry.record(
            SpanName.KV_TRANSFER,
            self.traceparent,
            (self.started_ns, end_ns),
            described | described_by(stats),
            error=error,
            own=stats.traceparent,
            links=links_of(stats),
            peer=self.holder_role,
        )
        # Each phase begins where the one before ends. The first one that was not reached gets the rest.
        reached_ns = self.started_ns
        for name, phase_ns in (
            (SpanName.KV_LEASE_WAIT, stats.accepted_ns),
            (SpanName.KV_FIRST_BYTE, stats.first_byte_ns or stats.landed_ns),
            (SpanName.KV_STREAM, stats.landed_ns and (stats.last_byte_ns or stats.landed_ns)),
            (SpanName.KV_VERIFY, stats.landed_ns),
        ):
            if not phase_ns:
                self.telemetry.record(name, parent, (reached_ns, end_ns), {}, error=error)
                return
            self.telemetry.record(name, parent, (reached_ns, phase_ns), {})
            reached_ns = phase_ns


def described_by(stats: TransferStats) -> dict[str, AttributeValue]:
    """Return what either end's span shows of its stream; nothing where there was none."""
    if not stats.num_frames:
        return {}
    seconds = max(1, stats.last_byte_ns - stats.first_byte_ns) / 1e9
    attributes: dict[str, AttributeValue] = {}
    if stats.reason:  # it is the reader who chooses
        attributes[Key.CARRIER_REASON] = stats.reason
    if stats.digest_kind:
        attributes[Key.DIGEST_KIND] = stats.digest_kind
    return {
        Key.CARRIER: stats.carrier,
        **attributes,
        Key.NUM_BYTES: stats.num_bytes,
        Key.WIRE_DTYPE: stats.wire_dtype,
        Key.NUM_WIRE_BYTES: stats.num_wire_bytes,
        Key.COPY_MS: stats.copy_ns / 1e6,
        Key.VERIFY_MS: stats.verify_ns / 1e6,
        Key.GB_PER_S: stats.num_bytes / seconds / 1e9,
    }


def links_of(stats: TransferStats) -> tuple[str, ...]:
    return (stats.peer_traceparent,) if stats.peer_traceparent else ()


@dataclass
class HolderSpans:
    """Records the spans of a holder's leases. A lease that belongs to no trace gets none."""

    telemetry: Telemetry
    worker_id: str

    def stream_ended(self, lease: Grant, stats: TransferStats, error: str) -> None:
        """Record the holder's end of a transfer."""
        if not lease.traceparent:
            return
        attributes: dict[str, AttributeValue] = {
            Key.REQUEST_ID: lease.request_id,
            Key.ATTEMPT: lease.attempt,
            Key.LEASE: lease.lease_id,
            Key.END: "source",
            Key.WORKER: self.worker_id,
            Key.OUTCOME: error or ReadEnd.LANDED.value,
        }
        if stats.first_byte_ns:
            attributes[Key.FIRST_BYTE_MS] = (stats.first_byte_ns - stats.opened_ns) / 1e6
        self.telemetry.record(
            SpanName.KV_TRANSFER,
            lease.traceparent,
            (stats.opened_ns, time.monotonic_ns()),
            attributes | described_by(stats),
            error="" if lease.end is not None and lease.end.is_good else error,
            own=stats.traceparent,
            links=links_of(stats),
        )

    def lease_ended(self, lease: Grant) -> None:
        """Record the end of a lease, since all of it could be read. Its absence from a trace is a leak."""
        if not lease.traceparent:
            return
        attributes = {
            Key.WORKER: self.worker_id,
            Key.LEASE: lease.lease_id,
            Key.NUM_BLOCKS: lease.num_blocks,
            Key.OUTCOME: lease.outcome,
        }
        now_ns = time.monotonic_ns()
        error = "" if lease.end is not None and lease.end.is_good else lease.outcome
        span_ns = (lease.readable_ns or now_ns, now_ns)
        self.telemetry.record(SpanName.KV_RELEASE, lease.traceparent, span_ns, attributes, error=error)
