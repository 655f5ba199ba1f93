"""Takes in what workers are about to evict, or want kept elsewhere as well: asks for a lease, reads, files. A worker
never waits for it."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from dataplane.blocks.layout import BlockTable, segments_of
from dataplane.ends.reader import PlaneReader
from dataplane.protocol.stream import TransferFailedError, TransferStats
from schemas.block import join_hashes
from schemas.ids import BlockHash, RequestId, WorkerId, new_id
from schemas.kv import BlocksCooling, LeaseGranted, ReadEnd, ReplicateBlocks, RequestLease
from services.bus.typed import Received, TypedBus
from services.runtime import now_ms
from services.store.backing import Backing, Complaints
from services.store.core import BlocksGone, Event, NotTaken, PullEnded, StartPull, StoreCore
from services.telemetry import Key, Telemetry
from services.worker.kv.borrow import Borrower, NotGrantedError
from services.worker.observe.transfers import TransferSpan

ASK_TIMEOUT_S = 2.0
READ_TIMEOUT_S = 30.0
ROOM_TIMEOUT_S = 2.0
"""How long a pull waits for the store itself: for blocks to be written behind memory, or leases to end."""
MAX_PULLS = 4
"""Workers that are read from at once, one stream each."""
MAX_PULL_BLOCKS = 64
"""Blocks of one lease: what a worker has to keep for us at a time."""
MAX_REFUSALS = 16
"""Offered blocks in a row that the worker has given up meanwhile; one more, and the rest is taken for gone as well."""


class _BehindError(Exception):
    """There is no room, and none comes."""


class _RoomTakenError(Exception):
    """Others have taken the room meanwhile."""


@dataclass
class Puller:
    """`carrier`: which one is asked for, or "auto". `changed` is called after blocks came; whoever makes room calls
    `room_made`."""

    core: StoreCore
    backing: Backing | None
    bus: TypedBus
    reader: PlaneReader
    carrier: str
    tasks: asyncio.TaskGroup
    changed: Callable[[], None]
    complaints: Complaints
    telemetry: Telemetry

    def __post_init__(self) -> None:
        self._borrower = Borrower(self.bus, self.core.memory.layout.block_size)
        self._pulls: set[asyncio.Task[None]] = set()
        self._slots = asyncio.Semaphore(MAX_PULLS)
        self._room = asyncio.Event()
        self._traces: dict[WorkerId, str] = {}
        """The trace of the request that last wanted blocks of a worker kept: the next read belongs to it."""

    def offered(self, received: Received[BlocksCooling]) -> None:
        """A worker says what it will evict soon."""
        self._handle(received.message)

    def replicated(self, received: Received[ReplicateBlocks]) -> None:
        """A worker says what it has completed, and wants kept elsewhere as well."""
        if received.traceparent:
            self._traces[received.message.source] = received.traceparent
        self._handle(received.message)

    def room_made(self) -> None:
        self._room.set()

    async def close(self) -> None:
        """End all reads: nothing is written into the arena after it."""
        pulls = list(self._pulls)
        for pull in pulls:
            pull.cancel()
        if pulls:
            await asyncio.wait(pulls)

    def _handle(self, event: Event, reason: str = "") -> None:
        """Let the core take in what has happened, and carry out what follows. `reason`: why a pull ended early."""
        for action in self.core.handle(event, now_ms()):
            match action:
                case StartPull(worker_id=worker_id):
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
        except (NotGrantedError, TransferFailedError, _BehindError) as error:
            reason = str(error)
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
            span = TransferSpan(self.telemetry, self.core.memory.limits.worker_id, self._traces.get(worker_id, ""))
            end, detail, num_landed = ReadEnd.STOPPED, "", 0
            try:
                async with self._lease(worker_id, batch, span.story) as granted:
                    num_landed = await self._read(granted, batch, span.stats)
                end, num_refused = ReadEnd.LANDED, 0
            except _RoomTakenError:
                detail = "no room"
                num_refused += 1
            except TransferFailedError as error:
                end, detail = ReadEnd(error.code), str(error)
                num_landed = error.num_landed_tokens // self.core.memory.layout.block_size
                raise
            except NotGrantedError as error:
                end, detail = error.end, str(error)
                if error.reason == "gone":
                    num_refused += 1
                    self._handle(BlocksGone(worker_id, tuple(batch[:1])))
                elif error.reason:
                    return
                else:
                    raise
            finally:
                span.end({Key.SOURCE: worker_id, Key.NUM_BLOCKS: num_landed}, end, detail)

    async def _wait_for_room(self) -> int:
        """Return how many blocks may be read now. Raises _BehindError when it takes too long for any to be."""
        try:
            async with asyncio.timeout(ROOM_TIMEOUT_S):
                while not (room := self.core.memory.num_pullable(writes=self._writes)):
                    self._room.clear()
                    await self._room.wait()
                return room
        except TimeoutError:
            raise _BehindError("the store is behind with its writing, or all of it is on loan") from None

    def _lease(
        self, worker_id: WorkerId, batch: list[BlockHash], traceparent: str
    ) -> AbstractAsyncContextManager[LeaseGranted]:
        asked_ms = now_ms()
        request = RequestLease(
            request_id=RequestId(new_id("store")),
            attempt=1,
            deadline_ms=asked_ms + int(READ_TIMEOUT_S * 1000),
            answer_by_ms=asked_ms + int(ASK_TIMEOUT_S * 1000),
            reader=self.core.memory.limits.worker_id,
            fingerprint=self.core.memory.layout.fingerprint,
            first_block=0,
            block_hashes=join_hashes(batch),
        )
        return self._borrower.lease(worker_id, request, ASK_TIMEOUT_S, traceparent)

    async def _read(self, granted: LeaseGranted, batch: list[BlockHash], stats: TransferStats) -> int:
        """Read what was granted, as far as there is room, and file it. Return how many blocks these are.

        Raises TransferFailedError; what landed before is filed. Raises _RoomTakenError.
        """
        block_size = self.core.memory.layout.block_size
        blocks = self.core.memory.allocate_up_to(granted.num_tokens // block_size)
        if not blocks:
            raise _RoomTakenError
        num_landed = 0
        try:
            await self.reader.read(
                granted.endpoint,
                granted.ticket,
                carrier=self.carrier,
                tables=(BlockTable(segments_of(blocks)),),
                first_token=0,
                num_tokens=len(blocks) * block_size,
                deadline_s=READ_TIMEOUT_S,
                stats=stats,
            )
            num_landed = len(blocks)
        except TransferFailedError as error:
            num_landed = error.num_landed_tokens // block_size  # verified all the same
            raise
        finally:
            self.core.memory.pulled(blocks, batch[:num_landed], writes=self._writes)
            self.changed()
        return num_landed

    @property
    def _writes(self) -> bool:
        return self.backing is not None and self.backing.is_up
