"""Runs the store: a KV holder like a worker, without an engine."""

import asyncio
import contextlib
import logging
import secrets
import socket
from collections.abc import Callable

from dataplane.blocks.lease import Lease
from dataplane.blocks.ticket import Ticket, sign
from dataplane.ends.choice import offered_carriers
from dataplane.ends.server import ServerOptions
from dataplane.protocol.stream import TransferStats
from schemas import subjects
from schemas.directory import BlocksStored, ReadInventory
from schemas.ids import LeaseId
from schemas.kv import LeaseGranted, RequestLease, ReturnLease
from schemas.message import Message
from schemas.observe import DescribeWorker
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
from services.presence import LOAD_INTERVAL_MS
from services.runtime import now_ms
from services.store.backing import Backing, Complaints
from services.store.gate import Lent, StoreGate
from services.store.lender import Lender
from services.store.load import StoreParts, load_store
from services.store.pulls import Puller
from services.telemetry import Key, Telemetry
from services.worker.kv.holder import num_blocks_of
from services.worker.observe.describe import describe
from services.worker.observe.metrics import HolderMetrics
from services.worker.observe.transfers import HolderSpans
from services.worker.outbox import Outbox

__all__ = ["load_store", "run_store"]

log = logging.getLogger(__name__)

LAST_WORDS_S = 5.0
FLUSH_TIMEOUT_S = 5.0
"""How long a store that is stopped goes on writing behind memory."""


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
            bus = TypedBus(connection, "store", metrics or Metrics(parts.core.limits.store_id))
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
    """The core on a bus, a plane and a tier."""

    def __init__(
        self, config: MeshConfig, parts: StoreParts, bus: TypedBus, telemetry: Telemetry, tasks: asyncio.TaskGroup
    ) -> None:
        core = parts.core
        self.parts = parts
        self.core = core
        self._store_id = core.limits.store_id
        self._timeout_s = config.store.timeout_ms / 1000
        self._drain_s = config.worker.drain_s
        self._measured = HolderMetrics(bus.metrics, self._load, core.layout.block_bytes)
        self._bus = bus
        self._tasks = tasks
        self._loop = asyncio.get_running_loop()
        self._outbox = Outbox(bus, self._store_id)
        self._telemetry = telemetry
        self._spans = HolderSpans(telemetry, self._store_id)
        self._complaints = Complaints()
        self._backing = Backing(parts.tier, parts.values, self._complaints) if parts.tier else None
        self._gate = StoreGate(
            core.leases,
            parts.shape.layout.num_layers,
            on_started=lambda lease_id: self._post(self._started, lease_id),
            on_served=lambda lease_id, stats, error: self._post(self._served, lease_id, stats, error),
            name_stream=telemetry.child_of,
        )
        self._plane = parts.platform.make_server(
            parts.arena, parts.shape, self._gate, parts.secret, _server_options(config)
        )
        self._reader = parts.platform.make_reader(parts.arena, parts.shape)
        self._lender = Lender(core, self._backing, tasks, self._changed)
        self._puller = Puller(
            core=core,
            backing=self._backing,
            bus=bus,
            reader=self._reader,
            carrier=config.worker.carrier,
            tasks=tasks,
            changed=self._changed,
            complaints=self._complaints,
            telemetry=telemetry,
        )
        self._unwritten = asyncio.Event()
        self._all_written = asyncio.Event()
        self._none_lent = asyncio.Event()
        self._clockwork: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Serve reads, listen, and say so."""
        if not self.core.takes_blocks:
            self._complaints.say("windowed", f"{self.parts.model} has windowed layers: the store takes none of its KV")
        self._plane.start()
        bus, tasks, me = self._bus, self._tasks, (self._store_id,)
        bus.identity |= {"id": self._store_id, "incarnation": self.core.incarnation}
        await bus.announce("keeps KV blocks that workers evict, and lends them")
        tasks.create_task(self._outbox.run(), name="outbox")
        await bus.serve(tasks, subjects.LEASE, me, self._on_lease)
        await bus.listen(tasks, subjects.RETURNED, me, self._on_returned)
        await bus.serve(tasks, subjects.INVENTORY, me, self._on_inventory)
        await bus.serve(tasks, subjects.PING, me, self._on_ping)
        await bus.serve(tasks, subjects.WORKER_STATUS, me, self._on_status)
        await bus.listen(tasks, subjects.LEFT, ("*",), self._on_left)
        await bus.listen(tasks, subjects.COOLING, ("*",), self._puller.offered)
        await bus.listen(tasks, subjects.REPLICATE, me, self._puller.replicated)
        await keep_traces(bus, tasks, self._telemetry)
        await bus.connection.flush()
        self._outbox.put(subjects.JOINED, me, WorkerJoined(worker=self._info()))
        self._clockwork.append(tasks.create_task(self._tick(), name="tick"))
        if self._backing is not None:
            self._clockwork.append(tasks.create_task(self._write_behind(self._backing), name="write behind"))

    async def close(self) -> None:
        """Leave in order: take nothing more, write what waits, let reads end, close plane and tier, say so. Each in
        bounded time."""
        me, incarnation = (self._store_id,), self.core.incarnation
        self.core.draining = True
        self._outbox.put(subjects.DRAINING, me, WorkerDraining(worker_id=self._store_id, incarnation=incarnation))
        await self._puller.close()
        await self._lender.close()
        await self._flush()
        await self._until_read()
        for task in self._clockwork:
            task.cancel()
        for lease in self.core.leases:
            self._end(lambda lease_id=lease.lease_id: self.core.end_lease(lease_id, "the store is stopping"))
        await asyncio.to_thread(self._plane.close)
        self._reader.close()
        if self._backing is not None:
            await asyncio.to_thread(self._backing.close)
        left = WorkerLeft(worker_id=self._store_id, incarnation=incarnation, reason=LeftReason.STOPPED)
        self._outbox.put(subjects.LEFT, me, left)
        self._outbox.close()
        with contextlib.suppress(TimeoutError):  # the bus may be away for good
            async with asyncio.timeout(LAST_WORDS_S):
                await self._outbox.sent.wait()
        await self._bus.close()

    # Lending.

    async def _on_lease(self, received: Received[RequestLease]) -> Message:
        request = received.message
        refused = self.core.check(request, now_ms())
        if refused is not None:
            self._measured.refused("lease", refused)
            return refused
        timeout_s = min(round(self._timeout_s * 1000), request.deadline_ms - now_ms()) / 1000
        blocks = await self._lender.collect(request.block_hashes, timeout_s)
        with self._gate.lock:
            lease = self.core.grant(request, blocks, now_ms())
            if isinstance(lease, Refused):
                self._measured.refused("lease", lease)
                return lease
            self._measured.leases.granted(lease.lease_id, num_blocks_of(lease))
            self._gate.add(lease, request, received.traceparent)
        ticket = Ticket(
            lease_id=lease.lease_id,
            epoch=lease.epoch,
            holder=lease.holder,
            reader=lease.reader,
            tenant=lease.tenant,
            expires_at_ms=lease.expires_at_ms,
        )
        return LeaseGranted(
            request_id=request.request_id,
            attempt=request.attempt,
            deadline_ms=request.deadline_ms,
            worker_id=self._store_id,
            lease_id=lease.lease_id,
            epoch=lease.epoch,
            lease_ms=self.core.open_within_ms,
            ticket=sign(self.parts.secret, ticket),
            endpoint=self._plane.endpoint,
            first_token=lease.first_token,
            num_tokens=lease.num_tokens,
        )

    def _started(self, lease_id: LeaseId) -> None:
        with self._gate.lock:
            self.core.started(lease_id, now_ms())
        self._measured.leases.reading(lease_id, is_read=True)

    def _served(self, lease_id: LeaseId, stats: TransferStats, error: str) -> None:
        for lent in self._end(lambda: self.core.end_lease(lease_id, error or "landed")):
            if not lent.traceparent:
                continue  # nobody's trace: a store that takes from us, say
            attributes = {
                Key.REQUEST_ID: lent.request.request_id,
                Key.ATTEMPT: lent.request.attempt,
                Key.LEASE: lease_id,
            }
            self._spans.served(lent.traceparent, stats, attributes, error)

    def _on_returned(self, received: Received[ReturnLease]) -> None:
        self._end(lambda: self.core.returned(received.message))

    def _on_left(self, received: Received[WorkerLeft]) -> None:
        event = received.message
        if event.worker_id != self._store_id:
            self._end(lambda: self.core.left(event))
        elif event.incarnation == self.core.incarnation and not self.core.draining:
            log.warning("%s was declared lost (%s), and joins anew", self._store_id, event.reason)
            self._end(lambda: self.core.begin(secrets.token_hex(8)))
            self._bus.identity["incarnation"] = self.core.incarnation
            self._outbox.put(subjects.JOINED, (self._store_id,), WorkerJoined(worker=self._info()))

    async def _on_ping(self, _: Received[PingWorker]) -> Message:
        return WorkerAlive(worker_id=self._store_id, incarnation=self.core.incarnation, lag_ms=0)

    async def _on_status(self, _: Received[DescribeWorker]) -> Message:
        return describe(self._load(), (), list(self.core.leases), now_ms())

    def _end(self, decide: Callable[[], list[Lease]]) -> list[Lent]:
        """End leases, and cut the streams that are still open on them."""
        with self._gate.lock:
            ended = decide()
            lent = [self._gate.remove(lease) for lease in ended]
        for lease, was in zip(ended, lent, strict=True):
            self._measured.leases.ended(lease.lease_id, lease.outcome)
            if was.traceparent:  # else nobody's trace: a store that takes from us, say
                num_blocks = sum(segment.num_blocks for segment in lease.tables[0].segments)
                self._spans.released(was.traceparent, was.granted_ns, lease.lease_id, num_blocks, lease.outcome)
        self._puller.room_made()
        if not len(self.core.leases):
            self._none_lent.set()
        return lent

    # What the others hear.

    def _changed(self) -> None:
        """Say what came and what went, and have written what waits for it."""
        for event in self.core.take_events():
            subject = subjects.STORED if isinstance(event, BlocksStored) else subjects.EVICTED
            self._outbox.put(subject, (self._store_id,), event)
        if self.core.num_unwritten:
            self._unwritten.set()
        self._puller.room_made()

    async def _on_inventory(self, received: Received[ReadInventory]) -> Message:
        self._changed()  # what a page has is in the events up to its number
        return self.core.inventory(received.message.offset)

    def _info(self) -> WorkerInfo:
        layout = self.core.layout
        return WorkerInfo(
            worker_id=self._store_id,
            incarnation=self.core.incarnation,
            role="store",
            model=self.parts.model,
            fingerprint=layout.fingerprint,
            num_blocks=self.core.memory.pool.num_blocks,
            block_size=layout.block_size,
            context_length=self.parts.context_length,
            carriers=self._plane.endpoint.carriers,
        )

    def _load(self) -> WorkerLoad:
        layout = self.core.layout
        return WorkerLoad(
            worker=self._info(),
            state="draining" if self.core.draining else "ready",
            blocks=self.core.block_counts(),
            num_running=len(self.core.leases),
            num_queued=0,
            num_uncomputed_tokens=0,
            num_dropped_messages=self._bus.num_dropped,
            num_refused_reads=self._plane.num_refused + self._plane.num_junk,
            rates=WorkerRates(kv_token_bytes=layout.block_bytes // layout.block_size),
        )

    # What goes by the clock, or by itself.

    async def _tick(self) -> None:
        """Say the load, and end what is over its time."""
        while True:
            self._end(lambda: self.core.expire(now_ms()))
            self._changed()
            self._outbox.put(subjects.LOAD, (self._store_id,), self._load())
            self._reader.release_ended()
            await asyncio.sleep(LOAD_INTERVAL_MS / 1000)

    async def _write_behind(self, backing: Backing) -> None:
        while True:
            await self._unwritten.wait()
            self._unwritten.clear()
            while (batch := self.core.start_write(backing.batch_blocks)) is not None:
                self._changed()  # what goes is said before it is gone
                written = await backing.write(batch)
                given_up = self.core.end_write(batch, written.hashes, full=written.full)
                if written.failed and not written.full:
                    self.core.drop_unwritten()
                self._changed()
                if given_up:
                    await backing.delete(given_up)
            self._all_written.set()

    async def _flush(self) -> None:
        """Wait, within bounds, until all is written that can be."""
        if self._backing is None or not self._backing.is_up or not self.core.num_unwritten:
            return
        self._all_written.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_TIMEOUT_S):
                await self._all_written.wait()

    async def _until_read(self) -> None:
        """Wait until nothing is on loan, at most as long as a worker may take to stop."""
        if len(self.core.leases):
            self._none_lent.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._drain_s):
                    await self._none_lent.wait()

    def _post(self, handle: Callable[..., None], *arguments: object) -> None:
        """From a plane's thread to the loop."""
        with contextlib.suppress(RuntimeError):  # the loop has ended, and with it every lease
            self._loop.call_soon_threadsafe(handle, *arguments)


def _server_options(config: MeshConfig) -> ServerOptions:
    settings = config.worker
    advertise_host = settings.advertise_host
    if not advertise_host and settings.plane_host == "0.0.0.0":
        advertise_host = socket.gethostname()  # nobody can connect to "everywhere"; containers resolve this name
    return ServerOptions(
        carriers=offered_carriers(settings.carrier, on_card=False),
        host=settings.plane_host,
        advertise_host=advertise_host,
        digests=settings.digests,
    )
