"""The shell around `core.py`: carries a request's actions out on the bus and brings what happens back to it.

Its outputs go to a mailbox that the HTTP side empties: one wake-up for all tokens of a bus message.
"""

import asyncio
import logging
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field

import msgspec

from schemas import subjects
from schemas.block import unpack_tokens
from schemas.ids import GatewayId, RequestId, TokenIds, WorkerId
from schemas.message import Message
from schemas.request import (
    CancelRequest,
    Placement,
    PlaceRequest,
    Refused,
    RequestTokens,
    ReserveBlocks,
    RunPrefill,
    SamplingParams,
    TokensEmitted,
)
from schemas.worker import WorkerJoined, WorkerLeft
from services.bus.base import BusError, NoRespondersError
from services.bus.typed import Received, TypedBus
from services.config import GatewayConfig
from services.gateway.core import RequestCore
from services.gateway.events import (
    Abandon,
    Action,
    AskPlacement,
    ClientGone,
    DeadlinePassed,
    Deliver,
    Event,
    Fail,
    Finish,
    GatewayStopping,
    Output,
    Placed,
    PlaceRefused,
    PlaceUnanswered,
    SendCancel,
    SendReserve,
    SendRun,
    StopMatched,
    TokensReceived,
    WorkerLost,
    WorkerRefused,
    WorkerSilent,
)
from services.runtime import now_ms
from services.telemetry import AttributeValue, Key, SpanName, Telemetry

log = logging.getLogger(__name__)

PLACE_TIMEOUT_S = 2.0
"""A scheduler answers from memory; one that does not within this is dead or drowning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One choice of an HTTP request, ready to be placed."""

    request_id: RequestId
    prompt: TokenIds
    num_prompt_tokens: int
    block_hashes: bytes
    sampling: SamplingParams
    deadline_ms: int
    traceparent: str


class Mailbox:
    """What the choices of one HTTP request have put out, in order. One reader."""

    def __init__(self) -> None:
        self._items: list[tuple[int, Output]] = []
        self._filled = asyncio.Event()

    def put(self, choice: int, output: Output) -> None:
        self._items.append((choice, output))
        self._filled.set()

    async def take(self) -> list[tuple[int, Output]]:
        """Return all there is, at least one."""
        await self._filled.wait()
        self._filled.clear()
        items, self._items = self._items, []
        return items


@dataclass(slots=True, eq=False)
class LiveRequest:
    """A request under way. `choice` marks its outputs in the mailbox."""

    job: Job
    choice: int
    mailbox: Mailbox
    core: RequestCore
    timer: asyncio.TimerHandle | None = None


