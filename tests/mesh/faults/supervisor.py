"""The mesh's own supervisor, for a mesh that is made to fail over and over: its services are never given up, and their
data plane leads through a proxy."""

from pathlib import Path

import msgspec

from services.config import MeshConfig
from services.launch.limits import FIRST_WAIT_S
from services.launch.restart import Restarts
from services.launch.supervisor import UpOptions
from tests.mesh.forked import ForkedSupervisor
from tests.mesh.zygote import Zygote

REQUEST_TIMEOUT_S = 30.0
PROXY_HOST = "127.0.0.2"
NUM_TENANTS = 2_000


class QuickRestarts(Restarts):
    """Starts again soon, however often: what ends here was killed by us."""

    def ended(self, started_s: float, now_s: float) -> float | None:
        self.num_restarts += 1
        return FIRST_WAIT_S


class FaultSupervisor(ForkedSupervisor):
    """As `kvmesh up`. `tenants`: API keys; each is somebody for whom nothing is cached yet."""

    def __init__(self, options: UpOptions, run_dir: Path, zygote: Zygote) -> None:
        super().__init__(options, run_dir, zygote)
        self.tenants = [f"tenant-{number}" for number in range(NUM_TENANTS)]

    def never_give_up(self) -> None:
        """Start again at once whatever ends from now on."""
        self._nats_restarts = QuickRestarts()
        for child in self.children:
            child.restarts = QuickRestarts()

    def _config(self, port: int) -> MeshConfig:
        config = super()._config(port)
        replace = msgspec.structs.replace
        worker = replace(config.worker, advertise_host=PROXY_HOST)
        tenants = {name: name for name in self.tenants}
        gateway = replace(config.gateway, request_timeout_s=REQUEST_TIMEOUT_S, tenants=tenants)
        return replace(config, worker=worker, gateway=gateway)
