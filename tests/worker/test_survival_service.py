"""A worker outlives lost messages, dead gateways, its own standstill and its end. In one process, on a memory bus."""

import asyncio
import logging
import random
import time
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager

import pytest

from dataplane.blocks.cache import BlockCache
from dataplane.blocks.ticket import Ticket
from dataplane.protocol.gate import LeaseRefusedError
from dataplane.protocol.progress import KVProgress
from dataplane.protocol.stream import TransferStats
from schemas import subjects
from schemas.block import hash_blocks, join_hashes, unpack_tokens
from schemas.ids import GatewayId, LeaseId, RequestId, WorkerId
from schemas.kv import LeaseEnd, LeaseGranted, RequestLease, ReturnLease
from schemas.request import Refused, SamplingParams
from schemas.worker import (
    DrainAnswered,
    DrainWorker,
    LeftReason,
    PingWorker,
    WorkerAlive,
    WorkerDraining,
    WorkerJoined,
    WorkerLeft,
    WorkerRole,
)
from services.bus.memory import MemoryBroker, MemoryBus
from services.bus.typed import Received
from services.config import MeshConfig, WorkerConfig
from services.engine.client import EngineStoppedError
from services.engine.fake import fake_answer
from services.engine.loop import EngineLoop
from services.holder.core.events import DrainBegun, Event
from services.holder.core.leases import Grant
from services.holder.core.lending import LendCore
from services.holder.core.rules import Rules
from services.holder.holder import Holder
from services.holder.kv.blocks import LentBlocks
from services.runtime import now_ms
from services.telemetry import Telemetry
from services.worker.engine_feed import EngineFeed
from services.worker.service import run_worker
from services.worker.shell import Worker
from tests import virtual
from tests.credentials import CREDENTIALS
from tests.mesh.one_process import LAYOUT, VOCAB, Answer, Client, Route, fake_engine, make_parts, one_process_mesh
from tests.promises import same_tokens
from tests.waiting import until
from tests.worker import worker_cases
from tests.worker import worker_cases as case

pytestmark = pytest.mark.virtual_time

LONG = SamplingParams(max_tokens=3000, temperature=0.0, ignore_eos=True)
PROMPT = list(range(1, 60))
SLOW_S = 0.01
ROUTE = Route(WorkerId("p-0"), WorkerId("d-0"))


@asynccontextmanager
async def two_workers(step_s: float = 0.0, *, spare: bool = False, **more: object) -> AsyncGenerator[Client]:
    """`step_s`: how long a step takes, where an answer is to go on for a while. `spare`: there is a second decode
    worker."""
    roles: dict[str, WorkerRole] = {"p-0": "prefill", "d-0": "decode"} | ({"d-1": "decode"} if spare else {})
    parts = [make_parts(name, role, num_blocks=1024) for name, role in roles.items()]
    for one in parts:
        fake_engine(one).before_step = lambda _items: time.sleep(step_s)
    async with one_process_mesh(*parts, **more) as client:  # type: ignore[arg-type]
        yield client


async def has_tokens(answer: Answer, num_tokens: int = 5) -> None:
    await until(lambda: len(answer.tokens) >= num_tokens)


async def ping(client: Client, worker_id: str) -> WorkerAlive:
    return await client.bus.ask(subjects.PING, (worker_id,), PingWorker(), 10)


def right(prompt: list[int], params: SamplingParams) -> list[int]:
    return fake_answer(LAYOUT, prompt, params, vocab_size=VOCAB)


async def test_lost_tokens_are_had_again() -> None:
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=3, ignore_eos=True)
    async with two_workers() as client:
        client.loses_tokens = True
        await client.send("r0", PROMPT, params, route=ROUTE)

        async def has_ended() -> bool:
            progress = await client.ask_progress("d-0", "r0", 0)
            return progress.tokens is not None and progress.tokens.finish_reason is not None

        await until(has_ended)
        first = (await client.ask_progress("p-0", "r0", 0)).tokens
        rest = (await client.ask_progress("d-0", "r0", 1)).tokens
        assert first is not None and rest is not None and first.report is not None and rest.report is not None
        same_tokens(unpack_tokens(first.tokens) + unpack_tokens(rest.tokens), right(PROMPT, params))
        assert (first.index, rest.index, rest.finish_reason) == (0, 1, "length")
        last = (await client.ask_progress("d-0", "r0", 39)).tokens
        assert last is not None and unpack_tokens(last.tokens) == right(PROMPT, params)[39:]
        assert not (await client.ask_progress("d-0", "r1", 0)).known


