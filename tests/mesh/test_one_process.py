"""The services as they are, in one process on a memory bus. The fake engine reads its KV: wrong KV is wrong tokens."""

import asyncio
import random
import time
from collections.abc import Callable

import msgspec
import pytest

from dataplane.blocks.layout import KVLayout
from schemas import subjects
from schemas.block import hash_blocks, pack_tokens, split_hashes
from schemas.directory import Inventory, ReadInventory
from schemas.handoff import KVOffered
from schemas.ids import HandoffId, LeaseId, RequestId, WorkerId
from schemas.kv import RequestLease
from schemas.request import (
    AttemptAccepted,
    KVSource,
    OtherEnd,
    Refused,
    RunAttempt,
    SamplingParams,
)
from services.bus.limits import MAX_PAYLOAD_BYTES, MIN_PAYLOAD_BYTES
from services.engine.fake import fake_answer
from services.runtime import now_ms
from services.times import DirectoryTimes, PresenceTimes, Times, WorkerTimes
from tests import virtual
from tests.mesh.one_process import LAYOUT, VOCAB, Client, Route, fake_engine, make_parts, one_process_mesh
from tests.promises import same_tokens
from tests.waiting import until

pytestmark = pytest.mark.virtual_time


def sampling(rng: random.Random, max_tokens: int) -> SamplingParams:
    return SamplingParams(
        max_tokens=max_tokens, temperature=rng.choice([0.0, 1.0]), seed=rng.randrange(2**31), ignore_eos=True
    )


def expected(prompt: list[int], params: SamplingParams) -> list[int]:
    return fake_answer(LAYOUT, prompt, params, vocab_size=VOCAB)


@pytest.mark.parametrize("carrier", ["shm", "tcp"])
@pytest.mark.parametrize(("num_blocks", "max_bytes"), [(96, MIN_PAYLOAD_BYTES), (512, MAX_PAYLOAD_BYTES)])
async def test_many_requests_through_two_and_two(carrier: str, num_blocks: int, max_bytes: int) -> None:
    """In a small pool requests wait for room; a prompt that waits for long makes way, and is read or computed again."""
    rng = random.Random(5)
    parts = [
        make_parts(f"{role}-{n}", role, num_blocks=num_blocks)  # type: ignore[arg-type]
        for role in ("prefill", "decode")
        for n in range(2)
    ]
    async with one_process_mesh(*parts, carrier=carrier, max_bytes=max_bytes) as client:
        jobs = []
        for number in range(60):
            prompt = [rng.randrange(1, VOCAB) for _ in range(rng.choice([1, 7, 8, 9, 40, 200]))]
            jobs.append((f"r{number}", prompt, sampling(rng, rng.randrange(1, 20))))
        answers = await asyncio.gather(*(client.complete(*job) for job in jobs))
        for (_, prompt, params), answer in zip(jobs, answers, strict=True):
            same_tokens(answer.token_ids, expected(prompt, params))
        await client.until_free()
        count = client.events.count
        await client.until(lambda _: count("released") == count("landed"))
        if num_blocks == 512 and virtual.network() is not None:  # a busy machine may be late, and compute again
            assert client.events.count("landed") == 60 and "aborted" not in client.events
    await until(lambda: not [name for name in virtual.thread_names() if name.startswith(("kv-", "engine"))])


async def test_what_everybody_hears_of_a_worker_opens_no_arena() -> None:
    """Its nonce comes with a lease."""
    async with one_process_mesh(make_parts("p-0", "prefill"), make_parts("d-0", "decode")) as client:
        await client.until(lambda fleet: all(w.worker.endpoint and w.worker.endpoint.arena for w in fleet))
        await client.until(lambda fleet: all(w.worker.endpoint and not w.worker.endpoint.arena_nonce for w in fleet))


async def test_aggregated_workers_serve_without_a_hand_over() -> None:
    rng = random.Random(6)
    async with one_process_mesh(make_parts("a-0", "aggregated"), make_parts("a-1", "aggregated")) as client:
        for number in range(8):
            prompt, params = [rng.randrange(1, VOCAB) for _ in range(50)], sampling(rng, 10)
            answer = await client.complete(f"r{number}", prompt, params)
            same_tokens(answer.token_ids, expected(prompt, params))
        assert client.events == []
        await client.until_free()


async def test_kv_of_another_model_is_never_read() -> None:
    """Two models in one mesh: the scheduler pairs like with like, and a foreign offer would be declined."""
    other = KVLayout(weights="other", dtype="float32", num_layers=3, num_kv_heads=2, head_dim=8, block_size=8)
    parts = [make_parts("p-0", "prefill"), make_parts("d-0", "decode"), make_parts("d-1", "decode", layout=other)]
    async with one_process_mesh(*parts) as client:
        for number in range(4):
            placement = await client.place(f"r{number}", 10, 10)
            assert placement.decode_worker == "d-0"


