"""A simulated gateway: the real one without its socket."""

import asyncio
import time
from collections.abc import Callable

from schemas.ids import GatewayId
from services.bus.base import Bus
from services.bus.typed import TypedBus
from services.config import MeshConfig
from services.gateway.api.prepare import GatewayModel
from services.gateway.api.routes import Gateway, GatewayApp
from services.gateway.observe.metrics import GatewayMetrics
from services.gateway.requests import Requests
from services.metrics import Metrics
from services.telemetry import Telemetry
from services.trust.credentials import signer_of


async def run_sim_gateway(
    config: MeshConfig,
    model: GatewayModel,
    gateway_id: GatewayId,
    connection: Bus,
    telemetry: Telemetry,
    stop: asyncio.Event,
    on_ready: Callable[[GatewayApp], None],
) -> None:
    """Run a gateway until `stop` is set. `on_ready` gets its application once it can answer."""
    metrics = Metrics()
    bus = TypedBus(connection, "gateway", metrics)
    async with asyncio.TaskGroup() as tasks:
        requests = Requests(config, signer_of(config), gateway_id, bus, telemetry, tasks)
        gateway = Gateway(
            config=config,
            model=model,
            requests=requests,
            telemetry=telemetry,
            metrics=GatewayMetrics(metrics, model.name, requests),
            bus=bus,
            started_s=int(time.time()),
        )
        await requests.listen()
        await connection.flush()
        on_ready(GatewayApp(gateway))
        await stop.wait()
        gateway.stopping = True
        await requests.wait_idle()
        await bus.close()
