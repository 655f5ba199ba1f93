"""A holder of KV, as a worker and a store have one: serves reads, grants leases, reports what it holds and that it
lives, and brings what happens to whoever decides.

Cores run on the event loop only. The threads of plane and engine post what they have to report to the loop.
"""

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol

import msgspec

from dataplane.ends.reader import Landed
from dataplane.memory.codec import WireDtype
from schemas import subjects
from schemas.directory import Inventory, ReadInventory
from schemas.ids import WorkerId
from schemas.kv import BlocksPurged, LeaseGranted, PurgeBlocks, ReplicateBlocks, RequestLease
from schemas.message import Message
from schemas.observe import DescribeWorker, WorkerDescribed
from schemas.request import Refused, RunAttempt
from schemas.worker import PingWorker, WorkerAlive, WorkerLeft, WorkerRole
from services.bus.typed import Received, TypedBus
from services.config import MeshConfig
from services.errors import UserError
from services.holder.core.actions import Action, CloseLease, Lend, SendReply, StartRead, StopRead
from services.holder.core.checks import HolderLimits
from services.holder.core.events import CopyOffered, Event, Fenced, ReadEnded, Stopping, StreamEnded, StreamStarted
from services.holder.core.leases import LeaseTable
from services.holder.core.lending import LendCore
from services.holder.core.rules import Rules
from services.holder.kv.blocks import LentBlocks, MemoryT
from services.holder.kv.peers import Peers
from services.holder.kv.reads import KVReads, ReaderSettings
from services.holder.kv.ways import Ways
from services.holder.limits import READ_BYTES_PER_S_MIN
from services.holder.observe.metrics import HolderMetrics
from services.holder.observe.observer import HolderObserver
from services.holder.observe.transfers import TransferSpan
from services.holder.outbox import Outbox
from services.holder.parts import HolderParts
from services.holder.report import Reporter
from services.keep import keep_traces
from services.presence import Heartbeat
from services.runtime import now_ms
from services.telemetry import Telemetry

log = logging.getLogger(__name__)

DESCRIPTIONS: dict[WorkerRole, str] = {
    WorkerRole.PREFILL: "computes prompts, and lends their KV",
    WorkerRole.DECODE: "reads KV and decodes answers; may serve a request alone",
    WorkerRole.AGGREGATED: "computes prompts and decodes their answers",
    WorkerRole.STORE: "keeps KV blocks that workers evict, and lends them",
}


class HolderOwner(Protocol):
    """The worker or the store that a holder belongs to."""

    @property
    def rules(self) -> Rules:
        """What is decided on each event."""
        ...

    @property
    def reporter(self) -> Reporter: ...

    def step(self, event: Event, cause: str) -> Message | None:
        """Let the cores decide on what has happened, and carry out their actions. Return the reply to an event that is
        a question. `cause`: the subject of the message, or the part of this process that the event is of."""
        ...

    def carry_out(self, action: Action) -> None:
        """Do what is decided of more than leases and reads."""
        ...

    def carried_out(self, event: Event, actions: Sequence[Action]) -> None:
        """All that was decided on an event is done."""
        ...

    async def grant_lease(self, request: RequestLease, traceparent: str, cause: str) -> LeaseGranted | Refused:
        """Grant a lease on blocks that are here or come soon, or refuse it."""
        ...

    async def purge(self, message: PurgeBlocks, cause: str) -> BlocksPurged:
        """Forget what the blocks hold, and let the directory know."""
        ...

    def is_in_flight(self, request: RequestLease, num_blocks: int) -> bool:
        """Return whether the block behind the first `num_blocks` of those asked for will soon be here."""
        ...

    def fenced(self) -> None:
        """All has ended, and this holder has joined anew."""
        ...


