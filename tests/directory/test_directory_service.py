"""The directory on a bus, and the scheduler that asks it."""

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
import pytest

from dataplane.blocks.kept import ContentChanges
from schemas import subjects
from schemas.block import hash_blocks, join_hashes
from schemas.directory import AskHeat, DescribeDirectory, Inventory, LocateBlocks, ReadInventory, Tier
from schemas.ids import BlockHash, RequestId, WorkerId
from schemas.request import KVSource, Placement, PlaceRequest
from schemas.worker import BlockCounts, LeftReason, WorkerInfo, WorkerJoined, WorkerLeft, WorkerLoad, WorkerRole
from services.bus.limits import MIN_PAYLOAD_BYTES
from services.bus.memory import MemoryBroker, MemoryBus
from services.bus.typed import Received, TypedBus
from services.config import MeshConfig, SchedulerConfig
from services.directory import limits, service
from services.directory.events import WorkerSeen
from services.directory.limits import MAX_HOLDER_BLOCKS, MAX_READING
from services.directory.service import _worker_seen, run_directory
from services.holder.kv.ledger import BlockLedger
from services.scheduler.limits import BACKOFF_MAX_MS, BACKOFF_MIN_MS
from services.scheduler.placement.hints import Hints
from services.scheduler.service import run_scheduler
from services.telemetry import Telemetry
from services.times import Times
from tests.waiting import until

pytestmark = pytest.mark.virtual_time

WORKER = WorkerId("prefill-0")
FAR_AWAY_MS = 2**52


def load_of(worker_id: str, role: WorkerRole, incarnation: str = "1") -> WorkerLoad:
    return WorkerLoad(
        worker=WorkerInfo(
            worker_id=WorkerId(worker_id), incarnation=incarnation, role=role, model="m", fingerprint="f",
            num_blocks=1_000, block_size=4, context_length=4_000,
        ),
        state="ready",
        blocks=BlockCounts(total=1_000, free=1_000, running=0, leased=0),
        num_running=0,
        num_queued=0,
        num_uncomputed_tokens=0,
    )  # fmt: skip


LOAD = load_of(WORKER, "prefill")


def hashes_of(tokens: list[int]) -> list[BlockHash]:
    return hash_blocks(tokens, 4, model_fingerprint="f")


class FakeWorker:
    """A ledger on the bus, and a client of the directory."""

    def __init__(self, connection: MemoryBus, worker_id: WorkerId = WORKER) -> None:
        self.worker_id = worker_id
        self.ledger = BlockLedger(worker_id, "1")
        self.contents: list[BlockHash] = []
        self.bus = TypedBus(connection, "prefill")
        self.num_inventories = 0

    async def start(self, tasks: asyncio.TaskGroup) -> None:
        await self.bus.serve(tasks, subjects.INVENTORY, (self.worker_id,), self._inventory)

    async def _inventory(self, received: Received[ReadInventory]) -> Inventory:
        self.num_inventories += 1
        max_bytes = self.bus.connection.max_bytes
        return self.ledger.inventory(lambda: [("arena", list(self.contents))], received.message.offset, max_bytes)

    async def store(self, tokens: list[int], *, lost: bool = False) -> None:
        hashes = hashes_of(tokens)
        self.contents += hashes
        (event,) = self.ledger.events(ContentChanges(stored=hashes))
        if not lost:
            await self.bus.publish(subjects.STORED, (self.worker_id,), event)

    async def locate(self, tokens: list[int]) -> int:
        hashes = join_hashes(hashes_of(tokens))
        request = LocateBlocks(request_id=RequestId("r"), attempt=1, deadline_ms=0, block_hashes=hashes)
        reply = await self.bus.ask(subjects.LOCATE, (), request, 5)
        return reply.holders[0].num_blocks if reply.holders else 0

    async def heat(self, tokens: list[int]) -> list[int]:
        question = AskHeat(worker_id=self.worker_id, block_hashes=join_hashes(hashes_of(tokens)))
        return list((await self.bus.ask(subjects.HEAT, (self.worker_id,), question, 5)).heat)

    async def until_located(self, tokens: list[int], num_blocks: int) -> None:
        async def is_located() -> bool:
            return await self.locate(tokens) == num_blocks

        await until(is_located)


