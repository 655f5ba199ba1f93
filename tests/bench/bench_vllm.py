"""The mesh on vLLM beside vLLM itself: `make vllm-bench`, or `python -m tests.bench.bench_vllm` in .venv-vllm.

    alone   one worker of ours and vLLM's own server
    token   where the time of a decoded token goes on these two: CPU time by thread and process
    split   prefill and decode on two workers of ours, and two workers that do both
    peers   the same split and vLLM's own: with NIXL's connector, and with one over plain TCP (`tcp_connector.py`)
    turns   later turns of conversations, on our workers and on two servers behind a router with session affinity
    copies  how much of a step the copies between vLLM's blocks and the arena take
    loop    how late an event loop is beside vLLM's steps

Every worker and every server has one thread to compute with; no process is pinned, on either side. What is compared is
up at the same time, and has its load in turn.
"""

import argparse
import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table

from services.bench.drive.http_client import Client, open_http
from services.bench.drive.meshes import SPLIT, WHOLE, model_folder, running, urls_of
from services.bench.drive.progress_bar import progress
from services.bench.drive.random_model import SHAPE, make_model
from services.engine.vllm_engine.formats import installed_version
from services.errors import UserError
from services.launch.options import Launch
from services.launch.supervisor import Supervisor
from tests.bench import side_by_side
from tests.bench.bench_proof import TIMES
from tests.bench.gpu_report import Row, cells
from tests.bench.vllm_inside import TIMER_S, copy_times, in_a_process, lateness
from tests.bench.vllm_load import Load, Period, compared, in_turn
from tests.bench.vllm_peers import (
    NIXL,
    NUM_THREADS,
    OURS,
    TCP,
    THEIRS,
    Process,
    ServerOptions,
    missing_nixl,
    on_vllm,
    prefill_and_decode,
    server,
    started,
)
from tests.bench.vllm_profile import decoded, group_pids, rows_of
from tests.bench.vllm_turns import TurnsPlan, measure_turns
from tests.mesh.faults.actor import engines_of

MIB = 1 << 20
SPLIT_AIMS = {100: 1.25, 1_000: 1.10, 10_000: 1.05}
LATE_MS = 5.0
COPIES_SHARE = 0.03
MODELS: dict[str, dict[str, Any]] = {
    "3 M": {"hidden": 256, "num_layers": 4, "heads": 8, "kv_heads": 4, "head_dim": 32, "intermediate": 512},
    "30 M": {"hidden": 512, "num_layers": 8, "heads": 8, "kv_heads": 4, "head_dim": 64, "intermediate": 1_536},
    "150 M": {"hidden": 768, "num_layers": 18, "heads": 12, "kv_heads": 4, "head_dim": 64, "intermediate": 2_304},
}
VOCABULARIES = {"3 M": 1_024, "30 M": 8_192, "150 M": 16_384}
KNOWN = {"600 M": "qwen3-0.6b"}


class Sizes(NamedTuple):
    """How much is measured."""

    loads: tuple[Load, ...]
    load_rounds: int
    token_answer: int
    token_rounds: int
    lengths: tuple[int, ...]
    split_requests: int
    split_starts: int
    peer_load: Load
    peer_rounds: int
    turns: TurnsPlan
    models: tuple[str, ...]
    copy_tokens: int
    copy_rounds: int
    loop_s: float
    loop_rounds: int


FULL = Sizes(
    loads=(Load(1, 10, 1_000, 32), Load(4, 24, 1_000, 32), Load(0, 48, 1_000, 32, at_once=16)),
    load_rounds=5,
    token_answer=400,
    token_rounds=5,
    lengths=(100, 1_000, 10_000),
    split_requests=10,
    split_starts=3,
    peer_load=Load(4, 40, 1_000, 32),
    peer_rounds=3,
    turns=TurnsPlan(3, 8, 3_000, 5, 256 * MIB, 120 * MIB),
    models=(*MODELS, *KNOWN),
    copy_tokens=1_000,
    copy_rounds=5,
    loop_s=10.0,
    loop_rounds=3,
)
QUICK = Sizes(
    loads=(Load(4, 4, 200, 8), Load(0, 8, 200, 8, at_once=4)),
    load_rounds=1,
    token_answer=16,
    token_rounds=1,
    lengths=(100, 400),
    split_requests=2,
    split_starts=1,
    peer_load=Load(4, 4, 200, 8),
    peer_rounds=1,
    turns=TurnsPlan(1, 4, 400, 3, 64 * MIB, 48 * MIB),
    models=("3 M",),
    copy_tokens=200,
    copy_rounds=2,
    loop_s=1.0,
    loop_rounds=1,
)


@asynccontextmanager
async def _worker_and_server(folder: Path) -> AsyncGenerator[tuple[Supervisor, Process]]:
    """Run a mesh of one aggregated worker and vLLM's own server."""
    async with AsyncExitStack() as stack:
        model, _ = await stack.enter_async_context(model_folder(""))
        options = on_vllm(Launch(num_prefill=0, num_decode=0, num_aggregated=1), model)
        supervisors = await stack.enter_async_context(running({OURS: options}))
        theirs = server(ServerOptions(name="vllm", model=model), folder)
        with progress("starting vLLM's server"):
            await stack.enter_async_context(started([theirs]))
        yield supervisors[OURS], theirs


