"""The scheduler on a bus: workers that die, stop and come back, two schedulers at once."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from schemas import subjects
from schemas.directory import BlocksLocated, LocateBlocks
from schemas.request import Placement, PlaceRequest, Refused
from schemas.worker import (
    PingWorker,
    WorkerAlive,
    WorkerJoined,
    WorkerLeft,
    WorkerRole,
)
from services.bus.base import Bus
from services.bus.fleet import ask_fleet
from services.bus.memory import MemoryBroker, MemoryBus
from services.bus.typed import Received, TypedBus
from services.config import MeshConfig, SchedulerConfig, WorkerConfig
from services.scheduler.placement.hints import Hints
from services.scheduler.service import run_scheduler
from services.telemetry import Telemetry
from tests.directory.test_directory_service import load_of, question
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.virtual_time

QUICK = MeshConfig(
    scheduler=SchedulerConfig(ping_interval_ms=20, suspect_after_ms=200, silent_after_ms=1_300),
    worker=WorkerConfig(fence_after_ms=500),
)


class FakeWorker:
    """Says twice in a while that it lives, and answers pings: unless it is stopped."""

    def __init__(self, connection: Bus, worker_id: str, role: WorkerRole) -> None:
        self.load = load_of(worker_id, role)
        self.bus = TypedBus(connection, "worker")
        self.going = asyncio.Event()
        self.going.set()
        self.num_pings = 0

    async def start(self, tasks: asyncio.TaskGroup) -> None:
        await self.bus.serve(tasks, subjects.PING, (self.load.worker.worker_id,), self._answer)
        await self.bus.publish(subjects.JOINED, (self.load.worker.worker_id,), WorkerJoined(worker=self.load.worker))
        await self.say()

    async def say(self) -> None:
        await self.bus.publish(subjects.LOAD, (self.load.worker.worker_id,), self.load)

    async def kill(self) -> None:
        await self.bus.close()

    async def _answer(self, received: Received[PingWorker]) -> WorkerAlive:
        self.num_pings += 1
        await self.going.wait()
        worker = self.load.worker
        return WorkerAlive(worker_id=worker.worker_id, incarnation=worker.incarnation)


class Client:
    """Hears who has left, and asks the scheduler."""

    def __init__(self, connection: Bus) -> None:
        self.bus = TypedBus(connection, "gateway")
        self.left: asyncio.Queue[WorkerLeft] = asyncio.Queue()

    async def start(self, tasks: asyncio.TaskGroup) -> None:
        await self.bus.listen(tasks, subjects.LEFT, ("*",), lambda heard: self.left.put_nowait(heard.message))

    async def next_left(self) -> tuple[str, str, str]:
        left = await asyncio.wait_for(self.left.get(), PATIENCE_S)
        return left.worker_id, left.incarnation, left.reason

    async def place(self) -> Placement | Refused:
        return await self.bus.ask(subjects.PLACE, (), question(list(range(100))), PATIENCE_S)

    async def workers(self) -> set[str]:
        reply = await ask_fleet(self.bus, PATIENCE_S)
        return {load.worker.worker_id for load in reply.workers}


@asynccontextmanager
async def mesh(num_schedulers: int = 1) -> AsyncIterator[tuple[asyncio.TaskGroup, MemoryBroker, Client]]:
    """Schedulers that place without a directory, and a client. Ends all that was started in its group."""
    broker = MemoryBroker()
    async with asyncio.timeout(4 * PATIENCE_S), asyncio.TaskGroup() as tasks:
        stops = [asyncio.Event() for _ in range(num_schedulers)]
        for stop in stops:
            ready = asyncio.Event()
            tasks.create_task(run_scheduler(QUICK, MemoryBus(broker), Telemetry("scheduler"), stop, ready.set))
            await ready.wait()
        client = Client(MemoryBus(broker))
        await client.start(tasks)
        yield tasks, broker, client
        for stop in stops:
            stop.set()
        await client.bus.close()


async def keep_saying(*workers: FakeWorker, every_s: float = 0.1) -> None:
    while True:
        for worker in workers:
            if worker.going.is_set():
                await worker.say()
        await asyncio.sleep(every_s)


async def pinged(*workers: FakeWorker) -> None:
    """Return once each has answered a ping: pinging again proves that the answer to the one before was heard."""
    counts = [worker.num_pings for worker in workers]
    await until(lambda: all(worker.num_pings >= count + 3 for worker, count in zip(workers, counts, strict=True)))


@pytest.mark.parametrize("num_schedulers", [1, 2])
async def test_a_killed_worker_is_declared_dead_and_its_work_goes_elsewhere(num_schedulers: int) -> None:
    async with mesh(num_schedulers) as (tasks, broker, client):
        roles: list[tuple[str, WorkerRole]] = [("p0", "prefill"), ("p1", "prefill"), ("d0", "decode"), ("s0", "store")]
        workers = [FakeWorker(MemoryBus(broker), name, role) for name, role in roles]
        for worker in workers:
            await worker.start(tasks)
        await pinged(*workers)
        await workers[0].kill()
        await workers[3].kill()
        died: set[tuple[str, str, str]] = set()  # said by one scheduler, or by both
        while len(died) < 2:
            died.add(await client.next_left())
        assert died == {("p0", "1", "died"), ("s0", "1", "died")}
        for _ in range(4):
            placement = await client.place()
            assert isinstance(placement, Placement) and placement.prefill_worker == "p1"
            assert await client.workers() == {"p1", "d0"}
        for worker in (workers[1], workers[2]):
            await worker.kill()


async def test_a_worker_that_stops_is_declared_silent_and_heard_again_only_as_another_incarnation() -> None:
    async with mesh() as (tasks, broker, client):
        stopping, others = FakeWorker(MemoryBus(broker), "p0", "prefill"), FakeWorker(MemoryBus(broker), "d0", "decode")
        for worker in (stopping, others):
            await worker.start(tasks)
        saying = tasks.create_task(keep_saying(stopping, others))
        await pinged(stopping, others)
        stopping.going.clear()
        assert await client.next_left() == ("p0", "1", "silent")
        assert isinstance(await client.place(), Refused)
        stopping.going.set()
        assert await client.next_left() == ("p0", "1", "silent"), "said again, as it speaks"
        assert isinstance(await client.place(), Refused)
        stopping.load = load_of("p0", "prefill", "2")
        await stopping.say()
        while isinstance(await client.place(), Refused):
            await asyncio.sleep(0.01)
        saying.cancel()
        for worker in (stopping, others):
            await worker.kill()


async def test_one_of_two_schedulers_is_enough() -> None:
    broker, stops = MemoryBroker(), [asyncio.Event(), asyncio.Event()]
    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as tasks:
        client = Client(MemoryBus(broker))
        await client.start(tasks)
        workers = [FakeWorker(MemoryBus(broker), "p0", "prefill"), FakeWorker(MemoryBus(broker), "d0", "decode")]
        first = tasks.create_task(run_scheduler(QUICK, MemoryBus(broker), Telemetry("scheduler"), stops[0]))
        await asyncio.sleep(0)
        for worker in workers:
            await worker.start(tasks)
        saying = tasks.create_task(keep_saying(*workers))
        assert isinstance(await client.place(), Placement)
        # The second one starts with nothing, and knows the fleet from its loads.
        tasks.create_task(run_scheduler(QUICK, MemoryBus(broker), Telemetry("scheduler"), stops[1]))
        stops[0].set()
        await first
        while isinstance(await client.place(), Refused):
            await asyncio.sleep(0.01)
        assert await client.workers() == {"p0", "d0"}
        saying.cancel()
        stops[1].set()
        for worker in workers:
            await worker.kill()
        await client.bus.close()


class StuckBus(MemoryBus):
    """Cannot even send a question."""

    async def request(self, subject: str, payload: bytes, headers: object, timeout_s: float) -> object:  # type: ignore[override]
        await asyncio.Event().wait()
        raise AssertionError


async def test_a_placement_waits_for_no_directory_that_hangs() -> None:
    hints = Hints(TypedBus(StuckBus(), "scheduler"), 0.05)
    assert (await asyncio.wait_for(hints.ask(ask_with_blocks()), PATIENCE_S)).holders is None
    async with mesh() as (tasks, broker, client):
        hanging = TypedBus(MemoryBus(broker), "directory")
        asked = asyncio.Event()

        async def never(received: Received[LocateBlocks]) -> BlocksLocated:
            asked.set()
            return await asyncio.get_running_loop().create_future()

        await hanging.serve(tasks, subjects.LOCATE, (), never)
        workers = [FakeWorker(MemoryBus(broker), "p0", "prefill"), FakeWorker(MemoryBus(broker), "d0", "decode")]
        for worker in workers:
            await worker.start(tasks)
        assert isinstance(await client.place(), Placement) and asked.is_set()
        for task in asyncio.all_tasks():
            if task.get_name() == f"answer {subjects.LOCATE.of()}":
                task.cancel()
        await hanging.close()
        for worker in workers:
            await worker.kill()


def ask_with_blocks() -> PlaceRequest:
    return question(list(range(100)))
