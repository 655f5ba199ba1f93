"""The shell around a worker's cores: brings them what happens, and carries out what they decide, in order.

Cores run on the event loop only. The engine's and the plane's threads post what they have to say to the loop. The rest
of this package calls the shell's methods, and has no part of its state.
"""

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable

from dataplane.blocks.cache import BlockCache
from dataplane.protocol.stream import TransferStats
from schemas import subjects
from schemas.block import join_hashes
from schemas.directory import BlocksStored, Inventory
from schemas.ids import GatewayId, LeaseId
from schemas.kv import BlocksCooling, RequestLease
from schemas.message import Message
from schemas.observe import WorkerDescribed
from schemas.request import AskProgress, Progress, Refused, RequestTokens, refuse
from schemas.worker import WorkerAlive, WorkerDraining, WorkerInfo, WorkerJoined, WorkerLeft, WorkerRole
from services.bus.typed import TypedBus
from services.config import MeshConfig
from services.engine.batch import Batch
from services.engine.interface import Sequence, StepResult
from services.engine.thread import EngineStoppedError, InvalidSequenceError
from services.metrics import Metrics
from services.runtime import now_ms
from services.telemetry import Telemetry
from services.worker.core.actions import (
    Action,
    AttemptEnded,
    CloseLease,
    Emit,
    FinishLease,
    Offer,
    OpenLease,
    Publish,
    SendReply,
    StartRead,
    StopRead,
    Submit,
    Withdraw,
)
from services.worker.core.attempts import AnyAttempt
from services.worker.core.content import AttemptKey
from services.worker.core.events import (
    DrainBegun,
    DrainOver,
    Event,
    Fenced,
    ReserveAsked,
    ReturnLease,
    RunAsked,
    SequenceFailed,
    SequenceRemoved,
    StreamEnded,
)
from services.worker.core.heartbeat import Pulse
from services.worker.core.replicas import ReplicaCore
from services.worker.kv.holder import KVHolder, num_blocks_of
from services.worker.kv.lending import LendCore
from services.worker.kv.reads import KVReads, ReaderSettings
from services.worker.kv.wire_dtype import WireChoice
from services.worker.limits import (
    ENGINE_STOP_TIMEOUT_S,
    LAST_WORDS_S,
    READ_BASE_S,
    READ_BYTES_PER_S_MIN,
    TICK_INTERVAL_S,
)
from services.worker.observe.measured_rates import MeasuredRates
from services.worker.observe.metrics import WorkerMetrics
from services.worker.observe.read_records import ReadRecords
from services.worker.observe.report import Reporter
from services.worker.observe.spans import WorkerSpans
from services.worker.observe.transfers import LeaseTrace, LeaseTraces
from services.worker.outbox import Outbox
from services.worker.parts import WorkerParts
from services.worker.roles import MakeRole, Role

log = logging.getLogger(__name__)

DESCRIPTIONS: dict[WorkerRole, str] = {
    "prefill": "computes prompts, and lends their KV",
    "decode": "reads KV and decodes answers; may serve a request alone",
    "aggregated": "computes prompts and decodes their answers",
}


