"""A whole mesh in one process: every service as it is, a memory bus, an engine that cannot get away with wrong KV.

In a test with virtual time engines and streams are cooperative threads and a step takes as long as the simulator says.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import msgspec

from dataplane.blocks.layout import KVLayout, uniform_shape
from schemas import subjects
from schemas.block import hash_blocks, join_hashes, pack_tokens, unpack_tokens
from schemas.ids import GatewayId, HandoffId, RequestId, WorkerId
from schemas.request import (
    AskProgress,
    AskWanted,
    AttemptAccepted,
    CancelRequest,
    KVSource,
    OtherEnd,
    Placement,
    PlaceRequest,
    Progress,
    RequestFailure,
    RequestTokens,
    RunAttempt,
    SamplingParams,
    TokensEmitted,
    TransferReport,
    Wanted,
)
from schemas.subjects import CarriesT, ReplyT, Subject
from schemas.worker import DescribeFleet, WorkerLoad, WorkerRole
from services.bus.limits import MAX_PAYLOAD_BYTES
from services.bus.memory import MemoryBroker, MemoryBus
from services.bus.typed import Received
from services.config import GatewayConfig, MeshConfig, SchedulerConfig, WorkerConfig
from services.directory.service import run_directory
from services.engine.batch import Batch
from services.engine.batch_steps import BatchSteps
from services.engine.client import EngineClient
from services.engine.fake import FakeEngine
from services.engine.interface import CompileGrammar, Engine
from services.engine.thread import EngineThread
from services.holder.core.checks import WorkerLimits
from services.runtime import now_ms
from services.scheduler.service import run_scheduler
from services.sim.brackets import BracketGrammars
from services.sim.platform.engine import Pace, SimEngineThread, SimSteps
from services.telemetry import ListExporter, Telemetry
from services.times import Times
from services.worker.parts import MakeEngine, WorkerParts, info_of
from services.worker.service import run_worker
from tests import virtual
from tests.credentials import CREDENTIALS, GatewayBus
from tests.promises import must_end, same_tokens
from tests.waiting import PATIENCE_S, until

VOCAB = 1000
GRAMMARS = BracketGrammars(VOCAB, eos=0)
CONTEXT_LENGTH = 4096
TOKEN_BUDGET = 64
LEASE_MS = 5_000
LAYOUT = KVLayout(weights="fake", dtype="float32", num_layers=3, num_kv_heads=2, head_dim=8, block_size=8)


def steps_of(engine: Engine, token_budget: int = TOKEN_BUDGET) -> BatchSteps:
    batch = Batch(token_budget, context_length=CONTEXT_LENGTH)
    return BatchSteps(engine, batch) if virtual.network() is None else SimSteps(engine, batch, Pace())


def thread_of(steps: BatchSteps, start_grammar: CompileGrammar) -> MakeEngine:
    return partial(EngineThread if virtual.network() is None else SimEngineThread, steps, start_grammar)


def in_engine(parts: WorkerParts) -> tuple[BatchSteps, CompileGrammar]:
    """Return what the engine's thread of a worker is made of."""
    return cast("partial[EngineClient]", parts.make_engine).args  # type: ignore[return-value]


def fake_engine(parts: WorkerParts) -> FakeEngine:
    engine = in_engine(parts)[0].engine
    assert isinstance(engine, FakeEngine)
    return engine


def make_parts(
    worker_id: str,
    role: WorkerRole,
    *,
    num_blocks: int = 256,
    layout: KVLayout = LAYOUT,
    lease_ms: int = LEASE_MS,
    start_grammar: CompileGrammar = GRAMMARS.compile,
) -> WorkerParts:
    shape = uniform_shape(layout, num_blocks)
    platform = virtual.platform_of(worker_id)
    arena = platform.make_arena(shape)
    limits = WorkerLimits(
        worker_id=WorkerId(worker_id),
        fingerprint=layout.fingerprint,
        num_blocks=num_blocks,
        block_size=layout.block_size,
        context_length=CONTEXT_LENGTH,
        vocab_size=VOCAB,
        eos_token_ids=frozenset({0}),
        max_queued=64,
        lease_ms=lease_ms,
        times=Times(),
    )
    return WorkerParts(
        info=info_of(limits, role, "fake", f"{worker_id}-1"),
        arena=arena,
        shape=shape,
        make_engine=thread_of(steps_of(FakeEngine(shape, arena.buffer, vocab_size=VOCAB)), start_grammar),
        limits=limits,
        credentials=CREDENTIALS,
        platform=platform,
    )


