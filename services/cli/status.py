"""`kvmesh status`: the workers as a scheduler knows them, or one of them as it knows itself."""

import asyncio
import socket
import sys
from collections.abc import Iterable
from urllib.parse import urlsplit

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from schemas import subjects
from schemas.ids import is_subject_token
from schemas.observe import AttachedServer, DescribeWorker, WorkerDescribed
from schemas.worker import BlockCounts, FleetDescribed, WorkerLoad, WorkerRole, WorkerState
from services.bus.base import BusError
from services.bus.nats import NatsBus
from services.bus.servers import ServerSeen, sharing_a_machine
from services.bus.typed import TypedBus
from services.cli.limits import ASK_TIMEOUT_S
from services.cli.running import BusOptions, access_of, mesh_meant
from services.errors import UserError
from services.launch.known_workers import describe_fleet
from services.trust.keys import BusAccess


def run_status(options: BusOptions, worker_id: str = "", *, as_json: bool) -> None:
    """Print the workers, or what this one does. Raises UserError where nobody answers."""
    mesh = mesh_meant(options)
    access = access_of(options)
    # One worker describes itself; all workers together are described by a scheduler, as far as it knows them.
    if worker_id:
        _print_worker(asyncio.run(_describe_worker(access, worker_id)), as_json=as_json)
        return
    fleet = asyncio.run(describe_fleet(access))
    servers = asyncio.run(_survey(access)) if len(access.servers) > 1 and not as_json else []
    if as_json:
        sys.stdout.buffer.write(msgspec.json.encode(fleet) + b"\n")
        return
    # Addresses and restarts come from mesh.json: show them only where that mesh uses this broker.
    console = Console(highlight=False)
    if mesh is not None and access.url != mesh.nats_url:
        mesh = None  # it is another one that is asked for
    where = "".join(f"{gateway}/v1, " for gateway in (mesh.url, *mesh.other_urls)) if mesh else ""
    # A mesh that servers attach to has no workers, and is ready for none.
    has_workers = any(load.worker.role != WorkerRole.STORE for load in fleet.workers)
    if mesh is not None and not mesh.url and not has_workers:
        console.print(f"{access.shown}, for servers that attach")
    else:
        state = "ready" if fleet.ready else "[red]not ready[/red]"
        console.print(f"{where}{access.shown}, policy {fleet.policy}, {state}")
        console.print(worker_table(fleet))
    if any(load.worker.role == WorkerRole.STORE for load in fleet.workers):
        console.print(store_table(fleet))
    for line in (*host_lines(fleet.workers), *device_lines(fleet)):
        console.print(line)
    if servers:
        console.print(server_table(servers))
        for line in server_lines(servers):
            console.print(line)
    # Below the tables: a line for each thing that is unusual, such as restarts, clocks that differ, orphaned blocks.
    if mesh is not None and mesh.restarts:
        console.print("started again: " + ", ".join(f"{name} {n}×" for name, n in sorted(mesh.restarts.items())))
    if mesh is not None and mesh.resting:
        console.print(f"[red]ends too often, and is tried again after pauses: {', '.join(mesh.resting)}[/red]")
    for line in (*clock_lines(fleet), *engine_lines(fleet)):
        console.print(line)
    if orphaned := {load.worker.worker_id: n for load in _sorted(fleet) if (n := load.blocks.orphaned)}:
        listed = ", ".join(f"{worker_id} {n}" for worker_id, n in orphaned.items())
        console.print(f"[red]blocks that no request knows of: {listed}[/red]")


async def _survey(access: BusAccess) -> list[ServerSeen]:
    """Return what is known of each server of a broker. Raises UserError where none answers."""
    connection = await NatsBus.connect(access, "kvmesh-status")
    try:
        return await connection.survey()
    except BusError as error:
        raise UserError(f"the broker at {access.shown} does not answer ({error.reason})") from error
    finally:
        await connection.close()


