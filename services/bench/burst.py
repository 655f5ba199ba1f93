"""`kvmesh bench burst`: many clients ask for one prompt at once; how often it is computed and sent.

Two meshes run side by side: one whose workers and scheduler wait for what is being computed (`wait_for_duplicates`),
and one without.
Bursts alternate between them, each with a fresh prompt. What was computed and what was read is in the workers' own
counters, before a burst and after it; a burst that computes a prompt once and sends it to one decode worker once has 1
in both columns.
"""

import asyncio
import random
import re
import sys
from dataclasses import dataclass
from typing import NamedTuple

import httpx
import msgspec
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table

from services.bench.drive.arguments import parse_lengths
from services.bench.drive.http_client import Client
from services.bench.drive.meshes import rotated, serving
from services.bench.drive.stats import percentile, rounded
from services.bench.drive.workload import random_tokens
from services.bench.limits import BURST_SETTLE_S, REQUEST_TIMEOUT_S
from services.errors import UserError
from services.launch.known_workers import describe_fleet
from services.launch.options import Launch
from services.launch.supervisor import Supervisor
from services.settings import changed

BEFORE, AFTER = "without", "with waiting"
MAX_CLIENTS = 256
MAX_CHOICES = 16
_SAMPLE = re.compile(r"^(kvmesh_\w+?)(?:_total)?(\{[^}]*\})? ([0-9.e+-]+)$", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class BurstPlan:
    """`clients` and `choices`: numbers with commas between; each pair is measured."""

    clients: str
    choices: str
    num_prompt_tokens: int
    num_tokens: int
    num_rounds: int


class Work(NamedTuple):
    """What a mesh's workers have done since they began."""

    computed_tokens: float
    """Prompt tokens."""
    read_bytes: float


class BurstRow(msgspec.Struct, frozen=True, kw_only=True):
    """One mesh under one kind of burst. The work is the mean of a burst, over that of one prompt."""

    mode: str
    num_clients: int
    num_choices: int
    computed_per_distinct: float
    sent_per_distinct: float
    ttft_p50_ms: float | None
    ttft_p99_ms: float | None
    total_p50_ms: float | None


class BurstReport(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    num_prompt_tokens: int
    num_rounds: int
    num_prefill: int
    num_decode: int
    rows: tuple[BurstRow, ...]


def run_burst(plan: BurstPlan, options: Launch, *, as_json: bool) -> None:
    """Measure and print. Raises UserError."""
    clients = parse_lengths(plan.clients, "--clients", MAX_CLIENTS)
    choices = parse_lengths(plan.choices, "--n", MAX_CHOICES)
    report = asyncio.run(_measure(plan, options, clients, choices))
    if as_json:
        sys.stdout.buffer.write(msgspec.json.encode(report) + b"\n")
    else:
        _print(report)


def _modes(options: Launch) -> dict[str, Launch]:
    # Nobody is to be refused for the queue.
    patient = changed(options, {"config.scheduler.max_queue_ms": round(REQUEST_TIMEOUT_S * 1e3)})
    return {
        BEFORE: changed(
            patient, {"config.scheduler.wait_for_duplicates": False, "config.worker.wait_for_duplicates": False}
        ),
        AFTER: patient,
    }


async def _measure(plan: BurstPlan, options: Launch, clients: list[int], choices: list[int]) -> BurstReport:
    # A fixed seed: the same options give the same prompts in every run of the bench.
    rng = random.Random(20261124)
    rows: list[BurstRow] = []
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    async with serving(_modes, options) as served:
        # The context length is known only once the meshes serve; no request has been sent yet.
        if plan.num_prompt_tokens + plan.num_tokens > served.context_length:
            raise UserError(f"--tokens: the model has room for {served.context_length}, the answer among them")
        meters = {name: await Meter.of(supervisor) for name, supervisor in served.supervisors.items()}
        with Progress(*columns, console=console, transient=True) as progress:
            for name, client in served.clients.items():  # the first request of a mesh is no measure of it
                await client.complete(random_tokens(rng, 64, served.vocab_size), 2)
                await meters[name].work()
            # Measure each pair of numbers. Every burst has its own prompt, so that no KV of an earlier burst serves it.
            for num_clients in clients:
                for num_choices in choices:
                    label = f"{num_clients} clients, n = {num_choices}"
                    task = progress.add_task(label, total=plan.num_rounds * len(served.clients))
                    seen: dict[str, list[_Burst]] = {name: [] for name in served.clients}
                    for number in range(plan.num_rounds):
                        for name in rotated(served.clients, number):
                            prompt = random_tokens(rng, plan.num_prompt_tokens, served.vocab_size)
                            client, meter = served.clients[name], meters[name]
                            burst = await _burst(client, meter, prompt, plan.num_tokens, num_clients, num_choices)
                            seen[name].append(burst)
                            progress.advance(task)
                    # One row per mesh: computed tokens divided by one prompt's tokens, read bytes by its KV bytes.
                    for name in served.clients:
                        distinct_bytes = plan.num_prompt_tokens * meters[name].token_bytes
                        row = _row(name, num_clients, num_choices, seen[name], plan.num_prompt_tokens, distinct_bytes)
                        rows.append(row)
    return BurstReport(
        model=options.config.model.path or "random",
        num_prompt_tokens=plan.num_prompt_tokens,
        num_rounds=plan.num_rounds,
        num_prefill=options.num_prefill,
        num_decode=options.num_decode,
        rows=tuple(rows),
    )


class _Burst(NamedTuple):
    work: Work
    ttfts_ms: list[float]
    totals_ms: list[float]


@dataclass(frozen=True)
class Meter:
    """Reads the counters of one mesh's workers. `token_bytes`: of one token's KV."""

    urls: tuple[str, ...]
    token_bytes: int

    @classmethod
    async def of(cls, supervisor: Supervisor) -> "Meter":
        loads = (await describe_fleet(supervisor.access())).workers
        token_bytes = max((load.rates.kv_token_bytes for load in loads), default=0)
        if not token_bytes:
            raise UserError("no worker says how large its KV is")
        targets = supervisor.metrics_targets
        urls = [f"http://{target.targets[0]}/metrics" for target in targets if target.labels["role"] != "gateway"]
        return cls(tuple(urls), token_bytes)

    async def work(self) -> Work:
        """Return what the workers have done, once that changes no more."""
        async with httpx.AsyncClient(trust_env=False) as http:
            before = None
            while True:
                pages = await asyncio.gather(*(http.get(url) for url in self.urls))
                samples = [sample for page in pages for sample in _SAMPLE.findall(page.text)]
                computed = sum(
                    float(value)
                    for name, labels, value in samples
                    if name == "kvmesh_engine_tokens" and 'phase="prefill"' in labels
                )
                read = sum(float(value) for name, _, value in samples if name == "kvmesh_transfer_bytes")
                now = Work(computed, read)
                if now == before:
                    return now
                before = now
                await asyncio.sleep(BURST_SETTLE_S)


async def _burst(
    client: Client, meter: Meter, prompt: list[int], num_tokens: int, num_clients: int, num_choices: int
) -> _Burst:
    before = await meter.work()
    asked = (client.complete(prompt, num_tokens, num_choices=num_choices) for _ in range(num_clients))
    answers = await asyncio.gather(*asked)
    after = await meter.work()
    work = Work(after.computed_tokens - before.computed_tokens, after.read_bytes - before.read_bytes)
    return _Burst(work, [answer.ttft_ms for answer in answers], [answer.total_ms for answer in answers])


def _row(
    mode: str, num_clients: int, num_choices: int, bursts: list[_Burst], distinct_tokens: int, distinct_bytes: int
) -> BurstRow:
    ttfts = [ttft for burst in bursts for ttft in burst.ttfts_ms]
    totals = [total for burst in bursts for total in burst.totals_ms]
    computed = sum(burst.work.computed_tokens for burst in bursts) / len(bursts)
    read = sum(burst.work.read_bytes for burst in bursts) / len(bursts)
    return BurstRow(
        mode=mode,
        num_clients=num_clients,
        num_choices=num_choices,
        computed_per_distinct=round(computed / distinct_tokens, 3),
        sent_per_distinct=round(read / distinct_bytes, 3),
        ttft_p50_ms=rounded(percentile(ttfts, 50), 1),
        ttft_p99_ms=rounded(percentile(ttfts, 99), 1),
        total_p50_ms=rounded(percentile(totals, 50), 1),
    )


def _print(report: BurstReport) -> None:
    headings = ("computed\n÷ distinct", "sent\n÷ distinct", "TTFT p50\nms", "TTFT p99\nms", "whole p50\nms")
    columns = [Column("clients", justify="right"), Column("n", justify="right"), Column("mesh")]
    columns += [Column(heading, justify="right") for heading in headings]
    table = Table(*columns, box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    for row in report.rows:
        times = (row.ttft_p50_ms, row.ttft_p99_ms, row.total_p50_ms)
        table.add_row(
            str(row.num_clients), str(row.num_choices), row.mode, f"{row.computed_per_distinct:.2f}",
            f"{row.sent_per_distinct:.2f}", *("–" if time is None else f"{time:,.0f}" for time in times),
        )  # fmt: skip
    console = Console(highlight=False)
    workers = f"{report.num_prefill} prefill and {report.num_decode} decode workers"
    console.print(
        f"{report.model}, {workers}; bursts of one prompt of {report.num_prompt_tokens:,} tokens, "
        f"{report.num_rounds} each, in turn"
    )
    console.print(table)
    console.print("distinct: one prompt; sent: KV read by any worker, over that of one prompt")
