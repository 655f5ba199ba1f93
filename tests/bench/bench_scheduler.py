"""What placing a request costs: `python -m tests.bench.bench_scheduler`.

Fleets of 8 to 1,000 workers, half of each role, each of which has measured its own rates and 64 pairs; policy `cost`.
Between two placements some workers report, as they would. Every second request has 32 holders. `--json` prints one
object instead of the table; `--plot FILE` draws it.
"""

import argparse
import json
import random
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from schemas.directory import HolderPrefix
from schemas.ids import RequestId, WorkerId
from schemas.request import Placement, PlaceRequest
from schemas.worker import BlockCounts, PrefillRate, TransferRate, WorkerInfo, WorkerLoad, WorkerRates, WorkerRole
from services.config import SchedulerConfig
from services.scheduler.core import SchedulerCore
from services.times import PresenceTimes, Times

LOAD_INTERVAL_MS = Times().presence.load_interval_ms

SIZES = (8, 16, 32, 64, 128, 256, 512, 1_000)
NUM_BLOCKS, BLOCK_SIZE = 20_000, 16
NUM_PAIRS = 64
NUM_HOLDERS = 32
LOADS_BETWEEN = 10
NUM_WARM = 20
LATER_MS = 60_000
LENGTHS = (200, 2_000, 8_000)
BORDERS = (0, 1_024, 2_048, 4_096)
SETTINGS = SchedulerConfig(max_queue_ms=10**9)
"""No request is refused."""


@dataclass(frozen=True)
class Row:
    """`load_ms`: what one worker's report costs. `requests_per_s`: what one scheduler could place beside detector all
    its workers every `LOAD_INTERVAL_MS`, if it did nothing else: neither decoding messages nor asking a directory is in
    it."""

    workers: int
    p50_ms: float
    p99_ms: float
    load_ms: float
    requests_per_s: float


def load_of(rng: random.Random, name: str, role: WorkerRole, sources: list[str]) -> WorkerLoad:
    num_used = rng.randrange(18_000)
    transfers = tuple(
        TransferRate(
            source=WorkerId(source), carrier="tcp", bytes_per_s=rng.uniform(0.5e9, 2e9), latency_ms=rng.uniform(1, 5)
        )
        for source in rng.sample(sources, min(len(sources), NUM_PAIRS))
    )
    return WorkerLoad(
        worker=WorkerInfo(
            worker_id=WorkerId(name), incarnation="1", role=role, model="m", fingerprint="f", num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE, context_length=100_000,
        ),
        state="ready",
        blocks=BlockCounts(total=NUM_BLOCKS, free=NUM_BLOCKS - num_used, running=num_used, leased=0),
        num_running=rng.randrange(32),
        num_queued=0,
        num_uncomputed_tokens=rng.choice((0, 0, 500, 2_000)),
        rates=WorkerRates(
            prefill=tuple(PrefillRate(context_tokens=at, tokens_per_s=rng.uniform(9e3, 11e3)) for at in BORDERS),
            transfers=transfers,
            decode_step_ms=rng.uniform(8, 12),
            kv_token_bytes=65_536,
        ),
    )  # fmt: skip


def measure(num_workers: int, num_requests: int, seed: int = 1) -> Row:
    rng = random.Random(seed)
    prefill, decode = ([f"{role}{number}" for number in range(num_workers // 2)] for role in ("p", "d"))
    core = SchedulerCore(SETTINGS, PresenceTimes())
    loads: list[WorkerLoad] = []
    for now_ms in (0, LATER_MS):
        loads = [load_of(rng, name, "prefill", decode) for name in prefill]
        loads += [load_of(rng, name, "decode", prefill) for name in decode]
        for load in loads:
            core.handle(load, now_ms)
    load_s, place_s = list[float](), list[float]()
    for number in range(NUM_WARM + num_requests):
        reporting = rng.sample(loads, min(len(loads), LOADS_BETWEEN))
        started = time.perf_counter()
        for load in reporting:
            core.handle(load, LATER_MS)
        load_s.append((time.perf_counter() - started) / len(reporting))
        names = rng.sample([*prefill, *decode], min(num_workers, NUM_HOLDERS)) if number % 2 else []
        holders = tuple(
            HolderPrefix(worker_id=WorkerId(name), incarnation="1", num_blocks=rng.choice((64, 64, 100)))
            for name in names
        )
        request = PlaceRequest(
            request_id=RequestId(f"r{number}"), attempt=1, deadline_ms=2 * LATER_MS,
            num_prompt_tokens=rng.choice(LENGTHS), max_tokens=200,
        )  # fmt: skip
        started = time.perf_counter()
        placement = core.place(request, LATER_MS, holders)
        place_s.append(time.perf_counter() - started)
        assert isinstance(placement, Placement), placement
    spent = sorted(place_s[NUM_WARM:])
    load_ms, mean_s = 1e3 * sum(load_s[NUM_WARM:]) / num_requests, sum(spent) / num_requests
    left = max(0.0, 1 - num_workers * load_ms / LOAD_INTERVAL_MS)
    p50_ms, p99_ms = (1e3 * spent[int(share * (num_requests - 1))] for share in (0.5, 0.99))
    return Row(num_workers, round(p50_ms, 3), round(p99_ms, 3), round(load_ms, 4), round(left / mean_s, 1))


def draw(rows: list[Row], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    panel = figure.subplots()
    workers = [row.workers for row in rows]
    panel.loglog(workers, [row.p50_ms for row in rows], marker="o", label="p50")
    panel.loglog(workers, [row.p99_ms for row in rows], marker="o", label="p99")
    panel.set(xlabel="workers", ylabel="one placement, ms", xticks=workers, xticklabels=[f"{n:,}" for n in workers])
    panel.grid(alpha=0.3)
    panel.legend()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=500, help="so many a size")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--plot", type=Path, help="a .png, .svg or .pdf file")
    options = parser.parse_args()
    rows: list[Row] = []
    for size in SIZES:
        sys.stderr.write(f"\r\033[K{size:,} workers")
        rows.append(measure(size, options.requests))
    sys.stderr.write("\r\033[K")
    if options.plot is not None:
        draw(rows, options.plot)
    if options.json:
        print(json.dumps({"rows": [asdict(row) for row in rows]}))
        return
    print(f"  {'workers':>7}  {'p50':>8}  {'p99':>8}  {'a report':>9}  {'requests/s':>10}")
    for row in rows:
        print(
            f"  {row.workers:>7,}  {row.p50_ms:>5.2f} ms  {row.p99_ms:>5.2f} ms  {row.load_ms:>6.3f} ms"
            f"  {row.requests_per_s:>10,.0f}"
        )


if __name__ == "__main__":
    main()
