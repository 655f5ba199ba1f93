"""The shell around `core.py`: carries a request's actions out on the bus and brings what happens back to it.

Its outputs go to a mailbox that the HTTP side empties: one wake-up for all tokens of a bus message. One task looks
after the time of all live requests.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field

from schemas import subjects
from schemas.block import unpack_tokens
from schemas.ids import GatewayId, WorkerId
from schemas.message import Message
from schemas.observe import KeepTrace
from schemas.request import (
    AskProgress,
    AskWanted,
    AttemptId,
    CancelRequest,
    Placement,
    PrefillAccepted,
    Progress,
    Refused,
    RequestTokens,
    ReserveBlocks,
    RunPrefill,
    TokensEmitted,
    Wanted,
)
from schemas.worker import BlockCounts, WorkerJoined, WorkerLeft, WorkerLoad
from services.bus.base import BusError, NoRespondersError, RequestTimedOutError
from services.bus.typed import Received, TypedBus
from services.config import GatewayConfig
from services.gateway.observe.spans import AttemptClock, Dispatch, GatewaySpans
from services.gateway.observe.story import Stories
from services.gateway.request.core import Phase, RequestCore
from services.gateway.request.events import (
    Abandon,
    Action,
    AskPlacement,
    AskWorker,
    ClientGone,
    DeadlinePassed,
    Deliver,
    Event,
    Fail,
    Finish,
    GatewayStopping,
    Placed,
    PlaceRefused,
    PlaceUnanswered,
    ProgressAnswered,
    ProgressOutcome,
    SendCancel,
    SendReserve,
    SendRun,
    StopMatched,
    TokensReceived,
    WorkerAccepted,
    WorkerLost,
    WorkerRefused,
    WorkerSilent,
)
from services.gateway.request.job import Job, PackedPrompt, continue_prompt, place_request, reserve_message, run_message
from services.gateway.request.mailbox import Mailbox
from services.gateway.request.progress_watch import WatchLimits
from services.keep import keep_traces
from services.presence import Hearing, Incarnations, Speaker
from services.runtime import now_ms
from services.telemetry import Telemetry

log = logging.getLogger(__name__)

PLACE_TIMEOUT_S = 2.0
"""A scheduler answers from memory; one that does not within this is dead or drowning."""


TICK_S = 0.05
"""How exactly the waits of live requests are kept."""
LOAD_KEPT_MS = 10_000
"""A worker's load is forgotten after so long without another."""


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
    clock: AttemptClock = field(default_factory=AttemptClock)


