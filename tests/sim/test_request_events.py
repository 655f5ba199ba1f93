"""The simulator's check of request events: what it must not accept."""

import pytest

from services.sim.verdict.request_events import RequestEventTap

WHOLE = ["accepted", "placed", "first_token", "resumed", "placed", "finished"]


def problems(events: list[str], *, may_be_cut: bool = False) -> list[str]:
    tap = RequestEventTap()
    for event in events:
        tap.note_event(f"mesh.v1.request.req-1.{event}", "gateway-0")
        tap.note_event("mesh.v1.request.req-1.cancel", "gateway-0")
        tap.note_event("mesh.v1.tokens.gateway-0", "decode-0")
    return list(tap.problems(may_be_cut=may_be_cut))


@pytest.mark.parametrize("end", ["finished", "failed", "cancelled"])
def test_whole_events_are_right(end: str) -> None:
    assert problems(["accepted", "placed", end]) == problems(WHOLE) == []


def test_events_may_lack_their_end_only_where_gateways_die() -> None:
    assert "no end" in problems(WHOLE[:-1])[0]
    assert problems(WHOLE[:-1], may_be_cut=True) == []


@pytest.mark.parametrize(
    "events", [WHOLE[1:], [*WHOLE, "finished"], [*WHOLE, "placed"], ["accepted", *WHOLE], ["cancelled", "accepted"]]
)
def test_one_beginning_one_end(events: list[str]) -> None:
    assert problems(events, may_be_cut=True)


def test_what_the_broker_lost_unread_is_missed_of_that_request_alone() -> None:
    tap = RequestEventTap()
    for request_id in ("req-1", "req-2"):
        for event in ("placed", "first_token"):
            tap.note_event(f"mesh.v1.request.{request_id}.{event}", "gateway-0")
    for subject in ("mesh.v1.request.req-1.accepted", "mesh.v1.tokens.gateway-0", ""):
        tap.miss(subject)
    assert len(problems := list(tap.problems(may_be_cut=False))) == 1 and "req-2" in problems[0]
