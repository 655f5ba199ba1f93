"""Simulated servers break no promise of their holder's, and each planted bug is caught."""

import pytest

from tests.attach.simulated import BUGS, Bug, hunt, problem_of
from tests.share import examples


def test_no_promise_is_broken() -> None:
    for seed in range(examples(1_000, at_least=60)):
        assert problem_of(seed) == "", f"seed {seed}"


@pytest.mark.parametrize("bug", BUGS, ids=[bug.name for bug in BUGS])
def test_caught(bug: Bug) -> None:
    assert hunt(bug)[1], f"not caught within {bug.within} seeds"
