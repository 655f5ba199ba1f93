"""`kvmesh top`: the mesh live in a terminal, drawn from messages on the bus and from questions to a scheduler."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from statistics import quantiles
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Column, Table
from rich.text import Text

from schemas import subjects
from schemas.ids import WorkerId
from schemas.message import Message
from schemas.observe import AttachedServer, DescribeWorker
from schemas.subjects import Subject
from schemas.worker import BlockCounts, DescribeFleet, WorkerLoad, WorkerRole
from services.bus.base import BusError
from services.bus.nats import NatsBus
from services.bus.typed import Received, TypedBus
from services.cli.board import PHASES, Board
from services.cli.limits import ASK_INTERVAL_S, ASK_TIMEOUT_S, FRAME_INTERVAL_S, ONE_FRAME_AFTER_S, RATE_WINDOW_S
from services.cli.status import host_lines, servers_table
from services.runtime import now_ms
from services.trust.keys import BusAccess

MAX_PAIRS = 8
SHOWN: tuple[Subject[Any, None], ...] = (
    subjects.LOAD,
    subjects.LEFT,
    subjects.LANDED,
    subjects.ACCEPTED,
    subjects.PLACED,
    subjects.FIRST_TOKEN,
    subjects.RESUMED,
    subjects.FINISHED,
    subjects.FAILED,
    subjects.CANCELLED,
)
POOL_WIDTH = 16
POOL = (("running", "█", "green"), ("leased", "▓", "magenta"), ("cached", "▒", "cyan"), ("free", "·", "dim"))
"""States of blocks, and how each is drawn in a worker's bar."""


async def watch(access: BusAccess, stop: asyncio.Event, *, once: bool) -> None:
    """Draw until `stop`; with `once`, or without a terminal, draw one frame. Raises UserError where no broker
    answers."""
    board, console = Board(time.monotonic()), Console(highlight=False)
    async with listening(access, board):
        if once or not console.is_terminal:
            await _sleep_or(stop, ONE_FRAME_AFTER_S)
            console.print(frame(board, time.monotonic(), access.shown))
            return
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while not stop.is_set():
                live.update(frame(board, time.monotonic(), access.shown), refresh=True)
                await _sleep_or(stop, FRAME_INTERVAL_S)


@asynccontextmanager
async def listening(access: BusAccess, board: Board) -> AsyncGenerator[None]:
    """Keep the board up to date while the block runs. Raises UserError where no broker answers."""
    bus = TypedBus(await NatsBus.connect(access, "kvmesh-top"), "top")
    async with asyncio.TaskGroup() as tasks:
        await _listen(bus, tasks, board)
        asking = tasks.create_task(_ask(bus, board))
        try:
            yield
        finally:
            asking.cancel()
            await bus.close()


async def _listen(bus: TypedBus, tasks: asyncio.TaskGroup, board: Board) -> None:
    def receive(received: Received[Message]) -> None:
        board.add_message(received.message, time.monotonic(), now_ms())

    for subject in SHOWN:
        await bus.listen(tasks, subject, ("*",) * len(subject.ids), receive)
    await bus.connection.flush()


async def _ask(bus: TypedBus, board: Board) -> None:
    """Ask the scheduler for the policy and whether a request could be placed, and holders for the servers that are
    attached, which nobody publishes."""
    while True:
        try:
            fleet = await bus.ask(subjects.FLEET, (), DescribeFleet(), ASK_TIMEOUT_S)
        except BusError:
            board.policy, board.is_ready = "", False
        else:
            board.policy, board.is_ready = fleet.policy, fleet.ready
        stores = [worker_id for worker_id, (_, load) in board.loads.items() if load.worker.role == WorkerRole.STORE]
        board.servers = {worker_id: await _servers_of(bus, worker_id) for worker_id in stores}
        await asyncio.sleep(ASK_INTERVAL_S)


async def _servers_of(bus: TypedBus, worker_id: WorkerId) -> tuple[AttachedServer, ...]:
    try:
        return (await bus.ask(subjects.WORKER_STATUS, (worker_id,), DescribeWorker(), ASK_TIMEOUT_S)).servers
    except BusError:
        return ()


