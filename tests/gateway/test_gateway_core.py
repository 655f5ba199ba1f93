"""The gateway's request, without an event loop: what happens in, what is done out."""

import ast
import inspect
import itertools
from dataclasses import replace
from types import ModuleType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.ids import HandoffId, RequestId, WorkerId
from schemas.logprobs import TokenLogprob
from schemas.request import (
    AttemptEnd,
    AttemptFailure,
    KVSource,
    OtherEnd,
    Placement,
    RefusalReason,
    RequestFailure,
    TransferReport,
)
from services.config import GatewayConfig, MeshConfig
from services.gateway import fleet, limits
from services.gateway.request import core, events
from services.gateway.request import progress_watch as watch
from services.gateway.request.core import Phase, RequestCore
from services.gateway.request.events import (
    Abandon,
    Action,
    AskPlacement,
    ClientGone,
    DeadlinePassed,
    Deliver,
    Event,
    FailRequest,
    Finish,
    GatewayStopping,
    PlaceGranted,
    PlaceRefused,
    PlaceUnanswered,
    SendAttempt,
    SendCancel,
    StopMatched,
    Submitted,
    TokensReceived,
    WorkerLost,
    WorkerReady,
    WorkerRefused,
    WorkerSilent,
)
from services.presence import FailureDetector
from services.times import PresenceTimes
from tests.share import examples

P1, P2, D1, D2 = (WorkerId(name) for name in ("p1", "p2", "d1", "d2"))
ENDS = (Finish, FailRequest, Abandon)
NOW = 1_000_000

FINISHED_ON_PREFILL = SendCancel(1, "finished on the prefill worker", AttemptEnd.COMPLETE)
STOP_REACHED = SendCancel(1, "a stop string was reached", AttemptEnd.COMPLETE)


def new(max_tokens: int = 100, max_attempts: int = 3, detector: FailureDetector | None = None) -> RequestCore:
    config = MeshConfig(gateway=GatewayConfig(max_attempts=max_attempts))
    request = RequestCore(RequestId("req-1"), max_tokens, config, detector or FailureDetector(PresenceTimes()))
    assert request.handle(Submitted(), NOW) == [AskPlacement(1, ())]
    return request


def feed(request: RequestCore, *events: Event) -> list[Action]:
    return [action for event in events for action in request.handle(event, NOW)]


def placement(
    prefill: WorkerId, decode: WorkerId | None, sources: tuple[KVSource, ...] = (), attempt: int = 1
) -> Placement:
    return Placement(
        request_id=RequestId("req-1"), attempt=attempt, deadline_ms=NOW, prefill_worker=prefill, decode_worker=decode,
        sources=sources,
    )  # fmt: skip


def placed(attempt: int = 1, prefill: WorkerId = P1, decode: WorkerId | None = D1) -> PlaceGranted:
    return PlaceGranted(attempt, placement(prefill, decode, attempt=attempt))


def tokens(worker: WorkerId, index: int, *ids: int, attempt: int = 1, finish: str | None = None) -> TokensReceived:
    return TokensReceived(attempt, worker, index, ids, finish)  # type: ignore[arg-type]


def failed(worker: WorkerId, index: int = 0, attempt: int = 1, retryable: bool = True) -> TokensReceived:
    failure = RequestFailure(code=AttemptFailure.ENGINE_FAILED, detail="broke", retryable=retryable)
    return TokensReceived(attempt, worker, index, (), failure=failure)


def refused(worker: WorkerId, reason: RefusalReason, attempt: int = 1) -> WorkerRefused:
    return WorkerRefused(attempt, worker, reason, "busy", 1_500)


def delivered(actions: list[Action]) -> list[int]:
    """The tokens of all Deliver, whose indexes must follow each other."""
    out: list[int] = []
    for action in actions:
        if isinstance(action, Deliver):
            assert action.index == len(out)
            out.extend(action.tokens)
    return out


def test_a_split_request_asks_both_workers_at_once() -> None:
    request = new()
    assert request.handle(placed(), NOW) == [
        SendAttempt(1, P1, downstream=OtherEnd(worker_id=D1, handoff_id=HandoffId("req-1-1"))),
        SendAttempt(1, D1, upstream=OtherEnd(worker_id=P1, handoff_id=HandoffId("req-1-1"))),
    ]
    assert request.handle(tokens(P1, 0, 10), NOW) == [Deliver(0, (10,))]
    assert request.handle(tokens(D1, 1, 11, 12), NOW) == [Deliver(1, (11, 12))]
    assert request.handle(tokens(D1, 3, 13, finish="stop"), NOW) == [Deliver(3, (13,)), Finish("stop")]
    assert request.handle(tokens(D1, 4, 14), NOW) == []


