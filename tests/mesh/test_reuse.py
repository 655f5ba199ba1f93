"""KV from wherever it lies: every source, carrier, loss and eviction gives the tokens of a single process.

The fake engine makes each token from what it reads in its arena: wrong KV is wrong tokens.
"""

import asyncio
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dataplane.blocks.layout import KVLayout
from dataplane.carriers import shm, tcp
from schemas import subjects
from schemas.ids import WorkerId
from schemas.kv import LeaseGranted, PurgeBlocks, RequestLease
from schemas.request import KVSource, SamplingParams, TransferReport
from services.engine.fake import fake_answer
from services.holder.core.leases import Grant
from services.holder.kv.blocks import LentBlocks, StreamLease
from tests.mesh.one_process import LAYOUT, VOCAB, Answer, Client, Route, make_parts, one_process_mesh
from tests.promises import same_tokens
from tests.share import examples
from tests.virtual import loop_factory

pytestmark = pytest.mark.virtual_time

BLOCK = LAYOUT.block_size
WINDOWED = KVLayout(
    weights="fake", dtype="float32", num_layers=3, num_kv_heads=2, head_dim=8, block_size=8, windows=(20, 0, 20)
)
SLIDING = KVLayout(
    weights="fake", dtype="float32", num_layers=2, num_kv_heads=2, head_dim=8, block_size=8, windows=(20, 20)
)
WHOLE = msgspec.structs.replace(LAYOUT, whole_blocks=True)
P0, P1, D0, D1 = (WorkerId(name) for name in ("p-0", "p-1", "d-0", "d-1"))


def fleet(num_blocks: int = 256, layout: KVLayout = LAYOUT) -> list:
    roles = {"p": "prefill", "d": "decode"}
    return [make_parts(str(w), roles[w[0]], num_blocks=num_blocks, layout=layout) for w in (P0, P1, D0, D1)]  # type: ignore[arg-type]


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


def source(worker_id: WorkerId, first_block: int = 0, num_blocks: int = 999) -> KVSource:
    return KVSource(worker_id=worker_id, first_block=first_block, num_blocks=num_blocks)


def check(answer: Answer, prompt: list[int], params: SamplingParams, layout: KVLayout = LAYOUT) -> None:
    assert answer.failure is None, answer.failure
    same_tokens(answer.token_ids, fake_answer(layout, prompt, params, vocab_size=VOCAB))
    assert answer.report is not None
    for report in (answer.report, answer.prefill_report):
        if report is not None:
            assert report.cached_tokens + report.transferred_tokens + report.recomputed_tokens == len(prompt)
            assert sum(part.num_tokens for part in report.transferred_from) == report.transferred_tokens


def by_source(report: TransferReport | None) -> dict[str, int]:
    assert report is not None
    return {part.worker_id: part.num_tokens for part in report.transferred_from}


class Talk:
    """A conversation: each turn's prompt is all that was said before and something new."""

    def __init__(self, client: Client, rng: random.Random, num_tokens: int = 60) -> None:
        self._client, self._rng = client, rng
        self.tokens = [rng.randrange(1, VOCAB) for _ in range(num_tokens)]
        self._number = 0

    async def turn(self, route: Route | None, *, num_new: int = 10, max_tokens: int = 12) -> Answer:
        self.tokens += [self._rng.randrange(1, VOCAB) for _ in range(num_new)]
        self._number += 1
        name, params = f"t{id(self)}-{self._number}", greedy(max_tokens)
        answer = await self._client.complete(name, self.tokens, params, route=route)
        check(answer, self.tokens, params)
        self.tokens += answer.token_ids
        return answer


