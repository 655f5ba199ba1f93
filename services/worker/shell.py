"""The shell around a worker's cores: carries out what they decide, in order, and brings them what happens.

Cores run on the event loop only. The engine's and the plane's threads post what they have to say to the loop.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Protocol

from dataplane.cache import BlockCache
from dataplane.lease import Lease
from dataplane.stream import TransferStats
from schemas import subjects
from schemas.block import join_hashes
from schemas.directory import BlocksStored, ReadInventory
from schemas.ids import GatewayId, LeaseId, RequestId
from schemas.kv import BlocksCooling, RequestLease
from schemas.message import Message
from schemas.request import CancelRequest, Refused, RequestTokens, RunPrefill
from schemas.worker import WorkerDraining, WorkerInfo, WorkerJoined, WorkerLeft, WorkerLoad
from services.bus.base import Bus
from services.bus.typed import Received, TypedBus
from services.config import MeshConfig
from services.engine.base import Sequence, StepResult
from services.engine.batch import Batch
from services.engine.thread import EngineStoppedError, InvalidSequenceError
from services.runtime import now_ms
from services.telemetry import Telemetry
from services.worker.actions import (
    Action,
    AttemptKey,
    CloseLease,
    Emit,
    Fetch,
    FinishLease,
    Offer,
    OpenLease,
    Publish,
    StartRead,
    StopFetch,
    StopRead,
    Submit,
    Withdraw,
)
from services.worker.content import ReadOutcome
from services.worker.fetch import Fetches
from services.worker.holder import KVHolder
from services.worker.lend import LendCore
from services.worker.load import WorkerParts
from services.worker.outbox import Outbox
from services.worker.rates import RateBook
from services.worker.spans import LeaseTrace, LeaseTraces, WorkerSpans
from services.worker.wire import WireChoice

LOAD_INTERVAL_S = 0.5
LOAD_MIN_GAP_S = 0.05
TICK_INTERVAL_S = 0.1
ENGINE_STOP_TIMEOUT_S = 10.0


class WorkerCore(Protocol):
    """What the shell needs of a role's core, whatever the role."""

    draining: bool

    @property
    def num_runs(self) -> int: ...
    @property
    def num_queued(self) -> int: ...
    @property
    def num_queued_tokens(self) -> int: ...
    @property
    def num_unreceived_tokens(self) -> int: ...

    def stepped(self, result: StepResult, now_ms: int) -> list[Action]: ...
    def removed(self, key: AttemptKey, now_ms: int) -> list[Action]: ...
    def engine_failed(self, key: AttemptKey, reason: str, now_ms: int) -> list[Action]: ...
    def fetched(self, key: AttemptKey, outcome: ReadOutcome, now_ms: int) -> list[Action]: ...
    def has(self, key: AttemptKey) -> bool: ...
    def cancelled(self, event: CancelRequest, now_ms: int) -> list[Action]: ...
    def left(self, event: WorkerLeft, now_ms: int) -> list[Action]: ...
    def tick(self, now_ms: int) -> list[Action]: ...


class KVReads(Protocol):
    """Carries out the reads that a decode core asks for."""

    def start(self, action: StartRead) -> None: ...
    def stop(self, action: StopRead) -> None: ...


