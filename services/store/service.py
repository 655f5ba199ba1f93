"""Runs the store: a KV holder like a worker, without an engine."""

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Callable

import msgspec

from schemas import subjects
from schemas.block import split_hashes
from schemas.directory import Inventory, ReadInventory
from schemas.kv import BlocksPurged, LeaseGranted, PurgeBlocks, RequestLease, ReturnLease
from schemas.observe import DescribeWorker, WorkerDescribed
from schemas.request import Refused
from schemas.worker import (
    LeftReason,
    PingWorker,
    WorkerAlive,
    WorkerDraining,
    WorkerInfo,
    WorkerJoined,
    WorkerLeft,
    WorkerLoad,
    WorkerRates,
)
from services.bus.base import Bus
from services.bus.typed import Received, TypedBus
from services.config import MeshConfig
from services.keep import keep_traces
from services.metrics import Metrics
from services.runtime import now_ms
from services.store.backing import Backing, Complaints
from services.store.blocks import StoreMemory
from services.store.core import StoreCore, StoreDrainBegun
from services.store.load import StoreParts, load_store
from services.store.loader import Loader
from services.store.pulls import Puller
from services.telemetry import Telemetry
from services.worker.core.actions import Action, CloseLease
from services.worker.core.events import Event, Fenced, Stopping, StreamEnded, StreamStarted, TimePassed
from services.worker.core.leases import LeaseTable
from services.worker.core.lending import LendCore
from services.worker.core.rules import Rules
from services.worker.kv.holder import KVHolder
from services.worker.kv.peers import Peers
from services.worker.observe.metrics import HolderMetrics
from services.worker.observe.observer import HolderObserver
from services.worker.outbox import Outbox
from services.worker.report import LoadTeller, describe

__all__ = ["load_store", "run_store"]

log = logging.getLogger(__name__)


async def run_store(
    config: MeshConfig,
    parts: StoreParts,
    connection: Bus,
    telemetry: Telemetry,
    stop: asyncio.Event,
    on_ready: Callable[[], None] | None = None,
    metrics: Metrics | None = None,
) -> None:
    """Serve until `stop` is set; then leave in order. Takes ownership of the parts."""
    try:
        async with asyncio.TaskGroup() as tasks:
            bus = TypedBus(connection, "store", metrics or Metrics(parts.memory.limits.worker_id))
            store = Store(config, parts, bus, telemetry, tasks)
            await store.start()
            if on_ready is not None:
                on_ready()
            await stop.wait()
            await store.close()
    finally:
        parts.arena.close()  # whatever ended us, the memory is given back
        if parts.tier is not None:
            parts.tier.close()