@dataclass
class Answer:
    """What a gateway would know of one attempt."""

    tokens: dict[int, int] = field(default_factory=dict[int, int])
    report: TransferReport | None = None
    prefill_report: TransferReport | None = None
    failure: RequestFailure | None = None
    num_final_tokens: int | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def take(self, tokens: RequestTokens) -> None:
        for index, token in enumerate(unpack_tokens(tokens.tokens), start=tokens.index):
            same_tokens(self.tokens.setdefault(index, token), token)
        if tokens.report is not None and tokens.report.is_prefill:
            self.prefill_report = tokens.report
        else:
            self.report = tokens.report or self.report
        self.failure = tokens.failure or self.failure
        if tokens.finish_reason is not None:
            self.num_final_tokens = tokens.index + len(tokens.tokens) // 4
        # Two workers send: the last token may come before the first.
        if tokens.failure is not None or len(self.tokens) == self.num_final_tokens:
            self.ended.set()

    async def end(self) -> None:
        """Wait until it has ended, well or not."""
        with must_end("an answer"):
            async with asyncio.timeout(PATIENCE_S):
                await self.ended.wait()

    @property
    def token_ids(self) -> list[int]:
        same_tokens(sorted(self.tokens), list(range(len(self.tokens))))
        return [self.tokens[index] for index in range(len(self.tokens))]


@dataclass(frozen=True)
class Route:
    """A placement of the test's own making."""

    prefill_worker: WorkerId
    decode_worker: WorkerId | None = None
    sources: tuple[KVSource, ...] = ()


class Client:
    """Does what a gateway does, without HTTP."""

    def __init__(self, broker: MemoryBroker, tasks: asyncio.TaskGroup, fingerprint: str = LAYOUT.fingerprint) -> None:
        self.fingerprint = fingerprint
        self.gateway_id = GatewayId("gateway-test")
        self.bus = GatewayBus(MemoryBus(broker), "client")
        self._tasks = tasks
        self._answers: dict[str, Answer] = {}
        self.events: list[str] = []
        self.loses_tokens = False
        """As a bus that loses them."""

    async def start(self) -> None:
        await self.bus.listen(self._tasks, subjects.TOKENS, ("*", self.gateway_id), self._on_tokens)
        await self.bus.serve(self._tasks, subjects.WANTED, (self.gateway_id,), self._say_wanted)
        subscription = await self.bus.connection.subscribe("mesh.v1.handoff.>")

        async def note() -> None:
            async for delivery in subscription:
                self.events.append(delivery.subject.rsplit(".", 1)[-1])

        self._tasks.create_task(note())

    async def place(
        self, request_id: str, num_tokens: int, max_tokens: int, *, prompt: list[int] | None = None
    ) -> Placement:
        hashes = hash_blocks(prompt or [], LAYOUT.block_size, model_fingerprint=self.fingerprint)
        request = PlaceRequest(
            request_id=RequestId(request_id),
            attempt=1,
            deadline_ms=now_ms() + 60_000,
            num_prompt_tokens=num_tokens,
            max_tokens=max_tokens,
            block_hashes=join_hashes(hashes),
        )
        placement = await self.bus.ask(subjects.PLACE, (), request, 10)
        assert isinstance(placement, Placement), placement
        return placement

    def expect(self, request_id: str) -> Answer:
        """Return what will fill with this request's tokens."""
        return self._answers.setdefault(request_id, Answer())

    async def send(
        self,
        request_id: str,
        prompt: list[int],
        sampling: SamplingParams,
        *,
        deadline_ms: int = 60_000,
        route: Route | None = None,
    ) -> Answer:
        """Start one attempt; the answer fills as it comes. Without a `route` the scheduler chooses."""
        placement = route or await self.place(request_id, len(prompt), sampling.max_tokens, prompt=prompt)
        answer = self.expect(request_id)
        deadline = now_ms() + deadline_ms
        handoff_id = HandoffId(f"{request_id}-1")
        source, target = placement.prefill_worker, placement.decode_worker
        run = RunAttempt(
            request_id=RequestId(request_id),
            attempt=1,
            deadline_ms=deadline,
            gateway_id=self.gateway_id,
            prompt=pack_tokens(prompt),
            sampling=sampling,
            downstream=OtherEnd(worker_id=target, handoff_id=handoff_id) if target is not None else None,
            sources=placement.sources,
        )
        asked = [self.bus.ask(subjects.RUN, (source,), run, 30)]
        if target is not None:
            upstream = OtherEnd(worker_id=source, handoff_id=handoff_id)
            other = msgspec.structs.replace(run, upstream=upstream, downstream=None)
            asked.append(self.bus.ask(subjects.RUN, (target,), other, 30))
        replies = await asyncio.gather(*asked)
        assert all(isinstance(reply, AttemptAccepted) for reply in replies), replies
        return answer

    async def complete(
        self, request_id: str, prompt: list[int], sampling: SamplingParams, *, route: Route | None = None
    ) -> Answer:
        answer = await self.send(request_id, prompt, sampling, route=route)
        await answer.end()
        return answer

    async def cancel(self, request_id: str) -> None:
        message = CancelRequest(
            request_id=RequestId(request_id), attempt=1, deadline_ms=now_ms() + 1000, reason="client gone"
        )
        await self.bus.publish(subjects.CANCEL, (request_id,), message)

    async def fleet(self) -> tuple[WorkerLoad, ...]:
        reply = await self.bus.ask(subjects.FLEET, (), DescribeFleet(), 10)
        return reply.workers

    async def until(self, holds: Callable[[tuple[WorkerLoad, ...]], bool]) -> None:
        """Wait, generously, until this holds of the fleet."""

        async def does_hold() -> bool:
            return holds(await self.fleet())

        await until(does_hold)

    async def until_free(self) -> None:
        """After the last request nothing is running or leased: every block is free, or kept for its content."""
        with must_end("the blocks that nobody uses any more"):
            await self.until(lambda fleet: all(w.blocks.free + w.blocks.cached == w.blocks.total for w in fleet))

    def forget(self, request_id: str) -> None:
        """Want it no more."""
        del self._answers[request_id]

    async def listen(self, subject: Subject[CarriesT, Any], handle: Callable[[Received[CarriesT]], None]) -> None:
        await self.bus.listen(self._tasks, subject, ("*",), handle)
        await self.bus.connection.flush()

    async def serve(
        self, subject: Subject[CarriesT, ReplyT], handle: Callable[[Received[CarriesT]], Awaitable[ReplyT]]
    ) -> None:
        await self.bus.serve(self._tasks, subject, (self.gateway_id,), handle)

    async def ask_progress(self, worker_id: str, request_id: str, index: int) -> Progress:
        question = AskProgress(request_id=RequestId(request_id), attempt=1, deadline_ms=now_ms() + 10_000, index=index)
        return await self.bus.ask(subjects.PROGRESS, (worker_id,), question, 10)

    async def _say_wanted(self, received: Received[AskWanted]) -> Wanted:
        """Wants all that was asked for here."""
        unknown = [attempt for attempt in received.message.attempts if attempt.request_id not in self._answers]
        return Wanted(unwanted=tuple(unknown))

    def _on_tokens(self, received: Received[TokensEmitted]) -> None:
        if self.loses_tokens:
            return
        for tokens in received.message.requests:
            self._answers[tokens.request_id].take(tokens)


