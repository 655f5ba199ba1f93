"""`kvmesh bus-config`: the keys of a mesh, for a broker of one's own."""

import os
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from schemas.permissions import PEOPLE
from schemas.subjects import Role
from services.trust.certificates import CA_FILE, CERTIFICATE_FILE, KEY_FILE
from services.trust.keys import BROKER_FILE, MeshKeys, credentials_file, key_file


def run_bus_config(folder: Path, hosts: Sequence[str]) -> None:
    """Write fresh keys, and print what each is for. `hosts`: what clients call the broker, for its certificate. Raises
    UserError where there are keys already."""
    MeshKeys.fresh(hosts).create(folder)
    console = Console(highlight=False, soft_wrap=True)
    console.print(
        "Add to your nats-server's configuration, as the way there from that file's own folder (nats-server takes"
    )
    console.print(f"no absolute path), and start it again:\n\n  include {os.path.relpath(folder / BROKER_FILE)}\n")
    console.print("Each service needs its role's key, and no other:\n")
    for role in Role:
        if role not in PEOPLE:
            console.print(f"  {key_file(folder, role)}")
    if hosts:
        console.print(f"\nEverybody needs beside it, to know the broker by its certificate:\n\n  {folder / CA_FILE}")
        console.print("\nThe broker needs on its own machine, where its configuration says they lie:\n")
        console.print(f"  {folder / CERTIFICATE_FILE}\n  {folder / KEY_FILE}")
    console.print("\nFor people, as `nats --creds FILE` and `kvmesh tail --creds FILE` read them:\n")
    console.print(f"  {credentials_file(folder, Role.OBSERVER)}   what happens, without prompts and answers")
    console.print(f"  {credentials_file(folder, Role.OPERATOR)}   everything")
    url = f"tls://{f'[{hosts[0]}]' if ':' in hosts[0] else hosts[0]}:4222" if hosts else "URL"
    console.print(f"\nThen: kvmesh up --nats {url} --keys {folder}, or kvmesh serve ROLE --keys {folder}")