async def test_cancel_frees_blocks_on_both_sides() -> None:
    params = SamplingParams(max_tokens=3000, temperature=0.0, ignore_eos=True)
    async with one_process_mesh(
        make_parts("p-0", "prefill", num_blocks=512), make_parts("d-0", "decode", num_blocks=512)
    ) as client:
        for number in range(6):
            answer = await client.send(f"r{number}", list(range(1, 100)), params)
            if number % 2:
                await until(lambda answer=answer: len(answer.tokens) >= 5)
            await client.cancel(f"r{number}")
            await client.until_free()


async def test_room_is_told_as_soon_as_it_is_there() -> None:
    """Not when the load is told next anyway: the scheduler would place by what is no more."""
    times = Times(
        presence=PresenceTimes(beat_interval_ms=3_600_000, partitioned_after_ms=15_000_000),
        worker=WorkerTimes(load_min_gap_s=0.3),  # what changes within the gap is told at its end
        directory=DirectoryTimes(forget_after_ms=15_000_000),
    )
    params = SamplingParams(max_tokens=3000, temperature=0.0, ignore_eos=True)
    workers = make_parts("p-0", "prefill", num_blocks=512), make_parts("d-0", "decode", num_blocks=512)
    async with one_process_mesh(*workers, times=times, fence_after_ms=20_000_000) as client:
        await client.send("r", list(range(1, 100)), params)
        await client.until(lambda fleet: any(load.blocks.running for load in fleet))
        await client.cancel("r")
        await client.until_free()
        for number in range(12):  # wherever it is
            await client.send(f"r{number}", list(range(number, number + 400)), params)
            await asyncio.sleep(number * 0.001)
            await client.cancel(f"r{number}")
            await client.until_free()


async def test_a_deadline_ends_a_request_with_a_typed_failure() -> None:
    params = SamplingParams(max_tokens=4000, temperature=0.0, ignore_eos=True)
    async with one_process_mesh(
        make_parts("p-0", "prefill", num_blocks=600), make_parts("d-0", "decode", num_blocks=600)
    ) as client:
        answer = await client.send("r0", list(range(1, 20)), params, deadline_ms=300)
        await answer.end()
        assert answer.failure is not None and answer.failure.code == "deadline"
        await client.until_free()


async def test_requests_wait_for_blocks_and_all_end() -> None:
    rng = random.Random(8)
    parts = [make_parts("p-0", "prefill", num_blocks=12), make_parts("d-0", "decode", num_blocks=12)]
    async with one_process_mesh(*parts) as client:
        jobs = [
            (f"r{n}", [rng.randrange(1, VOCAB) for _ in range(rng.randrange(1, 80))], sampling(rng, 10))
            for n in range(30)
        ]
        answers = await asyncio.gather(*(client.complete(*job) for job in jobs))
        same_tokens([a.token_ids for a in answers], [expected(prompt, params) for _, prompt, params in jobs])
        await client.until_free()


async def test_a_read_that_is_stopped_before_its_first_step_is_concluded() -> None:
    """A cancel right behind an offer: the read's task has not run yet, and its blocks must come back all the same."""
    async with one_process_mesh(make_parts("p-0", "prefill"), make_parts("d-0", "decode")) as client:
        reserve = reservation(client, 0)
        assert isinstance(await client.bus.ask(subjects.RUN, ("d-0",), reserve, 10), AttemptAccepted)
        await client.until(lambda fleet: any(w.blocks.running for w in fleet))
        offer = offer_for(reserve)
        # Without a pause between them, both are handled before the read's task has its first turn.
        offering = client.bus.publish(subjects.OFFERED, ("p-0", "d-0", "r0-1"), offer)
        await asyncio.gather(offering, client.cancel("r0"))
        await client.until_free()


def reservation(client: Client, number: int, *, max_tokens: int = 5) -> RunAttempt:
    """A reservation for which no prefill worker has been asked: it waits for an offer that does not come."""
    return RunAttempt(
        request_id=RequestId(f"r{number}"),
        attempt=1,
        deadline_ms=now_ms() + 60_000,
        gateway_id=client.gateway_id,
        upstream=OtherEnd(worker_id=WorkerId("p-0"), handoff_id=HandoffId(f"r{number}-1")),
        prompt=pack_tokens([1, 2, 3]),
        sampling=SamplingParams(max_tokens=max_tokens),
    )


def offer_for(reserve: RunAttempt) -> KVOffered:
    """An offer that leads nowhere."""
    assert reserve.upstream is not None
    return KVOffered(
        request_id=reserve.request_id,
        attempt=1,
        deadline_ms=reserve.deadline_ms,
        handoff_id=reserve.upstream.handoff_id,
        source_worker=WorkerId("p-0"),
        target_worker=WorkerId("d-0"),
        lease_id=LeaseId("lease"),
        epoch=1,
        lease_ms=1000,
        ticket="none",
        incarnation="p-0-1",
        fingerprint=LAYOUT.fingerprint,
        num_tokens=3,
    )


