"""What the checks on the way of the KV cost a client: the same requests with digests and without, in turn."""

import random
import tempfile
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec

from services.bench.drive.http_client import Client, open_http
from services.bench.drive.meshes import model_folder
from services.bench.drive.random_model import SHAPE
from services.bench.drive.stats import median, ratio
from services.bench.drive.workload import random_tokens
from services.config import MeshConfig
from services.launch.supervisor import Supervisor, UpOptions

NUM_TOKENS = 4
LENGTHS = (1_000, 4_000)
WARM_UP_REQUESTS = 2


class _Supervisor(Supervisor):
    def __init__(self, options: UpOptions, run_dir: Path, digests: bool) -> None:
        super().__init__(options, run_dir)
        self._digests = digests

    def _config(self, port: int) -> MeshConfig:
        config = super()._config(port)
        return msgspec.structs.replace(config, worker=msgspec.structs.replace(config.worker, digests=self._digests))


async def cost_of_checks(num_requests: int, on_request: Callable[[], None]) -> dict[int, tuple[float, float]]:
    """Return, by prompt length, how many times as long the first token takes with the checks, and the second."""
    rng, ratios = random.Random(6), dict[int, tuple[float, float]]()
    async with AsyncExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvmesh-cost-")))
        model, _ = await stack.enter_async_context(model_folder(""))
        http = await stack.enter_async_context(open_http())
        clients: dict[bool, Client] = {}
        for digests in (True, False):
            supervisor = _Supervisor(UpOptions(model=model, port=0, carrier="tcp"), root / str(digests), digests)
            stack.push_async_callback(supervisor.stop)
            await supervisor.start()
            clients[digests] = await Client.open(http, supervisor.url)
        for length in LENGTHS:
            firsts: dict[bool, list[float]] = {True: [], False: []}
            seconds: dict[bool, list[float]] = {True: [], False: []}
            for number in range(num_requests + WARM_UP_REQUESTS):
                for digests in (True, False) if number % 2 else (False, True):
                    completion = await clients[digests].complete(random_tokens(rng, length, SHAPE["vocab"]), NUM_TOKENS)
                    on_request()
                    if number >= WARM_UP_REQUESTS:
                        firsts[digests].append(completion.ttft_ms)
                        # Two tokens that came in one piece came at once.
                        seconds[digests].append(completion.ttft_ms + sum(completion.gaps_ms[:1]))
            first = ratio(median(firsts[True]), median(firsts[False]))
            second = ratio(median(seconds[True]), median(seconds[False]))
            assert first is not None and second is not None
            ratios[length] = first, second
    return ratios