async def test_a_lost_event_is_repaired_and_a_restart_rebuilt() -> None:
    connection, stop = MemoryBus(), asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        worker = FakeWorker(connection)
        await worker.start(tasks)
        first = asyncio.Event()
        tasks.create_task(run_directory(MeshConfig(), connection, Telemetry("directory"), first))
        await asyncio.sleep(0)
        await worker.bus.publish(subjects.LOAD, (WORKER,), LOAD)
        await worker.store(list(range(8)))
        await worker.until_located(list(range(8)), 2)
        await worker.store(list(range(100, 112)), lost=True)
        assert await worker.locate(list(range(100, 112))) == 0
        await worker.store(list(range(200, 204)))
        await worker.until_located(list(range(100, 112)), 3)
        before = worker.num_inventories

        again = MemoryBus()  # the directory closes the bus that it is given
        successor = FakeWorker(again)
        successor.ledger, successor.contents = worker.ledger, worker.contents
        await successor.start(tasks)
        tasks.create_task(run_directory(MeshConfig(), again, Telemetry("directory"), stop))
        await asyncio.sleep(0)
        await successor.bus.publish(subjects.LOAD, (WORKER,), LOAD)
        await successor.until_located(list(range(100, 112)), 3)
        assert before >= 1 and successor.num_inventories == 1
        first.set()
        stop.set()


async def test_a_broker_of_small_messages_is_enough_while_much_changes() -> None:
    """70,000 blocks in pages of 32 KiB to a directory that starts, and more blocks after each page."""
    broker, stop = MemoryBroker(max_bytes=MIN_PAYLOAD_BYTES), asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        worker = FakeWorker(MemoryBus(broker))
        await worker.start(tasks)
        held = list(range(280_000))
        worker.contents = hashes_of(held)
        room = msgspec.structs.replace(LOAD.worker, num_blocks=100_000)
        tasks.create_task(run_directory(MeshConfig(), MemoryBus(broker), Telemetry("directory"), stop))
        await asyncio.sleep(0)
        await worker.bus.publish(subjects.LOAD, (WORKER,), msgspec.structs.replace(LOAD, worker=room))
        beginnings = [[number] * 4 for number in range(40)]
        for number, beginning in enumerate(beginnings):
            await until(lambda number=number: worker.num_inventories > number)
            await worker.store(beginning)
        await worker.until_located(held[:4_000], 1_000)
        assert [await worker.locate(beginning) for beginning in beginnings] == [1] * 40
        assert worker.num_inventories < 60, "all was read once"
        stop.set()
        await worker.bus.close()


async def test_a_worker_is_told_the_heat_of_as_many_blocks_as_it_may_ask_about(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "_PART_BYTES", 32)
    monkeypatch.setattr(limits, "MAX_LOCATE_BLOCKS", 3)
    connection, stop = MemoryBus(), asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        worker = FakeWorker(connection)
        await worker.start(tasks)
        tasks.create_task(run_directory(MeshConfig(), connection, Telemetry("directory"), stop))
        await asyncio.sleep(0)
        await worker.store(list(range(16)))
        await worker.until_located(list(range(8)), 2)
        before = await worker.heat(list(range(16)))
        await worker.locate(list(range(8)))
        assert before == [before[0], before[0], 0]
        assert await worker.heat(list(range(16))) == [before[0] + 1, before[0] + 1, 0], "four were asked about"
        assert await worker.heat([]) == []
        stop.set()


def question(tokens: list[int]) -> PlaceRequest:
    return PlaceRequest(
        request_id=RequestId("r"), attempt=1, deadline_ms=FAR_AWAY_MS, num_prompt_tokens=len(tokens), max_tokens=8,
        block_hashes=join_hashes(hashes_of(tokens)),
    )  # fmt: skip


async def place(bus: TypedBus, tokens: list[int]) -> Placement:
    placement = await bus.ask(subjects.PLACE, (), question(tokens), 5)
    assert isinstance(placement, Placement), placement
    return placement


