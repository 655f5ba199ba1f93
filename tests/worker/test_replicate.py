"""What decoding completes lies elsewhere as well, so that it outlives its worker.

The fake engine makes each token from what it reads in its arena: a wrong copy is wrong tokens.
"""

import asyncio
import random
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from dataplane.blocks.layout import KVLayout
from schemas import subjects
from schemas.block import hash_blocks, join_hashes, split_hashes
from schemas.directory import LocateBlocks, ReadInventory
from schemas.ids import BlockHash, RequestId, WorkerId
from schemas.message import Message
from schemas.request import RunAttempt
from schemas.subjects import Subject
from services.bus.memory import MemoryBus
from services.config import MeshConfig, StoreConfig, WorkerConfig
from services.directory import service as directory
from services.store.load import make_parts as make_store_parts
from services.store.service import run_store
from services.telemetry import Telemetry
from tests.credentials import CREDENTIALS
from tests.mesh.one_process import LAYOUT, VOCAB, Client, Route, make_parts, one_process_mesh
from tests.mesh.test_reuse import SLIDING, check, greedy, source
from tests.virtual import platform_of
from tests.waiting import until

pytestmark = pytest.mark.virtual_time

BLOCK = LAYOUT.block_size
P0, D0, D1, STORE = (WorkerId(name) for name in ("p-0", "d-0", "d-1", "store-0"))


def fleet(num_blocks: int = 256, layout: KVLayout = LAYOUT) -> list:
    roles = {"p": "prefill", "d": "decode"}
    return [make_parts(w, roles[w[0]], num_blocks=num_blocks, layout=layout) for w in (P0, D0, D1)]  # type: ignore[arg-type]


def name_replica(client: Client, replica: WorkerId, tenant: str = "") -> None:
    """Let every request of this client name a replica, as the scheduler would."""
    ask = type(client.bus).ask

    async def with_replica(
        subject: Subject[Any, Any], ids: tuple[str, ...], message: Message, timeout_s: float, traceparent: str = ""
    ) -> Any:
        if isinstance(message, RunAttempt):
            message = msgspec.structs.replace(message, replica=replica, tenant=tenant)
        return await ask(client.bus, subject, ids, message, timeout_s, traceparent)

    client.bus.ask = with_replica  # type: ignore[method-assign]


async def held_by(client: Client, holder: WorkerId) -> set[BlockHash]:
    reply = await client.bus.ask(subjects.INVENTORY, (holder,), ReadInventory(), 10)
    return set(split_hashes(reply.block_hashes))


async def until_held(client: Client, holder: WorkerId, tokens: list[int], tenant: str = "") -> None:
    """Wait, generously, until the holder has every full block of these tokens that has KV."""
    hashes = hash_blocks(tokens[:-1], BLOCK, model_fingerprint=client.fingerprint, tenant=tenant)

    async def has_them() -> bool:
        return set(hashes) <= await held_by(client, holder)

    await until(has_them)


async def until_located(client: Client, tokens: list[int], times: int) -> None:
    """Have the directory be asked for these tokens so often after it has learned who holds them."""
    joined = join_hashes(hash_blocks(tokens[:-1], BLOCK, model_fingerprint=client.fingerprint))
    question = LocateBlocks(request_id=RequestId("r"), attempt=1, deadline_ms=0, block_hashes=joined)

    async def is_located() -> bool:
        return bool((await client.bus.ask(subjects.LOCATE, (), question, 10)).holders)

    for _ in range(times):
        await until(is_located)


@asynccontextmanager
async def store_beside(client: Client, num_blocks: int = 256) -> AsyncGenerator[None]:
    """Run a store on the client's bus."""
    assert isinstance(client.bus.connection, MemoryBus)
    settings = WorkerConfig(block_size=BLOCK, lease_ms=5_000)
    config = MeshConfig(store=StoreConfig(memory_bytes=num_blocks * LAYOUT.block_bytes), worker=settings)
    parts = make_store_parts(
        config, STORE, LAYOUT, CREDENTIALS, model="fake", context_length=4096, platform=platform_of(STORE)
    )
    stop, ready = asyncio.Event(), asyncio.Event()
    connection = MemoryBus(client.bus.connection._broker)  # pyright: ignore[reportPrivateUsage]
    running = asyncio.create_task(run_store(config, parts, connection, Telemetry(STORE), stop, ready.set))
    await ready.wait()
    try:
        yield
    finally:
        stop.set()
        await running


def prompt_of(seed: int, num_tokens: int = 60) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1, VOCAB) for _ in range(num_tokens)]


