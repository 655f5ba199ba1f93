"""What a worker remembers of its answers; whom it asks who wants them; how it notices that it stood still; what waits
to be sent; whose blocks are whose."""

import asyncio

import pytest

from dataplane.blocks.layout import BlockTable, Segment
from schemas import subjects
from schemas.block import pack_tokens, unpack_tokens
from schemas.ids import GatewayId, RequestId, WorkerId
from schemas.logprobs import TokenLogprob, pack_logprobs
from schemas.message import encode
from schemas.request import (
    AttemptFailure,
    AttemptId,
    CancelRequest,
    RequestFailure,
    RequestTokens,
    TokensEmitted,
    TransferReport,
)
from schemas.worker import WorkerDraining
from services.bus.limits import MIN_PAYLOAD_BYTES
from services.bus.memory import MemoryBroker, MemoryBus
from services.bus.typed import TypedBus
from services.holder import outbox as outbox_module
from services.holder.core.actions import Submit
from services.holder.core.attempt import SentAnswer
from services.holder.core.attempts import PastAttempts
from services.holder.core.content import AttemptKey
from services.holder.core.leases import LeaseTable
from services.holder.kv.blocks import num_distinct_blocks
from services.holder.outbox import Outbox
from services.presence import BusConnected
from services.times import Times
from services.worker.core import AttemptCore
from services.worker.wanted import (
    AskGateway,
    GatewayAnswered,
    GatewayUnanswered,
    GatewayUnserved,
    WantedCore,
    WantedEvent,
)
from tests.worker import worker_cases as case

RETAIN_ANSWER_MS = Times().worker.retain_answer_ms
UNSERVED_GAP_MS = Times().presence.unserved_gap_ms

KEY: AttemptKey = (RequestId("r"), 1)
GATEWAY = GatewayId("g")


def said(index: int, *token_ids: int, **more: object) -> RequestTokens:
    return RequestTokens(request_id="r", attempt=1, index=index, tokens=pack_tokens(token_ids), **more)  # type: ignore[arg-type]


def test_words_are_given_again_from_any_token_on() -> None:
    answer = SentAnswer()
    report = TransferReport(cached_tokens=3)
    answer.extend(said(4, 40, report=report))
    answer.extend(said(5, 50))
    answer.extend(said(6, 60, finish_reason="stop"))
    for index, start, tokens in [(0, 4, [40, 50, 60]), (5, 5, [50, 60]), (7, 7, []), (9, 7, [])]:
        again = answer.since(KEY, index)
        assert again is not None and again.index == start and unpack_tokens(again.tokens) == tokens
        assert again.finish_reason == "stop" and again.report == report


def test_nothing_new_is_none() -> None:
    answer = SentAnswer()
    assert answer.is_empty and answer.since(KEY, 0) is None
    answer.extend(said(0, 1))
    assert answer.since(KEY, 1) is None and not answer.is_empty


def test_a_failure_after_tokens_is_told_with_them() -> None:
    answer = SentAnswer()
    answer.extend(said(0, 1, 2))
    answer.extend(said(0, failure=RequestFailure(code=AttemptFailure.DRAINING, detail="", retryable=True)))
    again = answer.since(KEY, 1)
    assert again is not None and unpack_tokens(again.tokens) == [2] and again.failure is not None


def test_words_are_kept_while_the_attempt_goes_on_and_a_while_after() -> None:
    core = AttemptCore(case.limits(case.PREFILL), case.block_cache(), LeaseTable())
    _, actions = case.ask(core, case.run_prefill(split=False))
    sequence, key = case.one(actions, Submit).sequence, (RequestId("r1"), 1)
    case.decide(core, case.sampled(sequence, 0), 1)
    case.tick(core, 50_000)
    going_on = core.answer_of(key)
    assert going_on is not None and going_on.since(key, 0) is not None
    case.decide(core, case.sampled(sequence, 1, finish="stop", local_end=True), 50_000)
    case.tick(core, 50_000 + RETAIN_ANSWER_MS - 1)
    assert core.answer_of(key) is going_on and key not in core.records
    case.tick(core, 50_000 + RETAIN_ANSWER_MS)
    assert core.answer_of(key) is None and key in core.past


def test_only_so_many_ended_answers_are_kept() -> None:
    past = PastAttempts(RETAIN_ANSWER_MS, max_attempts=2)
    keys = [(RequestId(f"r{number}"), 1) for number in range(4)]
    for number, key in enumerate(keys):
        answer = SentAnswer()
        answer.extend(said(0, 1))
        past.ended(key, answer, number)
    assert [past.answer(key) is not None for key in keys] == [False, False, True, True]
    assert [key in past for key in keys] == [False, False, True, True]


def test_an_attempt_that_has_said_nothing_is_not_known_once_it_is_over() -> None:
    past = PastAttempts(RETAIN_ANSWER_MS)
    past.ended(KEY, SentAnswer(), 0)
    assert past.answer(KEY) is None and KEY in past


