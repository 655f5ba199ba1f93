"""A lease that nobody reads under is given back, whatever became of its reader."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any, cast

import msgspec
import pytest

from dataplane.blocks.kept import KeptBlocks
from dataplane.ends.reader import PlaneReader
from schemas import subjects
from schemas.block import BLOCK_HASH_BYTES, split_hashes
from schemas.ids import BlockHash, LeaseId, RequestId, WorkerId
from schemas.kv import LeaseGranted, ReadEnd, RequestLease, ReturnLease
from schemas.request import RefusalReason, Refused
from schemas.worker import DescribeFleet, FleetDescribed
from services.bus.memory import MemoryBroker, MemoryBus
from services.bus.typed import Received, TypedBus
from services.holder.core.attempt import KVRead
from services.holder.core.content import ReadOutcome
from services.holder.core.events import ReadEnded, ReadStarted
from services.holder.kv.peers import Peers
from services.holder.kv.reads import KVReads, NotGrantedError, ReaderSettings
from services.holder.outbox import Outbox
from services.runtime import now_ms
from services.telemetry import Telemetry
from services.times import WorkerTimes
from tests.credentials import CREDENTIALS
from tests.wire.examples import LOAD
from tests.worker.worker_cases import lease_of

HOLDER, READER = WorkerId("p-0"), WorkerId("d-0")
BLOCK_SIZE = 8
REQUEST = RequestLease(
    request_id=RequestId("r"), attempt=1, deadline_ms=9, reader=READER, fingerprint="f", first_block=0,
    block_hashes=bytes(2 * BLOCK_HASH_BYTES),
)  # fmt: skip
GRANTED = LeaseGranted(
    request_id=REQUEST.request_id, attempt=1, deadline_ms=9, worker_id=HOLDER, lease_id=LeaseId("l"), epoch=1,
    lease_ms=5_000, ticket="", first_token=0, num_tokens=2 * BLOCK_SIZE,
    incarnation="p-0-1",
)  # fmt: skip


def request() -> RequestLease:
    return msgspec.structs.replace(REQUEST, answer_within_ms=5_000)


def reads_of(bus: TypedBus, outbox: Outbox, tasks: asyncio.TaskGroup) -> KVReads:
    times = WorkerTimes(coming_again_s=0.001)
    settings = ReaderSettings(reader_id=READER, block_size=BLOCK_SIZE, carrier="tcp", base_s=1.0, times=times)
    reader = cast("PlaneReader", None)  # nothing is read here
    return KVReads(
        settings, bus, outbox, reader, Peers(bus, times), CREDENTIALS, Telemetry(READER), tasks,
        record=lambda *_: None, contents=None, kept=KeptBlocks(1),
    )  # fmt: skip


@dataclass
class Holder:
    reply: LeaseGranted | Refused = GRANTED
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    answers: asyncio.Event = field(default_factory=asyncio.Event)
    returned: "asyncio.Queue[ReturnLease]" = field(default_factory=lambda: asyncio.Queue[ReturnLease]())

    async def on_lease(self, _: Received[RequestLease]) -> LeaseGranted | Refused:
        self.asked.set()
        await self.answers.wait()
        return self.reply

    def on_returned(self, received: Received[ReturnLease]) -> None:
        self.returned.put_nowait(received.message)


async def on_fleet(_: Received[DescribeFleet]) -> FleetDescribed:
    info = msgspec.structs.replace(LOAD.worker, worker_id=HOLDER, incarnation=GRANTED.incarnation)
    return FleetDescribed(policy="", ready=True, workers=(msgspec.structs.replace(LOAD, worker=info),))


async def with_holder(run: Callable[[KVReads, Holder], Awaitable[None]], timeout_s: float = 30) -> None:
    broker, holder = MemoryBroker(), Holder()
    theirs, ours = (TypedBus(MemoryBus(broker), name) for name in ("holder", "reader"))
    async with asyncio.timeout(timeout_s), asyncio.TaskGroup() as tasks:
        await theirs.serve(tasks, subjects.LEASE, (HOLDER, "*"), holder.on_lease)
        await theirs.serve(tasks, subjects.FLEET, (), on_fleet)
        await theirs.listen(tasks, subjects.RETURNED, (HOLDER, "*"), holder.on_returned)
        outbox = Outbox(ours, READER)
        tasks.create_task(outbox.run())
        await run(reads_of(ours, outbox, tasks), holder)
        outbox.close()
        await outbox.sent.wait()
        await ours.close()
        await theirs.close()


async def test_a_read_that_ends_well_gives_nothing_back() -> None:
    async def run(reads: KVReads, holder: Holder) -> None:
        holder.answers.set()
        async with reads.lease(request(), HOLDER) as granted:
            assert granted.lease_id == GRANTED.lease_id
        async with reads.lease(request(), HOLDER):
            assert holder.returned.empty()

    await with_holder(run)


@pytest.mark.parametrize("error", [ValueError, asyncio.CancelledError])
async def test_a_read_that_fails_gives_back(error: type[BaseException]) -> None:
    async def run(reads: KVReads, holder: Holder) -> None:
        holder.answers.set()
        with pytest.raises(error):
            async with reads.lease(request(), HOLDER):
                raise error
        assert (await holder.returned.get()).lease_id == GRANTED.lease_id

    await with_holder(run)


async def test_who_is_stopped_while_it_asks_gives_back_what_comes() -> None:
    async def run(reads: KVReads, holder: Holder) -> None:
        async def read() -> None:
            async with reads.lease(request(), HOLDER):
                raise AssertionError("it was stopped before")

        reading = asyncio.create_task(read())
        await holder.asked.wait()
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        holder.answers.set()
        back = await holder.returned.get()
        assert (back.lease_id, back.reader) == (GRANTED.lease_id, READER)

    await with_holder(run)


async def test_what_was_not_asked_for_is_given_back_unread() -> None:
    async def run(reads: KVReads, holder: Holder) -> None:
        holder.answers.set()
        holder.reply = msgspec.structs.replace(GRANTED, num_tokens=3 * BLOCK_SIZE)
        with pytest.raises(NotGrantedError, match="unasked"):
            async with reads.lease(request(), HOLDER):
                raise AssertionError
        assert (await holder.returned.get()).lease_id == GRANTED.lease_id

    await with_holder(run)


async def test_a_refusal_keeps_its_reason() -> None:
    async def run(reads: KVReads, holder: Holder) -> None:
        holder.answers.set()
        holder.reply = Refused(
            request_id=REQUEST.request_id, attempt=1, deadline_ms=9, reason=RefusalReason.GONE, detail="no"
        )
        with pytest.raises(NotGrantedError) as raised:
            async with reads.lease(request(), HOLDER):
                raise AssertionError
        assert raised.value.reason == RefusalReason.GONE
        assert holder.returned.empty()

    await with_holder(run)


def wanted_read() -> KVRead:
    hashes = (BlockHash(bytes(BLOCK_HASH_BYTES)), BlockHash(bytes([1]) * BLOCK_HASH_BYTES))
    return KVRead((RequestId("r"), 1), HOLDER, lease_of(0, hashes, now_ms() + 5_000), ())


async def test_a_read_whose_lease_is_refused_ends_with_the_reason_and_is_recorded() -> None:
    async def run(reads: KVReads, holder: Holder) -> None:
        holder.answers.set()
        holder.reply = Refused(
            request_id=REQUEST.request_id, attempt=1, deadline_ms=9, reason=RefusalReason.GONE, detail="no"
        )
        ended: asyncio.Queue[ReadEnded] = asyncio.Queue()
        recorded: list[ReadEnded] = []
        reads.on_event = lambda event: ended.put_nowait(event) if isinstance(event, ReadEnded) else None
        reads.record = lambda ended, *_: recorded.append(ended)
        read = wanted_read()
        reads.begin_read(read)
        event = await ended.get()
        assert event.read is read and event.refusal == RefusalReason.GONE and event.outcome.num_landed_tokens == 0
        assert recorded == [event]

    await with_holder(run)


async def test_every_read_that_was_started_ends_once_however_it_is_stopped() -> None:
    """Before its first step, while it waits for its lease, or when nothing may begin any more."""

    async def run(reads: KVReads, holder: Holder) -> None:
        ended: list[KVRead] = []
        reads.on_event = lambda event: ended.append(event.read)
        before, waiting, late = wanted_read(), wanted_read(), wanted_read()
        reads.begin_read(waiting)
        await holder.asked.wait()
        reads.begin_read(before)
        reads.end_reads(before)
        await reads.close()
        reads.begin_read(late)
        await asyncio.sleep(0)
        assert {id(read) for read in ended} == {id(read) for read in (before, waiting, late)} and len(ended) == 3
        holder.answers.set()
        assert (await holder.returned.get()).lease_id == GRANTED.lease_id, "it came for nobody"

    await with_holder(run)


async def test_a_read_has_ended_before_its_lease_is_given_back() -> None:
    """Whoever goes on with the next source does not wait for a bus that takes nothing."""

    async def run(reads: KVReads, holder: Holder) -> None:
        publish, takes = reads.bus.publish, asyncio.Event()

        async def slowly(*message: Any) -> None:
            await takes.wait()
            await publish(*message)

        reads.bus.publish = slowly  # type: ignore[method-assign]
        ended: asyncio.Queue[ReadStarted | ReadEnded] = asyncio.Queue()
        reads.on_event = ended.put_nowait
        holder.answers.set()
        reads.begin_read(wanted_read())  # it breaks: there is nobody who reads
        event = await ended.get()
        assert isinstance(event, ReadEnded) and event.end is ReadEnd.OTHER and holder.returned.empty()
        takes.set()
        assert (await holder.returned.get()).lease_id == GRANTED.lease_id

    await with_holder(run)


async def test_nothing_is_read_from_an_incarnation_that_nobody_knows() -> None:
    """The lease that it granted is given back."""

    async def run(reads: KVReads, holder: Holder) -> None:
        holder.answers.set()
        holder.reply = msgspec.structs.replace(GRANTED, incarnation="a stranger's")
        deadline_ms = now_ms() + 60_000
        lease = lease_of(0, [BlockHash(bytes(BLOCK_HASH_BYTES))] * 2, deadline_ms)
        ended = await reads.carry_out(KVRead((RequestId("r"), 1), HOLDER, lease, ()))
        assert ended.end is ReadEnd.UNKNOWN and "a stranger's" in ended.detail
        assert (await holder.returned.get()).lease_id == GRANTED.lease_id

    await with_holder(run)


# What the holder is still computing.


def wanted(deadline_ms: int = 0) -> KVRead:
    hashes = tuple(BlockHash(bytes([number]) * BLOCK_HASH_BYTES) for number in range(6))
    lease = lease_of(2, hashes, deadline_ms or now_ms() + 60_000)
    return KVRead((RequestId("r"), 1), HOLDER, lease, (), 2 * BLOCK_SIZE)


def part(first: int, num_blocks: int, *, more: bool = False) -> ReadEnded:
    """A read from block `first` on that has brought so many blocks."""
    outcome = ReadOutcome((first + num_blocks) * BLOCK_SIZE, 10 * num_blocks, "tcp", is_whole=True, has_more=more)
    return ReadEnded(wanted(), outcome)


def refused(end: ReadEnd, reason: RefusalReason) -> ReadEnded:
    return ReadEnded(wanted(), ReadOutcome(0), end, "no", reason)


COMING = refused(ReadEnd.IN_FLIGHT, RefusalReason.IN_FLIGHT)
GONE = refused(ReadEnd.REFUSED, RefusalReason.GONE)


@pytest.mark.parametrize(
    ("script", "num_landed", "asked_from", "end"),
    [
        ([part(2, 6)], 8, [2], ReadEnd.LANDED),
        ([COMING, part(2, 2, more=True), COMING, part(4, 4)], 8, [2, 2, 4, 4], ReadEnd.LANDED),
        ([COMING, COMING, GONE], 0, [2, 2, 2], ReadEnd.REFUSED),
        ([part(2, 1, more=True), GONE], 3, [2, 3], ReadEnd.LANDED),
        ([part(2, 1, more=True), COMING, GONE], 3, [2, 3, 3], ReadEnd.LANDED),
        ([GONE], 0, [2], ReadEnd.REFUSED),
    ],
)
async def test_what_is_still_computed_is_asked_for_again(
    monkeypatch: pytest.MonkeyPatch, script: list[ReadEnded], num_landed: int, asked_from: list[int], end: ReadEnd
) -> None:
    asked: list[int] = []

    async def run(reads: KVReads, holder: Holder) -> None:
        async def carry_out(read: KVRead) -> ReadEnded:
            assert isinstance(read.lease, RequestLease)
            assert read.first_token == read.lease.first_block * BLOCK_SIZE
            assert len(split_hashes(read.lease.block_hashes)) == 8 - read.lease.first_block
            asked.append(read.lease.first_block)
            return replace(script[len(asked) - 1], read=read)

        monkeypatch.setattr(reads, "carry_out", carry_out)
        ended: asyncio.Future[ReadEnded] = asyncio.get_running_loop().create_future()
        reads.on_event = lambda event: ended.set_result(cast("ReadEnded", event))
        read = wanted()
        reads.begin_read(read)
        event = await ended
        assert event.end is end and event.outcome.num_landed_tokens == num_landed * BLOCK_SIZE
        assert event.outcome.num_bytes == (10 * (num_landed - 2) if num_landed else 0)
        assert event.read is read

    await with_holder(run)
    assert asked == asked_from


async def test_a_holder_that_says_it_comes_for_ever_is_given_up() -> None:
    async def run(reads: KVReads, holder: Holder) -> None:
        holder.answers.set()
        holder.reply = Refused(
            request_id=REQUEST.request_id, attempt=1, deadline_ms=9, reason=RefusalReason.IN_FLIGHT, detail="later",
            retry_after_ms=0,
        )  # fmt: skip
        ended: asyncio.Future[ReadEnded] = asyncio.get_running_loop().create_future()
        reads.on_event = lambda event: ended.set_result(cast("ReadEnded", event))
        reads.begin_read(wanted(now_ms() + 400))
        event = await ended
        assert event.end is ReadEnd.IN_FLIGHT and event.refusal is RefusalReason.IN_FLIGHT

    await with_holder(run)
