"""`kvmesh serve ROLE`: runs one service, configured by a file. Only worker roles import torch."""

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Generator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import NamedTuple, NoReturn, cast

import msgspec

from dataplane.blocks.ticket import TicketSecrets
from dataplane.lasting import lasting_task
from schemas.ids import GatewayId, WorkerId, is_subject_token
from schemas.permissions import role_of
from schemas.subjects import Role
from schemas.worker import WorkerRole
from services.bus.nats import NatsBus
from services.clocks import keep_time
from services.config import EngineName, MeshConfig, load_config, require_secrets, set_environment, with_device
from services.errors import UserError
from services.launch.limits import EXIT_AGAIN, EXIT_DRAINED
from services.launch.names import holding
from services.metric_names import BUS_CA_DAYS, HOLDERS, SERVICE_INFO, metrics_of
from services.metrics import Metrics
from services.ports import bind
from services.runtime import ASKED_FOR, configure_logging, run_until_signal, watch_parent
from services.telemetry import Telemetry, open_telemetry
from services.trust.certificates import CertificateFile, WatchedFile, ca_file, client_context
from services.trust.keys import BusAccess, Identity, RoleKey, key_file, load_role_key, with_key

log = logging.getLogger(__name__)

READY_LINE = "ready"
ERROR_PREFIX = "error: "

Start = Callable[[NatsBus, Telemetry, asyncio.Event, Callable[[], None]], Awaitable[bool | None]]
"""Runs a service until it is asked to stop. Returns whether an operator wants it to be started again; None: no operator
has asked it to leave."""


Service = tuple[Start, TicketSecrets | None]
"""What is to be run, and what a SIGHUP reads again; None: this role has no ticket secrets."""


class Overrides(NamedTuple):
    """What the command line sets in place of the configuration: ports, a worker's device, the engine, the folder of the
    keys. None or empty: nothing."""

    gateway: int | None = None
    metrics: int | None = None
    device: str = ""
    engine: EngineName | None = None
    keys: str = ""


NO_OVERRIDES = Overrides()


def run_service(
    role: str,
    config_path: Path,
    *,
    service_id: str,
    overrides: Overrides = NO_OVERRIDES,
    supervised: bool,
    starter: int | None = None,
) -> None:
    """Serve until a signal, or, supervised, until standard input ends. `starter`: as of `load_parts`. Raises
    UserError."""
    config = _overridden(load_config(config_path), overrides)
    # The name becomes a word of bus subjects, and so may have only their characters.
    name = service_id or f"{role}-{socket.gethostname().split('.')[0]}"
    if not is_subject_token(name):
        raise UserError(f"--id {name!r} may have letters, digits, - and _ only")
    # Set up logging and metrics under this name; a holder's metrics carry it as their label `worker`.
    configure_logging(name)
    metrics = Metrics(name if role in HOLDERS else "")
    metrics.prepare(metrics_of(role))
    metrics.on_sample(lambda: metrics.set_series(SERVICE_INFO, {(name,): 1}))
    try:
        # Find out who this service is on the bus; a broker that is open asks nobody for an identity.
        config = _with_engine(role, config, overrides.engine)
        key = _key_of(role, config, config_path)
        config = with_key(config, key) if key else config
        identity = key.member(name) if key and not config.nats.open else None
        ca = ca_file(config_path.parent / config.nats.keys)

        # Read the key file again at each renewal: it may have been replaced meanwhile.
        def renew() -> Identity:
            found = _key_of(role, config, config_path)
            assert found is not None and identity is not None
            return found.identity(identity.name)

        access = BusAccess(config.nats.url, identity, ca, renew if identity else None)
        start, secrets = _service(role, name, config, metrics, identity, starter)

        async def serve(stop: asyncio.Event) -> bool | None:
            path = _key_path(role, config, config_path) if key else config_path
            take = partial(_take_secrets, role, config_path, overrides)
            with _kept(path, secrets, take, config.times.bus.certificates_look_s):
                return await _serve(role, name, config, metrics, start, stop, access, supervised=supervised)

        # The exit code says what an operator wants: whether the supervisor starts this service again.
        comes_again = run_until_signal(serve)
        if comes_again is not None:
            sys.exit(EXIT_AGAIN if comes_again else EXIT_DRAINED)
    except UserError as error:
        end_with(error, supervised=supervised)


def end_with(error: UserError, *, supervised: bool) -> NoReturn:
    """End with an error: the supervisor prints it once, for all its services. Raises it where there is none."""
    if not supervised:
        raise error
    say(f"{ERROR_PREFIX}{error}")
    sys.exit(2)


