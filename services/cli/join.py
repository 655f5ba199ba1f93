"""`kvmesh join` and `leave`, on a machine that is to be part of a mesh."""

import asyncio
import getpass
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import typer
from rich.console import Console
from rich.markup import escape

from services.cli.flags import values_of
from services.cli.running import mesh_of
from services.cli.up import alone_in, run_mesh
from services.config import state_dir
from services.errors import UserError
from services.join.client import JoinRefusedError, JoinUnreachableError, JoinUrl
from services.join.host import KEYS_FOLDER, JoinedHost, host_name, join
from services.launch.options import Launch
from services.launch.supervisor import Supervisor
from services.settings import changed
from services.trust.hosts import Token

LOOK_AFTER_S = 2.0
"""So often the mesh's machine is asked for new secrets."""
LEAVE_WITHIN_S = 90.0
"""So long the processes of a machine that leaves are waited for."""
ROLES = ("num_prefill", "num_decode", "num_aggregated", "num_gateways")


def run_join(url: str, token: str, name: str, given: Mapping[str, Any], *, systemd: bool) -> int:
    """Join a mesh, or go on where this machine has joined before; run its workers until a signal. Return the exit code.
    Raises UserError."""
    values = dict.fromkeys(ROLES, 0) | values_of(given)
    if not any(values[role] for role in ROLES):
        raise UserError("say what this machine is to do: --decode 2, --prefill 1, --aggregated 1 or --gateways 1")
    folder, meant = state_dir(), JoinUrl(url)
    if systemd:
        _print_unit(folder)
        return 0
    with alone_in(folder):
        joined = _joined(folder, meant, token, name, values)
        launch = _launch_of(joined, values)
        return asyncio.run(run_mesh(launch, partial(_greet, joined, launch), partial(_look_after, joined)))


def run_leave(*, forget: bool) -> None:
    """End what runs here, and have all keys of this machine revoked. `forget`: where the mesh cannot be asked, they are
    only taken away. Raises UserError."""
    folder, console = state_dir(), Console(highlight=False, soft_wrap=True)
    joined = JoinedHost.found(folder)
    if joined is None:
        raise UserError(f"no mesh was joined from {folder}: KVMESH_STATE_DIR names another folder")
    if (mesh := mesh_of(folder)) is not None:
        os.kill(mesh.pid, signal.SIGTERM)
        with console.status("its workers give away what they do ..."):
            until_s = time.monotonic() + LEAVE_WITHIN_S
            while mesh_of(folder) is not None and Path(f"/proc/{mesh.pid}").exists():
                if time.monotonic() > until_s:
                    raise UserError(f"process {mesh.pid} did not end in {LEAVE_WITHIN_S:.0f} s: nothing was revoked")
                time.sleep(0.1)
    with alone_in(folder):
        try:
            joined.leave_mesh()
        except UserError as error:
            if not forget:
                raise UserError(f"{error}; --forget takes the keys away here alone") from error
            joined.drop_keys()
            console.print(
                f"The keys are taken away here; they are revoked by `kvmesh remove {joined.state.host}` there."
            )
            return
    console.print(f"{joined.state.host} has left {joined.state.url}: its keys are revoked, and taken away here.")


def _joined(folder: Path, url: JoinUrl, token: str, name: str, values: Mapping[str, Any]) -> JoinedHost:
    """Return this machine as a member of the mesh: with a token, unless it is one already. Raises UserError."""
    before = JoinedHost.found(folder)
    host = name or (before.state.host if before else host_name())
    members = [name for _, name in _shape(host, values).services]
    if before is not None and before.may_run(url, host, members):
        try:
            before.look_after()
        except JoinUnreachableError as error:  # its keys may be good all the same
            Console(stderr=True).print(f"[yellow]{escape(str(error))}[/yellow]")
            return before
        except JoinRefusedError:  # it was removed
            if not token:
                raise
        else:
            return before
    if token:
        return join(folder, url, Token.parse(token), host, members, values.get("config.model.path", ""))
    if before is not None and before.is_member:
        raise UserError(
            f"this machine has joined {before.state.url} as {before.state.host}, for "
            f"{', '.join(before.state.members)}: join with a --token for anything else"
        )
    raise UserError("--token is missing: `kvmesh token` on the mesh's machine prints one")


def _shape(host: str, values: Mapping[str, Any]) -> Launch:
    return changed(Launch(host=host), {role: values[role] for role in ROLES})


def _launch_of(joined: JoinedHost, values: Mapping[str, Any]) -> Launch:
    """Return what is started: the mesh's configuration, with what was said here. Raises UserError."""
    state = joined.state
    config = state.config
    own_names = (socket.gethostname(), joined.own_address)
    filled_in = {
        "nats": state.brokers, "keys": str(joined.folder / KEYS_FOLDER), "config": config,
    }  # fmt: skip
    launch = msgspec.structs.replace(_shape(state.host, values), **filled_in)
    hosts = dict.fromkeys((*config.gateway.hosts, *filter(None, own_names)))
    inside = {"config.worker.advertise_host": joined.own_address, "config.gateway.hosts": tuple(hosts)}
    given = {path: value for path, value in values.items() if path not in ROLES}
    try:
        return changed(launch, inside | given)
    except ValueError as error:
        raise UserError(f"this machine cannot join like this: {error}") from error


def _greet(joined: JoinedHost, launch: Launch, console: Console, supervisor: Supervisor) -> None:
    names = ", ".join(name for _, name in launch.services)
    console.print(f"[bold green]joined[/bold green] {joined.state.url} as {joined.state.host}: {names}")
    for url in supervisor.urls:
        console.print(f"          serves  {url}/v1")
    console.print("Ctrl-C gives away what they do, and ends them; the same line without --token starts them again.")


async def _look_after(joined: JoinedHost, say: Callable[[str], None]) -> None:
    """Keep up with the mesh's secrets and keys, until this machine is removed."""
    was_reached = True
    while True:
        await asyncio.sleep(LOOK_AFTER_S)
        try:
            await asyncio.to_thread(joined.look_after)
        except JoinRefusedError as error:
            say(f"[red]{escape(str(error))}[/red]")
            joined.drop_keys()
            return
        except UserError as error:
            if was_reached:
                say(f"[yellow]{escape(str(error))}[/yellow]; what runs goes on")
            was_reached = False
        else:
            if not was_reached:
                say(f"{joined.state.url} answers again")
            was_reached = True


def _print_unit(folder: Path) -> None:
    """Print a unit for systemd: the same line without the token, which is used up."""
    words = [word for word in sys.argv[1:] if word != "--systemd"]
    for at, word in enumerate(words):
        if word == "--token":
            del words[at : at + 2]
            break
    command = " ".join([shutil.which("kvmesh") or str(Path(sys.executable).with_name("kvmesh")), *words])
    typer.echo(
        f"""\
# Join once by hand, with the token. Then: this as /etc/systemd/system/kvmesh.service, systemctl enable --now kvmesh
[Unit]
Description=kvmesh workers
After=network-online.target
Wants=network-online.target

[Service]
ExecStart={command}
Environment=KVMESH_STATE_DIR={folder}
WorkingDirectory={Path.cwd()}
User={getpass.getuser()}
Restart=always
RestartSec=2
KillMode=mixed
KillSignal=SIGINT
TimeoutStopSec=90

[Install]
WantedBy=multi-user.target"""
    )
