"""Resuming, waiting and watching over a request, with the time as an argument."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.ids import WorkerId
from schemas.request import RefusalReason
from services.config import MeshConfig
from services.gateway.limits import WAITING_ROUNDS
from services.gateway.request.core import RequestCore
from services.gateway.request.events import (
    Action,
    AskPlacement,
    AskWorker,
    ClientGone,
    DeadlinePassed,
    Deliver,
    Event,
    FailRequest,
    Finish,
    PlaceRefused,
    PlaceUnanswered,
    ProgressAnswered,
    ProgressOutcome,
    SendAttempt,
    SendCancel,
    WorkerAccepted,
    WorkerLost,
    WorkerSilent,
)
from services.presence import FailureDetector
from services.times import PresenceTimes
from tests.gateway.test_gateway_core import D1, D2, ENDS, NOW, P1, P2, failed, feed, new, placed, refused, tokens
from tests.share import examples

CONFIG = MeshConfig()
TIMES = CONFIG.times
GAP_MS, DEAF_AFTER_MS, UNSERVED_GAP_MS = (
    TIMES.gateway.gap_ms, TIMES.presence.partitioned_after_ms, TIMES.presence.unserved_gap_ms
)  # fmt: skip
LEFT_D1 = WorkerLost(D1, "silent")


def hearing_others(now_ms: int = NOW) -> FailureDetector:
    detector = FailureDetector(PresenceTimes())
    for at_ms in range(now_ms - 10 * DEAF_AFTER_MS, now_ms + 1, DEAF_AFTER_MS // 2):
        detector.received(at_ms)
    return detector


class Clock:
    """A request, its time, and somebody else who is heard all the time."""

    def __init__(self, *events: Event, max_tokens: int = 100) -> None:
        self.now_ms = NOW
        self.detector = hearing_others()
        self.request = new(max_tokens, detector=self.detector)
        feed(self.request, placed(), WorkerAccepted(1, P1), WorkerAccepted(1, D1), *events)

    def tell(self, *events: Event) -> list[Action]:
        return [action for event in events for action in self.request.handle(event, self.now_ms)]

    def run(self, for_ms: int, *, heard: bool = True) -> list[tuple[int, Action]]:
        """Tick every 50 ms; return what came out, and how long after the beginning."""
        out: list[tuple[int, Action]] = []
        for _ in range(for_ms // 50):
            self.now_ms += 50
            if heard:
                self.detector.received(self.now_ms)
            out += [(self.now_ms - NOW, action) for action in self.request.tick(self.now_ms)]
        return out

    def answer(self, worker: WorkerId, outcome: ProgressOutcome, attempt: int = 1) -> list[Action]:
        return self.tell(ProgressAnswered(attempt, worker, outcome))


def test_a_gap_is_asked_for_after_a_moment() -> None:
    clock = Clock(tokens(P1, 0, 1), tokens(D1, 3, 4))
    assert clock.run(1_000) == [(GAP_MS, AskWorker(1, D1, 1))]
    clock.tell(tokens(D1, 1, 2, 3))
    clock.answer(D1, ProgressOutcome.KNOWN)
    assert clock.request.tokens == [1, 2, 3, 4]
    assert clock.run(900) == []


def test_the_end_without_its_tokens_is_a_gap() -> None:
    clock = Clock(tokens(P1, 0, 1), tokens(D1, 3, finish="stop"))
    assert clock.run(GAP_MS) == [(GAP_MS, AskWorker(1, D1, 1))]


def test_both_are_asked_while_the_first_token_is_missing() -> None:
    assert Clock().run(1_000) == [(1_000, AskWorker(1, D1, 0)), (1_000, AskWorker(1, P1, 0))]


def test_a_quiet_worker_is_asked_again_and_again() -> None:
    clock = Clock(tokens(P1, 0, 1))
    for round_ in range(1, 6):
        assert clock.run(1_000) == [(round_ * 1_000, AskWorker(1, D1, 1))]
        clock.answer(D1, ProgressOutcome.KNOWN)


def test_who_is_in_line_is_asked_more_rarely_until_it_begins() -> None:
    clock = Clock(tokens(P1, 0, 1))
    assert clock.run(1_000) == [(1_000, AskWorker(1, D1, 1))]
    for round_ in (1, 2):
        clock.tell(ProgressAnswered(1, D1, ProgressOutcome.KNOWN, is_waiting=True))
        assert clock.run(WAITING_ROUNDS * 1_000) == [(1_000 + round_ * WAITING_ROUNDS * 1_000, AskWorker(1, D1, 1))]
    clock.tell(ProgressAnswered(1, D1, ProgressOutcome.KNOWN))
    assert clock.run(1_000) == [(2_000 + 2 * WAITING_ROUNDS * 1_000, AskWorker(1, D1, 1))]


def test_who_is_in_line_and_falls_silent_is_lost_once_it_was_asked_in_vain() -> None:
    clock = Clock(tokens(P1, 0, 1))
    clock.run(1_000)
    clock.tell(ProgressAnswered(1, D1, ProgressOutcome.KNOWN, is_waiting=True))
    out: list[tuple[int, Action]] = []
    while not any(isinstance(action, AskPlacement) for _, action in out):
        out += clock.run(50)
        if isinstance(out[-1][1] if out else None, AskWorker):
            clock.answer(D1, ProgressOutcome.UNANSWERED)
    assert out[0] == (1_000 + WAITING_ROUNDS * 1_000, AskWorker(1, D1, 1))
    assert out[-1] == (1_000 + (WAITING_ROUNDS - 1) * 1_000 + 3_000, AskPlacement(2, (D1,), 1))


def test_nobody_is_asked_before_it_has_accepted_or_its_wait_is_over() -> None:
    clock = Clock()
    clock.request = new(detector=clock.detector)
    feed(clock.request, placed())
    assert clock.run(5_000) == []
    clock.tell(WorkerSilent(1, P1, "no reply", may_have_taken=True))
    clock.detector.since_ms = clock.now_ms  # else it has been silent for long enough already
    assert clock.run(50) == [(5_050, AskWorker(1, P1, 0))]


@pytest.mark.parametrize(("outcome", "num_answered"), [(ProgressOutcome.UNKNOWN, 1)])
def test_who_does_not_know_it_is_replaced(outcome: ProgressOutcome, num_answered: int) -> None:
    clock = Clock(tokens(P1, 0, 1))
    clock.run(1_000)
    cancel, ask = clock.answer(D1, outcome)
    assert isinstance(cancel, SendCancel)
    assert ask == AskPlacement(2, (D1,), num_answered)
    assert clock.answer(D1, outcome) == []


def test_who_is_not_needed_may_have_forgotten_it() -> None:
    clock = Clock(tokens(P1, 0, 1))
    assert clock.answer(P1, ProgressOutcome.UNKNOWN) == []


def test_a_worker_that_nobody_serves_twice_is_dead() -> None:
    clock = Clock(tokens(P1, 0, 1))
    clock.run(1_000)
    assert clock.answer(D1, ProgressOutcome.UNSERVED) == []
    assert clock.run(UNSERVED_GAP_MS) == [(1_000 + UNSERVED_GAP_MS, AskWorker(1, D1, 1))]
    assert clock.answer(D1, ProgressOutcome.UNSERVED)[-1] == AskPlacement(2, (D1,), 1)


def test_a_sign_between_two_unserved_questions_is_life() -> None:
    clock = Clock(tokens(P1, 0, 1))
    clock.run(1_000)
    clock.answer(D1, ProgressOutcome.UNSERVED)
    clock.tell(tokens(D1, 1, 2))
    clock.run(2_000)
    assert clock.answer(D1, ProgressOutcome.UNSERVED) == []


def test_a_silent_worker_is_lost_while_others_are_heard() -> None:
    clock = Clock(tokens(P1, 0, 1))
    out: list[tuple[int, Action]] = []
    for _ in range(60):
        out += clock.run(50)
        if isinstance(out[-1][1] if out else None, AskWorker):
            clock.answer(D1, ProgressOutcome.UNANSWERED)
    assert out[-1] == (3_000, AskPlacement(2, (D1,), 1))


def test_silence_of_everybody_is_our_own_deafness() -> None:
    clock = Clock(tokens(P1, 0, 1))
    out = clock.run(20_000, heard=False)
    assert all(isinstance(action, AskWorker) for _, action in out)
    heard = clock.run(2_950)  # from now on it counts
    assert not any(isinstance(action, AskPlacement) for _, action in heard)
    assert isinstance(clock.run(100)[-1][1], AskPlacement)


def test_an_answer_survives_any_number_of_kills() -> None:
    request = new(max_tokens=40, max_attempts=2)
    actions: list[Action] = []
    for attempt in range(1, 21):
        first = 2 * attempt - 2
        prefill, decode = (P1, D1) if attempt % 2 else (P2, D2)
        actions += feed(
            request,
            placed(attempt, prefill, decode),
            tokens(prefill, first, first, attempt=attempt),
            tokens(decode, first + 1, first + 1, attempt=attempt, finish="length" if attempt == 20 else None),
            WorkerLost(decode, "killed"),
        )
    assert actions[-1] == Finish("length")
    assert request.tokens == [*range(40)]
    assert [a.num_answered for a in actions if isinstance(a, SendAttempt) and a.upstream is None] == [*range(0, 40, 2)]


def test_attempts_in_a_row_without_a_token_are_bounded() -> None:
    request = new(max_attempts=2)
    feed(request, placed(), tokens(P1, 0, 1), LEFT_D1, placed(2), failed(D1, attempt=2), placed(3))
    assert isinstance(feed(request, failed(D1, attempt=3))[-1], FailRequest)


def test_refusals_of_what_the_client_has_begun_are_bounded_by_time() -> None:
    clock = Clock(tokens(P1, 0, 1), LEFT_D1)
    attempt, out = 2, list[Action]()
    while not any(isinstance(action, ENDS) for action in out):
        assert clock.now_ms - NOW <= 31_000
        out += clock.tell(placed(attempt, P1, D2), refused(D2, RefusalReason.DRAINING, attempt))
        out += [action for _, action in clock.run(50)]
        attempt = clock.request.attempt
    assert clock.now_ms - NOW >= 30_000
    assert attempt < 50  # the pauses grow
    fail = out[-1]
    assert isinstance(fail, FailRequest) and fail.code == "draining"
    assert len(fail.message) < 1_000


def test_a_client_that_has_all_its_tokens_misses_only_the_end() -> None:
    request = new(max_tokens=2)
    assert feed(request, placed(), tokens(P1, 0, 1), tokens(D1, 1, 2), LEFT_D1)[-1] == Finish("length")


def test_one_token_left_is_not_split() -> None:
    request = new(max_tokens=3)
    run = feed(request, placed(), tokens(P1, 0, 1), tokens(D1, 1, 2), LEFT_D1, placed(2, P2, D2))[-1]
    assert run == SendAttempt(2, P2, num_answered=2)


@pytest.mark.parametrize("event", [PlaceRefused(2, RefusalReason.NO_WORKER, "", 400), PlaceUnanswered(2, "nobody")])
def test_what_is_under_way_waits_for_a_placement(event: Event) -> None:
    clock = Clock(tokens(P1, 0, 1), LEFT_D1)
    asked_ms: list[int] = []
    out: list[Action] = []
    while not out:
        out = clock.tell(event)
        asked_ms += [at_ms for at_ms, action in clock.run(1_000) if action == AskPlacement(2, (D1,), 1)]
    assert isinstance(out[-1], FailRequest)
    assert (len(asked_ms), asked_ms[-1]) == (30, 29_000 + (400 if isinstance(event, PlaceRefused) else 100))


def test_who_is_in_line_is_asked_again_soon_where_the_answer_did_not_come() -> None:
    """It is lost once it was asked more than once: a broker that stands still for a moment costs one answer."""
    clock = Clock(tokens(P1, 0, 1))
    clock.run(1_000)
    clock.tell(ProgressAnswered(1, D1, ProgressOutcome.KNOWN, is_waiting=True))
    asked_ms = 1_000 + WAITING_ROUNDS * 1_000
    assert clock.run(WAITING_ROUNDS * 1_000) == [(asked_ms, AskWorker(1, D1, 1))]
    assert clock.run(950) == []
    clock.answer(D1, ProgressOutcome.UNANSWERED)
    assert clock.run(50) == [(asked_ms + 1_000, AskWorker(1, D1, 1))]
    clock.tell(ProgressAnswered(1, D1, ProgressOutcome.KNOWN, is_waiting=True))
    assert clock.run(WAITING_ROUNDS * 1_000) == [(asked_ms + 5_000, AskWorker(1, D1, 1))]


@pytest.mark.parametrize("has_begun", [False, True])
@pytest.mark.parametrize("away_ms", [2_000, 10_000, 14_000])
def test_what_waits_for_a_placement_outlives_a_time_in_which_nobody_is_heard(away_ms: int, has_begun: bool) -> None:
    """The broker stands still: nobody answers, and nobody can. Then the wait counts from its return."""
    clock = Clock(*([tokens(P1, 0, 1), LEFT_D1] if has_begun else []))
    attempt = 2 if has_begun else 1
    if not has_begun:
        clock.request = new(detector=clock.detector)
    waited_ms = 0
    while waited_ms < away_ms:
        assert clock.tell(PlaceUnanswered(attempt, "no reply")) == []
        clock.run(2_000, heard=False)  # how long a question waits
        waited_ms += 2_000
    clock.run(50)
    limit_ms = round(1000 * (CONFIG.gateway.resume_wait_s if has_begun else CONFIG.gateway.place_wait_s)) - 2_000
    for _ in range(limit_ms // 2_000):
        assert clock.tell(PlaceUnanswered(attempt, "no reply")) == []
        clock.run(2_000)
    while not (out := clock.tell(PlaceUnanswered(attempt, "no reply"))):
        clock.run(2_000)
    assert isinstance(out[-1], FailRequest)


def test_a_broker_that_stays_away_ends_the_wait() -> None:
    clock = Clock()
    clock.request = new(detector=clock.detector)
    waited_ms = 0
    while not (out := clock.tell(PlaceUnanswered(1, "no reply"))):
        clock.run(1_000, heard=False)
        waited_ms += 1_000
    assert (
        isinstance(out[-1], FailRequest)
        and waited_ms == 1000 * CONFIG.gateway.place_wait_s + CONFIG.times.gateway.partitioned_wait_ms
    )


def test_what_nobody_has_begun_does_not_wait() -> None:
    request = new()
    assert isinstance(request.handle(PlaceRefused(1, RefusalReason.OVERLOADED, "", 1_000), NOW)[-1], FailRequest)
    request = new()
    out = feed(
        request, placed(), refused(D1, RefusalReason.OVERLOADED), PlaceRefused(2, RefusalReason.OVERLOADED, "", 1_000)
    )
    assert isinstance(out[-1], FailRequest)
    assert (out[-1].status, out[-1].retry_after_ms) == (429, 1_000)


@pytest.mark.parametrize("event", [LEFT_D1, WorkerLost(D1, "it was restarted", is_back=True)])
def test_a_worker_that_left_or_came_back_is_not_excluded(event: Event) -> None:
    request = new()
    feed(request, placed(), failed(D1))
    assert request.handle(event, NOW) == []
    assert feed(request, placed(2), failed(P1, attempt=2))[-1] == AskPlacement(3, (P1,), 0)


def test_a_deadline_while_waiting() -> None:
    clock = Clock(tokens(P1, 0, 1), LEFT_D1, PlaceRefused(2, RefusalReason.NO_WORKER, "", 0))
    (fail,) = clock.tell(DeadlinePassed())
    assert isinstance(fail, FailRequest) and fail.code == "deadline"
    assert clock.run(2_000) == []


Step = Event | int
"""Something that happens, or milliseconds that pass."""


def steps() -> st.SearchStrategy[list[Step]]:
    """Any events of any attempts; the tokens are those of the reference, 7 times their index."""
    attempt = st.integers(1, 5)
    worker = st.sampled_from([P1, P2, D1, D2])
    outcomes = st.sampled_from(ProgressOutcome)
    honest = st.builds(
        lambda a, w, i, n: tokens(w, i, *(k * 7 for k in range(i, min(i + n, 10))), attempt=a, finish=_end(i + n)),
        attempt, worker, st.integers(0, 9), st.integers(0, 4),
    )  # fmt: skip
    step: st.SearchStrategy[Step] = st.one_of(
        honest,
        honest,
        st.builds(placed, attempt, st.sampled_from([P1, P2]), st.sampled_from([D1, D2, None])),
        st.builds(failed, worker, st.integers(0, 8), attempt),
        st.builds(refused, worker, st.sampled_from([RefusalReason.OVERLOADED, RefusalReason.DRAINING]), attempt),
        st.builds(WorkerAccepted, attempt, worker),
        st.builds(WorkerSilent, attempt, worker, st.just("no reply"), st.booleans()),
        st.builds(WorkerLost, worker, st.just("silent"), st.booleans()),
        st.builds(ProgressAnswered, attempt, worker, outcomes),
        st.builds(PlaceRefused, attempt, st.just(RefusalReason.NO_WORKER), st.just(""), st.just(0)),
        st.builds(PlaceUnanswered, attempt, st.just("")),
        st.sampled_from([50, 200, 1_000, 5_000]),
        st.just(ClientGone("bye")),
    )
    return st.lists(step, max_size=40)


def _end(index: int) -> str | None:
    return "stop" if index >= 10 else None


@settings(max_examples=examples(400), deadline=None)
@given(steps(), st.sampled_from([10, 20]))
def test_one_end_and_a_prefix_of_the_reference(script: list[Step], max_tokens: int) -> None:
    now_ms, detector = NOW, hearing_others()
    request: RequestCore = new(max_tokens, detector=detector)
    actions = request.handle(placed(), now_ms)
    for step in [*script, DeadlinePassed(), 5_000]:
        if isinstance(step, int):
            now_ms += step
            detector.received(now_ms)
            actions += request.tick(now_ms)
        else:
            actions += request.handle(step, now_ms)
    delivered: list[int] = []
    for action in actions:
        match action:
            case Deliver(index=index):
                assert index == len(delivered)
                delivered += action.tokens
            case AskPlacement(num_answered=num) | SendAttempt(num_answered=num):
                assert num == len(delivered)
            case AskWorker(index=index):
                assert index == len(delivered)
            case _:
                pass
    assert delivered == [7 * index for index in range(len(delivered))]
    assert [at for at, action in enumerate(actions) if isinstance(action, ENDS)] == [len(actions) - 1]
    if isinstance(actions[-1], Finish):
        assert len(delivered) == 10
    runs = [a.attempt for a in actions if isinstance(a, SendAttempt) and a.upstream is None]
    cancels = [action.attempt for action in actions if isinstance(action, SendCancel)]
    assert len(set(cancels)) == len(cancels) and set(runs[:-1]) <= set(cancels) <= set(runs)