def test_no_decode_worker_is_no_split() -> None:
    request = new()
    assert request.handle(placed(decode=None), NOW) == [SendAttempt(1, P1)]
    assert feed(request, tokens(P1, 0, 1), tokens(P1, 1, 2, finish="length")) == [
        Deliver(0, (1,)), Deliver(1, (2,)), Finish("length"),
    ]  # fmt: skip


def test_one_token_is_never_split() -> None:
    assert new(max_tokens=1).handle(placed(), NOW) == [SendAttempt(1, P1)]


def test_a_split_request_that_ends_at_token_0_lets_the_decode_worker_go() -> None:
    request = new()
    actions = feed(request, placed(), tokens(P1, 0, 7, finish="stop"))[2:]
    assert actions == [
        Deliver(0, (7,)),
        SendCancel(1, "finished on the prefill worker", AttemptEnd.COMPLETE),
        Finish("stop"),
    ]


def test_a_finish_waits_for_token_0() -> None:
    request = new()
    assert feed(request, placed(), tokens(D1, 1, 2, 3, finish="length"))[2:] == []
    assert request.handle(tokens(P1, 0, 1), NOW) == [Deliver(0, (1, 2, 3)), Finish("length")]


def test_a_finish_without_tokens() -> None:
    request = new()
    actions = feed(request, placed(), tokens(P1, 0, 1), tokens(D1, 1, 2), tokens(D1, 2, finish="stop"))
    assert actions[-1] == Finish("stop")
    assert delivered(actions) == [1, 2]


def test_recomputed_token_0_is_hidden_if_equal_and_an_error_if_not() -> None:
    request = new()
    feed(request, placed(), tokens(P1, 0, 1))
    assert request.handle(tokens(D1, 0, 1, 2), NOW) == [Deliver(1, (2,))]
    cancel, fail = request.handle(tokens(D1, 1, 99), NOW)
    assert cancel == SendCancel(1, "tokens differ")
    assert isinstance(fail, FailRequest)
    assert (fail.code, fail.status) == ("replay_mismatch", 500)


def test_tokens_over_max_tokens_are_not_delivered() -> None:
    request = new(max_tokens=2)
    actions = feed(request, placed(), tokens(P1, 0, 1), tokens(D1, 1, 2, 3, 4, finish="length"))
    assert delivered(actions) == [1, 2]
    assert actions[-1] == Finish("length")


@pytest.mark.parametrize(
    "event",
    [
        tokens(D2, 0, 5),
        tokens(P1, 0, 5, attempt=2),
        tokens(P1, -1, 5),
        placed(attempt=2),
        placed(prefill=P2),
        refused(P1, RefusalReason.OVERLOADED, attempt=0),
        WorkerSilent(2, P1, "gone"),
        PlaceRefused(2, RefusalReason.NO_WORKER, "", 0),
        WorkerLost(P2, "silent"),
        WorkerReady(),
    ],
)
def test_what_does_not_concern_this_attempt_is_ignored(event: Event) -> None:
    request = new()
    feed(request, placed())
    assert request.handle(event, NOW) == []


RETRIES: list[tuple[str, list[Event], Event, WorkerId]] = [
    ("prefill refuses", [], refused(P1, RefusalReason.OVERLOADED), P1),
    ("prefill drains", [], refused(P1, RefusalReason.DRAINING), P1),
    ("decode refuses", [tokens(P1, 0, 1)], refused(D1, RefusalReason.OVERLOADED), D1),
    ("decode has another layout", [], refused(D1, RefusalReason.FINGERPRINT), D1),
    ("prefill is silent", [], WorkerSilent(1, P1, "no reply"), P1),
    ("decode is silent", [tokens(P1, 0, 1)], WorkerSilent(1, D1, "no reply"), D1),
    ("prefill fails", [], failed(P1), P1),
    ("decode fails", [tokens(P1, 0, 1), tokens(D1, 1, 2)], failed(D1, 2), D1),
    ("prefill leaves before token 0", [], WorkerLost(P1, "silent"), P1),
    ("prefill leaves before token 0, decode has begun", [tokens(D1, 1, 2)], WorkerLost(P1, "silent"), P1),
    ("decode leaves", [tokens(P1, 0, 1), tokens(D1, 1, 2)], WorkerLost(D1, "silent"), D1),
]


