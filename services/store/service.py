"""Runs the store: a holder of KV as a worker is, without an engine."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import NamedTuple

from dataplane.blocks.kept import Content
from dataplane.ends.reader import Landed
from dataplane.lasting import lasting
from schemas import subjects
from schemas.block import split_hashes
from schemas.ids import BlockHash
from schemas.kv import BlocksPurged, LeaseGranted, PurgeBlocks, RequestLease
from schemas.message import Message
from schemas.observe import AttachedServer
from schemas.request import Refused
from schemas.worker import WorkerLoad, WorkerRates, WorkerState
from services.bus.base import Bus
from services.bus.typed import TypedBus
from services.config import MeshConfig
from services.holder.core.actions import Action, NotTaken, OwnersAction
from services.holder.core.copies import CopyCore
from services.holder.core.events import DrainBegun, Event, LeaseAsked, MemoryChanged, ReadEnded, Stopping, TimePassed
from services.holder.core.rules import Rules, RuleTable
from services.holder.holder import Holder
from services.holder.observe.transfers import TransferSpan
from services.holder.report import Reporter
from services.metrics import Metrics
from services.runtime import now_ms
from services.store.backing import Backing
from services.store.limits import MAX_COPY_READS
from services.store.load import StoreParts, load_store
from services.store.loader import Loader
from services.telemetry import Key, Telemetry

__all__ = ["load_store", "run_store"]

log = logging.getLogger(__name__)


class Guests(NamedTuple):
    """Others than holders of the mesh, who bring blocks and take them (`services/attach/door.py`): what is decided on
    what comes of them, who carries that out, how they are let in, once the store serves, and sent away, and what there
    is to say of them."""

    rules: RuleTable
    carry_out: Callable[[OwnersAction], None]
    let_in: Callable[[asyncio.TaskGroup], None]
    send_away: Callable[[], Awaitable[None]]
    describe: Callable[[], tuple[AttachedServer, ...]]


MakeGuests = Callable[["Store"], Guests]


async def run_store(
    config: MeshConfig,
    parts: StoreParts,
    connection: Bus,
    telemetry: Telemetry,
    stop: asyncio.Event,
    on_ready: Callable[[], None] | None = None,
    metrics: Metrics | None = None,
    make_guests: MakeGuests | None = None,
) -> None:
    """Serve until `stop` is set; then leave in order. Takes ownership of the parts. `make_guests`: where others
    than the mesh's holders have part in it."""
    try:
        async with asyncio.TaskGroup() as tasks:
            bus = TypedBus(connection, "store", metrics or Metrics(parts.worker_id))
            store = Store(config, parts, bus, telemetry, tasks, make_guests)
            await store.begin_serving()
            if on_ready is not None:
                on_ready()
            await stop.wait()
            await store.leave()
    finally:
        parts.arena.close()  # whatever ended us, the memory is given back
        if parts.tier is not None:
            parts.tier.close()


