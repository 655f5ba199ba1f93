"""`kvmesh bench ttft`: what the split costs, as a client sees it.

Two meshes run side by side on a random-weight model: one prefill and one decode worker, and two workers that do both
(the same number of processes and threads). Requests alternate between them, one at a time, each with a fresh prompt.
Time to first token is from sending the request to the first token's event; the second token shows the hand-over, as
token 0 comes from the prefill worker.
"""

import asyncio
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table

from services.bench.meshes import SPLIT, WHOLE, model_of, split_and_whole
from services.errors import UserError

NUM_TOKENS = 8
WARM_UP_REQUESTS = 2
SHAPE: dict[str, Any] = {
    "hidden": 256,
    "num_layers": 6,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 64,
    "intermediate": 768,
    "vocab": 1024,
    "context_length": 16_384,
}
"""About 5 million parameters: 10,000 tokens take seconds on one core, so that the whole run ends in ten minutes."""


class Timing(NamedTuple):
    """Of one request, in milliseconds from its sending."""

    first_ms: float
    second_ms: float


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Medians at one prompt length. Without a mesh to compare with, the ratios are None."""

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


class Report(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    num_parameters: int | None
    rows: tuple[Row, ...]


def run_ttft(lengths: str, num_requests: int, *, url: str, as_json: bool) -> None:
    """Measure and print. Raises UserError for lengths that are no lengths."""
    wanted = parse_lengths(lengths)
    report = asyncio.run(_measure_url(url, wanted, num_requests) if url else _measure(wanted, num_requests))
    if as_json:
        sys.stdout.buffer.write(msgspec.json.encode(report) + b"\n")
    else:
        _print(report)


def parse_lengths(text: str) -> list[int]:
    """Return the lengths of a comma-separated list. Raises UserError for what is none."""
    limit = SHAPE["context_length"] - NUM_TOKENS
    try:
        lengths = [int(length) for length in text.split(",")]
    except ValueError as error:
        raise UserError(f"--lengths {text!r}: give numbers with commas between, as in 100,1000,10000") from error
    if not all(1 <= length <= limit for length in lengths):
        raise UserError(f"--lengths must lie between 1 and {limit}")
    return lengths


async def _measure(lengths: list[int], num_requests: int) -> Report:
    with tempfile.TemporaryDirectory(prefix="kvmesh-bench-model-") as folder:
        checkpoint, num_parameters = await asyncio.to_thread(_make_checkpoint, Path(folder) / "random")
        async with split_and_whole(str(checkpoint)) as urls:
            rows = await _alternate(urls, lengths, num_requests)
        return Report(model=checkpoint.name, num_parameters=num_parameters, rows=tuple(rows))


async def _measure_url(url: str, lengths: list[int], num_requests: int) -> Report:
    rows = await _alternate({SPLIT: url.rstrip("/").removesuffix("/v1")}, lengths, num_requests)
    return Report(model=url, num_parameters=None, rows=tuple(rows))


async def _alternate(urls: dict[str, str], lengths: list[int], num_requests: int) -> list[Row]:
    """Send to each mesh in turn; the order within a round changes every round."""
    rng = random.Random(20261121)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    rows: list[Row] = []
    async with httpx.AsyncClient(timeout=600) as client:
        models = {mode: await model_of(client, url) for mode, url in urls.items()}
        with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
            for length in lengths:
                rounds = num_requests + WARM_UP_REQUESTS
                task = progress.add_task(f"{length} tokens", total=rounds * len(urls))
                timings: dict[str, list[Timing]] = {mode: [] for mode in urls}
                for number in range(rounds):
                    order = list(urls) if number % 2 else list(reversed(urls))
                    for mode in order:
                        prompt = [rng.randrange(256, SHAPE["vocab"]) for _ in range(length)]
                        timing = await _time_one(client, urls[mode], models[mode], prompt)
                        if number >= WARM_UP_REQUESTS:
                            timings[mode].append(timing)
                        progress.advance(task)
                rows.append(_row(length, timings[SPLIT], timings.get(WHOLE, [])))
    return rows


async def _time_one(client: httpx.AsyncClient, url: str, model: str, prompt: list[int]) -> Timing:
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    arrivals: list[float] = []
    started = time.perf_counter()
    async with client.stream("POST", f"{url}/v1/completions", json=body) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                if line.startswith('data: {"error"'):
                    raise UserError(f"the mesh failed a request: {line[6:]}")
                arrivals.append(time.perf_counter())
            elif response.status_code != 200 and line:
                raise UserError(f"the gateway refused a request: {line}")
    if len(arrivals) < 2:
        raise UserError(f"a request brought {len(arrivals)} events, fewer than the two to be timed")
    return Timing((arrivals[0] - started) * 1e3, (arrivals[1] - started) * 1e3)


def _row(length: int, split: list[Timing], whole: list[Timing]) -> Row:
    first_split, second_split = _median([t.first_ms for t in split]), _median([t.second_ms for t in split])
    first_whole, second_whole = _median([t.first_ms for t in whole]), _median([t.second_ms for t in whole])
    return Row(
        length=length,
        num_requests=len(split),
        with_split_ms=first_split,
        without_split_ms=first_whole,
        ratio=_ratio(first_split, first_whole),
        second_with_split_ms=second_split,
        second_without_split_ms=second_whole,
        second_token_ratio=_ratio(second_split, second_whole),
        with_split_iqr_ms=_spread([t.first_ms for t in split]),
        without_split_iqr_ms=_spread([t.first_ms for t in whole]),
    )


def _median(values: list[float]) -> float | None:
    return round(statistics.median(values), 2) if values else None


def _spread(values: list[float]) -> float | None:
    """Return the interquartile range."""
    if len(values) < 4:
        return None
    quarters = statistics.quantiles(values, n=4)
    return round(quarters[2] - quarters[0], 2)


def _ratio(numerator: float | None, denominator: float | None) -> float | None:
    return round(numerator / denominator, 3) if numerator and denominator else None


def _make_checkpoint(folder: Path) -> tuple[Path, int]:
    from services.engine.make_checkpoint import make_random_checkpoint  # noqa: PLC0415  (imports torch)

    path = make_random_checkpoint(folder, **SHAPE)
    num_bytes = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    return path, num_bytes // 4


def _print(report: Report) -> None:
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
