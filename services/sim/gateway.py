"""A simulated gateway: the real one without its socket."""

import asyncio
from collections.abc import Callable

from schemas.ids import GatewayId
from services.bus.base import Bus
from services.bus.typed import TypedBus
from services.config import MeshConfig
from services.gateway.api.prepare import GatewayModel
from services.gateway.api.routes import GatewayApp, make_gateway
from services.metrics import Metrics
from services.telemetry import Telemetry


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
    bus = TypedBus(connection, "gateway", Metrics())
    async with asyncio.TaskGroup() as tasks:
        gateway = make_gateway(config, model, gateway_id, bus, telemetry, tasks)
        await gateway.requests.listen()
        await connection.flush()
        on_ready(GatewayApp(gateway))
        await stop.wait()
        gateway.stopping = True
        await gateway.requests.wait_idle()
        await bus.close()
