"""Asks a scheduler which workers there are: as many messages as they need."""

import msgspec

from schemas import subjects
from schemas.worker import DescribeFleet, FleetDescribed, WorkerLoad
from services.bus.typed import TypedBus


async def ask_fleet(bus: TypedBus, timeout_s: float) -> FleetDescribed:
    """Return what a scheduler sees of all workers, by their ids. `timeout_s`: for each message. Raises BusError."""
    workers: list[WorkerLoad] = []
    after = ""
    while True:
        fleet = await bus.ask(subjects.FLEET, (), DescribeFleet(after=after), timeout_s)
        workers += fleet.workers
        before, after = after, workers[-1].worker.worker_id if workers else ""
        if not fleet.more or after <= before:
            return msgspec.structs.replace(fleet, workers=tuple(workers), more=False)
