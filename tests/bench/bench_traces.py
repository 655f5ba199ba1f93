"""What tracing costs a mesh: throughput with 0 %, 10 % and 100 % of the requests sampled, interleaved in one run.

    python -m tests.bench.bench_traces [--rounds 12] [--requests 40] [--json]

The same processes serve all three: each request's traceparent says whether it is sampled. Ratios are against the
round's own 0 %, medians over the rounds. Beside requests a second it counts the processor time that all services
together took for a request, which other load on the machine disturbs less.
"""

import argparse
import asyncio
import json
import os
import random
import secrets
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from services.config import GatewayConfig, MeshConfig, SchedulerConfig, WorkerConfig
from services.launch.options import Launch
from services.launch.supervisor import Supervisor

RATIOS = (0.0, 0.1, 1.0)
AIMS = {0.1: 0.98, 1.0: 0.95}
CONCURRENCY = 8
PROMPT_TOKENS, ANSWER_TOKENS = 64, 32
OPTIONS = Launch(
    num_prefill=1,
    num_decode=1,
    config=MeshConfig(
        gateway=GatewayConfig(port=0),
        scheduler=SchedulerConfig(unsplit_tokens_max=0),
        worker=WorkerConfig(num_threads=1, kv_bytes=128 << 20),
    ),
)


@dataclass(frozen=True)
class Sample:
    """One arm of one round."""

    requests_per_s: float
    cpu_ms_per_request: float


class Bench:
    def __init__(self, supervisor: Supervisor, http: httpx.AsyncClient) -> None:
        self._supervisor = supervisor
        self._http = http

    async def arm(self, ratio: float, num_requests: int) -> Sample:
        num_sampled = round(ratio * num_requests)
        flags = [1] * num_sampled + [0] * (num_requests - num_sampled)
        random.shuffle(flags)
        left = iter(flags)

        async def client() -> None:
            for flag in left:
                await self._ask(flag)

        started_s, cpu_s = time.perf_counter(), self._cpu_s()
        await asyncio.gather(*(client() for _ in range(CONCURRENCY)))
        took_s = time.perf_counter() - started_s
        return Sample(num_requests / took_s, (self._cpu_s() - cpu_s) / num_requests * 1000)

    async def _ask(self, flag: int) -> None:
        assert self._supervisor.checkpoint is not None
        body: dict[str, Any] = {
            "model": self._supervisor.checkpoint.name,
            "prompt": [3 + secrets.randbelow(200) for _ in range(PROMPT_TOKENS)],
            "max_tokens": ANSWER_TOKENS,
            "ignore_eos": True,
        }
        headers = {"traceparent": f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-{flag:02x}"}
        reply = await self._http.post(f"{self._supervisor.url}/v1/completions", json=body, headers=headers)
        reply.raise_for_status()

    def _cpu_s(self) -> float:
        ticks = 0
        for child in self._supervisor.children:
            fields = Path(f"/proc/{child.process.pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")


async def measure(num_rounds: int, num_requests: int) -> dict[float, list[Sample]]:
    samples: dict[float, list[Sample]] = {ratio: [] for ratio in RATIOS}
    with tempfile.TemporaryDirectory() as folder:
        supervisor = Supervisor(OPTIONS, Path(folder))
        try:
            await supervisor.start_all()
            async with httpx.AsyncClient(timeout=120) as http:
                bench = Bench(supervisor, http)
                await bench.arm(1.0, num_requests)
                for number in range(num_rounds):
                    for ratio in random.sample(RATIOS, len(RATIOS)):
                        samples[ratio].append(await bench.arm(ratio, num_requests))
                    sys.stderr.write(f"\rround {number + 1} of {num_rounds}")
        finally:
            await supervisor.stop_all()
    sys.stderr.write("\n")
    return samples


def summary(samples: dict[float, list[Sample]]) -> list[dict[str, float]]:
    rows: list[dict[str, float]] = []
    for ratio, arm in samples.items():
        pairs = list(zip(arm, samples[0.0], strict=True))
        rows.append(
            {
                "sampled": ratio,
                "requests_per_s": round(statistics.median(s.requests_per_s for s in arm), 2),
                "throughput": round(statistics.median(s.requests_per_s / base.requests_per_s for s, base in pairs), 3),
                "cpu_ms_per_request": round(statistics.median(s.cpu_ms_per_request for s in arm), 2),
                "cpu": round(statistics.median(s.cpu_ms_per_request / base.cpu_ms_per_request for s, base in pairs), 3),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--requests", type=int, default=40, help="of each arm, in each round")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = summary(asyncio.run(measure(options.rounds, options.requests)))
    if options.json:
        print(json.dumps(rows))
        return
    for row in rows:
        aim = f"  aim >= {AIMS[row['sampled']]}" if row["sampled"] in AIMS else ""
        print(
            f"{row['sampled']:4.0%} sampled: {row['requests_per_s']:7.2f} requests/s, {row['throughput']:.3f}x{aim};",
            f"{row['cpu_ms_per_request']:.2f} ms of processor a request, {row['cpu']:.3f}x",
        )


if __name__ == "__main__":
    main()