async def _describe_worker(access: BusAccess, worker_id: str) -> WorkerDescribed:
    connection = await NatsBus.connect(access, "kvmesh-status")
    try:
        if not is_subject_token(worker_id):
            raise UserError(f"no worker is called {worker_id!r}")
        bus = TypedBus(connection, "status")
        return await bus.ask(subjects.WORKER_STATUS, (worker_id,), DescribeWorker(), ASK_TIMEOUT_S)
    except BusError as error:
        raise UserError(f"{worker_id} does not answer ({error.reason}): `kvmesh status` shows who is there") from error
    finally:
        await connection.close()


def _print_worker(described: WorkerDescribed, *, as_json: bool) -> None:
    """Print what a worker has to do, and its last steps."""
    if as_json:
        sys.stdout.buffer.write(msgspec.json.encode(described) + b"\n")
        return
    console = Console(highlight=False, markup=False)
    requests = Table("request", "attempt", "part", "stage", "for s", "waits for", box=None, padding=(0, 1, 0, 0))
    for held in described.requests:
        waits_for = held.reading_from or held.waiting_for
        requests.add_row(
            held.request_id, str(held.attempt), held.part, held.stage, f"{held.age_ms / 1000:.1f}", waits_for
        )
    leases = Table("lease", "reader", "blocks", "for s", "left s", box=None, padding=(0, 1, 0, 0))
    for lease in described.leases:
        times = (f"{lease.age_ms / 1000:.1f}", f"{lease.left_ms / 1000:.1f}")
        leases.add_row(lease.lease_id, lease.reader, str(lease.num_blocks), *times)
    servers = servers_table(described.servers)
    console.print(f"{described.num_requests} requests, {described.num_leases} leases")
    for table in (requests, leases, servers):
        if table.row_count:
            console.print(table)
    # Below: why a server does not share, and what of it was not shared.
    for each in described.servers:
        if said := each.why or each.canary:
            console.print(f"{each.server} at {each.url or 'no url'}: {said}", soft_wrap=True)
        if each.not_saved:
            console.print(f"{each.server} did not share: {', '.join(each.not_saved)}", soft_wrap=True)
    for line in described.last_steps:
        console.print(line, soft_wrap=True)


def servers_table(servers: Iterable[AttachedServer]) -> Table:
    """Return the table of attached servers, at most 80 columns wide. `asked`, `loaded`: tokens; the rest: blocks."""
    headings = ("asked", "loaded", "brought", "saved", "compared", "damaged", "held")
    table = Table(
        "server", "shares", *(Column(each, justify="right") for each in headings), box=None, padding=(0, 1, 0, 0)
    )
    for each in servers:
        counts = (
            each.num_asked_tokens, each.num_loaded_tokens, each.num_brought_blocks, each.num_saved_blocks,
            each.num_compared, each.num_refused, each.num_pinned + each.num_empty,
        )  # fmt: skip
        name = each.server if len(each.server) <= SHOWN_CHARS else each.server[: SHOWN_CHARS - 1] + "…"
        table.add_row(name, each.sharing, *map(str, counts))
    return table


CPU = "cpu"
SHOWN_CHARS = 16
"""Of a server's name, which is a long random one unless its user gives one."""
BLOCK_STATES = ("free", "cached", "leased", "total")


def worker_table(fleet: FleetDescribed) -> Table:
    """Return the table of all workers but stores, at most 80 columns wide. Blocks by state; `run`, `wait`: requests;
    `to do`: prompt tokens; `junk`: dropped messages and refused reads."""
    headings = ("role", "state", "run", "wait", "to do", *BLOCK_STATES, "junk")
    table = Table("worker", *(Column(name, justify="right") for name in headings), box=None, padding=(0, 1, 0, 0))
    for load in _sorted(fleet):
        if load.worker.role != WorkerRole.STORE:
            counts = (load.num_running, load.num_queued, load.num_uncomputed_tokens, *_blocks(load.blocks), _junk(load))
            table.add_row(load.worker.worker_id, load.worker.role, load.state, *map(str, counts))
    return table


