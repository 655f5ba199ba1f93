"""Answers that must be something, through whole workers: a grammar is understood while the prompt is on its way, and an
engine never waits for one."""

import asyncio
from concurrent.futures import Future

import pytest

from schemas.ids import WorkerId
from schemas.request import AttemptFailure, SamplingParams
from services.engine.fake import fake_answer
from services.engine.interface import Grammar
from services.runtime import now_ms
from services.sim.brackets import Brackets, is_document
from tests import virtual
from tests.mesh.one_process import GRAMMARS, LAYOUT, VOCAB, Route, make_parts, one_process_mesh
from tests.promises import same_tokens
from tests.waiting import until

pytestmark = pytest.mark.virtual_time

PROMPT = list(range(1, 60))
SPLIT = Route(WorkerId("p-0"), WorkerId("d-0"))
ALONE = Route(WorkerId("d-0"))


class Slow:
    """Understands a grammar when it is let."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Future[Grammar]]] = []

    def start(self, text: str) -> "Future[Grammar]":
        self.asked.append((text, Future()))
        return self.asked[-1][1]

    def understand(self) -> None:
        for text, future in self.asked:
            if not future.done():
                future.set_result(GRAMMARS.compile(text).result())


def wanted(depth: int = 2, **more: int) -> SamplingParams:
    return SamplingParams(max_tokens=200, temperature=1.0, grammar=f"brackets {depth}", **more)


def expected(params: SamplingParams, depth: int = 2) -> list[int]:
    answer = fake_answer(LAYOUT, PROMPT, params, vocab_size=VOCAB, eos=(0,), grammar=Brackets(depth, VOCAB, 0))
    assert is_document(answer, depth, 0)
    return answer


@pytest.mark.parametrize("route", [SPLIT, ALONE], ids=["split", "alone"])
async def test_documents(route: Route) -> None:
    async with one_process_mesh(make_parts("p-0", "prefill"), make_parts("d-0", "decode")) as client:
        for seed in range(10):
            params = wanted(1 + seed % 3, seed=seed)
            answer = await client.complete(f"r{seed}", PROMPT, params, route=route)
            same_tokens(answer.token_ids, expected(params, 1 + seed % 3))
        await client.until_free()


async def test_a_decode_worker_begins_with_the_reservation() -> None:
    """The prefill worker cannot go on: the decode worker has no KV, and knows the grammar already."""
    held, slow = Slow(), Slow()
    prefill = make_parts("p-0", "prefill", start_grammar=held.start)
    async with one_process_mesh(prefill, make_parts("d-0", "decode", start_grammar=slow.start)) as client:
        answer = await client.send("r0", PROMPT, wanted(seed=3), route=SPLIT)
        await until(lambda: len(slow.asked) >= 1)
        assert not answer.tokens and {text for text, _ in slow.asked} == {"brackets 2"}
        held.understand()
        slow.understand()
        await until(lambda: len(slow.asked) >= 2)
        slow.understand()
        await answer.end()
        same_tokens(answer.token_ids, expected(wanted(seed=3)))
        await client.until_free()


async def test_nobody_waits_for_another_s_grammar() -> None:
    slow = Slow()
    async with one_process_mesh(
        make_parts("p-0", "prefill"), make_parts("d-0", "decode", start_grammar=slow.start)
    ) as c:
        waits = await c.send("r0", PROMPT, wanted(seed=1), route=ALONE)
        await until(lambda: len(slow.asked) >= 1)
        plain = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
        begun_ms = now_ms()
        other = await c.complete("r1", PROMPT, plain, route=ALONE)
        assert len(other.token_ids) == 20 and not waits.tokens
        assert now_ms() - begun_ms < 1_000 or virtual.network() is None, "it waits for none of the other's blocks"
        slow.understand()
        await waits.end()
        same_tokens(waits.token_ids, expected(wanted(seed=1)))
        await c.until_free()


async def test_a_cancel_while_the_grammar_is_being_understood_frees_the_blocks() -> None:
    slow = Slow()
    async with one_process_mesh(
        make_parts("p-0", "prefill"), make_parts("d-0", "decode", start_grammar=slow.start)
    ) as c:
        answer = await c.send("r0", PROMPT, wanted(), route=ALONE)
        await until(lambda: len(slow.asked) >= 1)
        await c.until(lambda fleet: any(load.blocks.running for load in fleet))
        await c.cancel("r0")
        await c.until_free()
        slow.understand()  # nobody has it any more
        await c.until_free()
        assert not answer.tokens and answer.failure is None


@pytest.mark.parametrize("route", [SPLIT, ALONE], ids=["split", "alone"])
async def test_a_grammar_that_cannot_be_understood_fails_its_request_alone(route: Route) -> None:
    async with one_process_mesh(make_parts("p-0", "prefill"), make_parts("d-0", "decode")) as client:
        bad, good = SamplingParams(max_tokens=9, grammar="nonsense"), wanted(seed=5)
        failed, answer = await asyncio.gather(
            client.complete("r0", PROMPT, bad, route=route), client.complete("r1", PROMPT, good, route=route)
        )
        assert failed.failure is not None and not failed.failure.retryable and not failed.tokens
        assert failed.failure.code is AttemptFailure.GRAMMAR and "'nonsense'" in failed.failure.detail
        same_tokens(answer.token_ids, expected(good))
        await client.until_free()
