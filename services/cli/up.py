"""`kvmesh up`: starts a mesh, prints what happens to it, and stops it at a signal."""

import asyncio
import contextlib
import fcntl
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Coroutine, Generator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from schemas.permissions import PEOPLE
from services.cli.running import STATE_FILE, RunningMesh, mesh_of
from services.config import is_card, state_dir
from services.engine.checkpoint import Checkpoint
from services.errors import UserError
from services.files import open_private, private_folder, replace_private, write_private
from services.launch.options import Launch
from services.launch.supervisor import Supervisor
from services.runtime import ended_before
from services.trust.keys import credentials_file


def run_up(launch: Launch) -> int:
    """Run a mesh until a signal; return the exit code. Raises UserError."""
    with alone_in(state_dir()):
        return asyncio.run(run_mesh(launch, partial(_greet, launch=launch)))


Beside = Callable[[Callable[[str], None]], Coroutine[Any, Any, None]]
"""Runs beside a mesh, and ends it. It is given what prints a line."""


async def run_mesh(launch: Launch, greet: Callable[[Console, Supervisor], None], beside: Beside | None = None) -> int:
    """Run what is to be started until a signal, or until `beside` ends it, which is then an error; return the exit
    code. Raises UserError."""
    console = LastingConsole(highlight=False, soft_wrap=True)
    # Begin with an empty run folder: its keys, logs and traces are those of the last mesh.
    run_dir = state_dir() / "run"
    shutil.rmtree(run_dir, ignore_errors=True)
    private_folder(run_dir)
    stop = asyncio.Event()
    state_file, metrics_file = state_dir() / STATE_FILE, state_dir() / "metrics.json"

    # Each event goes to the state file, where `kvmesh status` reads it; the line is printed even if that fails. Until
    # the mesh is ready there is no such file: whoever found one would ask a broker that is not there yet.
    def say(text: str) -> None:
        try:
            if state_file.exists():
                _write(state_file, supervisor)
        finally:
            console.print(text)

    supervisor = Supervisor(launch, run_dir, say)

    def on_signal() -> None:
        if stop.is_set():  # the second time it is meant
            supervisor.kill_all()
        stop.set()

    # SIGHUP is a stop too: it comes when the terminal is closed.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    try:
        if not await _started(console, supervisor, stop):
            return 130
        # The mesh is up: write where commands, the nats client and Prometheus find it, and then greet.
        _write(state_file, supervisor)
        _write_contexts(run_dir / "nats" / "context", supervisor)
        replace_private(metrics_file, msgspec.json.format(msgspec.json.encode(supervisor.metrics_targets)))
        with contextlib.suppress(OSError):
            greet(console, supervisor)
        if beside is None:
            await stop.wait()
            return 0
        return 1 if await ended_before(stop, beside(say)) else 0
    finally:
        # Stop everything however the mesh ended: a start that failed half way leaves services behind.
        with console.status("stopping, once more Ctrl-C: at once ..."):
            await supervisor.stop_all()
        state_file.unlink(missing_ok=True)
        metrics_file.unlink(missing_ok=True)


class LastingConsole(Console):
    """A console whose reader may go away, as that of `kvmesh up | head` does: the mesh goes on, and prints no more."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        nowhere = os.open(os.devnull, os.O_WRONLY)  # else Python complains as it ends
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


async def _started(console: Console, supervisor: Supervisor, stop: asyncio.Event) -> bool:
    """Start the mesh, with a progress bar. False: a signal came first. Raises UserError."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        return await ended_before(stop, supervisor.start_all(progress))


