"""`kvmesh bus-config`: the keys of a mesh, for a broker of one's own."""

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from dataplane.addresses import in_url
from schemas.permissions import GUESTS
from schemas.subjects import Role
from services.bus.push import push_account
from services.errors import UserError
from services.trust.certificates import CA_FILE, CERTIFICATE_FILE, KEY_FILE
from services.trust.keys import (
    MESH_FILE,
    MeshKeys,
    credentials_file,
    key_file,
    without_password,
)
from services.trust.members import add_member, revoke_member, role_of_member
from services.trust.routes import BROKER_FILE, BROKER_PORT, ROUTE_PORT, SERVER_FILES

DAY_S = 24 * 3600


def run_bus_config(folder: Path, hosts: Sequence[str], days: int, at: Path | None, *, has_routes: bool) -> None:
    """Write fresh keys, and print what each is for. `hosts`: what clients call the broker, for its certificate. `days`:
    when people's credentials end. `at`: where the broker finds its own files; None: in `folder`. `has_routes`: each
    host is a server of one broker. Raises UserError where there are keys already."""
    MeshKeys.fresh(hosts, has_routes=has_routes).create(folder, days * DAY_S, at)
    console = Console(highlight=False, soft_wrap=True)
    if has_routes:
        _print_servers(console, hosts)
    else:
        console.print(
            "Add to your nats-server's configuration, as the way there from that file's own folder (nats-server takes"
        )
        path = BROKER_FILE if at else os.path.relpath(folder / BROKER_FILE)
        console.print(f"no absolute path), and start it again:\n\n  include {path}\n")
    console.print("Each service needs its role's key, and no other; or, best, one of its own (--member decode-0):\n")
    for role in Role:
        if role not in GUESTS:
            console.print(f"  {key_file(folder, role)}")
    if hosts:
        console.print(f"\nEverybody needs beside it, to know the broker by its certificate:\n\n  {folder / CA_FILE}")
    if hosts and not has_routes:
        console.print("\nThe broker needs on its own machine, where its configuration says they lie:\n")
        console.print(f"  {folder / CERTIFICATE_FILE}\n  {folder / KEY_FILE}")
    console.print("\nThe keys of members are made and revoked with this one, which no service needs:\n")
    console.print(f"  {folder / MESH_FILE}")
    console.print(f"\nFor people, for {days} days, as `nats --creds FILE` and `kvmesh tail --creds FILE` read them:\n")
    console.print(f"  {credentials_file(folder, Role.OBSERVER)}   what happens, without prompts and answers")
    console.print(f"  {credentials_file(folder, Role.OPERATOR)}   everything")
    console.print(f"  {credentials_file(folder, Role.INDEXER)}    who holds which block: for a program of your own")
    url = ",".join(f"tls://{in_url(host)}:{BROKER_PORT}" for host in (hosts if has_routes else hosts[:1])) or "URL"
    console.print(f"\nThen: kvmesh up --nats {url} --keys {folder}, or kvmesh serve ROLE --keys {folder}")


def _print_servers(console: Console, hosts: Sequence[str]) -> None:
    """Print what each server of a broker needs, and how it is started."""
    console.print("Each server needs these files on its own machine, in one folder that nobody else may read:\n")
    for name in SERVER_FILES:
        console.print(f"  {name}")
    console.print("\nand is started there with that folder and its own name:\n")
    for host in hosts:
        console.print(f"  kvmesh serve broker --keys FOLDER --id {host}")
    console.print(f"\nIt listens on {BROKER_PORT} for members and on {ROUTE_PORT} for the other servers. Two of three")
    console.print("are enough, and one serves alone: put each on a machine of its own.\n")


def run_member(folder: Path, name: str, days: int) -> None:
    """Write the key of one member, and print what is to be done with it. Raises UserError."""
    own = add_member(folder, name, days * DAY_S)
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"{name} needs {own} and nothing else of {folder}, for {days} days: --keys names it.")
    console.print("A service that runs takes the next key from there by itself before its own ends.")


def run_revoke(folder: Path, name: str, push_to: str) -> None:
    """Revoke the keys of one member, and print what is to be done. `push_to`: the servers that are told; empty: none.
    Raises UserError."""
    revoke_member(folder, name)
    console = Console(highlight=False, soft_wrap=True)
    if push_to:
        run_push(folder, push_to)
    else:
        console.print(f"Have the broker read {folder / BROKER_FILE} again: nats-server --signal reload. It ends")
        console.print(f"{name}'s connection, and takes none of its keys any more. Several servers are told by --push.")
    if role_of_member(name) is Role.HOLDER:
        console.print("It has had the ticket secrets: replace them too, see docs/usage.md.")


def run_push(folder: Path, url: str) -> None:
    """Tell the servers of a broker what is revoked by now, and print who took it. Raises UserError where nobody did."""
    told = asyncio.run(push_account(folder, url))
    console = Console(highlight=False, soft_wrap=True)
    for server, problem in told.items():
        console.print(f"  {without_password(server)}  {problem or 'took it'}", markup=False)
    if all(told.values()):
        raise UserError("no server took it: what was revoked is still let in")
    if any(told.values()):
        console.print("Those that did not hear of it by the others, as they come back.")
