"""A request under way, and what is asked and sent on its behalf: each question brings its answer as an event."""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from schemas import subjects
from schemas.ids import GatewayId, WorkerId
from schemas.observe import KeepTrace
from schemas.request import (
    AskProgress,
    CancelRequest,
    Placement,
    PrefillAccepted,
    RefusalReason,
    Refused,
    RequestTokens,
    ReservationAccepted,
    ReserveBlocks,
    RunPrefill,
)
from schemas.subjects import CarriesT, Subject
from services.bus.base import BusError, MessageTooLargeError, NoRespondersError, RequestTimedOutError
from services.bus.typed import ReplyT, TypedBus
from services.config import MeshConfig
from services.gateway.observe.answer_observer import ChoiceObserver, Dispatch
from services.gateway.request.core import RequestCore
from services.gateway.request.events import (
    AskPlacement,
    AskWorker,
    Event,
    PlaceEvent,
    PlaceGranted,
    PlaceRefused,
    PlaceUnanswered,
    ProgressAnswered,
    ProgressOutcome,
    SendCancel,
    SendReserve,
    SendRun,
    WorkerAccepted,
    WorkerRefused,
    WorkerSilent,
)
from services.gateway.request.job import (
    Job,
    PackedPrompt,
    continue_prompt,
    place_request,
    reserve_message,
    run_message,
    tokens_received,
)
from services.gateway.request.mailbox import Mailbox
from services.presence import Hearing
from services.runtime import now_ms

log = logging.getLogger(__name__)

Question = AskPlacement | SendRun | SendReserve | AskWorker | SendCancel
"""What a request's core wants asked or sent on the bus."""

WorkT = TypeVar("WorkT", bound=RunPrefill | ReserveBlocks)
TakenT = TypeVar("TakenT", bound=PrefillAccepted | ReservationAccepted | Refused)


@dataclass(slots=True, eq=False)
class LiveRequest:
    """A request under way. `choice` marks its outputs in the mailbox."""

    job: Job
    choice: int
    mailbox: Mailbox
    core: RequestCore
    observer: ChoiceObserver
    prompt: PackedPrompt
    """What the attempt under way computes: the job's prompt, or that and what has been answered."""
    started_ms: int
    proof: bytes
    """This gateway's signature of whose request it is."""
    timer: asyncio.TimerHandle | None = None
    """It fires at the deadline."""


