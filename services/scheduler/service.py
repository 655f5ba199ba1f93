"""The scheduler's shell: hears the fleet, answers placements."""

import asyncio
from collections.abc import Callable

from schemas import subjects
from schemas.ids import is_subject_token
from schemas.request import Placement, PlaceRequest, Refused
from schemas.worker import DescribeFleet, FleetDescribed, WorkerJoined, WorkerLoad
from services.bus.base import Bus
from services.bus.typed import Received, TypedBus
from services.config import MeshConfig, SchedulerConfig
from services.metrics import Metrics
from services.runtime import now_ms
from services.scheduler.core import FleetEvent, SchedulerCore, SchedulerLimits
from services.scheduler.metrics import SchedulerMetrics
from services.scheduler.placement.admission import AdmissionLimits
from services.scheduler.placement.cost import CostLimits
from services.scheduler.placement.hints import Hints
from services.scheduler.watch import Watch

LEARN_S = 1.0
"""Every worker says its load twice a second: before this a scheduler that has just started may not know the fleet, and
refuses nobody for want of workers."""


async def run_scheduler(
    config: MeshConfig,
    connection: Bus,
    stop: asyncio.Event,
    on_ready: Callable[[], None] | None = None,
    metrics: Metrics | None = None,
) -> None:
    """Serve until `stop` is set. Raises UserError for an unknown policy."""
    core = core_of(config.scheduler)
    metrics = metrics or Metrics()
    bus = TypedBus(connection, "scheduler", metrics)
    measured = SchedulerMetrics(metrics, core)
    hints = Hints(bus)
    learnt = asyncio.Event()
    asyncio.get_running_loop().call_later(LEARN_S, learnt.set)

    def hear(received: Received[FleetEvent]) -> None:
        message = received.message
        worker_id = message.worker.worker_id if isinstance(message, WorkerJoined | WorkerLoad) else message.worker_id
        if not is_subject_token(worker_id):
            bus.drop("malformed")
            return
        watch.say(core.handle(message, now_ms()))
        watch.heard()

    async def place(received: Received[PlaceRequest]) -> Placement | Refused:
        holders = await hints.holders(received.message) if core.asks_directory else ()
        reply = core.place(received.message, now_ms(), holders)
        if isinstance(reply, Refused) and reply.reason == "no_worker" and not learnt.is_set():
            await learnt.wait()
            reply = core.place(received.message, now_ms(), holders)
        measured.placed(reply, received.traceparent)
        return reply

    async def describe(received: Received[DescribeFleet]) -> FleetDescribed:
        return core.describe(now_ms())

    await bus.announce("decides which workers serve a request")
    async with asyncio.TaskGroup() as tasks:
        watch = Watch(core, bus, tasks, config.scheduler.suspect_after_ms / 1e3, measured.left)
        await bus.listen(tasks, subjects.JOINED, ("*",), hear)
        await bus.listen(tasks, subjects.LOAD, ("*",), hear)
        await bus.listen(tasks, subjects.DRAINING, ("*",), hear)
        await bus.listen(tasks, subjects.LEFT, ("*",), hear)
        await bus.serve(tasks, subjects.PLACE, (), place)
        await bus.serve(tasks, subjects.FLEET, (), describe)
        await connection.flush()
        watching = tasks.create_task(watch.run(), name="watch over the workers")
        if on_ready is not None:
            on_ready()
        await stop.wait()
        watching.cancel()
        watch.close()
        await bus.close()


def core_of(settings: SchedulerConfig) -> SchedulerCore:
    """Return a core that decides as configured. Raises UserError for an unknown policy."""
    return SchedulerCore(
        settings.policy,
        settings.silent_after_ms,
        CostLimits(settings.pull_tokens_min, settings.unsplit_tokens_max),
        SchedulerLimits(
            ping_interval_ms=settings.ping_interval_ms,
            suspect_after_ms=settings.suspect_after_ms,
            admission=AdmissionLimits(settings.max_queue_ms, settings.max_queued_requests),
            replicate=settings.replicate,
        ),
    )
