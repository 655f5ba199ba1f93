"""`python -m tests.bench.bench_crossover`: from which prompt length is it quicker to read KV than to compute it, and
does policy `cost` choose so?

For each carrier one mesh of a prefill and a decode worker. All but a prompt's last block is put on the decode worker;
then the prefill worker computes the prompt, with that worker as a source or without. A third prompt goes through the
gateway, where `cost` chooses.
"""

import asyncio
import itertools
import math
import random
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Annotated, get_args

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table

from schemas.ids import WorkerId
from schemas.request import KVSource
from services.bench.drive.arguments import parse_lengths
from services.bench.drive.http_client import Client, RequestFailedError, open_http
from services.bench.drive.meshes import model_folder, rotated, running
from services.bench.drive.random_model import SHAPE
from services.bench.drive.stats import crossover, median, ratio, rounded
from services.bench.drive.workload import random_tokens
from services.cli.bench import Json, Model
from services.config import Carrier
from services.errors import UserError
from services.launch.supervisor import Supervisor, UpOptions
from tests.bench.direct import DirectClient

PREFILL, DECODE = WorkerId("prefill-0"), WorkerId("decode-0")
NUM_TOKENS = 2
"""Tokens of the answers to prompts that `cost` places: with one token alone a split is not worth while."""
WARM_UP_LENGTHS = (256, 1_000, 2_000)
MIN_LENGTH = 32
SEED = 20261121


class CrossoverSample(msgspec.Struct, frozen=True, kw_only=True):
    """The three times for one prompt length (tokens), measured once. `cost_ms` is measured by a client of the
    gateway; `chose_read`: policy `cost` had the prompt's KV read."""

    carrier: str
    length: int
    read_ms: float
    computed_ms: float
    cost_ms: float
    chose_read: bool


class CrossoverRow(msgspec.Struct, frozen=True, kw_only=True):
    """Medians of one prompt length. `lost_ms`: what the policy's choice, by majority, costs over the better one."""

    length: int
    num_requests: int
    read_ms: float | None
    computed_ms: float | None
    ratio: float | None
    cost_ms: float | None
    read_share: float
    lost_ms: float | None


class CarrierReport(msgspec.Struct, frozen=True, kw_only=True):
    """One carrier: the lengths in tokens from which reading is quicker, and from which `cost` reads. None: at no
    length.

    `crossover_at_most`: reading was quicker at every length, so the crossover is at the first or below.
    """

    carrier: str
    crossover_tokens: float | None
    crossover_at_most: bool
    policy_crossover_tokens: float | None
    policy_over_measured: float | None
    rows: tuple[CrossoverRow, ...]


