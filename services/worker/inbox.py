"""The messages that a worker hears: of each subject, what is done with it."""

import asyncio

from schemas import subjects
from schemas.ids import WorkerId
from schemas.message import Message
from schemas.request import AskProgress, Progress, RefusalReason, Refused, RunAttempt, refuse
from schemas.worker import DrainAnswered, DrainWorker
from services.bus.typed import Received, TypedBus
from services.telemetry import Telemetry
from services.worker.core.events import AttemptAsked
from services.worker.grammars import ToldGrammars
from services.worker.observe.spans import times_of
from services.worker.shell import Worker


class Inbox:
    """One worker's, those of its roles among them."""

    def __init__(
        self, worker: Worker, worker_id: WorkerId, bus: TypedBus, telemetry: Telemetry, answer_timeout_s: float
    ) -> None:
        self._worker = worker
        self._cores = worker.cores
        self._measured = worker.measured
        self._worker_id = worker_id
        self._bus = bus
        self._telemetry = telemetry
        self._grammars = ToldGrammars(bus, worker_id, answer_timeout_s)

    async def start_listening(self, tasks: asyncio.TaskGroup) -> None:
        """Return once all subscriptions are there."""
        bus, me = self._bus, (self._worker_id,)
        for role in self._cores.roles:
            for subject, ids in role.hears():
                await bus.listen(tasks, subject, ids, self._worker.on_event)
        await bus.serve(tasks, subjects.RUN, me, self._on_run)
        await bus.listen(tasks, subjects.CANCEL, ("*",), self._worker.on_event)
        await bus.serve(tasks, subjects.PROGRESS, me, self._on_progress)
        await bus.serve(tasks, subjects.DRAIN, me, self._on_drain)
        await self._worker.subscribe_all(tasks)

    async def _on_run(self, received: Received[RunAttempt]) -> Message | None:
        """Begin an attempt, or say why not."""
        request = received.message
        reply = self._worker.unproved(request)
        if reply is None:
            found = await self._grammars.with_text(request)
            reply = found if isinstance(found, Refused) else self._begin(found, received.traceparent, received.subject)
        self._measured.refused("run", reply)
        return reply

    def _begin(self, request: RunAttempt, traceparent: str, cause: str) -> Message | None:
        """The same, unless this worker has the other end of the attempt: the engine could not tell them apart."""
        known = self._cores.find((request.request_id, request.attempt))
        if known is not None and (known.part == "decode") != (request.upstream is not None):
            return refuse(request, RefusalReason.INVALID, "this worker has the attempt's other end already")
        if request.upstream is not None and len(self._cores.roles) == 1:
            return refuse(request, RefusalReason.INVALID, f"{self._worker_id} decodes nothing that others compute")
        asked = AttemptAsked(request, times_of(traceparent, self._telemetry.clock.ahead_ns), traceparent)
        return self._worker.step(asked, cause)

    async def _on_progress(self, received: Received[AskProgress]) -> Progress:
        """Say what an attempt has come to here."""
        self._worker.look_at_the_clock()
        asked, key = received.message, (received.message.request_id, received.message.attempt)
        attempt, answer = self._cores.find(key), self._cores.answer_of(key)
        return Progress(
            request_id=asked.request_id,
            attempt=asked.attempt,
            deadline_ms=asked.deadline_ms,
            worker_id=self._worker_id,
            known=answer is not None,
            tokens=answer.since(key, asked.index, self._bus.connection.max_bytes) if answer is not None else None,
            is_waiting=attempt is not None and attempt.stage in ("queued", "waiting_for_twin", "reserved"),
        )

    async def _on_drain(self, received: Received[DrainWorker]) -> DrainAnswered:
        return await self._worker.drain(received.message)
