"""A gateway of the simulation: all of it but the socket."""

import asyncio
from typing import TYPE_CHECKING

from schemas.ids import GatewayId, new_id
from services.bus.base import Bus
from services.bus.typed import TypedBus
from services.config import MeshConfig
from services.gateway.http import Gateway, build_app
from services.gateway.metrics import GatewayMetrics
from services.gateway.prepare import ServedModel
from services.gateway.requests import Requests
from services.runtime import now_ms
from services.telemetry import Telemetry

if TYPE_CHECKING:
    from services.sim.mesh import Service


async def run_sim_gateway(
    config: MeshConfig, model: ServedModel, bus: Bus, telemetry: Telemetry, stop: asyncio.Event, service: "Service"
) -> None:
    """Serve the application that stands in `service.app` until `stop` is set."""
    gateway_id = GatewayId(new_id("gateway"))
    door = TypedBus(bus, "gateway")
    async with asyncio.TaskGroup() as tasks:
        requests = Requests(config.gateway, gateway_id, door, telemetry, tasks)
        metrics = GatewayMetrics(lambda: door.num_dropped + requests.num_bad_tokens, lambda: requests.num_live)
        gateway = Gateway(
            config=config.gateway,
            model=model,
            requests=requests,
            telemetry=telemetry,
            metrics=metrics,
            door=door,
            started_s=now_ms() // 1000,
        )
        await requests.listen()
        await bus.flush()
        service.app = build_app(gateway)
        await stop.wait()
        gateway.stopping = True
        await requests.wait_idle()
        await door.close()
