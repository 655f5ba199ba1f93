"""Which mesh a command means: that of this state folder, or else the only one that this user runs."""

import os
from pathlib import Path

import msgspec

from services.config import STATE_DIR, is_state_dir_named, state_dir
from services.errors import MeshNotRunningError, UserError

STATE_FILE = "mesh.json"


class RunningMesh(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `mesh.json` in the state folder, for other commands while a mesh runs."""

    pid: int
    url: str
    nats_url: str
    trace_dir: str
    other_urls: list[str] = []
    """Addresses of the gateways after the first."""
    restarts: dict[str, int] = {}
    """How often each service was started again, of those that were."""
    given_up: list[str] = []
    """Services that ended too often, and are not started again."""


def mesh_of(state: Path) -> RunningMesh | None:
    """Return the mesh that runs from a state folder; None where none does."""
    try:
        mesh = msgspec.json.decode((state / STATE_FILE).read_bytes(), type=RunningMesh)
    except (OSError, msgspec.DecodeError):
        return None
    return mesh if Path(f"/proc/{mesh.pid}").exists() else None


def find_mesh() -> RunningMesh | None:
    """Return the mesh of this state folder, or else the only one that this user runs from another folder; None where
    there is none. A KVMESH_STATE_DIR that is set says which one is meant. Raises UserError where several could be."""
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


def nats_url_of(given: str) -> str:
    """Return the given URL, or that of the mesh that `find_mesh` finds. Raises UserError where there is neither."""
    return given or url_of(find_mesh())


def url_of(mesh: RunningMesh | None) -> str:
    """Return the URL of a mesh's broker. Raises MeshNotRunningError where there is no mesh."""
    if mesh is None:
        raise MeshNotRunningError("no mesh runs; start one with `kvmesh up`, or pass --nats URL")
    return mesh.nats_url


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
    """Return the state folders of all processes of this user that look like a `kvmesh up`. Their `mesh.json` says
    whether they are one."""
    found: set[Path] = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes().split(b"\0")
            if b"up" in command and process.stat().st_uid == os.getuid():
                environment = (process / "environ").read_bytes().split(b"\0")
                named = [value for name, _, value in (pair.partition(b"=") for pair in environment) if name == _STATE]
                found.add((process / "cwd").readlink() / os.fsdecode(b"".join(named) or os.fsencode(STATE_DIR)))
        except OSError:  # it has ended meanwhile, or may not be looked at
            continue
    return found


_STATE = b"KVMESH_STATE_DIR"