@pytest.mark.parametrize(("before", "event", "worker"), [r[1:] for r in RETRIES], ids=[r[0] for r in RETRIES])
def test_a_failed_attempt_is_cancelled_and_made_again_elsewhere(
    before: list[Event], event: Event, worker: WorkerId
) -> None:
    request = new()
    feed(request, placed(), *before)
    cancel, ask = request.handle(event, NOW)
    had = len(request.tokens)
    assert isinstance(cancel, SendCancel)
    assert cancel.attempt == 1
    assert ask == AskPlacement(2, (worker,), had)
    assert request.handle(tokens(D1, 9, 9), NOW) == []
    later = feed(request, placed(2, P2, D2))
    later += feed(request, tokens(P2, had, had + 1, attempt=2), tokens(D2, had + 1, had + 2, had + 3, attempt=2))
    assert request.tokens == [*range(1, had + 4)]
    assert later == [
        SendAttempt(2, P2, None, OtherEnd(worker_id=D2, handoff_id=HandoffId("req-1-2")), num_answered=had),
        SendAttempt(2, D2, OtherEnd(worker_id=P2, handoff_id=HandoffId("req-1-2")), num_answered=had),
        Deliver(had, (had + 1,)),
        Deliver(had + 1, (had + 2, had + 3)),
    ]


IGNORED: list[tuple[str, list[Event], Event]] = [
    ("prefill leaves after token 0", [tokens(P1, 0, 1)], WorkerLost(P1, "silent")),
    ("prefill fails after token 0", [tokens(P1, 0, 1)], failed(P1, 1)),
    ("prefill's yes is lost, its token is here", [tokens(P1, 0, 1)], WorkerSilent(1, P1, "no reply")),
    ("decode's yes is lost, its token is here", [tokens(D1, 1, 2)], WorkerSilent(1, D1, "no reply")),
]


@pytest.mark.parametrize(("before", "event"), [r[1:] for r in IGNORED], ids=[r[0] for r in IGNORED])
def test_what_is_no_failure(before: list[Event], event: Event) -> None:
    request = new()
    feed(request, placed(), *before)
    assert request.handle(event, NOW) == []


def test_without_a_split_the_prefill_worker_is_needed_to_the_end() -> None:
    request = new()
    feed(request, placed(decode=None), tokens(P1, 0, 1))
    assert request.handle(WorkerLost(P1, "silent"), NOW)[-1] == AskPlacement(2, (P1,), 1)


def test_the_prefill_worker_of_a_replay_is_needed_again() -> None:
    request = new()
    feed(request, placed(), tokens(P1, 0, 1), WorkerLost(D1, "silent"), placed(2, P2, D2))
    assert request.handle(WorkerLost(P2, "silent"), NOW)[-1] == AskPlacement(3, (D1, P2), 1)


def test_a_shorter_replay_is_an_error() -> None:
    request = new()
    feed(request, placed(), tokens(P1, 0, 1), tokens(D1, 1, 2, 3), WorkerLost(D1, "silent"), placed(2, P2, D2))
    actions = feed(request, tokens(P2, 0, 1, attempt=2), tokens(D2, 1, 2, attempt=2, finish="stop"))
    assert [type(a) for a in actions] == [SendCancel, FailRequest]


ENDINGS: list[tuple[str, Event, str, int]] = [
    ("deadline", DeadlinePassed(), "deadline", 504),
    ("stopping", GatewayStopping(), "draining", 503),
    ("too long for the worker", refused(P1, RefusalReason.TOO_LONG), "context_length_exceeded", 400),
    ("deadline at the worker", refused(D1, RefusalReason.DEADLINE), "deadline", 504),
    ("not to be retried", failed(D1, retryable=False), "engine_failed", 500),
]


@pytest.mark.parametrize(("event", "code", "status"), [r[1:] for r in ENDINGS], ids=[r[0] for r in ENDINGS])
def test_what_ends_a_running_request(event: Event, code: str, status: int) -> None:
    request = new()
    feed(request, placed())
    cancel, fail = request.handle(event, NOW)
    assert isinstance(cancel, SendCancel)
    assert isinstance(fail, FailRequest)
    assert (fail.code, fail.status) == (code, status)
    assert feed(request, tokens(P1, 0, 1), DeadlinePassed(), ClientGone("bye"), placed(2)) == []


