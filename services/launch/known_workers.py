"""Asks a mesh which workers it knows, and whether it knows what they hold."""

import asyncio
from collections.abc import Awaitable, Callable, Set

from schemas import subjects
from schemas.directory import DescribeDirectory
from schemas.worker import FleetDescribed
from services.bus.base import BusError
from services.bus.fleet import ask_fleet
from services.bus.nats import NatsBus
from services.bus.typed import TypedBus
from services.errors import MeshNotRunningError
from services.launch.limits import ANSWERS_OF_EACH, ASK_INTERVAL_S, ASK_TIMEOUT_S
from services.trust.keys import BusAccess


async def describe_fleet(access: BusAccess) -> FleetDescribed:
    """Ask once. Raises MeshNotRunningError when no scheduler answers, UserError when no broker does."""
    connection = await NatsBus.connect(access, "kvmesh-status")
    try:
        return await ask_fleet(TypedBus(connection, "status"), ASK_TIMEOUT_S)
    except BusError as error:
        raise MeshNotRunningError(f"no scheduler answers at {access.shown} ({error.reason})") from error
    finally:
        await connection.close()


async def wait_known(access: BusAccess, holders: Set[str], num_schedulers: int = 1, num_directories: int = 1) -> None:
    """Return once schedulers know all of these workers and stores, and directories what they hold. Raises UserError
    when no broker answers.

    Of several any one answers, so they are asked until so many answers in a row are right that hardly one of them has
    not answered.
    """
    connection = await NatsBus.connect(access, "kvmesh-up")
    bus = TypedBus(connection, "up")

    async def known_to_scheduler() -> set[str]:
        return {load.worker.worker_id for load in (await ask_fleet(bus, ASK_TIMEOUT_S)).workers}

    async def known_to_directory() -> set[str]:
        reply = await bus.ask(subjects.DIRECTORY_STATUS, (), DescribeDirectory(), timeout_s=ASK_TIMEOUT_S)
        return set(reply.holders)

    try:
        for ask, number in ((known_to_scheduler, num_schedulers), (known_to_directory, num_directories)):
            await _until_right(ask, holders, 1 if number == 1 else ANSWERS_OF_EACH * number)
    finally:
        await connection.close()


async def _until_right(ask: Callable[[], Awaitable[set[str]]], holders: Set[str], num_wanted: int) -> None:
    num_right = 0
    while num_right < num_wanted:
        try:
            known = await ask()
        except BusError:
            known = set[str]()  # it is starting
        num_right = num_right + 1 if known >= holders else 0
        await asyncio.sleep(0 if num_right else ASK_INTERVAL_S)
