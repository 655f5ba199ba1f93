"""The mesh's own supervisor, for a mesh that is made to fail over and over: its services are never given up, and their
data plane leads through a proxy, as does the way of one gateway to the broker."""

import asyncio
import random
import signal
from pathlib import Path
from urllib.parse import urlsplit

from services.config import write_config
from services.launch.options import Launch
from services.settings import changed
from services.trust.keys import BROKER_FILE
from tests.bus.cluster import ROUTES_HOST, Cluster
from tests.mesh.faults.proxy import TcpProxy
from tests.mesh.forked import ForkedSupervisor
from tests.mesh.zygote import QuickRestarts, Zygote

REQUEST_TIMEOUT_S = 120.0
"""No fault costs so much; a document of 350 tokens beside seven others and other tests has taken 30 s."""
PROXY_HOST = "127.0.0.2"
BUS_HOST = "127.0.0.3"
CUT_GATEWAY = "gateway-1"
"""Its way to the broker can be cut."""
NUM_TENANTS = 2_000
CRASHES = {signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE}
"""No fault sends these: whoever ends by one has crashed by itself."""


class FaultSupervisor(ForkedSupervisor):
    """As `kvmesh up`. `tenants`: API keys; each is somebody for whom nothing is cached yet. `has_cluster`: its broker
    is of three servers, `servers`, which see each other through a proxy."""

    def __init__(self, options: Launch, run_dir: Path, zygote: Zygote, *, has_cluster: bool = False) -> None:
        self.tenants = [f"tenant-{number}" for number in range(NUM_TENANTS)]
        own = {
            "config.worker.advertise_host": PROXY_HOST,
            "config.gateway.request_timeout_s": REQUEST_TIMEOUT_S,
            "config.gateway.tenants": {name: name for name in self.tenants},
        }
        super().__init__(changed(options, own), run_dir, zygote)
        self._processes: list[tuple[str, asyncio.subprocess.Process]] = []
        self.bus_way = TcpProxy(BUS_HOST, random.Random(0))
        """From `CUT_GATEWAY` to the broker."""
        self.servers: Cluster | None = None
        self._has_cluster = has_cluster
        self._routes = TcpProxy(ROUTES_HOST, random.Random(0))

    async def stop_all(self) -> None:
        await super().stop_all()
        await self.bus_way.close()
        if self.servers is not None:
            self.servers.close()
        await self._routes.close()

    def take_crashes(self) -> list[str]:
        """Say which processes have crashed since the last time. The mesh starts them again, and requests may not notice
        it."""
        ended = [(name, process) for name, process in self._processes if process.returncode is not None]
        self._processes = [each for each in self._processes if each not in ended]
        ends = [(name, -(process.returncode or 0)) for name, process in ended]
        return [f"{name} crashed: {signal.Signals(end).name}" for name, end in ends if end in CRASHES]

    def never_give_up(self) -> None:
        """Start again at once whatever ends from now on."""
        self._nats_restarts = QuickRestarts()
        for child in self.children:
            child.restarts = QuickRestarts()

    async def _spawn(self, role: str, name: str) -> asyncio.subprocess.Process:
        process = await super()._spawn(role, name)
        self._processes.append((name, process))
        return process

    async def _start_broker(self) -> str:
        if self._has_cluster:
            access = (self.keys_dir / BROKER_FILE).read_text()
            self.servers = Cluster(self._run_dir / "servers", self._routes, access)
            await self._routes.lead_to(self.servers.route_ports)
            self.servers.start_all()
            return self.servers.url
        url = await super()._start_broker()
        await self.bus_way.lead_to({urlsplit(url).port or 0})
        return url

    def _arguments(self, role: str, name: str) -> list[str]:
        arguments = super()._arguments(role, name)
        if name == CUT_GATEWAY and not self._has_cluster:
            path, port = self._run_dir / "cut.toml", urlsplit(self.nats_url).port
            write_config(changed(self._mesh, {"nats.url": f"nats://{BUS_HOST}:{port}"}), path)
            arguments[arguments.index("--config") + 1] = str(path)
        return arguments
