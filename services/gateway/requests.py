"""The shell around `request/core.py`: brings each request what happens, and carries its actions out on the bus.

A request's outputs go to a mailbox that the HTTP side empties: one wake-up for all tokens of a bus message. One task
ticks all live requests.
"""

import asyncio
from dataclasses import dataclass, field

from schemas import subjects
from schemas.ids import GatewayId, WorkerId
from schemas.request import AskWanted, AttemptId, TokensEmitted, Wanted
from schemas.worker import BlockCounts
from services.bus.typed import Received, TypedBus
from services.config import MeshConfig
from services.gateway.asking import Asker, LiveRequest
from services.gateway.fleet import Fleet, FleetMessage
from services.gateway.observe.answer_observer import ChoiceObserver, KeepRate
from services.gateway.observe.story import Stories
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
    SendCancel,
    SendReserve,
    SendRun,
    Submitted,
)
from services.gateway.request.job import Job
from services.gateway.request.mailbox import Mailbox
from services.keep import keep_traces
from services.presence import Hearing
from services.runtime import now_ms
from services.telemetry import Telemetry
from services.trust.credentials import TenantSigner


@dataclass
class Requests:
    """All requests of one gateway. Tasks of `tasks` ask and publish; handlers are called on the event loop."""

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
    _live: dict[str, LiveRequest] = field(default_factory=dict[str, LiveRequest])
    _idle: asyncio.Event = field(default_factory=asyncio.Event)
    _keep_rate: KeepRate = field(default_factory=KeepRate)
    _is_ticking: bool = False

    def __post_init__(self) -> None:
        self._idle.set()
        self._hearing = Hearing(self.config.times.presence)
        self._stories = Stories(self.gateway_id, self.bus, self.tasks, self.config.times.gateway)
        self._fleet = Fleet(self._hearing, self.config)
        self._asker = Asker(self.config, self.gateway_id, self.bus, self.tasks, self._hearing, self.handle)

    async def listen(self) -> None:
        """Subscribe to all that a gateway hears, and serve all that it answers. Raises BusError."""
        bus, tasks, stories = self.bus, self.tasks, self._stories
        await bus.listen(tasks, subjects.TOKENS, ("*", self.gateway_id), self._on_tokens)
        await bus.listen(tasks, subjects.LEFT, ("*",), self._on_fleet)
        await bus.listen(tasks, subjects.JOINED, ("*",), self._on_fleet)
        await bus.listen(tasks, subjects.LOAD, ("*",), self._on_fleet)
        await keep_traces(bus, tasks, self.telemetry)
        await bus.serve(tasks, subjects.WANTED, (self.gateway_id,), self._on_wanted)
        await bus.serve(tasks, subjects.REQUEST_STATUS, ("*",), stories.on_status)
        await bus.serve(tasks, subjects.REQUEST_SOUGHT, ("*",), stories.on_sought, queue=self.gateway_id)

    # For the HTTP side.

    def submit(self, job: Job, choice: int, mailbox: Mailbox) -> LiveRequest:
        """Start a request. It ends with one Finish, FailRequest or Abandon in the mailbox, by its deadline."""
        core = RequestCore(
            job.request_id, job.sampling.max_tokens, self.config, self._hearing, must_split=job.must_split
        )
        observer = ChoiceObserver(self.telemetry, job, core)
        proof = self.signer.sign(job.request_id, job.key.tenant, job.deadline_ms)
        live = self._live[job.request_id] = LiveRequest(
            job, choice, mailbox, core, observer, job.prompt, now_ms(), proof
        )
        self._idle.clear()
        self._stories.begin(job, core)
        if not self._is_ticking:
            self._is_ticking = True
            self.tasks.create_task(self._tick(), name="watch over requests")
        left_s = max(0, job.deadline_ms - now_ms()) / 1000
        live.timer = asyncio.get_running_loop().call_later(left_s, self.handle, live, DeadlinePassed())
        self.handle(live, Submitted())
        return live

    def handle(self, live: LiveRequest, event: Event) -> None:
        """Tell a request what has happened, and do what it decides."""
        self._carry_out(live, live.core.handle(event, now_ms()))

    def keep_trace(self, trace_id: str, reason: str) -> bool:
        """Have everybody export what there is of a trace that was not sampled. False: there are too many such traces
        just now."""
        if not self._keep_rate.allows_one_more():
            return False
        self.telemetry.keep(trace_id)
        self._asker.keep(trace_id, reason)
        return True

    def stop_all(self) -> None:
        """End every request: this gateway stops."""
        for live in list(self._live.values()):
            self.handle(live, GatewayStopping())

    async def wait_idle(self) -> None:
        """Return once no request is under way."""
        await self._idle.wait()

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
        """Return what the workers last said of their blocks."""
        return self._fleet.block_counts(now_ms())

    # What comes on the bus.

    def _on_tokens(self, received: Received[TokensEmitted]) -> None:
        worker_id = received.message.worker_id
        self._hearing.hear(now_ms())
        for share in received.message.requests:
            live = self._live.get(share.request_id)
            if live is not None:
                self._asker.receive(live, worker_id, share)

    def _on_fleet(self, received: Received[FleetMessage]) -> None:
        time_ms = now_ms()
        lost = self._fleet.handle(received.message, time_ms)
        self._hearing.hear(time_ms)
        for event in lost:
            for live in list(self._live.values()):
                self.handle(live, event)

    async def _on_wanted(self, received: Received[AskWanted]) -> Wanted:
        return Wanted(unwanted=tuple(a for a in received.message.attempts if not self._wants(a)))

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
                self._carry_out(live, live.core.tick(time_ms))
        self._is_ticking = False

    def _carry_out(self, live: LiveRequest, actions: list[Action]) -> None:
        self._stories.go_on(live.job.request_id, actions)
        for action in actions:
            match action:
                case Deliver():
                    live.observer.goes_on()
                    live.mailbox.put(live.choice, action)
                case Finish() | FailRequest() | Abandon():
                    self._forget(live)
                    live.mailbox.put(live.choice, action)
                case SendRun():
                    self.num_resumes += action.num_answered > 0
                    self._asker.send(live, action)
                case AskWorker():
                    self.num_progress_asked += 1
                    self._asker.send(live, action)
                case AskPlacement() | SendReserve() | SendCancel():
                    live.observer.is_moved()
                    self._asker.send(live, action)

    def _forget(self, live: LiveRequest) -> None:
        if live.timer is not None:
            live.timer.cancel()
        self._live.pop(live.job.request_id, None)
        if not self._live:
            self._idle.set()
