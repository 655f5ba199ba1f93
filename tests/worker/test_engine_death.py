"""An engine's death is not a worker's: what owes tokens goes on elsewhere, what was stored is lent, and nothing new is
taken until there is an engine again."""

import pytest

from schemas.handoff import HandoffAborted
from schemas.ids import RequestId
from schemas.request import RefusalReason, Refused, RequestFailure
from services.holder.core.actions import Action, CloseLease, StopRead, Submit, Withdraw
from services.holder.core.events import DrainBegun, EngineBack, EngineDied, SequenceRemoved
from tests.worker import worker_cases as case
from tests.worker.test_moves import alone, stored
from tests.worker.test_survival_core import Bench, failures
from tests.worker.worker_cases import one, published

KEY = (RequestId("r1"), 1)
BACK = EngineBack()


def died(*had: int, in_step: tuple[int, ...] = ()) -> EngineDied:
    keys, computed = (frozenset((RequestId(f"r{number}"), 1) for number in some) for some in (had, in_step))
    return EngineDied("the engine's process was killed by SIGKILL", keys, computed)


def said(actions: list[Action]) -> list[RequestFailure]:
    return [failure for failure in failures(actions) if failure.code == "engine_died" and failure.retryable]


@pytest.mark.parametrize("in_step", [(1,), ()], ids=["in the step", "between steps"])
def test_an_answer_says_what_is_left_of_it_and_whether_it_was_being_computed(in_step: tuple[int, ...]) -> None:
    bench = Bench()
    alone(bench)
    stored(bench, 2)
    (failure,) = said(bench.checked(case.hear(bench.prefill, died(1, in_step=in_step), 5)))
    assert (failure.held_blocks, failure.in_step) == (2, bool(in_step))
    assert not bench.prefill.records and bench.leases.num_expected == 1, "somebody is expected to read it"
    assert bench.cache.num_free + bench.cache.num_cached == bench.cache.num_blocks
    assert bench.cache.num_cached == 2, "what was stored stays; what the step wrote is nobody's"


def test_what_was_purged_is_kept_for_nobody() -> None:
    bench = Bench()
    alone(bench)
    stored(bench, 2)
    bench.cache.forget()
    assert len(said(bench.checked(case.hear(bench.prefill, died(1, in_step=(1,)), 5)))) == 1
    assert bench.cache.num_free == bench.cache.num_blocks


def test_what_was_being_withdrawn_is_over_and_nobody_is_told_twice() -> None:
    bench = Bench()
    alone(bench)
    assert Withdraw(KEY) in case.hear(bench.prefill, case.cancel(), 5)
    assert said(bench.checked(case.hear(bench.prefill, died(1), 6))) == []
    bench.assert_empty()
    assert case.hear(bench.prefill, died(1), 7) == [], "a second word finds nothing"


def test_an_answer_that_was_moving_is_told_once() -> None:
    bench = Bench()
    alone(bench)
    case.hear(bench.prefill, DrainBegun(), 5)
    (failure,) = failures(bench.checked(case.hear(bench.prefill, died(1), 6)))
    assert failure.code == "engine_died"
    assert case.hear(bench.prefill, SequenceRemoved(KEY), 7) == []


def test_a_prompt_that_was_being_computed_closes_its_lease_and_tells_its_reader() -> None:
    bench = Bench()
    bench.run(case.run_prefill(num_tokens=8))
    case.hear(bench.prefill, case.reserved(), 1)
    actions = bench.checked(case.hear(bench.prefill, died(1, in_step=(1,)), 5))
    assert len(said(actions)) == 1 and one(actions, CloseLease).lease.reader == case.DECODE
    assert HandoffAborted in published(actions)
    bench.assert_empty()


def test_a_prompt_that_is_computed_is_lent_on() -> None:
    bench = Bench()
    sequence = one(bench.run(case.run_prefill()), Submit).sequence
    case.hear(bench.prefill, case.reserved(), 1)
    case.hear(bench.prefill, case.sampled(sequence, 0, local_end=True), 2)
    assert case.hear(bench.prefill, died(), 5) == []
    assert len(bench.leases) == 1
    case.hear(bench.prefill, case.landed(), 6)
    bench.assert_empty()


def test_what_waits_for_room_or_reads_goes_on_elsewhere_too() -> None:
    bench = Bench()
    read = bench.reading()
    case.ask(bench.decode, case.reserve(2, num_tokens=24, first=50))  # there is no room for it
    actions = bench.checked(case.hear(bench.decode, died(), 5))
    assert len(said(actions)) == 2
    assert one(actions, StopRead).read is read, "its blocks are its own until it writes no more"
    assert [attempt.request.request_id for attempt in bench.decode.records.values()] == ["r1"]


def test_a_worker_without_an_engine_refuses_by_a_reason_of_its_own() -> None:
    bench = Bench()
    for core, wanted in ((bench.prefill, case.run_prefill(7)), (bench.decode, case.reserve(7))):
        case.hear(core, died(), 5)
        assert core.state == "starting"
        refused, _ = case.ask(core, wanted, 6)
        assert isinstance(refused, Refused) and refused.reason is RefusalReason.STARTING
        case.hear(core, BACK, 7)
        taken, _ = case.ask(core, wanted, 8)
        assert core.state == "ready" and not isinstance(taken, Refused)


def test_a_worker_that_drains_says_so_whatever_its_engine_does() -> None:
    bench = Bench()
    case.hear(bench.prefill, died(), 5)
    case.hear(bench.prefill, DrainBegun(), 6)
    case.hear(bench.prefill, BACK, 7)
    refused, _ = case.ask(bench.prefill, case.run_prefill(7), 8)
    assert bench.prefill.state == "draining" and isinstance(refused, Refused)
    assert refused.reason is RefusalReason.DRAINING