async def test_a_worker_answers_a_ping() -> None:
    async with two_workers() as client:
        alive = await ping(client, "d-0")
        assert (alive.worker_id, alive.incarnation) == ("d-0", "d-0-1")


async def test_the_attempts_of_a_dead_gateway_end() -> None:
    async with two_workers(SLOW_S) as client:
        living = await client.send("r0", PROMPT, LONG, route=ROUTE)
        client.gateway_id = GatewayId("gateway-dead")  # nobody serves its subjects
        await client.send("r1", PROMPT, LONG, route=ROUTE)
        await has_tokens(living)
        await until(lambda: fleet_runs(client, "d-0", 2))
        await until(lambda: fleet_runs(client, "d-0", 1))
        progress = await client.ask_progress("d-0", "r0", 0)
        assert progress.tokens is not None and progress.tokens.finish_reason is None
        await was_cut(client, "r1")
        await client.cancel("r0")
        await client.until_free()


async def was_cut(client: Client, request_id: str) -> None:
    """Its answer has begun and was never finished."""
    progress = await client.ask_progress("d-0", request_id, 0)
    assert progress.tokens is not None and progress.tokens.finish_reason is None


async def fleet_runs(client: Client, worker_id: str, num_running: int) -> bool:
    (load,) = [load for load in await client.fleet() if load.worker.worker_id == worker_id]
    return load.num_running == num_running


async def test_an_attempt_that_its_gateway_has_ended_ends() -> None:
    """The cancel was lost."""
    async with two_workers(SLOW_S) as client:
        answer = await client.send("r0", PROMPT, LONG, route=ROUTE)
        await has_tokens(answer)
        client.loses_tokens = True
        client.forget("r0")
        await client.until_free()
        await was_cut(client, "r0")


async def test_a_worker_that_was_declared_lost_ends_its_runs_and_joins_anew(caplog: pytest.LogCaptureFixture) -> None:
    async with two_workers(SLOW_S) as client:
        joined: list[WorkerJoined] = []

        def note(received: Received[WorkerJoined]) -> None:
            joined.append(received.message)

        await client.listen(subjects.JOINED, note)
        answer = await client.send("r0", PROMPT, LONG, route=ROUTE)
        await has_tokens(answer)
        other = WorkerLeft(worker_id=WorkerId("d-0"), incarnation="another", reason=LeftReason.SILENT)
        await client.bus.publish(subjects.LEFT, ("d-0",), other)
        await asyncio.sleep(0)
        assert (await ping(client, "d-0")).incarnation == "d-0-1", "that was another one"
        left = WorkerLeft(worker_id=WorkerId("d-0"), incarnation="d-0-1", reason=LeftReason.SILENT)
        with caplog.at_level(logging.WARNING):
            await client.bus.publish(subjects.LEFT, ("d-0",), left)
            await until(lambda: bool(joined))
        (message,) = joined
        assert message.worker.worker_id == "d-0" and message.worker.incarnation != "d-0-1"
        assert "joins anew" in caplog.text

        async def is_forgotten() -> bool:
            return not (await client.ask_progress("d-0", "r0", 0)).known

        await until(is_forgotten)  # the engine's step under way ends first
        await client.until(lambda fleet: len(fleet) == 2)
        await client.until_free()
        assert answer.failure is None and not answer.ended.is_set(), "its gateway was told nothing"
        # It serves again, with what it had cached.
        params = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)
        again = await client.complete("r1", PROMPT, params, route=ROUTE)
        same_tokens(again.token_ids, right(PROMPT, params))
        assert again.report is not None and again.report.cached_tokens >= LAYOUT.block_size


async def test_a_worker_that_stood_still_is_fenced() -> None:
    fence_after_ms = WorkerConfig().fence_after_ms  # no pause of a busy machine is as long
    async with two_workers(SLOW_S, fence_after_ms=fence_after_ms) as client:
        answer = await client.send("r0", PROMPT, LONG, route=ROUTE)
        await has_tokens(answer)
        before = {worker: (await ping(client, worker)).incarnation for worker in ("p-0", "d-0")}
        time.sleep(fence_after_ms / 1000 + 0.1)  # noqa: ASYNC251  (as SIGSTOP would)
        for worker in ("p-0", "d-0"):
            while (await ping(client, worker)).incarnation == before[worker]:  # its timer has not run yet
                await asyncio.sleep(0)
        await client.until_free()


