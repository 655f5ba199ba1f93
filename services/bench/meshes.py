"""The meshes that a bench starts for itself: one with the split, one without, of the same size."""

import tempfile
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import httpx

from services.cli.supervisor import Supervisor, UpOptions
from services.errors import UserError

SPLIT, WHOLE = "split", "whole"


@asynccontextmanager
async def split_and_whole(model: str) -> AsyncGenerator[dict[str, str]]:
    """Run one prefill and one decode worker, and beside them two workers that do both; give the URL of each mesh.

    Both have the same number of processes and threads. What is not being asked is idle.
    """
    async with AsyncExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvmesh-bench-")))
        split = UpOptions(model=model, port=0)
        whole = UpOptions(model=model, port=0, num_prefill=0, num_decode=0, num_aggregated=2)
        yield {
            SPLIT: await stack.enter_async_context(_mesh(split, root / SPLIT)),
            WHOLE: await stack.enter_async_context(_mesh(whole, root / WHOLE)),
        }


async def model_of(client: httpx.AsyncClient, url: str) -> str:
    """Return the name of the model that a gateway serves. Raises UserError when none answers."""
    try:
        models = (await client.get(f"{url}/v1/models")).raise_for_status().json()
    except httpx.HTTPError as error:
        raise UserError(f"no gateway answers at {url} ({type(error).__name__})") from error
    return str(models["data"][0]["id"])


@asynccontextmanager
async def _mesh(options: UpOptions, run_dir: Path) -> AsyncGenerator[str]:
    supervisor = Supervisor(options, run_dir)
    try:
        await supervisor.start()
        yield supervisor.url
    finally:
        await supervisor.stop()
