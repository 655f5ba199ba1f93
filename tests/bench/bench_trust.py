"""What it costs that nobody else can enter: `python -m tests.bench.bench_trust`.

Three meshes run side by side on a random-weight model, each with one prefill and one decode worker. `all` has TLS and
permissions on the bus, an API key and https; `keys` is what `kvmesh up` starts: permissions, and no TLS on loopback;
`open` has a broker that asks nobody, and http. Requests go to each in turn, one at a time, each with a fresh prompt;
times are those of `kvmesh bench ttft`. Tickets, signed tenants and digests are on in all.
"""

import argparse
import asyncio
import ssl
import tempfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
from rich.console import Console

from services.bench.drive.http_client import Client
from services.bench.drive.meshes import model_folder, running
from services.bench.drive.progress_bar import progress
from services.bench.limits import REQUEST_TIMEOUT_S
from services.bus.embedded import EmbeddedNats
from services.config import GatewayConfig
from services.launch.supervisor import UpOptions
from services.trust.certificates import CA_FILE, CERTIFICATE_FILE, KEY_FILE
from services.trust.keys import BROKER_FILE, MeshKeys
from tests.bench.side_by_side import compare, num_rounds, table

ALL, KEYS, OPEN = "all", "keys", "open"
KEY = "a-key-of-the-measurement"
TIMES = {"first": lambda answer: answer.ttft_ms, "7 more": lambda answer: sum(answer.gaps_ms)}


@asynccontextmanager
async def clients_of_each() -> AsyncGenerator[dict[str, Client]]:
    """Start the meshes; give a client of each."""
    with tempfile.TemporaryDirectory(prefix="kvmesh-bench-trust-") as folder:
        keys = Path(folder) / "keys"
        MeshKeys.fresh(["127.0.0.1"]).save(keys)
        broker = EmbeddedNats.launch(None, Path(folder) / "broker", (keys / BROKER_FILE).read_text())
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="100,1000,4000", help="prompt lengths in tokens, with commas between")
    parser.add_argument("--requests", type=int, default=60, help="requests a length and start, to each mesh")
    parser.add_argument("--starts", type=int, default=8, help="how often the meshes are started")
    options = parser.parse_args()
    lengths = [int(length) for length in options.lengths.split(",")]
    with progress("rounds", num_rounds(lengths, options.requests, options.starts)) as on_round:
        comparing = compare(clients_of_each, TIMES, lengths, options.requests, options.starts, on_round)
        rows = asyncio.run(comparing)
    title = "time to the first token, and from there to the eighth, medians"
    Console(highlight=False).print(table(rows, title))


if __name__ == "__main__":
    main()
