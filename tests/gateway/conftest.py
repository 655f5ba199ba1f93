import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest

from services.bus.limits import MAX_PAYLOAD_BYTES
from services.bus.memory import MemoryBroker, MemoryBus
from services.config import MeshConfig
from services.gateway.api.prepare import GatewayModel
from services.gateway.service import load_model, run_gateway
from services.metrics import Metrics
from services.ports import bind
from services.telemetry import ListExporter, SpanRecord, Telemetry
from services.times import BusTimes, GatewayTimes, Times
from tests.credentials import SEED
from tests.gateway.fake_mesh import FakeMesh

TEXT = "The harbour of Bergen: 1234 ships – naïve 東京 🙂 and more."


@dataclass
class Rig:
    """A gateway on a free port, a fake mesh behind it."""

    mesh: FakeMesh
    model: GatewayModel
    url: str
    http: httpx.AsyncClient
    client: openai.AsyncOpenAI
    spans: list[SpanRecord]
    telemetry: Telemetry
    answer: list[int]
    stop: asyncio.Event
    gateway: asyncio.Task[None]
    metrics: Metrics

    def metrics_text(self, accept: str = "") -> str:
        """What the port of the metrics would serve."""
        self.metrics.sample()
        return self.metrics.render(accept)[0].decode()

    @property
    def text(self) -> str:
        return self.model.codec.decode(self.answer)


@pytest.fixture(scope="session")
def model() -> GatewayModel:
    return load_model(MeshConfig())


OpenRig = Callable[..., contextlib.AbstractAsyncContextManager[Rig]]


@pytest.fixture
def open_rig(model: GatewayModel) -> OpenRig:
    @contextlib.asynccontextmanager
    async def open_it(
        timeout_s: float = 60.0,
        gateway: dict[str, Any] | None = None,
        times: dict[str, Any] | None = None,
        send_buffer: int = 0,
        model_path: Path | None = None,
        max_bytes: int = MAX_PAYLOAD_BYTES,
        **mesh_fields,
    ) -> AsyncIterator[Rig]:
        config = MeshConfig(tenant_seed=SEED)
        accept_s = min(config.gateway.accept_timeout_s, timeout_s / 2)
        settings = {"request_timeout_s": timeout_s, "accept_timeout_s": accept_s, **(gateway or {})}
        config = msgspec.structs.replace(
            config,
            gateway=msgspec.structs.replace(config.gateway, **settings),
            times=Times(gateway=GatewayTimes(**(times or {})), bus=BusTimes(certificates_look_s=0.02)),
            worker=msgspec.structs.replace(config.worker, fence_after_ms=500),  # of no worker here
        )
        served = model
        if model_path is not None:
            config = msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, path=str(model_path)))
            served = load_model(config)
        answer = [*served.codec.encode(TEXT), min(served.eos_token_ids)]
        broker, spans = MemoryBroker(max_bytes), list[SpanRecord]()
        mesh = FakeMesh(MemoryBus(broker), served.layout.fingerprint, lambda prompt: answer, **mesh_fields)
        telemetry = Telemetry("gateway", [ListExporter(spans)])
        sock = bind("127.0.0.1", 0)
        if send_buffer:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        stop, ready, metrics = asyncio.Event(), asyncio.Event(), Metrics()
        async with asyncio.TaskGroup() as tasks:
            await mesh.start(tasks)
            serving = tasks.create_task(
                run_gateway(
                    config, served, MemoryBus(broker), telemetry, stop, sock=sock, on_ready=ready.set, metrics=metrics
                ),
                name="gateway",
            )
            await ready.wait()
            http = httpx.AsyncClient(base_url=url, timeout=30, verify=False)  # certificates take 40 ms to load
            plain = openai.DefaultAsyncHttpxClient(verify=False)
            client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0, http_client=plain)
            async with http, client:
                yield Rig(mesh, served, url, http, client, spans, telemetry, answer, stop, serving, metrics)
            mesh.gate.set()
            mesh.place_gate.set()
            stop.set()
            await serving
            await mesh.bus.close()
        telemetry.close()

    return open_it


@pytest.fixture
async def rig(open_rig: OpenRig, request: pytest.FixtureRequest) -> AsyncIterator[Rig]:
    """`@pytest.mark.times(head_s=0.2)`: the gateway's times in this test."""
    marker = request.node.get_closest_marker("times")
    async with open_rig(times=marker.kwargs if marker else None) as opened:
        yield opened