@dataclass
class Requests:
    """All requests of one gateway. Tasks of `tasks` ask and publish; handlers are called on the event loop."""

    config: GatewayConfig
    gateway_id: GatewayId
    bus: TypedBus
    telemetry: Telemetry
    tasks: asyncio.TaskGroup
    num_resumes: int = 0
    """Attempts that went on with an answer."""
    num_progress_asked: int = 0
    _live: dict[str, LiveRequest] = field(default_factory=dict[str, LiveRequest])
    _loads: dict[WorkerId, tuple[int, BlockCounts]] = field(default_factory=dict[WorkerId, tuple[int, BlockCounts]])
    _stories: Stories = field(init=False)
    _hearing: Hearing = field(default_factory=Hearing)
    _incarnations: Incarnations = field(init=False)
    _idle: asyncio.Event = field(default_factory=asyncio.Event)
    _is_watching: bool = False

    def __post_init__(self) -> None:
        self._idle.set()
        self._stories = Stories(self.gateway_id, self.bus, self.tasks)
        self.spans = GatewaySpans(self.telemetry)
        self._incarnations = Incarnations(self._hearing, self.config.worker_silent_ms)
        self._limits = WatchLimits(
            progress_after_ms=self.config.progress_after_ms,
            worker_silent_ms=self.config.worker_silent_ms,
            resume_wait_ms=round(self.config.resume_wait_s * 1000),
            place_wait_ms=round(self.config.place_wait_s * 1000),
        )

    @property
    def num_live(self) -> int:
        return len(self._live)

    def ages_s(self) -> list[float]:
        """Return how long the requests have been under way."""
        time_ms = now_ms()
        return [(time_ms - live.started_ms) / 1000 for live in self._live.values()]

    def overdue_s(self) -> float:
        """Return how long a request is over its deadline, of all the longest; 0: none is."""
        first_ms = min((live.job.deadline_ms for live in self._live.values()), default=now_ms())
        return max(0, now_ms() - first_ms) / 1000

    def block_counts(self) -> dict[WorkerId, BlockCounts]:
        """Return what the workers last said of their blocks."""
        oldest_ms = now_ms() - LOAD_KEPT_MS
        for worker_id in [w for w, (heard_ms, _) in self._loads.items() if heard_ms < oldest_ms]:
            del self._loads[worker_id]
        return {worker_id: blocks for worker_id, (_, blocks) in self._loads.items()}

    async def listen(self) -> None:
        """Subscribe to the tokens of this gateway and to workers that come and go."""
        await self.bus.listen(self.tasks, subjects.TOKENS, (self.gateway_id,), self._hear_tokens)
        await self.bus.listen(self.tasks, subjects.LEFT, ("*",), self._hear_left)
        await self.bus.listen(self.tasks, subjects.JOINED, ("*",), self._hear_joined)
        await self.bus.listen(self.tasks, subjects.LOAD, ("*",), self._hear_load)
        await keep_traces(self.bus, self.tasks, self.telemetry)
        await self.bus.serve(self.tasks, subjects.WANTED, (self.gateway_id,), self._say_wanted)
        await self._stories.listen()

    def submit(self, job: Job, choice: int, mailbox: Mailbox) -> LiveRequest:
        """Start a request. It ends with one Finish, Fail or Abandon in the mailbox, by its deadline."""
        core = RequestCore(
            job.request_id, job.sampling.max_tokens, self.config.max_attempts, self._limits, self._hearing
        )
        live = self._live[job.request_id] = LiveRequest(job, choice, mailbox, core, job.prompt, now_ms())
        self._idle.clear()
        self._stories.begin(job, core)
        if not self._is_watching:
            self._is_watching = True
            self._spawn(self._keep_watch(), "watch over requests")
        left_s = max(0, job.deadline_ms - now_ms()) / 1000
        live.timer = asyncio.get_running_loop().call_later(left_s, self._tell, live, DeadlinePassed())
        self._act(live, core.start())
        return live

    def stop_matched(self, live: LiveRequest) -> None:
        """The text of this request has reached a stop string."""
        self._tell(live, StopMatched())

    def abandon(self, live: LiveRequest, reason: str) -> None:
        """Nobody wants this answer any more: cancel it everywhere."""
        self._tell(live, ClientGone(reason))

    def keep_trace(self, trace_id: str, reason: str) -> None:
        """Have everybody export what there is of a trace that was not sampled."""
        self.telemetry.keep(trace_id)
        self._spawn(self._say_keep(KeepTrace(trace_id=trace_id, reason=reason)), f"keep {trace_id}")

    def stop_all(self) -> None:
        """End every request: this gateway stops."""
        for live in list(self._live.values()):
            self._tell(live, GatewayStopping())

    async def wait_idle(self) -> None:
        """Return once no request is under way."""
        await self._idle.wait()

    async def _keep_watch(self) -> None:
        """Tick the live requests as long as there are any."""
        while self._live:
            await asyncio.sleep(TICK_S)
            time_ms = now_ms()
            for live in [live for live in self._live.values() if live.core.wake_ms <= time_ms]:
                self._act(live, live.core.tick(time_ms))
        self._is_watching = False

    async def _say_wanted(self, received: Received[AskWanted]) -> Message:
        return Wanted(unwanted=tuple(a for a in received.message.attempts if not self._wants(a)))

    def _wants(self, attempt: AttemptId) -> bool:
        live = self._live.get(attempt.request_id)
        return live is not None and live.core.phase is Phase.RUNNING and live.core.attempt == attempt.attempt

    def _hear_tokens(self, received: Received[TokensEmitted]) -> None:
        worker_id = received.message.worker_id
        self._hearing.hear(now_ms())
        for share in received.message.requests:
            live = self._live.get(share.request_id)
            if live is not None:
                self._hear_share(live, worker_id, share)

    def _hear_share(self, live: LiveRequest, worker_id: WorkerId, share: RequestTokens) -> None:
        try:
            tokens = tuple(unpack_tokens(share.tokens))
        except ValueError:
            self.bus.drop("malformed")
            log.warning("dropped %d bytes of tokens of %s from %s", len(share.tokens), share.request_id, worker_id)
            return
        self._tell(
            live,
            TokensReceived(
                share.attempt, worker_id, share.index, tokens, share.finish_reason, share.failure, share.report
            ),
        )

    def _hear_left(self, received: Received[WorkerLeft]) -> None:
        message = received.message
        if self._incarnations.left(message.worker_id, message.incarnation):  # else news of a predecessor
            self._loads.pop(message.worker_id, None)
            self._lose(WorkerLost(message.worker_id, message.reason))

    def _hear_joined(self, received: Received[WorkerJoined]) -> None:
        worker = received.message.worker
        if self._incarnations.joined(worker.worker_id, worker.incarnation, now_ms()):
            self._lose_predecessor(worker.worker_id)

    def _hear_load(self, received: Received[WorkerLoad]) -> None:
        worker, time_ms = received.message.worker, now_ms()
        speaker = self._incarnations.spoke(worker.worker_id, worker.incarnation, time_ms)
        if speaker is Speaker.SUCCESSOR:
            self._lose_predecessor(worker.worker_id)
        self._hearing.hear(time_ms)
        if speaker is not Speaker.PREDECESSOR:
            self._loads[worker.worker_id] = time_ms, received.message.blocks

    def _lose_predecessor(self, worker_id: WorkerId) -> None:
        """A new incarnation knows nothing of what its predecessor had taken, which nobody may have seen leave."""
        self._lose(WorkerLost(worker_id, "it was restarted", is_back=True))

    def _lose(self, event: WorkerLost) -> None:
        self._hearing.hear(now_ms())
        for live in list(self._live.values()):
            self._tell(live, event)

    def _tell(self, live: LiveRequest, event: Event) -> None:
        self._act(live, live.core.handle(event, now_ms()))

    def _act(self, live: LiveRequest, actions: list[Action]) -> None:
        self._stories.go_on(live.job.request_id, actions)
        for action in actions:
            match action:
                case Deliver():
                    live.mailbox.put(live.choice, action)
                case Finish() | Fail() | Abandon():
                    self._forget(live)
                    live.mailbox.put(live.choice, action)
                case AskPlacement():
                    asked_ns = live.clock.asks(action.attempt)
                    self._spawn(self._place(live, action, asked_ns), f"place {live.job.request_id}")
                case SendRun():
                    self._ask_to_run(live, action)
                case SendReserve():
                    self._ask_to_reserve(live, action)
                case AskWorker():
                    self.num_progress_asked += 1
                    self._spawn(self._ask_progress(live, action), f"progress {live.job.request_id}")
                case SendCancel():
                    self._spawn(self._cancel(live, action), f"cancel {live.job.request_id}")

    def _ask_to_run(self, live: LiveRequest, action: SendRun) -> None:
        self.num_resumes += action.num_answered > 0
        message = run_message(live.job, self.gateway_id, action, live.prompt)
        ask = self._ask_worker(live, subjects.RUN, action.prefill_worker, message)
        self._spawn(ask, f"run {live.job.request_id}")

    def _ask_to_reserve(self, live: LiveRequest, action: SendReserve) -> None:
        message = reserve_message(live.job, self.gateway_id, action, live.prompt)
        ask = self._ask_worker(live, subjects.RESERVE, action.decode_worker, message)
        self._spawn(ask, f"reserve {live.job.request_id}")

    async def _ask_worker(
        self, live: LiveRequest, subject: subjects.Subject, worker_id: WorkerId, message: RunPrefill | ReserveBlocks
    ) -> None:
        """Send the request to a worker, and take in whether it has taken it."""
        role = "prefill" if isinstance(message, RunPrefill) else "decode"
        sent = Dispatch(message.attempt, role, worker_id, live.clock.placed_ns)
        try:
            reply = await self._ask(live, subject, (worker_id,), message, self.config.accept_timeout_s)
        except BusError as error:
            self.spans.dispatched(live.job, live.clock, sent, 0, error.reason)
            may_have_taken = isinstance(error, RequestTimedOutError) or type(error) is BusError
            self._tell(live, WorkerSilent(message.attempt, worker_id, error.reason, may_have_taken))
            return
        refusal = reply.reason if isinstance(reply, Refused) else ""
        accepted_ns = reply.accepted_ns if isinstance(reply, PrefillAccepted) else 0
        self.spans.dispatched(live.job, live.clock, sent, accepted_ns, refusal)
        if isinstance(reply, Refused):
            refused = WorkerRefused(message.attempt, worker_id, reply.reason, reply.detail, reply.retry_after_ms)
            self._tell(live, refused)
        else:
            self._tell(live, WorkerAccepted(message.attempt, worker_id))

    async def _ask_progress(self, live: LiveRequest, action: AskWorker) -> None:
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
            assert isinstance(reply, Progress), "the subject's table allows no other reply"
            outcome, share, is_waiting = "known" if reply.known else "unknown", reply.tokens, reply.is_waiting
        if share is not None and (share.request_id, share.attempt) == (job.request_id, action.attempt):
            self._hear_share(live, worker_id, share)
        self._tell(live, ProgressAnswered(action.attempt, worker_id, outcome, is_waiting))

    async def _place(self, live: LiveRequest, action: AskPlacement, asked_ns: int) -> None:
        job = live.job
        live.prompt = prompt = await continue_prompt(job, live.core.tokens[: action.num_answered])
        request = place_request(job, action, prompt)
        try:
            reply = await self._ask(live, subjects.PLACE, (), request, PLACE_TIMEOUT_S)
        except BusError as error:
            event = PlaceUnanswered(action.attempt, error.reason)
        else:
            event = _place_event(action.attempt, reply)
        placed_ns = time.time_ns()
        if isinstance(event, Placed):
            live.clock.placed_ns = placed_ns
        self.spans.placed(job, (asked_ns, placed_ns), event)
        self._tell(live, event)

    async def _cancel(self, live: LiveRequest, action: SendCancel) -> None:
        job = live.job
        message = CancelRequest(
            request_id=job.request_id, attempt=action.attempt, deadline_ms=job.deadline_ms, reason=action.reason
        )
        try:
            await self.bus.publish(subjects.CANCEL, (job.request_id,), message, job.traceparent)
        except BusError as error:  # the workers' own deadlines free the blocks
            log.warning("cannot cancel %s: %s", job.request_id, error)

    async def _say_keep(self, message: KeepTrace) -> None:
        with contextlib.suppress(BusError):  # then only what is here is kept
            await self.bus.publish(subjects.KEEP, (message.trace_id,), message)

    async def _ask(
        self, live: LiveRequest, subject: subjects.Subject, ids: tuple[str, ...], message: Message, timeout_s: float
    ) -> Message:
        """Ask on behalf of a request, for no longer than it has. Any answer, the broker's too, is heard."""
        left_s = (live.job.deadline_ms - now_ms()) / 1000
        try:
            reply = await self.bus.ask(subject, ids, message, max(0.001, min(timeout_s, left_s)), live.job.traceparent)
        except NoRespondersError:
            self._hearing.hear(now_ms())
            raise
        self._hearing.hear(now_ms())
        return reply

    def _spawn(self, work: Coroutine[None, None, None], name: str) -> None:
        self.tasks.create_task(work, name=name)

    def _forget(self, live: LiveRequest) -> None:
        if live.timer is not None:
            live.timer.cancel()
        self._live.pop(live.job.request_id, None)
        if not self._live:
            self._idle.set()


def _place_event(attempt: int, reply: Message) -> Placed | PlaceRefused:
    if isinstance(reply, Placement):
        return Placed(attempt, reply.prefill_worker, reply.decode_worker, reply.sources, reply.terms, reply.replica)
    assert isinstance(reply, Refused), "the subject's table allows no third reply"
    return PlaceRefused(attempt, reply.reason, reply.detail, reply.retry_after_ms)