class Worker:
    """One worker's shell. `decide` is the only way in for whatever may change a core."""

    def __init__(self, parts: WorkerParts, config: MeshConfig, bus: Bus, telemetry: Telemetry) -> None:
        self.parts = parts
        self.config = config
        self.door = TypedBus(bus, parts.role)
        self.outbox = Outbox(self.door, parts.worker_id)
        self.spans = WorkerSpans(telemetry, parts.worker_id)
        chunk_tokens, caching = config.worker.token_budget, config.worker.prefix_cache
        self.holder = KVHolder(
            worker_id=parts.worker_id,
            incarnation=parts.incarnation,
            arena=parts.arena,
            cache=BlockCache(parts.shape, chunk_tokens=chunk_tokens, caching=caching),
            secret=parts.secret,
            make_server=parts.platform.make_server,
            on_started=lambda lease_id: self._post(self._started, lease_id),
            on_served=lambda lease_id, stats, error: self._post(self._served, lease_id, stats, error),
        )
        self.reader = parts.platform.make_reader(parts.arena, parts.shape)
        self.rates = RateBook(parts.shape.layout.block_bytes // parts.shape.layout.block_size)
        self.wire = WireChoice(config.worker.wire_dtype, parts.shape.layout, self.rates)
        self._lending = LendCore(parts.limits, self.holder.cache, self.holder.leases)
        self._fetches = Fetches(
            worker_id=parts.worker_id,
            fingerprint=parts.limits.fingerprint,
            block_size=parts.limits.block_size,
            token_bytes=self.rates.token_bytes,
            config=config.worker,
            door=self.door,
            reader=self.reader,
            rates=self.rates,
            wire=self.wire,
            spans=self.spans,
            on_fetched=self._fetched,
        )
        batch = Batch(config.worker.token_budget, context_length=parts.limits.context_length)
        self._engine = parts.platform.make_engine(
            parts.engine,
            batch,
            on_step=lambda result: self._post(self._stepped, result),
            on_failure=lambda sequences, reason: self._post(self._engine_failed, sequences, reason),
            on_removed=lambda sequence: self._post(self._removed, sequence),
        )
        self._cores: list[WorkerCore] = []
        self._reads: KVReads | None = None
        self._lease_traces = LeaseTraces(self.spans)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: asyncio.TaskGroup | None = None
        self._changed = asyncio.Event()
        self._last_step_ns = 0

    def add_core(self, core: WorkerCore, reads: KVReads | None = None) -> None:
        """Give the worker a role."""
        self._cores.append(core)
        self._reads = reads or self._reads

    async def start(self, tasks: asyncio.TaskGroup) -> None:
        """Start the engine and the ears that every role has; the role's own must be open already."""
        self._loop, self._tasks = asyncio.get_running_loop(), tasks
        await asyncio.to_thread(self.wire.measure)
        self._engine.start()
        tasks.create_task(self.outbox.run(), name="outbox")
        await self.door.listen(tasks, subjects.CANCEL, ("*",), self._on_cancel)
        await self.door.listen(tasks, subjects.LEFT, ("*",), self._on_left)
        await self.door.serve(tasks, subjects.INVENTORY, (self.parts.worker_id,), self._on_inventory)
        await self.door.serve(tasks, subjects.LEASE, (self.parts.worker_id,), self._on_lease)
        await self.door.bus.flush()
        self.outbox.put(subjects.JOINED, (self.parts.worker_id,), WorkerJoined(worker=self.info()))

    async def run(self) -> None:
        """Report load and keep time until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._report_load(), name="load")
            tasks.create_task(self._tick(), name="tick")

    def stop_intake(self) -> None:
        """Take no new work and start no new read."""
        self._lending.draining = True
        for core in self._cores:
            core.draining = True

    async def stop_fetches(self) -> None:
        """End what is being read from other holders."""
        await self._fetches.close()

    async def close(self) -> None:
        """Leave in order: say so, end the engine, close the plane, send what is left."""
        worker_id, incarnation = self.parts.worker_id, self.parts.incarnation
        self.outbox.put(subjects.DRAINING, (worker_id,), WorkerDraining(worker_id=worker_id, incarnation=incarnation))
        if await asyncio.to_thread(self._engine.stop, ENGINE_STOP_TIMEOUT_S):
            self.parts.engine.close()
        left = WorkerLeft(worker_id=worker_id, incarnation=incarnation, reason="stopped")
        self.outbox.put(subjects.LEFT, (worker_id,), left)
        self.outbox.close()
        self.reader.close()
        await asyncio.to_thread(self.holder.close)

    def info(self) -> WorkerInfo:
        limits = self.parts.limits
        return WorkerInfo(
            worker_id=self.parts.worker_id,
            incarnation=self.parts.incarnation,
            role=self.parts.role,
            model=self.parts.model,
            fingerprint=limits.fingerprint,
            num_blocks=limits.num_blocks,
            block_size=limits.block_size,
            context_length=limits.context_length,
            carriers=self.holder.plane.endpoint.carriers if self.holder.plane else (),
        )

    def is_elsewhere(self, core: WorkerCore, key: AttemptKey) -> bool:
        """Say whether another core of this worker has this attempt: the engine could not tell them apart."""
        return any(other.has(key) for other in self._cores if other is not core)

    def decide(self, decision: Callable[[int], list[Action]]) -> None:
        """Let a core decide at the present time, and carry out what it says."""
        with self.holder.lock:
            actions = decision(now_ms())
        self.execute(actions)

    def execute(self, actions: list[Action]) -> None:
        """Carry out actions in order; the tokens among them go out as one message a gateway."""
        emitted: list[tuple[GatewayId, RequestTokens]] = []
        for action in actions:
            match action:
                case Emit(gateway_id=gateway_id, tokens=tokens):
                    emitted.append((gateway_id, tokens))
                case OpenLease(lease=lease):
                    self.holder.open_lease(lease)
                case Fetch():
                    assert self._tasks is not None
                    self._fetches.start(action, self._tasks)
                case StopFetch(key=key):
                    self._fetches.stop(key)
                case Submit():
                    self._submit(action)
                case Withdraw(key=(request_id, attempt)):
                    with contextlib.suppress(EngineStoppedError):  # its end fails the sequence anyway
                        self._engine.cancel(request_id, attempt)
                case Publish(subject=subject, ids=ids, message=message, key=key):
                    self.outbox.put(subject, ids, message, self.spans.traceparent(key))
                case Offer(lease=lease, request=request):
                    self._offer(lease, request)
                case FinishLease(lease_id=lease_id, first_token=first):
                    self.holder.finish_lease(lease_id, first, self._last_step_ns)
                case CloseLease():
                    self._close_lease(action)
                case StartRead():
                    assert self._reads is not None
                    self._reads.start(action)
                case StopRead():
                    assert self._reads is not None
                    self._reads.stop(action)
        self.outbox.put_tokens(emitted)
        for event in self.holder.events():
            subject = subjects.STORED if isinstance(event, BlocksStored) else subjects.EVICTED
            self.outbox.put(subject, (self.parts.worker_id,), event)
        if actions:
            self._changed.set()

    # What the cores ask for.

    def _submit(self, action: Submit) -> None:
        sequence = action.sequence
        if action.lease_id is not None:
            sequence.layer_listener = self.holder.start_computing(action.lease_id, sequence.num_computed_tokens)
        self.holder.submitted(sequence, action.content)
        self.spans.submitted((sequence.request_id, sequence.attempt))
        try:
            self._engine.submit(sequence)
        except (EngineStoppedError, InvalidSequenceError) as error:
            self._post(self._engine_failed, [sequence], str(error))

    def _offer(self, lease: Lease, request: RunPrefill) -> None:
        key = (request.request_id, request.attempt)
        offer = self.holder.offer(lease, request, self.parts.limits.lease_ms)
        traceparent = self.spans.traceparent(key)
        self._lease_traces.granted(lease.lease_id, LeaseTrace(key, traceparent, time.time_ns()))
        ids = (offer.source_worker, offer.target_worker, offer.handoff_id)
        self.outbox.put(subjects.OFFERED, ids, offer, traceparent)

    def _close_lease(self, action: CloseLease) -> None:
        num_blocks = self.holder.close_lease(action.lease_id, action.reason)
        self._lease_traces.ended(action.lease_id, num_blocks, action.reason)

    def forget(self, key: AttemptKey) -> None:
        """Drop what was kept for an attempt that has ended here."""
        self.spans.forget(key)
        self.holder.forget(key)

    # What happens, brought to the loop.

    def _post(self, handle: Callable[..., None], *arguments: object) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(handle, *arguments)

    def _stepped(self, result: StepResult) -> None:
        self.spans.stepped(result)
        self.rates.stepped(result)
        self._last_step_ns = result.ended_ns
        for sequence, num_tokens in result.computed:
            self.holder.computed(sequence, num_tokens)
        ended: list[Sequence] = []
        for sampled in result.sampled:
            sequence = sampled.sequence
            if sampled.index == 0:
                self.spans.prefilled(sequence)
            if sampled.local_end:
                self.holder.ended(sequence)
            if sampled.local_end and sequence.max_local_tokens is None:
                self.spans.decoded(sequence, sampled.finish_reason or "")
                ended.append(sequence)
        self._decide_all(lambda core, now: core.stepped(result, now))
        for sequence in ended:
            self.forget((sequence.request_id, sequence.attempt))

    def _removed(self, sequence: Sequence) -> None:
        key = (sequence.request_id, sequence.attempt)
        self.holder.ended(sequence)
        if sequence.max_local_tokens is None:
            self.spans.decoded(sequence, "cancelled")
        self._decide_all(lambda core, now: core.removed(key, now))
        self.forget(key)

    def _engine_failed(self, sequences: list[Sequence], reason: str) -> None:
        for sequence in sequences:
            key: AttemptKey = (RequestId(sequence.request_id), sequence.attempt)
            self._decide_all(lambda core, now, key=key: core.engine_failed(key, reason, now))
            self.forget(key)

    def _fetched(self, key: AttemptKey, outcome: ReadOutcome) -> None:
        self._decide_all(lambda core, now: core.fetched(key, outcome, now))

    def _started(self, lease_id: LeaseId) -> None:
        with self.holder.lock:
            self._lending.started(lease_id, now_ms())

    def _served(self, lease_id: LeaseId, stats: TransferStats | None, error: str) -> None:
        self.decide(lambda _now: self._lending.served(lease_id, error or "landed"))
        self._lease_traces.served(lease_id, stats, error)

    def _on_cancel(self, received: Received[CancelRequest]) -> None:
        self._decide_all(lambda core, now: core.cancelled(received.message, now))

    def _on_left(self, received: Received[WorkerLeft]) -> None:
        if received.message.worker_id != self.parts.worker_id:
            self._decide_all(lambda core, now: core.left(received.message, now))
            self.decide(lambda _now: self._lending.left(received.message))

    async def _on_inventory(self, received: Received[ReadInventory]) -> Message:
        return self.holder.inventory(received.message.offset)

    async def _on_lease(self, received: Received[RequestLease]) -> Message:
        request = received.message
        with self.holder.lock:
            lease = self._lending.lend(request, now_ms())
        if isinstance(lease, Refused):
            return lease
        key = (request.request_id, request.attempt)
        trace = LeaseTrace(key, received.traceparent, time.time_ns(), is_lent=True)
        self._lease_traces.granted(lease.lease_id, trace)
        return self.holder.lend(lease, request)

    def _decide_all(self, decision: Callable[[WorkerCore, int], list[Action]]) -> None:
        self.decide(lambda now: [action for core in self._cores for action in decision(core, now)])

    # What goes by the clock.

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_INTERVAL_S)
            self._decide_all(lambda core, now: core.tick(now))
            self.decide(self._lending.tick)
            if cooling := self.holder.cooling():
                worker_id, incarnation = self.parts.worker_id, self.parts.incarnation
                message = BlocksCooling(worker_id=worker_id, incarnation=incarnation, block_hashes=join_hashes(cooling))
                self.outbox.put(subjects.COOLING, (worker_id,), message)

    async def _report_load(self) -> None:
        """Say the load about twice a second and soon after a change."""
        while True:
            self.outbox.put(subjects.LOAD, (self.parts.worker_id,), self._load())
            await asyncio.sleep(LOAD_MIN_GAP_S)
            self._changed.clear()
            try:
                async with asyncio.timeout(LOAD_INTERVAL_S):
                    await self._changed.wait()
            except TimeoutError:
                pass

    def _load(self) -> WorkerLoad:
        engine = self._engine.load()
        plane = self.holder.plane
        num_queued = sum(core.num_queued for core in self._cores)
        num_queued_tokens = sum(core.num_queued_tokens for core in self._cores)
        num_unreceived_tokens = sum(core.num_unreceived_tokens for core in self._cores)
        draining = any(core.draining for core in self._cores)
        return WorkerLoad(
            worker=self.info(),
            state="draining" if draining else "ready",
            blocks=self.holder.counts(),
            num_running=sum(core.num_runs for core in self._cores) - num_queued,
            num_queued=num_queued,
            num_uncomputed_tokens=engine.num_uncomputed_tokens + num_queued_tokens + num_unreceived_tokens,
            num_unreceived_tokens=num_unreceived_tokens,
            num_dropped_messages=self.door.num_dropped,
            num_refused_reads=plane.num_refused + plane.num_junk if plane else 0,
            rates=self.rates.rates(now_ms()),
        )
