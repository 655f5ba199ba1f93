"""`kvmesh bus-config`: the keys of a mesh, for a broker of one's own."""

import os
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from schemas.permissions import GUESTS
from schemas.subjects import Role
from services.trust.certificates import CA_FILE, CERTIFICATE_FILE, KEY_FILE
from services.trust.keys import BROKER_FILE, MESH_FILE, MeshKeys, credentials_file, key_file
from services.trust.members import add_member, revoke_member, role_of_member

DAY_S = 24 * 3600


def run_bus_config(folder: Path, hosts: Sequence[str], days: int) -> None:
    """Write fresh keys, and print what each is for. `hosts`: what clients call the broker, for its certificate. `days`:
    when people's credentials end. Raises UserError where there are keys already."""
    MeshKeys.fresh(hosts).create(folder, days * DAY_S)
    console = Console(highlight=False, soft_wrap=True)
    console.print(
        "Add to your nats-server's configuration, as the way there from that file's own folder (nats-server takes"
    )
    console.print(f"no absolute path), and start it again:\n\n  include {os.path.relpath(folder / BROKER_FILE)}\n")
    console.print("Each service needs its role's key, and no other; or, best, one of its own (--member decode-0):\n")
    for role in Role:
        if role not in GUESTS:
            console.print(f"  {key_file(folder, role)}")
    if hosts:
        console.print(f"\nEverybody needs beside it, to know the broker by its certificate:\n\n  {folder / CA_FILE}")
        console.print("\nThe broker needs on its own machine, where its configuration says they lie:\n")
        console.print(f"  {folder / CERTIFICATE_FILE}\n  {folder / KEY_FILE}")
    console.print("\nThe keys of members are made and revoked with this one, which no service needs:\n")
    console.print(f"  {folder / MESH_FILE}")
    console.print(f"\nFor people, for {days} days, as `nats --creds FILE` and `kvmesh tail --creds FILE` read them:\n")
    console.print(f"  {credentials_file(folder, Role.OBSERVER)}   what happens, without prompts and answers")
    console.print(f"  {credentials_file(folder, Role.OPERATOR)}   everything")
    console.print(f"  {credentials_file(folder, Role.INDEXER)}    who holds which block: for a program of your own")
    url = f"tls://{f'[{hosts[0]}]' if ':' in hosts[0] else hosts[0]}:4222" if hosts else "URL"
    console.print(f"\nThen: kvmesh up --nats {url} --keys {folder}, or kvmesh serve ROLE --keys {folder}")


def run_member(folder: Path, name: str, days: int) -> None:
    """Write the key of one member, and print what is to be done with it. Raises UserError."""
    own = add_member(folder, name, days * DAY_S)
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"{name} needs {own} and nothing else of {folder}, for {days} days: --keys names it.")
    console.print("A service that runs takes the next key from there by itself before its own ends.")


def run_revoke(folder: Path, name: str) -> None:
    """Revoke the keys of one member, and print what is to be done. Raises UserError."""
    revoke_member(folder, name)
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"Have the broker read {folder / BROKER_FILE} again: nats-server --signal reload. It ends {name}'s")
    console.print("connection, and takes none of its keys any more.")
    if role_of_member(name) is Role.HOLDER:
        console.print("It has had the ticket secrets: replace them too, see docs/usage.md.")
