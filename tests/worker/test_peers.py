"""A reader connects to where an incarnation said that it serves when it joined, and to nothing else."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import msgspec
import pytest

from schemas import subjects
from schemas.handoff import Endpoint
from schemas.ids import HandoffId, RequestId, WorkerId
from schemas.worker import DescribeFleet, FleetDescribed, LeftReason, WorkerInfo, WorkerJoined, WorkerLeft
from services.bus.memory import MemoryBroker, MemoryBus
from services.bus.typed import Received, TypedBus
from services.holder.core.attempt import AttemptTimes
from services.holder.core.events import AttemptAsked
from services.holder.core.leases import LeaseTable
from services.holder.kv.peers import Peers
from services.times import WorkerTimes
from services.worker.core import AttemptCore
from tests.wire.examples import ENDPOINT, LOAD
from tests.worker import worker_cases as case

HOLDER = WorkerId("p-0")
ELSEWHERE = msgspec.structs.replace(ENDPOINT, host="elsewhere", port=1)


def info(incarnation: str, endpoint: Endpoint = ENDPOINT) -> WorkerInfo:
    return msgspec.structs.replace(LOAD.worker, worker_id=HOLDER, incarnation=incarnation, endpoint=endpoint)


@dataclass
class World:
    peers: Peers
    theirs: TypedBus
    known: list[WorkerInfo] = field(default_factory=list[WorkerInfo])
    """To the scheduler."""
    num_asked: int = 0

    async def joins(self, worker: WorkerInfo) -> None:
        await self.theirs.publish(subjects.JOINED, (HOLDER,), WorkerJoined(worker=worker))
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    async def describe(self, _: Received[DescribeFleet]) -> FleetDescribed:
        self.num_asked += 1
        loads = tuple(msgspec.structs.replace(LOAD, worker=worker) for worker in self.known)
        return FleetDescribed(policy="", ready=True, workers=loads)


@asynccontextmanager
async def world() -> AsyncGenerator[World]:
    broker = MemoryBroker()
    theirs, ours = (TypedBus(MemoryBus(broker), name) for name in ("theirs", "ours"))
    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        made = World(Peers(ours, WorkerTimes()), theirs)
        await theirs.serve(tasks, subjects.FLEET, (), made.describe)
        await made.peers.listen(tasks)
        while not made.num_asked:
            await asyncio.sleep(0)
        yield made
        await ours.close()
        await theirs.close()


async def test_what_an_incarnation_said_first_stands() -> None:
    async with world() as heard:
        assert not heard.peers.role_of(HOLDER), "nobody asks who it is for that"
        await heard.joins(info("1"))
        assert heard.peers.role_of(HOLDER) == info("1").role
        await heard.joins(info("1", ELSEWHERE))
        assert await heard.peers.endpoint(HOLDER, "1") == ENDPOINT
        await heard.joins(info("2", ELSEWHERE))
        assert await heard.peers.endpoint(HOLDER, "2") == ELSEWHERE
        assert await heard.peers.endpoint(HOLDER, "1") is None, "that one is over"


async def test_whom_it_has_not_heard_the_scheduler_knows_or_nobody() -> None:
    async with world() as heard:
        heard.known.append(info("1"))
        assert await heard.peers.endpoint(HOLDER, "1") == ENDPOINT
        num_asked = heard.num_asked
        assert await heard.peers.endpoint(HOLDER, "1") == ENDPOINT and heard.num_asked == num_asked
        for _ in range(100):
            assert await heard.peers.endpoint(WorkerId("stranger"), "1") is None
        assert heard.num_asked < num_asked + 50, "the scheduler is not asked for every stranger"


async def test_who_has_left_is_forgotten() -> None:
    async with world() as heard:
        await heard.joins(info("1"))
        heard.peers.left(WorkerLeft(worker_id=HOLDER, incarnation="2", reason=LeftReason.DIED))
        assert await heard.peers.is_known(HOLDER)
        heard.peers.left(WorkerLeft(worker_id=HOLDER, incarnation="1", reason=LeftReason.DIED))
        assert not await heard.peers.is_known(HOLDER)


DISAGREEING = (
    {"source_worker": WorkerId("p9")}, {"target_worker": WorkerId("d9")}, {"request_id": RequestId("r9")},
    {"attempt": 2},
)  # fmt: skip


@pytest.mark.parametrize("change", DISAGREEING)
def test_an_event_of_a_hand_over_agrees_with_its_reservation(change: dict[str, object]) -> None:
    """The name of a hand-over may be heard by anybody: whose it is must be right as well."""
    decode = AttemptCore(case.limits(case.DECODE), case.block_cache(), LeaseTable())
    prefill = AttemptCore(case.limits(case.PREFILL), case.block_cache(), LeaseTable())
    case.decide(decode, AttemptAsked(case.reserve(), AttemptTimes()), 0)
    case.decide(prefill, AttemptAsked(case.run_prefill(), AttemptTimes()), 0)
    for core, events in ((decode, (case.offered(), case.aborted())), (prefill, (case.reserved(), case.aborted()))):
        before = {key: (attempt.stage, attempt.read) for key, attempt in core.records.items()}
        for event in events:
            assert case.decide(core, msgspec.structs.replace(event, **change), 0) == []
        assert core.num_unfit == 2
        assert {key: (attempt.stage, attempt.read) for key, attempt in core.records.items()} == before
    assert case.decide(decode, case.offered(), 0), "the right one is taken"
    unknown = msgspec.structs.replace(case.offered(), handoff_id=HandoffId("r9-1"), **change)
    assert case.decide(decode, unknown, 0) and decode.num_unfit == 2, "of an unknown one its sender is told"
