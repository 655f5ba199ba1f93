"""The shell around a worker's cores: carries out what they decide, in order, and brings them what happens.

Cores run on the event loop only. The engine's and the plane's threads post what they have to say to the loop.
"""

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable
from typing import TypeVar

from dataplane.blocks.cache import BlockCache
from dataplane.blocks.lease import Lease
from dataplane.protocol.stream import TransferStats
from schemas import subjects
from schemas.directory import BlocksStored
from schemas.ids import GatewayId, LeaseId, RequestId
from schemas.request import RequestTokens, RunPrefill
from schemas.worker import LeftReason, WorkerJoined, WorkerLeft, WorkerRole
from services.bus.base import Bus
from services.bus.typed import TypedBus
from services.config import WORKER_TICK_MS, MeshConfig
from services.engine.batch import Batch
from services.engine.interface import Sequence, StepResult
from services.engine.thread import EngineStoppedError, InvalidSequenceError
from services.metrics import Metrics
from services.presence import Heartbeat
from services.runtime import now_ms
from services.telemetry import Telemetry
from services.worker.core.actions import (
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
from services.worker.core.answers import Answers
from services.worker.core.content import ReadOutcome, SequenceContent
from services.worker.core.role import KVReads, LeaseOwner, WorkerCore
from services.worker.kv.fetch import Fetches
from services.worker.kv.holder import KVHolder, num_blocks_of
from services.worker.kv.lending import LendCore
from services.worker.kv.wire_dtype import WireChoice
from services.worker.observe.measured_rates import RateBook
from services.worker.observe.metrics import WorkerMetrics
from services.worker.observe.report import Reporter
from services.worker.observe.spans import WorkerSpans
from services.worker.observe.transfers import LeaseTrace, LeaseTraces
from services.worker.outbox import Outbox
from services.worker.parts import WorkerParts

log = logging.getLogger(__name__)

TICK_INTERVAL_S = WORKER_TICK_MS / 1000
ENGINE_STOP_TIMEOUT_S = 10.0

DESCRIPTIONS: dict[WorkerRole, str] = {
    "prefill": "computes prompts, and lends their KV",
    "decode": "reads KV and decodes answers; may serve a request alone",
    "aggregated": "computes prompts and decodes their answers",
}

ReplyT = TypeVar("ReplyT")


class Worker:
    """One worker's shell. `decide` is the only way in for whatever may change a core."""

    def __init__(
        self,
        parts: WorkerParts,
        config: MeshConfig,
        connection: Bus,
        telemetry: Telemetry,
        metrics: Metrics | None = None,
    ) -> None:
        self.parts = parts
        self.config = config
        metrics = metrics or Metrics(parts.worker_id)
        self.bus = TypedBus(connection, parts.role, metrics)
        self.outbox = Outbox(self.bus, parts.worker_id)
        self.telemetry = telemetry
        self.spans = WorkerSpans(telemetry, parts.worker_id)
        self.lease_traces = LeaseTraces(self.spans)
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
            name_stream=self.lease_traces.name_stream,
        )
        self.reader = parts.platform.make_reader(parts.arena, parts.shape)
        self.rates = RateBook(parts.shape.layout.block_bytes // parts.shape.layout.block_size)
        self.wire = WireChoice(config.worker.wire_dtype, parts.shape.layout, self.rates)
        block_bytes = parts.shape.layout.block_bytes
        self.measured = WorkerMetrics(metrics, lambda: self.reporter.load(now_ms()), block_bytes)
        self.lending = LendCore(parts.limits, self.holder.cache, self.holder.leases)
        self._fetches = Fetches(
            worker_id=parts.worker_id,
            fingerprint=parts.limits.fingerprint,
            block_size=parts.limits.block_size,
            token_bytes=self.rates.token_bytes,
            config=config.worker,
            bus=self.bus,
            reader=self.reader,
            rates=self.rates,
            wire=self.wire,
            spans=self.spans,
            measured=self.measured,
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
        self.cores: list[WorkerCore] = []
        self.reporter = Reporter(parts, self.holder, self._engine, self.rates, self.bus, self.cores)
        self.answers = Answers()
        self.heartbeat = Heartbeat(TICK_INTERVAL_S, config.worker.fence_after_ms / 1000)
        self._reads: KVReads | None = None
        self._lease_owners: list[LeaseOwner] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: asyncio.TaskGroup | None = None
        self.changed = asyncio.Event()
        """Set when the load is to be told."""
        self._usage = (0, 0)
        """Blocks that can be had, and runs, when last looked at."""
        self.on_submitted: Callable[[AttemptKey, SequenceContent], None] | None = None
        """Hears of every sequence that the engine is given, before its first step."""
        self.idle = asyncio.Event()
        """Set while the worker is idle, as of the last decision."""
        self._is_leaving = False
        self._last_step_ns = 0

    def add_core(self, core: WorkerCore, *, reads: KVReads | None = None, leases: LeaseOwner | None = None) -> None:
        """Give the worker a role. `leases`: the core, where it grants leases of its own."""
        self.cores.append(core)
        self._reads = reads or self._reads
        self._lease_owners += [leases] if leases is not None else []

    async def start(self, tasks: asyncio.TaskGroup) -> None:
        """Start the engine, and send what is decided."""
        self._loop, self._tasks = asyncio.get_running_loop(), tasks
        await asyncio.to_thread(self.wire.measure)
        self._engine.start()
        tasks.create_task(self.outbox.run(), name="outbox")

    async def announce(self) -> None:
        """Be listed as a service, before the first ear opens."""
        parts = self.parts
        self.bus.identity |= {
            "id": parts.worker_id, "incarnation": self.holder.incarnation, "device": parts.device,
        }  # fmt: skip
        await self.bus.announce(DESCRIPTIONS[parts.role])

    def join(self) -> None:
        """Say who this is; all ears must be open."""
        self.outbox.put(subjects.JOINED, (self.parts.worker_id,), WorkerJoined(worker=self.reporter.info()))

    @property
    def is_idle(self) -> bool:
        """Nothing runs here, and nobody reads."""
        return not any(core.num_runs for core in self.cores) and not len(self.holder.leases)

    def check_engine(self) -> None:
        """Raise EngineStoppedError where the engine's thread has failed, or the card under a read: whoever cannot
        compute must not look well."""
        if self._engine.has_failed:
            raise EngineStoppedError(f"the engine of {self.parts.worker_id} has failed")
        self._check_card()

    def _check_card(self) -> None:
        if self.reader.is_stuck:
            raise EngineStoppedError(f"the card of {self.parts.worker_id} does not come to the end of a read")

    def stop_intake(self) -> None:
        """Take no new work and lend no more: the clockwork may end."""
        self._is_leaving = True
        self.lending.draining = True
        for core in self.cores:
            core.draining = True

    async def stop_fetches(self) -> None:
        """End what is being read from other holders."""
        await self._fetches.close()

    async def close(self) -> None:
        """Leave in order: end the engine, say so, close the plane, send what is left."""
        worker_id, incarnation = self.parts.worker_id, self.holder.incarnation
        if await asyncio.to_thread(self._engine.stop, ENGINE_STOP_TIMEOUT_S):
            self.parts.engine.close()
        left = WorkerLeft(worker_id=worker_id, incarnation=incarnation, reason=LeftReason.STOPPED)
        self.outbox.put(subjects.LEFT, (worker_id,), left)
        self.outbox.close()
        await asyncio.to_thread(self.reader.close)
        await asyncio.to_thread(self.holder.close)

    def is_elsewhere(self, core: WorkerCore, key: AttemptKey) -> bool:
        """Say whether another core of this worker has this attempt: the engine could not tell them apart."""
        return any(other.has(key) for other in self.cores if other is not core)

    def decide(self, decision: Callable[[int], list[Action]]) -> None:
        """Let a core decide at the present time, and carry out what it says."""
        self.answer(lambda now: (None, decision(now)))

    def answer(self, decision: Callable[[int], tuple[ReplyT, list[Action]]]) -> ReplyT:
        """As `decide`, of a decision that has a reply. Raises EngineStoppedError: nothing is decided any more, and no
        block given back, once the card may write where it should not."""
        self._check_card()
        self.look_at_the_clock()
        with self.holder.lock:
            reply, actions = decision(now_ms())
        self.execute(actions)
        return reply

    def look_at_the_clock(self) -> None:
        """Before anything is done: a worker that stood still must not go on as if nothing had happened."""
        if self.heartbeat.stood_still(time.monotonic()):
            self.fence("it stood still")

    def fence(self, reason: str) -> None:
        """Others take this worker for lost: end all that runs, and go on as a new incarnation."""
        if self._is_leaving:
            return
        log.warning("%s ends %d attempts and joins anew: %s", self.parts.worker_id, len(self.attempts()), reason)
        with self.holder.lock:
            now = now_ms()
            actions = [action for core in self.cores for action in core.fence(now, reason)]
            actions += self.lending.fence(now, reason)
        self.execute(actions)
        self.measured.fenced()
        self.answers.clear()
        self.holder.begin(secrets.token_hex(8))
        self.bus.identity["incarnation"] = self.holder.incarnation
        self.join()
        self.changed.set()

    def execute(self, actions: list[Action]) -> None:
        """Carry out actions in order; the tokens among them go out as one message a gateway."""
        emitted: list[tuple[GatewayId, RequestTokens]] = []
        for action in actions:
            match action:
                case Emit(gateway_id=gateway_id, tokens=tokens):
                    tokens = tokens if tokens.report is None else self.spans.timed(tokens)
                    emitted.append((gateway_id, tokens))
                    self.answers.emitted((RequestId(tokens.request_id), tokens.attempt), tokens, now_ms())
                case OpenLease(lease=lease):
                    self.holder.open_lease(lease)
                    self.measured.leases.granted(lease.lease_id, num_blocks_of(lease), is_computed=False)
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
                    self.measured.leases.computed(lease_id)
                case CloseLease():
                    self._close_lease(action)
                case StartRead():
                    assert self._reads is not None
                    self._reads.start(action)
                case StopRead():
                    assert self._reads is not None
                    self._reads.stop(action)
        for core in self.cores:
            for key, outcome in core.take_ended():
                self.spans.ended(key, outcome)
        self.outbox.put_tokens(emitted)
        for event in self.holder.events():
            subject = subjects.STORED if isinstance(event, BlocksStored) else subjects.EVICTED
            self.outbox.put(subject, (self.parts.worker_id,), event)
        usage = (self.holder.cache.num_free + self.holder.cache.num_cached, sum(core.num_runs for core in self.cores))
        if actions or usage != self._usage:  # what was withdrawn ends without a word, and makes room
            self._usage = usage
            self.changed.set()
        if self.is_idle:
            self.idle.set()
        else:
            self.idle.clear()

    # What the cores ask for.

    def _submit(self, action: Submit) -> None:
        sequence = action.sequence
        if action.lease_id is not None:
            sequence.layer_listener = self.holder.start_computing(action.lease_id, sequence.num_computed_tokens)
        self.holder.submitted(sequence, action.content)
        if self.on_submitted is not None:
            self.on_submitted((RequestId(sequence.request_id), sequence.attempt), action.content)
        self.spans.submitted(sequence)
        try:
            self._engine.submit(sequence)
        except (EngineStoppedError, InvalidSequenceError) as error:
            self._post(self._engine_failed, [sequence], str(error))

    def _offer(self, lease: Lease, request: RunPrefill) -> None:
        key = (request.request_id, request.attempt)
        offer = self.holder.offer(lease, request, self.parts.limits.lease_ms)
        traceparent = self.spans.traceparent(key)
        self.lease_traces.granted(lease.lease_id, LeaseTrace(key, traceparent, time.time_ns()))
        ids = (offer.source_worker, offer.target_worker, offer.handoff_id)
        self.outbox.put(subjects.OFFERED, ids, offer, traceparent)

    def _close_lease(self, action: CloseLease) -> None:
        num_blocks = self.holder.close_lease(action.lease_id, action.reason)
        self.lease_traces.ended(action.lease_id, num_blocks, action.reason)
        self.measured.leases.ended(action.lease_id, action.reason)

    def forget(self, key: AttemptKey) -> None:
        """Drop what was kept for an attempt that is not taken."""
        self.spans.forget(key)
        self.holder.forget(key)

    # What happens, brought to the loop.

    def _post(self, handle: Callable[..., None], *arguments: object) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop has ended, and with it all that runs here
            self._loop.call_soon_threadsafe(handle, *arguments)

    def _stepped(self, result: StepResult) -> None:
        self.spans.stepped(result)
        self.rates.stepped(result)
        self.measured.stepped(result)
        self._last_step_ns = result.ended_ns
        for sequence, num_tokens in result.computed:
            self.holder.computed(sequence, num_tokens)
        ended: list[Sequence] = []
        for sampled in result.sampled:
            sequence = sampled.sequence
            self.spans.prefilled(sequence)
            if sampled.local_end:
                self.holder.ended(sequence)
            if sampled.local_end and sequence.max_local_tokens is None:
                self.spans.decoded(sequence, sampled.finish_reason or "")
                ended.append(sequence)
        self.decide_all(lambda core, now: core.stepped(result, now))
        for sequence in ended:
            self.holder.forget((sequence.request_id, sequence.attempt))

    def _removed(self, sequence: Sequence) -> None:
        key = (sequence.request_id, sequence.attempt)
        self.holder.ended(sequence)
        self.decide_all(lambda core, now: core.removed(key, now))
        self.holder.forget(key)

    def _engine_failed(self, sequences: list[Sequence], reason: str) -> None:
        for sequence in sequences:
            key: AttemptKey = (RequestId(sequence.request_id), sequence.attempt)
            self.decide_all(lambda core, now, key=key: core.engine_failed(key, reason, now))
            self.holder.forget(key)

    def _fetched(self, key: AttemptKey, outcome: ReadOutcome) -> None:
        self.decide_all(lambda core, now: core.fetched(key, outcome, now))

    def _started(self, lease_id: LeaseId) -> None:
        with self.holder.lock:
            self.lending.started(lease_id, now_ms())
        self.measured.leases.reading(lease_id, is_read=True)

    def _served(self, lease_id: LeaseId, stats: TransferStats, error: str) -> None:
        self.measured.leases.reading(lease_id, is_read=False)
        self.decide(lambda _now: self.lending.served(lease_id, error or "landed"))
        self.decide(lambda now: [a for owner in self._lease_owners for a in owner.served(lease_id, error, now)])
        self.lease_traces.served(lease_id, stats, error)

    def decide_all(self, decision: Callable[[WorkerCore, int], list[Action]]) -> None:
        self.decide(lambda now: [action for core in self.cores for action in decision(core, now)])

    def attempts(self) -> dict[AttemptKey, GatewayId]:
        """Return what goes on here, and whose it is."""
        return {key: gateway_id for core in self.cores for key, gateway_id in core.attempts().items()}

    def has(self, key: AttemptKey) -> bool:
        """Say whether any role has this attempt."""
        return any(core.has(key) for core in self.cores)