async def measure_alone(sizes: Sizes, folder: Path) -> list[Row]:
    async with _worker_and_server(folder) as (ours, theirs):
        urls = {OURS: ours.url, THEIRS: theirs.url}
        found = await _loaded(urls, sizes.loads, sizes.load_rounds, "rounds of `alone`")
    rows: list[Row] = []
    for load, sides in found.items():
        rows += [
            _compared(f"TTFT mean, {load.words}", sides, lambda one: one.ttft_ms, "ms", 1.15),
            _compared(f"per token, {load.words}", sides, lambda one: one.ms_per_token, "ms", 1.05),
        ]
        if not load.per_s:
            pair = [[one.tokens_per_s for one in side] for side in sides.values()]
            rows.append(compared(f"throughput, {load.words}", list(sides), pair, "tokens/s", 0.9, "more"))
    return rows


async def measure_token(sizes: Sizes, folder: Path) -> list[Row]:
    async with _worker_and_server(folder) as (ours, theirs), open_http() as http:
        clients = {name: await Client.open(http, url) for name, url in ((OURS, ours.url), (THEIRS, theirs.url))}
        services = [child.process.pid for child in ours.children]
        engines = [engine for pid in services for engine in engines_of(pid)]
        pids = {OURS: [*services, *engines], THEIRS: group_pids(theirs.pid)}
        with progress("rounds of `token`", (sizes.token_rounds + 1) * len(clients)) as on_answer:
            found = await decoded(clients, pids, sizes.token_answer, sizes.token_rounds, SHAPE["vocab"], on_answer)
    return rows_of(found)


async def measure_split(sizes: Sizes, folder: Path) -> list[Row]:
    @asynccontextmanager
    async def start() -> AsyncGenerator[Mapping[str, Client]]:
        async with running(meshes) as supervisors, open_http() as http:
            yield {name: await Client.open(http, url) for name, url in urls_of(supervisors).items()}

    num_rounds = side_by_side.num_rounds(sizes.lengths, sizes.split_requests, sizes.split_starts)
    async with model_folder("") as (model, _):
        whole = Launch(num_prefill=0, num_decode=0, num_aggregated=2)
        meshes = {SPLIT: on_vllm(Launch(), model), WHOLE: on_vllm(whole, model)}
        with progress("rounds of `split`", num_rounds) as on_round:
            measured = await side_by_side.compare(
                start, TIMES, sizes.lengths, sizes.split_requests, sizes.split_starts, on_round
            )
    times = {(row.mesh, row.num_tokens, what): timed for row in measured for what, timed in row.times.items()}
    rows: list[Row] = []
    for length in sizes.lengths:
        for what, aim in (("first", SPLIT_AIMS.get(length)), ("second", None)):
            split, whole = times[SPLIT, length, what], times[WHOLE, length, what]
            starts = f"{min(split.ratios_by_start):.2f}–{max(split.ratios_by_start):.2f}"
            result = f"split {split.median_ms:,.1f}, whole {whole.median_ms:,.1f} ms; by start {starts}"
            rows.append(
                Row(what=f"{what} token, {length:,} tokens", result=result, ratio=split.ratio, aim=aim, better="less")
            )
    return rows


async def measure_peers(sizes: Sizes, folder: Path) -> list[Row]:
    rows: list[Row] = []
    async with model_folder("") as (model, _), running({OURS: on_vllm(Launch(), model)}) as supervisors:
        for name, transfer in (("NIXL", NIXL), ("TCP", TCP)):
            if transfer is NIXL and (missing := missing_nixl()):
                rows.append(Row(what=f"vLLM's split, {name}", error=missing))
                continue
            logs = folder / name
            logs.mkdir()
            async with AsyncExitStack() as stack:
                with progress(f"starting vLLM's prefill and decode server, {name}"):
                    url = await stack.enter_async_context(prefill_and_decode(model, transfer, logs))
                theirs = f"vLLM with {name}"
                found = await _loaded(
                    urls_of(supervisors) | {theirs: url}, [sizes.peer_load], sizes.peer_rounds, f"rounds with {name}"
                )
            sides = found[sizes.peer_load]
            rows += [
                _compared(f"TTFT mean, {name}", sides, lambda one: one.ttft_ms, "ms", 0.5),
                _compared(f"TTFT p99, {name}", sides, lambda one: one.ttft_p99_ms, "ms", 0.5),
                _compared(f"per token, {name}", sides, lambda one: one.ms_per_token, "ms", None),
            ]
    return rows


