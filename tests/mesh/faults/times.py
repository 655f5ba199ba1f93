"""How soon a mesh lets go: of a dead reader's blocks, and of everything that a client no longer wants. And how long a
client waits for its next token when the worker that makes them dies or leaves, the broker stands still, or its gateway
loses the broker."""

import asyncio
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from schemas.message import decode
from schemas.observe import RequestPlaced
from schemas.worker import WorkerLoad
from services.launch.restart import Child
from tests.mesh.faults.actor import broker_stopped, engine_of, gateway_cut, signal_engine
from tests.mesh.faults.bus_listener import BusListener
from tests.mesh.faults.client import Stream
from tests.mesh.faults.harness import FaultMesh, is_at_rest
from tests.mesh.faults.proxy import listening_ports
from tests.mesh.faults.supervisor import CUT_GATEWAY, FaultSupervisor
from tests.waiting import until

HEARD_WITHIN_S = 20.0
WATCHED_S = 1.0
"""How long after a hang-up every worker's word is heard: nothing may come back."""
FREE_WITHIN_S = 30.0
NUM_UNDER_WAY, NUM_MEANWHILE = 4, 4
"""Answers that are under way when the broker stands still, and requests that come meanwhile."""
BROKER_PAUSES_S = (0.5, 1.6, 3.0, 10.0)
"""Shorter than any silence counts; longer than a proof waits; as long as a silence that means death; far longer."""
CUT_S = 5.0
DECLARED_WITHIN_S = 4.0
"""Whoever is wrongly taken for dead after a pause is so within this: the longest silence, and a second."""
PHASES = (
    "sent", "place", "run", "reserved", "offered", "streaming", "landed", "released", "stored",
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
    num_held = mesh.proxy.num_struck["plane_cut"]
    try:
        asking = mesh.start(stream)
        subject, _ = await listening.first("*.handoff.*.offered")
        handoff, reader = subject.removesuffix(".offered"), subject.split(".")[4]
        await until(lambda: mesh.proxy.num_struck["plane_cut"] > num_held)
        victim = next(child for child in mesh.supervisor.children if child.name == reader)
        killed_s = time.monotonic()
        victim.kill()
        end, ended_s = await listening.first(f"{handoff}.released", f"{handoff}.aborted")
        mesh.proxy.heal("plane_cut")
        await asyncio.wait([asking])
    finally:
        listening.close()
        mesh.proxy.heal("plane_cut")
    if ended_s < killed_s or stream.ending != "finished":
        raise AssertionError(f"{end} came {ended_s - killed_s:.3f} s after the kill; {stream.error}")
    return ended_s - killed_s


@dataclass
class Pauses:
    """`struck_s`: the longest gap of each answer from the signal to its worker on; `quiet_s`: every gap of the same
    requests without one."""

    struck_s: list[float] = field(default_factory=list[float])
    quiet_s: list[float] = field(default_factory=list[float])
    ready_s: list[float] = field(default_factory=list[float])
    """The longest that an engine of the mesh had taken to be ready by then."""
    num_near_ties: int = 0
    wrong: list[str] = field(default_factory=list[str])


Strike = Callable[[Child], object]
"""What befalls a worker in the middle of an answer."""


def kill(worker: Child) -> None:
    worker.process.send_signal(signal.SIGKILL)


def leave(worker: Child) -> None:
    worker.process.send_signal(signal.SIGTERM)


def kill_engine(worker: Child) -> None:
    signal_engine(worker, signal.SIGKILL)


def hang_engine(worker: Child) -> None:
    signal_engine(worker, signal.SIGSTOP)


def kill_engine_twice(worker: Child) -> asyncio.Task[None]:
    """Kill the next one as well, while it is loaded."""

    async def follow() -> None:
        await until(lambda: engine_of(worker.process.pid) not in (None, first))
        kill_engine(worker)

    first = engine_of(worker.process.pid)
    kill_engine(worker)
    return asyncio.create_task(follow())


async def pauses(mesh: FaultMesh, num_strikes: int, on_strike: Callable[[], None], strike: Strike = kill) -> Pauses:
    """Ask, and ask the same again and strike its decode worker halfway, so often. Each answer is alone in the mesh."""
    found = Pauses()
    ties = mesh.truth.num_near_ties
    for _ in range(num_strikes):
        await mesh.settle()
        quiet = mesh.new_stream()
        await asyncio.wait([mesh.start(quiet)])
        found.quiet_s += quiet.gaps_s()
        stream = mesh.new_stream(quiet.number)
        struck_s = await struck_halfway(mesh, stream, strike)
        found.struck_s.append(max(stream.gaps_s(struck_s), default=0.0))
        await mesh.settle()
        found.ready_s.append(max(load.engine.ready_ms for load in mesh.worker_loads().values()) / 1000)
        for each in (quiet, stream):
            problem = each.error or each.problem or mesh.truth.problem(each, mesh.truth.answers[each.number])
            if problem or each.ending != "finished":
                found.wrong.append(f"request {each.number} ({each.request_id}) {each.ending}: {problem}")
        if not stream.num_resumed_tokens:
            found.wrong.append(f"request {stream.number} ({stream.request_id}): it was not interrupted")
        on_strike()
    await mesh.settle()
    found.num_near_ties += mesh.truth.num_near_ties - ties
    return found


async def struck_halfway(mesh: FaultMesh, stream: Stream, strike: Strike = kill) -> float:
    """Ask alone in the mesh, and strike the worker that decodes halfway. Return when."""
    placed: list[RequestPlaced] = []

    def hear(subject: str, payload: bytes, _heard_s: float) -> None:
        if fnmatchcase(subject, "mesh.v1.request.*.placed"):
            placed.append(decode(payload, RequestPlaced))

    mesh.listener.hearers.append(hear)
    try:
        asking = mesh.start(stream)
        await stream.until_tokens(stream.case.sampling.max_tokens // 2)
        await mesh.listener.until(lambda: bool(placed), HEARD_WITHIN_S)
    finally:
        mesh.listener.hearers.remove(hear)
    name = placed[-1].decode_worker or placed[-1].prefill_worker
    victim = next(child for child in mesh.supervisor.children if child.name == name)
    struck_s = time.monotonic()
    struck = strike(victim)
    await asyncio.wait([asking])
    if isinstance(struck, asyncio.Task):
        await struck
    return struck_s


async def cached_after_death(mesh: FaultMesh, num_deaths: int, on_death: Callable[[], None]) -> tuple[int, int]:
    """Ask something twice, kill all engines, and ask once more, so often. Return how many tokens of the prompts were
    served from the cache before and after."""
    before = after = 0
    for _ in range(num_deaths):
        streams = [mesh.new_stream()]
        streams += [Stream(streams[0].number, streams[0].case, streams[0].url, streams[0].tenant) for _ in range(2)]
        for order, stream in enumerate(streams):
            await mesh.settle()
            if order == 2:
                deaths = {name: load.engine.num_deaths for name, load in mesh.worker_loads().items()}
                for child in mesh.supervisor.children:
                    if child.name in deaths:
                        kill_engine(child)
                await mesh.listener.until(lambda had=deaths: _all_died(mesh, had), HEARD_WITHIN_S)
                await mesh.settle()
            await asyncio.wait([mesh.start(stream)])
            if stream.ending != "finished":
                raise AssertionError(stream.error or stream.ending)
        before, after = before + streams[1].num_cached_tokens, after + streams[2].num_cached_tokens
        on_death()
    return before, after


def _all_died(mesh: FaultMesh, had: dict[str, int]) -> bool:
    return all(load.engine.num_deaths > had[name] for name, load in mesh.worker_loads().items())


@dataclass
class Outages:
    """Of the broker, one of its servers, or a gateway's way to it. `gaps_s`: of each answer that was under way, from
    the end of an outage to its next token, or, with `from_begin`, its longest pause from the beginning on. `declared`:
    who was said to have left, or lives anew; `num_resumed`: how many attempts were given up for another one, and
    `must_resume`: whether there must be some; else there may be none."""

    must_resume: bool = False
    from_begin: bool = False
    gaps_s: list[float] = field(default_factory=list[float])
    num_answers: int = 0
    num_near_ties: int = 0
    declared: list[str] = field(default_factory=list[str])
    num_resumed: int = 0
    wrong: list[str] = field(default_factory=list[str])

    @property
    def complaints(self) -> list[str]:
        """What must not be, however slow the machine is."""
        found = [*self.wrong, *(f"{subject}: nobody has died" for subject in self.declared)]
        if bool(self.num_resumed) is not self.must_resume:
            found.append(f"{self.num_resumed} attempts were given up")
        if not self.gaps_s:
            found.append("no answer was under way meanwhile")
        return found


async def broker_pauses(mesh: FaultMesh, for_s: Sequence[float], on_pause: Callable[[], None]) -> Outages:
    """Stop the broker's process for each of these times while answers are under way and more requests come."""
    return await outages(mesh, for_s, on_pause, broker_stopped, Outages())


async def gateway_cuts(mesh: FaultMesh, for_s: Sequence[float], on_cut: Callable[[], None]) -> Outages:
    """Cut a gateway off from the broker for each of these times while answers of it are under way, which
    outlast the patience of workers."""
    gateway = [child.name for child in mesh.supervisor.children if child.role == "gateway"].index(CUT_GATEWAY)
    return await outages(mesh, for_s, on_cut, gateway_cut, Outages(must_resume=True), gateway)


async def outages(
    mesh: FaultMesh,
    for_s: Sequence[float],
    on_outage: Callable[[], None],
    outage: Callable[[FaultSupervisor], AbstractAsyncContextManager[None]],
    found: Outages,
    gateway: int | None = None,
) -> Outages:
    """Add to `found` what is seen of an outage for each of these times. `gateway`: whose answers are looked at; None:
    of all in turn."""
    ties = mesh.truth.num_near_ties
    for out_s in for_s:
        await mesh.settle()
        await _one_outage(mesh, outage(mesh.supervisor), out_s, found, gateway)
        on_outage()
    found.num_near_ties = mesh.truth.num_near_ties - ties
    return found


async def _one_outage(
    mesh: FaultMesh, outage: AbstractAsyncContextManager[None], out_s: float, found: Outages, gateway: int | None
) -> None:
    lived = _incarnations(mesh)
    listening = Listening(mesh.listener)
    try:
        streams = [mesh.new_stream(number, gateway) for number in mesh.longest_cases(NUM_UNDER_WAY)]
        asking = [mesh.start(stream) for stream in streams]
        for stream in streams:
            await stream.until_tokens(1)
        struck_s = time.monotonic()
        async with outage:
            for _ in range(NUM_MEANWHILE):
                await asyncio.sleep(out_s / (NUM_MEANWHILE + 1))
                streams.append(mesh.new_stream())
                asking.append(mesh.start(streams[-1]))
            await asyncio.sleep(out_s / (NUM_MEANWHILE + 1))
            back_s = time.monotonic()
        await asyncio.wait(asking)
        await asyncio.sleep(DECLARED_WITHIN_S)
    finally:
        listening.close()
    for stream in streams[:NUM_UNDER_WAY]:
        if found.from_begin:
            found.gaps_s += [max(stream.gaps_s(struck_s), default=0.0)]
        else:
            found.gaps_s += [at_s - back_s for at_s in stream.event_times_s if at_s > back_s][:1]
    found.num_answers += len(streams)
    subjects = [subject for subject, _ in listening.heard]
    found.declared += [subject for subject in subjects if fnmatchcase(subject, "mesh.v1.worker.*.left")]
    await mesh.settle()
    lives = _incarnations(mesh)
    found.declared += [f"{name}, once more" for name in lived if lives[name] != lived[name]]
    found.num_resumed += sum(fnmatchcase(subject, "mesh.v1.request.*.resumed") for subject in subjects)
    for stream in streams:
        problem = stream.error or stream.problem or mesh.truth.problem(stream, mesh.truth.answers[stream.number])
        if problem or stream.ending != "finished":
            found.wrong.append(f"request {stream.number} ({stream.request_id}) {stream.ending}: {problem}")


def _incarnations(mesh: FaultMesh) -> dict[str, str]:
    return {name: load.worker.incarnation for name, load in mesh.worker_loads().items()}


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