def _key_of(role: str, config: MeshConfig, config_path: Path) -> RoleKey | None:
    """Return the key of a service's role; None where there is none and the broker asks nobody. Raises UserError."""
    path, wanted = _key_path(role, config, config_path), _role_on_the_bus(role)
    if config.nats.open and not path.exists():
        return None
    key = load_role_key(path)
    if key.role is not wanted:
        raise UserError(f"{path} is the key of a {key.role}, and a {role} needs that of a {wanted}")
    return key


def _key_path(role: str, config: MeshConfig, config_path: Path) -> Path:
    return key_file(config_path.parent / config.nats.keys, _role_on_the_bus(role))


def _role_on_the_bus(role: str) -> Role:
    return role_of("store" if role == "attach" else role)  # it is a store to all others


@contextlib.contextmanager
def _kept(
    path: Path, secrets: TicketSecrets | None, take: Callable[[TicketSecrets], None], look_s: float
) -> Generator[None]:
    """Go on with the ticket secrets that a file has while the block runs, whenever it is replaced, or at a SIGHUP."""
    on_hangup = asyncio.get_running_loop().add_signal_handler
    if secrets is None:
        nothing = "SIGHUP: nothing to read again; certificates are, when their files change"
        on_hangup(signal.SIGHUP, partial(log.warning, nothing, extra=ASKED_FOR))
        yield
        return
    watched = WatchedFile(path, partial(take, secrets))
    on_hangup(signal.SIGHUP, watched.reload)
    with watched.kept(look_s):
        yield


def _take_secrets(role: str, config_path: Path, overrides: Overrides, secrets: TicketSecrets) -> None:
    """Go on with the ticket secrets that the files have now. Raises UserError where they cannot be used."""
    config = _overridden(load_config(config_path), overrides)
    key = _key_of(role, config, config_path)
    found = require_secrets(with_key(config, key) if key else config)
    secrets.replace(found)
    log.warning("%d ticket secrets were read again", len(found), extra=ASKED_FOR)


async def _serve(
    role: str,
    name: str,
    config: MeshConfig,
    metrics: Metrics,
    start: Start,
    stop: asyncio.Event,
    access: BusAccess,
    *,
    supervised: bool,
) -> bool | None:
    """Run a service to its end. Returns what `Start` does."""
    # Watch what ends the service from outside: its parent, and a broker that closes the connection for good.
    watching = [asyncio.create_task(watch_parent(stop), name="watch parent")] if supervised else []
    telemetry = open_telemetry(role, name, config)
    bus = await NatsBus.connect(access, name, config.nats.connect_timeout_s, config.times)
    ends = asyncio.create_task(_end_with(bus, stop), name="watch the bus")
    if role != "scheduler":  # who gives the others the time asks other schedulers only
        keeps_time = partial(keep_time, bus, telemetry.clock, metrics, config.times.telemetry)
        watching.append(lasting_task(keeps_time, "keep the time"))
    try:
        with contextlib.ExitStack() as while_ready:
            if (ca := access.ca) is not None:
                # Whoever connects reads it each time: what is logged here is whether it can be read, and its end.
                authority = CertificateFile(ca, partial(client_context, ca))
                while_ready.enter_context(authority.kept(config.times.bus.certificates_look_s))
                metrics.on_sample(lambda: metrics.set_series(BUS_CA_DAYS, {(): authority.days_left}))

            # The service calls this once it can answer: only then are metrics served and the ready line printed.
            def on_ready() -> None:
                gc.collect()
                gc.freeze()  # what was loaded stays: a collection would look it all through, while nobody is answered
                while_ready.enter_context(_served(metrics, config))
                say(READY_LINE)

            within_s = config.times.bus.claim_within_s
            # A gateway has another name in each of its lives, which nobody else can have.
            async with contextlib.nullcontext() if role == "gateway" else holding(bus, name, stop, within_s):
                comes_again = await start(bus, telemetry, stop, on_ready)
        # Where the broker has ended the service, fail with its reason: nobody has asked for this end.
        if comes_again is None and ends.done() and ends.result():
            why = f": {bus.broker_error}" if bus.broker_error else ""
            raise UserError(f"the broker at {access.shown} has closed the connection for good{why}")
        return comes_again
    finally:
        # Cancel what uses the bus and the telemetry before both are closed.
        ends.cancel()
        for task in watching:
            task.cancel()
        await bus.close()
        telemetry.close()


