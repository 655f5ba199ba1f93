"""One simulation from one seed: a mesh, its clients, the faults, and the verdict."""

import asyncio
import atexit
import contextlib
import functools
import gc
import hashlib
import logging
import random
import sys
import warnings
from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace

import msgspec

from schemas.worker import WorkerState
from services.bus.base import BusError
from services.bus.fleet import ask_fleet
from services.bus.typed import TypedBus
from services.sim.client import Exchange, post
from services.sim.faults import FaultActor
from services.sim.limits import (
    CHECK_INTERVAL_S,
    END_GRACE_S,
    LONG_AWAY_S,
    READY_WITHIN_S,
    REQUEST_TIMEOUT_S,
    REST_WITHIN_S,
    RETURNED_WITHIN_S,
    USED_AGAIN_S,
)
from services.sim.mesh import EOS, VOCAB, MeshShape, SimMesh
from services.sim.platform.bus import SimBroker
from services.sim.platform.clock import VirtualTime, installed
from services.sim.platform.loop import SimLoop, SimulationStuckError
from services.sim.platform.plane import SimNetwork
from services.sim.scenario import SERVER_FAULTS, FaultKind, Scenario, random_scenario, server_faults
from services.sim.verdict.answers import ModelTruth, Verdict, check_exchange, check_faultless
from services.sim.verdict.departures import DepartureTap
from services.sim.verdict.expected import ClientRequest, make_requests
from services.sim.verdict.leaving import LeaveTap
from services.sim.verdict.moves import MoveTap
from services.sim.verdict.request_events import RequestEventTap
from services.sim.verdict.rest import Held, held_at_rest, problems_now
from services.sim.verdict.traces import CLOCK_NS, out_of_order, trace_problems

_STILL_ANSWERS = "a gateway still answers a client that has gone"
WORKER_ROLES = ("prefill", "decode", "aggregated", "store")
CLOCK_FAULTS: frozenset[FaultKind] = frozenset({"clock_step", "clock_drift"})
"""Faults that nobody who sends a request may notice."""
SLOW_FAULTS: frozenset[FaultKind] = frozenset(
    {
        "broker", "broker_pause", "bus_cut", "delay", "disconnect", "duplication", "partition", "pause", "reordering",
        "slowness", *SERVER_FAULTS,
    }
)  # fmt: skip
"""Faults that may hold up the answer to a service that asks for the time: its clock is then off by a half of that."""
LOSSLESS_FAULTS = frozenset(
    {"pause", "drain", "disconnect", "slow_client", "corruption", "truncation", "refusal", *CLOCK_FAULTS}
)
"""Faults that lose no message: every lease is then ended by a message and none by its time."""
SHARE_OF_THREE = 1 / 3
"""Of the meshes whose broker may have three servers."""
GATEWAY_FAULTS = frozenset({"kill", "drain"})
"""Faults that may end a gateway, and with it the events of its requests."""


@dataclass(frozen=True, kw_only=True)
class SimOptions:
    """What to simulate. `shape` None: made from the seed, with `num_workers` workers (0: as the seed says). `kinds`:
    the faults that a random scenario may have; `scenario` takes its place."""

    num_requests: int = 24
    num_workers: int = 0
    kinds: tuple[FaultKind, ...] = ()
    scenario: Scenario | None = None
    shape: MeshShape | None = None
    span_s: float = 1.5
    """The requests are sent within so many seconds."""
    check_spans: bool = True
    """Keep all spans, and check that they make whole trees."""


@dataclass
class SimReport:
    """The result of a simulation. `digest`: equal for equal runs. `log`: the faults in order."""

    seed: int
    verdict: Verdict
    digest: str
    virtual_s: float
    num_messages: int
    num_callbacks: int
    log: list[str] = field(default_factory=list[str])


