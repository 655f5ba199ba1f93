"""The shell around a worker's cores: brings them what happens, and carries out what they decide, in order.

Cores run on the event loop only. The engine's and the plane's threads post what they have to report to the loop. The
rest of this package calls the shell's methods, and has no part of its state.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from functools import partial

from dataplane.blocks.cache import BlockCache
from dataplane.blocks.kept import Content
from schemas import subjects
from schemas.block import BLOCK_HASH_BYTES, join_hashes
from schemas.directory import AskHeat
from schemas.ids import BlockHash, RequestId
from schemas.kv import BlocksPurged, EvictionCandidates, LeaseGranted, PurgeBlocks, ReplicateBlocks, RequestLease
from schemas.message import Message
from schemas.request import RefusalReason, Refused, refuse
from schemas.worker import (
    DrainAnswered,
    DrainWorker,
    LeaveAnswered,
    LeaveMesh,
    WorkerRole,
)
from services.bus.base import BusError
from services.bus.fleet import ask_fleet
from services.bus.typed import TypedBus
from services.config import MeshConfig
from services.engine.client import EngineStoppedError
from services.holder.core.actions import (
    Action,
    AttemptEnded,
    Emit,
    FinishLease,
    Lend,
    NotTaken,
    Offer,
    Publish,
    SendReply,
    Submit,
    Withdraw,
)
from services.holder.core.copies import CopyCore, num_spare
from services.holder.core.events import (
    AttemptAsked,
    DrainBegun,
    DrainOver,
    EngineBack,
    EngineDied,
    Event,
    LeaseAsked,
    TimePassed,
)
from services.holder.core.rules import Rules
from services.holder.holder import Holder
from services.holder.kv.ledger import blocks_in
from services.holder.limits import (
    CANDIDATE_SHARE,
    MAX_CANDIDATE_BLOCKS,
    MAX_COPY_READS,
    MAX_HEAT_BLOCKS,
    MAX_LEASES_AWAITED,
)
from services.holder.report import Reporter
from services.metrics import Metrics
from services.runtime import now_ms
from services.telemetry import Telemetry
from services.worker.core import AttemptCore
from services.worker.engine_feed import EngineFeed
from services.worker.leaving import LeftBehind, hottest_first, left_behind
from services.worker.observe.measured_rates import MeasuredRates
from services.worker.observe.metrics import WorkerMetrics
from services.worker.observe.observer import WorkerObserver
from services.worker.observe.reads import ReadRecords
from services.worker.parts import WorkerParts
from services.worker.report import WorkerLoads
from services.worker.wire_dtype import WireChoice

log = logging.getLogger(__name__)


class Worker:
    """One worker's shell: it has a holder, and what computes."""

    def __init__(
        self,
        parts: WorkerParts,
        config: MeshConfig,
        bus: TypedBus,
        telemetry: Telemetry,
        metrics: Metrics,
    ) -> None:
        layout, settings, limits = parts.shape.layout, config.worker, parts.limits
        cache = BlockCache(parts.shape, chunk_tokens=settings.token_budget, caching=settings.prefix_cache)
        self._config = config
        self._times = config.times.worker
        self._bus = bus
        # The holder makes the lease table, and lends from the cache and leases that the cores below change.
        self.holder = Holder(parts, cache, limits, config, bus, telemetry, self, tick_ms=self._times.tick_ms)
        leases = self.holder.blocks.leases
        self._cache = cache
        self._limits = limits
        self._rates = MeasuredRates(layout.block_bytes // layout.block_size)
        self._wire = WireChoice(settings.wire_dtype, layout, self._rates)
        self.core = AttemptCore(limits, cache, leases, wait_for_duplicates=settings.wait_for_duplicates)
        self._copies = CopyCore(limits, cache, partial(num_spare, cache), max_reads=MAX_COPY_READS)
        # Blocks may have become free: what waits for some is begun.
        cores = (self.core, self._copies, self.holder.lending)
        self.rules = Rules([core.rules() for core in cores], [self.core.admit])
        # The load is asked for only as metrics are sampled: `reporter` is made further below.
        measured = WorkerMetrics(metrics, lambda: self.reporter.current_load(now_ms()))
        self._observer = WorkerObserver(telemetry, parts.worker_id, measured, self._rates, self.core)
        self._record = ReadRecords(layout.block_size, self._rates, measured).record
        # The engine's threads post to the event loop; from there its events go through `step`, as all others do.
        self._feed = EngineFeed(
            parts, self.holder.blocks, self.core, post=self.holder.post, step=lambda event: self.step(event, "engine")
        )
        self.engine = self._feed.engine
        self._loads = WorkerLoads(engine=self.engine, rates=self._rates, core=self.core, copies=self._copies)
        self.reporter = Reporter(
            identity=parts.info, blocks=self.holder.blocks, bus=bus, outbox=self.holder.outbox,
            times=config.times.presence, journal=self.holder.journal,
            load=self._loads.load, requests=self._loads.requests,
        )  # fmt: skip
        self._changed = asyncio.Event()
        """Set when the load is to be published."""
        self._idle = asyncio.Event()
        """Set while the worker is idle, as of the last decision."""
        self._stored = asyncio.Event()
        """Set, and replaced, when blocks have come."""
        self._num_waiting = 0
        """Readers that wait for a lease."""
        self._usage = (0, 0)
        """Blocks that can be had, and what runs, when last looked at."""
        self._candidates: set[Content] = set()
        """What would be given up next, when last looked at."""
        self.asked_to_leave = asyncio.Event()
        """Set once it is to leave, by an operator or its process."""
        self.comes_again: bool | None = None
        """Whether an operator wants it to be started again; None: no operator has asked it to leave."""

    # From the start to the end.

    async def begin_serving(self, tasks: asyncio.TaskGroup) -> None:
        """Serve reads, start the engine, and find out who can read. Raises UserError."""
        await self.holder.start_serving(tasks)
        await asyncio.to_thread(self._wire.measure)
        self.holder.start_reading(tasks, self._record, lambda holder: self._wire.dtype(holder, now_ms()))
        self.engine.start_engine()
        await self.holder.try_ways()

    async def may_leave(self, *, forced: bool) -> LeaveAnswered:
        """Return the scheduler's answer to our leaving; without one nobody is known who could go on with what runs."""
        me, incarnation = self.holder.parts.worker_id, self.holder.blocks.incarnation
        message = LeaveMesh(worker_id=me, incarnation=incarnation, forced=forced)
        try:
            return await self._bus.ask(subjects.LEAVE, (me,), message, self._times.leave_answer_s)
        except BusError as error:
            return LeaveAnswered(refusal=f"no scheduler says who else is there ({error.reason})", is_last=True)

    async def drain(self, message: DrainWorker) -> DrainAnswered:
        """Begin to leave, as an operator has asked for, or answer why not."""
        answer = LeaveAnswered()
        was_leaving = self.asked_to_leave.is_set()
        if not was_leaving:
            answer = await self.may_leave(forced=message.forced)
        leaves = was_leaving or message.forced or not answer.refusal
        if leaves and not self.asked_to_leave.is_set():
            self.comes_again = message.again
            self.asked_to_leave.set()
        return DrainAnswered(
            worker_id=self.holder.parts.worker_id,
            incarnation=self.holder.blocks.incarnation,
            refusal="" if leaves else answer.refusal,
            is_leaving=was_leaving,
        )

    def begin_drain(self, *, finishes: bool) -> None:
        """Take no new work; what runs goes on elsewhere, or, where nobody else could go on with it, here."""
        self.asked_to_leave.set()
        self.reporter.publish_draining()
        self.step(DrainBegun(finishes), "drain")
        self._changed.set()

    async def leave_behind(self) -> None:
        """Offer the hottest blocks to those who stay, and lend until they have read them, within the budget of bytes
        and time."""
        settings, layout = self._config.worker, self.holder.parts.shape.layout
        num_blocks = settings.leave_bytes // layout.block_bytes
        num_asked = min(MAX_HEAT_BLOCKS, blocks_in(self._bus.connection.max_bytes))
        used_last = self._cache.kept.used_last(max(num_blocks, num_asked))
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
        """Return how often each of these blocks was asked for, as the directory answers; nothing, if it does not."""
        me = self.holder.parts.worker_id
        question = AskHeat(worker_id=me, block_hashes=join_hashes([content.block_hash for content in contents]))
        try:
            return (await self._bus.ask(subjects.HEAT, (me,), question, self._times.leave_answer_s)).heat
        except BusError as error:
            log.info("no directory says which blocks are hot: those used last are left behind (%s)", error.reason)
            return b""

    def _offer_left(self, offer: LeftBehind) -> None:
        me, to = self.holder.parts.worker_id, offer.receiver
        if to.role == WorkerRole.STORE:
            self._publish_cools(offer.hashes, offer.tenant)
            return
        message = ReplicateBlocks(
            request_id=RequestId(f"leave-{me}"),
            attempt=1,
            deadline_ms=now_ms() + self._times.read_within_ms,
            source=me,
            fingerprint=self._limits.fingerprint,
            first_block=0,
            block_hashes=join_hashes(offer.hashes),
            tenant=offer.tenant,
            leaving=True,
        )
        self.holder.outbox.put(subjects.REPLICATE, (to.worker_id, me), message)

    async def _until_unasked(self, timeout_s: float) -> None:
        """Return once nobody has asked for a lease for a while, and none is open, or the time is over."""
        leases, asked_s = self.holder.blocks.leases, time.monotonic()
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
        """Return whether nothing runs here and nobody reads or is to read, at the latest after `timeout_s` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not self._is_idle:  # a lease may have been granted since `_idle` was set
                    await self._idle.wait()
                    await asyncio.sleep(0)
        return self._is_idle

    async def leave(self, timers: "asyncio.Task[None]") -> None:
        """Leave in order: end reads and engine, lend until nobody reads, and end. `timers` keep the leases until then,
        and are cancelled."""
        self.holder.is_leaving = True
        await self.holder.reads.close()
        await asyncio.to_thread(self._feed.stop_engine)
        await self.holder.blocks.until_unread(self._times.readers_stay_s)
        timers.cancel()
        await self.holder.depart()

    # Deciding.

    def step(self, event: Event, cause: str) -> Message | None:
        """See `HolderOwner.step`. Raises EngineStoppedError: nothing is decided any more, and no block given back, once
        a read may write where it should not."""
        self._check_reads()
        self.holder.look_at_the_clock()
        reply = self.holder.decide(event, cause)
        if isinstance(event, EngineDied | EngineBack):
            self.report_load()  # at once: requests are placed here, or wait for that
        if isinstance(event, AttemptAsked) and not isinstance(reply, Refused):
            self._feed.expect(event.request.sampling.grammar)
        return reply

    def tick(self) -> None:
        """Do what the time makes necessary. Raises EngineStoppedError."""
        self.step(TimePassed(), "clock")
        self._publish_candidates()

    def _publish_candidates(self) -> None:
        """Publish which blocks will go soon and have not been named yet, while room is scarce."""
        if self._cache.num_free * CANDIDATE_SHARE >= self._cache.num_blocks:
            self._candidates.clear()
            return
        coldest = self._cache.coldest(MAX_CANDIDATE_BLOCKS)
        by_tenant: dict[str, list[BlockHash]] = {}
        for content in coldest:
            if content not in self._candidates:
                by_tenant.setdefault(content.tenant, []).append(content.block_hash)
        self._candidates = set(coldest)
        for tenant, hashes in by_tenant.items():
            self._publish_cools(hashes, tenant)

    def _publish_cools(self, hashes: Sequence[BlockHash], tenant: str) -> None:
        me = self.holder.parts.worker_id
        message = EvictionCandidates(
            worker_id=me, incarnation=self.holder.blocks.incarnation, block_hashes=join_hashes(hashes), tenant=tenant
        )
        self.holder.outbox.put(subjects.EVICTION_CANDIDATES, (me,), message)

    def check_engine(self) -> None:
        """Raise EngineStoppedError where the engine's thread has failed, or a read does not come to an end: whoever
        cannot compute must not look well."""
        if self.engine.has_failed:
            raise EngineStoppedError(f"the engine of {self.holder.parts.worker_id} has failed")
        self._check_reads()

    async def grant_lease(self, request: RequestLease, traceparent: str, cause: str) -> LeaseGranted | Refused:
        """Grant a lease on blocks that are here, as soon as the first of them is if it is being computed; or refuse
        it."""
        until_ms = now_ms() + max(0, request.answer_within_ms) // 2  # the answer has its way to go, too
        self._num_waiting += 1
        try:
            while True:
                stored, reply = self._stored, self.holder.unsigned(request)
                reply = reply or self.step(LeaseAsked(request, traceparent), cause)
                assert isinstance(reply, LeaseGranted | Refused), "it is answered by `LendCore`"
                if isinstance(reply, LeaseGranted) or reply.reason is not RefusalReason.GONE:
                    return reply
                if not self.is_in_flight(request, 0):
                    return reply
                if now_ms() >= until_ms or self._num_waiting > MAX_LEASES_AWAITED:
                    return refuse(
                        request, RefusalReason.IN_FLIGHT, f"{self.holder.parts.worker_id} is computing these blocks"
                    )
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout((until_ms - now_ms()) / 1000):
                        await stored.wait()
        finally:
            self._num_waiting -= 1

    def is_in_flight(self, request: RequestLease, num_blocks: int) -> bool:
        """Return whether the block behind the first `num_blocks` of those asked for is being computed here."""
        rest = request.block_hashes[num_blocks * BLOCK_HASH_BYTES :]
        if not (rest and self._config.worker.wait_for_duplicates and self._cache.keeps_what_is_computed):
            return False
        next_hash = BlockHash(rest[:BLOCK_HASH_BYTES])
        return self.core.is_computing(next_hash, request.first_block + num_blocks, request.tenant)

    # What others ask.

    def report_load(self) -> None:
        """Publish the load. What changes from now on ends the next `wait_for_change`."""
        self._changed.clear()
        self.reporter.publish_load(now_ms())

    async def wait_for_change(self, timeout_s: float) -> None:
        """Return once there is a load to publish, at the latest after `timeout_s` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()

    async def purge(self, message: PurgeBlocks, cause: str) -> BlocksPurged:
        """Forget what the blocks hold, and let the directory know."""
        num_before = len(self._cache.kept.block_of)
        self.step(message, cause)
        num_blocks = num_before - len(self._cache.kept.block_of)
        return BlocksPurged(worker_id=self.holder.parts.worker_id, num_blocks=num_blocks)

    # What the cores ask for.

    def carry_out(self, action: Action) -> None:
        """Do what is decided of more than leases and reads."""
        match action:
            case Publish(subject=subject, ids=ids, message=message, traceparent=traceparent):
                self.holder.outbox.put(subject, ids, message, traceparent)
            case Submit():
                self._feed.submit(action)
            case Withdraw(key=key):
                self._feed.withdraw(key)
            case Offer(lease=lease, attempt=attempt):
                lease_ms, traceparent = self._limits.lease_ms, attempt.traceparent
                offer = self.holder.blocks.offer(lease, attempt.request, lease_ms, traceparent)
                ids = (offer.source_worker, offer.target_worker, offer.handoff_id)
                self.holder.outbox.put(subjects.OFFERED, ids, offer, traceparent)
            case FinishLease(lease=lease, first_token=first):
                self.holder.blocks.finish_lease(lease, first)
            case _:
                assert isinstance(action, Emit | AttemptEnded | NotTaken), f"{action} is carried out elsewhere"

    def carried_out(self, event: Event, actions: Sequence[Action]) -> None:
        """All that was decided on an event is done: the tokens go out, as one message a gateway, and what blocks have
        come and gone."""
        holder = self.holder
        holder.outbox.put_tokens([(each.gateway_id, each.tokens) for each in actions if isinstance(each, Emit)])
        if self.reporter.publish_blocks():
            self._stored.set()
            self._stored = asyncio.Event()
        usage = (self._cache.num_free + self._cache.num_cached, self._loads.num_running)
        if usage != self._usage or any(not isinstance(action, SendReply | Lend) for action in actions):
            self._usage = usage
            self._changed.set()
        if self._is_idle:
            self._idle.set()
        else:
            self._idle.clear()
        self._observer.saw(event, actions)

    # Being alive.

    def _check_reads(self) -> None:
        if self.holder.is_stuck:
            raise EngineStoppedError(
                f"a read of {self.holder.parts.worker_id} does not come to an end, and may still write"
            )

    def fenced(self) -> None:
        """All has ended, and this worker has joined anew: its load is to be published."""
        self._changed.set()

    @property
    def _is_idle(self) -> bool:
        """Nothing runs here, and nobody reads or is to read."""
        leases = self.holder.blocks.leases
        return not self._loads.num_running and not len(leases) and not leases.num_expected
