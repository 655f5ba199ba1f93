"""What an engine's step gives goes to its attempts, whatever is wrong with one of them."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from services.engine.client import EngineCallbacks
from services.engine.messages import SampledToken, StepResult
from services.holder.core.actions import Action, Emit, Submit
from services.holder.core.leases import LeaseTable
from services.worker.core import AttemptCore
from services.worker.engine_feed import EngineFeed
from tests.worker import worker_cases as case


def test_a_sequence_that_nobody_knows_costs_the_others_of_its_step_nothing() -> None:
    cache = case.block_cache(16)
    core = AttemptCore(case.limits(case.PREFILL, num_blocks=16), cache, LeaseTable())
    known, lost = (
        case.one(case.run(core, case.run_prefill(number, first=9 * number, split=False)), Submit) for number in (1, 2)
    )
    del core.records[lost.attempt.key], core.of_engine[lost.attempt.number]
    callbacks: list[EngineCallbacks] = []
    actions: list[Action] = []
    EngineFeed(
        parts=cast("Any", SimpleNamespace(
            limits=case.limits(case.PREFILL), make_engine=callbacks.append,
        )),
        blocks=cast("Any", SimpleNamespace(memory=cache)),
        attempts=core,
        post=lambda handle, *arguments: handle(*arguments),
        step=lambda event: actions.extend(case.decide(core, event, 1)),
    )  # fmt: skip
    numbers = (lost.sequence.number, known.sequence.number)
    sampled = tuple(SampledToken(number, 0, 9, None, False) for number in numbers)
    with pytest.raises(AssertionError, match=r"^sequences 2 of the engine: their blocks are given back"):
        callbacks[0].on_step(StepResult(0, 1, 0, 2, tuple((number, 6) for number in numbers), sampled))
    assert known.attempt.num_stored_blocks == len(cache.take_changes()[0][1].stored) == 1, "its KV is kept"
    assert case.one(actions, Emit).tokens.request_id == "r1"
