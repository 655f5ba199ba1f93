"""Answers that must be something, through whole workers: a grammar is understood while the prompt is on its way, and an
engine never waits for one."""

import asyncio
from concurrent.futures import Future

import msgspec
import pytest

from schemas import subjects
from schemas.block import pack_tokens
from schemas.ids import RequestId, WorkerId
from schemas.request import (
    AskGrammar,
    AttemptFailure,
    GrammarSent,
    RefusalReason,
    Refused,
    RunAttempt,
    SamplingParams,
    digest_of_grammar,
)
from services.bus.typed import Received
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
    """Understands grammars when it is let, and keeps them."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Future[Grammar]]] = []
        self._is_let = False

    def start(self, text: str) -> "Future[Grammar]":
        self.asked.append((text, GRAMMARS.compile(text) if self._is_let else Future()))
        return self.asked[-1][1]

    def understand(self) -> None:
        self._is_let = True
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


LONG = "brackets 2" + " " * 5_000


def long_grammar(text: str) -> "Future[Grammar]":
    return GRAMMARS.compile(text.strip())


def told_by_digest(seed: int = 0) -> SamplingParams:
    return msgspec.structs.replace(wanted(seed=seed), grammar="", grammar_digest=digest_of_grammar(LONG))


def told(asked: AskGrammar, text: str) -> GrammarSent:
    return GrammarSent(request_id=asked.request_id, attempt=asked.attempt, deadline_ms=asked.deadline_ms, grammar=text)


async def test_a_long_grammar_is_told_to_each_worker_once() -> None:
    told_to: list[AskGrammar] = []

    async def tell(received: Received[AskGrammar]) -> GrammarSent:
        told_to.append(received.message)
        return told(received.message, LONG)

    workers = (make_parts(*of, start_grammar=long_grammar) for of in (("p-0", "prefill"), ("d-0", "decode")))
    async with one_process_mesh(*workers) as client:
        await client.serve(subjects.GRAMMAR, tell)
        asked = (client.complete(f"r{seed}", PROMPT, told_by_digest(seed), route=SPLIT) for seed in range(6))
        for seed, answer in enumerate(await asyncio.gather(*asked)):
            same_tokens(answer.token_ids, expected(wanted(seed=seed)))
        assert len(told_to) == 2, "one question of each worker"
        await client.until_free()


@pytest.mark.parametrize(
    ("says", "reason"),
    [
        ("", RefusalReason.DEADLINE),
        ("brackets 2", RefusalReason.INVALID),
        (None, RefusalReason.OVERLOADED),
    ],
    ids=["request is over", "another text", "nobody answers"],
)
async def test_without_its_grammar_no_attempt_begins(says: str | None, reason: RefusalReason) -> None:
    async def tell(received: Received[AskGrammar]) -> GrammarSent:
        return told(received.message, says or "")

    async with one_process_mesh(make_parts("d-0", "decode", start_grammar=long_grammar)) as client:
        if says is not None:
            await client.serve(subjects.GRAMMAR, tell)
        run = RunAttempt(
            request_id=RequestId("r0"), attempt=1, deadline_ms=now_ms() + 60_000, gateway_id=client.gateway_id,
            prompt=pack_tokens(PROMPT), sampling=told_by_digest(),
        )  # fmt: skip
        refused = await client.bus.ask(subjects.RUN, ("d-0",), run, 30)
        assert isinstance(refused, Refused) and refused.reason is reason
        await client.until_free()
