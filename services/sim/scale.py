"""How a mesh does at a size: many workers in virtual time, and what the control plane costs in real CPU time.

Scheduler, directory, gateways and workers are their own code on the simulated bus, messages and all. Only what no
decision depends on is coarse (`platform/coarse.py`): engines keep a model's pace, reads take latency and bytes / rate.
Clients speak to a gateway's request cores without HTTP: tokenizing and writing text are not part of this.

Where `charge` is set, the CPU time that scheduler, directory and each gateway take here passes in virtual time as well:
each is busy meanwhile, as one process on such a core would be, and what it sends leaves after its work. Else only
messages' delays pass, and the same seed gives the same virtual figures.
"""

import asyncio
import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import numpy as np

from dataplane.blocks.layout import ArenaShape, KVLayout
from dataplane.carriers.carrier import KVArena
from schemas.ids import RequestId
from schemas.request import SamplingParams
from services.config import GatewayConfig, MeshConfig, TelemetryConfig, WorkerConfig
from services.engine.batch import Batch
from services.gateway.request.answer_usage import answer_usage
from services.gateway.request.events import Deliver, FailRequest, Finish
from services.gateway.request.job import BlockKey, Job, pack_prompt
from services.gateway.request.mailbox import Mailbox
from services.gateway.requests import Requests
from services.holder.platform import Platform
from services.runtime import now_ms
from services.sim.limits import END_GRACE_S, READY_WITHIN_S, REQUEST_TIMEOUT_S
from services.sim.mesh import MeshShape, Service, SimMesh
from services.sim.offered import VOCAB, OfferedRequest, offer
from services.sim.platform.bus import SimBroker
from services.sim.platform.clock import BOOT_NS, LocalClock
from services.sim.platform.coarse import CoarseReader, ModelPace, PacedEngine, no_memory
from services.sim.platform.engine import SimSteps
from services.sim.platform.loop import SimLoop, lag_s
from services.sim.platform.meter import CpuMeter
from services.sim.platform.plane import SimNetwork, sim_platform
from services.sim.verdict.rest import problems_now
from services.sim.world import SimOptions, World, undisturbed

MAX_WORKERS = 1_000
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, MAX_WORKERS)
WORKERS_A_GATEWAY = 128
REQUESTS_A_WORKER = 4
MIN_REQUESTS = 256
LOAD = 0.5
"""What is offered, as a share of what the workers can compute."""
PACE = ModelPace(step_base_s=9e-3, prefill_token_s=163e-6, context_token_s=74e-9, decode_token_s=1.26e-3)
"""Of the small random model of docs/benchmarks.md on one thread: prompts of 1,000 and 10,000 tokens take 209 and 5,339
ms, a decode step of 32 answers 50.5 ms."""
LAYOUT = KVLayout(weights="paced", dtype="float32", num_layers=1, num_kv_heads=1, head_dim=768, block_size=16)
"""6 KiB a token, as that model's; its layers are one here, as a step's layers are announced at once."""
READ_LATENCY_S = (0.002, 0.003)
READ_BYTES_PER_S = 1.65 * 2**30
"""Of one read: `tcp` with digests, as docs/benchmarks.md has it."""
CONTROL = ("scheduler", "directory", "gateway")
WORKERS = "workers"


@dataclass(frozen=True, kw_only=True)
class ScaleOptions:
    """What to measure. `num_requests` 0: `REQUESTS_A_WORKER` for each worker, and at least `MIN_REQUESTS`."""

    num_workers: int
    num_requests: int = 0
    charge: bool = False

    @property
    def size(self) -> int:
        return self.num_requests or max(MIN_REQUESTS, REQUESTS_A_WORKER * self.num_workers)


