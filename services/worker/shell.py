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
from schemas.ids import GatewayId
from schemas.kv import BlocksPurged, LeaseGranted, PurgeBlocks, RequestLease
from schemas.message import Message
from schemas.request import Refused, RequestTokens, ReserveBlocks, RunPrefill
from schemas.worker import WorkerAlive, WorkerLeft, WorkerRole
from services.bus.typed import TypedBus
from services.config import WORKER_TICK_MS, MeshConfig
from services.engine.thread import EngineStoppedError
from services.metrics import Metrics
from services.presence import Heartbeat
from services.runtime import now_ms
from services.telemetry import Telemetry
from services.worker.core.actions import (
    Action,
    AttemptEnded,
    CloseLease,
    Emit,
    FinishLease,
    Offer,
    Publish,
    SendReply,
    StartRead,
    StopRead,
    Submit,
    Withdraw,
)
from services.worker.core.events import (
    DrainBegun,
    DrainOver,
    Event,
    Fenced,
    Stopping,
    StreamEnded,
    StreamStarted,
)
from services.worker.core.leases import Grant, LeaseTable
from services.worker.core.lending import LendCore
from services.worker.core.replicas import ReplicaCore
from services.worker.engine_feed import EngineFeed
from services.worker.kv.contents import WorkerHolder
from services.worker.kv.peers import Peers
from services.worker.kv.reads import KVReads, ReaderSettings
from services.worker.kv.wire_dtype import WireChoice
from services.worker.limits import (
    LAST_WORDS_S,
    READ_BASE_S,
    READ_BYTES_PER_S_MIN,
    READERS_STAY_S,
)
from services.worker.observe.measured_rates import MeasuredRates
from services.worker.observe.metrics import WorkerMetrics
from services.worker.observe.spans import WorkerSpans
from services.worker.observe.transfers import HolderSpans, ReadRecords
from services.worker.outbox import Outbox
from services.worker.parts import WorkerParts
from services.worker.report import Reporter
from services.worker.roles import Cores, MakeRoles

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
        make_roles: MakeRoles,
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
        self._lease_spans = HolderSpans(telemetry, parts.worker_id)
        leases = LeaseTable()
        self.measured = WorkerMetrics(metrics, lambda: self.reporter.load(now_ms()), leases, layout.block_bytes)
        self._holder = WorkerHolder(
            worker_id=parts.worker_id,
            incarnation=parts.incarnation,
            arena=parts.arena,
            shape=parts.shape,
            memory=BlockCache(parts.shape, chunk_tokens=settings.token_budget, caching=settings.prefix_cache),
            credentials=parts.credentials,
            make_server=parts.platform.make_server,
            on_started=lambda lease: self._post(self._on_stream_started, lease),
            on_served=lambda lease, stats, error: self._post(self._on_stream_ended, lease, stats, error),
            name_stream=telemetry.child_of,
            observes_ends=(self.measured.lease_ended, self._lease_spans.lease_ended),
            leases=leases,
        )
        self._reader = parts.platform.make_reader(parts.arena, parts.shape, parts.credentials.secrets)
        self.peers = Peers(bus)
        self._rates = MeasuredRates(layout.block_bytes // layout.block_size)
        self._wire = WireChoice(settings.wire_dtype, layout, self._rates)
        limits, cache = parts.limits, self._holder.cache
        self._lending = LendCore(limits, cache, leases)
        self.cores = Cores(make_roles(limits, cache, leases), ReplicaCore(limits, cache), self._lending)
        self._feed = EngineFeed(
            parts,
            self._holder,
            self.cores,
            self._spans,
            self._rates,
            self.measured,
            post=self._post,
            handle=self.handle,
        )
        self.reporter = Reporter(
            parts.info(), self._holder, self._feed.engine, self._rates, bus, self._outbox, self.cores
        )
        self._heartbeat = Heartbeat(WORKER_TICK_MS / 1000, settings.fence_after_ms / 1000)
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
            outbox=self._outbox,
            reader=self._reader,
            peers=self.peers,
            credentials=parts.credentials,
            telemetry=self._telemetry,
            tasks=tasks,
            record=ReadRecords(layout.block_size, self._rates, self.measured).record,
            contents=self._holder.contents,
            kept=self._holder.cache.kept,
            on_event=self.handle,
            wire_dtype=lambda holder: self._wire.dtype(holder, now_ms()),
        )
        self._feed.engine.start()
        tasks.create_task(self._outbox.run(), name="outbox")

    def begin_drain(self) -> None:
        """Take no new work; what runs goes on."""
        self.reporter.tell_draining()
        self.handle(DrainBegun())
        self._changed.set()

    def end_drain(self) -> None:
        """What still runs goes on elsewhere; its KV may be read here for a moment more."""
        self.handle(DrainOver())

    async def wait_until_idle(self, timeout_s: float) -> bool:
        """Say whether nothing runs here and nobody reads, at the latest after `timeout_s` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not self._is_idle:  # a lease may have been granted since `_idle` was set
                    await self._idle.wait()
                    await asyncio.sleep(0)
        return self._is_idle

    async def leave(self, timers: "asyncio.Task[None]") -> None:
        """Leave in order: end reads and engine, lend until nobody reads, say so, close the plane, send what is left.
        `timers` keep the leases until then, and are cancelled."""
        self._is_leaving = True
        await self._reads.close()
        await asyncio.to_thread(self._feed.stop)
        await self._holder.until_unread(READERS_STAY_S)
        timers.cancel()
        with self._holder.lock:
            actions = self._lending.handle(Stopping(), now_ms())
            actions += self._lending.handle(Fenced("the worker is stopping"), now_ms())
        self._execute(actions)
        self.reporter.tell_left()
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

    def handle(self, event: Event) -> Message | None:
        """Let the cores decide, and carry out what they say. Return the reply to an event that is a question. Raises
        EngineStoppedError: nothing is decided any more, and no block given back, once a read may write where it should
        not."""
        self._check_reads()
        self.look_at_the_clock()
        return self._decide(event)

    def tick(self) -> None:
        """Do what the time makes necessary. Raises EngineStoppedError."""
        self._check_reads()
        self.look_at_the_clock()
        with self._holder.lock:
            now = now_ms()
            actions = [action for core in self.cores for action in core.tick(now)]
        self._execute(actions)
        self.reporter.tell_cooling()

    def look_at_the_clock(self) -> None:
        """Before anything is done: a worker that stood still must not go on as if nothing had happened."""
        if self._heartbeat.stood_still(time.monotonic()):
            self._fence("it stood still")

    def beat(self) -> None:
        """The clock has ticked."""
        self._heartbeat.beat(time.monotonic())

    def check_engine(self) -> None:
        """Raise EngineStoppedError where the engine's thread has failed, or a read does not come to an end: whoever
        cannot compute must not look well."""
        if self._feed.engine.has_failed:
            raise EngineStoppedError(f"the engine of {self._parts.worker_id} has failed")
        self._check_reads()

    def release_reads(self) -> None:
        """Let go of what reads that have ended had open. Blocks: a driver takes its time to unmap."""
        self._reader.release_ended()

    def lend(self, request: RequestLease, traceparent: str) -> LeaseGranted | Refused:
        """Grant a lease on blocks that are here, or refuse it."""
        self._check_reads()
        self.look_at_the_clock()
        if (refused := self.unproved(request)) is not None:
            return refused
        with self._holder.lock:
            granted = self._lending.answer(request, now_ms())
        self._execute([])
        return granted if isinstance(granted, Refused) else self._holder.lend(granted, request, traceparent)

    def unproved(self, request: RunPrefill | ReserveBlocks | RequestLease) -> Refused | None:
        """Return the refusal of a request of which nobody has proved whose it is, or None."""
        return self._parts.credentials.refusal(request, self._parts.worker_id)

    def left(self, event: WorkerLeft) -> None:
        """Somebody has left; or this worker is said to have."""
        self.peers.left(event)
        if event.worker_id != self._parts.worker_id:
            self.handle(event)
        elif event.incarnation == self._holder.incarnation:
            self._fence(f"it was declared lost: {event.reason}")

    # What others ask.

    def report_load(self) -> None:
        """Tell the load. What changes from now on ends the next `wait_for_change`."""
        self._changed.clear()
        self.reporter.tell_load(now_ms())

    async def wait_for_change(self, timeout_s: float) -> None:
        """Return once there is a load to tell, at the latest after `timeout_s` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()

    def purge(self, message: PurgeBlocks) -> BlocksPurged:
        """Forget what the blocks hold, and let the directory know."""
        kept = self._holder.cache.kept
        num_before = len(kept.block_of)
        self.handle(message)
        num_blocks = num_before - len(kept.block_of)
        return BlocksPurged(worker_id=self._parts.worker_id, num_blocks=num_blocks)

    def alive(self) -> WorkerAlive:
        """Return a sign of life."""
        self.look_at_the_clock()
        lag_ms = self._heartbeat.lag_ms(time.monotonic())
        return WorkerAlive(worker_id=self._parts.worker_id, incarnation=self._holder.incarnation, lag_ms=lag_ms)

    # What the cores ask for.

    def _decide(self, event: Event) -> Message | None:
        with self._holder.lock:
            now = now_ms()
            actions = [action for core in self.cores for action in core.handle(event, now)]
        return self._execute(actions)

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
                    self._feed.submit(action)
                case Withdraw(key=key):
                    self._feed.withdraw(key)
                case StartRead(read=read):
                    self._reads.start(read)
                case StopRead(read=read):
                    self._reads.stop(read)
                case AttemptEnded(attempt=ended):
                    self._spans.ended(ended)
                case _:
                    self._execute_lease(action)
        self._outbox.put_tokens(emitted)
        self.reporter.tell_blocks()
        cache = self._holder.cache
        usage = (cache.num_free + cache.num_cached, self.cores.num_running)
        if len(actions) > (reply is not None) or usage != self._usage:
            self._usage = usage
            self._changed.set()
        if self._is_idle:
            self._idle.set()
        else:
            self._idle.clear()
        return reply

    def _execute_lease(self, action: Offer | FinishLease | CloseLease) -> None:
        match action:
            case Offer(lease=lease, attempt=attempt):
                lease_ms, traceparent = self._parts.limits.lease_ms, attempt.traceparent
                offer = self._holder.offer(lease, attempt.request, lease_ms, traceparent)
                ids = (offer.source_worker, offer.target_worker, offer.handoff_id)
                self._outbox.put(subjects.OFFERED, ids, offer, traceparent)
            case FinishLease(lease=lease, first_token=first):
                self._holder.finish_lease(lease, first)
            case CloseLease(lease=lease):
                self._holder.close_lease(lease)

    # What happens on other threads, brought to the loop.

    def _post(self, handle: Callable[..., None], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended, and with it all that runs here
            self._loop.call_soon_threadsafe(handle, *arguments)

    def _on_stream_started(self, lease: Grant) -> None:
        with self._holder.lock:
            self._lending.handle(StreamStarted(lease), now_ms())

    def _on_stream_ended(self, lease: Grant, stats: TransferStats, error: str) -> None:
        self.handle(StreamEnded(lease, error))
        self._lease_spans.stream_ended(lease, stats, error)

    # Being alive.

    def _check_reads(self) -> None:
        if self._reader.is_stuck:
            raise EngineStoppedError(f"a read of {self._parts.worker_id} does not come to an end, and may still write")

    def _fence(self, reason: str) -> None:
        """Others take this worker for lost: end all that runs, and go on as a new incarnation."""
        if self._is_leaving:
            return
        num_running = len(self.cores.wanted_by())
        log.warning("%s ends %d attempts and joins anew: %s", self._parts.worker_id, num_running, reason)
        self._decide(Fenced(reason))
        self.measured.fenced()
        self._holder.begin(secrets.token_hex(8))
        self._bus.identity["incarnation"] = self._holder.incarnation
        self.reporter.tell_joined()
        self._changed.set()

    @property
    def _is_idle(self) -> bool:
        """Nothing runs here, and nobody reads."""
        return not self.cores.num_running and not len(self._holder.leases)