class Holder(Generic[MemoryT]):
    """One worker's or store's. What it receives comes to its owner's `step`."""

    def __init__(
        self,
        parts: HolderParts,
        memory: MemoryT,
        limits: HolderLimits,
        config: MeshConfig,
        bus: TypedBus,
        telemetry: Telemetry,
        owner: HolderOwner,
        *,
        tick_ms: int,
    ) -> None:
        self.parts = parts
        self._owner = owner
        self._config = config
        self._times = config.times.worker
        self._bus = bus
        self._telemetry = telemetry
        self.outbox = Outbox(bus, parts.worker_id)
        # Plane and lending core share the leases. The plane calls back on its threads: `post` brings this to the loop.
        leases = LeaseTable()
        self.blocks = LentBlocks[MemoryT](
            worker_id=parts.worker_id,
            incarnation=parts.info.incarnation,
            arena=parts.arena,
            shape=parts.shape,
            memory=memory,
            credentials=parts.credentials,
            make_server=parts.platform.make_server,
            on_started=lambda lease: self.post(owner.step, StreamStarted(lease), "plane"),
            on_served=lambda lease, stats, error: self.post(owner.step, StreamEnded(lease, error, stats), "plane"),
            telemetry=telemetry,
            leases=leases,
        )
        self.lending = LendCore(limits, memory, leases)
        # The load is asked for only as metrics are sampled: the owner makes its reporter after this holder.
        block_bytes = parts.shape.layout.block_bytes
        self.measured = HolderMetrics(bus.metrics, lambda: owner.reporter.current_load(now_ms()), leases, block_bytes)
        self._observer = HolderObserver(telemetry, parts.worker_id, self.measured)
        self.journal = self._observer.journal
        self._reader = parts.platform.make_reader(
            parts.arena, parts.shape, parts.credentials.secrets, config.times.plane
        )
        self.peers = Peers(bus, self._times)
        self._ways = Ways(parts.worker_id, bus, parts.credentials.secrets, config.times, config.worker.plane_ports)
        self._heartbeat = Heartbeat(tick_ms / 1000, config.worker.fence_after_ms / 1000)
        # `start_reading` and `start_serving` set these two: they need a running event loop and its task group.
        self.reads: KVReads
        self._loop: asyncio.AbstractEventLoop
        self.is_leaving = False

    # From the start to the end.

    async def start_serving(self, tasks: asyncio.TaskGroup) -> None:
        """Serve reads, be listed as a service, and send what is decided."""
        info = self.parts.info
        self._loop = asyncio.get_running_loop()
        self.blocks.serve_reads(self._config.worker, self._config.times.plane)
        self._bus.identity |= {"id": info.worker_id, "incarnation": self.blocks.incarnation}
        self._bus.identity |= {"device": info.device} if info.device else {}
        await self._bus.announce(DESCRIPTIONS[info.role])
        tasks.create_task(self.outbox.run(), name="outbox")

    async def try_ways(self) -> None:
        """Try the ways to other machines. Raises UserError where one is closed, and the setting says so."""
        assert self.blocks.plane is not None, "who does not serve cannot be reached"
        if self._config.worker.ways == "off":
            return
        problems = await self._ways.problems(self.blocks.plane.endpoint)
        if problems and self._config.worker.ways == "require":
            others = f" (and {len(problems) - 1} more like it)" if len(problems) > 1 else ""
            raise UserError(f"{problems[0]}{others}")
        for problem in problems:
            log.warning("%s", problem)

    async def subscribe_all(self, tasks: asyncio.TaskGroup) -> None:
        """Listen to what every holder is asked. Return once all subscriptions are there."""
        bus, me = self._bus, (self.parts.worker_id,)
        await bus.listen(tasks, subjects.LEFT, ("*",), self._on_left)
        await self.peers.listen(tasks)
        await bus.serve(tasks, subjects.INVENTORY, me, self._on_inventory)
        await bus.serve(tasks, subjects.LEASE, (*me, "*"), self._on_lease)
        await bus.listen(tasks, subjects.RETURNED, (*me, "*"), self.on_event)
        await bus.listen(tasks, subjects.REPLICATE, (*me, "*"), self._on_copy_offered)
        await bus.serve(tasks, subjects.PING, me, self._on_ping)
        await bus.serve(tasks, subjects.WAY, (*me, "*"), self._ways.on_try)
        await bus.serve(tasks, subjects.WORKER_STATUS, me, self._on_status)
        await bus.serve(tasks, subjects.PURGE, me, self._on_purge)
        await keep_traces(bus, tasks, self._telemetry)
        await bus.connection.flush()

    def start_reading(
        self,
        tasks: asyncio.TaskGroup,
        record: Callable[[ReadEnded, TransferSpan, Landed | None], None],
        wire_dtype: Callable[[WorkerId], WireDtype] = lambda _: "same",
    ) -> None:
        """Make what reads for this holder: tasks of `tasks`. `record` is called for each read that has ended."""
        # A read may take `base_s` and its bytes at the lowest accepted rate: beyond that, computing is quicker.
        layout = self.parts.shape.layout
        settings = ReaderSettings(
            reader_id=self.parts.worker_id,
            block_size=layout.block_size,
            carrier=self._config.worker.carrier,
            base_s=self._times.read_base_s,
            times=self._times,
            token_s=layout.block_bytes / layout.block_size / READ_BYTES_PER_S_MIN,
        )
        # The end of a read goes to `record` first, then as an event to the cores.
        self.reads = KVReads(
            settings=settings,
            bus=self._bus,
            outbox=self.outbox,
            reader=self._reader,
            peers=self.peers,
            credentials=self.parts.credentials,
            telemetry=self._telemetry,
            tasks=tasks,
            record=record,
            contents=self.blocks.contents,
            kept=self.blocks.memory.kept,
            on_event=lambda event: self._owner.step(event, "read"),
            wire_dtype=wire_dtype,
        )

    async def depart(self) -> None:
        """End what is lent, publish that this holder leaves, close the plane, send the rest. All reads have ended."""
        for last in (Stopping(), Fenced(f"{self.parts.worker_id} is stopping")):
            self.decide(last, "stop")
        self._owner.reporter.publish_left()
        self.outbox.close()
        await asyncio.to_thread(self._reader.close)
        await asyncio.to_thread(self.blocks.close)
        with contextlib.suppress(TimeoutError):  # the bus may be away for good
            async with asyncio.timeout(self._times.last_words_s):
                await self.outbox.sent.wait()
        await self._bus.close()

    def close_memory(self) -> None:
        """Give the memory back, whatever ended the holder."""
        self.blocks.close()

    # Deciding.

    def look_at_the_clock(self) -> None:
        """Before anything is done: a holder that stood still must not go on as if nothing had happened."""
        if self._heartbeat.stood_still(time.monotonic()):
            self._fence("it stood still")

    def beat(self) -> None:
        """The clock has ticked."""
        self._heartbeat.beat(time.monotonic())

    @property
    def is_stuck(self) -> bool:
        """A read does not come to an end, and may still write."""
        return self._reader.is_stuck

    def release_reads(self) -> None:
        """Let go of what reads that have ended had open. Blocks: a driver takes its time to unmap."""
        self._reader.release_ended()

    def unsigned(self, request: RunAttempt | RequestLease) -> Refused | None:
        """Return the refusal of a request that carries no valid signature, or None."""
        return self.parts.credentials.refusal(request, self.parts.worker_id)

    def decide(self, event: Event, cause: str) -> Message | None:
        """Ask the owner's rules what an event makes necessary, and carry it out in order. Return the reply, if any."""
        with self.journal.explains():
            with self.blocks.lock:
                actions = self._owner.rules.decide(event, now_ms())
            reply = self._execute(actions)
            self._owner.carried_out(event, actions)
            self._observer.saw(cause, event, actions)
        return reply

    def _execute(self, actions: Sequence[Action]) -> Message | None:
        """Carry out actions in order. Return the reply among them."""
        reply: Message | None = None
        for action in actions:
            match action:
                case SendReply(message=reply):
                    pass
                case Lend(lease=lease, request=request):
                    granted = self.blocks.sign_lease(lease, request, action.traceparent)
                    num_blocks = lease.num_tokens // self.parts.shape.layout.block_size - request.first_block
                    reply = msgspec.structs.replace(granted, has_more=self._owner.is_in_flight(request, num_blocks))
                case CloseLease(lease=lease):
                    self.blocks.close_lease(lease)
                case StartRead(read=read):
                    self.reads.begin_read(read)
                case StopRead(read=read):
                    self.reads.end_reads(read)
                case _:
                    self._owner.carry_out(action)
        return reply

    def _fence(self, reason: str) -> None:
        """Abort all that runs and rejoin under a new incarnation, because peers take this holder for dead."""
        if self.is_leaving:
            return
        log.warning("%s ends all that it does, and joins anew: %s", self.parts.worker_id, reason)
        self.decide(Fenced(reason), "presence")
        self.measured.fenced()
        self.blocks.renew(secrets.token_hex(8))
        self._bus.identity["incarnation"] = self.blocks.incarnation
        self._owner.reporter.publish_joined()
        self._owner.fenced()

    # What others send and ask.

    def on_event(self, received: Received[Any]) -> None:
        """A message that is an event as it is."""
        self._owner.step(received.message, received.subject)

    def _on_copy_offered(self, received: Received[ReplicateBlocks]) -> None:
        self._owner.step(CopyOffered(received.message, received.traceparent), received.subject)

    def _on_left(self, received: Received[WorkerLeft]) -> None:
        """Somebody has left; or this holder is reported to have."""
        event = received.message
        self.peers.left(event)
        if event.worker_id != self.parts.worker_id:
            self._owner.step(event, received.subject)
        elif event.incarnation == self.blocks.incarnation:
            self._fence(f"it was declared lost: {event.reason}")

    async def _on_lease(self, received: Received[RequestLease]) -> LeaseGranted | Refused:
        reply = await self._owner.grant_lease(received.message, received.traceparent, received.subject)
        self.measured.refused("lease", reply)
        return reply

    async def _on_purge(self, received: Received[PurgeBlocks]) -> BlocksPurged:
        return await self._owner.purge(received.message, received.subject)

    async def _on_inventory(self, received: Received[ReadInventory]) -> Inventory:
        return self._owner.reporter.inventory(received.message.offset)

    async def _on_status(self, _: Received[DescribeWorker]) -> WorkerDescribed:
        return self._owner.reporter.describe(now_ms())

    async def _on_ping(self, _: Received[PingWorker]) -> WorkerAlive:
        """Give a sign of life."""
        self.look_at_the_clock()
        lag_ms = self._heartbeat.lag_ms(time.monotonic())
        return WorkerAlive(worker_id=self.parts.worker_id, incarnation=self.blocks.incarnation, lag_ms=lag_ms)

    # What happens on other threads, brought to the loop.

    def post(self, handle: Callable[..., object], *arguments: object) -> None:
        """Call this on the event loop; from any thread."""
        with contextlib.suppress(RuntimeError):  # the loop has ended, and with it all that runs here
            self._loop.call_soon_threadsafe(self._posted, handle, *arguments)

    def _posted(self, handle: Callable[..., object], *arguments: object) -> None:
        with self.journal.explains():
            handle(*arguments)
