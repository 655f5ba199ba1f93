"""`kvmesh serve ROLE`: one service, configured by a file. Only worker roles import torch."""

import asyncio
import socket
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import cast

import msgspec

from schemas.ids import WorkerId, is_subject_token
from schemas.worker import WorkerRole
from services.bus.nats import NatsBus
from services.config import MeshConfig, load_config
from services.errors import UserError
from services.runtime import configure_logging, run_until_signal, watch_parent
from services.telemetry import Telemetry, open_telemetry

READY_LINE = "ready"
ERROR_PREFIX = "error: "

Start = Callable[[NatsBus, Telemetry, asyncio.Event, Callable[[], None]], Awaitable[None]]


def run_service(role: str, config_path: Path, *, service_id: str, port: int = 0, supervised: bool) -> None:
    """Serve until a signal, or, supervised, until standard input ends. Raises UserError."""
    config = load_config(config_path)
    if port:
        config = msgspec.structs.replace(config, gateway=msgspec.structs.replace(config.gateway, port=port))
    name = service_id or f"{role}-{socket.gethostname().split('.')[0]}"
    if not is_subject_token(name):
        raise UserError(f"--id {name!r} may have letters, digits, - and _ only")
    configure_logging(name)
    try:
        start = _starter(role, name, config)
        run_until_signal(lambda stop: _serve(name, config, start, stop, supervised=supervised))
    except UserError as error:
        if not supervised:
            raise
        _say(f"{ERROR_PREFIX}{error}")  # the supervisor prints it once, for all its services
        sys.exit(2)


async def _serve(name: str, config: MeshConfig, start: Start, stop: asyncio.Event, *, supervised: bool) -> None:
    watch = asyncio.create_task(watch_parent(stop), name="watch parent") if supervised else None
    telemetry = open_telemetry(name, config.telemetry)
    bus = await NatsBus.connect(config.nats.url, name, config.nats.connect_timeout_s)
    ends = asyncio.create_task(_end_with(bus, stop), name="watch the bus")
    try:
        await start(bus, telemetry, stop, lambda: _say(READY_LINE))
        if ends.done() and ends.result():
            raise UserError(f"the broker at {config.nats.url} has closed the connection for good")
    finally:
        ends.cancel()
        if watch is not None:
            watch.cancel()
        await bus.close()
        telemetry.close()


async def _end_with(bus: NatsBus, stop: asyncio.Event) -> bool:
    """Set `stop` when the broker has sent us away: without it a service is deaf, and whoever started it should know.
    False: it was we who closed."""
    await bus.closed.wait()
    if stop.is_set():
        return False
    stop.set()
    return True


def _starter(role: str, name: str, config: MeshConfig) -> Start:
    """Do what is slow (imports, the model) before the loop runs, and return what to run in it."""
    match role:
        case "gateway":
            from services.gateway.service import bind, run_gateway

            sock = bind(config.gateway.host, config.gateway.port)
            return lambda bus, telemetry, stop, ready: run_gateway(
                config, bus, telemetry, stop, sock=sock, on_ready=ready
            )
        case "scheduler":
            from services.scheduler.service import run_scheduler

            return lambda bus, telemetry, stop, ready: run_scheduler(config, bus, stop, ready)
        case "directory":
            from services.directory.service import run_directory

            return lambda bus, telemetry, stop, ready: run_directory(bus, stop, ready)
        case "store":
            from services.store.load import load_store
            from services.store.service import run_store

            store = load_store(config, name)
            return lambda bus, telemetry, stop, ready: run_store(config, store, bus, telemetry, stop, ready)
        case _:
            from services.worker.load import load_parts
            from services.worker.service import run_worker

            worker_role = cast("WorkerRole", role)
            parts = load_parts(config, worker_role, WorkerId(name))
            return lambda bus, telemetry, stop, ready: run_worker(parts, config, bus, telemetry, stop, ready)


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
