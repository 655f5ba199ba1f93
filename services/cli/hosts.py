"""`kvmesh token`, `remove` and `rotate`, on the machine that has a mesh's own keys: who may join, and who no more."""

import asyncio
import datetime
import time
from collections.abc import Callable, Set
from pathlib import Path

import msgspec
from rich.console import Console
from rich.status import Status
from rich.table import Table

from schemas.subjects import Role
from services.bus.push import push_account
from services.cli.running import find_mesh
from services.config import fresh_secret
from services.errors import UserError
from services.files import locked, replace_private
from services.join.head import forget_host, secrets_of
from services.join.messages import JOIN_PORT, digest_of
from services.trust.certificates import CA_FILE
from services.trust.hosts import new_token, read_hosts, revoke_token
from services.trust.keys import key_file, load_role_key, without_password

ROTATE_LOOK_S = 0.2
MAX_LIFE_S = 365 * 24 * 3600
OWN_SERVICES_S = 3.0
"""Services look every second whether their key file has changed, and take it once it stays as it is."""


def keys_meant(keys: str) -> Path:
    """Return the folder of the mesh's keys: the one that is named, or that of the mesh that runs here. Raises
    UserError."""
    mesh = None if keys else find_mesh()
    if not keys and (mesh is None or not mesh.keys):
        raise UserError("no mesh runs here: --keys names the folder that `kvmesh bus-config` has written")
    return Path(keys or (mesh.keys if mesh else "")).absolute()


def run_token(keys: str, url: str, *, role: Role, names: str, host: str, num_uses: int, life_s: int) -> None:
    """Print a fresh token, in the line that uses it. Raises UserError."""
    folder, mesh = keys_meant(keys), find_mesh()
    try:
        ca = (folder / CA_FILE).read_bytes()
    except OSError as error:
        raise UserError(
            f"{folder} has no {CA_FILE} ({error.strerror}): start the mesh with --join-port 7843"
        ) from error
    where = url or (mesh.join_url if mesh else "") or f"tls://HOST:{JOIN_PORT}"
    token = new_token(folder, ca, role=role, names=names, host=host, num_uses=num_uses, life_s=life_s)
    does = "--gateways 1" if role is Role.GATEWAY else "--decode 1"
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"kvmesh join {where} --token {token} {does}")
    uses = "one machine" if num_uses == 1 else f"{num_uses} machines"
    Console(stderr=True, highlight=False, soft_wrap=True).print(
        f"Good for {uses} until {_date(time.time() + life_s)}: whoever has this line may join. It is shown once."
    )


def _date(unix_s: float) -> str:
    return f"{datetime.datetime.fromtimestamp(unix_s).astimezone():%Y-%m-%d %H:%M}"


def life_of(text: str) -> int:
    """Return the seconds of "30m", "1h" or "7d". Raises UserError."""
    units = {"s": 1, "m": 60, "h": 3600, "d": 24 * 3600}
    number, unit = text[:-1], text[-1:]
    if not (number.isascii() and number.isdigit() and unit in units and 0 < int(number) * units[unit] <= MAX_LIFE_S):
        raise UserError(f"--ttl is like 30m, 1h or 7d, up to 365d, not {text!r}")
    return int(number) * units[unit]


def run_token_list(keys: str) -> None:
    """Print the tokens that are of use, and the machines that have joined. Raises UserError."""
    found, console = read_hosts(keys_meant(keys)), Console(highlight=False)
    tokens = Table("token", "role", "names", "machine", "uses left", "until", box=None, padding=(0, 2, 0, 0))
    for token_id, each in found.tokens.items():
        if each.num_uses and each.ends_s > time.time():
            tokens.add_row(token_id, each.role, each.names, each.host or "any", str(each.num_uses), _date(each.ends_s))
    hosts = Table("machine", "members", "kvmesh", "joined", box=None, padding=(0, 2, 0, 0))
    for name, each in found.hosts.items():
        hosts.add_row(name, ", ".join(each.members), each.release, _date(each.joined_s))
    console.print(tokens if tokens.row_count else "no token is of use: `kvmesh token` makes one")
    if hosts.row_count:
        console.print(hosts)


