"""The story of a request as people hear it, and what they are told when they ask where one is."""

import asyncio
from dataclasses import dataclass, field

import pytest

from schemas import subjects
from schemas.ids import GatewayId, RequestId
from schemas.message import decode
from schemas.observe import (
    RequestAccepted,
    RequestCancelled,
    RequestDescribed,
    RequestFailed,
    RequestFinished,
    RequestPlaced,
    RequestResumed,
)
from schemas.request import RefusalReason, SamplingParams
from services.bus.base import BusError
from services.bus.memory import MemoryBroker, MemoryBus
from services.bus.typed import TypedBus
from services.config import MeshConfig
from services.gateway import limits
from services.gateway.observe.story import Stories
from services.gateway.request.core import RequestCore
from services.gateway.request.events import Finish
from services.gateway.request.job import BlockKey, Job, pack_prompt
from services.gateway.request.live import LiveRequest, Published
from services.gateway.request.mailbox import Mailbox
from services.presence import FailureDetector
from services.runtime import now_ms
from services.times import GatewayTimes, PresenceTimes
from tests.gateway.conftest import Rig
from tests.gateway.fake_mesh import Conduct
from tests.gateway.test_failures import C, body
from tests.waiting import until

ENDS = {"finished", "failed", "cancelled"}
ASK_S = 20.0


@dataclass
class Listener:
    """What `nats sub 'mesh.v1.request.>'` shows."""

    heard: list[tuple[str, str, bytes, str]] = field(default_factory=list)
    """Request, last part of the subject, payload, traceparent."""

    async def start(self, rig: Rig) -> "Listener":
        subscription = await rig.mesh.connection.subscribe("mesh.v1.request.>")

        async def listen() -> None:
            async for delivery in subscription:
                _, _, _, request_id, what = delivery.subject.split(".")
                if what not in ("cancel", "status", "sought"):
                    traceparent = delivery.headers.get("traceparent", "")
                    self.heard.append((request_id, what, delivery.payload, traceparent))

        rig.mesh.tasks.create_task(listen())
        return self

    @property
    def parts(self) -> list[str]:
        return [what for _, what, _, _ in self.heard]

    async def ended(self, num: int = 1) -> list[str]:
        await until(lambda: sum(part in ENDS for part in self.parts) >= num)
        return self.parts

    def payload(self, what: str) -> bytes:
        return next(payload for _, part, payload, _ in self.heard if part == what)


async def where(rig: Rig, request_id: str, payload: bytes = b"") -> RequestDescribed:
    """Ask as a stock client does."""
    reply = await rig.mesh.connection.request(subjects.REQUEST_STATUS.of(request_id), payload, {}, ASK_S)
    return decode(reply.payload, RequestDescribed)


async def test_a_request_that_finishes(rig: Rig) -> None:
    listener = await Listener().start(rig)
    answer = await rig.http.post(C, json=body(rig, prompt=[5] * 40))
    assert await listener.ended() == ["accepted", "placed", "first_token", "finished"]
    request_id, trace_id = answer.headers["x-request-id"], answer.headers["traceparent"].split("-")[1]
    assert {request for request, *_ in listener.heard} == {request_id}
    assert {traceparent.split("-")[1] for *_, traceparent in listener.heard} == {trace_id}
    accepted = decode(listener.payload("accepted"), RequestAccepted)
    assert (accepted.request_id, accepted.num_prompt_tokens) == (request_id, 40)
    placed = decode(listener.payload("placed"), RequestPlaced)
    assert (placed.prefill_worker, placed.decode_worker, placed.attempt) == ("p1", "d1", 1)
    finished = decode(listener.payload("finished"), RequestFinished)
    assert (finished.num_tokens, finished.finish_reason) == (len(rig.answer), "stop")
    assert finished.age_ms >= placed.age_ms >= accepted.age_ms


async def test_a_request_that_goes_on_elsewhere(rig: Rig) -> None:
    listener = await Listener().start(rig)
    rig.mesh.conduct["d1"] = Conduct(fails_at=4)
    answer = await rig.http.post(C, json=body(rig))
    assert await listener.ended() == ["accepted", "placed", "first_token", "resumed", "placed", "finished"]
    resumed = decode(listener.payload("resumed"), RequestResumed)
    assert (resumed.attempt, resumed.num_answered_tokens) == (2, 4)
    assert "d1: it broke" in resumed.reason
    described = await where(rig, answer.headers["x-request-id"])
    assert (described.phase, described.attempt, described.decode_worker) == ("finished", 2, "d2")


async def test_a_request_that_is_refused(rig: Rig) -> None:
    listener = await Listener().start(rig)
    rig.mesh.refusal = RefusalReason.OVERLOADED
    answer = await rig.http.post(C, json=body(rig))
    assert answer.status_code == 429
    assert await listener.ended() == ["accepted", "failed"]
    failed = decode(listener.payload("failed"), RequestFailed)
    assert (failed.code, failed.status, failed.num_tokens) == ("overloaded", 429, 0)
    described = await where(rig, answer.headers["x-request-id"])
    assert (described.phase, described.prefill_worker) == ("failed", "")
    assert described.detail.startswith("overloaded: ")


