"""What a worker says of itself: who it is, what it has to do, and, to whoever asks, what it is doing."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import msgspec

from dataplane.blocks.layout import BlockTables
from dataplane.blocks.lease import Lease
from schemas.observe import HeldLease, HeldRequest, WorkerDescribed
from schemas.worker import WorkerInfo, WorkerLoad
from services.bus.typed import TypedBus
from services.engine.thread import EngineThread
from services.worker.core.attempts import AnyAttempt
from services.worker.core.replicas import ReplicaCore
from services.worker.kv.holder import KVHolder
from services.worker.limits import MAX_LISTED
from services.worker.observe.measured_rates import MeasuredRates
from services.worker.roles import Role


@dataclass
class Reporter:
    """Describes one worker. `identity`: what of it never changes."""

    identity: WorkerInfo
    holder: KVHolder
    engine: EngineThread
    rates: MeasuredRates
    bus: TypedBus
    roles: Sequence[Role]
    replicas: ReplicaCore

    def info(self) -> WorkerInfo:
        """Return who this is now."""
        plane = self.holder.plane
        carriers = plane.endpoint.carriers if plane else ()
        return msgspec.structs.replace(self.identity, incarnation=self.holder.incarnation, carriers=carriers)

    def load(self, now_ms: int) -> WorkerLoad:
        """Return what there is to do at `now_ms` (Unix ms)."""
        engine, plane, attempts = self.engine.load(), self.holder.plane, list(self._attempts())
        num_queued = sum(role.core.num_queued for role in self.roles)
        num_queued_tokens = sum(attempt.num_queued_tokens for attempt in attempts)
        num_unreceived_tokens = sum(attempt.num_unreceived_tokens for attempt in attempts)
        return WorkerLoad(
            worker=self.info(),
            state="draining" if any(role.core.draining for role in self.roles) else "ready",
            blocks=self.holder.counts(self._owned()),
            num_running=len(attempts) + len(self.replicas.reading) - num_queued,
            num_queued=num_queued,
            num_uncomputed_tokens=engine.num_uncomputed_tokens + num_queued_tokens + num_unreceived_tokens,
            num_unreceived_tokens=num_unreceived_tokens,
            num_dropped_messages=self.bus.num_dropped,
            num_refused_reads=plane.num_refused + plane.num_junk if plane else 0,
            rates=self.rates.rates(now_ms),
        )

    def describe(self, now_ms: int) -> WorkerDescribed:
        """Return what goes on here at `now_ms` (Unix ms)."""
        requests = [*(attempt.held(now_ms) for attempt in self._attempts()), *self.replicas.held(now_ms)]
        return describe(self.load(now_ms), requests, list(self.holder.leases), now_ms)

    def _attempts(self) -> Iterator[AnyAttempt]:
        return (attempt for role in self.roles for attempt in role.core.attempts.values())

    def _owned(self) -> Iterator[BlockTables]:
        """Yield the tables whose blocks somebody here holds references to. Those of leases are the lease table's."""
        yield from (attempt.tables for attempt in self._attempts() if attempt.tables)
        yield from (copy.tables for copy in self.replicas.reading.values())


def describe(
    load: WorkerLoad, requests: Iterable[HeldRequest], leases: Iterable[Lease], now_ms: int
) -> WorkerDescribed:
    """Return the state of a worker or store at `now_ms` (Unix ms)."""
    held = sorted((_held(lease, now_ms) for lease in leases), key=lambda lease: -lease.age_ms)
    running = sorted(requests, key=lambda request: -request.age_ms)
    return WorkerDescribed(
        load=load,
        requests=tuple(running[:MAX_LISTED]),
        leases=tuple(held[:MAX_LISTED]),
        num_requests=len(running),
        num_leases=len(held),
    )


def _held(lease: Lease, now_ms: int) -> HeldLease:
    return HeldLease(
        lease_id=lease.lease_id,
        reader=lease.reader,
        num_blocks=sum(segment.num_blocks for table in lease.tables for segment in table.segments),
        age_ms=max(0, now_ms - lease.granted_ms),
        left_ms=max(0, lease.expires_at_ms - now_ms),
    )
