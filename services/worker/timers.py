"""What a worker does by the clock: report its load, keep time, ask who still wants its work; and how it drains."""

import asyncio
import contextlib
import logging
import time

from schemas import subjects
from schemas.block import join_hashes
from schemas.kv import BlocksCooling
from schemas.request import AskWanted, Wanted
from schemas.worker import WorkerDraining
from services.bus.base import BusError, NoRespondersError
from services.presence import LOAD_INTERVAL_MS
from services.runtime import now_ms
from services.worker.core.actions import Action, AttemptKey
from services.worker.core.wanted import Question, WantedCore
from services.worker.shell import TICK_INTERVAL_S, Worker
from services.worker.survive import surviving

log = logging.getLogger(__name__)

LOAD_MIN_GAP_S = 0.05
ROUND_INTERVAL_S = 1.0
SUSPICIOUS_INTERVAL_S = 0.5
"""Until the next round where a gateway may be dead."""
ANSWER_TIMEOUT_S = 1.0
READERS_COME_S = 1.0
"""How long a worker that hands back waits for those who go on elsewhere to come for what it has."""
READERS_STAY_S = 2.0


class Clockwork:
    """One worker's."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._wanted = WantedCore()

    async def run(self) -> None:
        """Report load and keep time until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._report_load(), name="load")
            tasks.create_task(self._tick(), name="tick")
            tasks.create_task(self._ask_gateways(), name="wanted")

    async def _report_load(self) -> None:
        """Say the load about twice a second and soon after a change."""
        worker = self._worker
        while True:
            worker.changed.clear()
            with surviving("reporting the load"):
                worker.outbox.put(subjects.LOAD, (worker.parts.worker_id,), worker.reporter.load(now_ms()))
            await asyncio.sleep(LOAD_MIN_GAP_S)
            try:
                async with asyncio.timeout(LOAD_INTERVAL_MS / 1000):
                    await worker.changed.wait()
            except TimeoutError:
                pass

    async def _tick(self) -> None:
        worker = self._worker
        worker.heartbeat.beat(time.monotonic())
        while True:
            await asyncio.sleep(TICK_INTERVAL_S)
            worker.check_engine()
            with surviving("a tick"):
                worker.decide_all(lambda core, now: core.tick(now))
                worker.decide(self._tick_leases)
                self._forget_answers(now_ms())
                self._say_cooling()
                await asyncio.to_thread(worker.reader.release_ended)  # a driver takes its time to unmap
            worker.heartbeat.beat(time.monotonic())

    def _tick_leases(self, now: int) -> list[Action]:
        self._worker.holder.renew_moved(now, self._worker.parts.limits.lease_ms)
        return self._worker.lending.tick(now)

    def _forget_answers(self, now: int) -> None:
        answers = self._worker.answers
        for key in answers.going_on():
            if not self._worker.has(key):
                answers.ended(key, now)
        answers.forget_old(now)

    def _say_cooling(self) -> None:
        holder, me = self._worker.holder, self._worker.parts.worker_id
        if cooling := holder.cooling():
            message = BlocksCooling(worker_id=me, incarnation=holder.incarnation, block_hashes=join_hashes(cooling))
            self._worker.outbox.put(subjects.COOLING, (me,), message)

    async def _ask_gateways(self) -> None:
        bus = self._worker.bus
        while True:
            await asyncio.sleep(SUSPICIOUS_INTERVAL_S if self._wanted.suspects else ROUND_INTERVAL_S)
            with surviving("asking the gateways"):
                questions = self._wanted.due(self._worker.attempts(), bus.connection.num_connects, now_ms())
                await asyncio.gather(*map(self._ask, questions))

    async def _ask(self, question: Question) -> None:
        worker = self._worker
        message = AskWanted(worker_id=worker.parts.worker_id, attempts=question.attempts)
        unwanted: list[AttemptKey] = []
        try:
            reply = await worker.bus.ask(subjects.WANTED, (question.gateway_id,), message, ANSWER_TIMEOUT_S)
        except NoRespondersError:
            unwanted = self._wanted.unserved(question, now_ms())
            if unwanted:
                log.warning("gateway %s is dead: %d attempts of it end here", question.gateway_id, len(unwanted))
        except BusError:
            self._wanted.unanswered(question, now_ms())
        else:
            assert isinstance(reply, Wanted), "the subject's table allows no other reply"
            unwanted = self._wanted.answered(question, reply.unwanted, now_ms())
        for key in unwanted:
            worker.decide_all(lambda core, now, key=key: core.unwanted(key, now))


async def drain(worker: Worker, timeout_s: float) -> None:
    """Take no new work; return once all that runs has ended and nobody reads here, or the time is over. What is left
    then goes on elsewhere, and its KV may be read here for a moment more."""
    me, incarnation = worker.parts.worker_id, worker.holder.incarnation
    worker.outbox.put(subjects.DRAINING, (me,), WorkerDraining(worker_id=me, incarnation=incarnation))
    worker.decide_all(lambda core, now: core.drain(now))
    worker.changed.set()
    if await _until_idle(worker, timeout_s):
        return
    log.warning("%s hands back what still runs after %g s", me, timeout_s)
    worker.decide_all(lambda core, now: core.hand_back(now))
    await asyncio.sleep(READERS_COME_S)
    await _until_idle(worker, READERS_STAY_S)


async def _until_idle(worker: Worker, timeout_s: float) -> bool:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await worker.idle.wait()
    return worker.is_idle