async def test_a_request_whose_client_goes_and_where_it_is_until_then(rig: Rig) -> None:
    listener = await Listener().start(rig)
    rig.mesh.gate.clear()
    async with rig.http.stream("POST", C, json=body(rig, stream=True)) as response:
        await until(lambda: "first_token" in listener.parts)
        request_id = response.headers["x-request-id"]
        running = await where(rig, request_id, b"{}")
    assert await listener.ended() == ["accepted", "placed", "first_token", "cancelled"]
    assert (running.phase, running.num_tokens, running.prefill_worker, running.decode_worker) == (
        "decode",
        1,
        "p1",
        "d1",
    )
    assert 0 < running.left_ms <= 60_000 and running.age_ms >= running.phase_age_ms
    cancelled = decode(listener.payload("cancelled"), RequestCancelled)
    assert (cancelled.num_tokens, cancelled.reason) == (1, "the client has disconnected")
    assert (await where(rig, request_id)).phase == "cancelled"


async def test_every_choice_has_a_story_of_its_own(rig: Rig) -> None:
    listener = await Listener().start(rig)
    await rig.http.post(C, json=body(rig, n=3))
    await listener.ended(3)
    by_request: dict[str, list[str]] = {}
    for request_id, part, _, _ in listener.heard:
        by_request.setdefault(request_id, []).append(part)
    assert len(by_request) == 3
    assert all(parts == ["accepted", "placed", "first_token", "finished"] for parts in by_request.values())


async def test_an_unknown_request_gets_an_answer(rig: Rig) -> None:
    described = await where(rig, "req-of-nobody")
    assert described == RequestDescribed(request_id=RequestId("req-of-nobody"), phase="unknown")


async def test_only_nothing_stands_for_an_empty_question_and_of_one_subject_only(rig: Rig) -> None:
    async def nobody_answers(subject: str, payload: bytes) -> None:
        with pytest.raises(BusError):
            await rig.mesh.connection.request(subject, payload, {}, 0.5)

    async with asyncio.TaskGroup() as asking:
        for payload in (b" ", b"null", b"[]", b'{"type":"PingWorker"}', b"where?"):
            asking.create_task(nobody_answers(subjects.REQUEST_STATUS.of("req-1"), payload))
        asking.create_task(nobody_answers(subjects.PROGRESS.of("p1"), b""))


async def job_of(request_id: str) -> Job:
    key = BlockKey(block_size=16, model_fingerprint="f")
    return Job(
        request_id=RequestId(request_id), prompt=pack_prompt([1, 2, 3], key), key=key,
        sampling=SamplingParams(max_tokens=4), deadline_ms=now_ms() + 60_000, trace="",
    )  # fmt: skip


async def live_of(request_id: str) -> LiveRequest:
    job, now = await job_of(request_id), now_ms()
    core = RequestCore(job.request_id, 4, MeshConfig(), FailureDetector(PresenceTimes()))
    return LiveRequest(job, 0, Mailbox(), core, job.prompt, b"", now, Published("placing", now))


async def test_whichever_gateway_is_asked_finds_the_one_that_knows() -> None:
    broker = MemoryBroker()
    async with asyncio.TaskGroup() as tasks:
        buses = [TypedBus(MemoryBus(broker), "gateway") for _ in range(3)]
        live = await live_of("req-1")
        known = [{}, {live.job.request_id: live}, {}]
        gateways = [Stories(GatewayId(f"g{n}"), bus, tasks, GatewayTimes(), known[n]) for n, bus in enumerate(buses)]
        for gateway in gateways:
            bus, me = gateway.bus, gateway.gateway_id
            await bus.serve(tasks, subjects.REQUEST_STATUS, ("*",), gateway.on_status)
            await bus.serve(tasks, subjects.REQUEST_SOUGHT, ("*",), gateway.on_sought, queue=me)
        gateways[1].accepted(live)
        client = MemoryBus(broker)
        for _ in range(6):  # a queue group takes turns: each is asked twice
            reply = await client.request(subjects.REQUEST_STATUS.of("req-1"), b"", {}, ASK_S)
            described = decode(reply.payload, RequestDescribed)
            assert (described.phase, described.gateway_id) == ("placing", "g1")
        for gateway in gateways:
            await gateway.bus.close()


async def test_while_the_broker_is_away_only_so_much_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_BUFFERED", 5)
    broker = MemoryBroker()
    connection, ear = MemoryBus(broker), await MemoryBus(broker).subscribe("mesh.>")
    async with asyncio.TaskGroup() as tasks:
        stories = Stories(GatewayId("g"), TypedBus(connection, "gateway"), tasks, GatewayTimes(), {})
        connection.is_connected = False
        for number in range(8):
            stories.accepted(live := await live_of(f"req-{number}"))
        await until(lambda: stories.num_dropped == 3)
        connection.is_connected = True
        stories.saw(live, [Finish("stop")])
        await until(lambda: ear.inbox.qsize() == 6)


async def test_what_has_ended_is_known_for_a_while_and_so_many_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_ENDED", 2)
    async with asyncio.TaskGroup() as tasks:
        stories = Stories(GatewayId("g"), TypedBus(MemoryBus(), "gateway"), tasks, GatewayTimes(), {})
        for number in range(3):
            live = await live_of(f"req-{number}")
            stories.accepted(live)
            stories.saw(live, [Finish("length")])
        known = [stories.describe(RequestId(f"req-{number}")) for number in range(3)]
        assert [described and described.phase for described in known] == [None, "finished", "finished"]
        stories.times = GatewayTimes(ended_kept_ms=-1)
        assert stories.describe(RequestId("req-2")) is None
