"""Runs the scheduler: brings its core what the fleet publishes, carries out what it decides, answers placements."""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from dataplane.lasting import lasting
from schemas import subjects
from schemas.broker import DISCONNECTED, name_of
from schemas.ids import is_subject_token
from schemas.request import Placement, PlaceRequest, RefusalReason, Refused
from schemas.subjects import Subject
from schemas.worker import (
    DescribeFleet,
    FleetDescribed,
    LeaveAnswered,
    LeaveMesh,
    PingWorker,
    WorkerJoined,
    WorkerLeft,
    WorkerLoad,
)
from services.bus.base import Bus, BusError, NoRespondersError, Subscription
from services.bus.typed import Received, TypedBus
from services.clocks import keep_time
from services.config import MeshConfig
from services.errors import BrokerUnreachableError
from services.keep import keep_traces
from services.metrics import Metrics
from services.presence import BusConnected
from services.runtime import now_ms
from services.scheduler.core import SchedulerCore
from services.scheduler.events import (
    Action,
    BusProved,
    ConnectionEnded,
    Event,
    FleetEvent,
    PingAnswered,
    PingUnanswered,
    PingUnserved,
    ProveBus,
    PublishLeft,
    SendPing,
)
from services.scheduler.metrics import SchedulerMetrics, kind_of
from services.scheduler.oldest import OldestClock
from services.scheduler.placement.hints import NOT_ASKED, Asked, Hints
from services.telemetry import AttributeValue, Key, SpanName, Telemetry

log = logging.getLogger(__name__)

FLEET_SUBJECTS: tuple[Subject[Any, None], ...] = (
    subjects.JOINED, subjects.LOAD, subjects.BEAT, subjects.DRAINING, subjects.LEFT,
)  # fmt: skip
"""What is published on these is an event of the core as it stands."""


async def run_scheduler(
    config: MeshConfig,
    connection: Bus,
    telemetry: Telemetry,
    stop: asyncio.Event,
    on_ready: Callable[[], None] | None = None,
    metrics: Metrics | None = None,
) -> None:
    """Serve until `stop` is set. Raises UserError for an unknown policy."""
    core = SchedulerCore(config.scheduler, config.times.presence)
    metrics = metrics or Metrics()
    bus = TypedBus(connection, "scheduler", metrics)
    await bus.announce("decides which workers serve a request")
    async with asyncio.TaskGroup() as tasks:
        scheduler = Scheduler(core, bus, tasks, SchedulerMetrics(metrics, core), telemetry, config)
        await scheduler.listen()
        watches = lasting(scheduler.watch, "the watch over the workers")
        watching = tasks.create_task(watches, name="watch over the workers")
        if on_ready is not None:
            on_ready()
        await stop.wait()
        watching.cancel()
        scheduler.close()
        await bus.close()