class Worker:
    """One worker's shell. `handle` is the only way in for whatever may change an attempt."""

    def __init__(
        self,
        parts: WorkerParts,
        make_roles: tuple[MakeRole, ...],
        config: MeshConfig,
        bus: TypedBus,
        telemetry: Telemetry,
        metrics: Metrics,
    ) -> None:
        layout, settings = parts.shape.layout, config.worker
        self._parts = parts
        self._config = config
        self._bus = bus
        self._telemetry = telemetry
        self._outbox = Outbox(bus, parts.worker_id)
        self._spans = WorkerSpans(telemetry, parts.worker_id)
        self._lease_traces = LeaseTraces(telemetry, parts.worker_id)
        self._holder = KVHolder(
            worker_id=parts.worker_id,
            incarnation=parts.incarnation,
            arena=parts.arena,
            cache=BlockCache(parts.shape, chunk_tokens=settings.token_budget, caching=settings.prefix_cache),
            secret=parts.secret,
            make_server=parts.platform.make_server,
            on_started=lambda lease_id: self._post(self._on_stream_started, lease_id),
            on_served=lambda lease_id, stats, error: self._post(self._on_stream_ended, lease_id, stats, error),
            name_stream=self._lease_traces.name_stream,
        )
        self._reader = parts.platform.make_reader(parts.arena, parts.shape)
        self._rates = MeasuredRates(layout.block_bytes // layout.block_size)
        self._wire = WireChoice(settings.wire_dtype, layout, self._rates)
        self._measured = WorkerMetrics(metrics, lambda: self._reporter.load(now_ms()), layout.block_bytes)
        self._engine = parts.platform.make_engine(
            parts.engine,
            Batch(settings.token_budget, context_length=parts.limits.context_length),
            on_step=lambda result: self._post(self._on_step, result),
            on_failure=lambda sequences, reason: self._post(self._on_engine_failure, sequences, reason),
            on_removed=lambda sequence: self._post(self._on_removed, sequence),
        )
        self._lending = LendCore(parts.limits, self._holder.cache, self._holder.leases)
        self._replicas = ReplicaCore(parts.limits, self._holder.cache)
        self.roles = tuple(make(parts.limits, self._holder.cache, self._holder.leases) for make in make_roles)
        self._cores = (*(role.core for role in self.roles), self._replicas)
        self._reporter = Reporter(
            _identity(parts), self._holder, self._engine, self._rates, bus, self.roles, self._replicas
        )
        self._pulse = Pulse(TICK_INTERVAL_S, settings.fence_after_ms / 1000)
        self._loop: asyncio.AbstractEventLoop
        self._reads: KVReads
        self._changed = asyncio.Event()
        """Set when the load is to be told."""
        self._idle = asyncio.Event()
        """Set while the worker is idle, as of the last decision."""
        self._usage = (0, 0)
        """Blocks that can be had, and what runs, when last looked at."""
        self._is_leaving = False

    # From the start to the end.

    async def start(self, tasks: asyncio.TaskGroup) -> None:
        """Serve reads, be listed as a service, start the engine, and send what is decided."""
        parts, settings, layout = self._parts, self._config.worker, self._parts.shape.layout
        self._loop = asyncio.get_running_loop()
        self._holder.start(settings)
        self._bus.identity |= {
            "id": parts.worker_id, "incarnation": self._holder.incarnation, "device": parts.device,
        }  # fmt: skip
        await self._bus.announce(DESCRIPTIONS[parts.role])
        await asyncio.to_thread(self._wire.measure)
        reader_settings = ReaderSettings(
            reader_id=parts.worker_id,
            fingerprint=parts.limits.fingerprint,
            block_size=parts.limits.block_size,
            carrier=settings.carrier,
            base_s=READ_BASE_S,
            token_s=self._rates.token_bytes / READ_BYTES_PER_S_MIN,
        )
        self._reads = KVReads(
            settings=reader_settings,
            bus=self._bus,
            reader=self._reader,
            telemetry=self._telemetry,
            tasks=tasks,
            record=ReadRecords(layout.block_size, self._rates, self._measured).record,
            on_event=self.handle,
            wire_dtype=lambda holder: self._wire.dtype(holder, now_ms()),
        )
        self._engine.start()
        tasks.create_task(self._outbox.run(), name="outbox")

    def join(self) -> None:
        """Say who this is; all subscriptions must be there."""
        self._outbox.put(subjects.JOINED, (self._parts.worker_id,), WorkerJoined(worker=self._reporter.info()))

    def begin_drain(self) -> None:
        """Take no new work; what runs goes on."""
        me, incarnation = self._parts.worker_id, self._holder.incarnation
        self._outbox.put(subjects.DRAINING, (me,), WorkerDraining(worker_id=me, incarnation=incarnation))
        self.handle(DrainBegun())
        self._changed.set()

    def end_drain(self) -> None:
        """What still runs goes on elsewhere; its KV may be read here for a moment more."""
        self.handle(DrainOver())

    async def wait_until_idle(self, timeout_s: float) -> bool:
        """Say whether nothing runs here and nobody reads, at the latest after `timeout_s` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        return self._is_idle

    async def leave(self) -> None:
        """Leave in order: lend no more, end reads and engine, say so, close the plane, send what is left."""
        worker_id, incarnation = self._parts.worker_id, self._holder.incarnation
        self._is_leaving = True
        self._lending.draining = True
        for core in self._cores:
            core.draining = True
        await self._reads.close()
        if await asyncio.to_thread(self._engine.stop, ENGINE_STOP_TIMEOUT_S):
            self._parts.engine.close()
        left = WorkerLeft(worker_id=worker_id, incarnation=incarnation, reason="stopped")
        self._outbox.put(subjects.LEFT, (worker_id,), left)
        self._outbox.close()
        await asyncio.to_thread(self._reader.close)
        await asyncio.to_thread(self._holder.close)
        with contextlib.suppress(TimeoutError):  # the bus may be away for good
            async with asyncio.timeout(LAST_WORDS_S):
                await self._outbox.sent.wait()
        await self._bus.close()

    def close_memory(self) -> None:
        """Give the memory back, whatever ended the worker."""
        self._holder.close()

    # Deciding.

    def handle(self, event: Event, role: Role | None = None) -> Message | None:
        """Let the cores decide, or those of one `role` alone, and carry out what they say. Return the reply to an event
        that is a question. Raises EngineStoppedError: nothing is decided any more, and no block given back, once the
        card may write where it should not."""
        self._check_card()
        self._look_at_the_clock()
        return self._decide(event, role)

    def ask(self, event: RunAsked | ReserveAsked, role: Role) -> Message | None:
        """As `handle`, of what begins an attempt: the engine could not tell apart the same one in two roles."""
        key = (event.request.request_id, event.request.attempt)
        if any(key in other.core.attempts for other in self.roles if other is not role):
            return refuse(event.request, "invalid", "another role of this worker has this attempt already")
        return self.handle(event, role)

    def tick(self) -> None:
        """Do what the time makes necessary. Raises EngineStoppedError."""
        self._check_card()
        self._look_at_the_clock()
        with self._holder.lock:
            now = now_ms()
            actions = [action for core in self._cores for action in core.tick(now)]
            self._holder.renew_moved(now, self._parts.limits.lease_ms)
            actions += self._lending.tick(now)
        self._execute(actions)
        if cooling := self._holder.cooling():
            me, incarnation = self._parts.worker_id, self._holder.incarnation
            message = BlocksCooling(worker_id=me, incarnation=incarnation, block_hashes=join_hashes(cooling))
            self._outbox.put(subjects.COOLING, (me,), message)

    def beat(self) -> None:
        """The clock has ticked."""
        self._pulse.beat(time.monotonic())

    def check_engine(self) -> None:
        """Raise EngineStoppedError where the engine's thread has failed, or the card under a read: whoever cannot
        compute must not look well."""
        if self._engine.has_failed:
            raise EngineStoppedError(f"the engine of {self._parts.worker_id} has failed")
        self._check_card()

    def release_reads(self) -> None:
        """Let go of what reads that have ended had open. Blocks: a driver takes its time to unmap."""
        self._reader.release_ended()

    def lend(self, request: RequestLease, traceparent: str) -> Message:
        """Grant a lease on blocks that are here, or refuse it."""
        self._check_card()
        self._look_at_the_clock()
        with self._holder.lock:
            lease = self._lending.lend(request, now_ms())
        self._execute([])
        if isinstance(lease, Refused):
            return lease
        self._measured.leases.granted(lease.lease_id, num_blocks_of(lease))
        key = (request.request_id, request.attempt)
        self._lease_traces.granted(lease.lease_id, LeaseTrace(key, traceparent, time.time_ns()))
        return self._holder.lend(lease, request)

    def left(self, event: WorkerLeft) -> None:
        """Somebody has left; or this worker is said to have."""
        if event.worker_id != self._parts.worker_id:
            self.handle(event)
        elif event.incarnation == self._holder.incarnation:
            self._fence(f"it was declared lost: {event.reason}")

    def count_refusal(self, what: str, reply: Message | None) -> None:
        """Count a reply, where it is a refusal."""
        if reply is not None:
            self._measured.refused(what, reply)

    # What others ask.

    def report_load(self) -> None:
        """Tell the load. What changes from now on ends the next `wait_for_change`."""
        self._changed.clear()
        self._outbox.put(subjects.LOAD, (self._parts.worker_id,), self._reporter.load(now_ms()))

    async def wait_for_change(self, timeout_s: float) -> None:
        """Return once there is a load to tell, at the latest after `timeout_s` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()

    def wanted_by(self) -> dict[AttemptKey, GatewayId]:
        """Return what goes on here, and whose it is."""
        return {key: gateway_id for role in self.roles for key, gateway_id in role.core.wanted_by().items()}

    def progress(self, asked: AskProgress) -> Progress:
        """Return what an attempt has come to here."""
        self._look_at_the_clock()
        key = (asked.request_id, asked.attempt)
        attempt = self._find(key)
        answers = [answer for role in self.roles if (answer := role.core.answer_of(key)) is not None]
        return Progress(
            request_id=asked.request_id,
            attempt=asked.attempt,
            deadline_ms=asked.deadline_ms,
            worker_id=self._parts.worker_id,
            known=bool(answers),
            tokens=answers[0].since(key, asked.index) if answers else None,
            is_waiting=attempt is not None and attempt.stage in ("queued", "reserved"),
        )

    def alive(self) -> WorkerAlive:
        """Return a sign of life."""
        self._look_at_the_clock()
        lag_ms = self._pulse.lag_ms(time.monotonic())
        return WorkerAlive(worker_id=self._parts.worker_id, incarnation=self._holder.incarnation, lag_ms=lag_ms)

    def inventory(self, offset: int) -> Inventory:
        """Return a page of the blocks that are here."""
        return self._holder.inventory(offset)

    def describe(self) -> WorkerDescribed:
        """Return what goes on here, for people."""
        return self._reporter.describe(now_ms())

    # What the cores ask for.

    def _decide(self, event: Event, role: Role | None = None) -> Message | None:
        cores = self._cores if role is None else (role.core,)
        with self._holder.lock:
            now = now_ms()
            actions = [action for core in cores for action in core.handle(event, now)]
            actions += self._decide_lent(event, now)
        return self._execute(actions)

    def _decide_lent(self, event: Event, now: int) -> list[Action]:
        """Let the leases that were asked for hear of it."""
        match event:
            case StreamEnded(lease_id=lease_id, error=error):
                return self._lending.served(lease_id, error or "landed")
            case ReturnLease():
                return self._lending.returned(event)
            case WorkerLeft():
                return self._lending.left(event)
            case Fenced(reason=reason):
                return self._lending.fence(now, reason)
            case _:
                return []

    def _execute(self, actions: list[Action]) -> Message | None:
        """Carry out actions in order; the tokens among them go out as one message a gateway. Return the reply among
        them."""
        emitted: list[tuple[GatewayId, RequestTokens]] = []
        reply: Message | None = None
        for action in actions:
            match action:
                case SendReply(message=reply):
                    pass
                case Emit(gateway_id=gateway_id, tokens=tokens):
                    emitted.append((gateway_id, tokens))
                case Publish(subject=subject, ids=ids, message=message, traceparent=traceparent):
                    self._outbox.put(subject, ids, message, traceparent)
                case Submit():
                    self._submit(action)
                case Withdraw(key=(request_id, attempt)):
                    with contextlib.suppress(EngineStoppedError):  # its end fails the sequence anyway
                        self._engine.cancel(request_id, attempt)
                case StartRead(read=read):
                    self._reads.start(read)
                case StopRead(read=read):
                    self._reads.stop(read)
                case AttemptEnded(attempt=ended):
                    self._spans.ended(ended)
                case _:
                    self._execute_lease(action)
        self._outbox.put_tokens(emitted)
        for event in self._holder.events():
            subject = subjects.STORED if isinstance(event, BlocksStored) else subjects.EVICTED
            self._outbox.put(subject, (self._parts.worker_id,), event)
        cache = self._holder.cache
        usage = (cache.num_free + cache.num_cached, self._num_running)
        if len(actions) > (reply is not None) or usage != self._usage:
            self._usage = usage
            self._changed.set()
        if self._is_idle:
            self._idle.set()
        else:
            self._idle.clear()
        return reply

    def _execute_lease(self, action: OpenLease | Offer | FinishLease | CloseLease) -> None:
        match action:
            case OpenLease(lease=lease):
                self._holder.open_lease(lease)
                self._measured.leases.granted(lease.lease_id, num_blocks_of(lease), is_computed=False)
            case Offer(lease=lease, attempt=attempt):
                offer = self._holder.offer(lease, attempt.request, self._parts.limits.lease_ms)
                trace = LeaseTrace(attempt.key, attempt.traceparent, time.time_ns(), attempt.times)
                self._lease_traces.granted(lease.lease_id, trace)
                ids = (offer.source_worker, offer.target_worker, offer.handoff_id)
                self._outbox.put(subjects.OFFERED, ids, offer, attempt.traceparent)
            case FinishLease(lease_id=lease_id, first_token=first):
                self._holder.finish_lease(lease_id, first)
                self._measured.leases.computed(lease_id)
            case CloseLease(lease_id=lease_id, reason=reason):
                num_blocks = self._holder.close_lease(lease_id, reason)
                self._lease_traces.ended(lease_id, num_blocks, reason)
                self._measured.leases.ended(lease_id, reason)

    def _submit(self, action: Submit) -> None:
        sequence, attempt = action.sequence, action.attempt
        if action.lease_id is not None:
            sequence.layer_listener = self._holder.start_computing(action.lease_id, sequence.num_computed_tokens)
        self._holder.submitted(sequence, attempt.content)
        self._spans.submitted(attempt, sequence)
        try:
            self._engine.submit(sequence)
        except (EngineStoppedError, InvalidSequenceError) as error:
            self._post(self._on_engine_failure, [sequence], str(error))

    # What happens on other threads, brought to the loop.

    def _post(self, handle: Callable[..., None], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended, and with it all that runs here
            self._loop.call_soon_threadsafe(handle, *arguments)

    def _on_step(self, result: StepResult) -> None:
        self._spans.stepped(result, self._find)
        self._rates.stepped(result)
        self._measured.stepped(result)
        for sequence, num_tokens in result.computed:
            self._holder.computed(sequence, self._attempt_of(sequence).content, num_tokens)
        for sampled in result.sampled:
            sequence = sampled.sequence
            attempt = self._attempt_of(sequence)
            self._spans.prefilled(attempt)
            if sampled.local_end:
                self._holder.ended(sequence, attempt.content)
                if sequence.max_local_tokens is None:
                    self._spans.decoded(attempt, sampled.finish_reason or "")
        self.handle(result)

    def _on_removed(self, sequence: Sequence) -> None:
        attempt = self._attempt_of(sequence)
        self._holder.ended(sequence, attempt.content)
        self.handle(SequenceRemoved(attempt.key))

    def _on_engine_failure(self, sequences: list[Sequence], reason: str) -> None:
        for sequence in sequences:
            self.handle(SequenceFailed((sequence.request_id, sequence.attempt), reason))

    def _on_stream_started(self, lease_id: LeaseId) -> None:
        with self._holder.lock:
            self._lending.started(lease_id, now_ms())
        self._measured.leases.reading(lease_id, is_read=True)

    def _on_stream_ended(self, lease_id: LeaseId, stats: TransferStats, error: str) -> None:
        self._measured.leases.reading(lease_id, is_read=False)
        self.handle(StreamEnded(lease_id, error))
        self._lease_traces.served(lease_id, stats, error)

    # Being alive.

    def _check_card(self) -> None:
        if self._reader.is_stuck:
            raise EngineStoppedError(f"the card of {self._parts.worker_id} does not come to the end of a read")

    def _look_at_the_clock(self) -> None:
        """Before anything is done: a worker that stood still must not go on as if nothing had happened."""
        if self._pulse.stood_still(time.monotonic()):
            self._fence("it stood still")

    def _fence(self, reason: str) -> None:
        """Others take this worker for lost: end all that runs, and go on as a new incarnation."""
        if self._is_leaving:
            return
        log.warning("%s ends %d attempts and joins anew: %s", self._parts.worker_id, len(self.wanted_by()), reason)
        self._decide(Fenced(reason))
        self._measured.fenced()
        self._holder.begin(secrets.token_hex(8))
        self._bus.identity["incarnation"] = self._holder.incarnation
        self.join()
        self._changed.set()

    def _find(self, key: AttemptKey) -> AnyAttempt | None:
        """Return the record of an attempt that is known here, whatever its role."""
        for role in self.roles:
            if (attempt := role.core.attempts.get(key)) is not None:
                return attempt
        return None

    def _attempt_of(self, sequence: Sequence) -> AnyAttempt:
        """Return the record of an attempt whose sequence the engine had until now."""
        attempt = self._find((sequence.request_id, sequence.attempt))
        assert attempt is not None, f"{sequence.request_id}: its blocks are given back, and the engine wrote them"
        return attempt

    @property
    def _num_running(self) -> int:
        return sum(len(role.core.attempts) for role in self.roles) + len(self._replicas.reading)

    @property
    def _is_idle(self) -> bool:
        """Nothing runs here, and nobody reads."""
        return not self._num_running and not len(self._holder.leases)


def _identity(parts: WorkerParts) -> WorkerInfo:
    """Return what a worker says of itself, and what of that never changes."""
    limits = parts.limits
    return WorkerInfo(
        worker_id=parts.worker_id,
        incarnation=parts.incarnation,
        role=parts.role,
        model=parts.model,
        fingerprint=limits.fingerprint,
        num_blocks=limits.num_blocks,
        block_size=limits.block_size,
        context_length=limits.context_length,
        device=parts.device,
    )
