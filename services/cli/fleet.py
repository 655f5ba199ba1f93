"""Asks a mesh's scheduler which workers it knows."""

import asyncio
from collections.abc import Set

from schemas import subjects
from schemas.worker import DescribeFleet, FleetDescribed
from services.bus.base import BusError
from services.bus.nats import NatsBus
from services.bus.typed import TypedBus
from services.errors import MeshNotRunningError

ASK_TIMEOUT_S = 3.0
ASK_INTERVAL_S = 0.05


async def describe_fleet(nats_url: str) -> FleetDescribed:
    """Ask once. Raises MeshNotRunningError when no scheduler answers, UserError when no broker does."""
    bus = await NatsBus.connect(nats_url, "kvmesh-status")
    try:
        return await _ask(TypedBus(bus, "status"))
    except BusError as error:
        raise MeshNotRunningError(f"no scheduler answers at {nats_url} ({error.reason})") from error
    finally:
        await bus.close()


async def wait_known(nats_url: str, worker_ids: Set[str]) -> None:
    """Return once the scheduler knows all of these workers. Raises UserError when no broker answers."""
    bus = await NatsBus.connect(nats_url, "kvmesh-up")
    door = TypedBus(bus, "up")
    known: set[str] = set()
    try:
        while not known >= worker_ids:
            try:
                known = {load.worker.worker_id for load in (await _ask(door)).workers}
            except BusError:
                known = set()  # it is starting
            await asyncio.sleep(0 if known >= worker_ids else ASK_INTERVAL_S)
    finally:
        await bus.close()


async def _ask(door: TypedBus) -> FleetDescribed:
    reply = await door.ask(subjects.FLEET, (), DescribeFleet(), timeout_s=ASK_TIMEOUT_S)
    assert isinstance(reply, FleetDescribed)
    return reply
