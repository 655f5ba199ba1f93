"""A real mesh that is made to fail: processes, a broker, HTTP, and after every scenario the same questions."""

import asyncio
import random
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from schemas.subjects import Role, Subject
from schemas.worker import WorkerJoined, WorkerLoad
from services.config import EngineConfig, GatewayConfig, MeshConfig, WorkerConfig
from services.engine.demo_model import DEMO_MODEL_DIR
from services.launch.options import Launch
from services.sim.scenario import Scenario
from tests.mesh.faults.actor import FaultActor, is_there
from tests.mesh.faults.bus_listener import STRIKES_AT, BusListener
from tests.mesh.faults.client import Stream
from tests.mesh.faults.proxy import WIRE_FAULTS, TcpProxy, listening_ports
from tests.mesh.faults.supervisor import PROXY_HOST, REQUEST_TIMEOUT_S, FaultSupervisor
from tests.mesh.faults.truth import DOCUMENT_TOKENS, Alone, Truth
from tests.mesh.zygote import Zygote

SCENARIOS = Path(__file__).with_name("scenarios")
END_GRACE_S = 1.0
"""How long after its deadline a request may take to be over."""
CLIENT_LIMIT_S = REQUEST_TIMEOUT_S + 5.0
REST_WITHIN_S = 30.0
LEASE_GRACE_S = 1.0
SPAN_S = 0.8
MORE_STREAMS = 3
"""So many times the requests of a scenario are sent until each of its faults has struck."""
WORKER_ROLES = ("prefill", "decode", "aggregated")
OPTIONS = Launch(
    num_prefill=2,
    num_decode=2,
    num_gateways=2,
    config=MeshConfig(
        gateway=GatewayConfig(port=0),
        worker=WorkerConfig(carrier="tcp", kv_bytes=64 << 20, num_threads=1, drain_s=5.0),
        engine=EngineConfig(step_timeout_s=3.0),
    ),
)
"""A step of the model that they serve takes milliseconds."""


@dataclass
class Outcome:
    """What a scenario came to. `wrong`: answers that nobody should have had. `num_leased_late`: blocks on lease a
    second after everything had come to rest; `rest_s`: how long that took after the last request's end."""

    name: str
    num_requests: int = 0
    num_finished: int = 0
    num_hung_up: int = 0
    num_near_ties: int = 0
    num_late: int = 0
    num_leased_late: int = 0
    rest_s: float = 0.0
    wrong: list[str] = field(default_factory=list[str])
    failed: list[str] = field(default_factory=list[str])
    excused: list[str] = field(default_factory=list[str])
    """Failures that the scenario allows."""
    problems: list[str] = field(default_factory=list[str])
    faults: Counter[str] = field(default_factory=Counter[str])

    @property
    def complaints(self) -> list[str]:
        """Everything that must not be, however slow the machine is: leases that last are in `num_leased_late`, and in
        `problems` once all patience is over."""
        found = [*self.wrong, *self.failed, *self.problems]
        if self.num_late:
            found.append(f"{self.num_late} requests were over their deadline")
        if not self.num_finished:
            found.append("no request finished")
        if self.num_finished + self.num_hung_up + len(self.excused) + len(self.failed) != self.num_requests:
            found.append(f"the ends of {self.num_requests} requests do not add up")
        if self.num_hung_up and not self.faults["disconnect"]:
            found.append(f"{self.num_hung_up} hung up that nobody told to")
        if self.excused and "gateway" not in self.name:
            found.append(f"failures that only a gateway's death excuses: {self.excused}")
        return found