async def test_where_nobody_could_go_on_with_it_a_drain_lets_what_runs_finish() -> None:
    stop = asyncio.Event()
    params = SamplingParams(max_tokens=400, temperature=1.0, seed=5, ignore_eos=True)
    async with two_workers(0.002, stops={"d-0": stop}, drain_s=60) as client:
        answer = await client.send("r0", PROMPT, params, route=ROUTE)
        await has_tokens(answer)
        gone = await watch(client, "d-0")
        stop.set()
        await until(lambda: gone[:1] == ["draining"])
        assert not answer.ended.is_set(), "it is drained in the middle of the answer"
        await answer.end()
        assert answer.failure is None
        same_tokens(answer.token_ids, right(PROMPT, params))
        await until(lambda: "left" in gone)
        assert gone == ["draining", "left"]


async def ask_lease(client: Client, prompt: list[int], request_id: str = "reader") -> LeaseGranted | Refused:
    """Ask d-0 for what it has of a prompt."""
    hashes = hash_blocks(prompt, LAYOUT.block_size, model_fingerprint=client.fingerprint)
    request = RequestLease(
        request_id=RequestId(request_id), attempt=1, deadline_ms=now_ms() + 60_000, reader=WorkerId("x-0"),
        fingerprint=client.fingerprint, first_block=0, block_hashes=join_hashes(hashes),
    )  # fmt: skip
    reply = await client.bus.ask(subjects.LEASE, ("d-0", request.reader), request, 10)
    assert isinstance(reply, LeaseGranted | Refused)
    return reply


async def give_back(client: Client, lease: LeaseGranted | Refused) -> None:
    assert isinstance(lease, LeaseGranted), lease
    returned = ReturnLease(
        request_id=lease.request_id, attempt=1, deadline_ms=lease.deadline_ms, reader=WorkerId("x-0"),
        lease_id=lease.lease_id,
    )  # fmt: skip
    await client.bus.publish(subjects.RETURNED, ("d-0", returned.reader), returned)


async def test_a_draining_worker_lends_until_its_last_lease_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    stop, is_stopping, may_stop = asyncio.Event(), asyncio.Event(), asyncio.Event()
    stop_engine = EngineFeed.stop_engine

    def stop_later(self: EngineFeed) -> None:
        is_stopping.set()
        while not may_stop.is_set():
            time.sleep(0.01)
        stop_engine(self)

    monkeypatch.setattr(EngineFeed, "stop_engine", stop_later)
    async with two_workers(stops={"d-0": stop}) as client:
        await client.complete("r0", PROMPT, SamplingParams(max_tokens=1, temperature=0.0), route=Route(WorkerId("d-0")))
        early = await ask_lease(client, PROMPT)
        gone = await watch(client, "d-0")
        stop.set()
        await until(lambda: gone == ["draining"])
        second = await ask_lease(client, PROMPT)
        for lease in (early, second):
            await give_back(client, lease)
        await until(is_stopping.is_set)
        late = await ask_lease(client, PROMPT)  # its work is done, and its engine about to end
        may_stop.set()
        last = await ask_lease(client, PROMPT)
        await give_back(client, late)
        await asyncio.sleep(0.05)
        assert gone == ["draining"], "somebody reads"
        await give_back(client, last)
        await until(lambda: "left" in gone)


async def test_a_worker_leaves_in_the_end_whoever_keeps_a_lease() -> None:
    stop = asyncio.Event()
    async with two_workers(stops={"d-0": stop}, drain_s=0.1) as client:
        await client.complete("r0", PROMPT, SamplingParams(max_tokens=1, temperature=0.0), route=Route(WorkerId("d-0")))
        lease, asked_ms = await ask_lease(client, PROMPT), now_ms()
        assert isinstance(lease, LeaseGranted)
        gone = await watch(client, "d-0")
        stop.set()
        await until(lambda: "left" in gone)
        assert now_ms() < asked_ms + lease.lease_ms or virtual.network() is None


async def test_a_drain_that_takes_too_long_hands_back() -> None:
    stop = asyncio.Event()
    async with two_workers(SLOW_S, stops={"d-0": stop}, drain_s=0.1) as client:
        answer = await client.send("r0", PROMPT, LONG, route=ROUTE)
        await has_tokens(answer)
        gone = await watch(client, "d-0")
        stop.set()
        await answer.end()
        assert answer.failure is not None and answer.failure.code == "draining" and answer.failure.retryable
        # What it has is still to be had: its gateway goes on elsewhere, and reads it here.
        assert "left" not in gone
        await until(lambda: "left" in gone)


