"""Reads what workers are about to evict, or want kept elsewhere as well: chooses what to read, and files what has
arrived. A worker never waits for it."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from dataplane.blocks.kept import Content
from dataplane.blocks.layout import BlockTable, BlockTables, segments_of
from dataplane.ends.reader import PlaneReader
from dataplane.memory.content_tags import BlockContents
from schemas.ids import RequestId, WorkerId, new_id
from schemas.kv import BlocksCooling, LeaseGranted, ReadEnd, ReplicateBlocks
from schemas.request import RefusalReason
from services.bus.typed import Received, TypedBus
from services.runtime import now_ms
from services.store.backing import Backing, Complaints
from services.store.core import BlocksGone, Event, NotTaken, PullEnded, StartPull, StoreCore
from services.store.limits import (
    MAX_OFFERS_HEARD,
    MAX_PULL_BLOCKS,
    MAX_PULLS,
    MAX_REFUSALS,
)
from services.telemetry import Key, Telemetry
from services.times import StoreTimes
from services.trust.credentials import HolderCredentials
from services.worker.core.attempts import KVRead, WantedLease
from services.worker.core.events import ReadEnded
from services.worker.kv.peers import Peers
from services.worker.kv.reads import KVReads, NoRoomError, ReaderSettings
from services.worker.observe.transfers import FinishedRead
from services.worker.outbox import Outbox


class PullFailedError(Exception):
    """No more can be taken of this worker now: there is no room, or it does not answer, or a read broke."""


class Pulled(NamedTuple):
    """How one read ended. `had_no_room`: what was granted had no place here any more."""

    ended: ReadEnded
    had_no_room: bool


@dataclass
class Puller:
    """`carrier`: which one is asked for, or "auto". `changed` is called after blocks came; whoever makes room calls
    `room_made`."""

    core: StoreCore
    backing: Backing | None
    bus: TypedBus
    outbox: Outbox
    reader: PlaneReader
    carrier: str
    tasks: asyncio.TaskGroup
    changed: Callable[[], None]
    complaints: Complaints
    telemetry: Telemetry
    peers: Peers
    contents: BlockContents | None
    credentials: HolderCredentials
    times: StoreTimes

    def __post_init__(self) -> None:
        settings = ReaderSettings(
            reader_id=self.core.memory.limits.worker_id,
            fingerprint=self.core.memory.layout.fingerprint,
            block_size=self.core.memory.layout.block_size,
            carrier=self.carrier,
            base_s=self.times.read_timeout_s,
            times=self.core.memory.limits.times.worker,
        )
        self._reads = KVReads(
            settings=settings,
            bus=self.bus,
            outbox=self.outbox,
            reader=self.reader,
            peers=self.peers,
            credentials=self.credentials,
            telemetry=self.telemetry,
            tasks=self.tasks,
            record=self._record,
            contents=self.contents,
            kept=self.core.memory.kept,
        )
        self._pulls: set[asyncio.Task[None]] = set()
        self._offers: set[asyncio.Task[None]] = set()
        self._is_closed = False
        self._slots = asyncio.Semaphore(MAX_PULLS)
        self._room = asyncio.Event()
        self._traces: dict[WorkerId, str] = {}
        """The trace of the request that last wanted blocks of a worker kept: the next read belongs to it."""

    def offered(self, received: Received[BlocksCooling]) -> None:
        """A worker says what it will evict soon."""
        self._take_offer(received.message, received.message.worker_id, received.message.incarnation)

    def replicated(self, received: Received[ReplicateBlocks]) -> None:
        """A worker says what it has completed, and wants kept elsewhere as well."""
        self._take_offer(received.message, received.message.source, traceparent=received.traceparent)

    def room_made(self) -> None:
        self._room.set()

    async def close(self) -> None:
        """End all reads: nothing is written into the arena after it, and none begins."""
        self._is_closed = True
        pulls = [*self._pulls, *self._offers]
        for pull in pulls:
            pull.cancel()
        if pulls:
            await asyncio.wait(pulls)

    def _take_offer(
        self, offer: BlocksCooling | ReplicateBlocks, worker_id: WorkerId, incarnation: str = "", traceparent: str = ""
    ) -> None:
        """Let the core hear of an offer once it is known that there is such a worker. Offers keep their order."""
        if self._is_closed or len(self._offers) >= MAX_OFFERS_HEARD:
            self.core.num_not_taken += 1
            return
        hearing = self._hear_offer(offer, worker_id, incarnation, traceparent)
        task = self.tasks.create_task(hearing, name=f"an offer of {worker_id[:64]}")
        self._offers.add(task)
        task.add_done_callback(self._offers.discard)

    async def _hear_offer(
        self, offer: BlocksCooling | ReplicateBlocks, worker_id: WorkerId, incarnation: str, traceparent: str
    ) -> None:
        if not await self.peers.is_known(worker_id, incarnation):
            self.core.num_not_taken += 1
            self.complaints.say("stranger", f"an offer of blocks by {worker_id[:64]!r}, whom nobody knows, was dropped")
            return
        if traceparent:
            self._traces[worker_id] = traceparent
        self._handle(offer)

    def _handle(self, event: Event, reason: str = "") -> None:
        """Let the core react to what has happened, and carry out what it says. `reason`: why a pull ended early."""
        for action in self.core.handle(event, now_ms()):
            match action:
                case StartPull(worker_id=worker_id):
                    if self._is_closed:
                        continue
                    pull = self.tasks.create_task(self._pull(worker_id), name=f"pull {worker_id}")
                    self._pulls.add(pull)
                    pull.add_done_callback(self._pulls.discard)
                case NotTaken(worker_id=worker_id, num_blocks=num_blocks):
                    if reason:
                        text = f"{num_blocks} blocks of {worker_id} were not taken: {reason}"
                        self.complaints.say("pull", text)

    async def _pull(self, worker_id: WorkerId) -> None:
        reason = ""
        try:
            async with self._slots:
                await self._pull_all(worker_id)
        except PullFailedError as error:
            reason = str(error)
        except asyncio.CancelledError:
            self._is_closed = True  # the others are being ended as well
            raise
        finally:
            self._traces.pop(worker_id, None)
            self._handle(PullEnded(worker_id), reason)

    async def _pull_all(self, worker_id: WorkerId) -> None:
        """Take what the worker has offered, and what it offers meanwhile."""
        num_refused = 0
        while num_refused <= MAX_REFUSALS:
            room = await self._wait_for_room()
            batch = self.core.next_pull(worker_id, min(room, MAX_PULL_BLOCKS))
            if not batch:
                return
            pulled = await self._read(worker_id, batch)
            if pulled.ended.end is ReadEnd.LANDED:
                num_refused = 0
            elif pulled.had_no_room:
                num_refused += 1
            elif pulled.ended.refusal is RefusalReason.GONE:
                num_refused += 1
                self._handle(BlocksGone(worker_id, tuple(batch[:1])))
            elif pulled.ended.refusal is not None:
                return
            elif pulled.ended.end is ReadEnd.CONTENT:  # what comes before that block has been filed
                num_refused += 1
                num_landed = pulled.ended.outcome.num_landed_tokens // self.core.memory.layout.block_size
                self._handle(BlocksGone(worker_id, tuple(batch[num_landed : num_landed + 1])))
            else:
                raise PullFailedError(pulled.ended.reason)

    async def _wait_for_room(self) -> int:
        """Return how many blocks may be read now. Raises PullFailedError when it takes too long for any to be."""
        try:
            async with asyncio.timeout(self.times.room_timeout_s):
                while not (room := self.core.memory.num_pullable(writes=self._writes)):
                    self._room.clear()
                    await self._room.wait()
                return room
        except TimeoutError:
            raise PullFailedError("the store is behind with its writing, or all of it is on loan") from None

    async def _read(self, worker_id: WorkerId, batch: list[Content]) -> Pulled:
        """Read what of a batch, all of one tenant, is granted, as far as there is room then, and file what lands."""
        tenant, hashes = batch[0].tenant, [content.block_hash for content in batch]
        block_size, blocks, had_no_room = self.core.memory.layout.block_size, list[int](), False

        def place(granted: LeaseGranted) -> tuple[BlockTables, int]:
            nonlocal blocks, had_no_room
            blocks = self.core.memory.allocate_up_to(granted.num_tokens // block_size, tenant)
            had_no_room = not blocks
            if had_no_room:  # others have taken it meanwhile
                raise NoRoomError
            return (BlockTable(segments_of(blocks)),), len(blocks) * block_size

        deadline_ms = now_ms() + int(self.times.read_timeout_s * 1000)
        lease = WantedLease(0, tuple(hashes), deadline_ms, tenant, is_copy=True)
        key = (RequestId(new_id("store")), 1)
        num_landed = 0
        try:
            ended = await self._reads.carry_out(
                KVRead(key, worker_id, lease, (), traceparent=self._traces.get(worker_id, "")), place
            )
            num_landed = ended.outcome.num_landed_tokens // block_size  # verified, even where the read broke
        finally:
            if blocks:
                self.core.memory.pulled(blocks, hashes[:num_landed], writes=self._writes)
                self.changed()
        return Pulled(ended, had_no_room)

    def _record(self, finished: FinishedRead) -> None:
        ended = finished.ended
        num_blocks = ended.outcome.num_landed_tokens // self.core.memory.layout.block_size
        finished.span.end({Key.SOURCE: ended.read.holder, Key.NUM_BLOCKS: num_blocks}, ended.end, ended.detail)

    @property
    def _writes(self) -> bool:
        return self.backing is not None and self.backing.is_up
