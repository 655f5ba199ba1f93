"""A request under way, and what is asked and sent on its behalf: each question brings the event that came of it."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import TypeVar

from schemas import subjects
from schemas.block import unpack_tokens
from schemas.handoff import BlocksReserved
from schemas.ids import GatewayId, WorkerId
from schemas.observe import KeepTrace
from schemas.request import (
    AskProgress,
    CancelRequest,
    Placement,
    PrefillAccepted,
    Refused,
    RequestTokens,
    ReservationQueued,
    ReserveBlocks,
    RunPrefill,
)
from schemas.subjects import CarriesT, Subject
from services.bus.base import BusError, NoRespondersError, RequestTimedOutError
from services.bus.typed import ReplyT, TypedBus
from services.config import GatewayConfig
from services.gateway import limits
from services.gateway.observe.spans import AttemptClock, Dispatch, GatewaySpans
from services.gateway.request.core import RequestCore
from services.gateway.request.events import (
    AskPlacement,
    AskWorker,
    Event,
    PlaceGranted,
    PlaceRefused,
    PlaceUnanswered,
    ProgressAnswered,
    ProgressOutcome,
    SendCancel,
    SendReserve,
    SendRun,
    TokensReceived,
    WorkerAccepted,
    WorkerRefused,
    WorkerSilent,
)
from services.gateway.request.job import Job, PackedPrompt, continue_prompt, place_request, reserve_message, run_message
from services.gateway.request.mailbox import Mailbox
from services.presence import Hearing
from services.runtime import now_ms

log = logging.getLogger(__name__)

WorkT = TypeVar("WorkT", bound=RunPrefill | ReserveBlocks)
TakenT = TypeVar("TakenT", bound=PrefillAccepted | BlocksReserved | ReservationQueued | Refused)


@dataclass(slots=True, eq=False)
class LiveRequest:
    """A request under way. `choice` marks its outputs in the mailbox."""

    job: Job
    choice: int
    mailbox: Mailbox
    core: RequestCore
    prompt: PackedPrompt
    """Of the attempt under way: the job's, or what an answer goes on from."""
    started_ms: int
    timer: asyncio.TimerHandle | None = None
    """Of its deadline."""
    clock: AttemptClock = field(default_factory=AttemptClock)


