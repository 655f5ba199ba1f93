"""The simulator's ear for stories: what it must not let pass."""

import pytest

from services.sim.verdict.stories import StoryTap

WHOLE = ["accepted", "placed", "first_token", "resumed", "placed", "finished"]


def problems(story: list[str], *, may_be_cut: bool = False) -> list[str]:
    tap = StoryTap()
    for event in story:
        tap.hear(f"mesh.v1.request.req-1.{event}", "gateway-0")
        tap.hear("mesh.v1.request.req-1.cancel", "gateway-0")
        tap.hear("mesh.v1.tokens.gateway-0", "decode-0")
    return list(tap.problems(may_be_cut=may_be_cut))


@pytest.mark.parametrize("end", ["finished", "failed", "cancelled"])
def test_a_whole_story_is_right(end: str) -> None:
    assert problems(["accepted", "placed", end]) == problems(WHOLE) == []


def test_a_story_may_stop_only_where_gateways_die() -> None:
    assert "no end" in problems(WHOLE[:-1])[0]
    assert problems(WHOLE[:-1], may_be_cut=True) == []


@pytest.mark.parametrize(
    "story", [WHOLE[1:], [*WHOLE, "finished"], [*WHOLE, "placed"], ["accepted", *WHOLE], ["cancelled", "accepted"]]
)
def test_one_beginning_one_end(story: list[str]) -> None:
    assert problems(story, may_be_cut=True)
