"""Runs a broker and one process for each service: starts them, starts them again when they end, stops them in order."""

import asyncio
import contextlib
import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
from rich.markup import escape
from rich.progress import Progress

from dataplane.addresses import (
    EVERYWHERE,
    IPV4_LOOPBACK,
    MAX_PORT,
    in_url,
    interface_addresses,
    is_loopback,
    outer_address,
    own_address,
)
from dataplane.lasting import lasting_task
from dataplane.machine import available_bytes, usable_cores
from dataplane.memory.arena import remove_stale_arenas
from schemas.ids import new_id
from schemas.permissions import GUESTS
from schemas.subjects import Role
from services.bus.embedded import EmbeddedNats
from services.bus.nats import NatsBus
from services.config import (
    MIN_SECRET_CHARS,
    GatewayConfig,
    MeshConfig,
    StoreConfig,
    WorkerConfig,
    apply_environment,
    at_scale,
    child_environment,
    environment_broker,
    environment_devices,
    fresh_secret,
    is_card,
    state_dir,
    write_config,
)
from services.engine.checkpoint import Checkpoint, read_checkpoint
from services.engine.demo_model import DEMO_MODEL_DIR
from services.engine.devices import CPU, Cards, check_carrier, check_driver, plan_devices, probe_cards
from services.engine.memory import check_memory
from services.engine.starter import EngineStarter
from services.errors import BrokerRefusesError, UserError
from services.files import cut_log, open_private, private_folder, write_private
from services.launch.engine_choice import with_engine
from services.launch.known_workers import wait_known
from services.launch.limits import (
    EXIT_AGAIN,
    EXIT_DRAINED,
    LOG_BYTES,
    LOG_LOOK_S,
    START_TIMEOUT_S,
    STOP_SLACK_S,
    STOP_TIMEOUT_S,
)
from services.launch.options import JOINS, WORKER_ROLES, Launch
from services.launch.restart import Child
from services.ports import bind, free_port, is_free
from services.restarts import Restarts
from services.scheduler.placement.named import policy_named
from services.settings import changed
from services.store.load import check_memory as check_store_memory
from services.trust.certificates import ca_file
from services.trust.credentials import TenantSigner
from services.trust.keys import (
    BROKER_FILE,
    MESH_FILE,
    BusAccess,
    MeshKeys,
    credentials_file,
    key_file,
    load_role_key,
    person_access,
)
from services.trust.routes import BROKER_PORT, server_config

BROKER = "nats"
CONTENT_SECRET_FILE = "content.secret"
PLANE_PORTS = "7000-7015"
"""Where KV is served to other machines, where nobody has said it: a firewall can be told."""
PEOPLE_LIFE_S = 3650 * 24 * 3600
"""Of the credentials of who runs the mesh, on its own machine."""


class MetricsTarget(msgspec.Struct, frozen=True):
    """One entry of a Prometheus file_sd file."""

    targets: list[str]
    labels: dict[str, str]


