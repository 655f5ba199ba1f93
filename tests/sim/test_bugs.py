"""The simulator must be able to fail: each known bug of the field, put back, is caught within its number of seeds."""

import pytest

from tests.sim.bugs import BUGS, Bug, hunt


@pytest.mark.parametrize("bug", BUGS, ids=[bug.name for bug in BUGS])
def test_caught(bug: Bug) -> None:
    assert hunt(bug).problem, f"not caught within {bug.within} seeds: {bug.text}"


def test_there_are_enough_of_them() -> None:
    assert len(BUGS) >= 20
    assert len({bug.name for bug in BUGS}) == len(BUGS)


def test_each_can_be_planted() -> None:
    """What it changes is still there, under its name: the hunts are not all in every gate."""
    for bug in BUGS:
        with pytest.MonkeyPatch.context() as patch:
            bug.patch(patch)