def attempts(*numbers: int, gateway: GatewayId = GATEWAY) -> dict[AttemptKey, GatewayId]:
    return {(RequestId(f"r{number}"), 1): gateway for number in numbers}


class Bench:
    """The core, and what goes on here."""

    def __init__(self) -> None:
        self.attempts: dict[AttemptKey, GatewayId] = {}
        self.core = WantedCore(lambda: self.attempts, Times())

    def asked(self, now_ms: int, *numbers: int, num_connects: int = 1) -> list[AskGateway]:
        self.attempts = attempts(*numbers)
        assert self.core.handle(BusConnected(num_connects), now_ms) == []
        return self.core.tick(now_ms)

    def unwanted(self, event: WantedEvent, now_ms: int) -> list[AttemptKey]:
        return [each.key for each in self.core.handle(event, now_ms)]


def test_a_gateway_is_asked_about_what_is_not_new() -> None:
    bench = Bench()
    assert bench.asked(0, 1) == []
    (question,) = bench.asked(1_000, 1, 2)
    assert question == AskGateway(GATEWAY, ((RequestId("r1"), 1),), 1_000)
    stranger = AttemptId(request_id=RequestId("r9"), attempt=1)
    assert bench.unwanted(GatewayAnswered(question, (stranger,)), 1_000) == []
    answered = GatewayAnswered(question, (question.attempts[0], stranger))
    assert bench.unwanted(answered, 1_000) == list(question.keys)


def test_many_attempts_are_asked_about_in_parts() -> None:
    bench = Bench()
    bench.asked(0, *range(600))
    assert [len(question.keys) for question in bench.asked(1_000, *range(600))] == [256, 256, 88]


def test_a_gateway_that_is_not_there_twice_is_dead() -> None:
    bench = Bench()
    bench.asked(0, 1)
    (question,) = bench.asked(1_000, 1)
    assert bench.unwanted(GatewayUnserved(question), 1_000) == [] and bench.core.suspects
    assert bench.unwanted(GatewayUnserved(question), 1_900) == [], "asked at the same time as the first"
    (early,) = bench.asked(1_000 + UNSERVED_GAP_MS - 1, 1)
    assert bench.unwanted(GatewayUnserved(early), 1_900) == []
    (second,) = bench.asked(1_000 + UNSERVED_GAP_MS, 1)
    assert bench.unwanted(GatewayUnserved(second), 1_900) == list(question.keys)


@pytest.mark.parametrize("says", ["answered", "unanswered"])
def test_any_other_word_begins_anew(says: str) -> None:
    bench = Bench()
    bench.asked(0, 1)
    (question,) = bench.asked(1_000, 1)
    bench.unwanted(GatewayUnserved(question), 1_000)
    bench.unwanted(GatewayAnswered(question, ()) if says == "answered" else GatewayUnanswered(question), 1_100)
    (later,) = bench.asked(1_600, 1)
    assert not bench.core.suspects and bench.unwanted(GatewayUnserved(later), 1_600) == []


def test_after_a_reconnect_nobody_is_dead_for_a_while() -> None:
    bench = Bench()
    bench.asked(0, 1)
    (question,) = bench.asked(1_000, 1)
    bench.unwanted(GatewayUnserved(question), 1_000)
    for time_ms in (2_000, 3_999, 4_000):
        (question,) = bench.asked(time_ms, 1, num_connects=2)
        assert bench.unwanted(GatewayUnserved(question), time_ms) == []
    (question,) = bench.asked(4_500, 1, num_connects=2)
    assert bench.unwanted(GatewayUnserved(question), 4_500) == list(question.keys)


def test_after_a_question_without_an_answer_nobody_is_dead_for_a_while() -> None:
    """The broker may stand still, and for so long that the gateway has left it."""
    bench = Bench()
    bench.asked(0, 1)
    (question,) = bench.asked(1_000, 1)
    bench.unwanted(GatewayUnanswered(question), 2_000)
    for time_ms in (2_500, 3_000, 3_999):
        (question,) = bench.asked(time_ms, 1)
        assert bench.unwanted(GatewayUnserved(question), time_ms) == []
    for time_ms in (4_000, 4_500):
        (question,) = bench.asked(time_ms, 1)
        unwanted = bench.unwanted(GatewayUnserved(question), time_ms)
    assert unwanted == list(question.keys)


def test_a_block_counts_once_however_many_share_it() -> None:
    def tables(*groups: list[tuple[int, int]]) -> tuple[BlockTable, ...]:
        return tuple(BlockTable(tuple(Segment(*segment) for segment in group), 0) for group in groups)

    shared = tables([(0, 4), (10, 2)], [(0, 3)])
    assert num_distinct_blocks([]) == 0
    assert num_distinct_blocks([shared, shared]) == 9
    assert num_distinct_blocks([shared, tables([(2, 5), (11, 1)], [(0, 1), (1, 1), (0, 1)])]) == 12


