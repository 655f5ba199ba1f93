"""The messages that a worker receives: of each subject, what is done with it."""

import asyncio
from collections.abc import Iterable
from typing import Any

from schemas import subjects
from schemas.ids import WorkerId
from schemas.observe import RunStage
from schemas.request import AskProgress, AttemptAccepted, Progress, Refused, RunAttempt
from schemas.subjects import Subject
from schemas.worker import DrainAnswered, DrainWorker
from services.bus.typed import Received, TypedBus
from services.holder.core.events import AttemptAsked
from services.telemetry import Telemetry
from services.worker.grammars import ReceivedGrammars
from services.worker.observe.spans import times_of
from services.worker.shell import Worker

_IN_LINE = (RunStage.QUEUED, RunStage.WAITING, RunStage.RESERVED)


def _events_of(me: WorkerId) -> Iterable[tuple[Subject[Any, None], tuple[str, ...]]]:
    """Return the messages that are events as they are, beside those that every holder receives."""
    as_source, as_target = (me, "*", "*"), ("*", me, "*")
    return (
        (subjects.RESERVED, as_source),
        (subjects.OFFERED, as_target),
        (subjects.LANDED, as_source),
        (subjects.ABORTED, as_source),
        (subjects.ABORTED, as_target),
        (subjects.CANCEL, ("*",)),
    )


class Inbox:
    """One worker's."""

    def __init__(
        self, worker: Worker, worker_id: WorkerId, bus: TypedBus, telemetry: Telemetry, answer_timeout_s: float
    ) -> None:
        self._worker = worker
        self._core = worker.core
        self._measured = worker.holder.measured
        self._worker_id = worker_id
        self._bus = bus
        self._telemetry = telemetry
        self._grammars = ReceivedGrammars(bus, worker_id, answer_timeout_s)

    async def start_listening(self, tasks: asyncio.TaskGroup) -> None:
        """Return once all subscriptions are there."""
        bus, me = self._bus, (self._worker_id,)
        await bus.serve(tasks, subjects.RUN, me, self._on_run)
        for subject, ids in _events_of(self._worker_id):
            await bus.listen(tasks, subject, ids, self._worker.holder.on_event)
        await bus.serve(tasks, subjects.PROGRESS, me, self._on_progress)
        await bus.serve(tasks, subjects.DRAIN, me, self._on_drain)
        await self._worker.holder.subscribe_all(tasks)

    async def _on_run(self, received: Received[RunAttempt]) -> AttemptAccepted | Refused:
        """Begin an attempt, or answer why not."""
        request = received.message
        reply: AttemptAccepted | Refused | None = self._worker.holder.unsigned(request)
        if reply is None:
            found = await self._grammars.with_text(request)
            reply = found if isinstance(found, Refused) else self._begin(found, received.traceparent, received.subject)
        self._measured.refused("run", reply)
        return reply

    def _begin(self, request: RunAttempt, traceparent: str, cause: str) -> AttemptAccepted | Refused:
        asked = AttemptAsked(request, times_of(traceparent, self._telemetry.clock.ahead_ns), traceparent)
        reply = self._worker.step(asked, cause)
        assert isinstance(reply, AttemptAccepted | Refused), "each order is answered"
        return reply

    async def _on_progress(self, received: Received[AskProgress]) -> Progress:
        """Answer what an attempt has come to here."""
        self._worker.holder.look_at_the_clock()
        asked, key = received.message, (received.message.request_id, received.message.attempt)
        attempt, answer = self._core.records.get(key), self._core.answer_of(key)
        return Progress(
            request_id=asked.request_id,
            attempt=asked.attempt,
            deadline_ms=asked.deadline_ms,
            worker_id=self._worker_id,
            known=answer is not None,
            tokens=answer.since(key, asked.index, self._bus.connection.max_bytes) if answer is not None else None,
            is_waiting=attempt is not None and attempt.stage in _IN_LINE,
        )

    async def _on_drain(self, received: Received[DrainWorker]) -> DrainAnswered:
        return await self._worker.drain(received.message)
