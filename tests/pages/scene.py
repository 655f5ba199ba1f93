"""A real mesh in a folder of its own, and requests to it, for pages and pictures."""

import asyncio
import random
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from schemas import subjects
from schemas.observe import DescribeRequest, RequestDescribed
from services.bus.base import Bus
from services.bus.typed import TypedBus
from services.config import GatewayConfig, MeshConfig, SchedulerConfig, WorkerConfig
from services.launch.options import Launch
from services.launch.supervisor import Supervisor
from tests.pages.limits import SETTLE_S, TIMEOUT_S

KV_BYTES = 8 * 1024 * 1024
"""So little that a request may be too large for every worker."""
OPTIONS = Launch(
    num_prefill=2,
    num_decode=2,
    config=MeshConfig(
        gateway=GatewayConfig(port=0), scheduler=SchedulerConfig(replicate=True), worker=WorkerConfig(kv_bytes=KV_BYTES)
    ),
)
TOO_LARGE = 6_000
"""Tokens of a prompt that fits the model's context and no worker."""
LONG_ANSWER = 600
EVENTS_UNTIL_KILL = 30
SEED = 20261121


@asynccontextmanager
async def running_mesh(options: Launch = OPTIONS) -> AsyncGenerator[Supervisor]:
    """Run a mesh of processes while the block runs. Raises UserError."""
    with tempfile.TemporaryDirectory(prefix="kvmesh-scene-") as folder:
        supervisor = Supervisor(options, Path(folder))
        try:
            await supervisor.start_all()
            yield supervisor
        finally:
            await supervisor.stop_all()


class Scene:
    """Sends requests to one mesh. Prompts are random tokens, so that none is cached unless it is sent again."""

    def __init__(self, supervisor: Supervisor, connection: Bus) -> None:
        assert supervisor.checkpoint is not None
        self._supervisor = supervisor
        self._model = supervisor.checkpoint.name
        self._rng = random.Random(SEED)
        self._bus = TypedBus(connection, "scene")
        self._client = httpx.AsyncClient(base_url=supervisor.url, timeout=TIMEOUT_S, trust_env=False)

    async def __aenter__(self) -> "Scene":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    def prompt(self, num_tokens: int) -> list[int]:
        return [self._rng.randrange(5, 500) for _ in range(num_tokens)]

    async def complete(self, prompt: list[int], max_tokens: int) -> str:
        """Return the request's id, however it ended."""
        reply = await self._client.post("/v1/completions", json=self._body(prompt, max_tokens))
        return reply.headers["x-request-id"]

    async def play(self, at_work: Callable[[RequestDescribed], Awaitable[None]]) -> str:
        """Cause each kind of event: an answer, a request for which no worker has room, and an answer whose decode
        worker is killed just after `at_work` was called. Return the last request's id."""
        await self.complete(self.prompt(300), 40)
        await self.complete(self.prompt(TOO_LARGE), 40)
        request_id = await self._outlive(at_work)
        await asyncio.sleep(SETTLE_S)
        return request_id

    async def _outlive(self, at_work: Callable[[RequestDescribed], Awaitable[None]]) -> str:
        """Request a long answer, and kill its decode worker on the way. Return the request's id."""
        body = self._body(self.prompt(400), LONG_ANSWER) | {"stream": True}
        async with self._client.stream("POST", "/v1/completions", json=body) as response:
            request_id, num_events = response.headers["x-request-id"], 0
            async for line in response.aiter_lines():
                num_events += line.startswith("data:")
                if line and num_events == EVENTS_UNTIL_KILL:
                    described = await self._where(request_id)
                    await at_work(described)
                    self._kill(described.decode_worker)
            return request_id

    async def _where(self, request_id: str) -> RequestDescribed:
        return await self._bus.ask(subjects.REQUEST_STATUS, (request_id,), DescribeRequest(), TIMEOUT_S)

    def _kill(self, name: str) -> None:
        for child in self._supervisor.children:
            if child.name == name:
                child.process.kill()

    def _body(self, prompt: list[int], max_tokens: int) -> dict[str, Any]:
        return {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "temperature": 0,
        }
