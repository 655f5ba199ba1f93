"""A simulated mesh: every service's own code on one event loop, with an engine whose tokens depend on the KV it
reads."""

import asyncio
import contextvars
import itertools
import random
from dataclasses import dataclass, field

import msgspec
from tokenizers import Tokenizer, models

from dataplane.blocks.layout import ArenaShape, KVLayout, uniform_shape
from dataplane.carriers.carrier import KVArena
from dataplane.ends.server import LeaseGate
from schemas.ids import GatewayId, WorkerId
from schemas.permissions import permissions_of, role_of
from schemas.worker import WorkerRole
from services.bus.base import BusError
from services.clocks import keep_time
from services.config import GatewayConfig, MeshConfig, SchedulerConfig, StoreConfig, WorkerConfig
from services.directory.service import run_directory
from services.engine.batch import Batch
from services.engine.client import EngineCallbacks
from services.engine.fake import FakeEngine
from services.gateway.api.prepare import GatewayModel
from services.gateway.api.routes import GatewayApp
from services.gateway.api.text import TextCodec
from services.holder.core.checks import WorkerLimits
from services.holder.platform import Platform
from services.metrics import Metrics
from services.scheduler.service import run_scheduler
from services.sim.brackets import BracketGrammars
from services.sim.gateway import run_sim_gateway
from services.sim.limits import REQUEST_TIMEOUT_S, RESTART_S
from services.sim.platform.bus import SimBroker, SimBus
from services.sim.platform.clock import LocalClock
from services.sim.platform.engine import Pace, SimEngineThread, SimSteps
from services.sim.platform.loop import Process, SimLoop
from services.sim.platform.plane import SimNetwork, memory_arena, sim_platform
from services.store.load import make_parts as make_store_parts
from services.store.service import run_store
from services.telemetry import ListExporter, MeshClock, SpanRecord, Telemetry
from services.trust.credentials import HolderCredentials, holder_credentials
from services.worker.parts import WorkerParts, info_of
from services.worker.service import run_worker

VOCAB = 61
EOS = 0
GRAMMARS = BracketGrammars(VOCAB, EOS)
BLOCK_SIZE = 4
CONTEXT_LENGTH = 256
LAYOUT = KVLayout(weights="simulated", dtype="float32", num_layers=2, num_kv_heads=1, head_dim=4, block_size=BLOCK_SIZE)
SECRET = "a secret of the simulation"


@dataclass(frozen=True, kw_only=True)
class MeshShape:
    """The size of a mesh, and its settings. `num_blocks`: of each worker's arena."""

    num_prefill: int = 2
    num_decode: int = 2
    num_aggregated: int = 0
    num_schedulers: int = 1
    num_directories: int = 1
    num_gateways: int = 1
    num_servers: int = 1
    """Of the broker. With several each has a machine of its own, and the services are spread over these."""
    has_store: bool = False
    replicate: bool = False
    num_blocks: int = 96
    token_budget: int = 32
    policy: str = "cost"
    carrier: str = "auto"
    lease_ms: int = 3_000
    step_s: float = 0.002
    """The fixed part of an engine step's time; its tokens add to it."""
    drain_s: float = 5.0
    skew_s: float = 0.0
    """The machines' clocks differ from the true time by so much at most."""
    windows: tuple[int, ...] = ()
    """For each layer, as `KVLayout.windows`."""
    whole_blocks: bool = False
    """As `KVLayout.whole_blocks`."""
    context_length: int = CONTEXT_LENGTH
    vocab_size: int = VOCAB

    @property
    def layout(self) -> KVLayout:
        return msgspec.structs.replace(LAYOUT, windows=self.windows, whole_blocks=self.whole_blocks)

    @property
    def services(self) -> list[tuple[str, str]]:
        """(role, name) of every process."""
        counts = {
            "scheduler": self.num_schedulers, "directory": self.num_directories, "store": int(self.has_store),
            "prefill": self.num_prefill, "decode": self.num_decode, "aggregated": self.num_aggregated,
            "gateway": self.num_gateways,
        }  # fmt: skip
        return [(role, f"{role}-{number}") for role, count in counts.items() for number in range(count)]


