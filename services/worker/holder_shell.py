"""The shell of a holder of KV, a worker's or a store's: serves reads, grants leases, says what it holds and that it
lives, and brings what happens to whoever decides.

Cores run on the event loop only. The threads of plane and engine post what they have to say to the loop.
"""

import asyncio
import contextlib
import logging
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic

import msgspec

from dataplane.blocks.layout import ArenaShape
from dataplane.carriers.carrier import KVArena
from dataplane.memory.codec import WireDtype
from schemas import subjects
from schemas.directory import Inventory, ReadInventory
from schemas.ids import WorkerId
from schemas.kv import BlocksPurged, LeaseGranted, PurgeBlocks, ReplicateBlocks, RequestLease
from schemas.message import Message
from schemas.observe import DescribeWorker, WorkerDescribed
from schemas.request import Refused, RunAttempt
from schemas.worker import PingWorker, WorkerAlive, WorkerInfo, WorkerLeft, WorkerRole
from services.bus.typed import Received, TypedBus
from services.config import MeshConfig
from services.keep import keep_traces
from services.presence import Heartbeat
from services.runtime import now_ms
from services.telemetry import Telemetry
from services.trust.credentials import HolderCredentials
from services.worker.core.actions import Action, CloseLease, Lend, SendReply, StartRead, StopRead
from services.worker.core.checks import HolderLimits
from services.worker.core.events import CopyOffered, Event, Fenced, Stopping, StreamEnded, StreamStarted
from services.worker.core.leases import LeaseTable
from services.worker.core.lending import LendCore
from services.worker.core.rules import Rules
from services.worker.kv.holder import KVHolder, MemoryT
from services.worker.kv.peers import Peers
from services.worker.kv.reads import KVReads, ReaderSettings
from services.worker.limits import READ_BYTES_PER_S_MIN
from services.worker.observe.metrics import HolderMetrics
from services.worker.observe.observer import HolderObserver
from services.worker.observe.transfers import FinishedRead
from services.worker.outbox import Outbox
from services.worker.platform import THREADS, Platform
from services.worker.report import Reporter

log = logging.getLogger(__name__)

DESCRIPTIONS: dict[WorkerRole, str] = {
    "prefill": "computes prompts, and lends their KV",
    "decode": "reads KV and decodes answers; may serve a request alone",
    "aggregated": "computes prompts and decodes their answers",
    "store": "keeps KV blocks that workers evict, and lends them",
}


@dataclass(frozen=True, kw_only=True)
class HolderParts(ABC):
    """A holder's memory, and what it says of itself."""

    worker_id: WorkerId
    incarnation: str
    model: str
    arena: KVArena
    shape: ArenaShape
    credentials: HolderCredentials
    platform: Platform = THREADS

    @abstractmethod
    def info(self) -> WorkerInfo:
        """Return who this is, as far as that is known before it serves."""