@pytest.mark.parametrize("carrier", ["shm", "tcp"])
@pytest.mark.parametrize("split", [True, False])
async def test_an_answer_s_blocks_appear_at_the_replica(carrier: str, split: bool) -> None:
    async with one_process_mesh(*fleet(), carrier=carrier) as client:
        name_replica(client, D1)
        prompt = prompt_of(1)
        route = Route(P0, D0) if split else Route(D0, None)
        answer = await client.complete("one", prompt, greedy(50), route=route)
        check(answer, prompt, greedy(50))
        told = prompt + answer.token_ids
        await until_held(client, D1, told)
        await client.until_free()
        again = await client.complete("two", told, greedy(5), route=Route(D1, None))
        check(again, told, greedy(5))
        assert again.report is not None
        assert again.report.cached_tokens == (len(told) - 1) // BLOCK * BLOCK, "all of it came while it was decoded"


async def test_a_cancelled_answer_s_blocks_are_there_too() -> None:
    async with one_process_mesh(*fleet()) as client:
        name_replica(client, D1)
        prompt = prompt_of(2)
        answer = await client.send("one", prompt, greedy(1_000), route=Route(D0, None))
        await until(lambda: len(answer.tokens) >= 40)
        await client.cancel("one")
        await client.until_free()
        await until_held(client, D1, prompt + answer.token_ids[:20])


async def test_a_tenant_s_copies_are_that_tenant_s() -> None:
    async with one_process_mesh(*fleet()) as client:
        name_replica(client, D1, tenant="acme")
        prompt = prompt_of(3)
        answer = await client.complete("one", prompt, greedy(30), route=Route(P0, D0))
        check(answer, prompt, greedy(30))
        await until_held(client, D1, prompt + answer.token_ids, tenant="acme")
        name_replica(client, D1)
        other = await client.complete("two", prompt, greedy(3), route=Route(D1, None))
        check(other, prompt, greedy(3))
        assert other.report is not None and other.report.cached_tokens == 0


async def test_a_store_keeps_them() -> None:
    """The store has them before anybody evicts them, and a worker that knows nothing of it goes on from there."""
    async with one_process_mesh(*fleet()) as client, store_beside(client):
        name_replica(client, STORE)
        prompt = prompt_of(4)
        answer = await client.complete("one", prompt, greedy(50), route=Route(P0, D0))
        check(answer, prompt, greedy(50))
        told = prompt + answer.token_ids
        await until_held(client, STORE, told)
        again = await client.complete("two", told, greedy(5), route=Route(D1, None, (source(STORE),)))
        check(again, told, greedy(5))
        assert again.report is not None
        assert {part.worker_id for part in again.report.transferred_from} == {STORE}
        await client.until_free()


async def test_a_replica_that_is_full_takes_nothing_and_nobody_waits() -> None:
    parts = [make_parts("p-0", "prefill"), make_parts("d-0", "decode"), make_parts("d-1", "decode", num_blocks=32)]
    async with one_process_mesh(*parts) as client:
        own = prompt_of(5, 27 * BLOCK)
        check(await client.complete("own", own, greedy(1), route=Route(D1, None)), own, greedy(1))
        before = await held_by(client, D1)
        name_replica(client, D1)
        prompt = prompt_of(6)
        check(await client.complete("one", prompt, greedy(50), route=Route(P0, D0)), prompt, greedy(50))
        await client.until_free()
        assert await held_by(client, D1) == before


@pytest.mark.parametrize("has_directory", [True, False])
async def test_a_worker_that_leaves_migrates_what_was_asked_for_most(
    has_directory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And where no directory says what that is, what it has used last. There is room in the budget for one of two."""
    if not has_directory:
        monkeypatch.setattr(directory.Directory, "_answer_heat", lambda *_: asyncio.sleep(60))
    stop, num_blocks = asyncio.Event(), 10
    hot, last = prompt_of(8, num_blocks * BLOCK + 1), prompt_of(9, num_blocks * BLOCK + 1)
    async with one_process_mesh(*fleet(), stops={D0: stop}, leave_bytes=num_blocks * LAYOUT.block_bytes) as client:
        for prompt in (hot, last):
            check(await client.complete(str(prompt[0]), prompt, greedy(1), route=Route(D0, None)), prompt, greedy(1))
            await until_held(client, D0, prompt)
        await until_located(client, hot, 3)
        stop.set()
        kept, lost = (hot, last) if has_directory else (last, hot)
        await until_held(client, D1, kept)
        hashes = hash_blocks(lost[:-1], BLOCK, model_fingerprint=client.fingerprint)
        assert not set(hashes) & await held_by(client, D1)


async def test_a_replica_that_is_not_there_costs_nothing() -> None:
    async with one_process_mesh(*fleet()) as client:
        name_replica(client, WorkerId("nobody"))
        prompt = prompt_of(7)
        check(await client.complete("one", prompt, greedy(50), route=Route(P0, D0)), prompt, greedy(50))
        await client.until_free()


async def test_of_windowed_layers_nothing_is_copied() -> None:
    async with one_process_mesh(*fleet(layout=SLIDING)) as client:
        name_replica(client, D1)
        prompt = prompt_of(8)
        answer = await client.complete("one", prompt, greedy(40), route=Route(P0, D0))
        check(answer, prompt, greedy(40), SLIDING)
        await client.until_free()
        assert not await held_by(client, D1)
