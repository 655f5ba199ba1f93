"""What a worker has to do, and, to whoever asks, what is going on in it."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from schemas.observe import HeldRequest, RunStage
from schemas.worker import TenantLine, WorkerLoad
from services.engine.client import EngineClient
from services.holder.core.attempt import Attempt
from services.holder.core.attempts import Attempts
from services.holder.core.copies import CopyCore
from services.holder.limits import MAX_LINES
from services.holder.report import Reporter
from services.worker.observe.measured_rates import MeasuredRates


@dataclass(kw_only=True)
class WorkerLoads:
    """What waits and runs in one worker's core and its engine."""

    engine: EngineClient
    rates: MeasuredRates
    core: Attempts
    copies: CopyCore

    @property
    def num_running(self) -> int:
        """Attempts and reads of copies, those that wait for blocks among them."""
        return len(self.core.records) + len(self.copies.reading)

    def load(self, reporter: Reporter, now_ms: int) -> WorkerLoad:
        """Return what there is to do at `now_ms`."""
        engine, core, num_queued = self.engine.engine_load(), self.core, self.core.num_queued
        attempts, copies = list(core.records.values()), self.copies.reading.values()
        num_unreceived = sum(attempt.num_awaited_tokens for attempt in attempts if attempt.upstream is not None)
        num_awaited = sum(attempt.num_awaited_tokens for attempt in attempts)
        tables = [each.tables for each in (*attempts, *copies) if each.tables]
        return WorkerLoad(
            worker=reporter.info(),
            state=core.state,
            blocks=reporter.blocks.counts(tables),
            num_running=self.num_running - num_queued,
            num_queued=num_queued,
            num_waiting_for_duplicate=core.num_waiting_for_duplicate,
            num_uncomputed_tokens=engine.num_uncomputed_tokens + num_awaited,
            num_unreceived_tokens=num_unreceived,
            lines=_lines(attempts),
            num_tokens=reporter.outbox.num_tokens,
            num_dropped_messages=reporter.bus.num_dropped + core.num_unfit,
            num_refused_reads=reporter.num_refused_reads,
            engine=self.engine.lives,
            rates=self.rates.rates(now_ms),
            clock_ahead_ms=reporter.blocks.telemetry.clock.named_ms,
        )

    def requests(self, now_ms: int) -> Iterable[HeldRequest]:
        """Return what goes on here, for people."""
        yield from (attempt.held(now_ms) for attempt in self.core.records.values())
        yield from self.copies.held(now_ms)


def _lines(attempts: Iterable[Attempt]) -> tuple[TenantLine, ...]:
    """Return what each tenant has in line, those with most in front."""
    queued, uncomputed = Counter[str](), Counter[str]()
    for attempt in attempts:
        queued[attempt.request.tenant] += attempt.stage is RunStage.QUEUED
        uncomputed[attempt.request.tenant] += attempt.num_uncomputed_tokens
    lines = [
        TenantLine(tenant=tenant, num_queued=queued[tenant], num_uncomputed_tokens=num_tokens)
        for tenant, num_tokens in uncomputed.items()
        if queued[tenant] or num_tokens
    ]
    lines.sort(key=lambda line: (line.num_queued, line.num_uncomputed_tokens), reverse=True)
    return tuple(lines[:MAX_LINES])
