"""A simulated gateway: the real one without its socket."""

import asyncio
import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import cast

from litestar import Litestar
from litestar.types import Receive, Scope, Send

from schemas.ids import GatewayId
from services.bus.base import Bus
from services.bus.typed import TypedBus
from services.config import MeshConfig
from services.gateway.api.prepare import GatewayModel
from services.gateway.api.routes import Gateway, build_app
from services.gateway.observe.metrics import GatewayMetrics
from services.gateway.requests import Requests
from services.metrics import Metrics
from services.runtime import now_ms
from services.telemetry import Telemetry
from services.trust.credentials import signer_of

_SERVING: ContextVar[Gateway] = ContextVar("serving")
"""The gateway whose request is being served."""


class _Serving:
    """Stands in the one Litestar application for the gateway whose request is being served."""

    def __getattr__(self, name: str) -> object:
        return getattr(_SERVING.get(), name)


@functools.cache
def _routes() -> Litestar:
    """Return the application. It is made once, as making it costs as much as ten requests; it keeps no state of a
    gateway."""
    return build_app(cast("Gateway", _Serving()))


class SimApp:
    """The ASGI application of one gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    @property
    def requests(self) -> Requests:
        return self._gateway.requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        _SERVING.set(self._gateway)
        await _routes()(scope, receive, send)


async def run_sim_gateway(
    config: MeshConfig,
    model: GatewayModel,
    gateway_id: GatewayId,
    connection: Bus,
    telemetry: Telemetry,
    stop: asyncio.Event,
    on_ready: Callable[[SimApp], None],
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
            started_s=now_ms() // 1000,
        )
        await requests.listen()
        await connection.flush()
        on_ready(SimApp(gateway))
        await stop.wait()
        gateway.stopping = True
        await requests.wait_idle()
        await bus.close()
