"""`kvmesh status`: the workers as a scheduler knows them."""

import asyncio
import sys

import msgspec
from rich.console import Console
from rich.table import Column, Table

from schemas.worker import BlockCounts, FleetDescribed, WorkerLoad
from services.cli.running import BusOptions, access_of, mesh_meant
from services.launch.known_workers import describe_fleet


def run_status(options: BusOptions, *, as_json: bool) -> None:
    """Print the workers. Raises UserError where no scheduler answers."""
    mesh = mesh_meant(options)
    access = access_of(options, mesh)
    fleet = asyncio.run(describe_fleet(access))
    if as_json:
        sys.stdout.buffer.write(msgspec.json.encode(fleet) + b"\n")
        return
    console = Console(highlight=False)
    if mesh is not None and access.url != mesh.nats_url:
        mesh = None  # it is another one that is asked for
    where = "".join(f"{gateway}/v1, " for gateway in (mesh.url, *mesh.other_urls)) if mesh else ""
    console.print(f"{where}{access.shown}, policy {fleet.policy}, {'ready' if fleet.ready else '[red]not ready[/red]'}")
    console.print(worker_table(fleet))
    if any(load.worker.role == "store" for load in fleet.workers):
        console.print(store_table(fleet))
    for line in device_lines(fleet):
        console.print(line)
    if mesh is not None and mesh.restarts:
        console.print("started again: " + ", ".join(f"{name} {n}×" for name, n in sorted(mesh.restarts.items())))
    if mesh is not None and mesh.resting:
        console.print(f"[red]ends too often, and is tried again after pauses: {', '.join(mesh.resting)}[/red]")
    for line in clock_lines(fleet):
        console.print(line)
    if orphaned := {load.worker.worker_id: n for load in _sorted(fleet) if (n := load.blocks.orphaned)}:
        listed = ", ".join(f"{worker_id} {n}" for worker_id, n in orphaned.items())
        console.print(f"[red]blocks that no request knows of: {listed}[/red]")


CPU = "cpu"
BLOCK_STATES = ("free", "cached", "leased", "total")


def worker_table(fleet: FleetDescribed) -> Table:
    """Return the table of all workers but stores, at most 80 columns wide. Blocks by state; `run`, `wait`: requests;
    `to do`: prompt tokens; `junk`: dropped messages and refused reads."""
    headings = ("role", "state", "run", "wait", "to do", *BLOCK_STATES, "junk")
    table = Table("worker", *(Column(name, justify="right") for name in headings), box=None, padding=(0, 1, 0, 0))
    for load in _sorted(fleet):
        if load.worker.role != "store":
            counts = (load.num_running, load.num_queued, load.num_uncomputed_tokens, *_blocks(load.blocks), _junk(load))
            table.add_row(load.worker.worker_id, load.worker.role, load.state, *map(str, counts))
    return table


def store_table(fleet: FleetDescribed) -> Table:
    """Return the table of the stores. Their blocks are those of the memory tier."""
    headings = ("state", *BLOCK_STATES, "junk")
    table = Table("store", *(Column(name, justify="right") for name in headings), box=None, padding=(0, 1, 0, 0))
    for load in _sorted(fleet):
        if load.worker.role == "store":
            table.add_row(load.worker.worker_id, load.state, *map(str, (*_blocks(load.blocks), _junk(load))))
    return table


def device_lines(fleet: FleetDescribed) -> list[str]:
    """Return a line for each device with its workers; no lines where all run on the CPU."""
    cards: dict[str, list[str]] = {}
    for load in _sorted(fleet):
        if load.worker.role != "store":
            cards.setdefault(load.worker.device or CPU, []).append(load.worker.worker_id)
    return [] if set(cards) <= {CPU} else [f"on {device}: {', '.join(names)}" for device, names in cards.items()]


def clock_lines(fleet: FleetDescribed) -> list[str]:
    """Return a line that names the workers whose machines' clocks differ from the scheduler's; none where all agree."""
    wrong = [
        f"{load.worker.worker_id} {load.clock_ahead_ms / 1000:+.1f} s" for load in _sorted(fleet) if load.clock_ahead_ms
    ]
    return [f"clocks that differ from the scheduler's: {', '.join(wrong)}"] if wrong else []


def _sorted(fleet: FleetDescribed) -> list[WorkerLoad]:
    return sorted(fleet.workers, key=lambda load: load.worker.worker_id)


def _blocks(blocks: BlockCounts) -> tuple[int, int, int, int]:
    return (blocks.free, blocks.cached, blocks.leased, blocks.total)


def _junk(load: WorkerLoad) -> int:
    return load.num_dropped_messages + load.num_refused_reads