def _is_free(load: WorkerLoad) -> bool:
    return load.blocks.free + load.blocks.cached == load.blocks.total


@asynccontextmanager
async def one_process_mesh(
    *workers: WorkerParts,
    carrier: str = "auto",
    token_budget: int = TOKEN_BUDGET,
    policy: str = "least_loaded",
    prefix_cache: bool = True,
    stops: dict[str, asyncio.Event] | None = None,
    fence_after_ms: int = 20_000,
    drain_s: float = 5.0,
    lease_ms: int = LEASE_MS,
    leave_bytes: int = 2**29,
    exporter: ListExporter | None = None,
    max_bytes: int = MAX_PAYLOAD_BYTES,
    times: Times = Times(),  # noqa: B008  (frozen)
) -> AsyncGenerator[Client]:
    """Run scheduler, directory and these workers on one loop, and give a client once all are known.

    `stops`: of workers that are to stop before the others do.
    """
    broker, stop = MemoryBroker(max_bytes), asyncio.Event()
    settings = WorkerConfig(
        block_size=LAYOUT.block_size, token_budget=token_budget, carrier=carrier, lease_ms=lease_ms,  # type: ignore[arg-type]
        prefix_cache=prefix_cache, fence_after_ms=fence_after_ms, drain_s=drain_s,
        leave_bytes=leave_bytes,
    )  # fmt: skip
    silent_ms = max(3_000, fence_after_ms + 1_000)
    config = MeshConfig(
        worker=settings,
        scheduler=SchedulerConfig(policy=policy, pull_tokens_min=LAYOUT.block_size, silent_after_ms=silent_ms),
        gateway=GatewayConfig(worker_silent_ms=silent_ms),
        times=times,
    )
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(run_scheduler(config, MemoryBus(broker), Telemetry("scheduler"), stop))
        tasks.create_task(run_directory(config, MemoryBus(broker), Telemetry("directory"), stop))
        for parts in workers:
            steps, start_grammar = in_engine(parts)
            limits = replace(parts.limits, times=times)
            made = thread_of(steps_of(steps.engine, token_budget), start_grammar)
            parts = replace(parts, make_engine=made, limits=limits)
            exporters = [exporter] if exporter is not None else []
            telemetry = Telemetry(parts.worker_id, exporters, at_once=bool(exporters))
            tasks.create_task(
                run_worker(parts, config, MemoryBus(broker), telemetry, (stops or {}).get(parts.worker_id, stop))
            )
        client = Client(broker, tasks, workers[0].shape.layout.fingerprint)
        await client.start()
        await asyncio.sleep(0)
        await client.until(lambda fleet: len(fleet) == len(workers))
        yield client
        stop.set()
        for one in (stops or {}).values():
            one.set()
        await client.bus.close()
