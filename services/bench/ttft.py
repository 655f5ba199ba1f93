"""`kvmesh bench ttft`: what the split costs, as a client sees it.

Two meshes run side by side on a random-weight model: one prefill and one decode worker, and two workers that do both
(the same number of processes and threads). Requests alternate between them, one at a time, each with a fresh prompt.
Time to first token is from sending the request to the first token's event; the second token shows the hand-over, as
token 0 comes from the prefill worker. The rate beside the ratio is the KV that a request hands over per second of its
time to first token: what the pair of workers moved while it computed the prompt, not what the carrier can do.
With `--large-kv` a token has as much KV as an 8B model's, and nearly all of the time is attention over it.
"""

import asyncio
import random
import sys
from typing import Any, NamedTuple

import msgspec
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table

from services.bench.drive.arguments import parse_lengths
from services.bench.drive.http_client import Client, base_url, open_http
from services.bench.drive.meshes import SPLIT, WHOLE, model_folder, split_and_whole
from services.bench.drive.random_model import LARGE_KV_SHAPE, SHAPE
from services.bench.drive.stats import median, ratio, spread
from services.bench.drive.workload import random_tokens
from services.engine.checkpoint import layout_of, read_checkpoint
from services.errors import UserError

LENGTHS = "100,1000,10000"
LARGE_KV_LENGTHS = "100,500,2000"
NUM_TOKENS = 8
WARM_UP_REQUESTS = 2


class Timing(NamedTuple):
    """The times of one request's first two tokens, in milliseconds from sending it. `handed_over_tokens`: the prompt
    tokens whose KV the decode worker read from the prefill worker."""

    first_ms: float
    second_ms: float
    handed_over_tokens: int


class TtftRow(msgspec.Struct, frozen=True, kw_only=True):
    """Medians at one prompt length. The ratios are None where there is no mesh to compare with.

    `kv_bytes`: the KV that a split request hands over; `kv_bytes_per_s`: that, per second of `with_split_ms`. None
    where the model's KV is unknown.
    """

    length: int
    num_requests: int
    with_split_ms: float | None
    without_split_ms: float | None
    ratio: float | None
    kv_bytes: int | None
    kv_bytes_per_s: float | None
    second_with_split_ms: float | None
    second_without_split_ms: float | None
    second_token_ratio: float | None
    with_split_iqr_ms: float | None = None
    without_split_iqr_ms: float | None = None


class TtftReport(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    num_parameters: int | None
    kv_bytes_per_token: int | None
    rows: tuple[TtftRow, ...]


def run_ttft(lengths: str, num_requests: int, *, large_kv: bool, url: str, as_json: bool) -> None:
    """Measure and print. Raises UserError for invalid lengths, and for `large_kv` with a gateway's `url`."""
    if url and large_kv:
        raise UserError("--large-kv is a model of our own: leave out --url")
    shape, usual = (LARGE_KV_SHAPE, LARGE_KV_LENGTHS) if large_kv else (SHAPE, LENGTHS)
    wanted = parse_lengths(lengths or usual, "--lengths", shape["context_length"] - NUM_TOKENS)
    report = asyncio.run(_measure_url(url, wanted, num_requests) if url else _measure(shape, wanted, num_requests))
    if as_json:
        sys.stdout.buffer.write(msgspec.json.encode(report) + b"\n")
    else:
        _print(report)


async def _measure(shape: dict[str, Any], lengths: list[int], num_requests: int) -> TtftReport:
    async with model_folder("", shape) as (checkpoint, num_parameters), split_and_whole(checkpoint) as urls:
        layout = layout_of(read_checkpoint(checkpoint))
        per_token = layout.block_bytes // layout.block_size
        rows = await alternate(urls, lengths, num_requests, per_token)
    return TtftReport(model="random", num_parameters=num_parameters, kv_bytes_per_token=per_token, rows=tuple(rows))


async def _measure_url(url: str, lengths: list[int], num_requests: int) -> TtftReport:
    rows = await alternate({SPLIT: base_url(url)}, lengths, num_requests)
    return TtftReport(model=url, num_parameters=None, kv_bytes_per_token=None, rows=tuple(rows))


async def alternate(
    urls: dict[str, str], lengths: list[int], num_requests: int, kv_bytes_per_token: int | None = None
) -> list[TtftRow]:
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
                rows.append(_row(length, timings[SPLIT], timings.get(WHOLE, []), kv_bytes_per_token))
    return rows


async def _time_one(client: Client, prompt: list[int]) -> Timing:
    # With its id every token is an event, also one without text: random weights give many of those.
    completion = await client.complete(prompt, NUM_TOKENS, return_token_ids=True)
    handed_over_tokens = completion.usage.kvmesh.transferred_tokens
    # A busy mesh may bring several tokens in one event: those came together.
    return Timing(completion.ttft_ms, completion.ttft_ms + sum(completion.gaps_ms[:1]), handed_over_tokens)


def _row(length: int, split: list[Timing], whole: list[Timing], kv_bytes_per_token: int | None) -> TtftRow:
    first_split, second_split = median([t.first_ms for t in split]), median([t.second_ms for t in split])
    first_whole, second_whole = median([t.first_ms for t in whole]), median([t.second_ms for t in whole])
    handed_over = median([t.handed_over_tokens for t in split])
    kv_bytes = round(handed_over * kv_bytes_per_token) if handed_over and kv_bytes_per_token else None
    return TtftRow(
        length=length,
        num_requests=len(split),
        with_split_ms=first_split,
        without_split_ms=first_whole,
        ratio=ratio(first_split, first_whole),
        kv_bytes=kv_bytes,
        kv_bytes_per_s=round(kv_bytes / first_split * 1e3) if kv_bytes and first_split else None,
        second_with_split_ms=second_split,
        second_without_split_ms=second_whole,
        second_token_ratio=ratio(second_split, second_whole),
        with_split_iqr_ms=spread([t.first_ms for t in split]),
        without_split_iqr_ms=spread([t.first_ms for t in whole]),
    )


def _print(report: TtftReport) -> None:
    console = Console(highlight=False)
    size = f", {report.num_parameters / 1e6:.1f} M parameters" if report.num_parameters else ""
    kv = f", {report.kv_bytes_per_token / 2**10:g} KiB of KV a token" if report.kv_bytes_per_token else ""
    headings = ("tokens", "reqs", "split\nms", "whole\nms", "ratio", "KV\nMiB", "MiB/s")
    headings += ("2nd:\nsplit ms", "whole\nms", "ratio")
    columns = [Column(heading, justify="right") for heading in headings]
    table = Table(*columns, box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    for row in report.rows:
        table.add_row(
            str(row.length),
            str(row.num_requests),
            _show(row.with_split_ms),
            _show(row.without_split_ms),
            _times(row.ratio),
            _show(row.kv_bytes, 2**20),
            _show(row.kv_bytes_per_s, 2**20),
            _show(row.second_with_split_ms),
            _show(row.second_without_split_ms),
            _times(row.second_token_ratio),
        )
    console.print(f"{report.model}{size}{kv}; time to first token and to the second, medians, requests interleaved")
    console.print(table)
    console.print("KV: what a request hands over; MiB/s: that, per second of the split's time to first token")


def _show(value: float | None, unit: float = 1) -> str:
    return "–" if value is None else f"{value / unit:.1f}"


def _times(value: float | None) -> str:
    return "–" if value is None else f"{value:g}×"