def cancel(number: int) -> CancelRequest:
    return CancelRequest(request_id=RequestId(f"r{number}"), attempt=1, deadline_ms=1, reason="")


async def test_what_repairs_itself_makes_room_for_what_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox_module, "MAX_UNSENT", 3)
    connection = MemoryBus()
    bus, me = TypedBus(connection, "w"), WorkerId("w")
    outbox = Outbox(bus, me)
    subscription = await connection.subscribe("mesh.v1.>")
    outbox.put(subjects.CANCEL, ("r0",), cancel(0))
    for index in range(3):
        outbox.put_tokens([(GATEWAY, said(index, 7))])
    outbox.put(subjects.CANCEL, ("r1",), cancel(1))
    assert (len(outbox), outbox.num_unsent) == (3, 2)
    draining = WorkerDraining(worker_id=me, incarnation="i")
    outbox.put(subjects.DRAINING, (me,), draining)
    outbox.put(subjects.DRAINING, (me,), draining)  # nothing is left that repairs itself: the oldest goes
    outbox.close()
    await outbox.run()
    await connection.close()
    got = [delivery.subject.split(".", 3)[-1] async for delivery in subscription]
    assert got == ["r1.cancel", "w.draining", "w.draining"] and outbox.num_unsent == 4


async def test_what_cannot_be_sent_keeps_nothing_else_waiting() -> None:
    connection = MemoryBus()
    outbox = Outbox(TypedBus(connection, "w"), WorkerId("w"))
    subscription = await connection.subscribe("mesh.v1.>")
    outbox.put(subjects.CANCEL, ("r0",), WorkerDraining(worker_id=WorkerId("w"), incarnation="i"))  # no such pair
    outbox.put(subjects.CANCEL, ("r1",), cancel(1))
    outbox.close()
    async with asyncio.timeout(10):
        await outbox.run()
    await connection.close()
    assert [delivery.subject async for delivery in subscription] == ["mesh.v1.request.r1.cancel"]


def test_logprobs_are_given_again_with_their_tokens() -> None:
    answer = SentAnswer()
    first, second = TokenLogprob(-0.5, ((7, -0.5),)), TokenLogprob(-1.5, ((3, -0.25),))
    of_prompt = pack_logprobs([TokenLogprob(-2.0)])
    answer.extend(said(0, 7, logprobs=pack_logprobs([first]), prompt_logprobs=of_prompt))
    answer.extend(said(1, 9, logprobs=pack_logprobs([second])))
    again, later = answer.since(KEY, 0), answer.since(KEY, 1)
    assert again is not None and again.logprobs == pack_logprobs([first, second]) and again.prompt_logprobs == of_prompt
    assert later is not None and later.logprobs == pack_logprobs([second]) and later.prompt_logprobs is None


async def test_what_one_step_says_is_as_many_messages_as_the_broker_needs() -> None:
    sent: list[TokensEmitted] = []

    class Bus(TypedBus):
        async def publish(self, subject, ids, message, *_):  # type: ignore[no-untyped-def]
            sent.append(message)

    outbox = Outbox(Bus(MemoryBus(MemoryBroker(max_bytes=MIN_PAYLOAD_BYTES)), "prefill"), WorkerId("w"))
    top = tuple((2**31 + number, -1.0) for number in range(20))
    step = [said(0, 7, logprobs=pack_logprobs([TokenLogprob(-2.0, top)])) for _ in range(200)]
    step.insert(10, said(0, 7, prompt_logprobs=pack_logprobs([TokenLogprob(-2.0)] * 4_000)))
    outbox.put_tokens([(GATEWAY, tokens) for tokens in step])
    outbox.close()
    await outbox.run()
    assert [tokens for message in sent for tokens in message.requests] == step
    assert sent[1].requests == (step[10],) and len(sent) < 12
    assert all(len(encode(message)) <= MIN_PAYLOAD_BYTES for message in sent)


def test_what_is_asked_for_again_comes_in_parts_and_ends_with_the_last() -> None:
    answer = SentAnswer()
    logprobs = [TokenLogprob(-1.0, ((1, -1.0), (2, -2.0)))] * 4_000
    answer.extend(said(0, *range(4_000), logprobs=pack_logprobs(logprobs)))
    answer.extend(said(4_000, finish_reason="length"))
    found: list[int] = []
    while True:
        part = answer.since(KEY, len(found), MIN_PAYLOAD_BYTES)
        assert part is not None and part.logprobs is not None
        assert len(encode(TokensEmitted(worker_id=WorkerId("w"), requests=(part,)))) < MIN_PAYLOAD_BYTES // 2
        found += unpack_tokens(part.tokens)
        if part.finish_reason is not None:
            break
    assert found == list(range(4_000))