@dataclass
class Asker:
    """Asks schedulers and workers for one gateway. No question outlives its request's deadline.

    Each public method returns at once. A task of `tasks` waits for a question's answer, and hands it to `handle` as an
    event.
    """

    config: MeshConfig
    gateway_id: GatewayId
    bus: TypedBus
    tasks: asyncio.TaskGroup
    hearing: Hearing
    """Notes every answer, the broker's own too: somebody was heard."""
    handle: Callable[[LiveRequest, Event], None]

    def send(self, live: LiveRequest, action: Question) -> None:
        """Ask what a request is to ask, and send what it is to send."""
        job = live.job
        match action:
            case AskPlacement():
                name, work = "place", self._place(live, action, live.observer.asks(action.attempt))
            case SendRun():
                message = run_message(job, live.proof, self.gateway_id, action, live.prompt)
                name, work = "run", self._dispatch(live, subjects.RUN, action.prefill_worker, message)
            case SendReserve():
                message = reserve_message(job, live.proof, self.gateway_id, action, live.prompt)
                name, work = "reserve", self._dispatch(live, subjects.RESERVE, action.decode_worker, message)
            case AskWorker():
                name, work = "progress", self._progress(live, action)
            case SendCancel():
                name, work = "cancel", self._cancel(job, action)
        self.tasks.create_task(work, name=f"{name} {job.request_id}")

    def keep(self, trace_id: str, reason: str) -> None:
        """Tell everybody to export what there is of a trace. Where that fails only what is here is kept."""
        message = KeepTrace(trace_id=trace_id, reason=reason)
        self.tasks.create_task(self._keep(message), name=f"keep {trace_id}")

    def receive(self, live: LiveRequest, worker_id: WorkerId, share: RequestTokens) -> None:
        """Bring a request its share of a worker's message. What is malformed is counted and dropped."""
        try:
            event = tokens_received(live.job, worker_id, share)
        except ValueError as error:
            self.bus.drop("malformed")
            log.warning("dropped tokens of %s from %s: %s", share.request_id, worker_id, error)
            return
        self.handle(live, event)

    async def _place(self, live: LiveRequest, action: AskPlacement, asked_ns: int) -> None:
        job = live.job
        live.prompt = prompt = await continue_prompt(job, live.core.tokens[: action.num_answered])
        request = place_request(job, action, prompt)
        event: PlaceEvent
        try:
            reply = await self._ask(live, subjects.PLACE, (), request, self.config.times.gateway.place_timeout_s)
        except MessageTooLargeError as error:
            event = PlaceRefused(action.attempt, RefusalReason.TOO_LONG, error.reason, 0)
        except BusError as error:
            event = PlaceUnanswered(action.attempt, error.reason)
        else:
            if isinstance(reply, Placement):
                event = PlaceGranted(action.attempt, reply)
            else:
                event = PlaceRefused(action.attempt, reply.reason, reply.detail, reply.retry_after_ms)
        live.observer.placed(event, asked_ns)
        self.handle(live, event)

    async def _dispatch(
        self, live: LiveRequest, subject: Subject[WorkT, TakenT], worker_id: WorkerId, message: WorkT
    ) -> None:
        """Send an attempt to a worker, and tell the request whether it has been taken."""
        role = "prefill" if isinstance(message, RunPrefill) else "decode"
        sent = Dispatch(message.attempt, role, worker_id, live.observer.placed_ns)
        try:
            reply = await self._ask(live, subject, (worker_id,), message, self.config.gateway.accept_timeout_s)
        except BusError as error:
            live.observer.dispatched(sent, error=error.reason)
            if isinstance(error, MessageTooLargeError):  # no worker can be told
                refused = WorkerRefused(message.attempt, worker_id, RefusalReason.TOO_LONG, error.reason, 0)
                self.handle(live, refused)
                return
            # A plain BusError is a reply that cannot be read: it may have been a yes, like one that is late.
            may_have_taken = isinstance(error, RequestTimedOutError) or type(error) is BusError
            self.handle(live, WorkerSilent(message.attempt, worker_id, error.reason, may_have_taken))
            return
        if isinstance(reply, Refused):
            live.observer.dispatched(sent, error=reply.reason)
            refused = WorkerRefused(message.attempt, worker_id, reply.reason, reply.detail, reply.retry_after_ms)
            self.handle(live, refused)
        else:
            accepted_ns = reply.accepted_ns if isinstance(reply, PrefillAccepted) else 0
            live.observer.dispatched(sent, accepted_ns and live.observer.telemetry.clock.at_ns(accepted_ns))
            self.handle(live, WorkerAccepted(message.attempt, worker_id))

    async def _progress(self, live: LiveRequest, action: AskWorker) -> None:
        job, worker_id = live.job, action.worker_id
        question = AskProgress(
            request_id=job.request_id, attempt=action.attempt, deadline_ms=job.deadline_ms, index=action.index
        )
        timeout_s = self.config.gateway.progress_after_ms / 1000
        share: RequestTokens | None = None
        is_waiting = False
        try:
            reply = await self._ask(live, subjects.PROGRESS, (worker_id,), question, timeout_s)
        except NoRespondersError:
            outcome = ProgressOutcome.UNSERVED
        except BusError:
            outcome = ProgressOutcome.UNANSWERED
        else:
            outcome = ProgressOutcome.KNOWN if reply.known else ProgressOutcome.UNKNOWN
            share, is_waiting = reply.tokens, reply.is_waiting
        if share is not None and (share.request_id, share.attempt) == (job.request_id, action.attempt):
            self.receive(live, worker_id, share)
        self.handle(live, ProgressAnswered(action.attempt, worker_id, outcome, is_waiting))

    async def _cancel(self, job: Job, action: SendCancel) -> None:
        """Tell all workers to let go of an attempt. Where that fails their own deadlines free the blocks."""
        message = CancelRequest(
            request_id=job.request_id,
            attempt=action.attempt,
            deadline_ms=job.deadline_ms,
            reason=action.reason,
            end=action.end,
        )
        try:
            await self.bus.publish(subjects.CANCEL, (job.request_id,), message, job.trace)
        except BusError as error:
            log.warning("cannot cancel %s: %s", job.request_id, error)

    async def _keep(self, message: KeepTrace) -> None:
        with contextlib.suppress(BusError):
            await self.bus.publish(subjects.KEEP, (message.trace_id,), message)

    async def _ask(
        self,
        live: LiveRequest,
        subject: Subject[CarriesT, ReplyT],
        ids: tuple[str, ...],
        message: CarriesT,
        timeout_s: float,
    ) -> ReplyT:
        """Ask on behalf of a request, for no longer than it has. Raises BusError."""
        job = live.job
        left_s = (job.deadline_ms - now_ms()) / 1000
        try:
            reply = await self.bus.ask(subject, ids, message, max(0.001, min(timeout_s, left_s)), job.trace)
        except NoRespondersError:
            self.hearing.hear(now_ms())
            raise
        self.hearing.hear(now_ms())
        return reply
