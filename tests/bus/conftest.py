import asyncio
import random
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack

import pytest

from services.bus.base import Bus
from services.bus.memory import MemoryBus
from services.bus.nats import NatsBus
from services.sim.platform.bus import SimBroker
from services.trust.keys import BusAccess
from tests.bus.cluster import Cluster
from tests.waiting import until

Connect = Callable[[], Awaitable[Bus]]


class Settling:
    """Lets those who flush wait for all servers of a cluster. A flush is a round trip to one's own server; what was
    published or subscribed before is at each of the others before a word that follows it."""

    def __init__(self) -> None:
        self._heard_by: defaultdict[bytes, set[str]] = defaultdict(set)
        self._watchers: dict[str, NatsBus] = {}
        self._num_words = 0

    async def watch(self, url: str, tasks: asyncio.TaskGroup) -> None:
        """Listen at one of the servers."""
        watcher = self._watchers[url] = await NatsBus.connect(BusAccess(url), "watcher")
        words = await watcher.subscribe("settle")

        async def listen() -> None:
            async for word in words:
                self._heard_by[word.payload].add(url)

        tasks.create_task(listen())
        await watcher.flush()

    async def wait(self, bus: NatsBus) -> None:
        """Return once each server has what the bus has sent."""
        self._num_words += 1
        word = b"%d" % self._num_words

        async def is_there() -> bool:  # the first words may come before who listens elsewhere is known
            await bus.publish("settle", word, {})
            return self._heard_by[word] == self._watchers.keys()

        await until(is_there)

    async def close(self) -> None:
        for watcher in self._watchers.values():
            await watcher.close()


class ClusterBus(NatsBus):
    """A bus whose flush is one of all servers."""

    settling: Settling

    async def flush(self, timeout_s: float | None = None) -> None:
        await super().flush(timeout_s)
        await self.settling.wait(self)


@pytest.fixture(scope="session")
def cluster_urls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """The addresses of three servers that are one broker."""
    servers = Cluster(tmp_path_factory.mktemp("cluster"))
    try:
        servers.start_all()
        yield servers.urls
    finally:
        servers.close()


@pytest.fixture(params=["memory", "nats", "cluster", "sim", "sim_cluster"])
async def connect(request: pytest.FixtureRequest) -> AsyncIterator[Connect]:
    """Opens one more connection to the same bus. A memory bus is its own and only connection. Of a cluster each begins
    with another server."""
    opened: list[Bus] = []
    memory = MemoryBus()
    simulated = SimBroker(random.Random(0), num_servers=3 if request.param == "sim_cluster" else 1)
    settling = Settling()
    urls: list[str] = []

    async def open_one() -> Bus:
        bus: Bus
        match request.param:
            case "nats":
                bus = await NatsBus.connect(BusAccess(request.getfixturevalue("nats_url")), "test")
            case "cluster":
                bus = await ClusterBus.connect(BusAccess(",".join(urls)), f"test-{len(opened)}")
                assert isinstance(bus, ClusterBus)
                bus.settling = settling
            case "sim" | "sim_cluster":
                bus = simulated.connect(f"test-{len(opened)}")
            case _:
                bus = memory
        opened.append(bus)
        return bus

    async with AsyncExitStack() as stack:
        if request.param == "cluster":
            urls += request.getfixturevalue("cluster_urls")
            tasks = await stack.enter_async_context(asyncio.TaskGroup())
            for url in urls:
                await settling.watch(url, tasks)
        yield open_one
        for bus in opened:
            await bus.close()
        await settling.close()


@pytest.fixture
async def bus(connect: Connect) -> Bus:
    return await connect()