@pytest.mark.parametrize("carrier", ["shm", "tcp"])
async def test_the_next_turn_reads_from_the_decode_worker_the_answer_included(carrier: str) -> None:
    async with one_process_mesh(*fleet(), carrier=carrier) as client:
        talk = Talk(client, random.Random(1))
        await talk.turn(Route(P0, D0))
        num_history = (len(talk.tokens) - 1) // BLOCK * BLOCK  # all but the answer's last token has its KV
        answer = await talk.turn(Route(P1, D0, (source(D0),)))  # D → P, on a worker that knows nothing of it
        assert by_source(answer.prefill_report) == {D0: num_history}
        assert answer.report is not None and answer.report.cached_tokens == num_history  # D reads only what it lacks
        answer = await talk.turn(Route(P0, D1, (source(P1),)))  # P → P
        assert set(by_source(answer.prefill_report)) == {P1}
        answer = await talk.turn(Route(D0, None, (source(D1),)))  # D → D, not split
        assert set(by_source(answer.report)) == {D1} and answer.prefill_report is None
        await client.until_free()


async def test_a_prefix_from_one_and_its_continuation_from_another() -> None:
    async with one_process_mesh(*fleet()) as client:
        tokens = [random.Random(2).randrange(1, VOCAB) for _ in range(100)]
        check(await client.complete("a", tokens[:48], greedy(1), route=Route(P0)), tokens[:48], greedy(1))
        check(await client.complete("b", tokens, greedy(1), route=Route(D0)), tokens, greedy(1))
        sources = (source(P0, 0, 6), source(D0, 6))
        answer = await client.complete("c", tokens, greedy(5), route=Route(P1, D1, sources))
        check(answer, tokens, greedy(5))
        assert by_source(answer.prefill_report) == {P0: 48, D0: 48}
        assert answer.prefill_report is not None and answer.prefill_report.recomputed_tokens == 4


async def test_blocks_gone_here_and_still_there() -> None:
    """Eviction recovery: the pool is full of other prompts, and the decode worker still has this one."""
    parts = [make_parts("p-0", "prefill", num_blocks=16), make_parts("d-0", "decode", num_blocks=256)]
    async with one_process_mesh(*parts) as client:
        talk = Talk(client, random.Random(3), 60)
        await talk.turn(Route(P0, D0))
        for number in range(4):
            other = [number + 1] * 100
            check(await client.complete(f"other{number}", other, greedy(1), route=Route(P0)), other, greedy(1))
        answer = await talk.turn(Route(P0, D0, (source(D0),)))
        assert answer.prefill_report is not None and answer.prefill_report.cached_tokens == 0
        assert by_source(answer.prefill_report)[D0] >= 64


@pytest.mark.parametrize("policy", ["cost"])
async def test_the_scheduler_finds_what_lies_with_whom(policy: str) -> None:
    rng = random.Random(4)
    async with one_process_mesh(*fleet(1024), policy=policy) as client:
        talks = [Talk(client, rng, 300) for _ in range(4)]
        num_recomputed = 0
        for turn in range(4):
            for talk in talks:
                answer = await talk.turn(None)
                computing = answer.prefill_report or answer.report
                assert computing is not None
                num_recomputed += computing.recomputed_tokens if turn else 0
                await asyncio.sleep(0.02)  # the directory hears of it meanwhile
        await client.until_free()
        assert num_recomputed < 12 * 60, "later turns compute little more than what is new"


@pytest.mark.parametrize("bad", ["nobody", "gone", "itself"])
async def test_a_stale_hint_costs_a_recompute_and_nothing_else(bad: str) -> None:
    async with one_process_mesh(*fleet()) as client:
        prompt = [random.Random(5).randrange(1, VOCAB) for _ in range(50)]
        holder = {"nobody": WorkerId("p-77"), "gone": P1, "itself": P0}[bad]
        answer = await client.complete("r", prompt, greedy(5), route=Route(P0, D0, (source(holder),)))
        check(answer, prompt, greedy(5))
        assert answer.prefill_report is not None and answer.prefill_report.recomputed_tokens == 50
        await client.until_free()