class Supervisor:
    """Runs one mesh. Call `start_all`, which raises UserError, and always `stop_all`, which leaves no process behind.

    Services that end by themselves are started again; `say` is called with a line on each such event.
    """

    def __init__(self, launch: Launch, run_dir: Path, say: Callable[[str], None] = lambda _: None) -> None:
        self._launch = launch
        self._run_dir = run_dir
        self._say = say
        self._nats: EmbeddedNats | None = None
        self._nats_restarts = Restarts()
        self._children: list[Child] = []
        self._restarters: list[asyncio.Task[None]] = []
        self._mesh = MeshConfig()
        self._ports: list[int] = []
        self._metrics_ports: dict[str, int] = {}
        self.devices: dict[str, str] = {}
        """The device of each worker, once they start: "cpu" or "cuda:N"."""
        self.checkpoint: Checkpoint | None = None
        self.nats_url = ""
        self._starter: EngineStarter | None = None

    @property
    def keys_dir(self) -> Path:
        """Where the keys lie."""
        if self._launch.keys:
            return Path(self._launch.keys).absolute()
        # Machines that have joined keep theirs over a new start.
        return (state_dir() if self._launch.join_port else self._run_dir) / "keys"

    @property
    def join_url(self) -> str:
        """Where other machines join; empty: nowhere."""
        address = self._mesh.worker.advertise_host
        return f"tls://{in_url(address)}:{self._launch.join_port}" if self._launch.join_port else ""

    @property
    def has_open_bus(self) -> bool:
        """The broker lets anybody in."""
        return self._launch.config.nats.open

    @property
    def signer(self) -> TenantSigner:
        """What this mesh's gateways sign with."""
        return TenantSigner(load_role_key(key_file(self.keys_dir, Role.GATEWAY)).tenant_seed)

    def access(self, role: Role = Role.OBSERVER, name: str = "") -> BusAccess:
        """Return how to get to the bus: for a person, or, for benchmarks and tests, as a member of a service's role, a
        fresh one unless named. Raises UserError where the key is not there."""
        folder = self.keys_dir
        if self.has_open_bus:
            return BusAccess(self.nats_url)
        if role in GUESTS:
            return person_access(self.nats_url, credentials_file(folder, role), role)
        identity = load_role_key(key_file(folder, role)).identity(name or new_id(role))
        return BusAccess(self.nats_url, identity, ca_file(folder))

    @property
    def log_dir(self) -> Path:
        return self._run_dir / "logs"

    @property
    def trace_dir(self) -> Path:
        return self._run_dir / "traces"

    @property
    def children(self) -> list[Child]:
        return self._children

    @property
    def url(self) -> str:
        """The first gateway's address."""
        return self.urls[0] if self._ports else ""

    @property
    def urls(self) -> list[str]:
        return [_url(self._launch.config.gateway, port) for port in self._ports]

    @property
    def metrics_targets(self) -> list[MetricsTarget]:
        """The addresses of the services' metrics, for Prometheus' file discovery. A service that is started again
        keeps its own."""
        return [
            MetricsTarget(
                targets=[f"{in_url(own_address())}:{self._metrics_ports[name]}"], labels={"service": name, "role": role}
            )
            for role, name in self._launch.services
            if name in self._metrics_ports
        ]

    @property
    def broker_pid(self) -> int | None:
        """None: the broker was not started here."""
        return None if self._nats is None else self._nats.pid

    @property
    def records(self) -> dict[str, Restarts]:
        """The record of restarts of each process, the broker included where it is ours."""
        own = {} if self._nats is None else {BROKER: self._nats_restarts}
        return own | {child.name: child.restarts for child in self._children}

    async def start_all(self, progress: Progress | None = None) -> None:
        """Start everything, and return once all services are ready. Raises UserError."""
        # Check policy, store, checkpoint, devices and ports in turn: the first that cannot work ends the start.
        launch = self._launch
        policy_named(launch.config.scheduler)
        await asyncio.to_thread(check_store, store_config(launch))
        engine = "vllm" if launch.attach else launch.config.engine.name
        self.checkpoint = read_checkpoint(launch.config.model.path or str(DEMO_MODEL_DIR), engine)
        self.devices = await self._plan_devices()
        num_gateways = sum(role == "gateway" for role, _ in launch.services)
        self._ports = _free_ports(launch.config.gateway.host, launch.config.gateway.port, num_gateways)
        self._check_broker_port()
        self._metrics_ports = _distinct_ports(
            [name for role, name in launch.services if role != JOINS], taken={launch.nats_port}
        )
        self._mesh = self._config()
        at_scale(self._mesh)  # what cannot be is refused before anything is started
        self._check_memory(self._mesh)
        # Write fresh keys unless the user named some. A store's blocks outlive the mesh, and so does their secret.
        private_folder(self._run_dir, is_ours=True)
        private_folder(self.log_dir)
        if not launch.keys:
            self._make_keys()
        # Start the broker first: every service reads its address from mesh.toml.
        self.nats_url = await self._start_broker()
        self._mesh = changed(self._mesh, {"nats.url": self.nats_url})
        # A machine that joins must be reached; one that has joined starts its workers again whatever is closed.
        ways = {"worker.ways": "require"} if launch.host else {}
        write_config(changed(self._mesh, ways), self._run_dir / "mesh.toml")
        # Start all processes before waiting for any: each writes on its standard output when it is ready.
        for role, name in launch.services:
            child = Child(role, name, await self._spawn(role, name), time.monotonic())
            self._children.append(child)
            child.follow()
        await self._wait_ready(progress)
        if launch.host:
            write_config(self._mesh, self._run_dir / "mesh.toml")
        # Restart services only from here on: one that ends during the start makes the whole start fail.
        self._restarters = [
            lasting_task(partial(self._keep_running, child), f"keep {child.name} running") for child in self._children
        ]
        self._restarters.append(lasting_task(self._keep_logs_short, "keep the logs short"))
        if self._nats is not None:
            self._restarters.append(lasting_task(self._keep_broker_running, "keep the broker running"))

    def _make_keys(self) -> None:
        """Write fresh keys; where other machines join, those that are there stay. Raises UserError."""
        secret = _content_secret() if self._launch.store else ""
        if not self._launch.join_port:
            MeshKeys.fresh(content_secret=secret).save(self.keys_dir)
        elif not (self.keys_dir / MESH_FILE).exists():
            names = (own_address(), "localhost", self._mesh.worker.advertise_host, *interface_addresses())
            hosts = dict.fromkeys((*names, socket.gethostname(), *self._launch.config.gateway.hosts))
            MeshKeys.fresh(tuple(hosts), content_secret=secret).create(self.keys_dir, PEOPLE_LIFE_S)

    async def stop_all(self) -> None:
        """Stop the gateways, then all workers, the stores, and the rest. What does not stop in time is killed."""
        for task in self._restarters:
            task.cancel()
        await asyncio.gather(*self._restarters, return_exceptions=True)
        order = {"gateway": 0, **dict.fromkeys(WORKER_ROLES, 1), "store": 2, "attach": 2}
        for stage in (0, 1, 2, 3):
            await asyncio.gather(*(self._stop(c) for c in self._children if order.get(c.role, 3) == stage))
        for child in self._children:
            await child.wait_ended()
        if self._starter is not None:
            self._starter.close()
        if self._nats is not None:
            await asyncio.to_thread(self._nats.stop)
        remove_stale_arenas()

    def kill_all(self) -> None:
        """Kill all services at once. `stop_all` then returns soon."""
        for child in self._children:
            child.kill()

    async def _stop(self, child: Child) -> None:
        timeout_s = self._mesh.times.scale * (STOP_SLACK_S if child.role in WORKER_ROLES else STOP_TIMEOUT_S)
        if child.role in WORKER_ROLES:
            timeout_s += self._mesh.worker.drain_s
        if not await child.stop(timeout_s):
            self._print(f"[red]{child.name} did not stop within {timeout_s:.0f} s and was killed[/red]")

    async def _keep_running(self, child: Child) -> None:
        """Start a service again whenever it ends by itself, until it is given up."""
        while True:
            await child.wait_ended()
            if child.process.returncode == EXIT_DRAINED:
                self._print(f"[yellow]{child.name} was drained[/yellow], and is not started again")
                return
            if child.process.returncode != EXIT_AGAIN:
                await self._wait_to_restart(child.restarts, child.started_s, child.describe_end())
            try:
                child.replace(await self._spawn(child.role, child.name), time.monotonic())
            except OSError as error:  # and once more: the process that is waited for has ended already
                self._print(f"[red]{child.name} could not be started: {error}[/red]")

    async def _keep_broker_running(self) -> None:
        """Start the broker again whenever it ends, on the same port."""
        assert self._nats is not None
        port = urlsplit(self.nats_url).port
        while True:
            started_s = time.monotonic()
            code = await asyncio.to_thread(self._nats.wait_ended)
            await self._wait_to_restart(self._nats_restarts, started_s, f"{BROKER} ended with code {code}")
            try:
                # Not on a helper thread: the server is started so that it ends with the thread that started it.
                self._launch_broker(port)
            except UserError as error:
                self._print(f"[red]{error}[/red]")  # and once more: the process that is waited for has ended already

    async def _keep_logs_short(self) -> None:
        while True:
            for path in self.log_dir.glob("*.log"):
                with contextlib.suppress(OSError):
                    await asyncio.to_thread(cut_log, path, LOG_BYTES)
            await asyncio.sleep(LOG_LOOK_S)

    async def _wait_to_restart(self, restarts: Restarts, started_s: float, how_it_ended: str) -> None:
        """Report what ended, and wait until it is time to start it again."""
        wait_s = restarts.ended(started_s, time.monotonic())
        when = f"again in {wait_s:.0f} s, as it ends too often; see {self.log_dir}" if restarts.num_rests else "again"
        self._print(f"[yellow]{escape(how_it_ended)}[/yellow]; it is started {when}")
        await asyncio.sleep(wait_s)

    def _print(self, text: str) -> None:
        """Print what has happened. Whoever reads it, and whether anybody does, decides nothing here."""
        with contextlib.suppress(Exception):
            self._say(text)

    async def _plan_devices(self) -> dict[str, str]:
        asked, workers = self._launch.devices or environment_devices() or ("auto",), self._launch.workers
        cards = await probe_cards() if "auto" in asked or "cuda" in asked else Cards()
        if cards.reason and "auto" in asked:
            self._print(f"[yellow]no graphics card is used: {escape(cards.reason)}[/yellow]")
        planned = plan_devices(asked, cards, len(workers))
        check_driver(planned)
        check_carrier(self._launch.config.worker.carrier, planned)
        return dict(zip(workers, planned, strict=True))

    @property
    def _own_broker(self) -> str:
        """The URL of a broker that runs already; empty: one is started."""
        url = self._launch.nats or environment_broker()
        return "" if url == "embedded" else url

    async def _start_broker(self) -> str:
        if self._own_broker:
            await self._check_broker(self._own_broker)
            return self._own_broker
        return self._launch_broker(self._launch.nats_port or None)

    def _launch_broker(self, port: int | None) -> str:
        """Start a server, and return its URL. Raises UserError."""
        # Not on a helper thread: the server is started so that it ends with the thread that started it.
        if not self._launch.join_port:
            access = "" if self.has_open_bus else (self.keys_dir / BROKER_FILE).read_text("utf-8")
            self._nats = EmbeddedNats.launch(port, self._run_dir, access)
            return self._nats.url
        # Its configuration is read anew each time: what was revoked meanwhile stands in it.
        port, host = port or BROKER_PORT, "0.0.0.0"
        if not is_free(port, host):
            raise UserError(f"port {port} is in use: pass another --nats-port for the broker, or end what has it")
        settings = server_config(self.keys_dir, self._run_dir, host)
        self._nats = EmbeddedNats.launch(port, self._run_dir, settings, host=host)
        return f"tls://{in_url(own_address())}:{port}"

    def _check_broker_port(self) -> None:
        """Raises UserError where `--nats-port` cannot be had, before anything is started."""
        port = self._launch.nats_port
        if port and self._own_broker:
            raise UserError("--nats-port is the embedded server's: leave it out with --nats URL")
        if port in self._ports:
            raise UserError(f"port {port} is a gateway's: pass another --nats-port or --port")

    async def _check_broker(self, url: str) -> None:
        """Raises UserError where a broker of one's own does not answer, does not know our keys, or lets anybody in."""
        folder = Path(self._launch.keys)
        ca = ca_file(folder) if self._launch.keys else None
        try:
            bus = await NatsBus.connect(BusAccess(url, None, ca), "kvmesh-up")
        except BrokerRefusesError:
            if not self._launch.keys:
                raise
        else:
            await bus.close()
            if not self.has_open_bus:
                raise UserError(
                    f"the broker at {url} lets anybody in, and whoever reaches it owns the mesh: close it with what "
                    "`kvmesh bus-config DIR` writes and pass --keys DIR, or pass --open-bus"
                )
            return
        access = person_access(url, credentials_file(folder, Role.OBSERVER), Role.OBSERVER)
        await (await NatsBus.connect(access, "kvmesh-up")).close()

    def _config(self) -> MeshConfig:
        """Return the configuration that the services read, but for the broker's address. Raises UserError."""
        assert self.checkpoint is not None
        asked = apply_environment(self._launch.config)
        store, num_workers = store_config(self._launch), max(1, len(self._launch.workers))
        filled_in = {
            "nats.keys": str(self.keys_dir),
            "model.path": self.checkpoint.path,
            "model.name": asked.model.name or self.checkpoint.name,
            "gateway.port": self._ports[0] if self._ports else asked.gateway.port,
            "worker.num_threads": asked.worker.num_threads or max(1, usable_cores() // num_workers),
            "worker.device": next((device for device in self.devices.values() if is_card(device)), CPU),
            **self._plane_of(asked.worker),
            "store.url": store.url,
            "store.path": store.path,
            "telemetry.metrics_host": own_address(),
            "telemetry.trace_dir": str(self.trace_dir),
        }
        config = changed(asked, filled_in)
        # What KV is held the first server says that attaches.
        return config if self._launch.attach else with_engine(config, self.checkpoint)

    def _plane_of(self, worker: WorkerConfig) -> dict[str, str]:
        """Return where KV is served: where other machines read it, at an address and ports that they reach. Raises
        UserError."""
        is_default = worker.plane_host == IPV4_LOOPBACK
        if not (self._launch.join_port or self._launch.host):
            return {"worker.plane_host": own_address()} if is_default else {}
        plane_host = "0.0.0.0" if is_default else worker.plane_host
        advertised = worker.advertise_host or (outer_address() if plane_host in EVERYWHERE else plane_host)
        if not advertised or is_loopback(advertised):
            raise UserError("no other machine reaches this one: pass its address by --advertise-host")
        return {
            "worker.plane_host": plane_host, "worker.advertise_host": advertised,
            "worker.plane_ports": worker.plane_ports or PLANE_PORTS,
        }  # fmt: skip

    def _check_memory(self, config: MeshConfig) -> None:
        assert self.checkpoint is not None
        if self._launch.attach:
            check_store_memory(config.store)
            return
        num_workers = sum(not is_card(self.devices.get(name, CPU)) for name in self._launch.workers)
        store_bytes = config.store.memory_bytes if self._launch.store else 0
        check_memory(config, self.checkpoint, available_bytes(), num_workers=num_workers, store_bytes=store_bytes)

    async def _spawn(self, role: str, name: str) -> asyncio.subprocess.Process:
        """Start one service. It ends by itself when its standard input, a pipe from us, is closed: when we have
        ended."""
        command = ["-m", "services.cli.main", *self._arguments(role, name)]
        passed: list[int] = []
        if self._mesh.engine.process and self.devices.get(name) == CPU:
            passed.append(self._engine_starter().orders)
            command += ["--starter", str(passed[0])]
        with open_private(self.log_dir / f"{name}.log", "ab") as log:
            return await asyncio.create_subprocess_exec(
                sys.executable,
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                pass_fds=passed,
                env=child_environment(),
                start_new_session=True,  # Ctrl-C reaches us alone: the order of stopping is ours
            )

    def _arguments(self, role: str, name: str) -> list[str]:
        """Return those of `kvmesh` for a service."""
        arguments = ["serve", role, "--id", name, "--supervised", "--config", str(self._run_dir / "mesh.toml")]
        if role == JOINS:
            return [*arguments, "--keys", str(self.keys_dir), "--port", str(self._launch.join_port)]
        arguments += ["--metrics-port", str(self._metrics_ports[name])]
        if name in self.devices:
            arguments += ["--device", self.devices[name]]
        if self._launch.host:
            arguments += ["--keys", str(self.keys_dir / name)]
        if role == "gateway":
            names = [name for role, name in self._launch.services if role == "gateway"]
            arguments += ["--port", str(self._ports[names.index(name)])]
        return arguments

    def _engine_starter(self) -> EngineStarter:
        if self._starter is None:
            name, num_threads = self._mesh.engine.name, self._mesh.worker.num_threads
            self._starter = EngineStarter(name, num_threads, log_path=self.log_dir / "engines.log")
        return self._starter

    async def _wait_ready(self, progress: Progress | None) -> None:
        task = progress.add_task("starting", total=len(self._children)) if progress else None
        waits = {asyncio.create_task(c.ready.wait(), name=f"{c.name} is ready"): c for c in self._children}
        ends = {asyncio.create_task(c.wait_ended(), name=f"{c.name} has ended"): c for c in self._children}
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                pending: set[asyncio.Task[object]] = {*waits, *ends}
                while remaining := [c.name for t, c in waits.items() if not t.done()]:
                    if progress and task is not None:
                        started = len(waits) - len(remaining)
                        progress.update(task, completed=started, description=f"starting {', '.join(remaining)}")
                    done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                    for failed in [child for task, child in ends.items() if task in done]:
                        raise UserError(failed.error or f"{failed.describe_end()}; see {self.log_dir}")
                if progress and task is not None:
                    progress.update(task, completed=len(waits), description="waiting for the mesh to know them")
                others = ("gateway", "scheduler", "directory", "attach", JOINS)
                workers = {child.name for child in self._children if child.role not in others}
                await wait_known(self.access(), workers, self._launch.num_schedulers, self._launch.num_directories)
        except TimeoutError as error:
            raise UserError(f"the mesh was not ready within {START_TIMEOUT_S:.0f} s; see {self.log_dir}") from error
        finally:
            for waiting in (*waits, *ends):
                waiting.cancel()


def _content_secret() -> str:
    """Return what proves the blocks of this folder's stores, made where there is none: they outlive a mesh. Raises
    UserError."""
    path = state_dir() / CONTENT_SECRET_FILE
    try:
        if not path.exists() or path.stat().st_size < MIN_SECRET_CHARS:
            private_folder(path.parent)
            write_private(path, fresh_secret())
        return path.read_text("utf-8").strip()
    except OSError as error:
        raise UserError(f"{path}, the secret of the store's blocks, cannot be used: {error.strerror}") from error


def store_config(launch: Launch) -> StoreConfig:
    """Return the store's configuration. Raises UserError for an unknown kind of store.

    The disk tier is kept beside the run folder, which every start empties: it outlives the mesh.
    """
    store, kind = launch.config.store, launch.store
    if kind not in ("", "memory", "disk") and not _is_server_url(kind):
        kinds = "memory, disk, redis://host:port/0 or valkey://host:port/0"
        raise UserError(f"--store {kind!r} is no store: give {kinds}, or leave it out")
    url = "" if kind in ("", "memory") else kind
    return changed(store, {"url": url, "path": store.path or str(state_dir() / "store")})


def check_store(store: StoreConfig) -> None:
    """Raises UserError where the store's server does not answer: before anything is started."""
    if _is_server_url(store.url):
        from services.store.remote import ValkeyTier  # noqa: PLC0415 - as in `services.store.load`

        ValkeyTier(store.url, "", 0, timeout_s=store.timeout_ms / 1000, ttl_s=store.ttl_s).close()


def _is_server_url(text: str) -> bool:
    try:
        url = urlsplit(text)
        return url.scheme in ("redis", "valkey") and bool(url.hostname) and url.port != 0
    except ValueError:  # a port that is no number, a bracket that never closes
        return False


def _distinct_ports(names: list[str], taken: set[int]) -> dict[str, int]:
    """Return a free port for each name, none of those that are `taken`."""
    ports: set[int] = set()
    while len(ports) < len(names):
        ports |= {free_port()} - taken
    return dict(zip(names, sorted(ports), strict=True))


def _url(gateway: GatewayConfig, port: int) -> str:
    """Return where this machine reaches a gateway."""
    host = own_address() if gateway.host in EVERYWHERE else gateway.host
    return f"{'https' if gateway.tls_cert else 'http'}://{in_url(host)}:{port}"


def _free_ports(host: str, first: int, count: int) -> list[int]:
    """Return `first` and those after it, or free ones for 0. Raises UserError where one is taken."""
    if first + count - 1 > MAX_PORT:
        raise UserError(f"{count} gateways from port {first} on need ports above {MAX_PORT}; pass a smaller --port")
    with contextlib.ExitStack() as held:
        socks = [held.enter_context(bind(host, first + at if first else free_port())) for at in range(count)]
        return [int(sock.getsockname()[1]) for sock in socks]
