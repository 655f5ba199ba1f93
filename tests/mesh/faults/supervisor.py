"""The mesh's own supervisor, for a mesh that is made to fail over and over: its services are never given up, and their
data plane leads through a proxy."""

import asyncio
import signal
from pathlib import Path

from services.launch.options import Launch
from services.settings import changed
from tests.mesh.forked import ForkedSupervisor
from tests.mesh.zygote import QuickRestarts, Zygote

REQUEST_TIMEOUT_S = 120.0
"""No fault costs so much; a document of 350 tokens beside seven others and other tests has taken 30 s."""
PROXY_HOST = "127.0.0.2"
NUM_TENANTS = 2_000
CRASHES = {signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE}
"""No fault sends these: whoever ends by one has crashed by itself."""


class FaultSupervisor(ForkedSupervisor):
    """As `kvmesh up`. `tenants`: API keys; each is somebody for whom nothing is cached yet."""

    def __init__(self, options: Launch, run_dir: Path, zygote: Zygote) -> None:
        self.tenants = [f"tenant-{number}" for number in range(NUM_TENANTS)]
        own = {
            "config.worker.advertise_host": PROXY_HOST,
            "config.gateway.request_timeout_s": REQUEST_TIMEOUT_S,
            "config.gateway.tenants": {name: name for name in self.tenants},
        }
        super().__init__(changed(options, own), run_dir, zygote)
        self._processes: list[tuple[str, asyncio.subprocess.Process]] = []

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