@pytest.mark.parametrize("carrier", ["shm", "tcp"])
async def test_what_was_damaged_where_it_was_kept_is_computed_anew(carrier: str) -> None:
    """Whoever hands a prefix on has the tags of who has computed it."""
    workers = fleet()
    async with one_process_mesh(*workers, carrier=carrier) as client:
        prompt = [random.Random(7).randrange(1, VOCAB) for _ in range(100)]
        check(await client.complete("a", prompt, greedy(1), route=Route(P0)), prompt, greedy(1))
        answer = await client.complete("b", prompt, greedy(1), route=Route(P1, None, (source(P0),)))
        assert by_source(answer.report) == {P0: 96}
        workers[1].arena.array[:] ^= 1
        answer = await client.complete("c", prompt, greedy(5), route=Route(D0, None, (source(P1),)))
        check(answer, prompt, greedy(5))
        assert answer.report is not None and answer.report.recomputed_tokens == 100
        answer = await client.complete("d", prompt, greedy(5), route=Route(D1, None, (source(P1), source(P0))))
        check(answer, prompt, greedy(5))
        assert by_source(answer.report) == {P0: 96}, "another one has it as it was"
        await client.until_free()


async def purge(client: Client, worker_id: WorkerId, tenant: str | None = None) -> int:
    reply = await client.bus.ask(subjects.PURGE, (worker_id,), PurgeBlocks(tenant=tenant), 30)
    assert (reply.worker_id, reply.failure) == (worker_id, "")
    return reply.num_blocks


async def test_what_was_purged_is_not_kept_nor_lent() -> None:
    async with one_process_mesh(*fleet()) as client:
        prompt = [random.Random(8).randrange(1, VOCAB) for _ in range(100)]
        check(await client.complete("a", prompt, greedy(1), route=Route(P0)), prompt, greedy(1))
        assert await purge(client, P0, "another tenant") == 0
        assert await purge(client, P0) == 12 and await purge(client, P0) == 0
        for worker_id, sources in ((P1, (source(P0),)), (P0, ())):
            answer = await client.complete(f"on-{worker_id}", prompt, greedy(5), route=Route(worker_id, None, sources))
            check(answer, prompt, greedy(5))
            assert answer.report is not None and answer.report.recomputed_tokens == 100
        await client.until_free()


async def test_what_runs_while_all_is_purged_goes_on_and_leaves_nothing() -> None:
    async with one_process_mesh(*fleet()) as client:
        prompt = [random.Random(9).randrange(1, VOCAB) for _ in range(100)]
        answering = await client.send("a", prompt, greedy(200), route=Route(P0))
        await client.until(lambda _: len(answering.tokens) >= 10)
        await purge(client, P0)
        await client.until(lambda _: answering.ended.is_set())
        check(answering, prompt, greedy(200))
        await client.until_free()
        assert await purge(client, P0) == 0, "nothing of it was kept"


@contextmanager
def small_frames() -> Iterator[None]:
    """Let a transfer of these tiny sequences be many frames, so that it can break in the middle."""
    before = shm.SharedHolder.frame_bytes, tcp.TcpHolder.frame_bytes
    shm.SharedHolder.frame_bytes = tcp.TcpHolder.frame_bytes = LAYOUT.block_size * 2 * LAYOUT.token_bytes
    try:
        yield
    finally:
        shm.SharedHolder.frame_bytes, tcp.TcpHolder.frame_bytes = before


@contextmanager
def leases_end_early(breaks: Callable[[Grant], bool]) -> Iterator[None]:
    """Let a holder find, when it looks again after some bytes have left, that the lease is not good any more."""
    honest = StreamLease.still_valid

    def still_valid(self: StreamLease) -> bool:
        return not breaks(self.kv) and honest(self)

    StreamLease.still_valid = still_valid  # type: ignore[method-assign]
    try:
        yield
    finally:
        StreamLease.still_valid = honest  # type: ignore[method-assign]


