"""A real mesh under load while somebody attacks it: what its clients got, and who was said to be dead."""

import asyncio
import contextlib
import itertools
import sys
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from schemas.message import UndecodableMessageError, decode
from schemas.subjects import SUBJECTS, Role
from schemas.worker import WorkerLeft
from services.launch.options import Launch
from services.settings import changed
from services.trust.keys import Identity
from tests.mesh.faults.client import Stream
from tests.mesh.faults.harness import OPTIONS, FaultMesh, fault_mesh
from tests.mesh.faults.truth import Truth
from tests.mesh.zygote import Zygote
from tests.wire.cells import Member

WIDTH = 2
"""So many clients ask while an attack goes on, one request after another."""
EVIL = "evil"
"""What an attacker is called who has an identity: of a role, but of no service that runs."""

UNOBSERVED = [
    subject for subject in SUBJECTS if all(permit.role is not Role.OBSERVER for permit in subject.received_by)
]
"""An attacker has heard all that was ever said."""
STORING = changed(OPTIONS, {"store": "disk"})

Heard = tuple[str, bytes]
"""Subject and payload."""


@dataclass
class Found:
    """What an attack came to. `got`: what it should not have had or done, a line each."""

    num_tries: int = 0
    got: list[str] = field(default_factory=list[str])
    note: str = ""


@dataclass
class Row(Found):
    """The same, and what the clients had meanwhile."""

    name: str = ""
    num_answers: int = 0
    wrong: list[str] = field(default_factory=list[str])
    failed: list[str] = field(default_factory=list[str])
    unended: list[str] = field(default_factory=list[str])
    declared: list[str] = field(default_factory=list[str])

    @property
    def complaints(self) -> list[str]:
        """Everything that must not be."""
        found = [*self.got, *self.wrong, *self.failed, *self.unended, *self.declared]
        if not self.num_tries:
            found.append("nothing was tried")
        return [f"{self.name}: {what}" for what in found]


class Target:
    """What attackers know of the mesh: everything that an operator hears. Make one with `attacked`."""

    def __init__(self, mesh: FaultMesh) -> None:
        self.mesh = mesh
        self.supervisor = mesh.supervisor

    @property
    def url(self) -> str:
        return self.supervisor.nats_url

    def names(self, *roles: str) -> list[str]:
        """Return the services of these roles; none given: the workers."""
        wanted = roles or ("prefill", "decode", "store")
        return [child.name for child in self.supervisor.children if child.role in wanted]

    def pids(self, *roles: str) -> list[int]:
        return [child.process.pid for child in self.supervisor.children if child.role in roles]

    def identity(self, role: Role, name: str = EVIL) -> Identity:
        identity = self.supervisor.access(role, name).identity
        assert identity is not None
        return identity

    @asynccontextmanager
    async def joined(self, role: Role, name: str = EVIL) -> AsyncGenerator[Member]:
        """A stock client with an identity of this role."""
        async with Member.join(self.url, self.identity(role, name)) as member:
            yield member

    async def hear(self, num_messages: int = sys.maxsize) -> AsyncGenerator[Heard]:
        """Give so many of the messages of the bus, as services say them: an attacker's own are left out."""
        heard: asyncio.Queue[Heard] = asyncio.Queue()

        def take(subject: str, payload: bytes, _heard_s: float) -> None:
            if subject.startswith("mesh.") and EVIL not in subject and heard.qsize() < num_messages:
                heard.put_nowait((subject, payload))

        self.mesh.listener.hearers.append(take)
        try:
            for _ in itertools.repeat(None, num_messages):
                yield await heard.get()
        finally:
            self.mesh.listener.hearers.remove(take)


@asynccontextmanager
async def attacked(truth: Truth, zygote: Zygote, options: Launch = STORING) -> AsyncGenerator[FaultMesh]:
    """Run a mesh whose folder lies where others may look: only its own modes keep them out."""
    with tempfile.TemporaryDirectory(prefix="kvmesh-attack-") as folder:
        run_dir = Path(folder) / "run"
        run_dir.parent.chmod(0o755)
        options = changed(options, {"config.store.path": str(Path(folder) / "store")})
        async with fault_mesh(run_dir, truth, zygote, options, as_operator=UNOBSERVED) as mesh:
            yield mesh


Attack = Callable[[Target], Awaitable[Found]]


async def under_load(target: Target, name: str, attack: Attack, num_clients: int = WIDTH) -> Row:
    """Carry out an attack while clients ask; say what became of both."""
    mesh, streams, is_over = target.mesh, list[Stream](), asyncio.Event()
    declared: list[str] = []
    incarnations = {name: load.worker.incarnation for name, load in mesh.worker_loads().items()}

    def hear(subject: str, payload: bytes, _heard_s: float) -> None:
        if fnmatchcase(subject, "mesh.v1.worker.*.left"):
            with contextlib.suppress(UndecodableMessageError):
                left = decode(payload, WorkerLeft)
                if left.incarnation == incarnations.get(left.worker_id):
                    declared.append(f"{left.worker_id} was said to be dead: {left.reason}")

    async def ask() -> None:
        while not is_over.is_set():
            streams.append(mesh.new_stream())
            await asyncio.wait([mesh.start(streams[-1])])

    mesh.listener.hearers.append(hear)
    clients = [asyncio.create_task(ask(), name="client") for _ in range(num_clients)]
    try:
        for stream in await _first_of(streams, num_clients):
            await stream.until_tokens(1)
        found = await attack(target)
    finally:
        is_over.set()
        await asyncio.gather(*clients)
        mesh.listener.hearers.remove(hear)
    row = Row(found.num_tries, found.got, found.note, name, num_answers=len(streams), declared=declared)
    for stream in streams:
        who = f"request {stream.number} ({stream.request_id})"
        if problem := stream.problem or mesh.truth.problem(stream, mesh.truth.answers[stream.number]):
            row.wrong.append(f"{who}: {problem}")
        match stream.ending:
            case "finished":
                pass
            case "timeout" | "":
                row.unended.append(f"{who} did not end")
            case _:
                row.failed.append(f"{who} {stream.ending}: {stream.error}")
    return row


async def _first_of(streams: list[Stream], count: int) -> list[Stream]:
    while len(streams) < count:
        await asyncio.sleep(0)
    return streams[:count]