class Store:
    """A holder like a worker's, whose memory is filled from what workers give and from the tier behind it."""

    def __init__(
        self, config: MeshConfig, parts: StoreParts, bus: TypedBus, telemetry: Telemetry, tasks: asyncio.TaskGroup
    ) -> None:
        memory, core = parts.memory, StoreCore(parts.memory)
        self._config = config
        self.parts = parts
        self.core = core
        self._memory = memory
        self._store_id = memory.limits.worker_id
        self._timeout_s = config.store.timeout_ms / 1000
        self._drain_s = config.worker.drain_s
        self._bus = bus
        self._tasks = tasks
        self._loop = asyncio.get_running_loop()
        self._outbox = Outbox(bus, self._store_id)
        self._teller = LoadTeller(self._outbox, config.times.presence)
        self._telemetry = telemetry
        self._complaints = Complaints()
        times, tier = config.times.store, parts.tier
        self._backing = Backing(tier, parts.values, self._complaints, times.pause_s) if tier else None
        leases = LeaseTable()
        self._measured = HolderMetrics(bus.metrics, self._load, leases, memory.layout.block_bytes)
        self._observer = HolderObserver(telemetry, self._store_id, self._measured)
        self._holder = KVHolder[StoreMemory](
            worker_id=self._store_id,
            incarnation=parts.incarnation,
            arena=parts.arena,
            shape=parts.shape,
            memory=memory,
            credentials=parts.credentials,
            make_server=parts.platform.make_server,
            on_started=lambda lease: self._post(self._decide, StreamStarted(lease), "plane"),
            on_served=lambda lease, stats, error: self._post(self._decide, StreamEnded(lease, error, stats), "plane"),
            telemetry=telemetry,
            leases=leases,
        )
        self._lending = LendCore(memory.limits, memory, leases)
        self._rules = Rules([self._lending.rules()])
        self._reader = parts.platform.make_reader(
            parts.arena, parts.shape, parts.credentials.secrets, config.times.plane
        )
        self._peers = Peers(bus, config.times.worker)
        self._loader = Loader(memory, self._backing, tasks, self._changed, times)
        self._puller = Puller(
            core=core,
            backing=self._backing,
            bus=bus,
            outbox=self._outbox,
            reader=self._reader,
            carrier=config.worker.carrier,
            tasks=tasks,
            changed=self._changed,
            complaints=self._complaints,
            telemetry=telemetry,
            peers=self._peers,
            contents=self._holder.contents,
            credentials=parts.credentials,
            times=times,
        )
        self._unwritten = asyncio.Event()
        self._all_written = asyncio.Event()
        self._clockwork: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Serve reads, listen, and say so."""
        if not self.core.takes_blocks:
            self._complaints.say("windowed", f"{self.parts.model} has windowed layers: the store takes none of its KV")
        self._holder.start(self._config.worker, self._config.times.plane)
        bus, tasks, me = self._bus, self._tasks, (self._store_id,)
        bus.identity |= {"id": self._store_id, "incarnation": self._holder.incarnation}
        await bus.announce("keeps KV blocks that workers evict, and lends them")
        tasks.create_task(self._outbox.run(), name="outbox")
        await bus.serve(tasks, subjects.LEASE, (*me, "*"), self._on_lease)
        await bus.listen(tasks, subjects.RETURNED, (*me, "*"), self._on_returned)
        await bus.serve(tasks, subjects.INVENTORY, me, self._on_inventory)
        await bus.serve(tasks, subjects.PING, me, self._on_ping)
        await bus.serve(tasks, subjects.WORKER_STATUS, me, self._on_status)
        await bus.serve(tasks, subjects.PURGE, me, self._on_purge)
        await bus.listen(tasks, subjects.LEFT, ("*",), self._on_left)
        await self._peers.listen(tasks)
        await bus.listen(tasks, subjects.COOLING, ("*",), self._puller.offered)
        await bus.listen(tasks, subjects.REPLICATE, (*me, "*"), self._puller.replicated)
        await keep_traces(bus, tasks, self._telemetry)
        await bus.connection.flush()
        self._outbox.put(subjects.JOINED, me, WorkerJoined(worker=self._info()))
        self._clockwork.append(tasks.create_task(self._tick(), name="tick"))
        if self._backing is not None:
            self._clockwork.append(tasks.create_task(self._write_behind(self._backing), name="write behind"))

    async def close(self) -> None:
        """Leave in order: take nothing more and lend nothing more, as whoever asks can read or compute elsewhere; write
        what waits, serve the reads that have a lease, close plane and tier, say so. Each in bounded time."""
        me, incarnation = (self._store_id,), self._holder.incarnation
        self.core.handle(StoreDrainBegun(), now_ms())
        self._decide(Stopping(), "stop")
        self._outbox.put(subjects.DRAINING, me, WorkerDraining(worker_id=self._store_id, incarnation=incarnation))
        await self._puller.close()
        await self._flush()
        await self._holder.until_unread(self._drain_s)
        await self._loader.close()
        for task in self._clockwork:
            task.cancel()
        self._decide(Fenced("the store is stopping"), "stop")
        await asyncio.to_thread(self._holder.stop_serving)
        self._reader.close()
        if self._backing is not None:
            await asyncio.to_thread(self._backing.close)
        left = WorkerLeft(worker_id=self._store_id, incarnation=incarnation, reason=LeftReason.STOPPED)
        self._outbox.put(subjects.LEFT, me, left)
        self._outbox.close()
        with contextlib.suppress(TimeoutError):  # the bus may be away for good
            async with asyncio.timeout(self._config.times.store.last_words_s):
                await self._outbox.sent.wait()
        await self._bus.close()

    # Lending.

    async def _on_lease(self, received: Received[RequestLease]) -> LeaseGranted | Refused:
        request = received.message
        refused = self.parts.credentials.refusal(request, self._store_id) or self._lending.refusal(request, now_ms())
        if refused is None:
            timeout_s = min(round(self._timeout_s * 1000), request.deadline_ms - now_ms()) / 1000
            async with self._loader.held(request.block_hashes, request.tenant, timeout_s):
                with self._holder.lock:
                    granted = self._lending.answer(request, now_ms())
            self._observer.saw(received.subject, request, (granted,))
            if not isinstance(granted, Refused):
                rest = split_hashes(request.block_hashes)[granted.num_blocks :]
                lent = self._holder.lend(granted, request, received.traceparent)
                more_comes = bool(rest) and self._loader.is_coming(rest[0], request.tenant)
                return msgspec.structs.replace(lent, more_comes=more_comes)
            refused = granted
        self._measured.refused("lease", refused)
        return refused

    def _on_returned(self, received: Received[ReturnLease]) -> None:
        self._decide(received.message, received.subject)

    def _on_left(self, received: Received[WorkerLeft]) -> None:
        event = received.message
        self._peers.left(event)
        if event.worker_id != self._store_id:
            self._decide(event, received.subject)
        elif event.incarnation == self._holder.incarnation and not self.core.draining:
            log.warning("%s was declared lost (%s), and joins anew", self._store_id, event.reason)
            self._decide(Fenced("the store was lost"), received.subject)
            self._holder.begin(secrets.token_hex(8))
            self._bus.identity["incarnation"] = self._holder.incarnation
            self._outbox.put(subjects.JOINED, (self._store_id,), WorkerJoined(worker=self._info()))

    async def _on_ping(self, _: Received[PingWorker]) -> WorkerAlive:
        return WorkerAlive(worker_id=self._store_id, incarnation=self._holder.incarnation, lag_ms=0)

    async def _on_purge(self, received: Received[PurgeBlocks]) -> BlocksPurged:
        """Forget what is in memory and behind it. Where all is to go, so does what this store does not believe."""
        memory, tenant = self._memory, received.message.tenant
        num_before = len(memory.kept.block_of) + len(memory.back)
        self._decide(received.message, received.subject)
        num_blocks = num_before - len(memory.kept.block_of) - len(memory.back)
        self._changed()
        failure, forgotten = "", memory.take_forgotten()
        if self._backing is not None:
            failure = await self._backing.delete(None if tenant is None else forgotten)
        return BlocksPurged(worker_id=self._store_id, num_blocks=num_blocks, failure=failure)

    async def _on_status(self, _: Received[DescribeWorker]) -> WorkerDescribed:
        return describe(self._load(), (), list(self._holder.leases), now_ms(), self._observer.journal.lines())

    def _decide(self, event: Event, cause: str) -> None:
        """Let the lending core react to what has happened, and carry out what it says. `cause`: the subject of the
        message, or the part of this process that the event is of."""
        with self._observer.journal.explains():
            with self._holder.lock:
                actions = self._rules.decide(event, now_ms())
            self._execute(actions)
            self._observer.saw(cause, event, actions)

    def _execute(self, actions: list[Action]) -> None:
        for action in actions:
            assert isinstance(action, CloseLease), "nothing is computed here"
            self._holder.close_lease(action.lease)
        if actions:
            self._puller.room_made()

    # What the others hear.

    def _changed(self) -> None:
        """Say what came and what went, and have written what waits for it."""
        for tier, changes in self._memory.take_changes():
            self._outbox.put_block_events(self._holder.ledger.events(changes, tier))
        if self._memory.num_unwritten:
            self._unwritten.set()
        self._puller.room_made()

    async def _on_inventory(self, received: Received[ReadInventory]) -> Inventory:
        self._changed()  # what a page has is in the events up to its number
        max_bytes = self._bus.connection.max_bytes
        return self._holder.ledger.inventory(self._memory.contents, received.message.offset, max_bytes)

    def _info(self) -> WorkerInfo:
        layout, plane = self._memory.layout, self._holder.plane
        return WorkerInfo(
            worker_id=self._store_id,
            incarnation=self._holder.incarnation,
            role="store",
            model=self.parts.model,
            fingerprint=layout.fingerprint,
            num_blocks=self._memory.num_blocks,
            num_blocks_behind=self._memory.back.max_values,
            block_size=layout.block_size,
            context_length=self.parts.context_length,
            carriers=plane.endpoint.carriers if plane else (),
            endpoint=plane.endpoint.told if plane else None,
        )

    def _load(self) -> WorkerLoad:
        layout, plane = self._memory.layout, self._holder.plane
        return WorkerLoad(
            worker=self._info(),
            state="draining" if self.core.draining else "ready",
            blocks=self._holder.counts(),
            num_running=len(self._holder.leases),
            num_queued=0,
            num_uncomputed_tokens=0,
            num_dropped_messages=self._bus.num_dropped,
            num_refused_reads=plane.num_refused + plane.num_junk if plane else 0,
            rates=WorkerRates(kv_token_bytes=layout.block_bytes // layout.block_size),
            clock_ahead_ms=self._telemetry.clock.named_ms,
        )

    # What goes by the clock, or by itself.

    async def _tick(self) -> None:
        """Say the load, and end what is over its time."""
        while True:
            self._decide(TimePassed(), "clock")
            self._changed()
            self._teller.tell(self._load(), now_ms())
            self._reader.release_ended()
            await asyncio.sleep(self._config.times.presence.beat_interval_ms / 1000)

    async def _write_behind(self, backing: Backing) -> None:
        while True:
            await self._unwritten.wait()
            self._unwritten.clear()
            while (batch := self._memory.start_write(backing.batch_blocks)) is not None:
                self._changed()  # what goes is said before it is gone
                written = await backing.write(batch)
                given_up = self._memory.end_write(batch, written.keys, full=written.full)
                if written.failed and not written.full:
                    self._memory.drop_unwritten()
                self._changed()
                if given_up:
                    await backing.delete(given_up)
            self._all_written.set()

    async def _flush(self) -> None:
        """Wait, within bounds, until all is written that can be."""
        if self._backing is None or not self._backing.is_up or not self._memory.num_unwritten:
            return
        self._all_written.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._config.times.store.flush_timeout_s):
                await self._all_written.wait()

    def _post(self, handle: Callable[..., object], *arguments: object) -> None:
        """From a plane's thread to the loop."""
        with contextlib.suppress(RuntimeError):  # the loop has ended, and with it every lease
            self._loop.call_soon_threadsafe(handle, *arguments)
