"""The directory's shell: hears block events, reads inventories, answers where blocks are."""

import asyncio
import logging
from collections.abc import Callable, Coroutine

from schemas import subjects
from schemas.block import BLOCK_HASH_BYTES, split_hashes
from schemas.directory import BlocksLocated, LocateBlocks, ReadInventory
from schemas.worker import WorkerJoined, WorkerLeft, WorkerLoad
from services.bus.base import Bus, BusError
from services.bus.typed import Received, TypedBus
from services.directory.core import BlockEvent, DirectoryCore, ReadInventoryOf
from services.metric_names import DIRECTORY_BLOCKS, DIRECTORY_HOLDERS
from services.metrics import Metrics

log = logging.getLogger(__name__)

INVENTORY_TIMEOUT_S = 2.0
FORGET_AFTER_S = 15.0
"""Workers speak twice a second."""


async def run_directory(
    connection: Bus, stop: asyncio.Event, on_ready: Callable[[], None] | None = None, metrics: Metrics | None = None
) -> None:
    """Serve until `stop` is set. Starts empty; the first word of each worker makes it read that one's inventory."""
    async with asyncio.TaskGroup() as tasks:
        directory = Directory(TypedBus(connection, "directory", metrics or Metrics()), tasks)
        await directory.start()
        if on_ready is not None:
            on_ready()
        await stop.wait()
        await directory.close()


class Directory:
    """The core on a bus."""

    def __init__(self, bus: TypedBus, tasks: asyncio.TaskGroup) -> None:
        self.core = DirectoryCore()
        self._bus = bus
        self._tasks = tasks
        self._running: dict[asyncio.Task[None], None] = {}
        self._sweeping = False
        self._num_losses = self._losses()
        bus.metrics.on_sample(self._sample)

    async def start(self) -> None:
        bus, tasks = self._bus, self._tasks
        await bus.announce("knows which worker is said to hold which KV blocks")
        await bus.listen(tasks, subjects.JOINED, ("*",), self._heard)
        await bus.listen(tasks, subjects.LOAD, ("*",), self._heard)
        await bus.listen(tasks, subjects.LEFT, ("*",), self._left)
        await bus.listen(tasks, subjects.STORED, ("*",), self._changed)
        await bus.listen(tasks, subjects.EVICTED, ("*",), self._changed)
        await bus.serve(tasks, subjects.LOCATE, (), self._locate)
        await bus.connection.flush()
        self._start(self._forget_silent(), "forget the silent")

    async def close(self) -> None:
        for task in list(self._running):
            task.cancel()
        await self._bus.close()

    def _heard(self, received: Received[WorkerJoined | WorkerLoad]) -> None:
        if self._num_losses != (num_losses := self._losses()):
            self._num_losses = num_losses
            self.core.doubt_all()
        self._carry_out(self.core.heard(received.message.worker))

    def _left(self, received: Received[WorkerLeft]) -> None:
        self.core.left(received.message)
        self._carry_out([])

    def _changed(self, received: Received[BlockEvent]) -> None:
        event = received.message
        if len(event.block_hashes) % BLOCK_HASH_BYTES:
            self._bus.drop("malformed")
            log.warning("dropped an event of %s: its hashes are cut", event.worker_id)
            return
        self._carry_out(self.core.changed(event))

    async def _locate(self, received: Received[LocateBlocks]) -> BlocksLocated:
        request = received.message
        whole = len(request.block_hashes) - len(request.block_hashes) % BLOCK_HASH_BYTES
        return BlocksLocated(
            request_id=request.request_id,
            attempt=request.attempt,
            deadline_ms=request.deadline_ms,
            holders=self.core.locate(split_hashes(request.block_hashes[:whole])),
        )

    def _carry_out(self, wanted: list[ReadInventoryOf]) -> None:
        for read in wanted:
            self._start(self._read(read), f"inventory {read.worker_id}")
        if self.core.needs_sweep and not self._sweeping:
            self._sweeping = True
            self._start(self._sweep(), "sweep")

    def _start(self, work: Coroutine[None, None, None], name: str) -> None:
        task = self._tasks.create_task(work, name=name)
        self._running[task] = None
        task.add_done_callback(self._running.pop)

    def _sample(self) -> None:
        self._bus.metrics.put(DIRECTORY_BLOCKS, {(): self.core.num_blocks})
        self._bus.metrics.put(DIRECTORY_HOLDERS, {(): self.core.num_holders})

    def _losses(self) -> int:
        """Return how often events may have been lost on their way here."""
        return self._bus.connection.num_connects + self._bus.connection.num_dropped

    async def _forget_silent(self) -> None:
        while True:
            await asyncio.sleep(FORGET_AFTER_S)
            self.core.forget_silent()
            self._carry_out([])

    async def _sweep(self) -> None:
        """Forget the blocks of holders that are gone, between two questions."""
        more = True
        while more:
            more = self.core.sweep()
            await asyncio.sleep(0)
        self._sweeping = False

    async def _read(self, wanted: ReadInventoryOf) -> None:
        """Read one page. A worker that does not answer is asked again when it speaks next."""
        request = ReadInventory(offset=wanted.offset)
        try:
            page = await self._bus.ask(subjects.INVENTORY, (wanted.worker_id,), request, INVENTORY_TIMEOUT_S)
        except (BusError, ValueError) as error:
            log.warning("no inventory from %s: %s", wanted.worker_id, error)
            self.core.inventory_failed(wanted)
            return
        if len(page.block_hashes) % BLOCK_HASH_BYTES:
            self.core.inventory_failed(wanted)
            return
        self._carry_out(self.core.inventory(wanted, page))
