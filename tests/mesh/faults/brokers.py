"""What clients notice when one of a broker's three servers ends, stands still, is sent away, or is cut off."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from itertools import count

from tests.bus.cluster import LONELY, NUM_SERVERS, Cluster
from tests.mesh.faults.harness import FaultMesh
from tests.mesh.faults.supervisor import FaultSupervisor
from tests.mesh.faults.times import Outages, outages
from tests.waiting import until

Strike = Callable[[Cluster, int], AbstractAsyncContextManager[None]]
"""What is done to one of the servers. At its end all three see each other again."""


@asynccontextmanager
async def killed(servers: Cluster, index: int) -> AsyncGenerator[None]:
    servers.kill(index)
    yield
    servers.start(index)


@asynccontextmanager
async def stopped(servers: Cluster, index: int) -> AsyncGenerator[None]:
    servers.stand_still(index)
    yield
    servers.go_on(index)


@asynccontextmanager
async def sent_away(servers: Cluster, index: int) -> AsyncGenerator[None]:
    servers.send_away(index)
    yield
    await servers.until_ended(index)
    servers.start(index)


@asynccontextmanager
async def cut_off(servers: Cluster, _: int) -> AsyncGenerator[None]:
    servers.split(silently=True)
    yield
    servers.heal()


STRIKES: dict[str, tuple[Strike, float]] = {
    "kill": (killed, 0.5), "stop": (stopped, 3.0), "away": (sent_away, 0.5), "split": (cut_off, 10.0),
}  # fmt: skip
"""Each by its name, and for how many seconds."""


class ServerOutages(Outages):
    """Of one server of three. `away_s`: how long clients stayed at it."""

    def __init__(self) -> None:
        super().__init__(from_begin=True)
        self.away_s: list[float] = []


async def server_outages(
    mesh: FaultMesh, name: str, num_strikes: int, on_strike: Callable[[], None], found: ServerOutages
) -> None:
    """Strike one server after another while answers are under way and more requests come. Add to `found`."""
    (strike, for_s), numbers = STRIKES[name], count()
    await outages(mesh, [for_s] * num_strikes, on_strike, lambda mine: _watched(mine, strike, numbers, found), found)


@asynccontextmanager
async def _watched(
    supervisor: FaultSupervisor, strike: Strike, numbers: Iterator[int], found: ServerOutages
) -> AsyncGenerator[None]:
    servers = supervisor.servers
    assert servers is not None
    index = LONELY if strike is cut_off else next(numbers) % NUM_SERVERS
    began_s = time.monotonic()
    async with strike(servers, index):
        leaving = asyncio.create_task(until(lambda: not servers.num_clients(index)))
        leaving.add_done_callback(lambda _: found.away_s.append(time.monotonic() - began_s))
        yield
        await leaving
    await servers.until_whole()