async def test_a_worker_stops_although_reservations_wait_for_blocks() -> None:
    async with asyncio.timeout(60):
        async with one_process_mesh(make_parts("p-0", "prefill"), make_parts("d-0", "decode", num_blocks=10)) as client:
            for number in range(4):
                reply = await client.bus.ask(subjects.RUN, ("d-0",), reservation(client, number, max_tokens=70), 10)
                assert isinstance(reply, AttemptAccepted)
            await client.until(lambda fleet: sum(w.num_queued for w in fleet) == 3)
            await client.until(lambda fleet: [line.num_queued for w in fleet for line in w.lines] == [3])


@pytest.mark.parametrize(
    "change",
    [
        {"deadline_ms": 10**25},
        {"ticket": "t" * 9_000},
        {"incarnation": "a life before"},
        {"num_tokens": 4},
    ],
)
async def test_a_bad_offer_costs_a_recompute_and_nothing_else(change: dict[str, object]) -> None:
    async with one_process_mesh(make_parts("p-0", "prefill"), make_parts("d-0", "decode")) as client:
        reserve = reservation(client, 0)
        answer = client.expect("r0")
        assert isinstance(await client.bus.ask(subjects.RUN, ("d-0",), reserve, 10), AttemptAccepted)
        await client.bus.publish(
            subjects.OFFERED,
            ("p-0", "d-0", "r0-1"),
            msgspec.structs.replace(offer_for(reserve), **change),
        )
        await answer.end()
        same_tokens(answer.token_ids, expected([1, 2, 3], reserve.sampling))
        assert answer.report is not None and answer.report.recomputed_tokens == 3
        await client.until_free()


async def test_of_a_cancelled_prompt_only_what_was_computed_is_told_and_lent() -> None:
    """Each is cancelled between two chunks, when some of its blocks have been told to the directory."""
    parts = make_parts("p-0", "prefill", num_blocks=64)
    fake_engine(parts).before_step = lambda _: time.sleep(0.05)
    params = SamplingParams(max_tokens=50, temperature=0.0, ignore_eos=True)
    async with one_process_mesh(parts, make_parts("d-0", "decode", num_blocks=64), token_budget=8) as client:

        async def until_inventory(holds: Callable[[Inventory], bool]) -> None:
            async def held() -> bool:
                return holds(await client.bus.ask(subjects.INVENTORY, ("p-0",), ReadInventory(), 10))

            await until(held)

        for number in range(5):
            prompt = [number + 1] * 300
            await client.send(f"r{number}", prompt, params)
            hashes = hash_blocks(prompt, LAYOUT.block_size, model_fingerprint=LAYOUT.fingerprint)
            await until_inventory(lambda page, first=hashes[0]: first in split_hashes(page.block_hashes))
            await client.cancel(f"r{number}")
            await client.until_free()
            page = await client.bus.ask(subjects.INVENTORY, ("p-0",), ReadInventory(), 10)
            told = split_hashes(page.block_hashes)
            num_told = sum(block_hash in told for block_hash in hashes)
            assert 0 < num_told < len(hashes) and set(hashes[:num_told]) <= set(told)
            # What is told is right: another worker reads it, and goes on from it.
            sources = (KVSource(worker_id=WorkerId("p-0"), first_block=0, num_blocks=len(hashes)),)
            short = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
            answer = await client.complete(f"again{number}", prompt, short, route=Route(WorkerId("d-0"), None, sources))
            same_tokens(answer.token_ids, expected(prompt, short))
            assert answer.report is not None and answer.report.transferred_tokens >= num_told * LAYOUT.block_size


async def test_hostile_messages_end_no_worker() -> None:
    """Each is refused or dropped, and the next request is served."""
    async with one_process_mesh(make_parts("p-0", "prefill"), make_parts("d-0", "decode")) as client:
        params = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
        lease = RequestLease(
            request_id=RequestId("r"), attempt=1, deadline_ms=now_ms() + 60_000, reader=WorkerId("x" * 3000),
            fingerprint=LAYOUT.fingerprint, first_block=2**52, block_hashes=bytes(32),
        )  # fmt: skip
        for worker in ("p-0", "d-0"):
            for change in ({}, {"first_block": -5}, {"deadline_ms": 2**53}, {"reader": "d-0", "first_block": 2**52}):
                asked = msgspec.structs.replace(lease, **change)
                reply = await client.bus.ask(subjects.LEASE, (worker, asked.reader), asked, 10)
                assert isinstance(reply, Refused)
        run = RunAttempt(
            request_id=RequestId("twice"), attempt=1, deadline_ms=now_ms() + 60_000, gateway_id=client.gateway_id,
            prompt=pack_tokens([1, 2, 3]), sampling=SamplingParams(max_tokens=2_000, ignore_eos=True),
        )  # fmt: skip
        client.expect("twice")
        assert isinstance(await client.bus.ask(subjects.RUN, ("d-0",), run, 10), AttemptAccepted)
        same = msgspec.structs.replace(reservation(client, 0), request_id=RequestId("twice"))
        assert isinstance(await client.bus.ask(subjects.RUN, ("d-0",), same, 10), Refused)
        await client.cancel("twice")
        answer = await client.complete("after", [4, 5, 6], params)
        same_tokens(answer.token_ids, expected([4, 5, 6], params))
        await client.until_free()
