"""The shell around `request/core.py`: brings each request what happens, and carries its actions out on the bus. Each
question brings its answer as an event.

A request's outputs go to a mailbox that the HTTP side empties: one wake-up for all tokens of a bus message. One task
ticks all live requests.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from dataplane.lasting import lasting
from schemas import subjects
from schemas.ids import GatewayId, RequestId, WorkerId
from schemas.observe import KeepTrace, RequestPhase
from schemas.request import (
    AskGrammar,
    AskProgress,
    AskWanted,
    AttemptId,
    CancelRequest,
    GrammarSent,
    Placement,
    RefusalReason,
    Refused,
    RequestTokens,
    RunAttempt,
    TokensEmitted,
    Wanted,
)
from schemas.subjects import CarriesT, Subject
from schemas.worker import BlockCounts
from services.bus.base import BusError, MessageTooLargeError, NoRespondersError, RequestTimedOutError
from services.bus.typed import Received, ReplyT, TypedBus
from services.config import MeshConfig
from services.gateway.fleet import Fleet, FleetMessage
from services.gateway.observe.answer_observer import ChoiceSpans, KeepRate
from services.gateway.observe.story import Stories
from services.gateway.place_lines import EndTurn, PlaceLines
from services.gateway.request.core import Phase, RequestCore
from services.gateway.request.events import (
    Abandon,
    Action,
    AskPlacement,
    AskWorker,
    DeadlinePassed,
    Deliver,
    Event,
    FailRequest,
    Finish,
    GatewayStopping,
    PlaceEvent,
    PlaceGranted,
    PlaceRefused,
    PlaceUnanswered,
    ProgressAnswered,
    ProgressOutcome,
    SendAttempt,
    SendCancel,
    Submitted,
    TaskFailed,
    WorkerAccepted,
    WorkerRefused,
    WorkerSilent,
)
from services.gateway.request.job import (
    Job,
    attempt_message,
    continue_prompt,
    place_request,
    tokens_received,
)
from services.gateway.request.live import LiveRequest, Published
from services.gateway.request.mailbox import Mailbox
from services.keep import keep_traces
from services.presence import BusConnected, FailureDetector
from services.runtime import now_ms
from services.telemetry import Telemetry
from services.trust.credentials import TenantSigner

log = logging.getLogger(__name__)


@dataclass
class Requests:
    """All requests of one gateway. Tasks of `tasks` ask and publish; handlers are called on the event loop. No question
    outlives its request's deadline."""

    config: MeshConfig
    signer: TenantSigner
    gateway_id: GatewayId
    bus: TypedBus
    telemetry: Telemetry
    tasks: asyncio.TaskGroup
    num_resumes: int = 0
    """Attempts that went on with an answer."""
    num_progress_asked: int = 0
    """Questions to workers that had been quiet."""
    _live: dict[RequestId, LiveRequest] = field(default_factory=dict[RequestId, LiveRequest])
    _idle: asyncio.Event = field(default_factory=asyncio.Event)
    _keep_rate: KeepRate = field(default_factory=KeepRate)
    _is_ticking: bool = False

    def __post_init__(self) -> None:
        self._idle.set()
        self._lines = PlaceLines(self.config.times.gateway.place_turn_s)
        self._detector = FailureDetector(self.config.times.presence)
        self._stories = Stories(self.gateway_id, self.bus, self.tasks, self.config.times.gateway, self._live)
        self._fleet = Fleet(self._detector, self.config)
        self.spans = ChoiceSpans(self.telemetry, self._fleet.role_of)
        self._note_connects()

    async def listen(self) -> None:
        """Subscribe to all that a gateway receives, and serve all that it answers. Raises BusError."""
        bus, tasks, stories = self.bus, self.tasks, self._stories
        await bus.listen(tasks, subjects.TOKENS, ("*", self.gateway_id), self._on_tokens)
        await bus.listen(tasks, subjects.LEFT, ("*",), self._on_fleet)
        await bus.listen(tasks, subjects.JOINED, ("*",), self._on_fleet)
        await bus.listen(tasks, subjects.LOAD, ("*",), self._on_fleet)
        await keep_traces(bus, tasks, self.telemetry)
        await bus.serve(tasks, subjects.WANTED, (self.gateway_id,), self._on_wanted)
        await bus.serve(tasks, subjects.GRAMMAR, (self.gateway_id,), self._on_grammar)
        await bus.serve(tasks, subjects.REQUEST_STATUS, ("*",), stories.on_status)
        await bus.serve(tasks, subjects.REQUEST_SOUGHT, ("*",), stories.on_sought, queue=self.gateway_id)

    # For the HTTP side.

    def submit(self, job: Job, choice: int, mailbox: Mailbox) -> LiveRequest:
        """Start a request. It ends with one Finish, FailRequest or Abandon in the mailbox, by its deadline."""
        core = RequestCore(
            job.request_id, job.sampling.max_tokens, self.config, self._detector, must_split=job.must_split
        )
        proof, now = self.signer.sign(job.request_id, job.key.tenant, job.deadline_ms), now_ms()
        live = LiveRequest(job, choice, mailbox, core, job.prompt, proof, now, Published(RequestPhase.PLACING, now))
        self._live[job.request_id] = live
        self._idle.clear()
        self._stories.accepted(live)
        if not self._is_ticking:
            self._is_ticking = True
            self.tasks.create_task(lasting(self._tick, "the watch over requests"), name="watch over requests")
        left_s = max(0, job.deadline_ms - now_ms()) / 1000
        live.timer = asyncio.get_running_loop().call_later(left_s, self.handle, live, DeadlinePassed())
        self.handle(live, Submitted())
        return live

    def handle(self, live: LiveRequest, event: Event) -> None:
        """Give a request an event, and do what it decides."""
        self._carry_out(live, event, live.core.handle(event, now_ms()))

    def keep_trace(self, trace_id: str, reason: str) -> bool:
        """Have everybody export what there is of a trace that was not sampled. False: there are too many such traces
        just now."""
        if not self._keep_rate.allows_one_more():
            return False
        self.telemetry.keep_trace(trace_id)
        message = KeepTrace(trace_id=trace_id, reason=reason)
        self.tasks.create_task(self._keep(message), name=f"keep {trace_id}")
        return True

    def stop_all(self) -> None:
        """End every request: this gateway stops."""
        for live in list(self._live.values()):
            self.handle(live, GatewayStopping())

    async def wait_idle(self) -> None:
        """Return once no request is under way."""
        await self._idle.wait()

    def grammars(self, tenant: str) -> set[str]:
        """Return what a tenant's answers under way must be."""
        jobs = (live.job for live in self._live.values())
        return {job.sampling.grammar for job in jobs if job.key.tenant == tenant}

    # For the metrics (`observe.metrics.Observed`).

    @property
    def num_live(self) -> int:
        return len(self._live)

    def ages_s(self) -> list[float]:
        """Return how long the requests have been under way."""
        time_ms = now_ms()
        return [(time_ms - live.started_ms) / 1000 for live in self._live.values()]

    def overdue_s(self) -> float:
        """Return how long the request that should have ended first is over its deadline; 0: none is."""
        first_ms = min((live.job.deadline_ms for live in self._live.values()), default=now_ms())
        return max(0, now_ms() - first_ms) / 1000

    def block_counts(self) -> dict[WorkerId, BlockCounts]:
        """Return what the workers last reported of their blocks."""
        return self._fleet.block_counts(now_ms())

    # What comes on the bus.

    def _note_connects(self) -> None:
        bus = self.bus.connection
        self._detector.connects(BusConnected(bus.num_connects, bus.num_reroutes, bus.num_returns), now_ms())

    def _on_tokens(self, received: Received[TokensEmitted]) -> None:
        worker_id = received.message.worker_id
        self._detector.received(now_ms())
        for share in received.message.requests:
            live = self._live.get(RequestId(share.request_id))
            if live is not None:
                self._receive(live, worker_id, share)

    def _receive(self, live: LiveRequest, worker_id: WorkerId, share: RequestTokens) -> None:
        """Bring a request its share of a worker's message. What is malformed is counted and dropped."""
        try:
            event = tokens_received(live.job, worker_id, share)
        except ValueError as error:
            self.bus.drop("malformed")
            log.warning("dropped tokens of %s from %s: %s", share.request_id, worker_id, error)
            return
        self.handle(live, event)

    def _on_fleet(self, received: Received[FleetMessage]) -> None:
        time_ms = now_ms()
        events = self._fleet.apply(received.message, time_ms)
        self._detector.received(time_ms)
        for event in events:
            for live in list(self._live.values()):
                self.handle(live, event)

    async def _on_wanted(self, received: Received[AskWanted]) -> Wanted:
        return Wanted(unwanted=tuple(a for a in received.message.attempts if not self._wants(a)))

    async def _on_grammar(self, received: Received[AskGrammar]) -> GrammarSent:
        asked = received.message
        live = self._live.get(asked.request_id)
        return GrammarSent(
            request_id=asked.request_id,
            attempt=asked.attempt,
            deadline_ms=asked.deadline_ms,
            grammar=live.job.sampling.grammar if live is not None else "",
        )

    def _wants(self, attempt: AttemptId) -> bool:
        live = self._live.get(attempt.request_id)
        return live is not None and live.core.phase is Phase.RUNNING and live.core.attempt == attempt.attempt

    # Actions out.

    async def _tick(self) -> None:
        """Tick the live requests as long as there are any."""
        while self._live:
            await asyncio.sleep(self.config.times.gateway.tick_s)
            time_ms = now_ms()
            for live in [live for live in self._live.values() if live.core.wake_ms <= time_ms]:
                self._carry_out(live, None, live.core.tick(time_ms))
        self._is_ticking = False

    def _carry_out(self, live: LiveRequest, event: Event | None, actions: Sequence[Action]) -> None:
        """Do what was decided on an event (None: the time passed), and have it seen."""
        for action in actions:
            match action:
                case Deliver():
                    live.mailbox.put(live.choice, action)
                case Finish() | FailRequest() | Abandon():
                    self._forget(live)
                    live.mailbox.put(live.choice, action)
                case _:
                    self._send(live, action)
        self.spans.saw(live, event, actions)
        self._stories.saw(live, actions)

    def _send(self, live: LiveRequest, action: AskPlacement | SendAttempt | AskWorker | SendCancel) -> None:
        """Ask what a request is to ask, and send what it is to send, in a task."""
        job = live.job
        match action:
            case AskPlacement(num_answered=0):
                self._lines.join(job.key.tenant, partial(self._begin_place, live, action))
                return
            case AskPlacement():  # what is under way waits for no other
                self._begin_place(live, action, _keep_turn)
                return
            case SendAttempt():
                self.num_resumes += action.num_answered > 0 and action.upstream is None
                message = attempt_message(job, live.signature, self.gateway_id, action, live.prompt)
                name, work = "run", partial(self._dispatch, live, action.worker_id, message)
            case AskWorker():
                self.num_progress_asked += 1
                name, work = "progress", partial(self._progress, live, action)
            case SendCancel():
                name, work = "cancel", partial(self._cancel, job, action)
        self.tasks.create_task(self._do(live, work), name=f"{name} {job.request_id}")

    async def _do(self, live: LiveRequest, work: Callable[[], Awaitable[None]]) -> None:
        """Do what a request needs. What nobody foresaw is the end of this request, and of no other."""
        try:
            await work()
        except Exception as error:
            log.exception("request %s ends, as this gateway has failed", live.job.request_id)
            self.handle(live, TaskFailed(f"this gateway has failed ({type(error).__name__}); its log says how"))

    def _forget(self, live: LiveRequest) -> None:
        if live.timer is not None:
            live.timer.cancel()
        self._live.pop(live.job.request_id, None)
        if not self._live:
            self._idle.set()

    # On behalf of a request.

    def _begin_place(self, live: LiveRequest, action: AskPlacement, end_turn: EndTurn) -> bool:
        """Ask for a placement in a task, unless the request has ended while it waited for its turn."""
        if live.job.request_id not in self._live:
            return False
        work = partial(self._place, live, action, end_turn)
        self.tasks.create_task(self._do(live, work), name=f"place {live.job.request_id}")
        return True

    async def _place(self, live: LiveRequest, action: AskPlacement, end_turn: EndTurn) -> None:
        job = live.job
        live.prompt = prompt = await continue_prompt(job, live.core.tokens[: action.num_answered])
        request = place_request(job, action, prompt)
        event: PlaceEvent
        try:
            within_s = self.config.times.gateway.place_timeout_s
            reply = await self._ask(live, subjects.PLACE, (), request, within_s, live.times.place_trace)
            if isinstance(reply, Placement):
                event = PlaceGranted(action.attempt, reply)
            else:
                event = PlaceRefused(action.attempt, reply.reason, reply.detail, reply.retry_after_ms)
        except MessageTooLargeError as error:
            event = PlaceRefused(action.attempt, RefusalReason.TOO_LONG, error.reason, 0)
        except BusError as error:
            event = PlaceUnanswered(action.attempt, error.reason)
        if not isinstance(event, PlaceRefused):
            end_turn()
        self.handle(live, event)

    async def _dispatch(self, live: LiveRequest, worker_id: WorkerId, message: RunAttempt) -> None:
        """Send an attempt to a worker, and report to the request whether it has been taken."""
        try:
            reply = await self._ask(live, subjects.RUN, (worker_id,), message, self.config.gateway.accept_timeout_s)
        except BusError as error:
            if isinstance(error, MessageTooLargeError):  # it reaches no worker
                refused = WorkerRefused(message.attempt, worker_id, RefusalReason.TOO_LONG, error.reason, 0)
                self.handle(live, refused)
                return
            # A plain BusError is a reply that cannot be read: it may have been a yes, like one that is late.
            may_have_taken = isinstance(error, RequestTimedOutError) or type(error) is BusError
            self.handle(live, WorkerSilent(message.attempt, worker_id, error.reason, may_have_taken))
            return
        if isinstance(reply, Refused):
            refused = WorkerRefused(message.attempt, worker_id, reply.reason, reply.detail, reply.retry_after_ms)
            self.handle(live, refused)
        else:
            self.handle(live, WorkerAccepted(message.attempt, worker_id, reply.accepted_ns))

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
            self._receive(live, worker_id, share)
        self.handle(live, ProgressAnswered(action.attempt, worker_id, outcome, is_waiting))

    async def _cancel(self, job: Job, action: SendCancel) -> None:
        """Ask all workers to let go of an attempt. Where that fails their own deadlines free the blocks."""
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
        trace: str = "",
    ) -> ReplyT:
        """Ask on behalf of a request, for no longer than it has. `trace`: the span that the question is; empty: what
        follows from it lies under the request's. Raises BusError."""
        job = live.job
        left_s = (job.deadline_ms - now_ms()) / 1000
        try:
            reply = await self.bus.ask(subject, ids, message, max(0.001, min(timeout_s, left_s)), trace or job.trace)
        except NoRespondersError:
            self._note_connects()  # what the broker answers as it has just lost a server proves nothing
            self._detector.received(now_ms())
            raise
        self._detector.received(now_ms())
        return reply


def _keep_turn() -> None:
    """End the turn of who has none."""
