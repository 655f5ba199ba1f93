"""`kvmesh status`: the fleet as the scheduler sees it."""

import asyncio
import sys

import msgspec
from rich.console import Console
from rich.table import Table

from schemas.worker import BlockCounts, FleetDescribed, WorkerLoad
from services.cli.fleet import describe_fleet
from services.cli.supervisor import running_mesh
from services.errors import MeshNotRunningError


def run_status(nats_url: str, *, as_json: bool) -> None:
    """Print the fleet. Raises UserError when there is none."""
    mesh = running_mesh()
    url = nats_url or (mesh.nats_url if mesh else "")
    if not url:
        raise MeshNotRunningError("no mesh runs here; start one with `kvmesh up`, or pass --nats URL")
    fleet = asyncio.run(describe_fleet(url))
    if as_json:
        sys.stdout.buffer.write(msgspec.json.encode(fleet) + b"\n")
        return
    console = Console(highlight=False)
    where = f"{mesh.url}/v1, " if mesh else ""
    console.print(f"{where}{url}, policy {fleet.policy}, {'ready' if fleet.ready else '[red]not ready[/red]'}")
    console.print(worker_table(fleet))
    if any(load.worker.role == "store" for load in fleet.workers):
        console.print(store_table(fleet))


def worker_table(fleet: FleetDescribed) -> Table:
    table = Table(
        "worker", "role", "state", "running", "queued", "tokens to do", "blocks free / cached / leased / total", "junk"
    )
    for load in _sorted(fleet):
        if load.worker.role != "store":
            table.add_row(
                load.worker.worker_id,
                load.worker.role,
                load.state,
                str(load.num_running),
                str(load.num_queued),
                str(load.num_uncomputed_tokens),
                _blocks(load.blocks),
                _junk(load),
            )
    return table


def store_table(fleet: FleetDescribed) -> Table:
    """Stores hold KV and compute nothing. Their blocks are those of the memory tier."""
    table = Table("store", "state", "blocks free / cached / leased / total", "junk")
    for load in _sorted(fleet):
        if load.worker.role == "store":
            table.add_row(load.worker.worker_id, load.state, _blocks(load.blocks), _junk(load))
    return table


def _sorted(fleet: FleetDescribed) -> list[WorkerLoad]:
    return sorted(fleet.workers, key=lambda load: load.worker.worker_id)


def _blocks(blocks: BlockCounts) -> str:
    return f"{blocks.free} / {blocks.cached} / {blocks.leased} / {blocks.total}"


def _junk(load: WorkerLoad) -> str:
    return str(load.num_dropped_messages + load.num_refused_reads)
