"""A broker of three: real nats-servers with routes, of which the last one's lead through a proxy that can cut them."""

import asyncio
import json
import os
import random
import signal
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from services.bus.embedded import EmbeddedNats
from services.bus.servers import num_advertised
from services.ports import free_port
from tests.mesh.faults.proxy import TcpProxy
from tests.waiting import until

ROUTES_HOST = "127.0.3.1"
NUM_SERVERS = 3
_ESTABLISHED = "01"
LONELY = NUM_SERVERS - 1
"""The server whose routes can be cut: it connects to the others, and they not to it."""


class Cluster:
    """Make one with `cluster`, or, where no route is to be cut, without a `proxy`."""

    def __init__(self, folder: Path, proxy: TcpProxy | None = None, access: str = "") -> None:
        self._folder, self._proxy, self._access = folder, proxy, access
        self._ports = [free_port() for _ in range(NUM_SERVERS)]
        self._route_ports = [free_port() for _ in range(NUM_SERVERS)]
        self._servers: list[EmbeddedNats | None] = [None] * NUM_SERVERS

    @property
    def urls(self) -> list[str]:
        return [f"nats://127.0.0.1:{port}" for port in self._ports]

    @property
    def url(self) -> str:
        return ",".join(self.urls)

    @property
    def route_ports(self) -> set[int]:
        return set(self._route_ports)

    def start_all(self) -> None:
        for index in range(NUM_SERVERS):
            self.start(index)

    def start(self, index: int) -> None:
        """Start one of them, again with the same ports."""
        host = ROUTES_HOST if index == LONELY and self._proxy else "127.0.0.1"
        routes = ", ".join(f'"nats://{host}:{port}"' for port in self._route_ports[:index])
        own = self._route_ports[index] if index != LONELY else 1  # nobody else connects to that one
        settings = (
            f'ping_interval: "500ms"\nlame_duck_grace_period: "1s"\n'
            f'lame_duck_duration: "30s"\ncluster {{ name: "test", listen: "127.0.0.1:{self._route_ports[index]}", '
            f'advertise: "127.0.0.1:{own}", routes: [{routes}], ping_interval: "200ms", ping_max: 2, '
            f"connect_retries: 1000 }}\n{self._access}"
        )
        self._servers[index] = EmbeddedNats.launch(
            self._ports[index], self._folder / f"nats-{index}", settings, name=f"nats-{index}"
        )

    def kill(self, index: int) -> None:
        self._signal(index, signal.SIGKILL)
        self._stopped(index)

    def stand_still(self, index: int) -> None:
        self._signal(index, signal.SIGSTOP)

    def go_on(self, index: int) -> None:
        self._signal(index, signal.SIGCONT)

    def send_away(self, index: int) -> None:
        """Let a server end in its own time ("lame duck"): it asks its clients to go first."""
        self._signal(index, signal.SIGUSR2)

    async def until_ended(self, index: int) -> None:
        """Return once a server has ended that was sent away."""
        server = self._servers[index]
        assert server is not None
        await asyncio.to_thread(server.wait_ended)
        self._stopped(index)

    async def until_whole(self) -> None:
        """Return once each server sees the two others."""
        for url in self.urls:
            await until(partial(_sees, url, NUM_SERVERS))

    def num_clients(self, index: int) -> int:
        """Return how many connections to a server its clients take for good."""
        port = f":{self._ports[index]:04X}"
        rows = (line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:])
        return sum(row[2].endswith(port) and row[3] == _ESTABLISHED for row in rows)

    def split(self, *, silently: bool = False) -> None:
        """Cut the routes of the last server. Its clients stay connected. `silently`: nobody is told that these
        have ended."""
        assert self._proxy is not None
        for port in self._route_ports if silently else ():
            self._proxy.cut(port)
        if not silently:
            self._proxy.strike("refusal", 1.0)

    def part(self, index: int) -> None:
        """Cut the route between the last server and this one. Both see the third."""
        assert self._proxy is not None
        self._proxy.cut(self._route_ports[index])

    def heal(self) -> None:
        assert self._proxy is not None
        self._proxy.heal()

    def close(self) -> None:
        for index, server in enumerate(self._servers):
            if server is not None:
                self.go_on(index)
                self._stopped(index)

    def _signal(self, index: int, what: signal.Signals) -> None:
        server = self._servers[index]
        assert server is not None
        os.kill(server.pid, what)

    def _stopped(self, index: int) -> None:
        server, self._servers[index] = self._servers[index], None
        assert server is not None
        server.stop()


async def _sees(url: str, num_servers: int) -> bool:
    """Return whether a server says in its greeting that it sees so many."""
    reader, writer = await asyncio.open_connection(*url.removeprefix("nats://").split(":"))
    greeting = json.loads((await reader.readline()).removeprefix(b"INFO "))
    writer.close()
    return num_advertised(greeting) == num_servers


@asynccontextmanager
async def cluster(folder: Path, access: str = "") -> AsyncGenerator[Cluster]:
    """Start three servers that know each other. `access`: the part of their configuration that says who may come in."""
    proxy = TcpProxy(ROUTES_HOST, random.Random(0))
    servers = Cluster(folder, proxy, access)
    try:
        await proxy.lead_to(servers.route_ports)
        servers.start_all()
        yield servers
    finally:
        servers.close()
        await proxy.close()
