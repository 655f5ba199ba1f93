"""What a worker says of itself: who it is, and what it has to do."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from dataplane.blocks.layout import BlockTables
from schemas.observe import WorkerDescribed
from schemas.worker import WorkerInfo, WorkerLoad
from services.bus.typed import TypedBus
from services.engine.thread import EngineThread
from services.worker.core.role import WorkerCore
from services.worker.kv.contents import WorkerHolder
from services.worker.observe.describe import describe
from services.worker.observe.measured_rates import RateBook
from services.worker.parts import WorkerParts

OwnedTables = Callable[[], Iterator[BlockTables]]


@dataclass
class Reporter:
    """Describes one worker. `owners`: who holds references to blocks beside cores and leases."""

    parts: WorkerParts
    holder: WorkerHolder
    engine: EngineThread
    rates: RateBook
    bus: TypedBus
    cores: list[WorkerCore]
    owners: list[OwnedTables] = field(default_factory=list[OwnedTables])

    def info(self) -> WorkerInfo:
        limits, plane = self.parts.limits, self.holder.plane
        return WorkerInfo(
            worker_id=self.parts.worker_id,
            incarnation=self.holder.incarnation,
            role=self.parts.role,
            model=self.parts.model,
            fingerprint=limits.fingerprint,
            num_blocks=limits.num_blocks,
            block_size=limits.block_size,
            context_length=limits.context_length,
            carriers=plane.endpoint.carriers if plane else (),
            device=self.parts.device,
        )

    def load(self, now_ms: int) -> WorkerLoad:
        engine, plane = self.engine.load(), self.holder.plane
        num_queued = sum(core.num_queued for core in self.cores)
        num_queued_tokens = sum(core.num_queued_tokens for core in self.cores)
        num_unreceived_tokens = sum(core.num_unreceived_tokens for core in self.cores)
        return WorkerLoad(
            worker=self.info(),
            state="draining" if any(core.draining for core in self.cores) else "ready",
            blocks=self.holder.counts(self._owned()),
            num_running=sum(core.num_runs for core in self.cores) - num_queued,
            num_queued=num_queued,
            num_uncomputed_tokens=engine.num_uncomputed_tokens + num_queued_tokens + num_unreceived_tokens,
            num_unreceived_tokens=num_unreceived_tokens,
            num_dropped_messages=self.bus.num_dropped,
            num_refused_reads=plane.num_refused + plane.num_junk if plane else 0,
            rates=self.rates.rates(now_ms),
        )

    def describe(self, now_ms: int) -> WorkerDescribed:
        requests = (held for core in self.cores for held in core.held(now_ms))
        return describe(self.load(now_ms), requests, list(self.holder.leases), now_ms)

    def _owned(self) -> Iterator[BlockTables]:
        for core in self.cores:
            yield from core.owned_tables()
        for tables in self.owners:
            yield from tables()