def test_an_attempt_that_is_over_already_is_followed_by_another() -> None:
    """The worker had it, lost it, and its words were lost: a repeat of the question is refused as a repeat."""
    request = new()
    feed(request, placed())
    cancel, ask = request.handle(refused(P1, RefusalReason.INVALID), NOW)
    assert (cancel, ask) == (SendCancel(1, "refused: invalid"), AskPlacement(2, (P1,), 0))
    feed(request, placed(2), refused(P1, RefusalReason.INVALID, 2), placed(3))
    last = request.handle(refused(P1, RefusalReason.INVALID, 3), NOW)[-1]
    assert isinstance(last, FailRequest), "a message that is wrong stays wrong"
    assert (last.code, last.status) == ("invalid", 500)


def test_a_client_that_leaves_and_a_stop_string() -> None:
    request = new()
    feed(request, placed())
    assert request.handle(ClientGone("bye"), NOW) == [SendCancel(1, "bye"), Abandon("bye")]
    request = new()
    feed(request, placed(), tokens(P1, 0, 1))
    assert request.handle(StopMatched(), NOW) == [
        SendCancel(1, "a stop string was reached", AttemptEnd.COMPLETE),
        Finish("stop"),
    ]


def test_nobody_to_cancel_while_placing() -> None:
    assert new().handle(ClientGone("bye"), NOW) == [Abandon("bye")]
    assert [type(a) for a in new().handle(DeadlinePassed(), NOW)] == [FailRequest]


REFUSALS: list[tuple[RefusalReason, int, int, int]] = [
    (RefusalReason.OVERLOADED, 0, 429, 1_000),
    (RefusalReason.DRAINING, 10, 503, 10),
    (RefusalReason.FINGERPRINT, 0, 503, 1_000),
    (RefusalReason.TOO_LONG, 0, 400, 0),
    (RefusalReason.DEADLINE, 0, 504, 0),
]


@pytest.mark.parametrize(("reason", "after_ms", "status", "retry_after_ms"), REFUSALS)
def test_refusals_of_the_scheduler(reason: RefusalReason, after_ms: int, status: int, retry_after_ms: int) -> None:
    (fail,) = new().handle(PlaceRefused(1, reason, "why", after_ms), NOW)
    assert isinstance(fail, FailRequest)
    assert (fail.status, fail.retry_after_ms) == (status, retry_after_ms)
    assert "why" in fail.message


def test_a_refused_retry_tells_the_whole_story() -> None:
    request = new()
    (fail,) = feed(
        request, placed(), refused(P1, RefusalReason.DRAINING), PlaceRefused(2, RefusalReason.OVERLOADED, "nobody", 0)
    )[4:]
    assert isinstance(fail, FailRequest)
    assert fail.message == "nobody; before that: attempt 1: p1: busy"


@pytest.mark.parametrize(
    ("event", "code"),
    [
        (PlaceUnanswered(1, "no reply"), "no_scheduler"),
        (PlaceRefused(1, RefusalReason.NO_WORKER, "nobody", 1_000), "no_worker"),
    ],
)
def test_where_nobody_is_there_the_placement_is_asked_again_but_not_for_ever(event: Event, code: str) -> None:
    """The only scheduler, or the last worker of a role, may be starting again."""
    request, now_ms = new(), NOW
    while not (actions := request.handle(event, now_ms)):
        now_ms = request.wake_ms
        assert request.tick(now_ms) == [AskPlacement(1, ())]
    (fail,) = actions
    assert isinstance(fail, FailRequest)
    assert (fail.code, fail.status, fail.retry_after_ms) == (code, 503, 1_000)
    assert now_ms - NOW >= 1000 * GatewayConfig().place_wait_s


def test_what_waits_asks_again_as_a_worker_is_ready() -> None:
    request = new()
    request.handle(PlaceRefused(1, RefusalReason.NO_WORKER, "nobody", 1_000), NOW)
    assert request.tick(NOW + 1) == []
    assert request.handle(WorkerReady(), NOW + 2) == [] and request.wake_ms == NOW + 2
    assert request.tick(NOW + 2) == [AskPlacement(1, ())]
    assert request.handle(WorkerReady(), NOW + 3) == request.tick(NOW + 3) == [], "it asks already"
    request.handle(PlaceRefused(1, RefusalReason.NO_WORKER, "nobody", 1_000), NOW + 4)
    assert request.tick(NOW + 4) == [AskPlacement(1, ())], "the refusal may be older than the worker"
    request.handle(PlaceRefused(1, RefusalReason.NO_WORKER, "nobody", 1_000), NOW + 5)
    assert request.tick(NOW + 5) == [] and request.wake_ms == NOW + 1_005


