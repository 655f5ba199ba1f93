"""How soon a mesh lets go: of a dead reader's blocks, and of everything that a client no longer wants."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable
from fnmatch import fnmatchcase

from schemas.worker import WorkerLoad
from tests.mesh.faults.bus_listener import BusListener
from tests.mesh.faults.client import Stream
from tests.mesh.faults.harness import FaultMesh, is_at_rest
from tests.mesh.faults.proxy import listening_ports

HEARD_WITHIN_S = 20.0
WATCHED_S = 1.0
"""How long after a hang-up every worker's word is heard: nothing may come back."""
FREE_WITHIN_S = 30.0
READ_BEGINS_S = 0.05
PHASES = (
    "sent", "place", "run", "reserve", "reserved", "offered", "streaming", "landed", "released", "stored",
    "first token", "tenth token",
)  # fmt: skip
"""Where a client hangs up: as it has sent its request, at the first message of a name, as it has had so many tokens."""
NUM_TOKENS_OF = {"first token": 1, "tenth token": 10}


class Listening:
    """Waits for messages from when it was made until it is closed."""

    def __init__(self, listener: BusListener) -> None:
        self.heard: list[tuple[str, float]] = []
        self._ears = listener
        listener.hearers.append(self._hear)

    def close(self) -> None:
        self._ears.hearers.remove(self._hear)

    async def first(self, *patterns: str) -> tuple[str, float]:
        """Return the first message on such subjects (`*` for any text), and when it came. Raises TimeoutError."""
        found: list[tuple[str, float]] = []

        def is_there() -> bool:
            found[:] = [message for message in self.heard if any(fnmatchcase(message[0], p) for p in patterns)][:1]
            return bool(found)

        if not await self._ears.until(is_there, HEARD_WITHIN_S):
            raise TimeoutError(f"nothing on {' or '.join(patterns)} within {HEARD_WITHIN_S:.0f} s")
        return found[0]

    def _hear(self, subject: str, _payload: bytes, heard_s: float) -> None:
        self.heard.append((subject, heard_s))


async def death_to_free(mesh: FaultMesh, num_deaths: int, on_death: Callable[[], None]) -> list[float]:
    """Kill a decode worker in the middle of its read, so often. Return the seconds until its lease had ended."""
    times: list[float] = []
    for _ in range(num_deaths):
        await mesh.settle()
        times.append(await _one_death(mesh))
        on_death()
    await mesh.settle()
    return times


async def _one_death(mesh: FaultMesh) -> float:
    """The proxy holds the read, so that the lease is open when its reader dies."""
    for child in mesh.supervisor.children:
        if child.role == "prefill":
            for port in listening_ports(child.process.pid):
                mesh.proxy.cut(port)
    stream, listening = mesh.new_stream(), Listening(mesh.listener)
    try:
        asking = mesh.start(stream)
        subject, _ = await listening.first("*.handoff.*.offered")
        handoff, reader = subject.removesuffix(".offered"), subject.split(".")[4]
        await asyncio.sleep(READ_BEGINS_S)
        victim = next(child for child in mesh.supervisor.children if child.name == reader)
        killed_s = time.monotonic()
        victim.kill()
        _, ended_s = await listening.first(f"{handoff}.released", f"{handoff}.aborted")
        mesh.proxy.heal("plane_cut")
        await asyncio.wait([asking])
    finally:
        listening.close()
        mesh.proxy.heal("plane_cut")
    if ended_s < killed_s or stream.ending != "finished":
        raise AssertionError(f"the lease ended {ended_s - killed_s:.3f} s after the kill; {stream.error}")
    return ended_s - killed_s


async def cancel_to_free(mesh: FaultMesh, num_rounds: int, on_cancel: Callable[[], None]) -> dict[str, list[float]]:
    """Hang up in every phase, so often. Return the seconds until no worker had anything of the request, by phase."""
    times: dict[str, list[float]] = defaultdict(list)
    for _ in range(num_rounds):
        for phase in PHASES:
            await mesh.settle()
            times[phase].append(await _one_cancel(mesh, phase))
            on_cancel()
    return times


async def _one_cancel(mesh: FaultMesh, phase: str) -> float:
    """Workers say at once what has changed: the last of them that lets go ends the time."""
    stream, listening = mesh.new_stream(), Listening(mesh.listener)
    loads: list[tuple[WorkerLoad, float]] = []
    mesh.listener.on_load = lambda load, heard_s: loads.append((load, heard_s))
    try:
        mesh.start(stream)
        await _come_to(phase, stream, listening)
        hung_up_s = time.monotonic()
        mesh.hang_up(stream)
        await asyncio.sleep(WATCHED_S)
        if not await mesh.listener.until(lambda: not mesh.held(hung_up_s), FREE_WITHIN_S):
            raise TimeoutError(f"{phase}: {mesh.held(hung_up_s)}")
    finally:
        listening.close()
        mesh.listener.on_load = lambda _load, _heard_s: None
    return max(0.0, *(let_go_s(loads, name, hung_up_s) - hung_up_s for name in mesh.worker_loads()))


async def _come_to(phase: str, stream: Stream, listening: Listening) -> None:
    if num_tokens := NUM_TOKENS_OF.get(phase):
        await stream.until_tokens(num_tokens)
    elif phase == "sent":
        await asyncio.sleep(0)
    else:
        await listening.first(f"*.{phase}")


def let_go_s(loads: list[tuple[WorkerLoad, float]], name: str, since_s: float) -> float:
    """Return when a worker first said, for good, that it has nothing any more; `since_s` if it had nothing then."""
    freed_s = since_s
    was_busy = False
    for load, heard_s in loads:
        if load.worker.worker_id == name:
            if was_busy and is_at_rest(load) and heard_s >= since_s:
                freed_s = heard_s
            was_busy = not is_at_rest(load)
    return freed_s