async def test_an_answer_moves_at_once_where_somebody_can_go_on_with_it() -> None:
    """However long it is; its worker then waits until it has been read, and ends."""
    stop = asyncio.Event()
    async with two_workers(SLOW_S, spare=True, stops={"d-0": stop}, drain_s=600) as client:
        answer = await client.send("r0", PROMPT, LONG, route=ROUTE)
        await has_tokens(answer)
        gone = await watch(client, "d-0")
        stop.set()
        await answer.end()
        assert answer.failure is not None and answer.failure.code == "draining"
        tokens = answer.token_ids
        assert tokens == right(PROMPT, LONG)[: len(tokens)] and len(tokens) < LONG.max_tokens
        held, size = answer.failure.held_blocks, LAYOUT.block_size
        assert held == (len(PROMPT) + len(tokens) - 1) // size, "all but what is computed with the next token"
        assert "left" not in gone
        whole = [*PROMPT, *tokens]
        lease = await ask_lease(client, whole[: held * size], "r0")
        assert isinstance(lease, LeaseGranted) and lease.num_tokens == held * size
        await give_back(client, lease)
        await until(lambda: "left" in gone)


async def test_an_operator_has_a_worker_leave_once_and_not_the_last_of_its_role() -> None:
    async with two_workers() as client:
        last = await ask_drain(client, "d-0")
        assert "d-0 is the last decode worker" in last.refusal and not last.is_leaving
    async with two_workers(spare=True) as client:
        gone = await watch(client, "d-0")
        answers = await asyncio.gather(*(ask_drain(client, "d-0") for _ in range(3)))
        assert {answer.refusal for answer in answers} == {""}
        await until(lambda: "left" in gone)
        assert gone == ["draining", "left"]
        assert (await ask_drain(client, "d-1")).refusal
        assert not (await ask_drain(client, "d-1", forced=True)).refusal


async def test_two_operators_who_drain_each_other_s_last_worker_leave_one_of_them() -> None:
    async with two_workers(spare=True) as client:
        answers = await asyncio.gather(ask_drain(client, "d-0"), ask_drain(client, "d-1"))
        assert sorted(bool(answer.refusal) for answer in answers) == [False, True]


async def ask_drain(client: Client, worker_id: str, *, forced: bool = False) -> DrainAnswered:
    return await client.bus.ask(subjects.DRAIN, (worker_id,), DrainWorker(forced=forced), 10)


async def test_a_worker_whose_engine_s_thread_has_failed_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would look well, and answer nothing. Whoever started it starts it again."""

    def take(_self: EngineLoop) -> bool:
        raise RuntimeError("a mistake of ours")

    monkeypatch.setattr(EngineLoop, "_take", take)
    running = run_worker(
        make_parts("p-0", "prefill"), MeshConfig(), MemoryBus(MemoryBroker()), Telemetry("p-0"), asyncio.Event()
    )
    with pytest.raises(ExceptionGroup) as caught:
        await running
    assert caught.value.subgroup(EngineStoppedError) is not None


async def test_a_worker_whose_read_does_not_end_decides_nothing_more_and_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may still write to its blocks: nobody else may have them."""
    decided: list[Event] = []
    workers: list[Worker] = []
    start = Worker.begin_serving

    async def start_stuck(self: Worker, tasks: asyncio.TaskGroup) -> None:
        await start(self, tasks)
        workers.append(self)
        monkeypatch.setattr(Holder, "is_stuck", True)
        monkeypatch.setattr(Rules, "decide", lambda rules, event, now_ms: decided.append(event) or [])
        with pytest.raises(EngineStoppedError, match="a read of p-0"):
            self.step(DrainBegun(), "drain")

    monkeypatch.setattr(Worker, "begin_serving", start_stuck)
    running = run_worker(
        make_parts("p-0", "prefill"), MeshConfig(), MemoryBus(MemoryBroker()), Telemetry("p-0"), asyncio.Event()
    )
    with pytest.raises(ExceptionGroup) as caught:
        await running
    assert caught.value.subgroup(EngineStoppedError) is not None
    assert workers and not decided


async def watch(client: Client, worker_id: str) -> list[str]:
    """Return what fills with the worker's last words."""
    words: list[str] = []

    def draining(received: Received[WorkerDraining]) -> None:
        words.extend(["draining"] if received.message.worker_id == worker_id else [])

    def left(received: Received[WorkerLeft]) -> None:
        words.extend(["left"] if received.message.worker_id == worker_id else [])

    await client.listen(subjects.DRAINING, draining)
    await client.listen(subjects.LEFT, left)
    return words