def test_refusals_of_what_nobody_took_end_by_time_with_the_last_reason() -> None:
    request, now_ms = new(max_attempts=2), NOW
    actions = feed(request, placed(), failed(P1), placed(2, P2), refused(P2, RefusalReason.OVERLOADED, attempt=2))
    while not isinstance(actions[-1], FailRequest):
        if request.phase is Phase.WAITING:
            now_ms = request.wake_ms
            request.tick(now_ms)
        request.handle(placed(request.attempt, P2), now_ms)
        actions = request.handle(refused(P2, RefusalReason.OVERLOADED, attempt=request.attempt), now_ms)
    fail = actions[-1]
    assert (fail.code, fail.status, fail.retry_after_ms) == ("overloaded", 429, 1_500)
    assert "p2: busy" in fail.message
    assert now_ms - NOW >= 1000 * GatewayConfig().resume_wait_s


def test_the_reports_are_those_of_the_first_attempt_that_gave_tokens() -> None:
    request = new()
    feed(request, placed())
    prefill = TransferReport(cached_tokens=16, recomputed_tokens=32, is_prefill=True)
    decode = TransferReport(transferred_tokens=48, carrier="shm")
    request.handle(TokensReceived(1, P1, 0, (1,), report=prefill), NOW)
    request.handle(TokensReceived(1, D1, 1, (2,), report=decode), NOW)
    assert (request.prefill_report, request.report) == (prefill, decode)
    feed(request, WorkerLost(D1, "silent"), placed(2, P2, D2))
    request.handle(TokensReceived(2, P2, 2, (3,), report=decode), NOW)
    assert (request.prefill_report, request.report) == (prefill, decode)
    request = new()
    feed(request, placed(), TokensReceived(1, P1, 0, (), report=prefill), WorkerLost(P1, "silent"))
    assert (request.prefill_report, request.report) == (None, None)


def test_the_sources_of_a_placement_go_to_both_workers() -> None:
    sources = (KVSource(worker_id=D1, first_block=0, num_blocks=3),)
    run, reserve = new().handle(PlaceGranted(1, placement(P1, D1, sources)), NOW)
    assert isinstance(run, SendAttempt) and isinstance(reserve, SendAttempt)
    assert run.sources == reserve.sources == sources


# Any order, any duplication, any accident.


@st.composite
def shuffled(draw: st.DrawFn) -> tuple[list[int], list[TokensReceived]]:
    """An answer, and its messages cut, repeated and shuffled in any way; each index is in at least one."""
    answer = draw(st.lists(st.integers(0, 99), min_size=1, max_size=12))
    size = len(answer)
    cuts = sorted(draw(st.sets(st.integers(1, size), max_size=5)) | {0, size})
    ranges = list(itertools.pairwise(cuts))
    ranges += draw(
        st.lists(st.tuples(st.integers(0, size - 1), st.integers(1, size)).filter(lambda r: r[0] < r[1]), max_size=6)
    )
    messages: list[TokensReceived] = []
    for start, end in ranges:
        worker = P1 if start == 0 and end == 1 else D1
        finish = "stop" if end == size else None
        messages.append(TokensReceived(1, worker, start, tuple(answer[start:end]), finish))
    return answer, draw(st.permutations(messages))


@settings(max_examples=examples(200), deadline=None)
@given(shuffled())
def test_any_order_and_duplication_delivers_each_token_once(case: tuple[list[int], list[TokensReceived]]) -> None:
    answer, messages = case
    request = new(max_tokens=max(2, len(answer)))
    actions = feed(request, placed(), *messages)
    assert delivered(actions) == answer
    assert [a for a in actions if isinstance(a, ENDS)] == [Finish("stop")]


