"""The scheduler's shell: hears the fleet, answers placements."""

import asyncio
import logging
from collections.abc import Callable

from schemas import subjects
from schemas.ids import is_subject_token
from schemas.message import Message
from schemas.request import PlaceRequest
from schemas.worker import DescribeFleet, WorkerJoined, WorkerLeft, WorkerLoad
from services.bus.base import Bus, BusError
from services.bus.typed import Received, TypedBus
from services.config import MeshConfig
from services.runtime import now_ms
from services.scheduler.core import FleetEvent, SchedulerCore
from services.scheduler.cost import CostLimits
from services.scheduler.hints import Hints

log = logging.getLogger(__name__)

EXPIRY_INTERVAL_S = 0.25


async def run_scheduler(
    config: MeshConfig, bus: Bus, stop: asyncio.Event, on_ready: Callable[[], None] | None = None
) -> None:
    """Serve until `stop` is set. Raises UserError for an unknown policy."""
    settings = config.scheduler
    limits = CostLimits(settings.pull_tokens_min, settings.unsplit_tokens_max)
    core = SchedulerCore(settings.policy, settings.silent_after_ms, limits)
    door = TypedBus(bus, "scheduler")
    hints = Hints(door)

    def hear(received: Received[FleetEvent]) -> None:
        message = received.message
        worker_id = message.worker.worker_id if isinstance(message, WorkerJoined | WorkerLoad) else message.worker_id
        if not is_subject_token(worker_id):
            door.num_dropped += 1
            return
        for left in core.handle(message, now_ms()):
            tasks.create_task(_say_left(door, left), name="say who was replaced")

    async def place(received: Received[PlaceRequest]) -> Message:
        holders = await hints.holders(received.message) if core.asks_directory else ()
        return core.place(received.message, now_ms(), holders)

    async def describe(received: Received[DescribeFleet]) -> Message:
        return core.describe()

    async with asyncio.TaskGroup() as tasks:
        for subject in (subjects.JOINED, subjects.LOAD, subjects.DRAINING, subjects.LEFT):
            await door.listen(tasks, subject, ("*",), hear)
        await door.serve(tasks, subjects.PLACE, (), place)
        await door.serve(tasks, subjects.FLEET, (), describe)
        await bus.flush()
        expiry = tasks.create_task(_declare_silent(core, door), name="silent workers")
        if on_ready is not None:
            on_ready()
        await stop.wait()
        expiry.cancel()
        await door.close()


async def _declare_silent(core: SchedulerCore, door: TypedBus) -> None:
    """Say WorkerLeft on behalf of workers that no longer can."""
    while True:
        await asyncio.sleep(EXPIRY_INTERVAL_S)
        for left in core.expire(now_ms()):
            await _say_left(door, left)


async def _say_left(door: TypedBus, left: WorkerLeft) -> None:
    try:
        await door.publish(subjects.LEFT, (left.worker_id,), left)
    except BusError as error:
        log.warning("could not say that %s left: %s", left.worker_id, error)
