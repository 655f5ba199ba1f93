"""The directory's shell: receives block events, reads inventories, answers where blocks are."""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterator

import msgspec

from dataplane.lasting import lasting
from schemas import subjects
from schemas.block import BLOCK_HASH_BYTES
from schemas.directory import (
    AskHeat,
    BlockHeat,
    BlocksEvicted,
    BlocksLocated,
    BlocksStored,
    DescribeDirectory,
    DirectoryDescribed,
    Inventory,
    LocateBlocks,
    ReadInventory,
    Tier,
)
from schemas.subjects import CarriesT, Subject
from schemas.worker import WorkerInfo, WorkerJoined, WorkerLeft, WorkerLoad, WorkerRole
from services.bus.base import Bus, BusError
from services.bus.typed import Received, TypedBus
from services.config import MeshConfig
from services.directory import limits
from services.directory.core import DirectoryCore
from services.directory.events import (
    Action,
    BlocksChanged,
    Event,
    EventsMissed,
    PageMissing,
    PageRead,
    ReadPage,
    Sweep,
    WorkerGone,
    WorkerSeen,
)
from services.keep import keep_traces
from services.metric_names import DIRECTORY_BLOCKS, DIRECTORY_HOLDERS
from services.metrics import Metrics
from services.runtime import now_ms
from services.telemetry import AttributeValue, Key, SpanName, Telemetry
from services.times import DirectoryTimes

log = logging.getLogger(__name__)

_PART_BYTES = limits.PAGE_PART_BLOCKS * BLOCK_HASH_BYTES


async def run_directory(
    config: MeshConfig,
    connection: Bus,
    telemetry: Telemetry,
    stop: asyncio.Event,
    on_ready: Callable[[], None] | None = None,
    metrics: Metrics | None = None,
) -> None:
    """Serve until `stop` is set. Starts empty; the first word of each worker makes it read that one's inventory."""
    async with asyncio.TaskGroup() as tasks:
        bus = TypedBus(connection, "directory", metrics or Metrics())
        directory = Directory(bus, tasks, telemetry, config.times.directory)
        await directory.begin_serving()
        if on_ready is not None:
            on_ready()
        await stop.wait()
        await directory.close()