@dataclass(eq=False)
class Service:
    """One service, and the process that runs it now."""

    role: str
    name: str
    member: str
    """Its name on the bus: a gateway's is another one in each of its lives."""
    process: Process
    bus: SimBus
    stop: asyncio.Event
    task: "asyncio.Task[None] | None" = None
    app: GatewayApp | None = None
    """The application of a gateway that is ready."""
    engine: SimEngineThread | None = None
    dates: MeshClock | None = None
    """The mesh's time, as far as it knows it."""
    gates: list[LeaseGate] = field(default_factory=list[LeaseGate])
    """For a KV holder: what answers for its leases towards the data plane."""

    def run_app(self, app: GatewayApp) -> None:
        """A gateway is ready to answer clients."""
        self.app = app

    @property
    def is_running(self) -> bool:
        return not self.process.is_dead and self.task is not None and not self.task.done()


class SimMesh:
    """Starts, kills, pauses and restarts the services of one mesh."""

    def __init__(self, loop: SimLoop, rng: random.Random, shape: MeshShape, broker: SimBroker, network: SimNetwork):
        self.loop = loop
        self.shape = shape
        self.broker = broker
        self.network = network
        self.services: dict[str, Service] = {}
        self.config = self._make_config(shape)
        self._clocks = random.Random(rng.getrandbits(64))
        self._model = _served_model(shape)
        self._starts = itertools.count(1)
        self._woken_s = -1.0
        self._context = contextvars.copy_context()
        self.spans: list[SpanRecord] | None = None
        """Where the spans of all services are collected. None: they are not kept."""

    def _make_config(self, shape: MeshShape) -> MeshConfig:
        return MeshConfig(
            ticket_secrets=(SECRET,),
            tenant_seed=SECRET,
            gateway=GatewayConfig(request_timeout_s=REQUEST_TIMEOUT_S),
            scheduler=SchedulerConfig(
                policy=shape.policy, pull_tokens_min=BLOCK_SIZE, unsplit_tokens_max=16, replicate=shape.replicate
            ),
            worker=WorkerConfig(
                ways="off",  # hosts here are names, and no sockets
                block_size=BLOCK_SIZE,
                token_budget=shape.token_budget,
                max_queued=64,
                carrier=shape.carrier,  # type: ignore[arg-type]
                lease_ms=shape.lease_ms,
                drain_s=shape.drain_s,
            ),
            store=StoreConfig(memory_bytes=LAYOUT.block_bytes * 256),
        )

    def start_all(self) -> None:
        for role, name in self.shape.services:
            self.launch(role, name)

    def launch(self, role: str, name: str) -> Service:
        """Start a process for this service. It shares no state with its predecessor."""
        number = next(self._starts)
        process = Process(name, self._make_clock())
        member = f"{name}-{number}" if role == "gateway" else name
        bus = self.broker.connect(name, permissions_of(role_of(role), member))
        service = Service(role, name, member, process, bus, asyncio.Event())
        process.on_kill.append(lambda: self.broker.drop(service.bus))
        process.on_kill.append(lambda: self.network.kill(f"{name}.{number}"))
        self.services[name] = service
        service.task = self.loop.spawn(process, self._supervised(service, f"{name}.{number}"), name)
        return service

    def _make_clock(self) -> LocalClock:
        """Return the clocks of a machine that has run for some time, set as well as it is."""
        ahead_s = self._clocks.uniform(-self.shape.skew_s, self.shape.skew_s)
        return LocalClock(round(self._clocks.uniform(1e3, 1e6) * 1e9), round(ahead_s * 1e9))

    def drift(self, service: Service, rate: float) -> None:
        """Let a machine's clocks go at `rate` seconds a second."""
        service.process.clock.drift(rate, self.now_ns)

    @property
    def now_ns(self) -> int:
        """The simulation's own time."""
        return round(self.loop.time() * 1e9)

    def kill(self, service: Service) -> None:
        self.loop.kill(service.process)

    def resume(self, service: Service) -> None:
        """Let a paused process go on."""
        if service.process.is_paused:
            self._woken_s = self.loop.time()
            self.loop.resume(service.process)

    def woken_since(self, time_s: float) -> bool:
        """Return whether a process was paused at this time, or has been resumed since."""
        return self._woken_s >= time_s

    def living(self, target: str) -> list[Service]:
        """Return the running services of a role, or the one of this name."""
        return [s for s in self.services.values() if target in (s.role, s.name) and s.is_running]

    def on_machine(self, number: int) -> list[str]:
        """Return the names of the services on the machine of one of the broker's servers."""
        return [name for at, (_, name) in enumerate(self.shape.services) if at % self.shape.num_servers == number]

    async def _supervised(self, service: Service, host: str) -> None:
        """Run a service; one that cannot start while the broker is away ends with an error, and is started again."""
        exporters = [ListExporter(self.spans)] if self.spans is not None else []
        telemetry = Telemetry(service.name, exporters, self.config.telemetry, at_once=True)
        service.dates = telemetry.clock
        if service.role != "scheduler":  # as `serve` does
            keeps_time = keep_time(service.bus, telemetry.clock, Metrics(), self.config.times.telemetry)
            clock = self.loop.spawn(service.process, keeps_time, "keep the time")
            assert service.task is not None, "it runs this"
            service.task.add_done_callback(lambda _: clock.cancel())
        try:
            await self._run(service, host, telemetry)
        except* BusError:
            service.bus.broker.drop(service.bus)
            self.network.kill(host)
            asyncio.get_running_loop().call_later(RESTART_S, self._start_again, service, context=self._context)

    def _start_again(self, service: Service) -> None:
        if self.services[service.name] is service and not service.process.is_dead:
            self.launch(service.role, service.name)

    async def _run(self, service: Service, host: str, telemetry: Telemetry) -> None:
        credentials = holder_credentials(self.config)
        match service.role:
            case "scheduler":
                await run_scheduler(self.config, service.bus, telemetry, service.stop)
            case "directory":
                await run_directory(self.config, service.bus, telemetry, service.stop)
            case "gateway":
                gateway_id = GatewayId(service.member)
                await run_sim_gateway(
                    self.config, self._model, gateway_id, service.bus, telemetry, service.stop, on_ready=service.run_app
                )
            case "store":
                store = make_store_parts(
                    self.config, service.name, self.shape.layout, credentials, model="fake",
                    context_length=CONTEXT_LENGTH, platform=sim_platform(self.network, host, service.gates.append),
                )  # fmt: skip
                await run_store(self.config, store, service.bus, telemetry, service.stop)
            case role:
                parts = self._parts(service, role, host, credentials)  # type: ignore[arg-type]
                await run_worker(parts, self.config, service.bus, telemetry, service.stop)

    def _parts(self, service: Service, role: WorkerRole, host: str, credentials: HolderCredentials) -> WorkerParts:
        shape = uniform_shape(self.shape.layout, self.shape.num_blocks)
        arena, steps = self._make_engine(shape, host)
        limits = WorkerLimits(
            worker_id=WorkerId(service.name),
            fingerprint=shape.layout.fingerprint,
            num_blocks=self.shape.num_blocks,
            block_size=shape.layout.block_size,
            context_length=self.shape.context_length,
            vocab_size=self.shape.vocab_size,
            eos_token_ids=frozenset({EOS}),
            max_queued=self.config.worker.max_queued,
            lease_ms=self.config.worker.lease_ms,
            times=self.config.times,
        )

        # Store the engine in `service`: faults kill it, or let it hang, from outside the worker.
        def make_engine(callbacks: EngineCallbacks) -> SimEngineThread:
            service.engine = SimEngineThread(steps, GRAMMARS.compile, callbacks)
            return service.engine

        return WorkerParts(
            info=info_of(limits, role, "fake", host),
            arena=arena,
            shape=shape,
            make_engine=make_engine,
            limits=limits,
            credentials=credentials,
            platform=self._make_platform(host, service),
        )

    # What a measured mesh does in its own way.

    def _make_engine(self, shape: ArenaShape, host: str) -> tuple[KVArena, SimSteps]:
        arena = memory_arena(shape, host)
        engine = FakeEngine(shape, arena.buffer, vocab_size=VOCAB)
        batch = Batch(self.config.worker.token_budget, context_length=CONTEXT_LENGTH)
        return arena, SimSteps(engine, batch, Pace(base_s=self.shape.step_s))

    def _make_platform(self, host: str, service: Service) -> Platform:
        return sim_platform(self.network, host, service.gates.append)


def _served_model(shape: MeshShape) -> GatewayModel:
    vocabulary = {f"t{number}": number for number in range(VOCAB)}
    return GatewayModel(
        name="fake",
        names=frozenset({"fake"}),
        codec=TextCodec(Tokenizer(models.WordLevel(vocab=vocabulary, unk_token="t1"))),
        vocab_size=shape.vocab_size,
        context_length=shape.context_length,
        eos_token_ids=frozenset({EOS}),
        layout=shape.layout,
        num_worker_tokens=min(shape.context_length, shape.num_blocks * shape.layout.block_size),
        grammars=GRAMMARS,
        tool_format=None,
    )