class FaultMesh:
    """A mesh of two of each, its proxy, and a listener on its bus. Make one with `fault_mesh`."""

    def __init__(
        self,
        supervisor: FaultSupervisor,
        truth: Truth,
        rng: random.Random,
        as_operator: Sequence[Subject[Any, Any]] = STRIKES_AT,
        *,
        num_spares: int = 0,
    ) -> None:
        self.supervisor = supervisor
        self.truth = truth
        self.rng = rng
        self.proxy = TcpProxy(PROXY_HOST, rng)
        self.listener = BusListener(supervisor.access(Role.OBSERVER), supervisor.access(Role.OPERATOR), as_operator)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self.http = httpx.AsyncClient(timeout=None, limits=limits)
        self._num_spares = num_spares
        """Spare engines that each worker is to have."""
        self._num_streams = 0
        self._opening: set[asyncio.Task[None]] = set()
        self._running: dict[Stream, asyncio.Task[None]] = {}

    @property
    def model(self) -> str:
        assert self.supervisor.checkpoint is not None
        return self.supervisor.checkpoint.name

    async def open(self) -> None:
        self.listener.on_joined = self._on_joined
        await self.listener.open()
        await self._open_ways()
        await self.http.get(f"{self.supervisor.url}/health")

    async def close(self) -> None:
        tasks = [*self._running.values(), *self._opening]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)  # nobody opens the proxy again once it is closed
        await self.http.aclose()
        await self.listener.close()
        await self.proxy.close()

    def new_stream(self, number: int | None = None, gateway: int | None = None) -> Stream:
        """Return the next request, of somebody for whom nothing is cached, through one of the gateways."""
        order, self._num_streams = self._num_streams, self._num_streams + 1
        case = order % len(self.truth.cases) if number is None else number
        urls, tenants = self.supervisor.urls, self.supervisor.tenants
        url = urls[(order if gateway is None else gateway) % len(urls)]
        return Stream(case, self.truth.cases[case], url, tenants[order % len(tenants)])

    def longest_cases(self, num_cases: int) -> list[int]:
        """Return the numbers of the cases with the longest answers."""
        cases = self.truth.cases
        return sorted(range(len(cases)), key=lambda number: -cases[number].sampling.max_tokens)[:num_cases]

    def start(self, stream: Stream) -> "asyncio.Task[None]":
        """Send a request."""
        task = self._running[stream] = stream.start(self.http, self.model, CLIENT_LIMIT_S)
        task.add_done_callback(lambda _: self._running.pop(stream, None))
        return task

    def hang_up(self, stream: Stream) -> None:
        """Let a client go away without a word."""
        if task := self._running.get(stream):
            task.cancel()

    async def run(self, scenario: Scenario, num_streams: int = 12, span_s: float = SPAN_S) -> Outcome:
        """Carry out a scenario under load, and ask every question afterwards."""
        streams = [self.new_stream() for _ in range(num_streams)]
        actor = FaultActor(self.supervisor, self.listener, self.proxy, self.rng)
        actor.begin(scenario, streams, self.hang_up)
        sending = [
            asyncio.create_task(self._send(s, self.rng.uniform(0, span_s) if n else 0)) for n, s in enumerate(streams)
        ]
        await asyncio.wait(sending)
        # A fault waits for a message, or for what crosses. On a busy machine fewer requests are split.
        wire = {fault.do for fault in scenario.faults} & WIRE_FAULTS
        while (actor.num_waiting or wire - set(self.proxy.num_struck)) and len(streams) < MORE_STREAMS * num_streams:
            streams.append(self.new_stream())
            await asyncio.wait([self.start(streams[-1])])
        num_waiting = actor.num_waiting
        struck = Counter(self.proxy.num_struck)
        await actor.heal()
        outcome = Outcome(scenario.name, num_requests=len(streams), faults=actor.counts, problems=actor.problems)
        if num_waiting:
            outcome.problems.append(f"{num_waiting} faults never struck")
        for kind in wire - set(struck):
            outcome.problems.append(f"no {kind} ever struck")
        self.proxy.num_struck.clear()
        self._judge(streams, scenario, actor, outcome)
        await self.rest(outcome)
        outcome.problems += self.supervisor.take_crashes()
        return outcome

    async def rest(self, outcome: Outcome) -> None:
        """Wait until every service is there and nothing is held; note what does not come to pass."""
        started_s = time.monotonic()
        if not await self._until_all_there():
            missing = [child.name for child in self.supervisor.children if not is_there(child)]
            outcome.problems.append(f"not there after {REST_WITHIN_S:.0f} s: {', '.join(missing) or 'a load'}")
            return
        since_s = time.monotonic()
        await asyncio.sleep(LEASE_GRACE_S)
        outcome.num_leased_late += sum(load.blocks.leased for load in self.worker_loads().values())
        if not await self.listener.until(lambda: not self.held(since_s), REST_WITHIN_S):
            outcome.problems += self.held(since_s)
        outcome.rest_s = time.monotonic() - started_s

    async def settle(self) -> None:
        """Return once every service is there, spare engines too, and nothing is held. Raises TimeoutError."""
        are_there = await self._until_all_there()
        since_s = time.monotonic()
        if not are_there or not await self.listener.until(lambda: not self.held(since_s), REST_WITHIN_S):
            raise TimeoutError(f"no rest within {REST_WITHIN_S:.0f} s: {self.held(since_s)}")

    def worker_loads(self) -> dict[str, WorkerLoad]:
        """Return what each worker's process that lives now last said."""
        loads: dict[str, WorkerLoad] = {}
        for child in self.supervisor.children:
            load, heard_s = self.listener.loads.get(child.name, (None, 0.0))
            if load is not None and is_there(child) and heard_s > child.started_s:
                loads[child.name] = load
        return loads

    def held(self, since_s: float = 0.0) -> list[str]:
        """Say which workers hold blocks or requests, have not spoken since, or load a spare engine."""
        loads, found = self.worker_loads(), list[str]()
        for name in self._worker_names():
            load = loads.get(name)
            if load is None or self.listener.loads[name][1] < since_s:
                found.append(f"{name} says nothing")
                continue
            if not is_at_rest(load) or load.state != "ready":
                found.append(
                    f"{name} holds {load.blocks}, {load.num_running} run, {load.num_queued} wait, {load.state}"
                )
            elif load.engine.num_spares < self._num_spares:
                found.append(f"{name} has {load.engine.num_spares} spare engines")
        return found

    async def _send(self, stream: Stream, after_s: float) -> None:
        await asyncio.sleep(after_s)
        await asyncio.wait([self.start(stream)])

    def _judge(self, streams: Sequence[Stream], scenario: Scenario, actor: FaultActor, outcome: Outcome) -> None:
        gateways = [child.name for child in self.supervisor.children if child.role == "gateway"]
        lost_urls = {url for name, url in zip(gateways, self.supervisor.urls, strict=True) if name in actor.killed}
        near_ties = self.truth.num_near_ties
        for stream in streams:
            who = f"request {stream.number} ({stream.request_id})"
            outcome.num_late += stream.ending == "timeout" or stream.took_s > REQUEST_TIMEOUT_S + END_GRACE_S
            if problem := self.truth.problem(stream, self.truth.answers[stream.number]):
                outcome.wrong.append(f"{who}: {problem}")
            match stream.ending:
                case "finished":
                    outcome.num_finished += 1
                case "hung up":
                    outcome.num_hung_up += 1
                case _:
                    failure = f"{who} {stream.ending}: {stream.error}"
                    is_excused = scenario.may_fail or stream.url in lost_urls
                    (outcome.excused if is_excused else outcome.failed).append(failure)
            if stream.problem and stream.url not in lost_urls:
                outcome.problems.append(f"{who}: {stream.problem}")
        outcome.num_near_ties = self.truth.num_near_ties - near_ties

    async def _until_all_there(self) -> bool:
        """Wait until every service is ready and each worker can be reached through the proxy."""
        try:
            async with asyncio.timeout(REST_WITHIN_S):
                for child in self.supervisor.children:
                    while not is_there(child):
                        await asyncio.sleep(0.02)  # a process's end and its successor's start are no events here
                await self.listener.catch_up()
        except TimeoutError:
            return False
        await self._open_ways()
        names = set(self._worker_names())
        return await self.listener.until(lambda: set(self.worker_loads()) >= names, REST_WITHIN_S)

    def _worker_names(self) -> list[str]:
        return [child.name for child in self.supervisor.children if child.role in WORKER_ROLES]

    async def _open_ways(self) -> None:
        holders = [child for child in self.supervisor.children if child.role in (*WORKER_ROLES, "store")]
        await self.proxy.lead_to({port for child in holders for port in listening_ports(child.process.pid)})

    def _on_joined(self, _joined: WorkerJoined) -> None:
        """A worker is there: lead to it."""
        task = asyncio.create_task(self._open_ways(), name="open ways")
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)


