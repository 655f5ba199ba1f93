"""Answers that must be something, while their workers die: each is what it must be, and what it would have been."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

from services.holder.core.actions import Submit
from services.sim.verdict import expected
from services.sim.world import simulate
from services.worker.engine_feed import EngineFeed
from tests.sim.bugs import RESUMED


@dataclass
class Cut:
    """`num_cut`: answers that another worker went on with in the middle."""

    num_cut: int = 0
    num_documents: int = 0
    problems: list[str] = field(default_factory=list[str])


def cut_documents(wanted: int, on_cut: Callable[[], None] = lambda: None) -> Cut:
    """Simulate, with a grammar for each request, until so many answers were cut."""
    found, seed = Cut(), 0
    cut: set[tuple[int, str]] = set()
    submit = EngineFeed.submit

    def noting(self: EngineFeed, action: Submit) -> None:
        assert action.sequence.sampling.grammar
        which = (seed, action.sequence.request_id)
        if action.attempt.request.num_answered_tokens and which not in cut:
            cut.add(which)
            on_cut()
        submit(self, action)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EngineFeed, "submit", noting)
        patch.setattr(expected, "CONSTRAINED", 1)
        while len(cut) < wanted:
            verdict = simulate(seed, replace(RESUMED, check_spans=False)).verdict
            found.problems += [f"seed {seed}: {problem}" for problem in verdict.problems]
            found.num_documents += verdict.num_documents
            seed += 1
    found.num_cut = len(cut)
    return found