def store_table(fleet: FleetDescribed) -> Table:
    """Return the table of the stores. Their blocks are those of the memory tier."""
    headings = ("state", *BLOCK_STATES, "junk")
    table = Table("store", *(Column(name, justify="right") for name in headings), box=None, padding=(0, 1, 0, 0))
    for load in _sorted(fleet):
        if load.worker.role == WorkerRole.STORE:
            table.add_row(load.worker.worker_id, load.state, *map(str, (*_blocks(load.blocks), _junk(load))))
    return table


def server_table(servers: Iterable[ServerSeen]) -> Table:
    """Return the table of a broker's servers: how many members each has, and how many servers it sees."""
    table = Table(
        "broker", Column("members", justify="right"), Column("sees", justify="right"), box=None, padding=(0, 1, 0, 0)
    )
    for each in servers:
        table.add_row(escape(each.url or "not said"), str(len(each.members)), str(each.num_seen or ""))
    return table


def server_lines(servers: Iterable[ServerSeen]) -> list[str]:
    """Return a line for each thing of a broker's servers that should not be."""
    silent = [escape(each.url) for each in servers if each.url and not each.num_seen]
    lines = [f"[red]{url} names no other server, or does not answer[/red]" for url in silent]
    addresses = {each.url: _addresses(urlsplit(each.url).hostname or "") for each in servers}
    for together in sharing_a_machine(addresses):
        lines.append(f"on one machine, and lost together: {escape(', '.join(together))}")
    return lines


def _addresses(host: str) -> set[str]:
    """Return what a name stands for; nothing where nobody knows it."""
    try:
        return {str(found[4][0]) for found in socket.getaddrinfo(host, None)} if host else set()
    except OSError:
        return set()


def host_lines(loads: Iterable[WorkerLoad]) -> list[str]:
    """Return a line for each machine with its workers and stores; no lines where there is one machine."""
    hosts: dict[str, list[str]] = {}
    for load in sorted(loads, key=lambda load: load.worker.worker_id):
        if load.worker.endpoint is not None:
            hosts.setdefault(load.worker.endpoint.host, []).append(load.worker.worker_id)
    return [f"at {escape(host)}: {', '.join(names)}" for host, names in sorted(hosts.items())] if len(hosts) > 1 else []


def device_lines(fleet: FleetDescribed) -> list[str]:
    """Return a line for each device with its workers; no lines where all run on the CPU."""
    cards: dict[str, list[str]] = {}
    for load in _sorted(fleet):
        if load.worker.role != WorkerRole.STORE:
            cards.setdefault(load.worker.device or CPU, []).append(load.worker.worker_id)
    return [] if set(cards) <= {CPU} else [f"on {device}: {', '.join(names)}" for device, names in cards.items()]


def clock_lines(fleet: FleetDescribed) -> list[str]:
    """Return a line that names the workers whose machines' clocks differ from the scheduler's; none where all agree."""
    wrong = [
        f"{load.worker.worker_id} {load.clock_ahead_ms / 1000:+.1f} s" for load in _sorted(fleet) if load.clock_ahead_ms
    ]
    return [f"clocks that differ from the scheduler's: {', '.join(wrong)}"] if wrong else []


def engine_lines(fleet: FleetDescribed) -> list[str]:
    """Return a line for each worker whose engine has died, and for each with spares; none where all live as they have
    begun, alone."""
    lines: list[str] = []
    for load in _sorted(fleet):
        engine, worker_id = load.engine, load.worker.worker_id
        if engine.num_deaths:
            now = "it is starting again" if load.state == WorkerState.STARTING else "there is one again"
            lines.append(f"engines of {worker_id} that have died: {engine.num_deaths}; {now}")
        if engine.num_spares:
            size = engine.spare_bytes / (1 << 20)
            lines.append(f"spare engines of {worker_id}: {engine.num_spares}, {size:,.0f} MiB of memory of their own")
    return lines


def _sorted(fleet: FleetDescribed) -> list[WorkerLoad]:
    return sorted(fleet.workers, key=lambda load: load.worker.worker_id)


def _blocks(blocks: BlockCounts) -> tuple[int, int, int, int]:
    return (blocks.free, blocks.cached, blocks.leased, blocks.total)


def _junk(load: WorkerLoad) -> int:
    return load.num_dropped_messages + load.num_refused_reads