class ScaleRow(msgspec.Struct, frozen=True, kw_only=True):
    """One size. Times and rates are virtual but for those with `cpu`, which are real CPU time of this machine.

    `ttft_*`: from a gateway's getting a request to its having the first token; `place_*`: the part of it until the
    gateway knows where to send the request. `reused`: the share of the prompts' tokens that were not computed.
    `cpu_us`: for each request, by service (all gateways, all workers); `cpu_busy`: CPU seconds a virtual second, of one
    process (gateways and workers: their mean); over 1 it cannot keep up. `control_share`: scheduler, directory and
    gateways of all services' CPU time, in which the workers' engines and the bus count nothing.
    """

    workers: int
    gateways: int
    requests: int
    finished: int
    failed: dict[str, int]
    offered_per_s: float
    requests_per_s: float
    ttft_p50_ms: float | None
    ttft_p99_ms: float | None
    place_p50_ms: float | None
    place_p99_ms: float | None
    place_share: float | None
    reused: float
    cpu_us: dict[str, float]
    cpu_busy: dict[str, float]
    control_share: float
    virtual_s: float
    cpu_s: float
    messages: int
    digest: str
    problems: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class ScaleShape(MeshShape):
    """A mesh of paced workers."""

    @property
    def layout(self) -> KVLayout:
        return LAYOUT


def shape_of(num_workers: int) -> ScaleShape:
    """Return a mesh with so many workers, half of each role; one is alone and plays both."""
    num_decode = num_workers // 2
    return ScaleShape(
        num_prefill=num_workers - num_decode if num_decode else 0,
        num_decode=num_decode,
        num_aggregated=0 if num_decode else 1,
        num_gateways=math.ceil(num_workers / WORKERS_A_GATEWAY),
        num_blocks=4_096,
        context_length=8_192,
        vocab_size=VOCAB,
    )


class ScaleMesh(SimMesh):
    """A mesh whose engines are paced, and whose reads move no bytes. Settings are the defaults of a real mesh."""

    def _make_config(self, shape: MeshShape) -> MeshConfig:
        config = super()._make_config(shape)
        return msgspec.structs.replace(
            config,
            gateway=GatewayConfig(request_timeout_s=REQUEST_TIMEOUT_S),
            scheduler=type(config.scheduler)(),
            worker=WorkerConfig(ways="off"),
            telemetry=TelemetryConfig(sample_ratio=0.0),
        )

    def _make_clock(self) -> LocalClock:
        return LocalClock()  # a ticket is checked on its reader's side here

    def _make_engine(self, shape: ArenaShape, host: str) -> tuple[KVArena, SimSteps]:
        engine = PacedEngine(shape.layout, self.shape.vocab_size)
        batch = Batch(self.config.worker.token_budget, context_length=self.shape.context_length)
        return no_memory(host), SimSteps(engine, batch, PACE)

    def _make_platform(self, host: str, service: Service) -> Platform:
        return sim_platform(self.network, host, service.gates.append, CoarseReader)


@dataclass
class Seen:
    """What a client has seen of its request; times in virtual seconds."""

    request: OfferedRequest
    asked_s: float = 0.0
    first_s: float | None = None
    place_s: float = 0.0
    ended_s: float | None = None
    num_tokens: int = 0
    failed: str = ""
    num_reused: int = 0


@dataclass
class Window:
    """CPU time by role, and the virtual time, at some moment."""

    at_s: float
    cpu_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys((*CONTROL, WORKERS), 0.0))


