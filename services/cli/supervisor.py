"""`kvmesh up`: a broker and one process per service, started with progress, stopped in order, nothing left behind."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from dataplane.arena import remove_stale_arenas
from services.bus.embedded import EmbeddedNats
from services.bus.nats import NatsBus
from services.cli.fleet import wait_known
from services.cli.serve import ERROR_PREFIX, READY_LINE
from services.config import (
    Carrier,
    GatewayConfig,
    MeshConfig,
    ModelConfig,
    NatsConfig,
    SchedulerConfig,
    StoreConfig,
    TelemetryConfig,
    WireDtype,
    WorkerConfig,
    apply_environment,
    child_environment,
    fresh_secret,
    state_dir,
    write_config,
)
from services.engine.checkpoint import Checkpoint, read_checkpoint
from services.engine.demo_model import DEMO_MODEL_DIR
from services.errors import UserError
from services.scheduler.policy import policy_named

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 15.0


@dataclass(frozen=True, kw_only=True)
class UpOptions:
    """What `kvmesh up` was asked for."""

    model: str = ""
    num_prefill: int = 1
    num_decode: int = 1
    num_aggregated: int = 0
    carrier: Carrier = "auto"
    port: int = 8000
    nats: str = "embedded"
    policy: str = "cost"
    prefix_cache: bool = True
    pull_tokens_min: int = SchedulerConfig().pull_tokens_min
    unsplit_tokens_max: int = SchedulerConfig().unsplit_tokens_max
    wire_dtype: WireDtype = "same"
    store: str = ""
    """Empty: none. Else `memory`, `disk`, or the URL of a Redis or Valkey server."""
    store_bytes: int = StoreConfig().max_bytes
    store_dir: str = ""
    kv_bytes: int = 512 * 1024 * 1024
    token_budget: int = 512
    num_threads: int = 0
    otlp_endpoint: str = ""

    @property
    def services(self) -> list[tuple[str, str]]:
        """(role, name) of every process, in starting order."""
        pairs = [("scheduler", "scheduler"), ("directory", "directory")]
        if self.store:
            pairs.append(("store", "store-0"))
        for role, count in (
            ("prefill", self.num_prefill), ("decode", self.num_decode), ("aggregated", self.num_aggregated),
        ):  # fmt: skip
            pairs += [(role, f"{role}-{number}") for number in range(count)]
        return [*pairs, ("gateway", "gateway")]

    @property
    def num_workers(self) -> int:
        return self.num_prefill + self.num_decode + self.num_aggregated


class RunningMesh(msgspec.Struct, frozen=True, kw_only=True):
    """What a running `kvmesh up` leaves in its state folder for `kvmesh status` and `kvmesh trace`."""

    pid: int
    url: str
    nats_url: str
    trace_dir: str


@dataclass
class Child:
    """One service's process."""

    role: str
    name: str
    process: asyncio.subprocess.Process
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    error: str = ""

    async def read_lines(self) -> None:
        """Follow what the service says until it ends."""
        assert self.process.stdout is not None
        async for raw in self.process.stdout:
            line = raw.decode(errors="replace").strip()
            if line == READY_LINE:
                self.ready.set()
            elif line.startswith(ERROR_PREFIX):
                self.error = line.removeprefix(ERROR_PREFIX)
        await self.process.wait()

    async def stop(self) -> None:
        """Ask it to end, and make it."""
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.terminate()
            try:
                await asyncio.wait_for(self.process.wait(), STOP_TIMEOUT_S)
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    self.process.kill()
                await self.process.wait()