def run_token_revoke(keys: str, token_id: str) -> None:
    """Have a token be of no use any more. Raises UserError."""
    revoke_token(keys_meant(keys), token_id)
    Console(highlight=False).print(f"{token_id} is of no use any more; who has joined with it stays (`kvmesh remove`).")


def run_remove(keys: str, name: str, url: str) -> None:
    """Lock a machine out. Raises UserError where it is not known, or no broker takes it."""
    folder, mesh = keys_meant(keys), find_mesh()
    hosts = read_hosts(folder).hosts
    if (host := hosts.get(name)) is None:
        raise UserError(f"no machine called {name!r} has joined: there are {', '.join(sorted(hosts)) or 'none'}")
    broker = url or (mesh.nats_url if mesh else "")
    if not broker:
        raise UserError("no mesh runs here: --nats names its broker, which must be told")
    forget_host(folder, name, host)
    told = asyncio.run(push_account(folder, broker))
    console = Console(highlight=False, soft_wrap=True)
    if all(told.values()):
        raise UserError(f"{name} is forgotten, but is still let in, as no broker was told: {next(iter(told.values()))}")
    for server, problem in told.items():
        if problem:
            console.print(f"  {without_password(server)}  {problem}", markup=False)
    console.print(f"{name} is off the bus: {', '.join(host.members)}.")
    console.print("It has had the secret that tickets are signed with. Have it be of no use: kvmesh rotate")


def run_rotate(keys: str, within_s: float) -> None:
    """Put a new ticket secret in place of the old ones, in steps in which everybody believes who is a step behind.
    Raises UserError."""
    folder, console = keys_meant(keys), Console(highlight=False, soft_wrap=True)
    path, fresh = key_file(folder, Role.HOLDER), fresh_secret()
    steps: tuple[tuple[str, Callable[[tuple[str, ...]], tuple[str, ...]]], ...] = (
        ("believe the new one", lambda old: (*old, fresh)),
        ("sign with it", lambda old: (fresh, *old[:-1])),
        ("forget the old ones", lambda _: (fresh,)),
    )
    late: set[str] = set()
    with console.status("...") as status:
        for what, secrets in steps:
            with locked(path):
                key = load_role_key(path)
                replaced = msgspec.structs.replace(key, ticket_secrets=secrets(key.ticket_secrets))
                try:
                    replace_private(path, msgspec.json.encode(replaced))
                except OSError as error:
                    raise UserError(f"{path} cannot be written: {error.strerror}") from error
            late |= _until_taken(folder, what, status, within_s, late)
    for name in sorted(late):
        console.print(f"[yellow]{name} has not taken it: until it does, nobody there reads KV from the others[/yellow]")
    console.print("Tickets are signed with a new secret, and no older one is believed any more.")


def _until_taken(folder: Path, what: str, status: Status, within_s: float, late: Set[str]) -> set[str]:
    """Wait until all machines with holders have what the key file has, but those that were late before; return which
    have not after so long."""
    began_s = time.monotonic()
    while True:
        hosts = read_hosts(folder).hosts
        wanted = {name: secrets_of(folder, host.members) for name, host in hosts.items()}
        behind = {
            name
            for name, secrets in wanted.items()
            if secrets.ticket_secrets and name not in late and hosts[name].has_secrets != digest_of(secrets)
        }
        took_s = time.monotonic() - began_s
        if took_s >= OWN_SERVICES_S and (not behind or took_s >= within_s):
            return behind
        status.update(f"holders {what}" + (f"; still to come: {', '.join(sorted(behind))}" if behind else ""))
        time.sleep(ROTATE_LOOK_S)