def accidents() -> st.SearchStrategy[list[Event]]:
    """Nearly consistent events: tokens are a function of their index, but for a few wrong ones."""
    attempt = st.integers(1, 4)
    worker = st.sampled_from([P1, P2, D1, D2])
    honest = st.builds(
        lambda a, w, i, n, f, wrong: TokensReceived(a, w, i, tuple(k * 7 + wrong for k in range(i, i + n)), f),
        attempt, worker, st.integers(0, 8), st.integers(0, 4), st.sampled_from([None, None, None, "stop"]),
        st.sampled_from([0] * 9 + [1]),
    )  # fmt: skip
    event: st.SearchStrategy[Event] = st.one_of(
        honest,
        honest,
        st.builds(placed, attempt, st.sampled_from([P1, P2]), st.sampled_from([D1, D2, None])),
        st.builds(failed, worker, st.integers(0, 8), attempt, st.booleans()),
        st.builds(refused, worker, st.sampled_from([RefusalReason.OVERLOADED, RefusalReason.TOO_LONG]), attempt),
        st.builds(WorkerSilent, attempt, worker, st.just("no reply")),
        st.builds(WorkerLost, worker, st.just("silent")),
        st.just(WorkerReady()),
        st.builds(PlaceRefused, attempt, st.just(RefusalReason.NO_WORKER), st.just(""), st.just(0)),
        st.builds(PlaceUnanswered, attempt, st.just("")),
        st.sampled_from([StopMatched(), ClientGone("bye"), GatewayStopping()]),
    )
    return st.lists(event, max_size=30)


@settings(max_examples=examples(500), deadline=None)
@given(accidents())
def test_whatever_happens(events: list[Event]) -> None:
    """One end; tokens in order and once; at most one cancel an attempt, one for each failed attempt; no runaway."""
    request = new(max_tokens=10)
    actions = feed(request, placed(), *events, DeadlinePassed())
    out = delivered(actions)
    assert out == request.tokens
    assert len(out) <= 10
    ends = [at for at, action in enumerate(actions) if isinstance(action, ENDS)]
    assert ends == [len(actions) - 1]
    runs = [a.attempt for a in actions if isinstance(a, SendAttempt) and a.upstream is None]
    cancels = [a.attempt for a in actions if isinstance(a, SendCancel)]
    assert len(set(runs)) == len(runs)
    assert len(set(cancels)) == len(cancels)
    assert set(cancels) <= set(runs)
    last = actions[-1]
    must_cancel = set(runs) if not isinstance(last, Finish) else set(runs[:-1])
    assert must_cancel <= set(cancels)


@pytest.mark.parametrize("module", [core, events, fleet, limits, watch])
def test_the_core_is_pure(module: ModuleType) -> None:
    tree = ast.parse(inspect.getsource(module))
    imported = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    imported |= {n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    ours = {
        "schemas.ids",
        "schemas.logprobs",
        "schemas.request",
        "schemas.worker",
        "services.config",
        "services.gateway.limits",
        "services.gateway.request.events",
        "services.gateway.request.progress_watch",
        "services.presence",
    }
    assert imported <= {"enum", "dataclasses", "collections.abc", "typing", *ours}


def test_logprobs_go_out_with_their_tokens_whatever_order_they_come_in() -> None:
    one, two, three, of_prompt = (TokenLogprob(-float(n)) for n in range(4))
    request = new(max_tokens=3)
    feed(request, placed())
    late = TokensReceived(1, P1, 0, (1,), logprobs=(one,), prompt_logprobs=(of_prompt,))
    assert not feed(request, TokensReceived(1, D1, 1, (2, 3), "length", logprobs=(two, three)))
    assert feed(request, late)[:1] == [Deliver(0, (1, 2, 3), (one, two, three), (of_prompt,))]


def test_logprobs_go_out_once_over_a_second_attempt() -> None:
    one, two, again, of_prompt = (TokenLogprob(-float(n)) for n in range(4))
    request = new(max_tokens=3)
    feed(request, placed(), TokensReceived(1, P1, 0, (1,), logprobs=(one,), prompt_logprobs=(of_prompt,)))
    feed(request, failed(D1), placed(2, P2, D2))
    actions = feed(request, TokensReceived(2, P2, 0, (1, 2), logprobs=(again, two)))
    assert actions == [Deliver(1, (2,), (two,))]


@pytest.mark.parametrize(("must_split", "recomputed"), [(True, 0), (True, 7), (False, 7)])
def test_what_must_be_split_fails_where_its_prompt_was_computed_twice(must_split: bool, recomputed: int) -> None:
    request = RequestCore(RequestId("req-1"), 9, MeshConfig(), FailureDetector(PresenceTimes()), must_split=must_split)
    feed(request, Submitted(), placed())
    report = TransferReport(transferred_tokens=20 - recomputed, recomputed_tokens=recomputed)
    actions = feed(request, replace(tokens(D1, 0, 5), report=report))
    if must_split and recomputed:
        (fail,) = (action for action in actions if isinstance(action, FailRequest))
        assert (fail.code, fail.status) == ("not_split", 503) and "d1 computed 7 tokens" in fail.message
        assert not delivered(actions)
    else:
        assert delivered(actions) == [5]
