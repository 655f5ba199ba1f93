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

import msgspec

from dataplane.blocks.cache import BlockCache
from dataplane.blocks.kept import Content
from schemas import subjects
from schemas.block import BLOCK_HASH_BYTES, join_hashes
from schemas.directory import AskHeat
from schemas.ids import BlockHash, GatewayId, RequestId
from schemas.kv import BlocksCooling, BlocksPurged, LeaseGranted, PurgeBlocks, ReplicateBlocks, RequestLease
from schemas.message import Message
from schemas.request import RefusalReason, Refused, RequestTokens, ReserveBlocks, RunPrefill, refuse
from schemas.worker import (
    DrainAnswered,
    DrainWorker,
    LeaveAnswered,
    LeaveMesh,
    WorkerAlive,
    WorkerLeft,
    WorkerRole,
)
from services.bus.base import BusError
from services.bus.fleet import ask_fleet
from services.bus.typed import TypedBus
from services.config import MeshConfig
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
    Lend,
    Offer,
    Publish,
    SendReply,
    StartRead,
    StopRead,
    Submit,
    Withdraw,
)
from services.worker.core.events import (
    AttemptAsked,
    DrainBegun,
    DrainOver,
    Event,
    Fenced,
    LeaseAsked,
    Stopping,
    StreamEnded,
    StreamStarted,
    TimePassed,
)
from services.worker.core.leases import LeaseTable
from services.worker.core.leaving import LeftBehind, hottest_first, left_behind
from services.worker.core.lending import LendCore
from services.worker.core.replicas import ReplicaCore
from services.worker.engine_feed import EngineFeed
from services.worker.kv.contents import WorkerHolder
from services.worker.kv.ledger import blocks_in
from services.worker.kv.peers import Peers
from services.worker.kv.reads import KVReads, ReaderSettings
from services.worker.kv.wire_dtype import WireChoice
from services.worker.limits import (
    MAX_HEAT_BLOCKS,
    MAX_LEASES_AWAITED,
    READ_BYTES_PER_S_MIN,
)
from services.worker.observe.measured_rates import MeasuredRates
from services.worker.observe.metrics import WorkerMetrics
from services.worker.observe.observer import WorkerObserver
from services.worker.observe.transfers import ReadRecords
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
    """One worker's shell. `step` is the only way in for whatever may change an attempt."""

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
        self._times = config.times.worker
        self._bus = bus
        self._telemetry = telemetry
        self._outbox = Outbox(bus, parts.worker_id)
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
            on_started=lambda lease: self._post(self.step, StreamStarted(lease), "plane"),
            on_served=lambda lease, stats, error: self._post(self.step, StreamEnded(lease, error, stats), "plane"),
            telemetry=telemetry,
            leases=leases,
        )
        self._reader = parts.platform.make_reader(
            parts.arena, parts.shape, parts.credentials.secrets, config.times.plane
        )
        self.peers = Peers(bus, self._times)
        self._rates = MeasuredRates(layout.block_bytes // layout.block_size)
        self._wire = WireChoice(settings.wire_dtype, layout, self._rates)
        limits, cache = parts.limits, self._holder.cache
        copies, lending = ReplicaCore(limits, cache), LendCore(limits, cache, leases)
        self.cores = Cores(make_roles(limits, cache, leases), copies, lending)
        self._rules = self.cores.rules()
        self._observer = WorkerObserver(telemetry, parts.worker_id, self.measured, self._rates, self.cores)
        self._feed = EngineFeed(
            parts, self._holder, self.cores, post=self._post, step=lambda event: self.step(event, "engine")
        )
        self.reporter = Reporter(
            parts.info(), self._holder, self._feed.engine, self._rates, bus, self._outbox, self.cores,
            config.times.presence, self._observer.journal,
        )  # fmt: skip
        self._heartbeat = Heartbeat(self._times.tick_ms / 1000, settings.fence_after_ms / 1000)
        self._loop: asyncio.AbstractEventLoop
        self._reads: KVReads
        self._changed = asyncio.Event()
        """Set when the load is to be told."""
        self._idle = asyncio.Event()
        """Set while the worker is idle, as of the last decision."""
        self._stored = asyncio.Event()
        """Set, and replaced, when blocks have come."""
        self._num_waiting = 0
        """Readers that wait for a lease."""
        self._usage = (0, 0)
        """Blocks that can be had, and what runs, when last looked at."""
        self._is_leaving = False
        self.told_to_leave = asyncio.Event()
        """Set once it is to leave, by an operator or its process."""
        self.comes_again: bool | None = None
        """Whether an operator wants it to be started again; None: no operator has told it to leave."""

    # From the start to the end.

    async def start(self, tasks: asyncio.TaskGroup) -> None:
        """Serve reads, be listed as a service, start the engine, and send what is decided."""
        parts, settings, layout = self._parts, self._config.worker, self._parts.shape.layout
        self._loop = asyncio.get_running_loop()
        self._holder.start(settings, self._config.times.plane)
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
            base_s=self._times.read_base_s,
            times=self._times,
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
            on_event=lambda event: self.step(event, "read"),
            wire_dtype=lambda holder: self._wire.dtype(holder, now_ms()),
        )
        self._feed.engine.start()
        tasks.create_task(self._outbox.run(), name="outbox")

    async def may_leave(self, *, forced: bool) -> LeaveAnswered:
        """Return what the scheduler says to our leaving; without one nobody is known who could go on with what runs."""
        me, incarnation = self._parts.worker_id, self._holder.incarnation
        message = LeaveMesh(worker_id=me, incarnation=incarnation, forced=forced)
        try:
            return await self._bus.ask(subjects.LEAVE, (me,), message, self._times.leave_answer_s)
        except BusError as error:
            return LeaveAnswered(refusal=f"no scheduler says who else is there ({error.reason})", is_last=True)

    async def drain(self, message: DrainWorker) -> DrainAnswered:
        """Begin to leave, as an operator has asked for, or say why not."""
        answer = LeaveAnswered()
        was_leaving = self.told_to_leave.is_set()
        if not was_leaving:
            answer = await self.may_leave(forced=message.forced)
        leaves = was_leaving or message.forced or not answer.refusal
        if leaves and not self.told_to_leave.is_set():
            self.comes_again = message.again
            self.told_to_leave.set()
        return DrainAnswered(
            worker_id=self._parts.worker_id,
            incarnation=self._holder.incarnation,
            refusal="" if leaves else answer.refusal,
            is_leaving=was_leaving,
        )

    def begin_drain(self, *, finishes: bool) -> None:
        """Take no new work; what runs goes on elsewhere, or, where nobody else could go on with it, here."""
        self.told_to_leave.set()
        self.reporter.tell_draining()
        self.step(DrainBegun(finishes), "drain")
        self._changed.set()

    async def leave_behind(self) -> None:
        """Offer the hottest blocks to those who stay, and lend until they have read them, within the budget of bytes
        and time."""
        settings, layout = self._config.worker, self._parts.shape.layout
        num_blocks = settings.leave_bytes // layout.block_bytes
        num_asked = min(MAX_HEAT_BLOCKS, blocks_in(self._bus.connection.max_bytes))
        used_last = self._holder.cache.kept.used_last(max(num_blocks, num_asked))
        if not num_blocks or not used_last or layout.is_windowed:
            return
        try:
            fleet = await ask_fleet(self._bus, self._times.leave_answer_s)
        except BusError as error:
            log.warning("what is cached here goes with it: no scheduler says who stays (%s)", error.reason)
            return
        hottest = hottest_first(used_last, await self._heat_of(used_last[:num_asked]))
        offers = left_behind(self.reporter.info(), hottest[:num_blocks], fleet.workers)
        for offer in offers:
            self._offer_left(offer)
        if offers:
            await self._until_unasked(settings.leave_s)

    async def _heat_of(self, contents: list[Content]) -> bytes:
        """Return how often each of these blocks was asked for, as the directory says; nothing, if it does not."""
        me = self._parts.worker_id
        question = AskHeat(worker_id=me, block_hashes=join_hashes([content.block_hash for content in contents]))
        try:
            return (await self._bus.ask(subjects.HEAT, (me,), question, self._times.leave_answer_s)).heat
        except BusError as error:
            log.info("no directory says which blocks are hot: those used last are left behind (%s)", error.reason)
            return b""

    def _offer_left(self, offer: LeftBehind) -> None:
        me, to = self._parts.worker_id, offer.receiver
        joined = join_hashes(offer.hashes)
        if to.role == "store":
            cooling = BlocksCooling(
                worker_id=me, incarnation=self._holder.incarnation, block_hashes=joined, tenant=offer.tenant
            )
            self._outbox.put(subjects.COOLING, (me,), cooling)
            return
        message = ReplicateBlocks(
            request_id=RequestId(f"leave-{me}"),
            attempt=1,
            deadline_ms=now_ms() + self._times.read_within_ms,
            source=me,
            fingerprint=self._parts.limits.fingerprint,
            first_block=0,
            block_hashes=joined,
            tenant=offer.tenant,
            leaving=True,
        )
        self._outbox.put(subjects.REPLICATE, (to.worker_id, me), message)

    async def _until_unasked(self, timeout_s: float) -> None:
        """Return once nobody has asked for a lease for a while, and none is open, or the time is over."""
        leases, asked_s = self._holder.leases, time.monotonic()
        until_s, num_granted = asked_s + timeout_s, leases.num_granted
        while (now_s := time.monotonic()) < until_s:
            if len(leases) or leases.num_granted != num_granted:
                asked_s, num_granted = now_s, leases.num_granted
            if now_s - asked_s >= self._times.copiers_quiet_s:
                return
            await asyncio.sleep(self._times.tick_ms / 1000)

    def end_drain(self) -> None:
        """What still runs goes on elsewhere, whatever it is; its KV may be read here for a moment more."""
        self.step(DrainOver(), "drain")

    async def wait_until_idle(self, timeout_s: float) -> bool:
        """Say whether nothing runs here and nobody reads or is to read, at the latest after `timeout_s` seconds."""
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
        await self._holder.until_unread(self._times.readers_stay_s)
        timers.cancel()
        for last in (Stopping(), Fenced("the worker is stopping")):
            self._decide(last, "stop")
        self.reporter.tell_left()
        self._outbox.close()
        await asyncio.to_thread(self._reader.close)
        await asyncio.to_thread(self._holder.close)
        with contextlib.suppress(TimeoutError):  # the bus may be away for good
            async with asyncio.timeout(self._times.last_words_s):
                await self._outbox.sent.wait()
        await self._bus.close()

    def close_memory(self) -> None:
        """Give the memory back, whatever ended the worker."""
        self._holder.close()

    # Deciding.

    def step(self, event: Event, cause: str) -> Message | None:
        """The only door: whatever happens comes in here, from the bus, the engine, carriers and timers. Let the cores
        decide, and carry out what they say. Return the reply to an event that is a question. `cause`: the subject of
        the message, or the part of this process that the event is of. Raises EngineStoppedError: nothing is decided any
        more, and no block given back, once a read may write where it should not."""
        self._check_reads()
        self.look_at_the_clock()
        reply = self._decide(event, cause)
        if isinstance(event, AttemptAsked) and not isinstance(reply, Refused):
            self._feed.expect(event.request.sampling.grammar)
        return reply

    def tick(self) -> None:
        """Do what the time makes necessary. Raises EngineStoppedError."""
        self.step(TimePassed(), "clock")
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

    async def lend(self, request: RequestLease, traceparent: str, cause: str) -> LeaseGranted | Refused:
        """Grant a lease on blocks that are here, as soon as the first of them is if it is being computed; or refuse
        it."""
        until_ms = now_ms() + max(0, request.answer_within_ms) // 2  # the answer has its way to go, too
        self._num_waiting += 1
        try:
            while True:
                stored, reply = self._stored, self.unproved(request)
                reply = reply or self.step(LeaseAsked(request, traceparent), cause)
                assert isinstance(reply, LeaseGranted | Refused), "it is answered by `LendCore`"
                if isinstance(reply, LeaseGranted) or reply.reason is not RefusalReason.GONE:
                    return reply
                if not self._is_coming(request, 0):
                    return reply
                if now_ms() >= until_ms or self._num_waiting > MAX_LEASES_AWAITED:
                    return refuse(request, RefusalReason.COMING, f"{self._parts.worker_id} is computing these blocks")
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout((until_ms - now_ms()) / 1000):
                        await stored.wait()
        finally:
            self._num_waiting -= 1

    def _is_coming(self, request: RequestLease, num_blocks: int) -> bool:
        """Say whether the block behind the first `num_blocks` of those asked for is being computed here."""
        rest = request.block_hashes[num_blocks * BLOCK_HASH_BYTES :]
        if not (rest and self._config.worker.twins and self._holder.cache.keeps_what_is_computed):
            return False
        next_hash = BlockHash(rest[:BLOCK_HASH_BYTES])
        return self.cores.is_computing(next_hash, request.first_block + num_blocks, request.tenant)

    def _lend(self, lend: Lend) -> LeaseGranted:
        lent = self._holder.lend(lend.lease, lend.request, lend.traceparent)
        num_blocks = lend.lease.num_tokens // self._parts.limits.block_size - lend.request.first_block
        return msgspec.structs.replace(lent, more_comes=self._is_coming(lend.request, num_blocks))

    def unproved(self, request: RunPrefill | ReserveBlocks | RequestLease) -> Refused | None:
        """Return the refusal of a request of which nobody has proved whose it is, or None."""
        return self._parts.credentials.refusal(request, self._parts.worker_id)

    def left(self, event: WorkerLeft, cause: str) -> None:
        """Somebody has left; or this worker is said to have."""
        self.peers.left(event)
        if event.worker_id != self._parts.worker_id:
            self.step(event, cause)
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

    def purge(self, message: PurgeBlocks, cause: str) -> BlocksPurged:
        """Forget what the blocks hold, and let the directory know."""
        kept = self._holder.cache.kept
        num_before = len(kept.block_of)
        self.step(message, cause)
        num_blocks = num_before - len(kept.block_of)
        return BlocksPurged(worker_id=self._parts.worker_id, num_blocks=num_blocks)

    def alive(self) -> WorkerAlive:
        """Return a sign of life."""
        self.look_at_the_clock()
        lag_ms = self._heartbeat.lag_ms(time.monotonic())
        return WorkerAlive(worker_id=self._parts.worker_id, incarnation=self._holder.incarnation, lag_ms=lag_ms)

    # What the cores ask for.

    def _decide(self, event: Event, cause: str) -> Message | None:
        with self._observer.journal.explains():
            with self._holder.lock:
                actions = self._rules.decide(event, now_ms())
            reply = self._execute(actions)
            self._observer.saw(cause, event, actions)
        return reply

    def _execute(self, actions: list[Action]) -> Message | None:
        """Carry out actions in order; the tokens among them go out as one message a gateway. Return the reply among
        them."""
        emitted: list[tuple[GatewayId, RequestTokens]] = []
        reply: Message | None = None
        for action in actions:
            match action:
                case SendReply(message=reply):
                    pass
                case Lend():
                    reply = self._lend(action)
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
                case AttemptEnded():
                    pass
                case _:
                    self._execute_lease(action)
        self._outbox.put_tokens(emitted)
        if self.reporter.tell_blocks():
            self._stored.set()
            self._stored = asyncio.Event()
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

    def _post(self, handle: Callable[..., object], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended, and with it all that runs here
            self._loop.call_soon_threadsafe(self._posted, handle, *arguments)

    def _posted(self, handle: Callable[..., object], *arguments: object) -> None:
        with self._observer.journal.explains():
            handle(*arguments)

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
        self._decide(Fenced(reason), "presence")
        self.measured.fenced()
        self._holder.begin(secrets.token_hex(8))
        self._bus.identity["incarnation"] = self._holder.incarnation
        self.reporter.tell_joined()
        self._changed.set()

    @property
    def _is_idle(self) -> bool:
        """Nothing runs here, and nobody reads or is to read."""
        leases = self._holder.leases
        return not self.cores.num_running and not len(leases) and not leases.num_expected
