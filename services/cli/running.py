"""Which mesh a command means: that of this state folder, or else the only one that this user runs."""

import os
from pathlib import Path
from typing import NamedTuple

import msgspec

from schemas.subjects import Role
from services.config import STATE_DIR, is_state_dir_named, state_dir
from services.errors import MeshNotRunningError, UserError
from services.trust.keys import BusAccess, credentials_file, person_access

STATE_FILE = "mesh.json"


class RunningMesh(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `mesh.json` in the state folder, for other commands while a mesh runs."""

    pid: int
    url: str
    nats_url: str
    keys: str
    """Folder of the keys; empty: the broker lets anybody in."""
    trace_dir: str
    other_urls: list[str] = []
    """Addresses of the gateways after the first."""
    join_url: str = ""
    """Where other machines join; empty: nowhere."""
    restarts: dict[str, int] = {}
    """How often each service was started again, of those that were."""
    resting: list[str] = []
    """Services that end too often, and are started again after pauses only."""


def mesh_of(state: Path) -> RunningMesh | None:
    """Return the mesh that runs from a state folder; None where none does."""
    try:
        mesh = msgspec.json.decode((state / STATE_FILE).read_bytes(), type=RunningMesh)
    except (OSError, msgspec.DecodeError):
        return None
    return mesh if Path(f"/proc/{mesh.pid}").exists() else None


def find_mesh() -> RunningMesh | None:
    """Return the mesh of this state folder, or else the only one that this user runs from another folder; None where
    there is none. A KVMESH_STATE_DIR that is set names the one meant. Raises UserError where several could be."""
    here = mesh_of(state_dir())
    if here is not None or is_state_dir_named():
        return here
    elsewhere = {state: mesh for state in states_elsewhere() if (mesh := mesh_of(state)) is not None}
    if len(elsewhere) > 1:
        named = ", ".join(sorted(map(str, elsewhere)))
        raise UserError(
            f"several meshes run: set KVMESH_STATE_DIR to the folder of the one you mean ({named}), "
            "or pass --nats with its broker, --folder with its spans"
        )
    return next(iter(elsewhere.values()), None)


class BusOptions(NamedTuple):
    """How to get to the bus, as the command line has it; empty: as in the mesh that runs."""

    nats: str = ""
    creds: str = ""
    operator: bool = False


def access_of(options: BusOptions) -> BusAccess:
    """Return how to get to the broker that is named, or to that of the running mesh that is meant. Raises UserError
    where there is neither, and for credentials that cannot be read."""
    mesh = mesh_meant(options)
    role = Role.OPERATOR if options.operator else Role.OBSERVER
    if not options.nats and mesh is None:
        raise MeshNotRunningError("no mesh runs; start one with `kvmesh up`, or pass --nats URL")
    url = options.nats or (mesh.nats_url if mesh else "")
    if options.creds:
        return person_access(url, Path(options.creds), role)
    if mesh is not None and mesh.keys and url == mesh.nats_url:
        return person_access(url, credentials_file(Path(mesh.keys), role), role)
    return BusAccess(url)


def mesh_meant(options: BusOptions) -> RunningMesh | None:
    """Return the running mesh that a command is about; None where only its broker is known. Who names a broker means
    that one: other meshes do not matter, but the one here may be its own. Raises UserError where several could be."""
    return mesh_of(state_dir()) if options.nats else find_mesh()


def trace_dir() -> Path:
    """Return the folder in which the last `kvmesh up` of this state folder wrote its spans; where there was none,
    that of the mesh that `find_mesh` finds. Raises UserError."""
    here = traces_of(state_dir())
    if not here.exists() and (mesh := find_mesh()) is not None:
        return Path(mesh.trace_dir)
    return here


def traces_of(state: Path) -> Path:
    """Return where the mesh of a state folder writes its spans."""
    return state / "run" / "traces"


def states_elsewhere() -> set[Path]:
    """Return the state folders of all processes of this user that look like a `kvmesh up` or `join`. Their `mesh.json`
    says whether they are one."""
    found: set[Path] = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes().split(b"\0")
            if {b"up", b"join"} & set(command) and process.stat().st_uid == os.getuid():
                environment = (process / "environ").read_bytes().split(b"\0")
                named = [value for name, _, value in (pair.partition(b"=") for pair in environment) if name == _STATE]
                found.add((process / "cwd").readlink() / os.fsdecode(b"".join(named) or os.fsencode(STATE_DIR)))
        except OSError:  # it has ended meanwhile, or may not be looked at
            continue
    return found


_STATE = b"KVMESH_STATE_DIR"