async def test_no_block_is_ever_orphaned() -> None:
    rng = random.Random(9)
    seen: set[int] = set()
    async with two_workers() as client:
        answers = [
            await client.send(
                f"r{number}",
                [rng.randrange(1, VOCAB) for _ in range(rng.randrange(1, 200))],
                SamplingParams(max_tokens=rng.randrange(1, 300), temperature=0.0, ignore_eos=True),
                route=ROUTE,
            )
            for number in range(12)
        ]
        for number in range(0, 12, 3):
            await client.cancel(f"r{number}")

        async def have_ended() -> bool:
            seen.update(load.blocks.orphaned for load in await client.fleet())
            return all(a.ended.is_set() for number, a in enumerate(answers) if number % 3)

        await until(have_ended)
        await client.until_free()
        seen.update(load.blocks.orphaned for load in await client.fleet())
    assert seen == {0}


def lease_of(holder: LentBlocks[BlockCache]) -> Ticket:
    """Return the ticket of a lease that lasts for a minute."""
    allocation = holder.memory.admit([], 16, 0)
    assert allocation is not None
    lease = holder.leases.grant(
        lease_id=LeaseId("l"), holder=holder.worker_id, reader=WorkerId("d-0"), tables=allocation.tables,
        num_tokens=16, expires_at_ms=now_ms() + 60_000, request_id=RequestId("r"), attempt=1,
        progress=KVProgress(holder.shape.layout.num_layers, 16),
    )  # fmt: skip
    return lease.ticket(holder.incarnation)


@pytest.fixture
def holder() -> Generator[LentBlocks[BlockCache]]:
    parts = make_parts("p-0", "prefill")
    made = LentBlocks[BlockCache](
        worker_id=parts.worker_id, incarnation="i", arena=parts.arena, credentials=CREDENTIALS, shape=parts.shape,
        memory=BlockCache(parts.shape, chunk_tokens=64), make_server=parts.platform.make_server,
        on_started=lambda _lease: None, on_served=lambda _lease, _stats, _error: None,
    )  # fmt: skip
    yield made
    fake_engine(parts).close()
    made.close()


def test_a_stream_that_gets_on_keeps_its_lease(holder: LentBlocks[BlockCache]) -> None:
    ticket = lease_of(holder)
    lending = LendCore(worker_cases.limits(WorkerId("p-0"), lease_ms=5_000), holder.memory, holder.leases)
    (lease,) = holder.leases
    before_ms = lease.expires_at_ms
    case.tick(lending, before_ms - 100)
    assert lease.expires_at_ms == before_ms, "nothing has moved"
    stream = holder.open(ticket)
    assert stream.still_valid()
    case.tick(lending, before_ms)
    assert lease.expires_at_ms == before_ms + 5_000
    case.tick(lending, before_ms + 5_000)
    assert lease.expires_at_ms == before_ms + 5_000, "nothing has moved since"
    assert stream.still_valid()
    holder.leases.end(ticket.lease_id, LeaseEnd.LANDED)
    case.tick(lending, 0)  # it has ended meanwhile
    assert lease.expires_at_ms == before_ms + 5_000 and not stream.still_valid()


def test_every_stream_is_told_of_even_after_its_lease(holder: LentBlocks[BlockCache]) -> None:
    """Two streams under one lease, as the first has given it back; the second outlives it. Another lease of the same id
    is none of theirs."""
    told: list[tuple[Grant, str]] = []
    holder.on_started = lambda lease: told.append((lease, "started"))
    holder.on_served = lambda lease, _stats, error: told.append((lease, error))
    ticket = lease_of(holder)
    (lease,) = holder.leases
    first = holder.open(ticket)
    with pytest.raises(LeaseRefusedError, match="opened"):
        holder.open(ticket)
    first.give_back()
    second = holder.open(ticket)
    first.served(TransferStats(), "cut")
    holder.leases.end(lease.lease_id, LeaseEnd.CANCELLED)
    another = lease_of(holder)
    second.started()
    second.served(TransferStats(), "the lease has ended")
    assert told == [(lease, "cut"), (lease, "started"), (lease, "the lease has ended")]
    assert not second.still_valid() and holder.open(another).still_valid()


def test_a_block_that_nobody_knows_of_is_an_orphan(
    holder: LentBlocks[BlockCache], caplog: pytest.LogCaptureFixture
) -> None:
    lease_of(holder)
    owned = holder.memory.admit([], 24, 0)
    assert owned is not None and holder.counts([owned.tables]).orphaned == 0
    with caplog.at_level(logging.WARNING):
        assert [holder.counts([]).orphaned for _ in range(3)] == [3, 3, 3]
    assert len(caplog.records) == 1