async def test_what_landed_of_a_broken_read_is_kept_and_the_rest_comes_from_another() -> None:
    looks = 0

    def breaks(lease: Grant) -> bool:
        nonlocal looks
        looks += lease.holder == D0
        return lease.holder == D0 and looks > 9

    async with one_process_mesh(*fleet(), carrier="tcp") as client:
        tokens = [random.Random(6).randrange(1, VOCAB) for _ in range(120)]
        for worker in (D0, D1):
            check(await client.complete(f"on-{worker}", tokens, greedy(1), route=Route(worker)), tokens, greedy(1))
        with small_frames(), leases_end_early(breaks):
            sources = (source(D0), source(D1))
            answer = await client.complete("r", tokens, greedy(5), route=Route(P0, D1, sources))
        check(answer, tokens, greedy(5))
        parts = by_source(answer.prefill_report)
        assert 0 < parts[D0] < 112 and parts[D0] + parts[D1] >= 112
        await client.until_free()


@pytest.mark.parametrize("layout", [LAYOUT, WINDOWED, SLIDING, WHOLE], ids=["full", "hybrid", "sliding", "whole"])
@pytest.mark.parametrize("carrier", ["shm", "tcp"])
@given(data=st.data())
@settings(max_examples=examples(20, at_least=2), deadline=None, suppress_health_check=list(HealthCheck))
def test_every_combination_gives_the_tokens_of_a_single_process(
    data: st.DataObject, carrier: str, layout: KVLayout, request: pytest.FixtureRequest
) -> None:
    """Small pools (64 blocks), shared prefixes, any placement, any sources, true and false, reads that break."""
    seed = data.draw(st.integers(0, 2**32 - 1), label="seed")
    with asyncio.Runner(loop_factory=loop_factory(request.node)) as runner:
        runner.run(_any_combination(random.Random(seed), carrier, layout))


async def _any_combination(rng: random.Random, carrier: str, layout: KVLayout) -> None:
    workers = (P0, P1, D0, D1)
    trunk = [rng.randrange(1, VOCAB) for _ in range(300)]
    loss = rng.choice([0.0, 0.0, 0.05, 0.3])

    async def one(client: Client, number: int) -> None:
        await asyncio.sleep(rng.random() * 0.3)
        cut = rng.randrange(0, 250)
        prompt = trunk[:cut] + [rng.randrange(1, VOCAB) for _ in range(rng.randrange(1, 60))]
        params = SamplingParams(
            max_tokens=rng.randrange(1, 30), temperature=rng.choice([0.0, 1.0]), seed=number, ignore_eos=True
        )
        sources = tuple(
            source(rng.choice(workers), first := rng.randrange(0, 20), rng.randrange(1, 40 - first))
            for _ in range(rng.randrange(0, 4))
        )
        split = params.max_tokens > 1 and rng.random() < 0.7
        route = Route(rng.choice((P0, P1)), rng.choice((D0, D1)), sources) if split else Route(
            rng.choice(workers), None, sources
        )  # fmt: skip
        name = f"r{number}"
        if rng.random() < 0.15:
            answer = await client.send(name, prompt, params, route=route)
            await asyncio.sleep(rng.random() * 0.05)
            await client.cancel(name)
            return
        answer = await client.complete(name, prompt, params, route=route)
        check(answer, prompt, params, layout)

    async with one_process_mesh(*fleet(64, layout), carrier=carrier, token_budget=32) as client:
        with small_frames(), leases_end_early(lambda _: rng.random() < loss):
            async with asyncio.timeout(120):
                await asyncio.gather(*(one(client, number) for number in range(24)))
        await client.until_free()


async def test_a_grant_that_was_not_asked_for_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A holder that says that it has more, or something else, costs a recompute."""
    honest = LentBlocks.sign_lease

    def lend(self: LentBlocks, grant: Grant, request: RequestLease, traceparent: str) -> LeaseGranted:
        return msgspec.structs.replace(honest(self, grant, request, traceparent), first_token=8)

    async with one_process_mesh(*fleet()) as client:
        prompt = [random.Random(9).randrange(1, VOCAB) for _ in range(64)]
        await client.complete("a", prompt, greedy(1), route=Route(D0))
        monkeypatch.setattr(LentBlocks, "sign_lease", lend)
        answer = await client.complete("b", prompt, greedy(5), route=Route(P0, D1, (source(D0),)))
        check(answer, prompt, greedy(5))
        assert answer.prefill_report is not None and answer.prefill_report.recomputed_tokens == 64
