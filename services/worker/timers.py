"""What a worker does by the clock: report its load, keep time, ask who still wants its work; and how it drains."""

import asyncio
import logging

from schemas import subjects
from schemas.ids import WorkerId
from schemas.request import AskWanted
from services.bus.base import BusError, NoRespondersError
from services.bus.typed import TypedBus
from services.config import MeshConfig
from services.presence import BusConnected
from services.runtime import logging_failures, now_ms
from services.times import Times
from services.worker.shell import Worker
from services.worker.wanted import (
    AskGateway,
    GatewayAnswered,
    GatewayUnanswered,
    GatewayUnserved,
    WantedCore,
    WantedEvent,
)

log = logging.getLogger(__name__)


class Timers:
    """One worker's timers."""

    def __init__(self, worker: Worker, worker_id: WorkerId, bus: TypedBus, times: Times) -> None:
        self._worker = worker
        self._worker_id = worker_id
        self._bus = bus
        self._wanted = WantedCore(worker.core.wanted_by, times)
        self._times = times.worker
        self._beat_s = times.presence.beat_interval_ms / 1000

    async def run(self) -> None:
        """Report load and keep time until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._report_load(), name="load")
            tasks.create_task(self._tick(), name="tick")
            tasks.create_task(self._ask_gateways(), name="wanted")

    async def _report_load(self) -> None:
        """Publish the load soon after a change, and else that the worker lives, or its load, in turn."""
        while True:
            with logging_failures("reporting the load"):
                self._worker.report_load()
            await asyncio.sleep(self._times.load_min_gap_s)
            await self._worker.wait_for_change(self._beat_s - self._times.load_min_gap_s)

    async def _tick(self) -> None:
        self._worker.holder.beat()
        while True:
            await asyncio.sleep(self._times.tick_ms / 1000)
            self._worker.check_engine()
            with logging_failures("a tick"):
                self._worker.tick()
                await asyncio.to_thread(self._worker.holder.release_reads)
            self._worker.holder.beat()

    async def _ask_gateways(self) -> None:
        while True:
            times, suspects = self._times, self._wanted.suspects
            await asyncio.sleep(times.suspicious_interval_s if suspects else times.round_interval_s)
            with logging_failures("asking the gateways"):
                bus = self._bus.connection
                self._wanted.handle(BusConnected(bus.num_connects, bus.num_reroutes, bus.num_returns), now_ms())
                await asyncio.gather(*map(self._ask, self._wanted.tick(now_ms())))

    async def _ask(self, question: AskGateway) -> None:
        message = AskWanted(worker_id=self._worker_id, attempts=question.attempts)
        event: WantedEvent
        try:
            reply = await self._bus.ask(subjects.WANTED, (question.gateway_id,), message, self._times.answer_timeout_s)
        except NoRespondersError:
            event = GatewayUnserved(question)
        except BusError:
            event = GatewayUnanswered(question)
        else:
            event = GatewayAnswered(question, reply.unwanted)
        unwanted = self._wanted.handle(event, now_ms())
        if unwanted and isinstance(event, GatewayUnserved):
            log.warning("gateway %s is dead: %d attempts of it end here", question.gateway_id, len(unwanted))
        for each in unwanted:
            self._worker.step(each, f"gateway {question.gateway_id}")


async def drain(worker: Worker, config: MeshConfig) -> None:
    """Take no new work, migrate what runs, and lend until it has been read, at most for `worker.drain_s` and what
    readers may take beyond it; then leave what is hottest to those who stay. What nobody could go on with is
    finished instead."""
    timeout_s, times = config.worker.drain_s, config.times.worker
    finishes = (await worker.may_leave(forced=True)).is_last
    worker.begin_drain(finishes=finishes)
    work_s = timeout_s if finishes else min(times.prompts_end_s, timeout_s)
    if not await worker.wait_until_idle(work_s):
        worker.end_drain()
        if not await worker.wait_until_idle(max(timeout_s - work_s, times.readers_stay_s)):
            log.warning("it leaves, although somebody reads here yet")
            return
    await worker.leave_behind()