async def measure_copies(sizes: Sizes, folder: Path) -> list[Row]:
    rows: list[Row] = []
    for name in sizes.models:
        with tempfile.TemporaryDirectory(dir=folder) as place, progress(f"copies, {name} parameters"):
            model = await asyncio.to_thread(_model, name, Path(place))
            times = await asyncio.to_thread(in_a_process, copy_times, model, sizes.copy_tokens, sizes.copy_rounds)
        copied_ms = times.save_ms + times.load_ms
        part = copied_ms / times.step_ms
        rows.append(
            Row(
                what=f"{name} parameters, {times.kv_bytes_per_token / 1024:g} KiB of KV a token",
                result=f"saved {times.save_ms:.2f}, loaded {times.load_ms:.2f} of {times.step_ms:,.1f} ms: {part:.1%}",
                ratio=part,
                aim=COPIES_SHARE,
                better="less",
            )
        )
    return rows


async def measure_loop(sizes: Sizes, folder: Path) -> list[Row]:
    async with model_folder("") as (model, _):
        with progress("how late a loop is"):
            found = await asyncio.to_thread(in_a_process, lateness, model, 1_000, sizes.loop_s, sizes.loop_rounds)
    beside, idle = median(one.beside_ms for one in found), median(one.idle_ms for one in found)
    worst = max(one.beside_ms for one in found)
    result = f"beside steps {beside:.2f}, idle {idle:.2f} ms; the worst round {worst:.2f}; of {LATE_MS:g} ms"
    what = f"a timer of {TIMER_S * 1e3:g} ms is late, p99"
    return [Row(what=what, result=result, ratio=beside / LATE_MS, aim=1.0, better="less")]


async def _turns(sizes: Sizes, folder: Path) -> list[Row]:
    return await measure_turns(sizes.turns, folder)


PARTS: dict[str, Callable[[Sizes, Path], Awaitable[list[Row]]]] = {
    "alone": measure_alone,
    "token": measure_token,
    "split": measure_split,
    "peers": measure_peers,
    "turns": _turns,
    "copies": measure_copies,
    "loop": measure_loop,
}


async def _loaded(
    urls: Mapping[str, str], loads: tuple[Load, ...] | list[Load], num_rounds: int, what: str
) -> dict[Load, dict[str, list[Period]]]:
    async with open_http() as http:
        clients = {name: await Client.open(http, url) for name, url in urls.items()}
        with progress(what, num_rounds * len(loads) * len(clients)) as on_period:
            return await in_turn(clients, loads, num_rounds, SHAPE["vocab"], on_period)


def _compared(
    what: str, sides: Mapping[str, list[Period]], of: Callable[[Period], float], unit: str, aim: float | None
) -> Row:
    return compared(what, list(sides), [list(map(of, side)) for side in sides.values()], unit, aim)


def _model(name: str, folder: Path) -> str:
    """Write a checkpoint with random weights; return its folder."""
    if name in KNOWN:
        from tests.bench.known_models import make_known_checkpoint

        return str(make_known_checkpoint(KNOWN[name], folder))
    return str(make_model(folder, SHAPE | MODELS[name] | {"vocab": VOCABULARIES[name]})[0])


async def _measure(names: list[str], sizes: Sizes, on_part: Callable[[str, list[Row]], object]) -> dict[str, list[Row]]:
    """Return the rows of each part. What keeps one from being measured is its only row, and the others go on."""
    measuring, found = asyncio.current_task(), dict[str, list[Row]]()
    assert measuring is not None
    # Servers have process groups of their own: whoever ends us by a signal must leave none of them behind.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, measuring.cancel)
    for name in names:
        with tempfile.TemporaryDirectory(prefix="kvmesh-bench-vllm-") as folder:
            try:
                found[name] = await PARTS[name](sizes, Path(folder))
            except UserError as error:
                found[name] = [Row(what=name, error=str(error))]
        on_part(name, found[name])
    return found


def table(name: str, rows: list[Row]) -> Table:
    shown = Table(box=box.SIMPLE_HEAD, title=name, title_justify="left")
    for heading in ("what", "medians of the rounds"):
        shown.add_column(heading)
    for heading in ("ratio", "aim"):
        shown.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        shown.add_row(*(cell.replace("**", "") for cell in cells(row)))
    return shown


def parse_parts(text: str) -> list[str]:
    """Return the parts that are named, all where none is. Raises UserError."""
    names = text.split(",") if text else list(PARTS)
    if unknown := [name for name in names if name not in PARTS]:
        raise UserError(f"--only {', '.join(unknown)}: choose of {', '.join(PARTS)}")
    return names


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="parts, with commas between")
    parser.add_argument("--quick", action="store_true", help="sizes that only show that it runs")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    console = Console(highlight=False, stderr=options.json)
    try:
        names = parse_parts(options.only)
        version = installed_version()
    except UserError as error:
        sys.exit(str(error))
    threads = f"{NUM_THREADS} thread for each worker and server, none pinned"
    console.print(f"vLLM {version}; {os.cpu_count()} cores, {threads}; ratios are ours / theirs", soft_wrap=True)
    found = asyncio.run(
        _measure(names, QUICK if options.quick else FULL, lambda name, rows: console.print(table(name, rows)))
    )
    if options.json:
        sys.stdout.buffer.write(msgspec.json.encode(found) + b"\n")


if __name__ == "__main__":
    main()
