"""The typed bus: decoded once, counted and dropped where that fails."""

import asyncio
import json

import msgspec
import pytest

from schemas import subjects
from schemas.directory import BlocksStored, Inventory, LocateBlocks, ReadInventory
from schemas.ids import RequestId, WorkerId
from schemas.message import decode, encode
from schemas.worker import LeftReason, WorkerDraining, WorkerLeft
from services.bus.base import Bus, BusClosedError, BusError, NoRespondersError, RequestTimedOutError
from services.bus.typed import SCHEMA_HEADER, TRACEPARENT_HEADER, Received, TypedBus
from services.runtime import now_ms
from tests.bus.conftest import Connect
from tests.waiting import until

LONG_S = 30.0
WORKER = WorkerId("w0")
TRACEPARENT = f"00-{'1' * 32}-{'2' * 16}-01"


def left(incarnation: str) -> WorkerLeft:
    return WorkerLeft(worker_id=WORKER, incarnation=incarnation, reason=LeftReason.STOPPED)


class Ear:
    """Keeps what a listener was handed."""

    def __init__(self) -> None:
        self.heard: list[Received[WorkerLeft]] = []
        self._arrived = asyncio.Event()

    def hear(self, received: Received[WorkerLeft]) -> None:
        self.heard.append(received)
        self._arrived.set()

    async def wait_for(self, reason: str) -> None:
        async with asyncio.timeout(LONG_S):
            while not self.heard or self.heard[-1].message.incarnation != reason:
                self._arrived.clear()
                await self._arrived.wait()


async def serve_inventory(bus: TypedBus, tasks: asyncio.TaskGroup) -> None:
    async def answer(received: Received[ReadInventory]) -> Inventory:
        block_hashes = bytes(received.message.offset)
        return Inventory(worker_id=WORKER, incarnation="a", sequence=1, block_hashes=block_hashes)

    await bus.serve(tasks, subjects.INVENTORY, (WORKER,), answer)
    await bus.connection.flush()


async def test_a_message_arrives_typed_with_trace_and_subject(connect: Connect) -> None:
    listener, speaker, ear = TypedBus(await connect(), "l"), TypedBus(await connect(), "s"), Ear()
    async with asyncio.TaskGroup() as tasks:
        await listener.listen(tasks, subjects.LEFT, ("*",), ear.hear)
        await listener.connection.flush()
        await speaker.publish(subjects.LEFT, (WORKER,), left("done"), TRACEPARENT)
        await ear.wait_for("done")
        await listener.close()
    [received] = ear.heard
    assert received == Received(left("done"), TRACEPARENT, "mesh.v1.worker.w0.left")


@pytest.mark.parametrize(
    "junk",
    [
        b"", b"{", b"null", b"[]", b"\xff\xfe", b'{"type":"WorkerLeft"}', b'{"type":"Nonsense"}', b"[" * 100_000,
        b'{"type":"WorkerLeft","worker_id":1,"incarnation":"a","reason":"r"}',
        encode(WorkerDraining(worker_id=WORKER, incarnation="a")),
    ],
)  # fmt: skip
async def test_junk_is_counted_and_dropped_and_good_messages_go_on(connect: Connect, junk: bytes) -> None:
    listener, speaker, ear = TypedBus(await connect(), "l"), TypedBus(await connect(), "s"), Ear()
    async with asyncio.TaskGroup() as tasks:
        await listener.listen(tasks, subjects.LEFT, ("*",), ear.hear)
        await listener.connection.flush()
        await speaker.publish(subjects.LEFT, (WORKER,), left("one"))
        await speaker.connection.publish(subjects.LEFT.of(WORKER), junk, {})
        await speaker.publish(subjects.LEFT, (WORKER,), left("two"))
        await ear.wait_for("two")
        await listener.close()
    assert [received.message.incarnation for received in ear.heard] == ["one", "two"]
    assert listener.num_dropped == 1