class Supervisor:
    """A mesh as child processes. `start` raises UserError; `stop` always leaves nothing behind."""

    def __init__(self, options: UpOptions, run_dir: Path) -> None:
        self._options = options
        self._run_dir = run_dir
        self._nats: EmbeddedNats | None = None
        self._children: list[Child] = []
        self._readers: list[asyncio.Task[None]] = []
        self.checkpoint: Checkpoint | None = None
        self.url = ""
        self.nats_url = ""

    @property
    def log_dir(self) -> Path:
        return self._run_dir / "logs"

    @property
    def trace_dir(self) -> Path:
        return self._run_dir / "traces"

    @property
    def children(self) -> list[Child]:
        return self._children

    async def start(self, progress: Progress | None = None) -> None:
        """Start everything and return when all of it is ready to serve."""
        options = self._options
        policy_named(options.policy)
        _store_config(options)
        self.checkpoint = read_checkpoint(options.model or str(DEMO_MODEL_DIR))
        remove_stale_arenas()
        port = _free_port(options.port)
        self.log_dir.mkdir(parents=True, exist_ok=True)
        self.nats_url = await self._start_broker()
        config_path = self._run_dir / "mesh.toml"
        write_config(self._config(port), config_path)
        self.url = f"http://127.0.0.1:{port}"
        for role, name in options.services:
            self._children.append(await self._spawn(role, name, config_path))
        self._readers = [asyncio.create_task(child.read_lines(), name=f"read {child.name}") for child in self._children]
        await self._wait_ready(progress)

    async def stop(self) -> None:
        """Stop intake first (the gateway), then the workers, the store, then what they talk through."""
        order = {"gateway": 0, "prefill": 1, "aggregated": 1, "decode": 2, "store": 3}
        for stage in (0, 1, 2, 3, 4):
            await asyncio.gather(*(c.stop() for c in self._children if order.get(c.role, 4) == stage))
        for reader in self._readers:
            await reader
        if self._nats is not None:
            await asyncio.to_thread(self._nats.stop)
        remove_stale_arenas()

    async def wait_for_end(self, child: Child) -> Child:
        await child.process.wait()
        return child

    async def _start_broker(self) -> str:
        if self._options.nats == "embedded":
            # Not on a helper thread: the server is told to end with the thread that started it.
            self._nats = EmbeddedNats.start(None, self._run_dir)
            return self._nats.url
        bus = await NatsBus.connect(self._options.nats, "kvmesh-up")
        await bus.close()
        return self._options.nats

    def _config(self, port: int) -> MeshConfig:
        options, checkpoint = self._options, self.checkpoint
        assert checkpoint is not None
        num_threads = options.num_threads or max(1, (os.cpu_count() or 1) // options.num_workers)
        config = MeshConfig(
            secret=fresh_secret(),
            nats=NatsConfig(url=self.nats_url),
            model=ModelConfig(path=checkpoint.path, name=checkpoint.name),
            gateway=GatewayConfig(port=port),
            scheduler=SchedulerConfig(
                policy=options.policy,
                pull_tokens_min=options.pull_tokens_min,
                unsplit_tokens_max=options.unsplit_tokens_max,
            ),
            worker=WorkerConfig(
                kv_bytes=options.kv_bytes,
                token_budget=options.token_budget,
                num_threads=num_threads,
                carrier=options.carrier,
                prefix_cache=options.prefix_cache,
                wire_dtype=options.wire_dtype,
            ),
            store=_store_config(options),
            telemetry=TelemetryConfig(otlp_endpoint=options.otlp_endpoint, trace_dir=str(self.trace_dir)),
        )
        return apply_environment(config)

    async def _spawn(self, role: str, name: str, config_path: Path) -> Child:
        """Start one service. Its standard input is a pipe from us: it ends itself when we are gone."""
        command = ["-m", "services.cli.main", "serve", role, "--config", str(config_path), "--id", name, "--supervised"]
        with (self.log_dir / f"{name}.log").open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env=child_environment(),
                start_new_session=True,  # Ctrl-C reaches us alone: the order of stopping is ours
            )
        return Child(role, name, process)

    async def _wait_ready(self, progress: Progress | None) -> None:
        task = progress.add_task("starting", total=len(self._children)) if progress else None
        waits = {asyncio.create_task(c.ready.wait()): c for c in self._children}
        ends = {asyncio.create_task(self.wait_for_end(c)): c for c in self._children}
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                pending: set[asyncio.Task[object]] = {*waits, *ends}
                while remaining := [c.name for t, c in waits.items() if not t.done()]:
                    if progress and task is not None:
                        started = len(waits) - len(remaining)
                        progress.update(task, completed=started, description=f"starting {', '.join(remaining)}")
                    done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                    for failed in [child for task, child in ends.items() if task in done]:
                        await self._raise_failed(failed)
                if progress and task is not None:
                    progress.update(task, completed=len(waits), description="waiting for the scheduler to know them")
                workers = {c.name for c in self._children if c.role not in ("gateway", "scheduler", "directory")}
                await wait_known(self.nats_url, workers)
        except TimeoutError as error:
            raise UserError(f"the mesh was not ready within {START_TIMEOUT_S:.0f} s; see {self.log_dir}") from error
        finally:
            for waiting in (*waits, *ends):
                waiting.cancel()

    async def _raise_failed(self, child: Child) -> None:
        await self._readers[self._children.index(child)]  # its last line may say why
        reason = child.error or f"{child.name} ended with code {child.process.returncode}; see {self.log_dir}"
        raise UserError(reason)


def _store_config(options: UpOptions) -> StoreConfig:
    """Return what the store is to be. Raises UserError for a kind that there is none of.

    The disk tier lies beside the run folder, which every start empties: it outlives the mesh.
    """
    path = Path(options.store_dir).absolute() if options.store_dir else state_dir() / "store"
    store = StoreConfig(path=str(path), max_bytes=options.store_bytes)
    if options.store in ("", "memory"):
        return store
    if options.store != "disk" and not _is_server_url(options.store):
        kinds = "memory, disk, redis://host:port/0 or valkey://host:port/0"
        raise UserError(f"--store {options.store!r} is no store: give {kinds}, or leave it out")
    return msgspec.structs.replace(store, url=options.store)


