"""The directory on a bus, with a worker's real ledger behind it."""

import asyncio

from schemas import subjects
from schemas.block import BlockHasher, hash_blocks, join_hashes
from schemas.directory import BlocksLocated, LocateBlocks, ReadInventory
from schemas.ids import RequestId, WorkerId
from schemas.message import Message
from schemas.worker import BlockCounts, WorkerInfo, WorkerLoad
from services.bus.memory import MemoryBus
from services.bus.typed import Received, TypedBus
from services.directory.service import run_directory
from services.worker.ledger import BlockLedger

WORKER = WorkerId("prefill-0")
INFO = WorkerInfo(
    worker_id=WORKER,
    incarnation="1",
    role="prefill",
    model="m",
    fingerprint="f",
    num_blocks=8,
    block_size=4,
    context_length=64,
)
LOAD = WorkerLoad(
    worker=INFO,
    state="ready",
    blocks=BlockCounts(total=8, free=8, running=0, leased=0),
    num_running=0,
    num_queued=0,
    num_uncomputed_tokens=0,
)


class FakeWorker:
    """A ledger on the bus, and a client of the directory."""

    def __init__(self, bus: MemoryBus) -> None:
        self.ledger = BlockLedger(WORKER, "1")
        self.door = TypedBus(bus, "prefill")
        self.num_inventories = 0

    async def start(self, tasks: asyncio.TaskGroup) -> None:
        await self.door.serve(tasks, subjects.INVENTORY, (WORKER,), self._inventory)

    async def _inventory(self, received: Received[ReadInventory]) -> Message:
        self.num_inventories += 1
        return self.ledger.inventory(received.message.offset)

    async def store(self, tokens: list[int], *, lost: bool = False) -> None:
        table = list(range(tokens[0], tokens[0] + 8))
        event = self.ledger.record(BlockHasher(4, model_fingerprint="f"), tokens, len(tokens), table)
        assert event is not None
        if not lost:
            await self.door.publish(subjects.STORED, (WORKER,), event)

    async def locate(self, tokens: list[int]) -> int:
        hashes = join_hashes(hash_blocks(tokens, 4, model_fingerprint="f"))
        request = LocateBlocks(request_id=RequestId("r"), attempt=1, deadline_ms=0, block_hashes=hashes)
        reply = await self.door.ask(subjects.LOCATE, (), request, 5)
        assert isinstance(reply, BlocksLocated)
        return reply.holders[0].num_blocks if reply.holders else 0

    async def until_located(self, tokens: list[int], num_blocks: int) -> None:
        async with asyncio.timeout(30):
            while await self.locate(tokens) != num_blocks:
                await asyncio.sleep(0.01)


async def test_a_lost_event_is_repaired_and_a_restart_rebuilt() -> None:
    bus, stop = MemoryBus(), asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        worker = FakeWorker(bus)
        await worker.start(tasks)
        first = asyncio.Event()
        tasks.create_task(run_directory(bus, first))
        await asyncio.sleep(0)
        await worker.door.publish(subjects.LOAD, (WORKER,), LOAD)
        await worker.store(list(range(8)))
        await worker.until_located(list(range(8)), 2)
        await worker.store(list(range(100, 112)), lost=True)
        assert await worker.locate(list(range(100, 112))) == 0
        await worker.store(list(range(200, 204)))
        await worker.until_located(list(range(100, 112)), 3)
        before = worker.num_inventories

        again = MemoryBus()  # the directory closes the bus that it is given
        successor = FakeWorker(again)
        successor.ledger = worker.ledger
        await successor.start(tasks)
        tasks.create_task(run_directory(again, stop))
        await asyncio.sleep(0)
        await successor.door.publish(subjects.LOAD, (WORKER,), LOAD)
        await successor.until_located(list(range(100, 112)), 3)
        assert before >= 1 and successor.num_inventories == 1
        first.set()
        stop.set()