@dataclass
class Asker:
    """Asks schedulers and workers for one gateway. No question outlives its request's deadline.

    Each public method returns at once. What comes of a question goes to `handle` as an event, from a task of `tasks`.
    """

    config: GatewayConfig
    gateway_id: GatewayId
    bus: TypedBus
    tasks: asyncio.TaskGroup
    spans: GatewaySpans
    hearing: Hearing
    """Notes every answer, the broker's own too: somebody was heard."""
    handle: Callable[[LiveRequest, Event], None]

    def place(self, live: LiveRequest, action: AskPlacement) -> None:
        """Ask a scheduler for workers."""
        asked_ns = live.clock.asks(action.attempt)
        self._spawn(self._place(live, action, asked_ns), f"place {live.job.request_id}")

    def run(self, live: LiveRequest, action: SendRun) -> None:
        """Send an attempt to its prefill worker."""
        message = run_message(live.job, self.gateway_id, action, live.prompt)
        sending = self._dispatch(live, subjects.RUN, action.prefill_worker, message)
        self._spawn(sending, f"run {live.job.request_id}")

    def reserve(self, live: LiveRequest, action: SendReserve) -> None:
        """Send an attempt to its decode worker."""
        message = reserve_message(live.job, self.gateway_id, action, live.prompt)
        sending = self._dispatch(live, subjects.RESERVE, action.decode_worker, message)
        self._spawn(sending, f"reserve {live.job.request_id}")

    def progress(self, live: LiveRequest, action: AskWorker) -> None:
        """Ask a worker what an attempt has come to; the tokens that it sends go before its answer."""
        self._spawn(self._progress(live, action), f"progress {live.job.request_id}")

    def cancel(self, live: LiveRequest, action: SendCancel) -> None:
        """Tell all workers to let go of an attempt. Where that fails their own deadlines free the blocks."""
        job = live.job
        message = CancelRequest(
            request_id=job.request_id,
            attempt=action.attempt,
            deadline_ms=job.deadline_ms,
            reason=action.reason,
            end=action.end,
        )
        self._spawn(self._cancel(message, job.traceparent), f"cancel {job.request_id}")

    def keep(self, trace_id: str, reason: str) -> None:
        """Tell everybody to export what there is of a trace. Where that fails only what is here is kept."""
        self._spawn(self._keep(KeepTrace(trace_id=trace_id, reason=reason)), f"keep {trace_id}")

    def receive(self, live: LiveRequest, worker_id: WorkerId, share: RequestTokens) -> None:
        """Bring a request its share of a worker's message. What is malformed is counted and dropped."""
        try:
            tokens = tuple(unpack_tokens(share.tokens))
        except ValueError:
            self.bus.drop("malformed")
            log.warning("dropped %d bytes of tokens of %s from %s", len(share.tokens), share.request_id, worker_id)
            return
        event = TokensReceived(
            share.attempt, worker_id, share.index, tokens, share.finish_reason, share.failure, share.report
        )
        self.handle(live, event)

    async def _place(self, live: LiveRequest, action: AskPlacement, asked_ns: int) -> None:
        job = live.job
        live.prompt = prompt = await continue_prompt(job, live.core.tokens[: action.num_answered])
        request = place_request(job, action, prompt)
        try:
            reply = await self._ask(live, subjects.PLACE, (), request, limits.PLACE_TIMEOUT_S)
        except BusError as error:
            event = PlaceUnanswered(action.attempt, error.reason)
        else:
            event = _place_event(action.attempt, reply)
        placed_ns = time.time_ns()
        if isinstance(event, PlaceGranted):
            live.clock.placed_ns = placed_ns
        self.spans.placed(job, (asked_ns, placed_ns), event)
        self.handle(live, event)

    async def _dispatch(
        self, live: LiveRequest, subject: Subject[WorkT, TakenT], worker_id: WorkerId, message: WorkT
    ) -> None:
        """Send an attempt to a worker, and bring whether it has taken it."""
        role = "prefill" if isinstance(message, RunPrefill) else "decode"
        sent = Dispatch(message.attempt, role, worker_id, live.clock.placed_ns)
        try:
            reply = await self._ask(live, subject, (worker_id,), message, self.config.accept_timeout_s)
        except BusError as error:
            self.spans.dispatched(live.job, live.clock, sent, 0, error.reason)
            # A plain BusError is a reply that cannot be read: it may have been a yes, like one that is late.
            may_have_taken = isinstance(error, RequestTimedOutError) or type(error) is BusError
            self.handle(live, WorkerSilent(message.attempt, worker_id, error.reason, may_have_taken))
            return
        refusal = reply.reason if isinstance(reply, Refused) else ""
        accepted_ns = reply.accepted_ns if isinstance(reply, PrefillAccepted) else 0
        self.spans.dispatched(live.job, live.clock, sent, accepted_ns, refusal)
        if isinstance(reply, Refused):
            refused = WorkerRefused(message.attempt, worker_id, reply.reason, reply.detail, reply.retry_after_ms)
            self.handle(live, refused)
        else:
            self.handle(live, WorkerAccepted(message.attempt, worker_id))

    async def _progress(self, live: LiveRequest, action: AskWorker) -> None:
        job, worker_id = live.job, action.worker_id
        question = AskProgress(
            request_id=job.request_id, attempt=action.attempt, deadline_ms=job.deadline_ms, index=action.index
        )
        timeout_s = self.config.progress_after_ms / 1000
        outcome: ProgressOutcome
        share: RequestTokens | None = None
        is_waiting = False
        try:
            reply = await self._ask(live, subjects.PROGRESS, (worker_id,), question, timeout_s)
        except NoRespondersError:
            outcome = "unserved"
        except BusError:
            outcome = "unanswered"
        else:
            outcome, share, is_waiting = "known" if reply.known else "unknown", reply.tokens, reply.is_waiting
        if share is not None and (share.request_id, share.attempt) == (job.request_id, action.attempt):
            self.receive(live, worker_id, share)
        self.handle(live, ProgressAnswered(action.attempt, worker_id, outcome, is_waiting))

    async def _cancel(self, message: CancelRequest, traceparent: str) -> None:
        try:
            await self.bus.publish(subjects.CANCEL, (message.request_id,), message, traceparent)
        except BusError as error:
            log.warning("cannot cancel %s: %s", message.request_id, error)

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
        left_s = (live.job.deadline_ms - now_ms()) / 1000
        try:
            reply = await self.bus.ask(subject, ids, message, max(0.001, min(timeout_s, left_s)), live.job.traceparent)
        except NoRespondersError:
            self.hearing.hear(now_ms())
            raise
        self.hearing.hear(now_ms())
        return reply

    def _spawn(self, work: Coroutine[None, None, None], name: str) -> None:
        self.tasks.create_task(work, name=name)


def _place_event(attempt: int, reply: Placement | Refused) -> PlaceGranted | PlaceRefused:
    if isinstance(reply, Placement):
        return PlaceGranted(
            attempt, reply.prefill_worker, reply.decode_worker, reply.sources, reply.terms, reply.replica
        )
    return PlaceRefused(attempt, reply.reason, reply.detail, reply.retry_after_ms)
