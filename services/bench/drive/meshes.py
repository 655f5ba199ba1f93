"""Starts the meshes that a measurement compares. All have the same size; only one is busy at a time."""

import asyncio
import tempfile
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

from services.bench.drive.http_client import Client, base_url, open_http
from services.bench.drive.progress_bar import progress
from services.bench.drive.random_model import SHAPE, make_model
from services.bench.limits import RESTART_INTERVAL_S, RESTART_TIMEOUT_S
from services.config import GatewayConfig, MeshConfig, ModelConfig
from services.engine.checkpoint import read_checkpoint
from services.errors import UserError
from services.launch.known_workers import describe_fleet
from services.launch.options import Launch
from services.launch.supervisor import Supervisor
from services.settings import changed

SPLIT, WHOLE = "split", "whole"
RECOMPUTE, CACHE_ONLY, AFFINITY, BOTH = "recompute", "prefix_cache_only", "affinity", "both_directions"


@asynccontextmanager
async def running(meshes: Mapping[str, Launch]) -> AsyncGenerator[dict[str, Supervisor]]:
    """Start every mesh, one after another, and stop them all at the end. Raises UserError."""
    async with AsyncExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvmesh-bench-")))
        supervisors: dict[str, Supervisor] = {}
        for name, options in meshes.items():
            with progress(f"starting the mesh {name!r}"):
                supervisors[name] = await stack.enter_async_context(_mesh(options, root / name))
        yield supervisors


@asynccontextmanager
async def split_and_whole(model: str) -> AsyncGenerator[dict[str, str]]:
    """Run a mesh with one prefill and one decode worker and one with two aggregated workers; give the URL of each."""
    split = Launch(config=MeshConfig(model=ModelConfig(path=model), gateway=GatewayConfig(port=0)))
    whole = changed(split, {"num_prefill": 0, "num_decode": 0, "num_aggregated": 2})
    async with running({SPLIT: split, WHOLE: whole}) as supervisors:
        yield urls_of(supervisors)


def reuse_modes(options: Launch) -> dict[str, Launch]:
    """Return the options of four meshes that differ in their reuse of KV: none; each worker's own prefix cache, placed
    by load; the same, with prompts that begin alike on the same workers; reads from any worker."""
    return {
        RECOMPUTE: changed(options, {"config.worker.prefix_cache": False, "config.scheduler.policy": "least_loaded"}),
        CACHE_ONLY: changed(options, {"config.scheduler.policy": "least_loaded"}),
        AFFINITY: changed(options, {"config.scheduler.policy": "affinity"}),
        BOTH: changed(options, {"config.scheduler.policy": "cost"}),
    }


def urls_of(supervisors: Mapping[str, Supervisor]) -> dict[str, str]:
    return {name: supervisor.url for name, supervisor in supervisors.items()}


@asynccontextmanager
async def model_folder(model: str, shape: dict[str, Any] = SHAPE) -> AsyncGenerator[tuple[str, int | None]]:
    """Give a checkpoint and its number of parameters: `model` (number unknown: None), or random weights of this shape
    where it is empty."""
    if model:
        yield model, None
        return
    with tempfile.TemporaryDirectory(prefix="kvmesh-bench-model-") as folder:
        path, num_parameters = await asyncio.to_thread(make_model, Path(folder), shape)
        yield str(path), num_parameters


class Served(NamedTuple):
    """The meshes under measurement: a client for each by its name, and what prompts may consist of."""

    clients: dict[str, Client]
    vocab_size: int
    num_parameters: int | None
    supervisors: Mapping[str, Supervisor]
    """By the same names; empty where a running gateway is measured."""

    @property
    def context_length(self) -> int:
        return min(client.model.context_length for client in self.clients.values()) or SHAPE["context_length"]

    @property
    def model(self) -> str:
        return next(iter(self.clients.values())).model.id


@asynccontextmanager
async def serving(
    meshes: Callable[[Launch], Mapping[str, Launch]], options: Launch, url: str = ""
) -> AsyncGenerator[Served]:
    """Start the meshes that `meshes` makes of the options, or use the gateway at `url` under that name.

    Without a model in the options it has random weights. Raises UserError.
    """
    async with AsyncExitStack() as stack:
        http = await stack.enter_async_context(open_http())
        if url:
            client = await Client.open(http, base_url(url))
            yield Served({base_url(url): client}, SHAPE["vocab"], None, {})
            return
        model, num_parameters = await stack.enter_async_context(model_folder(options.config.model.path))
        supervisors = await stack.enter_async_context(
            running(meshes(changed(options, {"config.model.path": model, "config.gateway.port": 0})))
        )
        clients = {name: await Client.open(http, supervisor.url) for name, supervisor in supervisors.items()}
        yield Served(clients, read_checkpoint(model).vocab_size, num_parameters, supervisors)


async def restart_worker(supervisor: Supervisor, name: str) -> None:
    """Kill a worker, and return once the scheduler knows the one that replaces it. Raises UserError."""

    async def incarnation() -> str:
        known = (load.worker for load in (await describe_fleet(supervisor.access())).workers)
        return next((worker.incarnation for worker in known if worker.worker_id == name), "")

    before = await incarnation()
    next(child for child in supervisor.children if child.name == name).kill()
    try:
        async with asyncio.timeout(RESTART_TIMEOUT_S):
            while True:
                await asyncio.sleep(RESTART_INTERVAL_S)
                if await incarnation() not in ("", before):
                    return
    except TimeoutError as error:
        raise UserError(f"{name} was killed and not back within {RESTART_TIMEOUT_S:.0f} s") from error


def rotated(names: Iterable[str], turn: int) -> list[str]:
    """Return the names, starting with another one each turn, so that no mesh is always measured first."""
    names = list(names)
    start = turn % len(names)
    return [*names[start:], *names[:start]]


@asynccontextmanager
async def _mesh(options: Launch, run_dir: Path) -> AsyncGenerator[Supervisor]:
    supervisor = Supervisor(options, run_dir)
    try:
        await supervisor.start_all()
        yield supervisor
    finally:
        await supervisor.stop_all()