class ScaleWorld(World):
    """One size: `run` it once, then `row`."""

    def __init__(self, seed: int, options: ScaleOptions, on_ended: Callable[[], None]) -> None:
        self.meter = CpuMeter()
        shape = shape_of(options.num_workers)
        super().__init__(seed, SimOptions(num_requests=options.size, shape=shape, check_spans=False))
        self._scale = options
        self._on_ended = on_ended
        self.seen: list[Seen] = []
        self._windows: list[Window] = []

    def _make_loop(self) -> SimLoop:
        return SimLoop(self.clock, self._new_rng(), self.meter)

    async def _live(self) -> None:
        shape = self.options.shape
        assert shape is not None
        # Build the mesh. The bus has the meter, so its work counts for no sender; reads have the measured `tcp` rate.
        self.broker = SimBroker(self._new_rng(), meter=self.meter)
        self.network = SimNetwork(self._new_rng(), latency_s=READ_LATENCY_S, bytes_per_s=READ_BYTES_PER_S)
        self.mesh = ScaleMesh(self.loop, self._new_rng(), shape, self.broker, self.network)
        self.broker.taps.append(self._note)
        self.mesh.start_all()
        await self._until(self._is_ready, READY_WITHIN_S, "the mesh was never ready")
        # Charge from here on: what the start has cost counts as passed already.
        if self._scale.charge:
            for service in self.mesh.services.values():
                if service.role in CONTROL:
                    service.process.cpu.passed_s = service.process.cpu.taken_s
                    service.process.is_charged = True
        # Send the requests between two windows; the difference of the windows is the measurement.
        offered = offer(self._new_rng(), self._scale.size, self._scale.num_workers, PACE, LOAD)
        self._windows.append(self._window())
        last_s = offered[-1].at_s
        # A timeout is no error here: `_judge` reports every request that has not ended.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(last_s + REQUEST_TIMEOUT_S + END_GRACE_S), asyncio.TaskGroup() as tasks:
                for request in offered:
                    tasks.create_task(self._ask(request), name="client")
                tasks.create_task(self._check_at(last_s / 2), name="check")
        self._windows.append(self._window())
        # The measurement is over: what follows only checks the result, and is not charged.
        for service in self.mesh.services.values():
            service.process.is_charged = False
        self._judge()
        await self._rest()
        self.verdict.problems += problems_now(self.mesh)

    async def _check_at(self, at_s: float) -> None:
        """Check what must hold at any time, once in the middle: it takes long at a thousand workers."""
        await asyncio.sleep(at_s)
        self.verdict.problems += problems_now(self.mesh)

    async def _ask(self, request: OfferedRequest) -> None:
        """Be one client: wait, ask a gateway, and take its answer."""
        begin_s = self.clock.now_s
        await asyncio.sleep(request.at_s)
        gateways = self.mesh.living("gateway")
        service = gateways[request.number % len(gateways)]
        assert service.app is not None
        seen = Seen(request, asked_s=begin_s + request.at_s)
        self.seen.append(seen)
        await self.loop.spawn(service.process, self._answer(service.app.gateway.requests, seen), "client")
        self._on_ended()

    async def _answer(self, requests: Requests, seen: Seen) -> None:
        """Do a gateway's part for one request, as its HTTP side would."""
        # Make the job as the HTTP side would. `ignore_eos` fixes the answer's length, which `_judge` checks.
        request, mailbox = seen.request, Mailbox()
        key = BlockKey(block_size=LAYOUT.block_size, model_fingerprint=LAYOUT.fingerprint)
        job = Job(
            request_id=RequestId(f"r{request.number}"),
            prompt=pack_prompt(request.prompt(), key),
            key=key,
            sampling=SamplingParams(max_tokens=request.max_tokens, seed=request.number, ignore_eos=True),
            deadline_ms=now_ms() + round(REQUEST_TIMEOUT_S * 1000),
            trace=requests.telemetry.child_of(""),
        )
        # Collect the outputs. CPU time that is not charged yet (`lag_s`) delays the first token too.
        live = requests.submit(job, 0, mailbox)
        while seen.ended_s is None:
            for _, output in await mailbox.collect():
                if isinstance(output, Deliver):
                    if seen.first_s is None:
                        seen.first_s = self.clock.now_s + lag_s()
                        # `placed_ns` is a reading of the gateway's monotonic clock, which begins at `BOOT_NS`.
                        seen.place_s = (live.times.placed_ns - BOOT_NS) / 1e9 - seen.asked_s
                    seen.num_tokens += len(output.tokens)
                else:
                    seen.ended_s = self.clock.now_s
                    if not isinstance(output, Finish):
                        seen.failed = output.code if isinstance(output, FailRequest) else output.reason
        # The prefill worker of a split request computed its prompt: that worker's report has the reused tokens.
        usage = answer_usage([live.core], 1, request.num_prompt_tokens, seen.num_tokens)
        sources = usage.prefill or usage.sources
        seen.num_reused = sources.cached_tokens + sources.transferred_tokens

    def _window(self) -> Window:
        window = Window(self.clock.now_s)
        for service in self.mesh.services.values():
            role = service.role if service.role in CONTROL else WORKERS
            window.cpu_s[role] += service.process.cpu.taken_s
        return window

    def _judge(self) -> None:
        """Check that every request has ended with all of its tokens. Where the control plane is charged for its time it
        may be too busy to have a request served."""
        verdict = self.verdict
        for seen in self.seen:
            verdict.num_requests += 1
            name = f"request {seen.request.number}"
            if seen.ended_s is None:
                verdict.num_unfinished += 1
                verdict.problems.append(f"{name} never ended")
            elif seen.failed:
                verdict.failed[seen.failed] += 1
                if not self._scale.charge:
                    verdict.problems.append(f"{name} was not answered although nothing went wrong: {seen.failed}")
            elif seen.num_tokens != seen.request.max_tokens:
                verdict.num_wrong += 1
                verdict.problems.append(f"{name} has {seen.num_tokens} tokens, not {seen.request.max_tokens}")
            else:
                verdict.num_finished += 1

    def row(self, digest: str) -> ScaleRow:
        """Return what was measured. After `run`."""
        begin, end = self._windows
        shape, seen = self.options.shape, self.seen
        assert shape is not None
        # Time between the two windows. The CPU time of gateways and workers is a sum over their processes.
        virtual_s, num_requests = end.at_s - begin.at_s, len(seen)
        cpu_s = {role: end.cpu_s[role] - begin.cpu_s[role] for role in (*CONTROL, WORKERS)}
        processes = {"gateway": shape.num_gateways, WORKERS: self._scale.num_workers}
        # Latencies count every request that got a token, also one that failed later.
        first = [one for one in seen if one.first_s is not None]
        ttft_ms = [(one.first_s - one.asked_s) * 1e3 for one in first if one.first_s is not None]
        place_ms = [one.place_s * 1e3 for one in first]
        # The offered rate is over the time of sending alone; the served rate is over the whole window.
        offered_s = max(one.asked_s for one in seen) - begin.at_s
        # The reuse is a share of the answered requests' prompts: others may have no usage.
        computed = [one for one in seen if one.ended_s is not None and not one.failed]
        num_tokens = sum(one.request.num_prompt_tokens for one in computed)
        return ScaleRow(
            workers=self._scale.num_workers,
            gateways=shape.num_gateways,
            requests=num_requests,
            finished=self.verdict.num_finished,
            failed=dict(sorted(self.verdict.failed.items())),
            offered_per_s=round(num_requests / offered_s, 2),
            requests_per_s=round(self.verdict.num_finished / virtual_s, 2),
            ttft_p50_ms=_percentile(ttft_ms, 50),
            ttft_p99_ms=_percentile(ttft_ms, 99),
            place_p50_ms=_percentile(place_ms, 50),
            place_p99_ms=_percentile(place_ms, 99),
            place_share=round(sum(place_ms) / sum(ttft_ms), 4) if ttft_ms else None,
            reused=round(sum(one.num_reused for one in computed) / max(1, num_tokens), 3),
            cpu_us={role: round(spent_s / num_requests * 1e6, 1) for role, spent_s in cpu_s.items()},
            cpu_busy={role: round(spent_s / virtual_s / processes.get(role, 1), 3) for role, spent_s in cpu_s.items()},
            control_share=round(sum(cpu_s[role] for role in CONTROL) / max(1e-9, sum(cpu_s.values())), 3),
            virtual_s=round(virtual_s, 3),
            cpu_s=round(sum(cpu_s.values()), 2),
            messages=self.broker.num_messages,
            digest=digest,
            problems=tuple(self.verdict.problems),
        )


def measure(seed: int, options: ScaleOptions, on_ended: Callable[[], None] = lambda: None) -> ScaleRow:
    """Measure one size, and free its memory. `on_ended` is called as each request ends."""
    with undisturbed():
        return _row_of(seed, options, on_ended)


def _row_of(seed: int, options: ScaleOptions, on_ended: Callable[[], None]) -> ScaleRow:
    world = ScaleWorld(seed, options, on_ended)
    return world.row(world.run().digest)


def _percentile(values: list[float], percent: float) -> float | None:
    return round(float(np.percentile(values, percent)), 2) if values else None
