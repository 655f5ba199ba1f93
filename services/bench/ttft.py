"""`kvmesh bench ttft`: what the split costs, as a client sees it.

Two meshes run side by side on a random-weight model: one prefill and one decode worker, and two workers that do both
(the same number of processes and threads). Requests alternate between them, one at a time, each with a fresh prompt.
Time to first token is from sending the request to the first token's event; the second token shows the hand-over, as
token 0 comes from the prefill worker.
"""

import asyncio
import random
import sys
from typing import NamedTuple

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table

from services.bench.drive.arguments import parse_lengths
from services.bench.drive.http_client import Client, RequestFailedError, base_url, open_http
from services.bench.drive.meshes import SPLIT, WHOLE, model_folder, split_and_whole
from services.bench.drive.random_model import SHAPE
from services.bench.drive.stats import median, ratio, spread
from services.bench.drive.workload import random_tokens

NUM_TOKENS = 8
WARM_UP_REQUESTS = 2


class Timing(NamedTuple):
    """The times of one request's first two tokens, in milliseconds from sending it."""

    first_ms: float
    second_ms: float


class TtftRow(msgspec.Struct, frozen=True, kw_only=True):
    """Medians at one prompt length. The ratios are None where there is no mesh to compare with."""

    length: int
    num_requests: int
    with_split_ms: float | None
    without_split_ms: float | None
    ratio: float | None
    second_with_split_ms: float | None
    second_without_split_ms: float | None
    second_token_ratio: float | None
    with_split_iqr_ms: float | None = None
    without_split_iqr_ms: float | None = None


class TtftReport(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    num_parameters: int | None
    rows: tuple[TtftRow, ...]


def run_ttft(lengths: str, num_requests: int, *, url: str, as_json: bool) -> None:
    """Measure and print. Raises UserError for invalid lengths."""
    wanted = parse_lengths(lengths, "--lengths", SHAPE["context_length"] - NUM_TOKENS)
    report = asyncio.run(_measure_url(url, wanted, num_requests) if url else _measure(wanted, num_requests))
    if as_json:
        sys.stdout.buffer.write(msgspec.json.encode(report) + b"\n")
    else:
        _print(report)


async def _measure(lengths: list[int], num_requests: int) -> TtftReport:
    async with model_folder("") as (checkpoint, num_parameters), split_and_whole(checkpoint) as urls:
        rows = await alternate(urls, lengths, num_requests)
    return TtftReport(model="random", num_parameters=num_parameters, rows=tuple(rows))


async def _measure_url(url: str, lengths: list[int], num_requests: int) -> TtftReport:
    rows = await alternate({SPLIT: base_url(url)}, lengths, num_requests)
    return TtftReport(model=url, num_parameters=None, rows=tuple(rows))


async def alternate(urls: dict[str, str], lengths: list[int], num_requests: int) -> list[TtftRow]:
    """Send requests to each mesh in turn. The order of the meshes changes every round."""
    rng = random.Random(20261121)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    rows: list[TtftRow] = []
    async with open_http() as http:
        clients = {mode: await Client.open(http, url) for mode, url in urls.items()}
        with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
            for length in lengths:
                rounds = num_requests + WARM_UP_REQUESTS
                task = progress.add_task(f"{length} tokens", total=rounds * len(urls))
                timings: dict[str, list[Timing]] = {mode: [] for mode in urls}
                for number in range(rounds):
                    order = list(urls) if number % 2 else list(reversed(urls))
                    for mode in order:
                        timing = await _time_one(clients[mode], random_tokens(rng, length, SHAPE["vocab"]))
                        if number >= WARM_UP_REQUESTS:
                            timings[mode].append(timing)
                        progress.advance(task)
                rows.append(_row(length, timings[SPLIT], timings.get(WHOLE, [])))
    return rows


async def _time_one(client: Client, prompt: list[int]) -> Timing:
    completion = await client.complete(prompt, NUM_TOKENS)
    if not completion.gaps_ms:
        raise RequestFailedError("a request brought one event with tokens, fewer than the two to be timed")
    return Timing(completion.ttft_ms, completion.ttft_ms + completion.gaps_ms[0])


def _row(length: int, split: list[Timing], whole: list[Timing]) -> TtftRow:
    first_split, second_split = median([t.first_ms for t in split]), median([t.second_ms for t in split])
    first_whole, second_whole = median([t.first_ms for t in whole]), median([t.second_ms for t in whole])
    return TtftRow(
        length=length,
        num_requests=len(split),
        with_split_ms=first_split,
        without_split_ms=first_whole,
        ratio=ratio(first_split, first_whole),
        second_with_split_ms=second_split,
        second_without_split_ms=second_whole,
        second_token_ratio=ratio(second_split, second_whole),
        with_split_iqr_ms=spread([t.first_ms for t in split]),
        without_split_iqr_ms=spread([t.first_ms for t in whole]),
    )


def _print(report: TtftReport) -> None:
    console = Console(highlight=False)
    size = f", {report.num_parameters / 1e6:.1f} M parameters" if report.num_parameters else ""
    headings = ("tokens", "requests", "split ms", "whole ms", "ratio", "2nd: split ms", "whole ms", "ratio")
    table = Table(*(Column(heading, justify="right") for heading in headings))
    for row in report.rows:
        table.add_row(
            str(row.length),
            str(row.num_requests),
            _show(row.with_split_ms),
            _show(row.without_split_ms),
            _show(row.ratio, "×"),
            _show(row.second_with_split_ms),
            _show(row.second_without_split_ms),
            _show(row.second_token_ratio, "×"),
        )
    console.print(f"{report.model}{size}; time to first token and to the second, medians, requests interleaved")
    console.print(table)


def _show(value: float | None, unit: str = "") -> str:
    return "–" if value is None else f"{value:g}{unit}"