def _is_server_url(text: str) -> bool:
    try:
        url = urlsplit(text)
        return url.scheme in ("redis", "valkey") and bool(url.hostname) and url.port != 0
    except ValueError:  # a port that is no number, a bracket that never closes
        return False


def run_up(options: UpOptions) -> int:
    """Run a mesh until a signal; return the exit code. Raises UserError."""
    return asyncio.run(_up(options))


async def _up(options: UpOptions) -> int:
    console = Console(highlight=False, soft_wrap=True)
    run_dir = state_dir() / "run"
    _refuse_second(state_dir())
    shutil.rmtree(run_dir, ignore_errors=True)
    run_dir.mkdir(parents=True)
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    supervisor = Supervisor(options, run_dir)
    state_file = state_dir() / "mesh.json"
    try:
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True) as progress:
            starting = asyncio.create_task(supervisor.start(progress))
            stopping = asyncio.create_task(stop.wait())
            await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
            if not starting.done():
                starting.cancel()
                await asyncio.gather(starting, return_exceptions=True)
                return 130
            stopping.cancel()
            starting.result()
        state_file.write_bytes(msgspec.json.encode(_running(supervisor)))
        _greet(console, supervisor, options)
        await _watch(console, supervisor, stop)
        return 0
    finally:
        with console.status("stopping ..."):
            await supervisor.stop()
        state_file.unlink(missing_ok=True)


async def _watch(console: Console, supervisor: Supervisor, stop: asyncio.Event) -> None:
    """Wait for the signal; say at once when a service ends by itself."""
    stopped = asyncio.create_task(stop.wait())
    ends = {asyncio.create_task(supervisor.wait_for_end(child)) for child in supervisor.children}
    while not stopped.done():
        done, _ = await asyncio.wait({stopped, *ends}, return_when=asyncio.FIRST_COMPLETED)
        for ended in [task for task in ends if task in done]:
            ends.remove(ended)
            child = ended.result()
            console.print(
                f"[red]{child.name} ended with code {child.process.returncode}[/red]; see {supervisor.log_dir}"
            )
    for task in ends:
        task.cancel()


def _greet(console: Console, supervisor: Supervisor, options: UpOptions) -> None:
    checkpoint = supervisor.checkpoint
    assert checkpoint is not None
    shape = f"{options.num_aggregated} aggregated" if options.num_aggregated else (
        f"{options.num_prefill} prefill + {options.num_decode} decode"
    )  # fmt: skip
    if options.store:
        shape += " + store"
    body = {
        "model": checkpoint.name,
        "prompt": "The code of Ada Brook is 7412. The code of Max Reed is 3055. Q: What is the code of Ada Brook? A:",
        "max_tokens": 16,
        "temperature": 0,
    }
    console.print(f"[bold green]kvmesh is up[/bold green]  {supervisor.url}/v1  model {checkpoint.name}  {shape}")
    console.print("\nTry it:\n")
    console.print(
        f"  curl -s {supervisor.url}/v1/completions -H 'Content-Type: application/json' -d '{json.dumps(body)}'",
        markup=False,
    )
    command = "kvmesh" if shutil.which("kvmesh") else os.path.relpath(Path(sys.executable).with_name("kvmesh"))
    console.print(f"\nThen [bold]{command} trace[/bold], [bold]{command} status[/bold],")
    console.print(f"or nats sub -s {supervisor.nats_url} 'mesh.>'")
    console.print("Ctrl-C stops everything.")


def _running(supervisor: Supervisor) -> RunningMesh:
    return RunningMesh(
        pid=os.getpid(), url=supervisor.url, nats_url=supervisor.nats_url, trace_dir=str(supervisor.trace_dir)
    )


def running_mesh() -> RunningMesh | None:
    """Return the mesh that `kvmesh up` runs from this state folder, if it still lives."""
    try:
        mesh = msgspec.json.decode((state_dir() / "mesh.json").read_bytes(), type=RunningMesh)
    except (OSError, msgspec.DecodeError):
        return None
    return mesh if Path(f"/proc/{mesh.pid}").exists() else None


def trace_dir() -> Path:
    """Return where the last `kvmesh up` of this state folder wrote its spans."""
    return state_dir() / "run" / "traces"


def _refuse_second(state: Path) -> None:
    if (mesh := running_mesh()) is not None:
        raise UserError(
            f"a mesh already runs from {state} (pid {mesh.pid}, {mesh.url}); stop it, or set KVMESH_STATE_DIR elsewhere"
        )


def _free_port(port: int) -> int:
    """Return the port after checking that it is free. Raises UserError where it is taken."""
    from services.gateway.service import bind

    with bind("127.0.0.1", port) as sock:
        return int(sock.getsockname()[1])
