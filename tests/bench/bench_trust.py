"""What it costs that nobody else can enter: `python -m tests.bench.bench_trust`.

Three meshes run side by side on a random-weight model, each with one prefill and one decode worker. `all` has TLS and
permissions on the bus, an API key and https; `keys` is what `kvmesh up` starts: permissions, and no TLS on loopback;
`open` has a broker that asks nobody, and http. Requests go to each in turn, one at a time, each with a fresh prompt;
times are those of `kvmesh bench ttft`. Tickets, signed tenants and digests are on in all: they cannot be turned off.
"""

import argparse
import asyncio
import random
import ssl
import tempfile
from collections import defaultdict
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from itertools import chain
from pathlib import Path

import httpx
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from services.bench.drive.http_client import Client, Completion
from services.bench.drive.meshes import model_folder, rotated, running
from services.bench.drive.random_model import SHAPE
from services.bench.drive.stats import median, ratio
from services.bench.drive.workload import random_tokens
from services.bench.limits import REQUEST_TIMEOUT_S
from services.bus.embedded import EmbeddedNats
from services.config import GatewayConfig
from services.launch.supervisor import UpOptions
from services.trust.certificates import CA_FILE, CERTIFICATE_FILE, KEY_FILE
from services.trust.keys import BROKER_FILE, MeshKeys

ALL, KEYS, OPEN = MODES = "all", "keys", "open"
KEY = "a-key-of-the-measurement"
NUM_TOKENS, WARM_UP_ROUNDS = 8, 3


@asynccontextmanager
async def clients_of_each() -> AsyncGenerator[dict[str, Client]]:
    """Start the meshes; give a client of each."""
    with tempfile.TemporaryDirectory(prefix="kvmesh-bench-trust-") as folder:
        keys = Path(folder) / "keys"
        MeshKeys.fresh(["127.0.0.1"]).write(keys)
        broker = EmbeddedNats.start(None, Path(folder) / "broker", (keys / BROKER_FILE).read_text())
        gateway = GatewayConfig(
            tenants={KEY: "measured"}, tls_cert=str(keys / CERTIFICATE_FILE), tls_key=str(keys / KEY_FILE)
        )
        try:
            async with model_folder("") as (model, _):
                meshes = {
                    ALL: UpOptions(model=model, port=0, nats=broker.url, keys=str(keys), gateway=gateway),
                    KEYS: UpOptions(model=model, port=0),
                    OPEN: UpOptions(model=model, port=0, open_bus=True),
                }
                trusting = ssl.create_default_context(cafile=keys / CA_FILE)
                headers = {"Authorization": f"Bearer {KEY}"}
                async with (
                    running(meshes) as supervisors,
                    httpx.AsyncClient(timeout=REQUEST_TIMEOUT_S, verify=trusting, headers=headers) as secure,
                    httpx.AsyncClient(timeout=REQUEST_TIMEOUT_S) as plain,
                ):
                    assert broker.url.startswith("tls://") and supervisors[ALL].url.startswith("https://")
                    https = {ALL: secure, KEYS: plain, OPEN: plain}
                    yield {name: await Client.open(https[name], supervisors[name].url) for name in meshes}
        finally:
            broker.stop()


async def measure(lengths: list[int], num_requests: int, num_starts: int) -> Table:
    """Return the table of medians. Which mesh is asked first changes every round. What start a mesh has had, where its
    processes and its memory lie, moves all of its times by a few percent: so the meshes are started several times."""
    first: dict[tuple[int, str], list[list[float]]] = defaultdict(list)
    more: dict[tuple[int, str], list[list[float]]] = defaultdict(list)
    rng = random.Random(20261122)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("rounds", total=num_starts * len(lengths) * (num_requests + WARM_UP_ROUNDS))
        for _ in range(num_starts):
            async with clients_of_each() as clients:
                for length in lengths:
                    found: dict[str, list[Completion]] = {name: [] for name in MODES}
                    for number in range(num_requests + WARM_UP_ROUNDS):
                        for name in rotated(MODES, number):
                            prompt = random_tokens(rng, length, SHAPE["vocab"])
                            answer = await clients[name].complete(prompt, NUM_TOKENS)
                            if number >= WARM_UP_ROUNDS:
                                found[name].append(answer)
                        progress.advance(task)
                    for name, answers in found.items():
                        first[length, name].append([answer.ttft_ms for answer in answers])
                        more[length, name].append([sum(answer.gaps_ms) for answer in answers])
    table = Table(box=box.SIMPLE_HEAD, title="time to the first token, and from there to the eighth, medians")
    for heading in ("tokens", "mesh", "first\nms", "of\nopen", "by start", "7 more\nms", "of\nopen", "by start"):
        table.add_column(heading, justify="right")
    for length, name in first:
        cells = [cell for times in (first, more) for cell in _cells(times[length, name], times[length, OPEN])]
        table.add_row(str(length), name, *cells)
    return table


def _cells(times: list[list[float]], of_open: list[list[float]]) -> list[str]:
    """Return the median of all times; of each start's ratio to `open` the median, the least and the largest."""
    ratios = [ratio(median(one), median(other)) or 0.0 for one, other in zip(times, of_open, strict=True)]
    middle = median([*chain(*times)]) or 0.0
    return [f"{middle:.2f}", f"{median(ratios) or 0:.2f}", f"{min(ratios):.2f}–{max(ratios):.2f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="100,1000,4000", help="prompt lengths in tokens, with commas between")
    parser.add_argument("--requests", type=int, default=60, help="requests a length and start, to each mesh")
    parser.add_argument("--starts", type=int, default=8, help="how often the meshes are started")
    options = parser.parse_args()
    lengths = [int(length) for length in options.lengths.split(",")]
    Console(highlight=False).print(asyncio.run(measure(lengths, options.requests, options.starts)))


if __name__ == "__main__":
    main()
