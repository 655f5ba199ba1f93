"""What the proof of its bytes costs a first token: `python -m tests.bench.bench_proof`.

Two meshes run side by side on a random-weight model, each with one prefill and one decode worker: in one each frame's
bytes are digested at both ends (`[worker] digests`, as always), in the other they are not. Tickets and the seal of what
a holder says are on in both: they cannot be turned off. Token 0 comes from the prefill worker, so the first token shows
what the digests take of the machine beside the computation, and the second what they add to the hand-over.
"""

import argparse
import asyncio
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from rich.console import Console

from services.bench.drive.arguments import parse_lengths
from services.bench.drive.http_client import Client, Completion, open_http
from services.bench.drive.meshes import model_folder, running
from services.bench.drive.progress_bar import progress
from services.bench.drive.random_model import LARGE_KV_SHAPE, SHAPE
from services.config import Carrier, GatewayConfig, MeshConfig, ModelConfig, WorkerConfig
from services.launch.options import Launch
from tests.bench.side_by_side import NUM_TOKENS, Row, compare, num_rounds, table

LENGTHS = (1_000, 4_000)
CARRIERS: tuple[Carrier, ...] = ("shm", "tcp")
LARGE_KV = LARGE_KV_SHAPE | {"context_length": 4_096}
AIM = 1.03


def second_ms(answer: Completion) -> float:
    """Return when the second token came; two that came in one piece came at once."""
    return answer.ttft_ms + sum(answer.gaps_ms[:1])


TIMES = {"first": lambda answer: answer.ttft_ms, "second": second_ms}


@asynccontextmanager
async def proved_and_not(model: str, carrier: Carrier) -> AsyncGenerator[dict[str, Client]]:
    meshes = {
        name: Launch(
            config=MeshConfig(
                model=ModelConfig(path=model),
                gateway=GatewayConfig(port=0),
                worker=WorkerConfig(carrier=carrier, digests=name == "proof"),
            )
        )
        for name in ("proof", "none")
    }
    async with running(meshes) as supervisors, open_http() as http:
        yield {name: await Client.open(http, supervisor.url) for name, supervisor in supervisors.items()}


async def measure(
    carriers: Sequence[Carrier], shape: dict[str, Any], lengths: Sequence[int], num_requests: int, num_starts: int
) -> dict[Carrier, list[Row]]:
    """Return the rows of each carrier."""
    found: dict[Carrier, list[Row]] = {}
    async with model_folder("", shape) as (model, _):
        with progress("rounds", len(carriers) * num_rounds(lengths, num_requests, num_starts)) as on_round:
            for carrier in carriers:

                def start(carrier: Carrier = carrier):
                    return proved_and_not(model, carrier)

                found[carrier] = await compare(start, TIMES, lengths, num_requests, num_starts, on_round)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--lengths", default=",".join(map(str, LENGTHS)), help="prompt lengths in tokens, with commas between"
    )
    parser.add_argument("--requests", type=int, default=20, help="requests a length and start, to each mesh")
    parser.add_argument("--starts", type=int, default=4, help="how often the meshes are started")
    parser.add_argument("--carrier", choices=CARRIERS, help="this one alone")
    parser.add_argument("--large-kv", action="store_true", help="a model with KV of 128 KiB a token, as an 8B's")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    shape = LARGE_KV if options.large_kv else SHAPE
    lengths = parse_lengths(options.lengths, "--lengths", shape["context_length"] - NUM_TOKENS)
    carriers = (options.carrier,) if options.carrier else CARRIERS
    found = asyncio.run(measure(carriers, shape, lengths, options.requests, options.starts))
    if options.json:
        sys.stdout.buffer.write(msgspec.json.encode(found) + b"\n")
        return
    for carrier, rows in found.items():
        title = f"{carrier}: time to the first and the second token; aim: at most {AIM}"
        Console(highlight=False).print(table(rows, title))


if __name__ == "__main__":
    main()