class HolderShell(ABC, Generic[MemoryT]):
    """One holder's. `step` is the only way in for whatever may change a lease or an attempt. Who builds on it makes
    `rules`, `observer` and `reporter`."""

    _rules: Rules
    observer: HolderObserver
    reporter: Reporter
    measured: HolderMetrics

    def __init__(
        self,
        parts: HolderParts,
        memory: MemoryT,
        limits: HolderLimits,
        config: MeshConfig,
        bus: TypedBus,
        telemetry: Telemetry,
        *,
        tick_ms: int,
    ) -> None:
        self._parts = parts
        self._config = config
        self._times = config.times.worker
        self._bus = bus
        self._telemetry = telemetry
        self._outbox = Outbox(bus, parts.worker_id)
        leases = LeaseTable()
        self._holder = KVHolder[MemoryT](
            worker_id=parts.worker_id,
            incarnation=parts.incarnation,
            arena=parts.arena,
            shape=parts.shape,
            memory=memory,
            credentials=parts.credentials,
            make_server=parts.platform.make_server,
            on_started=lambda lease: self._post(self.step, StreamStarted(lease), "plane"),
            on_served=lambda lease, stats, error: self._post(self.step, StreamEnded(lease, error, stats), "plane"),
            telemetry=telemetry,
            leases=leases,
        )
        self._lending = LendCore(limits, memory, leases)
        self._reader = parts.platform.make_reader(
            parts.arena, parts.shape, parts.credentials.secrets, config.times.plane
        )
        self.peers = Peers(bus, self._times)
        self._heartbeat = Heartbeat(tick_ms / 1000, config.worker.fence_after_ms / 1000)
        self._reads: KVReads
        self._loop: asyncio.AbstractEventLoop
        self._is_leaving = False

    # From the start to the end.

    async def start_serving(self, tasks: asyncio.TaskGroup) -> None:
        """Serve reads, be listed as a service, and send what is decided."""
        info = self._parts.info()
        self._loop = asyncio.get_running_loop()
        self._holder.serve_reads(self._config.worker, self._config.times.plane)
        self._bus.identity |= {"id": info.worker_id, "incarnation": self._holder.incarnation}
        self._bus.identity |= {"device": info.device} if info.device else {}
        await self._bus.announce(DESCRIPTIONS[info.role])
        tasks.create_task(self._outbox.run(), name="outbox")

    async def subscribe_all(self, tasks: asyncio.TaskGroup) -> None:
        """Hear what every holder is asked. Return once all subscriptions are there."""
        bus, me = self._bus, (self._parts.worker_id,)
        await bus.listen(tasks, subjects.LEFT, ("*",), self._on_left)
        await self.peers.listen(tasks)
        await bus.serve(tasks, subjects.INVENTORY, me, self._on_inventory)
        await bus.serve(tasks, subjects.LEASE, (*me, "*"), self._on_lease)
        await bus.listen(tasks, subjects.RETURNED, (*me, "*"), self.on_event)
        await bus.listen(tasks, subjects.REPLICATE, (*me, "*"), self._on_copy_offered)
        await bus.serve(tasks, subjects.PING, me, self._on_ping)
        await bus.serve(tasks, subjects.WORKER_STATUS, me, self._on_status)
        await bus.serve(tasks, subjects.PURGE, me, self._on_purge)
        await keep_traces(bus, tasks, self._telemetry)
        await bus.connection.flush()

    def make_reads(
        self,
        tasks: asyncio.TaskGroup,
        record: Callable[[FinishedRead], None],
        wire_dtype: Callable[[WorkerId], WireDtype] = lambda _: "same",
    ) -> KVReads:
        """Return what reads for this holder."""
        layout = self._parts.shape.layout
        settings = ReaderSettings(
            reader_id=self._parts.worker_id,
            fingerprint=layout.fingerprint,
            block_size=layout.block_size,
            carrier=self._config.worker.carrier,
            base_s=self._times.read_base_s,
            times=self._times,
            token_s=layout.block_bytes / layout.block_size / READ_BYTES_PER_S_MIN,
        )
        return KVReads(
            settings=settings,
            bus=self._bus,
            outbox=self._outbox,
            reader=self._reader,
            peers=self.peers,
            credentials=self._parts.credentials,
            telemetry=self._telemetry,
            tasks=tasks,
            record=record,
            contents=self._holder.contents,
            kept=self._holder.memory.kept,
            on_event=lambda event: self.step(event, "read"),
            wire_dtype=wire_dtype,
        )

    async def depart(self) -> None:
        """End what is lent, say that this holder leaves, close the plane, send what is left. All reads have ended."""
        for last in (Stopping(), Fenced(f"{self._parts.worker_id} is stopping")):
            self._decide(last, "stop")
        self.reporter.publish_left()
        self._outbox.close()
        await asyncio.to_thread(self._reader.close)
        await asyncio.to_thread(self._holder.close)
        with contextlib.suppress(TimeoutError):  # the bus may be away for good
            async with asyncio.timeout(self._times.last_words_s):
                await self._outbox.sent.wait()
        await self._bus.close()

    def close_memory(self) -> None:
        """Give the memory back, whatever ended the holder."""
        self._holder.close()

    # Deciding.

    def step(self, event: Event, cause: str) -> Message | None:
        """The only door: whatever happens comes in here. Let the cores decide, and carry out what they say. Return the
        reply to an event that is a question. `cause`: the subject of the message, or the part of this process that the
        event is of."""
        self.look_at_the_clock()
        return self._decide(event, cause)

    def look_at_the_clock(self) -> None:
        """Before anything is done: a holder that stood still must not go on as if nothing had happened."""
        if self._heartbeat.stood_still(time.monotonic()):
            self._fence("it stood still")

    def beat(self) -> None:
        """The clock has ticked."""
        self._heartbeat.beat(time.monotonic())

    def release_reads(self) -> None:
        """Let go of what reads that have ended had open. Blocks: a driver takes its time to unmap."""
        self._reader.release_ended()

    def unproved(self, request: RunAttempt | RequestLease) -> Refused | None:
        """Return the refusal of a request of which nobody has proved whose it is, or None."""
        return self._parts.credentials.refusal(request, self._parts.worker_id)

    @abstractmethod
    async def grant_lease(self, request: RequestLease, traceparent: str, cause: str) -> LeaseGranted | Refused:
        """Grant a lease on blocks that are here or come soon, or refuse it."""

    @abstractmethod
    async def purge(self, message: PurgeBlocks, cause: str) -> BlocksPurged:
        """Forget what the blocks hold, and let the directory know."""

    @abstractmethod
    def _is_coming(self, request: RequestLease, num_blocks: int) -> bool:
        """Say whether the block behind the first `num_blocks` of those asked for will soon be here."""

    @abstractmethod
    def _carry_out(self, action: Action) -> None:
        """Do what is decided of more than leases."""

    def _decide(self, event: Event, cause: str) -> Message | None:
        with self.observer.journal.explains():
            with self._holder.lock:
                actions = self._rules.decide(event, now_ms())
            reply = self._execute(actions)
            self.observer.saw(cause, event, actions)
        return reply

    def _execute(self, actions: Sequence[Action]) -> Message | None:
        """Carry out actions in order. Return the reply among them."""
        reply: Message | None = None
        for action in actions:
            match action:
                case SendReply(message=reply):
                    pass
                case Lend(lease=lease, request=request):
                    granted = self._holder.sign_lease(lease, request, action.traceparent)
                    num_blocks = lease.num_tokens // self._parts.shape.layout.block_size - request.first_block
                    reply = msgspec.structs.replace(granted, more_comes=self._is_coming(request, num_blocks))
                case CloseLease(lease=lease):
                    self._holder.close_lease(lease)
                case StartRead(read=read):
                    self._reads.begin_read(read)
                case StopRead(read=read):
                    self._reads.end_reads(read)
                case _:
                    self._carry_out(action)
        return reply

    def _fence(self, reason: str) -> None:
        """Abort all that runs and rejoin under a new incarnation, because peers take this holder for dead."""
        if self._is_leaving:
            return
        log.warning("%s ends all that it does, and joins anew: %s", self._parts.worker_id, reason)
        self._decide(Fenced(reason), "presence")
        self.measured.fenced()
        self._holder.renew(secrets.token_hex(8))
        self._bus.identity["incarnation"] = self._holder.incarnation
        self.reporter.publish_joined()

    # What others say and ask.

    def on_event(self, received: Received[Any]) -> None:
        """A message that is an event as it is."""
        self.step(received.message, received.subject)

    def _on_copy_offered(self, received: Received[ReplicateBlocks]) -> None:
        self.step(CopyOffered(received.message, received.traceparent), received.subject)

    def _on_left(self, received: Received[WorkerLeft]) -> None:
        """Somebody has left; or this holder is said to have."""
        event = received.message
        self.peers.left(event)
        if event.worker_id != self._parts.worker_id:
            self.step(event, received.subject)
        elif event.incarnation == self._holder.incarnation:
            self._fence(f"it was declared lost: {event.reason}")

    async def _on_lease(self, received: Received[RequestLease]) -> LeaseGranted | Refused:
        reply = await self.grant_lease(received.message, received.traceparent, received.subject)
        self.measured.refused("lease", reply)
        return reply

    async def _on_purge(self, received: Received[PurgeBlocks]) -> BlocksPurged:
        return await self.purge(received.message, received.subject)

    async def _on_inventory(self, received: Received[ReadInventory]) -> Inventory:
        return self.reporter.inventory(received.message.offset)

    async def _on_status(self, _: Received[DescribeWorker]) -> WorkerDescribed:
        return self.reporter.describe(now_ms())

    async def _on_ping(self, _: Received[PingWorker]) -> WorkerAlive:
        """Give a sign of life."""
        self.look_at_the_clock()
        lag_ms = self._heartbeat.lag_ms(time.monotonic())
        return WorkerAlive(worker_id=self._parts.worker_id, incarnation=self._holder.incarnation, lag_ms=lag_ms)

    # What happens on other threads, brought to the loop.

    def _post(self, handle: Callable[..., object], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended, and with it all that runs here
            self._loop.call_soon_threadsafe(self._posted, handle, *arguments)

    def _posted(self, handle: Callable[..., object], *arguments: object) -> None:
        with self.observer.journal.explains():
            handle(*arguments)