async def test_the_scheduler_names_the_sources_that_the_directory_knows_and_places_without_it() -> None:
    broker, stop, directory_stop = MemoryBroker(), asyncio.Event(), asyncio.Event()
    config = MeshConfig(scheduler=SchedulerConfig(policy="cost"))
    tokens = list(range(1_000))
    async with asyncio.TaskGroup() as tasks:
        connection = MemoryBus(broker)
        holder = FakeWorker(connection, WorkerId("decode-0"))
        await holder.start(tasks)
        directory = tasks.create_task(
            run_directory(MeshConfig(), MemoryBus(broker), Telemetry("directory"), directory_stop)
        )
        tasks.create_task(run_scheduler(config, MemoryBus(broker), Telemetry("scheduler"), stop))
        await asyncio.sleep(0)
        loads = (LOAD, load_of("decode-0", "decode"), load_of("decode-1", "decode"))
        for load in loads:
            await holder.bus.publish(subjects.LOAD, (load.worker.worker_id,), load)
        await holder.store(tokens[:400])
        await holder.until_located(tokens, 100)

        # What the decode worker holds is less than half, so the prompt is split, and read back from there.
        placement = await place(holder.bus, tokens)
        assert (placement.prefill_worker, placement.decode_worker) == ("prefill-0", "decode-0")
        assert placement.sources == (KVSource(worker_id=WorkerId("decode-0"), first_block=0, num_blocks=100),)
        assert placement.terms is not None
        assert (placement.terms.pulled_tokens, placement.terms.computed_tokens) == (400, 600)

        # A holder whose incarnation the fleet does not know is no source.
        again = load_of("decode-0", "decode", incarnation="2")
        left = WorkerLeft(worker_id=WorkerId("decode-0"), incarnation="1", reason=LeftReason.STOPPED)
        await holder.bus.publish(subjects.LEFT, ("decode-0",), left)
        await holder.until_located(tokens, 0)
        assert (await place(holder.bus, tokens)).sources == ()
        await holder.bus.publish(subjects.LOAD, ("decode-0",), again)

        # Without a directory a placement has no hints, and is made all the same.
        directory_stop.set()
        await directory
        for _ in range(3):
            placement = await place(holder.bus, tokens)
            assert placement.sources == () and placement.prefill_worker == "prefill-0"
        stop.set()
        await connection.close()


async def test_a_directory_that_does_not_answer_is_left_alone_for_longer_and_longer() -> None:
    connection, now_ms = MemoryBus(), 1_000
    ear = await connection.subscribe(subjects.LOCATE.of())  # hears, and says nothing
    num_heard = 0

    async def listen() -> None:
        nonlocal num_heard
        async for _ in ear:
            num_heard += 1

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(listen())
        hints = Hints(TypedBus(connection, "scheduler"), Times().scheduler.locate_timeout_s, clock=lambda: now_ms)
        quiet_ms = BACKOFF_MIN_MS
        for number in range(1, 8):
            assert (await hints.ask(question([1, 2, 3, 4]))).holders is None and num_heard == number
            now_ms += quiet_ms - 1
            assert (await hints.ask(question([1, 2, 3, 4]))).holders is None and num_heard == number
            now_ms += 1
            quiet_ms = min(2 * quiet_ms, BACKOFF_MAX_MS)
        await connection.close()


async def test_two_directories_say_the_same_and_both_hear_who_has_left() -> None:
    broker, stops = MemoryBroker(), [asyncio.Event(), asyncio.Event()]
    tokens = list(range(8))
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        worker = FakeWorker(MemoryBus(broker))
        await worker.start(tasks)
        tasks.create_task(run_directory(MeshConfig(), MemoryBus(broker), Telemetry("directory"), stops[0]))
        await asyncio.sleep(0)
        await worker.store(tokens)
        # A later one, which starts with nothing.
        tasks.create_task(run_directory(MeshConfig(), MemoryBus(broker), Telemetry("directory"), stops[1]))
        await asyncio.sleep(0)
        await worker.bus.publish(subjects.LOAD, (WORKER,), LOAD)
        for _ in range(6):  # they take turns
            await worker.until_located(tokens, 2)
        while [await worker.locate(tokens) for _ in range(4)] != [2] * 4:
            await asyncio.sleep(0.01)
        left = WorkerLeft(worker_id=WORKER, incarnation="1", reason=LeftReason.DIED)
        await worker.bus.publish(subjects.LEFT, (WORKER,), left)
        while [await worker.locate(tokens) for _ in range(4)] != [0] * 4:
            await asyncio.sleep(0.01)
        for stop in stops:
            stop.set()
        await worker.bus.close()