async def _sleep_or(stop: asyncio.Event, seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await stop.wait()


def frame(board: Board, now_s: float, nats_url: str) -> RenderableType:
    """Return one frame, at most 80 columns wide."""
    workers = list(board.workers(now_s))
    parts: list[RenderableType] = [
        _head(board, nats_url),
        _requests(board, now_s),
        Text(),
        _workers(workers),
        _legend(),
        *(Text(line, style="dim") for line in host_lines(load for load, _ in workers)),
    ]
    if servers := [server for of_holder in board.servers.values() for server in of_holder]:
        parts += [Text(), servers_table(servers)]
    if board.pairs:
        parts += [Text(), _transfers(board, now_s)]
    loads = [load for load, _ in workers]
    if (reads := _reads(loads)) is not None:
        parts += [Text(), reads]
    parts += [Text(), *_troubles(board, loads, now_s)]
    return Group(*parts)


def _head(board: Board, nats_url: str) -> Text:
    state = ("ready", "green") if board.is_ready else ("not ready", "red")
    policy = f"policy {board.policy}" if board.policy else "no scheduler answers"
    return Text.assemble(("kvmesh top", "bold"), f"  {nats_url}  {policy}  ", state, time.strftime("  %H:%M:%S"))


def _requests(board: Board, now_s: float) -> Text:
    phases = board.phases(now_s)
    line = Text.assemble(("requests", "bold"))
    for phase in PHASES:
        line.append(f"  {phases[phase]} {phase}", style="" if phases[phase] else "dim")
    line.append(f"   {board.finished.per_s(now_s):.1f} finished/s  {board.tokens.per_s(now_s):,.0f} tokens/s")
    if len(board.ttfts_ms) > 1:
        cuts = quantiles(board.ttfts_ms, n=10, method="inclusive")
        line.append(f"\nTTFT      p50 {cuts[4]:,.0f} ms  p90 {cuts[8]:,.0f} ms  of the last {len(board.ttfts_ms)}")
    return line


def _workers(workers: list[tuple[WorkerLoad, bool]]) -> Table:
    headings = ("run", "wait", "dup", "to do", "step ms")
    table = Table(
        "worker", "role", "state", *(Column(name, justify="right") for name in headings), "KV blocks",
        *(Column(name, justify="right") for name in ("used", "cached")), box=None, padding=(0, 1, 0, 0),
        header_style="dim",
    )  # fmt: skip
    for load, is_quiet in workers:
        state = Text("silent", style="red") if is_quiet else Text(load.state, style=_STATE_STYLES.get(load.state, ""))
        step_ms, blocks = load.rates.decode_step_ms, load.blocks
        used, cached = ((blocks.running + blocks.leased) / max(1, blocks.total), blocks.cached / max(1, blocks.total))
        table.add_row(
            Text(load.worker.worker_id, overflow="ellipsis", no_wrap=True),
            load.worker.role, state, str(load.num_running), str(load.num_queued),
            str(load.num_waiting_for_duplicate or ""), str(load.num_uncomputed_tokens),
            f"{step_ms:.1f}" if step_ms else "", pool_bar(blocks), f"{used:.0%}", f"{cached:.0%}",
        )  # fmt: skip
    return table


_STATE_STYLES = {"ready": "green", "draining": "yellow", "starting": "yellow"}


def pool_bar(blocks: BlockCounts) -> Text:
    """Return the bar of a worker's blocks. Every state that has a block gets at least one character."""
    shares = [getattr(blocks, name) / max(1, blocks.total) for name, _, _ in POOL]
    widths = [max(1, round(share * POOL_WIDTH)) if share else 0 for share in shares]
    widths[widths.index(max(widths))] += POOL_WIDTH - sum(widths)
    return Text.assemble(
        *((mark * width, style) for (_, mark, style), width in zip(POOL, widths, strict=True) if width)
    )


def _legend() -> Text:
    return Text("  ".join(f"{mark} {name}" for name, mark, _ in POOL), style="dim", justify="right")


def _transfers(board: Board, now_s: float) -> Table:
    busiest = sorted(board.pairs.items(), key=lambda item: -item[1].last_s)[:MAX_PAIRS]
    table = Table(
        "KV handed over", "by", *(Column(name, justify="right") for name in ("per s", "MiB/s", "mean KiB")),
        box=None, padding=(0, 2, 0, 0), header_style="dim",
    )  # fmt: skip
    for (source, target), pair in sorted(busiest):
        per_s, bytes_per_s = pair.transfers.per_s(now_s), pair.num_bytes.per_s(now_s)
        mean = f"{bytes_per_s / per_s / 2**10:,.0f}" if per_s else ""
        table.add_row(f"{source} → {target}", pair.carrier, f"{per_s:.1f}", f"{bytes_per_s / 2**20:,.1f}", mean)
    return table


def _reads(loads: list[WorkerLoad]) -> Table | None:
    """Return the table of measured read rates; None where no worker has measured one."""
    rates = [(load.worker.worker_id, rate) for load in loads for rate in load.rates.transfers]
    if not rates:
        return None
    table = Table(
        "KV read under a lease", "by", *(Column(name, justify="right") for name in ("link MiB/s", "wait ms")),
        box=None, padding=(0, 2, 0, 0), header_style="dim",
    )  # fmt: skip
    for reader, rate in rates[:MAX_PAIRS]:
        rates_of = (f"{rate.bytes_per_s / 2**20:,.0f}", f"{rate.latency_ms:.1f}")
        table.add_row(f"{rate.source} → {reader}", rate.carrier, *rates_of)
    return table


def _troubles(board: Board, loads: list[WorkerLoad], now_s: float) -> Iterator[Text]:
    """Yield the lines on ended requests, failures, and refused or dropped messages."""
    began = time.strftime("%H:%M:%S", time.localtime(time.time() - (now_s - board.began_s)))
    ends = ", ".join(f"{board.ends[name]} {name}" for name in ("finished", "cancelled", "failed"))
    yield Text.assemble(
        (f"since {began}", "bold"),
        f"  {ends}, {board.num_resumed} resumed, {board.num_moved} moved; rates over {RATE_WINDOW_S:.0f} s",
    )
    if board.failures:
        yield Text("failures  " + ", ".join(f"{code} {num}" for code, num in board.failures.most_common()), style="red")
    if died := [f"{load.worker.worker_id} {load.engine.num_deaths}" for load in loads if load.engine.num_deaths]:
        yield Text("engines   that have died: " + ", ".join(died), style="yellow")
    refused, dropped = sum(load.num_refused_reads for load in loads), sum(load.num_dropped_messages for load in loads)
    if refused or dropped:
        yield Text(f"refused   {refused} reads; {dropped} messages dropped by workers", style="yellow")
    if orphaned := sum(load.blocks.orphaned for load in loads):
        yield Text(f"leaked    {orphaned} blocks that no request knows of", style="red")