class Scheduler:
    """The core on a bus. Each ping is a task of its own, and takes `suspect_after_ms` at most."""

    def __init__(
        self,
        core: SchedulerCore,
        bus: TypedBus,
        tasks: asyncio.TaskGroup,
        measured: SchedulerMetrics,
        telemetry: Telemetry,
        config: MeshConfig,
    ) -> None:
        self._core = core
        self._bus = bus
        self._tasks = tasks
        self._measured = measured
        self._telemetry = telemetry
        self._times = config.times
        self._ping_timeout_s = config.scheduler.suspect_after_ms / 1000
        self._proof_timeout_s = config.times.scheduler.proof_timeout_s
        self._hints = Hints(bus, config.times.scheduler.locate_timeout_s)
        self._oldest = OldestClock(telemetry.clock)
        self._running: dict[asyncio.Task[None], None] = {}
        self._sleeps_until_ms = 0
        self._wake = asyncio.Event()
        self._learnt = asyncio.Event()
        asyncio.get_running_loop().call_later(config.times.presence.learn_s, self._learnt.set)
        self._note_connects()

    async def listen(self) -> None:
        """Listen to the fleet, and answer what is asked."""
        for subject in FLEET_SUBJECTS:
            await self._bus.listen(self._tasks, subject, ("*",), self._received)
        await keep_traces(self._bus, self._tasks, self._telemetry)
        await self._bus.serve(self._tasks, subjects.PLACE, (), self._place)
        await self._bus.serve(self._tasks, subjects.FLEET, (), self._describe)
        await self._bus.serve(self._tasks, subjects.TIME, (), self._oldest.answer_time)
        await self._bus.serve(self._tasks, subjects.LEAVE, ("*",), self._leave)
        ends = await self._bus.connection.subscribe(DISCONNECTED)
        self._start(lasting(partial(self._receive_ends, ends), "hearing whose connection ends"), "hear ends")
        oldest, times = self._oldest, self._times.telemetry
        bus, metrics = self._bus.connection, self._bus.metrics
        keeps_time = partial(keep_time, bus, oldest.clock, metrics, times, oldest.follows, oldest.token)
        self._start(lasting(keeps_time, "keeping the time"), "keep the time")
        await self._bus.connection.flush()

    async def watch(self) -> None:
        """Tick the core until cancelled."""
        while True:
            self._note_connects()
            self._act(self._core.tick(now_ms()))
            self._wake.clear()
            self._sleeps_until_ms = self._core.wake_ms
            try:
                async with asyncio.timeout(max(1, self._sleeps_until_ms - now_ms()) / 1000):
                    await self._wake.wait()
            except TimeoutError:
                pass

    def close(self) -> None:
        """End what is being sent and asked."""
        for task in list(self._running):
            task.cancel()

    async def _receive_ends(self, ends: Subscription) -> None:
        """Where the broker does not report it, those who are quiet are asked all the same."""
        async for end in ends:
            self._take_in(ConnectionEnded(name_of(end.payload)))

    def _received(self, received: Received[FleetEvent]) -> None:
        message = received.message
        worker_id = message.worker.worker_id if isinstance(message, WorkerJoined | WorkerLoad) else message.worker_id
        if is_subject_token(worker_id):
            self._take_in(message)
        else:
            self._bus.drop("malformed")

    async def _place(self, received: Received[PlaceRequest]) -> Placement | Refused:
        request, core, began_ns = received.message, self._core, time.monotonic_ns()
        asked = await self._hints.ask(request, received.traceparent) if core.asks_directory else NOT_ASKED
        holders = asked.holders
        reply = core.place(request, now_ms(), holders)
        if isinstance(reply, Refused) and reply.reason is RefusalReason.NO_WORKER and not self._learnt.is_set():
            await self._learnt.wait()
            reply = core.place(request, now_ms(), holders)
        self._measured.placed(reply, received.traceparent)
        if core.policy_failure:
            log.warning("least_loaded has placed %s: of the policy, %s", request.request_id, core.policy_failure)
            self._measured.fell_back()
        self._record(reply, asked, began_ns, received.traceparent)
        return reply

    def _record(self, reply: Placement | Refused, asked: Asked, began_ns: int, trace: str) -> None:
        """Record the span of an answer. Who asks in no trace gets none."""
        if not trace:
            return
        attributes: dict[str, AttributeValue] = {
            Key.REQUEST_ID: reply.request_id,
            Key.ATTEMPT: reply.attempt,
            Key.OUTCOME: reply.reason if isinstance(reply, Refused) else kind_of(reply),
        }
        if asked.took_ms is not None:
            attributes[Key.LOCATE_MS] = asked.took_ms
        if asked.holders is not None:
            attributes[Key.NUM_HOLDERS] = len(asked.holders)
        if isinstance(reply, Placement):
            attributes[Key.POLICY] = reply.policy
            attributes[Key.REUSE] = reply.reuse or ""
        self._telemetry.record(SpanName.SCHEDULE, trace, (began_ns, time.monotonic_ns()), attributes)

    async def _describe(self, received: Received[DescribeFleet]) -> FleetDescribed:
        return self._core.describe_fleet(now_ms(), received.message.after, self._bus.connection.max_bytes)

    async def _leave(self, received: Received[LeaveMesh]) -> LeaveAnswered:
        return self._core.leave(received.message, now_ms())

    def _take_in(self, event: Event) -> None:
        self._act(self._core.handle(event, now_ms()))
        if self._core.wake_ms < self._sleeps_until_ms:
            self._wake.set()

    def _note_connects(self) -> None:
        bus = self._bus.connection
        self._core.handle(BusConnected(bus.num_connects, bus.num_reroutes, bus.num_returns), now_ms())

    def _act(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case SendPing():
                    self._start(self._ping(action), f"ping {action.worker_id}")
                case PublishLeft(left=left):
                    log.warning("worker %s has left: %s", left.worker_id, left.reason)
                    self._measured.left(left)
                    self._start(self._publish_left(left), f"publish that {left.worker_id} left")
                case ProveBus():
                    self._start(self._prove(), "ask whether the bus works")

    def _start(self, work: Coroutine[None, None, None], name: str) -> None:
        task = self._tasks.create_task(work, name=name)
        self._running[task] = None
        task.add_done_callback(self._running.pop)

    async def _ping(self, ping: SendPing) -> None:
        try:
            alive = await self._bus.ask(subjects.PING, (ping.worker_id,), PingWorker(), self._ping_timeout_s)
        except NoRespondersError:
            self._note_connects()  # what the broker answers shortly after a reconnection proves nothing
            self._take_in(PingUnserved(ping))
        except BusError:
            self._take_in(PingUnanswered(ping))
        else:
            self._take_in(PingAnswered(ping, alive.worker_id, alive.incarnation))

    async def _prove(self) -> None:
        """Make a round trip to the broker: without it nobody's silence counts."""
        works = False
        try:
            await self._bus.connection.flush(self._proof_timeout_s)
            works = True
        except (BusError, BrokerUnreachableError):
            pass
        finally:
            self._take_in(BusProved(works))

    async def _publish_left(self, left: WorkerLeft) -> None:
        try:
            await self._bus.publish(subjects.LEFT, (left.worker_id,), left)
        except BusError as error:
            log.warning("could not publish that %s left: %s", left.worker_id, error)