async def test_it_says_of_whom_it_has_read_everything() -> None:
    """Who starts a mesh waits for that: before it, a store's blocks are not found."""
    broker, stop, may_answer = MemoryBroker(), asyncio.Event(), asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        bus = TypedBus(MemoryBus(broker), "up")

        async def holders() -> tuple[str, ...]:
            return (await bus.ask(subjects.DIRECTORY_STATUS, (), DescribeDirectory(), 5)).holders

        class Slow(FakeWorker):
            async def _inventory(self, received: Received[ReadInventory]) -> Inventory:
                await may_answer.wait()
                return await super()._inventory(received)

        quick, slow = FakeWorker(MemoryBus(broker)), Slow(MemoryBus(broker), WorkerId("store-0"))
        await slow.store(list(range(8)), lost=True)
        for worker in (quick, slow):
            await worker.start(tasks)
        tasks.create_task(run_directory(MeshConfig(), MemoryBus(broker), Telemetry("directory"), stop))
        await asyncio.sleep(0)
        for worker_id in (quick.worker_id, slow.worker_id):
            await bus.publish(subjects.LOAD, (worker_id,), load_of(worker_id, "prefill"))
        await until(lambda: quick.num_inventories == 1)
        await quick.until_located([1, 2, 3, 4], 0)
        assert await holders() == (WORKER,)
        may_answer.set()
        await slow.until_located(list(range(8)), 2)
        assert set(await holders()) == {WORKER, "store-0"}
        stop.set()
        for worker in (quick, slow):
            await worker.bus.close()
        await bus.close()


async def test_an_inventory_that_never_comes_is_asked_for_again() -> None:
    broker, stop = MemoryBroker(), asyncio.Event()
    tokens = list(range(8))
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        partitioned = MemoryBus(broker)
        ear = await partitioned.subscribe(subjects.INVENTORY.of(WORKER))  # hears, and says nothing
        worker = FakeWorker(MemoryBus(broker))
        await worker.store(tokens, lost=True)
        tasks.create_task(run_directory(MeshConfig(), MemoryBus(broker), Telemetry("directory"), stop))
        await asyncio.sleep(0)
        await worker.bus.publish(subjects.LOAD, (WORKER,), LOAD)
        async for _ in ear:
            break
        await partitioned.close()
        await worker.start(tasks)
        while await worker.locate(tokens) != 2:
            await worker.bus.publish(subjects.LOAD, (WORKER,), LOAD)
            await asyncio.sleep(0.01)
        stop.set()
        await worker.bus.close()


async def test_what_was_lost_in_an_outage_is_read_from_the_inventory() -> None:
    broker, stop = MemoryBroker(), asyncio.Event()
    tokens = list(range(8))
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        worker, connection = FakeWorker(MemoryBus(broker)), MemoryBus(broker)
        await worker.start(tasks)
        tasks.create_task(run_directory(MeshConfig(), connection, Telemetry("directory"), stop))
        await asyncio.sleep(0)
        await worker.bus.publish(subjects.LOAD, (WORKER,), LOAD)
        while worker.num_inventories == 0:
            await asyncio.sleep(0)
        await worker.store(tokens, lost=True)
        await worker.bus.publish(subjects.LOAD, (WORKER,), LOAD)
        assert await worker.locate(tokens) == 0
        connection.num_connects += 1
        await worker.bus.publish(subjects.LOAD, (WORKER,), LOAD)
        await worker.until_located(tokens, 2)
        stop.set()
        await worker.bus.close()