@asynccontextmanager
async def fault_mesh(
    run_dir: Path,
    truth: Truth,
    zygote: Zygote,
    options: Launch = OPTIONS,
    *,
    seed: int = 0,
    as_operator: Sequence[Subject[Any, Any]] = STRIKES_AT,
    has_cluster: bool = False,
) -> AsyncIterator[FaultMesh]:
    """Start a mesh; at the end stop it, and make sure that nothing is left. `as_operator`: what its listener hears that
    no observer does."""
    supervisor = FaultSupervisor(options, run_dir, zygote, has_cluster=has_cluster)
    mesh: FaultMesh | None = None
    try:
        await supervisor.start_all()
        supervisor.never_give_up()
        mesh = FaultMesh(supervisor, truth, random.Random(seed), as_operator, num_spares=options.config.engine.spares)
        await mesh.open()
        yield mesh
    finally:
        if mesh is not None:
            await mesh.close()
        await supervisor.stop_all()
    crashes = supervisor.take_crashes()
    assert not crashes, f"{crashes}, and no fault did that; see {supervisor.log_dir}"
    # A worker that was just started again has not taken the signal for itself yet.
    ends = {child.name: (child.process.returncode, child.ready.is_set()) for child in supervisor.children}
    codes = {name: code for name, (code, was_ready) in ends.items() if code and (was_ready or code != -signal.SIGTERM)}
    assert not codes, f"these did not end well: {codes}; see {supervisor.log_dir}"
    left = _arenas_of({child.process.pid for child in supervisor.children})
    assert not left, f"shared memory is left behind: {left}"


def is_at_rest(load: WorkerLoad) -> bool:
    """Say whether a worker has nothing of any request."""
    blocks = load.blocks
    is_free = blocks.free + blocks.cached == blocks.total and not blocks.leased and not blocks.orphaned
    return is_free and not load.num_running and not load.num_queued


def make_truth(num_cases: int = 16, alone: Alone | None = None, answer_tokens: tuple[int, int] = (60, 220)) -> Truth:
    """Return cases that take a real mesh a second or so."""
    return Truth(DEMO_MODEL_DIR, num_cases=num_cases, prompt_tokens=(40, 600), answer_tokens=answer_tokens, alone=alone)


def make_long_truth() -> Truth:
    """Return cases that take it several seconds."""
    return make_truth(8, answer_tokens=(1_000, 1_300))


def make_documents(num_cases: int = 16) -> Truth:
    """Return cases whose answers are JSON that a schema describes."""
    return Truth(
        DEMO_MODEL_DIR, num_cases=num_cases, prompt_tokens=(40, 600), answer_tokens=DOCUMENT_TOKENS, documents=True
    )


def _arenas_of(pids: set[int]) -> list[str]:
    return [path.name for pid in pids for path in Path("/dev/shm").glob(f"kvmesh-{pid}-*")]