class Store:
    """A holder whose memory is filled from what workers give and from the tier behind it."""

    def __init__(
        self,
        config: MeshConfig,
        parts: StoreParts,
        bus: TypedBus,
        telemetry: Telemetry,
        tasks: asyncio.TaskGroup,
        make_guests: MakeGuests | None = None,
    ) -> None:
        memory, times, tick_ms = parts.memory, config.times.store, config.times.presence.beat_interval_ms
        self._config = config
        self.bus = bus
        self.holder = Holder(parts, memory, memory.limits, config, bus, telemetry, self, tick_ms=tick_ms)
        self.memory = memory
        self._tasks = tasks
        self._backing = Backing(parts.tier, parts.values, times.pause_s) if parts.tier else None
        self._copies = CopyCore(memory.limits, memory, lambda _: memory.num_spare, max_reads=MAX_COPY_READS)
        self._guests = make_guests(self) if make_guests is not None else None
        tables = [self._copies.rules(), self.holder.lending.rules()]
        tables += [self._guests.rules] if self._guests is not None else []
        self.rules = Rules(tables, [self._copies.start_reads])
        self.reporter = Reporter(
            identity=parts.info, blocks=self.holder.blocks, bus=bus, outbox=self.holder.outbox,
            times=config.times.presence, journal=self.holder.journal, load=self._load, requests=self._copies.held,
            servers=self._guests.describe if self._guests is not None else tuple,
        )  # fmt: skip
        self.loader = Loader(memory, self._backing, tasks, self._on_changed, times)
        self._behind = asyncio.Event()
        self._all_written = asyncio.Event()
        self._clockwork: list[asyncio.Task[None]] = []

    def _load(self, reporter: Reporter, _: int) -> WorkerLoad:
        """Return what there is to do: a store computes nothing, so what it lends is what runs."""
        layout, blocks = self.memory.layout, reporter.blocks
        return WorkerLoad(
            worker=reporter.info(),
            state=WorkerState.DRAINING if self._copies.draining else WorkerState.READY,
            blocks=blocks.counts(),
            num_running=len(blocks.leases),
            num_queued=0,
            num_uncomputed_tokens=0,
            num_dropped_messages=self.bus.num_dropped,
            num_refused_reads=reporter.num_refused_reads,
            rates=WorkerRates(kv_token_bytes=layout.block_bytes // layout.block_size),
            clock_ahead_ms=blocks.telemetry.clock.named_ms,
        )

    async def begin_serving(self) -> None:
        """Serve reads, listen, and announce it."""
        if self.memory.layout.is_windowed:
            log.warning("%s has windowed layers: the store takes none of its KV", self.holder.parts.info.model)
        tasks, holder = self._tasks, self.holder
        await holder.start_serving(tasks)
        await holder.try_ways()
        holder.start_reading(tasks, self._record)
        await self.bus.listen(tasks, subjects.EVICTION_CANDIDATES, ("*",), holder.on_event)
        await holder.subscribe_all(tasks)
        self.reporter.publish_joined()
        self._clockwork.append(tasks.create_task(lasting(self._tick, "the clockwork"), name="tick"))
        if self._backing is not None:
            writes = lasting(partial(self._write_behind, self._backing), "writing behind")
            self._clockwork.append(tasks.create_task(writes, name="write behind"))
        if self._guests is not None:
            self._guests.let_in(tasks)

    async def leave(self) -> None:
        """Leave in order: take nothing more and lend nothing more, as whoever asks can read or compute elsewhere; write
        what waits, serve the reads that have a lease, close the tier, and end. Each in bounded time."""
        self.holder.is_leaving = True
        if self._guests is not None:
            await self._guests.send_away()
        for last in (DrainBegun(), Stopping()):
            self.step(last, "stop")
        self.reporter.publish_draining()
        await self.holder.reads.close()
        await self._flush()
        await self.holder.blocks.until_unread(self._config.worker.drain_s)
        await self.loader.close()
        for task in self._clockwork:
            task.cancel()
        if self._backing is not None:
            await asyncio.to_thread(self._backing.close)
        await self.holder.depart()

    async def grant_lease(self, request: RequestLease, traceparent: str, cause: str) -> LeaseGranted | Refused:
        """Grant a lease on blocks that are in memory, or come there within `store.timeout_ms`; or refuse it."""
        if (refused := self.holder.unsigned(request) or self.holder.lending.refusal(request, now_ms())) is not None:
            return refused
        timeout_s = min(self._config.store.timeout_ms, request.deadline_ms - now_ms()) / 1000
        async with self.loader.held(request.block_hashes, request.tenant, timeout_s):
            reply = self.step(LeaseAsked(request, traceparent), cause)
        assert isinstance(reply, LeaseGranted | Refused), "it is answered by `LendCore`"
        return reply

    def is_in_flight(self, request: RequestLease, num_blocks: int) -> bool:
        """Return whether the block behind the first `num_blocks` of those asked for is being loaded."""
        rest = split_hashes(request.block_hashes)[num_blocks:]
        return bool(rest) and self.loader.is_in_flight(rest[0], request.tenant)

    async def purge(self, message: PurgeBlocks, cause: str) -> BlocksPurged:
        """Forget what is in memory and behind it. Where all is to go, so does what this store does not believe."""
        memory, tenant = self.memory, message.tenant
        num_before = len(memory.kept.block_of) + len(memory.back)
        self.step(message, cause)
        num_blocks = num_before - len(memory.kept.block_of) - len(memory.back)
        failure, forgotten = "", memory.take_forgotten()
        if self._backing is not None:
            failure = await self._backing.delete(None if tenant is None else forgotten)
        return BlocksPurged(worker_id=self.holder.parts.worker_id, num_blocks=num_blocks, failure=failure)

    def step(self, event: Event, cause: str) -> Message | None:
        """See `HolderOwner.step`."""
        self.memory.writes = self._backing is not None and self._backing.is_up
        self.holder.look_at_the_clock()
        return self.holder.decide(event, cause)

    def carried_out(self, event: Event, actions: Sequence[Action]) -> None:
        """Publish what came and what went, and have written, or deleted, what waits for it."""
        self.reporter.publish_blocks()
        if self.memory.is_behind:
            self._behind.set()

    def is_copying(self, hashes: Sequence[BlockHash], tenant: str) -> bool:
        """Return whether any of these blocks is being copied from another holder, or about to be."""
        return self._copies.is_copying(Content(tenant, each) for each in hashes)

    def fenced(self) -> None:
        """Nothing more is to be done: what was read is kept."""

    def carry_out(self, action: Action) -> None:
        """Log what could not be taken: nothing is computed here. What is decided on guests is theirs."""
        if isinstance(action, OwnersAction) and self._guests is not None:
            return self._guests.carry_out(action)
        assert isinstance(action, NotTaken), "nothing is computed here"
        return log.warning("%d blocks of %s were not taken: %s", action.num_blocks, action.worker_id, action.reason)

    def _on_changed(self) -> None:
        """Memory has changed beside: blocks came from behind it, or have been written there."""
        self.step(MemoryChanged(), "tier")

    def _record(self, ended: ReadEnded, span: TransferSpan, _: Landed | None) -> None:
        """Record a read of a worker's blocks."""
        num_blocks = ended.outcome.num_landed_tokens // self.memory.layout.block_size
        span.finished({Key.SOURCE: ended.read.holder, Key.NUM_BLOCKS: num_blocks}, ended.end, ended.detail)

    # What goes by the clock, or by itself.

    async def _tick(self) -> None:
        """Publish the load, and end what is over its time."""
        self.holder.beat()
        while True:
            self.step(TimePassed(), "clock")
            self.reporter.publish_load(now_ms())
            await asyncio.to_thread(self.holder.release_reads)
            await asyncio.sleep(self._config.times.presence.beat_interval_ms / 1000)
            self.holder.beat()

    async def _write_behind(self, backing: Backing) -> None:
        while True:
            await self._behind.wait()
            self._behind.clear()
            if forgotten := self.memory.take_forgotten():
                await backing.delete(forgotten)
            while (batch := self.memory.start_write(backing.batch_blocks)) is not None:
                self._on_changed()  # what goes is published before it is gone
                written = await backing.write_batch(batch)
                given_up = self.memory.end_write(batch, written.keys, full=written.full)
                if written.failed and not written.full:
                    self.memory.drop_unwritten()
                self._on_changed()
                if given_up:
                    await backing.delete(given_up)
            self._all_written.set()

    async def _flush(self) -> None:
        """Wait, within bounds, until all is written that can be."""
        if self._backing is None or not self._backing.is_up or not self.memory.is_behind:
            return
        self._all_written.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._config.times.store.flush_timeout_s):
                await self._all_written.wait()