@contextlib.contextmanager
def _served(metrics: Metrics, config: MeshConfig) -> Generator[None]:
    """Serve the metrics, where a port is configured, while the block runs. The server's threads end with the
    process."""
    host, port = config.telemetry.metrics_host, config.telemetry.metrics_port
    server = metrics.start_server(host, port) if port >= 0 else None
    if server is None:
        yield
        return
    interval_s = config.times.telemetry.sample_interval_s
    sampling = lasting_task(partial(metrics.keep_sampling, interval_s), "sample the metrics")
    try:
        yield
    finally:
        sampling.cancel()


def _overridden(config: MeshConfig, overrides: Overrides) -> MeshConfig:
    gateway, telemetry = config.gateway, config.telemetry
    if overrides.gateway is not None:
        gateway = msgspec.structs.replace(gateway, port=overrides.gateway)
    if overrides.metrics is not None:
        telemetry = msgspec.structs.replace(telemetry, metrics_port=overrides.metrics)
    if overrides.keys:
        nats = msgspec.structs.replace(config.nats, keys=str(Path(overrides.keys).absolute()), open=False)
        config = msgspec.structs.replace(config, nats=nats)
    if overrides.device:
        config = with_device(config, overrides.device)
    return msgspec.structs.replace(config, gateway=gateway, telemetry=telemetry)


def _with_engine(role: str, config: MeshConfig, name: EngineName | None) -> MeshConfig:
    """Return the configuration with the engine that was asked for, where the role knows what KV is."""
    if name is None or role in ("scheduler", "directory"):
        return config
    from services.launch.engine_choice import in_place_of_the_files

    return in_place_of_the_files(config, name)


async def _end_with(bus: NatsBus, stop: asyncio.Event) -> bool:
    """Set `stop` when the broker has closed the connection for good: the service would get no message any more.

    False: the connection was closed by us.
    """
    await bus.closed.wait()
    if stop.is_set():
        return False
    stop.set()
    return True


def _service(
    role: str, name: str, config: MeshConfig, metrics: Metrics, identity: Identity | None, starter: int | None
) -> Service:
    """Do what is slow (imports, loading the model) before the loop runs, and return what to run in it."""
    # Each role imports its own modules only: torch is loaded in workers alone.
    match role:
        case "gateway":
            # It has no use for torch, and transformers' loader of tokenizers would import it: 180 MiB.
            sys.modules.setdefault("torch", cast("ModuleType", None))
            set_environment({"TRANSFORMERS_NO_ADVISORY_WARNINGS": "1"})  # a line that there is no torch
            from services.gateway.service import load_model, run_gateway

            # Load the model, start the process for grammars and take the port now: no request has to wait for them.
            model = load_model(config)
            model.grammars.load_tokens()
            sock = bind(config.gateway.host, config.gateway.port)
            gateway_id = GatewayId(identity.name) if identity else None
            return lambda bus, telemetry, stop, ready: run_gateway(
                config, model, bus, telemetry, stop, sock=sock, on_ready=ready, metrics=metrics, gateway_id=gateway_id
            ), None
        case "scheduler":
            from services.scheduler.service import run_scheduler

            return lambda bus, telemetry, stop, ready: run_scheduler(config, bus, telemetry, stop, ready, metrics), None
        case "directory":
            from services.directory.service import run_directory

            return lambda bus, telemetry, stop, ready: run_directory(config, bus, telemetry, stop, ready, metrics), None
        case "store":
            from services.store.load import load_store
            from services.store.service import run_store

            # Stores and workers return the ticket secrets that they use: a SIGHUP replaces these in place.
            store = load_store(config, name)
            return (
                lambda bus, telemetry, stop, ready: run_store(config, store, bus, telemetry, stop, ready, metrics),
                store.credentials.secrets,
            )
        case "attach":
            from services.attach.service import load_attach, run_attach

            attach = load_attach(config, name)
            return (
                lambda bus, telemetry, stop, ready: run_attach(config, attach, bus, telemetry, stop, ready, metrics),
                attach.credentials.secrets,
            )
        case _:
            from services.worker.parts import load_parts
            from services.worker.service import run_worker

            worker_role = cast("WorkerRole", role)
            parts = load_parts(config, worker_role, WorkerId(name), starter)
            return (
                lambda bus, telemetry, stop, ready: run_worker(parts, config, bus, telemetry, stop, ready, metrics),
                parts.credentials.secrets,
            )


def say(line: str) -> None:
    """Print a line for whoever has started this process."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