async def test_many_workers_are_read_few_at_a_time_in_parts_with_answers_in_between(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each inventory comes as one page that is longer than a part."""
    monkeypatch.setattr("services.directory.limits.PAGE_PART_BLOCKS", 8)
    broker, stop = MemoryBroker(), asyncio.Event()
    bus = TypedBus(MemoryBus(broker), "prefill")
    tokens = {WorkerId(f"w{number}"): list(range(1_000 * number, 1_000 * number + 80)) for number in range(200)}
    num_now, num_at_once, located = 0, 0, 0

    async with asyncio.timeout(120), asyncio.TaskGroup() as tasks:
        tasks.create_task(run_directory(MeshConfig(), MemoryBus(broker), Telemetry("directory"), stop))
        await asyncio.sleep(0)

        def serve(worker_id: WorkerId) -> Callable[[Received[ReadInventory]], Awaitable[Inventory]]:
            async def inventory(_: Received[ReadInventory]) -> Inventory:
                nonlocal num_now, num_at_once
                num_now += 1
                num_at_once = max(num_at_once, num_now)
                for _ in range(3):
                    await asyncio.sleep(0)
                num_now -= 1
                hashes = join_hashes(hashes_of(tokens[worker_id]))
                return Inventory(worker_id=worker_id, incarnation="1", sequence=0, block_hashes=hashes)

            return inventory

        for worker_id in tokens:
            await bus.serve(tasks, subjects.INVENTORY, (worker_id,), serve(worker_id))
            await bus.publish(subjects.LOAD, (worker_id,), load_of(worker_id, "prefill"))
        while located < len(tokens):
            located = 0
            for prompt in tokens.values():
                reply = await bus.ask(subjects.LOCATE, (), locate_question(join_hashes(hashes_of(prompt))), 30)
                assert [run.num_blocks for run in reply.holders] in ([], [20]), "all of an inventory, or none"
                located += len(reply.holders)
        assert 0 < num_at_once <= MAX_READING
        stop.set()
        await bus.close()


def locate_question(joined: bytes) -> LocateBlocks:
    return LocateBlocks(request_id=RequestId("r"), attempt=1, deadline_ms=0, block_hashes=joined)


async def test_an_event_of_too_many_blocks_is_dropped_and_a_question_of_too_many_is_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("services.directory.limits.MAX_EVENT_BLOCKS", 4)
    monkeypatch.setattr("services.directory.limits.MAX_LOCATE_BLOCKS", 3)
    connection, stop = MemoryBus(), asyncio.Event()
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        worker = FakeWorker(connection)
        await worker.start(tasks)
        tasks.create_task(run_directory(MeshConfig(), connection, Telemetry("directory"), stop))
        await asyncio.sleep(0)
        await worker.bus.publish(subjects.LOAD, (WORKER,), LOAD)
        while worker.num_inventories == 0:
            await asyncio.sleep(0)
        await worker.store(list(range(100)))  # 25 blocks
        assert await worker.locate(list(range(100))) == 0
        await worker.store(list(range(200, 216)))  # shows the gap
        await worker.until_located(list(range(100)), 3)
        cut = await worker.bus.ask(subjects.LOCATE, (), locate_question(b"x" * 17), 5)
        assert cut.holders == ()
        stop.set()


@pytest.mark.parametrize(
    ("role", "num_blocks_behind", "room"),
    [
        ("prefill", None, {"arena": 1_000}),
        ("aggregated", 50, {"arena": 1_000}),
        ("store", 50, {"memory": 1_000, "disk": 50, "remote": 50}),
        ("store", None, {"memory": 1_000, "disk": MAX_HOLDER_BLOCKS, "remote": MAX_HOLDER_BLOCKS}),
    ],
)
def test_a_holder_has_room_on_the_tiers_of_its_role(
    role: WorkerRole, num_blocks_behind: int | None, room: dict[Tier, int]
) -> None:
    load = load_of("w", role)
    worker = msgspec.structs.replace(load.worker, num_blocks_behind=num_blocks_behind)
    for message in (WorkerJoined(worker=worker), msgspec.structs.replace(load, worker=worker)):
        assert _worker_seen(message) == WorkerSeen(WorkerId("w"), "1", room)
