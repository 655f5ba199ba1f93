"""A request whose worker migrates it: it goes on where the KV can be read, and no number bounds how often."""

import pytest

from schemas.ids import WorkerId
from schemas.request import AttemptFailure, KVSource, RefusalReason, RequestFailure
from services.gateway.limits import DEATHS_WITHIN_MS, MAX_DEATHS
from services.gateway.request.core import MIGRATED, Phase, RequestCore
from services.gateway.request.events import (
    AskPlacement,
    Deliver,
    FailRequest,
    Finish,
    PlaceRefused,
    SendCancel,
    TokensReceived,
)
from tests.gateway.test_gateway_core import D1, D2, NOW, P1, P2, failed, feed, new, placed, refused, tokens


def moved(
    worker: WorkerId, attempt: int = 1, held: int = 3, code: AttemptFailure = AttemptFailure.DRAINING
) -> TokensReceived:
    failure = RequestFailure(code=code, detail="drains", retryable=True, held_blocks=held)
    return TokensReceived(attempt, worker, 0, (), failure=failure)


def lies(worker: WorkerId, num_blocks: int = 3) -> KVSource:
    return KVSource(worker_id=worker, first_block=0, num_blocks=num_blocks)


def running() -> RequestCore:
    request = new()
    feed(request, placed(), tokens(P1, 0, 1), tokens(D1, 1, 2, 3))
    return request


@pytest.mark.parametrize("code", MIGRATED)
def test_a_moved_answer_is_placed_at_once_with_what_its_worker_holds(code: AttemptFailure) -> None:
    request = running()
    assert request.handle(moved(D1, code=code), NOW) == [
        SendCancel(1, code),
        AskPlacement(2, (D1,), 3, lies(D1)),
    ]
    later = feed(
        request, placed(2, D2, None), tokens(D2, 3, 4, attempt=2), tokens(D1, 3, 4), tokens(D2, 4, 5, attempt=2)
    )
    assert [a for a in later if isinstance(a, Deliver)] == [Deliver(3, (4,)), Deliver(4, (5,))]


def test_a_worker_that_holds_nothing_is_no_source() -> None:
    assert running().handle(moved(D1, held=0), NOW)[-1] == AskPlacement(2, (D1,), 3, None)


def test_where_an_answer_lies_is_known_until_another_attempt_has_got_on() -> None:
    request = running()
    feed(request, moved(D1), placed(2, D2, None))
    assert request.handle(refused(D2, RefusalReason.OVERLOADED, 2), NOW)[-1] == AskPlacement(3, (D1, D2), 3, lies(D1))
    feed(request, placed(3, P2, None), tokens(P2, 3, 4, attempt=3))
    assert request.handle(failed(P2, attempt=3), NOW)[-1] == AskPlacement(4, (D1, D2, P2), 4, None)
    assert request.moved_by is None


def test_a_placement_that_must_wait_still_knows_where_the_answer_lies() -> None:
    request = running()
    feed(request, moved(D1), PlaceRefused(2, RefusalReason.NO_WORKER, "", 0))
    assert request.phase is Phase.WAITING
    assert request.tick(request.wake_ms) == [AskPlacement(2, (D1,), 3, lies(D1))]


def test_an_answer_that_all_workers_of_a_mesh_migrate_one_after_another_is_not_given_up() -> None:
    """As a rolling restart may do to a prompt that takes long: no attempt of it is counted as one in vain."""
    request = new(max_attempts=3)
    feed(request, placed())
    for attempt in range(1, 12):
        actions = request.handle(moved(P1 if attempt % 2 else P2, attempt), NOW + 10_000 * attempt)
        assert not [a for a in actions if isinstance(a, FailRequest)]
        if request.phase is Phase.WAITING:
            actions = request.tick(request.wake_ms)
        assert isinstance(actions[-1], AskPlacement)
        feed(request, placed(attempt + 1, P2 if attempt % 2 else P1, D1))
    assert request.phase is Phase.RUNNING


def test_an_answer_whose_last_token_came_before_the_move_is_complete() -> None:
    request = new(max_tokens=3)
    feed(request, placed(), tokens(P1, 0, 1), tokens(D1, 1, 2))
    request.handle(tokens(D1, 2, 3), NOW)
    assert request.handle(moved(D1), NOW)[-1] == Finish("length")


def test_a_move_by_whoever_does_not_serve_the_request_is_nothing() -> None:
    assert running().handle(moved(D2), NOW) == []
    assert running().handle(moved(D1, attempt=7), NOW) == []


def engine_died(worker: WorkerId, attempt: int, *, in_step: bool) -> TokensReceived:
    failure = RequestFailure(code=AttemptFailure.ENGINE_DIED, detail="killed", retryable=True, in_step=in_step)
    return TokensReceived(attempt, worker, 0, (), failure=failure)


def end_of(request: RequestCore, deaths: list[tuple[int, bool]], *, gets_on: bool = True) -> FailRequest | None:
    """Let engines die under an answer at these times, and say with what error it ends. `bool`: they computed it.
    `gets_on`: each has given a token of it."""
    feed(request, placed(decode=None))
    for attempt, (at_ms, in_step) in enumerate(deaths, 1):
        worker = P1 if attempt % 2 else P2
        if gets_on:
            feed(request, tokens(worker, attempt - 1, attempt, attempt=attempt))
        actions = request.handle(engine_died(worker, attempt, in_step=in_step), NOW + at_ms)
        if isinstance(actions[-1], FailRequest):
            assert attempt == len(deaths), "that was the last"
            return actions[-1]
        request.tick(request.wake_ms)  # where several workers in a row have done nothing, it waits for a while
        feed(request, placed(attempt + 1, P2 if attempt % 2 else P1, None))
    return None


@pytest.mark.parametrize(
    ("deaths", "gets_on"),
    [
        ([(0, True), (1_000, True), (DEATHS_WITHIN_MS - 1, True)], True),
        ([(0, True), (300_000, True), (600_000, True)], False),
    ],
    ids=["within a minute", "it hangs them, one after another"],
)
def test_a_request_that_kills_engines_does_not_go_round_the_fleet(
    deaths: list[tuple[int, bool]], gets_on: bool
) -> None:
    fail = end_of(new(), deaths, gets_on=gets_on)
    assert fail is not None and (fail.code, fail.status) == ("engine_died", 500)
    assert fail.message == f"3 engines died as they computed this request: {P1}: killed"
    assert MAX_DEATHS == 3


@pytest.mark.parametrize(
    ("deaths", "gets_on"),
    [
        ([(at_ms, False) for at_ms in range(0, 10_000, 1_000)], False),
        ([(0, True), (1_000, True), (2_000, False), (DEATHS_WITHIN_MS, True)], True),
        ([(at * DEATHS_WITHIN_MS // 2, True) for at in range(9)], True),
    ],
    ids=["it was not in the step", "not within a minute", "now and then"],
)
def test_whose_engines_die_for_other_reasons_goes_on(deaths: list[tuple[int, bool]], gets_on: bool) -> None:
    assert end_of(new(max_attempts=2), deaths, gets_on=gets_on) is None