class World:
    """One simulation: `run` it once."""

    def __init__(self, seed: int, options: SimOptions) -> None:
        self.seed = seed
        self.options = options
        self.rng = random.Random(f"kvmesh {seed}")
        self._of_servers = random.Random(f"kvmesh servers {seed}")
        """Of its own: a seed without faults of servers means what it always has."""
        self.clock = VirtualTime()
        self.loop = self._make_loop()
        self.verdict = Verdict()
        self.log: list[str] = []
        """The faults in order, for people."""
        self._digest = hashlib.blake2b(digest_size=16)
        self._lost_one_server = False
        """See `FaultActor`."""
        self.exchanges: list[tuple[ClientRequest, Exchange]] = []
        self.scenario = options.scenario or Scenario()

    def run(self) -> SimReport:
        """Run to the end. Call it once."""
        self.loop.set_exception_handler(self._on_exception)
        with _quiet_logs(), installed(self.clock, self._new_rng()):
            try:
                self.loop.run_to_end(self._live())
            except (SimulationStuckError, AssertionError) as error:
                # As in a test: an assertion of the mesh's own code that fails is what a run looks for.
                self.verdict.problems.append(f"{type(error).__name__}: {error}")
            truth = ModelTruth(self.mesh.shape.layout, VOCAB, EOS)
            may_time_out = any(fault.for_s >= LONG_AWAY_S for fault in self.scenario.faults)
            for number, (request, exchange) in enumerate(self.exchanges):
                check_exchange(number, request, exchange, truth, self.verdict, may_time_out=may_time_out)
            if self._lost_one_server and "unplug" not in self._kinds and self.verdict.failed:
                self.verdict.problems.append(f"failed for want of one of three servers: {dict(self.verdict.failed)}")
            if not self.verdict.faults.keys() - CLOCK_FAULTS:
                check_faultless([exchange for _, exchange in self.exchanges], self.verdict)
        self._digest.update(repr((self.verdict.num_finished, sorted(self.verdict.failed.items()))).encode())
        return SimReport(
            self.seed, self.verdict, self._digest.hexdigest(), self.clock.now_s, self.broker.num_messages,
            self.loop.num_callbacks, self.log,
        )  # fmt: skip

    async def _live(self) -> None:
        options = self.options
        # Build the mesh. Each `_new_rng` draws from the seed: the order of these calls is part of what a seed means.
        of_broker = self._new_rng()
        self.network = SimNetwork(self._new_rng())
        shape = options.shape or self._with_servers(random_shape(self._new_rng(), options.num_workers))
        self.broker = SimBroker(of_broker, num_servers=shape.num_servers)
        self.mesh = SimMesh(self.loop, self._new_rng(), shape, self.broker, self.network)
        # Attach the checks before any service starts: they must see every message.
        events = RequestEventTap()
        departures = DepartureTap()
        moves = MoveTap(self.loop.time)
        self._leaving = LeaveTap(self.mesh, self.loop.time)
        self.broker.taps += [self._note, events.note_event, departures.note_event]
        self.broker.readers += [moves.note_message, self._leaving.note_message]
        self.broker.observes_lost.append(events.miss)
        # Provide the list of spans before the start: each service makes its exporter as it starts.
        if options.check_spans:
            self.mesh.spans = []
        self.mesh.start_all()
        await self._until(self._is_ready, READY_WITHIN_S, "the mesh was never ready")
        # Choose faults and requests; the times of both count from now, as the mesh is ready.
        if options.scenario is None:
            names = [name for _, name in shape.services]
            self.scenario = random_scenario(self._new_rng(), options.kinds, names, options.span_s * 1.3)
            if shape.num_servers > 1 and SERVER_FAULTS & set(options.kinds):
                self._add_server_faults()
        requests = make_requests(self._new_rng(), options.num_requests, options.span_s, VOCAB)
        # Run faults, checks and clients. The timeout raises nothing: `check_exchange` finds requests that never ended.
        actor = FaultActor(self.mesh, self._new_rng(), self.verdict.faults, self.log)
        actor.begin(self.scenario)
        checking = self.loop.create_task(self._check(actor), name="check")
        clients = [self.loop.create_task(self._send(request, actor), name="client") for request in requests]
        await asyncio.wait(clients, timeout=REQUEST_TIMEOUT_S + options.span_s + END_GRACE_S)
        # Repair the mesh first: `_rest` expects every client on the bus and every worker in use.
        await actor.heal()
        await self._rest()
        self._lost_one_server = actor.lost_one_server
        # Ask the taps only now: they judge requests that have ended.
        self.verdict.problems += events.problems(may_be_cut=bool(self.verdict.faults.keys() & GATEWAY_FAULTS))
        self.verdict.problems += departures.problems(self._kinds, actor.most_away)
        self.verdict.problems += moves.problems(self._kinds)
        self.verdict.num_moved = moves.num_moved
        checking.cancel()

    def _with_servers(self, shape: MeshShape) -> MeshShape:
        """Give a third of the meshes a broker of three servers, and each one that is to have faults of these alone."""
        kinds = set(self.options.kinds)
        has_three = bool(kinds & SERVER_FAULTS) and (
            kinds <= SERVER_FAULTS or self._of_servers.random() < SHARE_OF_THREE
        )
        return replace(shape, num_servers=3) if has_three else shape

    def _add_server_faults(self) -> None:
        """Let servers of the broker fail, in half of the runs nothing else."""
        names = [server.name for server in self.broker.servers]
        faults = server_faults(self._of_servers, self.options.kinds, names, self.options.span_s * 1.3)
        others = self.scenario.faults if self._of_servers.random() < 0.5 else ()
        self.scenario = msgspec.structs.replace(self.scenario, faults=(*others, *faults), may_fail=True)

    @property
    def _kinds(self) -> set[FaultKind]:
        """What goes wrong in this run."""
        return {fault.do for fault in self.scenario.faults}

    async def _check(self, actor: FaultActor) -> None:
        """Check every so often what must hold at any time. Not just after a process was resumed: it needs a moment."""
        while not self.verdict.problems:
            await asyncio.sleep(CHECK_INTERVAL_S)
            self.verdict.problems += self.broker.problems()
            if not self.mesh.woken_since(self.clock.now_s - CHECK_INTERVAL_S):
                self.verdict.problems += problems_now(self.mesh)
                self.verdict.problems += self._leaving.problems_now(self._kinds)
            # Whatever has befallen one of the broker's servers, soon after its end every worker is used again.
            is_due = actor.healed_s is not None and self.clock.now_s > actor.healed_s + USED_AGAIN_S
            if is_due and actor.lost_one_server:
                actor.healed_s = None
                if missing := await self._missing(TypedBus(self.broker.connect("watcher"), "watcher")):
                    self.verdict.problems.append(
                        f"not used again {USED_AGAIN_S:g} s later: {', '.join(sorted(missing))}"
                    )

    async def _send(self, request: ClientRequest, actor: FaultActor) -> None:
        await asyncio.sleep(request.at_s)
        gateways = [s for s in self.mesh.living("gateway") if s.app is not None]
        if not gateways:
            exchange = Exchange()
            exchange.reset()  # no gateway listens on the port
            self.exchanges.append((request, exchange))
            return
        gateway = gateways[request.seed % len(gateways)]
        assert gateway.app is not None
        exchange = post(
            self.loop, gateway.process, gateway.app, "/v1/completions", request.body, delay_s=actor.read_delay_s()
        )
        self.exchanges.append((request, exchange))
        actor.watch_client(exchange)
        await exchange.ended.wait()

    async def _rest(self) -> None:
        """Wait until nothing is held for a request any more; otherwise record what is."""
        # To a client that has hung up, and reads slowly, its gateway may still be giving a piece.
        await self._until(
            lambda: all(exchange.is_over for _, exchange in self.exchanges), REST_WITHIN_S, _STILL_ANSWERS
        )
        # What a client has kept while the broker was away is sent when it is connected again.
        await self._until(lambda: self.broker.has_all, REST_WITHIN_S, "not all clients of the broker came back")
        # `held` keeps the result of the last look, to be recorded at the end.
        held: list[Held] = []

        def rests() -> bool:
            held[:] = held_at_rest(self.mesh)
            return not held

        # If no message was lost, all must be returned soon. Otherwise leases end by their time: wait for longer.
        if not self.verdict.faults.keys() - LOSSLESS_FAULTS:
            within_s = RETURNED_WITHIN_S
            if "pause" in self.verdict.faults:  # who goes on lends to readers that have waited long enough
                within_s += self.mesh.config.times.worker.open_lease_within_ms / 1000
            await self._until(rests, within_s, f"not all was given back within {within_s:g} s")
        await self._until(rests, REST_WITHIN_S, "")
        # Wait until the scheduler uses every worker again: no fault may exclude one for good.
        bus = TypedBus(self.broker.connect("inspector"), "inspector")
        missing = set[str]()
        for _ in range(round(REST_WITHIN_S / CHECK_INTERVAL_S)):
            missing = await self._missing(bus)
            if not missing:
                break
            await asyncio.sleep(CHECK_INTERVAL_S)
        else:
            self.verdict.problems.append(f"the scheduler does not use {', '.join(sorted(missing))} any more")
        await self._until(rests, REST_WITHIN_S, "")  # a copy of the last answer may have begun since
        # Check the spans. `clock_ns` is what dates of two services may differ by with this run's skew and faults.
        if self.mesh.spans is not None:
            with_kills = any(name in self.verdict.faults for name in ("kill", "drain"))
            with_corruption = "corruption" in self.verdict.faults
            clock_ns = CLOCK_NS if self.mesh.shape.skew_s else 0
            if clock_ns and self.verdict.faults.keys() & SLOW_FAULTS:
                clock_ns = round(self.mesh.config.times.telemetry.clock_within_s * 1e9)
            if self._kinds & CLOCK_FAULTS:
                clock_ns = REQUEST_TIMEOUT_S * 1_000_000_000  # what a drifting clock measures is no duration
            self.verdict.problems += trace_problems(
                self.mesh.spans, with_kills=with_kills, with_corruption=with_corruption, clock_ns=clock_ns
            )
            if not self.verdict.faults:
                self.verdict.problems += out_of_order(self.mesh.spans)
        # Record what is still held, and each send or subscription that the permissions do not cover.
        self.verdict.problems += [what for what, _ in held]
        self.verdict.problems += sorted(self.broker.denied)
        self.verdict.num_leaked_blocks += sum(num_blocks for _, num_blocks in held)

    async def _missing(self, bus: TypedBus) -> set[str]:
        """Return the workers that the scheduler does not know as ready."""
        names = {name for role, name in self.mesh.shape.services if role in WORKER_ROLES}
        try:
            fleet = await ask_fleet(bus, 1.0)
        except BusError:
            return names
        return names - {load.worker.worker_id for load in fleet.workers if load.state == WorkerState.READY}

    def _make_loop(self) -> SimLoop:
        return SimLoop(self.clock, self._new_rng())

    def _is_ready(self) -> bool:
        """Return whether gateways serve, and schedulers on machines with other clocks have agreed on one."""
        services, now_ns = self.mesh.services.values(), self.clock.now_ns
        serves = all(s.app is not None for s in services if s.role == "gateway") and self.clock.now_s > 1.0
        dates = [s.dates.date_ns(s.process.clock.monotonic_ns(now_ns)) for s in services if s.dates is not None]
        return serves and max(dates) - min(dates) <= CLOCK_NS

    async def _until(self, holds: Callable[[], bool], within_s: float, complaint: str) -> None:
        end_s = self.clock.now_s + within_s
        while not holds():
            if self.clock.now_s >= end_s:
                if complaint:
                    self.verdict.problems.append(complaint)
                return
            await asyncio.sleep(0.1)

    def _new_rng(self) -> random.Random:
        """Return a random generator of its own, so that more use of one changes no other."""
        return random.Random(self.rng.getrandbits(64))

    def _note(self, subject: str, source: str) -> None:
        self._digest.update(f"{self.clock.now_s:.6f} {source} {subject}\n".encode())

    def _on_exception(self, _loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        if "was destroyed" in str(context.get("message")):
            return  # of a process that was killed
        self.verdict.problems.append(f"unhandled: {context.get('message')}: {context.get('exception')!r}")


def random_shape(rng: random.Random, num_workers: int = 0) -> MeshShape:
    """Return a small mesh, most often with two prefill and two decode workers."""
    num_prefill, num_decode = rng.choice(((2, 2), (2, 2), (1, 2), (3, 2), (2, 3)))
    if num_workers:
        num_prefill = max(1, num_workers // 2)
        num_decode = max(1, num_workers - num_prefill)
    shape = MeshShape(
        num_prefill=num_prefill,
        num_decode=num_decode,
        num_schedulers=rng.choice((1, 1, 2)),
        num_directories=rng.choice((1, 1, 2)),
        num_gateways=rng.choice((1, 2)),
        has_store=rng.random() < 0.3,
        replicate=rng.random() < 0.3,
        num_blocks=rng.choice((40, 64, 128, 256)),
        token_budget=rng.choice((16, 32, 64)),
        policy=rng.choice(("cost", "cost", "least_loaded")),
        carrier=rng.choice(("shm", "tcp", "auto")),
        lease_ms=rng.choice((400, 3_000)),
        step_s=rng.choice((0.001, 0.005, 0.02)),
        drain_s=rng.choice((0.2, 5.0)),
        windows=rng.choice(((), (), (), (), (), (12, 0), (7, 30))),
    )
    return replace(shape, whole_blocks=rng.random() < 0.1, skew_s=rng.choice((0.0, 5.0, 660.0)))


def simulate(seed: int, options: SimOptions) -> SimReport:
    """Run the simulation of one seed, and free its memory."""
    with undisturbed():
        return World(seed, options).run()


@contextlib.contextmanager
def undisturbed() -> Generator[None]:
    """Run a simulation inside, and keep no reference to it: nothing is collected while it runs, and what it leaves is
    cleared away at the end, without a complaint."""
    _freeze_loaded_modules()
    was_on = gc.isenabled()
    gc.disable()  # what is collected while it runs would run at a time that no seed decides
    try:
        with _quiet_unraisable(), _quiet_logs():
            yield
            gc.collect()
    finally:
        if was_on:
            gc.enable()


@functools.cache
def _freeze_loaded_modules() -> None:
    """Exclude modules and whatever else is there before the first simulation from garbage collection. Once in a
    process."""
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # else libraries that count their objects call them leaked


@contextlib.contextmanager
def _quiet_logs() -> Generator[None]:
    """Silence the services' logs, which would be full of caused faults, while the block runs."""
    loggers = [logging.getLogger(name) for name in ("services", "dataplane")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _ignore(_unraisable: object) -> None:
    """Ignore it."""


@contextlib.contextmanager
def _quiet_unraisable() -> Generator[None]:
    """Silence the complaints of killed coroutines as they are collected: their `finally` was never to run."""
    hook, sys.unraisablehook = sys.unraisablehook, _ignore
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            yield
    finally:
        sys.unraisablehook = hook
