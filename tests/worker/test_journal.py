"""The last steps of a worker, in words: bounded, like ones together, and told with an assertion that fails."""

import pytest

from schemas.ids import RequestId
from schemas.request import AttemptFailure
from services.engine.messages import StepResult
from services.holder.core.actions import SendReply, Withdraw
from services.holder.core.events import AttemptAsked, AttemptUnwanted, SequenceFailed
from services.holder.limits import MAX_STEPS_KEPT
from services.holder.observe.journal import Journal
from services.worker.observe.spans import times_of
from tests.worker import worker_cases as case

pytestmark = pytest.mark.virtual_time


def key(number: int) -> tuple[RequestId, int]:
    return (RequestId(f"r{number}"), 1)


async def test_steps_say_where_an_event_came_from_and_what_was_decided() -> None:
    journal, request = Journal(), case.run_prefill(7)
    asked = AttemptAsked(request, times_of("", 0))
    journal.note("mesh.v1.worker.p.run", asked, [Withdraw(key(1)), Withdraw(key(2)), SendReply(request)])
    journal.note("engine", StepResult(0, 1, 6, 2, (), ()), [])
    journal.note("engine", SequenceFailed(key(3), "no memory", AttemptFailure.ENGINE_FAILED), [])
    assert [line.partition(" s ago  ")[2] for line in journal.lines()] == [
        "mesh.v1.worker.p.run: AttemptAsked r7 → Withdraw ×2, SendReply",
        "engine: StepResult of 6 prompt tokens and 2 answers → nothing",
        "engine: SequenceFailed r3 → nothing",
    ]


async def test_like_steps_in_a_row_are_one_and_the_oldest_go() -> None:
    journal = Journal()
    for _ in range(50):
        journal.note("engine", StepResult(0, 1, 0, 8, (), ()), [])
    (line,) = journal.lines()
    assert line.lstrip().startswith("0.000 s ago, 50 times since 0.000  engine")
    for number in range(MAX_STEPS_KEPT):
        journal.note("gateway", AttemptUnwanted(key(number)), [])
    lines = journal.lines()
    assert len(lines) == MAX_STEPS_KEPT and lines[-1].endswith(f"r{MAX_STEPS_KEPT - 1} → nothing")


async def test_an_assertion_that_fails_says_what_led_to_it() -> None:
    journal = Journal()
    journal.note("gateway", AttemptUnwanted(key(1)), [])
    with pytest.raises(AssertionError) as raised, journal.explains(), journal.explains():
        raise AssertionError("blocks are missing")
    (note,) = raised.value.__notes__
    assert "AttemptUnwanted r1" in note
    with pytest.raises(ValueError, match="other") as other, journal.explains():
        raise ValueError("other")
    assert not hasattr(other.value, "__notes__")
