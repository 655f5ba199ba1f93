"""What a worker does by the clock: report its load, keep time, ask who still wants its work; and how it drains."""

import asyncio
import logging

from schemas import subjects
from schemas.ids import WorkerId
from schemas.request import AskWanted
from services.bus.base import BusError, NoRespondersError
from services.bus.typed import TypedBus
from services.config import WORKER_TICK_MS
from services.presence import BEAT_INTERVAL_MS, BusConnected
from services.runtime import now_ms
from services.worker.core.wanted import (
    AskGateway,
    GatewayAnswered,
    GatewayUnanswered,
    GatewayUnserved,
    WantedCore,
    WantedEvent,
)
from services.worker.limits import (
    ANSWER_TIMEOUT_S,
    LOAD_MIN_GAP_S,
    PROMPTS_END_S,
    READERS_STAY_S,
    ROUND_INTERVAL_S,
    SUSPICIOUS_INTERVAL_S,
)
from services.worker.roles import Cores
from services.worker.shell import Worker
from services.worker.survive import surviving

log = logging.getLogger(__name__)


class Timers:
    """One worker's timers."""

    def __init__(self, worker: Worker, cores: Cores, worker_id: WorkerId, bus: TypedBus) -> None:
        self._worker = worker
        self._worker_id = worker_id
        self._bus = bus
        self._wanted = WantedCore(cores.wanted_by)

    async def run(self) -> None:
        """Report load and keep time until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._report_load(), name="load")
            tasks.create_task(self._tick(), name="tick")
            tasks.create_task(self._ask_gateways(), name="wanted")

    async def _report_load(self) -> None:
        """Say the load soon after a change, and else that the worker lives, or its load, in turn."""
        while True:
            with surviving("reporting the load"):
                self._worker.report_load()
            await asyncio.sleep(LOAD_MIN_GAP_S)
            await self._worker.wait_for_change(BEAT_INTERVAL_MS / 1000 - LOAD_MIN_GAP_S)

    async def _tick(self) -> None:
        self._worker.beat()
        while True:
            await asyncio.sleep(WORKER_TICK_MS / 1000)
            self._worker.check_engine()
            with surviving("a tick"):
                self._worker.tick()
                await asyncio.to_thread(self._worker.release_reads)
            self._worker.beat()

    async def _ask_gateways(self) -> None:
        while True:
            await asyncio.sleep(SUSPICIOUS_INTERVAL_S if self._wanted.suspects else ROUND_INTERVAL_S)
            with surviving("asking the gateways"):
                self._wanted.handle(BusConnected(self._bus.connection.num_connects), now_ms())
                await asyncio.gather(*map(self._ask, self._wanted.tick(now_ms())))

    async def _ask(self, question: AskGateway) -> None:
        message = AskWanted(worker_id=self._worker_id, attempts=question.attempts)
        event: WantedEvent
        try:
            reply = await self._bus.ask(subjects.WANTED, (question.gateway_id,), message, ANSWER_TIMEOUT_S)
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
            self._worker.handle(each)


async def drain(worker: Worker, timeout_s: float) -> None:
    """Take no new work, give away what runs, and lend until it has been read, at most for `timeout_s` seconds and what
    readers may take beyond it; then leave what is hottest to those who stay. What nobody could go on with is
    finished instead."""
    finishes = (await worker.may_leave(forced=True)).is_last
    worker.begin_drain(finishes=finishes)
    work_s = timeout_s if finishes else min(PROMPTS_END_S, timeout_s)
    if not await worker.wait_until_idle(work_s):
        worker.end_drain()
        if not await worker.wait_until_idle(max(timeout_s - work_s, READERS_STAY_S)):
            log.warning("it leaves, although somebody reads here yet")
            return
    await worker.leave_behind()