@dataclass
class Requests:
    """All requests of one gateway. Tasks of `tasks` ask and publish; handlers are called on the event loop."""

    config: GatewayConfig
    gateway_id: GatewayId
    door: TypedBus
    telemetry: Telemetry
    tasks: asyncio.TaskGroup
    num_bad_tokens: int = 0
    _live: dict[str, LiveRequest] = field(default_factory=dict[str, LiveRequest])
    _incarnations: dict[WorkerId, str] = field(default_factory=dict[WorkerId, str])
    _idle: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._idle.set()

    @property
    def num_live(self) -> int:
        return len(self._live)

    async def listen(self) -> None:
        """Subscribe to the tokens of this gateway and to workers that come and go."""
        await self.door.listen(self.tasks, subjects.TOKENS, (self.gateway_id,), self._hear_tokens)
        await self.door.listen(self.tasks, subjects.LEFT, ("*",), self._hear_left)
        await self.door.listen(self.tasks, subjects.JOINED, ("*",), self._hear_joined)

    def submit(self, job: Job, choice: int, mailbox: Mailbox) -> LiveRequest:
        """Start a request. It ends with one Finish, Fail or Abandon in the mailbox, by its deadline."""
        core = RequestCore(job.request_id, job.sampling.max_tokens, self.config.max_attempts)
        live = self._live[job.request_id] = LiveRequest(job, choice, mailbox, core)
        self._idle.clear()
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

    def stop_all(self) -> None:
        """End every request: this gateway stops."""
        for live in list(self._live.values()):
            self._tell(live, GatewayStopping())

    async def wait_idle(self) -> None:
        """Return once no request is under way."""
        await self._idle.wait()

    def _hear_tokens(self, received: Received[TokensEmitted]) -> None:
        worker_id = received.message.worker_id
        for share in received.message.requests:
            live = self._live.get(share.request_id)
            if live is not None:
                self._hear_share(live, worker_id, share)

    def _hear_share(self, live: LiveRequest, worker_id: WorkerId, share: RequestTokens) -> None:
        try:
            tokens = tuple(unpack_tokens(share.tokens))
        except ValueError:
            self.num_bad_tokens += 1
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
        known = self._incarnations.pop(message.worker_id, message.incarnation)
        if known != message.incarnation:  # news of a predecessor
            self._incarnations[message.worker_id] = known
            return
        self._lose(message.worker_id, message.reason)

    def _hear_joined(self, received: Received[WorkerJoined]) -> None:
        """A new incarnation knows nothing of what its predecessor had taken, which nobody may have seen leave."""
        worker = received.message.worker
        if self._incarnations.get(worker.worker_id) != worker.incarnation:
            self._incarnations[worker.worker_id] = worker.incarnation
            self._lose(worker.worker_id, "it was restarted")

    def _lose(self, worker_id: WorkerId, reason: str) -> None:
        for live in list(self._live.values()):
            self._tell(live, WorkerLost(worker_id, reason))

    def _tell(self, live: LiveRequest, event: Event) -> None:
        self._act(live, live.core.handle(event))

    def _act(self, live: LiveRequest, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Deliver():
                    live.mailbox.put(live.choice, action)
                case Finish() | Fail() | Abandon():
                    self._forget(live)
                    live.mailbox.put(live.choice, action)
                case AskPlacement():
                    self._spawn(self._place(live, action), f"place {live.job.request_id}")
                case SendRun():
                    self._ask_to_run(live, action)
                case SendReserve():
                    self._ask_to_reserve(live, action)
                case SendCancel():
                    self._spawn(self._cancel(live, action), f"cancel {live.job.request_id}")

    def _ask_to_run(self, live: LiveRequest, action: SendRun) -> None:
        job = live.job
        message = RunPrefill(
            request_id=job.request_id,
            attempt=action.attempt,
            deadline_ms=job.deadline_ms,
            gateway_id=self.gateway_id,
            prompt=job.prompt,
            sampling=job.sampling,
            handoff_id=action.handoff_id,
            decode_worker=action.decode_worker,
            sources=action.sources,
        )
        ask = self._ask_worker(live, subjects.RUN, action.prefill_worker, message)
        self._spawn(ask, f"run {job.request_id}")

    def _ask_to_reserve(self, live: LiveRequest, action: SendReserve) -> None:
        job = live.job
        message = ReserveBlocks(
            request_id=job.request_id,
            attempt=action.attempt,
            deadline_ms=job.deadline_ms,
            gateway_id=self.gateway_id,
            handoff_id=action.handoff_id,
            prefill_worker=action.prefill_worker,
            prompt=job.prompt,
            sampling=job.sampling,
            sources=action.sources,
        )
        ask = self._ask_worker(live, subjects.RESERVE, action.decode_worker, message)
        self._spawn(ask, f"reserve {job.request_id}")

    async def _ask_worker(
        self, live: LiveRequest, subject: subjects.Subject, worker_id: WorkerId, message: RunPrefill | ReserveBlocks
    ) -> None:
        """Send the request to a worker. Only a no, or no answer, matters: tokens are the yes."""
        timeout_s = self._timeout_s(live, self.config.accept_timeout_s)
        try:
            reply = await self.door.ask(subject, (worker_id,), message, timeout_s, live.job.traceparent)
        except BusError as error:
            self._tell(live, WorkerSilent(message.attempt, worker_id, error.reason))
            return
        if isinstance(reply, Refused):
            refused = WorkerRefused(message.attempt, worker_id, reply.reason, reply.detail, reply.retry_after_ms)
            self._tell(live, refused)

    async def _place(self, live: LiveRequest, action: AskPlacement) -> None:
        job = live.job
        request = PlaceRequest(
            request_id=job.request_id,
            attempt=action.attempt,
            deadline_ms=job.deadline_ms,
            num_prompt_tokens=job.num_prompt_tokens,
            max_tokens=job.sampling.max_tokens,
            block_hashes=job.block_hashes,
            excluded_workers=action.excluded_workers,
        )
        started_ns = time.time_ns()
        timeout_s = self._timeout_s(live, PLACE_TIMEOUT_S)
        try:
            reply = await self.door.ask(subjects.PLACE, (), request, timeout_s, job.traceparent)
        except BusError as error:
            may_answer = not isinstance(error, NoRespondersError)
            event = PlaceUnanswered(action.attempt, error.reason, may_answer)
        else:
            event = _place_event(action.attempt, reply)
        self._record_place(job, started_ns, event)
        self._tell(live, event)

    def _record_place(self, job: Job, started_ns: int, event: Placed | PlaceRefused | PlaceUnanswered) -> None:
        attributes: dict[str, AttributeValue] = {Key.REQUEST_ID: job.request_id, Key.ATTEMPT: event.attempt}
        error = ""
        match event:
            case Placed():
                attributes[Key.PREFILL_WORKER] = event.prefill_worker
                attributes[Key.DECODE_WORKER] = event.decode_worker or ""
                attributes[Key.SOURCES] = ", ".join(
                    f"{s.worker_id}: blocks {s.first_block} to {s.first_block + s.num_blocks}" for s in event.sources
                )
                if event.terms is not None:
                    terms: dict[str, AttributeValue] = msgspec.structs.asdict(event.terms)
                    attributes |= {f"{Key.PLACE_TERM}.{name}": value for name, value in terms.items()}
            case PlaceRefused():
                error = event.reason
            case PlaceUnanswered():
                error = event.detail
        times_ns = (started_ns, time.time_ns())
        self.telemetry.record(SpanName.PLACE, job.traceparent, times_ns, attributes, error=error)

    async def _cancel(self, live: LiveRequest, action: SendCancel) -> None:
        job = live.job
        message = CancelRequest(
            request_id=job.request_id, attempt=action.attempt, deadline_ms=job.deadline_ms, reason=action.reason
        )
        try:
            await self.door.publish(subjects.CANCEL, (job.request_id,), message, job.traceparent)
        except BusError as error:  # the workers' own deadlines free the blocks
            log.warning("cannot cancel %s: %s", job.request_id, error)

    def _timeout_s(self, live: LiveRequest, timeout_s: float) -> float:
        return max(0.001, min(timeout_s, (live.job.deadline_ms - now_ms()) / 1000))

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
        return Placed(attempt, reply.prefill_worker, reply.decode_worker, reply.sources, reply.terms)
    assert isinstance(reply, Refused), "the subject's table allows no third reply"
    return PlaceRefused(attempt, reply.reason, reply.detail, reply.retry_after_ms)
