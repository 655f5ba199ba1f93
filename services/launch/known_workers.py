"""Asks a mesh's scheduler which workers it knows."""

import asyncio
from collections.abc import Set

from schemas import subjects
from schemas.worker import DescribeFleet, FleetDescribed
from services.bus.base import BusError
from services.bus.nats import NatsBus
from services.bus.typed import TypedBus
from services.errors import MeshNotRunningError
from services.launch.limits import ANSWERS_OF_EACH, ASK_INTERVAL_S, ASK_TIMEOUT_S
from services.trust.keys import BusAccess


async def describe_fleet(access: BusAccess) -> FleetDescribed:
    """Ask once. Raises MeshNotRunningError when no scheduler answers, UserError when no broker does."""
    connection = await NatsBus.connect(access, "kvmesh-status")
    try:
        return await _ask(TypedBus(connection, "status"))
    except BusError as error:
        raise MeshNotRunningError(f"no scheduler answers at {access.shown} ({error.reason})") from error
    finally:
        await connection.close()


async def wait_known(access: BusAccess, worker_ids: Set[str], num_schedulers: int = 1) -> None:
    """Return once the scheduler knows all of these workers. Raises UserError when no broker answers.

    Of several schedulers any one answers, so they are asked until so many answers in a row are right that hardly one
    of them has not been heard.
    """
    num_wanted = 1 if num_schedulers == 1 else ANSWERS_OF_EACH * num_schedulers
    connection = await NatsBus.connect(access, "kvmesh-up")
    bus = TypedBus(connection, "up")
    num_right = 0
    try:
        while num_right < num_wanted:
            try:
                known = {load.worker.worker_id for load in (await _ask(bus)).workers}
            except BusError:
                known = set[str]()  # it is starting
            num_right = num_right + 1 if known >= worker_ids else 0
            await asyncio.sleep(0 if num_right else ASK_INTERVAL_S)
    finally:
        await connection.close()


async def _ask(bus: TypedBus) -> FleetDescribed:
    return await bus.ask(subjects.FLEET, (), DescribeFleet(), timeout_s=ASK_TIMEOUT_S)