class Directory:
    """The core on a bus."""

    def __init__(self, bus: TypedBus, tasks: asyncio.TaskGroup, telemetry: Telemetry, times: DirectoryTimes) -> None:
        self.core = DirectoryCore(times)
        self._times = times
        self._bus = bus
        self._tasks = tasks
        self._telemetry = telemetry
        self._reading = asyncio.Semaphore(limits.MAX_READING)
        self._running: dict[asyncio.Task[None], None] = {}
        self._num_losses = self._losses()
        bus.metrics.on_sample(self._sample)

    async def begin_serving(self) -> None:
        """Listen and answer from now on. Raises BusError."""
        await self._bus.announce("knows which worker is said to hold which KV blocks")
        await self._listen(subjects.JOINED, _worker_seen)
        await self._listen(subjects.LOAD, _worker_seen)
        await self._listen(subjects.LEFT, _worker_gone)
        await self._listen(subjects.STORED, _blocks_changed)
        await self._listen(subjects.EVICTED, _blocks_changed)
        await keep_traces(self._bus, self._tasks, self._telemetry)
        await self._bus.serve(self._tasks, subjects.LOCATE, (), self._locate)
        await self._bus.serve(self._tasks, subjects.DIRECTORY_STATUS, (), self._describe)
        await self._bus.serve(self._tasks, subjects.HEAT, ("*",), self._answer_heat)
        await self._bus.connection.flush()
        self._start(lasting(self._tick, "forgetting the silent"), "forget the silent")

    async def close(self) -> None:
        """Stop reading, listening and answering, and close the bus."""
        for task in list(self._running):
            task.cancel()
        await self._bus.close()

    async def _listen(self, subject: Subject[CarriesT, None], event_of: Callable[[CarriesT], Event]) -> None:
        """Bring the core what workers publish on this subject. `event_of` raises ValueError for what is malformed."""

        def receive(received: Received[CarriesT]) -> None:
            try:
                event = event_of(received.message)
            except ValueError as error:
                self._bus.drop("malformed")
                log.warning("dropped a message on %s: %s", received.subject, error)
                return
            self._handle(event)

        await self._bus.listen(self._tasks, subject, ("*",), receive)

    async def _locate(self, received: Received[LocateBlocks]) -> BlocksLocated:
        request, began_ns = received.message, time.monotonic_ns()
        asked = _leading(request.block_hashes)
        holders = self.core.locate(asked)
        if received.traceparent:
            attributes: dict[str, AttributeValue] = {
                Key.REQUEST_ID: request.request_id,
                Key.ATTEMPT: request.attempt,
                Key.NUM_BLOCKS: len(asked) // BLOCK_HASH_BYTES,
                Key.NUM_HOLDERS: len(holders),
            }
            span_ns = (began_ns, time.monotonic_ns())
            self._telemetry.record(SpanName.LOCATE, received.traceparent, span_ns, attributes)
        return BlocksLocated(
            request_id=request.request_id,
            attempt=request.attempt,
            deadline_ms=request.deadline_ms,
            holders=holders,
        )

    async def _describe(self, received: Received[DescribeDirectory]) -> DirectoryDescribed:
        return DirectoryDescribed(holders=self.core.known_holders)

    async def _answer_heat(self, received: Received[AskHeat]) -> BlockHeat:
        """Answer a part at a time, so that questions are answered in between."""
        asked, heat = received.message, bytearray()
        joined = _leading(asked.block_hashes)
        for at in range(0, len(joined), _PART_BYTES):
            heat += self.core.heat(asked.worker_id, joined[at : at + _PART_BYTES])
            await asyncio.sleep(0)
        return BlockHeat(heat=bytes(heat))

    def _handle(self, event: Event) -> None:
        if self._num_losses != (num_losses := self._losses()):
            self._num_losses = num_losses
            self._carry_out(self.core.handle(EventsMissed(), now_ms()))
        num_before = self.core.num_passed_over
        self._carry_out(self.core.handle(event, now_ms()))
        if num_passed_over := self.core.num_passed_over - num_before:
            self._bus.drop("over_bound", num_passed_over)

    def _carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case ReadPage():
                    self._start(self._read(action), f"inventory {action.worker_id}")
                case Sweep():
                    self._start(self._sweep(), "sweep")

    def _start(self, work: Coroutine[None, None, None], name: str) -> None:
        task = self._tasks.create_task(work, name=name)
        self._running[task] = None
        task.add_done_callback(self._running.pop)

    def _sample(self) -> None:
        self._bus.metrics.set_series(DIRECTORY_BLOCKS, {(): self.core.num_known_blocks})
        self._bus.metrics.set_series(DIRECTORY_HOLDERS, {(): self.core.num_holders})

    def _losses(self) -> int:
        """Return how often events may have been lost on their way here: outages, and messages that the bus dropped."""
        return self._bus.connection.num_connects + self._bus.connection.num_dropped

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self._times.tick_s)
            self._carry_out(self.core.tick(now_ms()))

    async def _sweep(self) -> None:
        """Sweep a slice at a time, so that questions are answered in between."""
        more = True
        while more:
            more = self.core.sweep()
            await asyncio.sleep(0)

    async def _read(self, wanted: ReadPage) -> None:
        """Ask for one page, and hand the core the answer or its absence."""
        request = ReadInventory(offset=wanted.offset)
        async with self._reading:
            try:
                timeout_s = self._times.inventory_timeout_s
                page = await self._bus.ask(subjects.INVENTORY, (wanted.worker_id,), request, timeout_s)
                _check_hashes(page.block_hashes)
            except (BusError, ValueError) as error:
                log.warning("no inventory from %s: %s", wanted.worker_id, error)
                self._handle(PageMissing(wanted))
                return
            for part in _parts_of(wanted, page):
                self._handle(part)
                await asyncio.sleep(0)


def _parts_of(asked: ReadPage, page: Inventory) -> Iterator[PageRead]:
    """The parts in which a page is handled: at least one."""
    for at in range(0, max(1, len(page.block_hashes)), _PART_BYTES):
        part = msgspec.structs.replace(page, block_hashes=page.block_hashes[at : at + _PART_BYTES])
        yield PageRead(asked, part, is_part=at + _PART_BYTES < len(page.block_hashes))


def _leading(joined: bytes) -> bytes:
    """Return as many of these hashes as one question is answered for."""
    num_blocks = min(len(joined) // BLOCK_HASH_BYTES, limits.MAX_LOCATE_BLOCKS)
    return joined[: num_blocks * BLOCK_HASH_BYTES]


def _worker_seen(message: WorkerJoined | WorkerLoad) -> WorkerSeen:
    return WorkerSeen(message.worker.worker_id, message.worker.incarnation, _room_of(message.worker))


def _room_of(worker: WorkerInfo) -> dict[Tier, int]:
    """Return for how many blocks it has room on each tier that one of its role has."""
    if worker.role != WorkerRole.STORE:
        return {Tier.ARENA: worker.num_blocks}
    num_behind = limits.MAX_HOLDER_BLOCKS if worker.num_blocks_behind is None else worker.num_blocks_behind
    return {Tier.MEMORY: worker.num_blocks, Tier.DISK: num_behind, Tier.REMOTE: num_behind}


def _worker_gone(message: WorkerLeft) -> WorkerGone:
    return WorkerGone(message.worker_id, message.incarnation)


def _blocks_changed(message: BlocksStored | BlocksEvicted) -> BlocksChanged:
    _check_hashes(message.block_hashes)
    if len(message.block_hashes) > limits.MAX_EVENT_BLOCKS * BLOCK_HASH_BYTES:
        raise ValueError("it has too many blocks for one event")
    return BlocksChanged(message)


def _check_hashes(joined: bytes) -> None:
    """Raise ValueError for joined block hashes of which the last is cut."""
    if len(joined) % BLOCK_HASH_BYTES:
        raise ValueError("its block hashes are cut")