def _greet(console: Console, supervisor: Supervisor, launch: Launch) -> None:
    checkpoint = supervisor.checkpoint
    assert checkpoint is not None
    # Name the other commands by a path where `kvmesh` is not on PATH.
    command = "kvmesh" if shutil.which("kvmesh") else os.path.relpath(Path(sys.executable).with_name("kvmesh"))
    if launch.attach:
        _greet_servers(console, launch, checkpoint, command)
        return
    # Describe the mesh in a few words: its workers, a store, and each service that there are several of.
    shape = f"{launch.num_aggregated} aggregated" if launch.num_aggregated else (
        f"{launch.num_prefill} prefill + {launch.num_decode} decode"
    )  # fmt: skip
    if launch.store:
        shape += " + store"
    several = {
        "schedulers": launch.num_schedulers,
        "directories": launch.num_directories,
        "gateways": launch.num_gateways,
    }
    for name, count in several.items():
        if count > 1:
            shape += f" + {count} {name}"
    # Use an example that anybody can check: the answer, 7412, is in the prompt.
    body = {
        "model": checkpoint.name,
        "prompt": "The code of Ada Brook is 7412. The code of Max Reed is 3055. Q: What is the code of Ada Brook? A:",
        "max_tokens": 16,
        "temperature": 0,
    }
    console.print(f"[bold green]kvmesh is up[/bold green]  {supervisor.url}/v1  model {checkpoint.name}  {shape}")
    for url in supervisor.urls[1:]:
        console.print(f"          and at  {url}/v1")
    if any(is_card(device) for device in supervisor.devices.values()):
        placed = ", ".join(f"{name} {device}" for name, device in supervisor.devices.items())
        console.print(f"          on      {placed}")
    console.print("\nTry it:\n")
    # Print a command for this gateway: with its certificate, and a place for a key where it has tenants.
    gateway = launch.config.gateway
    flags = f" --cacert {gateway.tls_cert}" if gateway.tls_cert else ""
    key = " -H 'Authorization: Bearer KEY'" if gateway.tenants else ""
    headers = f"-H 'Content-Type: application/json'{key}"
    console.print(
        f"  curl -s{flags} {supervisor.url}/v1/completions {headers} -d '{json.dumps(body)}'",
        markup=False,
    )
    named = ", ".join(f"[bold]{command} {name}[/bold]" for name in ("trace", "tail", "top", "sub"))
    home = os.path.relpath(state_dir() / "run")
    console.print(f"\nThen {named},")
    console.print(f"or XDG_CONFIG_HOME={home} nats --context observer sub 'mesh.>'")
    if supervisor.has_open_bus:
        console.print(f"(the broker is at {supervisor.nats_url}, [yellow]open to anybody[/yellow])")
    else:
        console.print(f"(the broker is at {supervisor.nats_url}; an operator hears prompts and answers too)")
    if supervisor.join_url:
        console.print(f"Other machines join at {supervisor.join_url}: [bold]{command} token[/bold] prints how")
    console.print(f"Prometheus finds every service's metrics by {os.path.relpath(state_dir() / 'metrics.json')}")
    console.print("Ctrl-C stops everything.")


def _greet_servers(console: Console, launch: Launch, checkpoint: Checkpoint, command: str) -> None:
    """Say how a server attaches."""
    socket = f" --socket {launch.config.attach.socket}" if launch.config.attach.socket else ""
    console.print(f"[bold green]kvmesh is up[/bold green]  servers of {checkpoint.name} may attach")
    console.print("\nStart each with a port of its own, where the wheel of `kvmesh attach --wheel DIR` is installed:\n")
    settings = f'"$({command} attach --print-config{socket} --url http://127.0.0.1:8000)"'
    console.print(
        f"  vllm serve {checkpoint.path} --block-size 32 --port 8000 --kv-transfer-config {settings}", markup=False
    )
    console.print(f"\nThen [bold]{command} status attach-0[/bold] shows them. Ctrl-C stops the holder; servers go on.")


def _write_contexts(folder: Path, supervisor: Supervisor) -> None:
    """Write how people get to the bus, as the nats command reads it: below XDG_CONFIG_HOME
    (https://docs.nats.io/using-nats/nats-tools/nats_cli#configuration-contexts)."""
    private_folder(folder.parent)
    private_folder(folder)
    for role in PEOPLE:
        creds = credentials_file(supervisor.keys_dir, role)
        if not (supervisor.has_open_bus or creds.exists()):
            continue
        access = supervisor.access(role)
        context = {"description": f"kvmesh, {role}", "url": access.url}
        if access.identity is not None:
            context |= {"creds": str(creds), "inbox_prefix": access.identity.inbox}
        if access.ca is not None:
            context["ca"] = str(access.ca)
        write_private(folder / f"{role}.json", msgspec.json.format(msgspec.json.encode(context)))


def _write(path: Path, supervisor: Supervisor) -> None:
    """Write the state file."""
    records = supervisor.records
    mesh = RunningMesh(
        pid=os.getpid(),
        url=supervisor.url,
        nats_url=supervisor.nats_url,
        keys="" if supervisor.has_open_bus else str(supervisor.keys_dir),
        trace_dir=str(supervisor.trace_dir),
        other_urls=supervisor.urls[1:],
        join_url=supervisor.join_url,
        restarts={name: record.num_restarts for name, record in records.items() if record.num_restarts},
        resting=[name for name, record in records.items() if record.num_rests],
    )
    replace_private(path, msgspec.json.encode(mesh))


@contextlib.contextmanager
def alone_in(state: Path) -> Generator[None]:
    """Lock the state folder while the block runs. Raises UserError where another mesh has it."""
    private_folder(state, is_ours=True)
    with open_private(state / "lock", "ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # ends with its process, however that ends
        except BlockingIOError as error:
            mesh = mesh_of(state)
            which = f"pid {mesh.pid}, {mesh.url}" if mesh else "it is starting or stopping"
            raise UserError(
                f"a mesh already runs from {state} ({which}); stop it, or set KVMESH_STATE_DIR elsewhere"
            ) from error
        yield