async def test_the_headers_name_schema_and_trace_and_what_is_left_crosses_the_bus(bus: Bus) -> None:
    ear = await bus.subscribe("mesh.v1.>")
    await bus.flush()
    locate = LocateBlocks(request_id=RequestId("r"), attempt=2, deadline_ms=now_ms() + 60_000, block_hashes=b"")
    typed = TypedBus(bus, "s")
    asking = asyncio.create_task(typed.ask(subjects.LOCATE, (), locate, LONG_S, TRACEPARENT))
    async with asyncio.timeout(LONG_S):
        delivery = await anext(aiter(ear))
    assert delivery.headers[SCHEMA_HEADER] == "LocateBlocks"
    assert delivery.headers[TRACEPARENT_HEADER] == TRACEPARENT
    told = json.loads(delivery.payload)
    assert 0 < told["left_ms"] <= 60_000, "a duration: of the requester's clock its receiver knows nothing"
    assert msgspec.structs.replace(decode(delivery.payload, LocateBlocks), deadline_ms=locate.deadline_ms) == locate
    await delivery.respond(b'{"type":"BlocksLocated"}', {})
    with pytest.raises(BusError, match="unreadable reply"):
        await asking
    assert typed.num_dropped == 1


async def test_a_request_gets_its_typed_reply_and_junk_gets_none(connect: Connect) -> None:
    server, client = TypedBus(await connect(), "server"), TypedBus(await connect(), "client")
    async with asyncio.TaskGroup() as tasks:
        await serve_inventory(server, tasks)
        with pytest.raises(RequestTimedOutError):
            await client.connection.request(subjects.INVENTORY.of(WORKER), b"junk", {}, 0.05)
        await client.connection.publish(subjects.INVENTORY.of(WORKER), encode(ReadInventory()), {})
        asked = [client.ask(subjects.INVENTORY, (WORKER,), ReadInventory(offset=n), LONG_S) for n in range(50)]
        replies = await asyncio.gather(*asked)
        await server.close()
    assert [len(reply.block_hashes) for reply in replies] == list(range(50))
    assert server.num_dropped == 1


async def test_a_reply_that_does_not_fit_costs_one_timeout_and_no_service(connect: Connect) -> None:
    server, client = TypedBus(await connect(), "server"), TypedBus(await connect(), "client")
    async with asyncio.TaskGroup() as tasks:
        await serve_inventory(server, tasks)
        with pytest.raises(RequestTimedOutError):
            await client.ask(subjects.INVENTORY, (WORKER,), ReadInventory(offset=9_000_000), 0.3)
        await client.ask(subjects.INVENTORY, (WORKER,), ReadInventory(), LONG_S)
        await server.close()


async def test_nobody_serves(bus: Bus) -> None:
    with pytest.raises(NoRespondersError):
        await TypedBus(bus, "c").ask(subjects.INVENTORY, ("nobody",), ReadInventory(), LONG_S)


async def test_a_message_on_the_wrong_subject_is_our_own_bug(bus: Bus) -> None:
    stored = BlocksStored(worker_id=WORKER, incarnation="a", sequence=1, block_hashes=b"")
    with pytest.raises(AssertionError, match="does not belong"):
        await TypedBus(bus, "c").publish(subjects.LEFT, (WORKER,), stored)


async def test_closing_the_bus_ends_its_tasks(bus: Bus) -> None:
    typed, ear = TypedBus(bus, "d"), Ear()
    async with asyncio.timeout(LONG_S), asyncio.TaskGroup() as tasks:
        await typed.listen(tasks, subjects.LEFT, ("*",), ear.hear)
        await serve_inventory(typed, tasks)
        await typed.close()
    with pytest.raises(BusClosedError):
        await typed.publish(subjects.LEFT, (WORKER,), left("late"))


async def test_so_many_answers_are_in_progress_and_no_more(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.bus.limits.MAX_ANSWERING", 3)
    server, client = TypedBus(await connect(), "server"), TypedBus(await connect(), "client")
    may_answer, num_begun = asyncio.Event(), 0

    async def answer(received: Received[ReadInventory]) -> Inventory:
        nonlocal num_begun
        num_begun += 1
        await may_answer.wait()
        return Inventory(worker_id=WORKER, incarnation="a", sequence=1, block_hashes=b"")

    async with asyncio.TaskGroup() as tasks:
        await server.serve(tasks, subjects.INVENTORY, (WORKER,), answer)
        await server.connection.flush()
        asked = [
            tasks.create_task(client.ask(subjects.INVENTORY, (WORKER,), ReadInventory(), LONG_S)) for _ in range(3)
        ]
        await until(lambda: num_begun == 3)
        with pytest.raises(RequestTimedOutError):
            await client.ask(subjects.INVENTORY, (WORKER,), ReadInventory(), 0.3)
        may_answer.set()
        assert len(await asyncio.gather(*asked)) == 3
        await client.ask(subjects.INVENTORY, (WORKER,), ReadInventory(), LONG_S)
        await server.close()
    assert server.num_dropped == 1