class CrossoverReport(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    num_parameters: int | None
    pull_tokens_min: int
    carriers: tuple[CarrierReport, ...]


def main(
    carriers: Annotated[str, typer.Option("--carrier", help="Carriers, with commas between.")] = "shm,tcp",
    lengths: Annotated[str, typer.Option(help="Prompt lengths in tokens.")] = "64,96,128,256,512,1000,2000,4000,8000",
    num_requests: Annotated[int, typer.Option("--requests", min=1, help="Requests a length, carrier and way.")] = 5,
    pull_tokens_min: Annotated[int, typer.Option(min=0, help="The policy's floor.")] = 64,
    model: Model = "",
    *,
    as_json: Json = False,
) -> None:
    """From which length on reading beats computing, by carrier, and what policy cost chose."""
    options = UpOptions(model=model, pull_tokens_min=pull_tokens_min)
    wanted = sorted(set(parse_lengths(lengths, "--lengths", SHAPE["context_length"] - NUM_TOKENS)))
    if wanted[0] < MIN_LENGTH:
        raise UserError(
            f"--lengths must be at least {MIN_LENGTH}: a shorter prompt has nothing to read but its last block"
        )
    report = asyncio.run(_run(parse_carriers(carriers), wanted, num_requests, options))
    if as_json:
        sys.stdout.buffer.write(msgspec.json.encode(report) + b"\n")
    else:
        _print(report)


def parse_carriers(text: str) -> list[Carrier]:
    """Return the carriers of a comma-separated list. Raises UserError for an unknown one."""
    known: dict[str, Carrier] = {name: name for name in get_args(Carrier)}
    names = [name.strip() for name in text.split(",")]
    if unknown := [name for name in names if name not in known]:
        raise UserError(f"--carrier {unknown[0]!r}: there are {', '.join(known)}")
    return [known[name] for name in dict.fromkeys(names)]


def carrier_report(carrier: str, samples: Sequence[CrossoverSample]) -> CarrierReport:
    """Return one carrier's rows, and the lengths at which the two ways cross."""
    lengths = sorted({sample.length for sample in samples})
    rows = [_row([sample for sample in samples if sample.length == length]) for length in lengths]
    measured = crossover(lengths, [row.read_ms or 0.0 for row in rows], [row.computed_ms or 0.0 for row in rows])
    chosen = choice_crossover(lengths, [row.read_share >= 0.5 for row in rows])
    return CarrierReport(
        carrier=carrier,
        crossover_tokens=rounded(measured, 0),
        crossover_at_most=measured == lengths[0],
        policy_crossover_tokens=rounded(chosen, 0),
        policy_over_measured=ratio(chosen, measured),
        rows=tuple(rows),
    )


def _row(samples: Sequence[CrossoverSample]) -> CrossoverRow:
    read, computed = median([s.read_ms for s in samples]), median([s.computed_ms for s in samples])
    share = sum(sample.chose_read for sample in samples) / len(samples)
    lost = None
    if read is not None and computed is not None:
        lost = round((read if share >= 0.5 else computed) - min(read, computed), 2)
    return CrossoverRow(
        length=samples[0].length,
        num_requests=len(samples),
        read_ms=read,
        computed_ms=computed,
        ratio=ratio(read, computed),
        cost_ms=median([sample.cost_ms for sample in samples]),
        read_share=round(share, 3),
        lost_ms=lost,
    )


async def _run(carriers: list[Carrier], lengths: list[int], num_requests: int, options: UpOptions) -> CrossoverReport:
    async with model_folder(options.model) as (model, num_parameters):
        # The decode worker, which holds everything, is not to serve alone: then there would be nothing to choose.
        meshes = {
            carrier: replace(options, model=model, port=0, carrier=carrier, unsplit_tokens_max=0)
            for carrier in carriers
        }
        async with running(meshes) as supervisors:
            samples = await _measure(supervisors, lengths, num_requests)
            checkpoint = next(iter(supervisors.values())).checkpoint
    assert checkpoint is not None
    return CrossoverReport(
        model=checkpoint.name,
        num_parameters=num_parameters,
        pull_tokens_min=options.pull_tokens_min,
        carriers=tuple(carrier_report(c, [sample for sample in samples if sample.carrier == c]) for c in carriers),
    )


async def _measure(supervisors: dict[str, Supervisor], lengths: list[int], num_requests: int) -> list[CrossoverSample]:
    """Measure every length on every mesh, `num_requests` times, in an order that changes."""
    rng = random.Random(SEED)
    samples: list[CrossoverSample] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    async with AsyncExitStack() as stack:
        http = await stack.enter_async_context(open_http())
        probes: dict[str, Probe] = {}
        for carrier, supervisor in supervisors.items():
            direct = await stack.enter_async_context(DirectClient.open(supervisor))
            checkpoint = supervisor.checkpoint
            assert checkpoint is not None
            client = await Client.open(http, supervisor.url)
            probes[carrier] = Probe(carrier, direct, client, rng, checkpoint.vocab_size)
        with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task("warming up", total=len(probes) * len(lengths) * num_requests)
            for probe, length in itertools.product(probes.values(), WARM_UP_LENGTHS):
                await probe.measure(min(length, lengths[-1]), 0)
            for number in range(num_requests):
                for carrier, length in itertools.product(rotated(probes, number), lengths):
                    progress.update(task, description=f"{carrier}, {length} tokens")
                    samples.append(await probes[carrier].measure(length, number))
                    progress.advance(task)
    return samples


class Probe:
    """Measures one mesh, one request at a time."""

    def __init__(self, carrier: str, direct: DirectClient, client: Client, rng: random.Random, vocab_size: int) -> None:
        self._carrier = carrier
        self._direct = direct
        self._client = client
        self._rng = rng
        self._vocab_size = vocab_size

    async def measure(self, length: int, number: int) -> CrossoverSample:
        """Time three fresh prompts of this length. Raises RequestFailedError where KV that was to be read was not."""
        times: dict[str, float] = {}
        chose_read = False
        for way in rotated(("read", "computed", "cost"), number):
            match way:
                case "read":
                    times[way] = await self._read(length)
                case "computed":
                    prompt = random_tokens(self._rng, length, self._vocab_size)
                    times[way] = (await self._direct.first_token(PREFILL, prompt)).ttft_ms
                case _:
                    prompt, _ = await self._seed(length)
                    completion = await self._client.complete(prompt, NUM_TOKENS)
                    times[way] = completion.ttft_ms
                    chose_read = completion.usage.computing.transferred_tokens > 0
        return CrossoverSample(
            carrier=self._carrier,
            length=length,
            read_ms=times["read"],
            computed_ms=times["computed"],
            cost_ms=times["cost"],
            chose_read=chose_read,
        )

    async def _read(self, length: int) -> float:
        prompt, num_blocks = await self._seed(length)
        source = KVSource(worker_id=DECODE, first_block=0, num_blocks=num_blocks)
        first = await self._direct.first_token(PREFILL, prompt, (source,))
        wanted = num_blocks * self._direct.block_size
        if first.report.transferred_tokens != wanted:
            got = first.report.transferred_tokens
            raise RequestFailedError(f"of {wanted} tokens that {DECODE} holds, {PREFILL} read {got}")
        return first.ttft_ms

    async def _seed(self, length: int) -> tuple[list[int], int]:
        """Put all but the last block of a fresh prompt on the decode worker; return the prompt and how many blocks."""
        prompt = random_tokens(self._rng, length, self._vocab_size)
        block_size = self._direct.block_size
        held = prompt[: (length - 1) // block_size * block_size]
        await self._direct.first_token(DECODE, held)
        return prompt, await self._direct.wait_located(held, DECODE)


def _print(report: CrossoverReport) -> None:
    console = Console(highlight=False, soft_wrap=True)
    headings = ("tokens", "read ms", "computed ms", "ratio", "cost reads", "lost by it, ms", "through the gateway, ms")
    for carrier in report.carriers:
        table = Table(
            *(Column(heading, justify="right") for heading in headings), title=f"{carrier.carrier}: first token"
        )
        for row in carrier.rows:
            table.add_row(
                str(row.length),
                _ms(row.read_ms),
                _ms(row.computed_ms),
                "–" if row.ratio is None else f"{row.ratio:.2f}×",
                f"{row.read_share:.0%}",
                _ms(row.lost_ms),
                _ms(row.cost_ms),
            )
        console.print(table)
        console.print(_summary(carrier))


def _summary(carrier: CarrierReport) -> str:
    bound = "at most " if carrier.crossover_at_most else ""
    measured = "at none of these lengths"
    if carrier.crossover_tokens is not None:
        measured = f"from {bound}{carrier.crossover_tokens:.0f} tokens on"
    chosen = "never" if carrier.policy_crossover_tokens is None else f"from {carrier.policy_crossover_tokens:.0f} on"
    times = (
        "" if carrier.policy_over_measured is None else f" ({carrier.policy_over_measured:.2f}× the measured length)"
    )
    return f"{carrier.carrier}: reading is quicker {measured}; policy cost reads {chosen}{times}"


def _ms(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"


def choice_crossover(lengths: Sequence[int], choices: Sequence[bool]) -> float | None:
    """Return the length from which every choice is yes: the geometric mean of the last no and the yes after it.

    None where the last choice is no; the first length where every choice is yes.
    """
    if not choices or not choices[-1]:
        return None
    first = len(choices) - 1
    while first > 0 and choices[first - 1]:
        first -= 1
    return float(lengths[0]) if first == 0 else math.sqrt(lengths[first - 1] * lengths[first])


if __name__ == "__main__":
    typer.run(main)
