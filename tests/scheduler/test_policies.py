"""A policy may be anybody's: a good one is followed, a bad one costs nobody an answer."""

from pathlib import Path
from typing import Any

import pytest

from schemas.request import Placement
from services.config import SchedulerConfig
from services.errors import UserError
from services.scheduler.core import SchedulerCore
from services.scheduler.limits import POLICY_REST_MS
from services.scheduler.placement.named import policy_named
from tests.scheduler import policies
from tests.scheduler.test_cost import D0, P0, P1, ask, mesh, placed, worker

MODULE = "tests.scheduler.policies"


def mesh_of(policy: str) -> SchedulerCore:
    return mesh(P0, P1, D0, worker("d1"), policy=f"{MODULE}:{policy}")


def test_a_policy_of_somebody_else_is_followed() -> None:
    core = mesh_of("last")
    placement = placed(core, ask())
    assert (placement.prefill_worker, placement.decode_worker) == ("p1", "d1")
    assert placement.policy == f"{MODULE}:last" and core.policy_failure == "" and core.asks_directory


@pytest.mark.parametrize(
    ("policy", "failure"),
    [
        ("raises", "LookupError: of no use"),
        ("says_nothing", "None, which is no Choice"),
        ("says_words", "'p0', which is no Choice"),
        ("names_nobody", "'nobody', which nobody is called"),
        ("swaps_roles", "d0 and p0 are not among those"),
        ("leaves_out_the_decode_worker", "p0 and None are not among those"),
        ("takes_who_is_excluded", "p1 and d0 are not among those"),
        ("reads_from_nobody", "'x', which nobody is called"),
    ],
)
def test_a_bad_one_costs_nothing_but_a_fall_back(policy: str, failure: str) -> None:
    core = mesh_of(policy)
    for _ in range(2):
        placement = placed(core, ask(excluded=("p1",)))
        assert placement.prefill_worker == "p0" and placement.policy == "least_loaded"
        assert failure in core.policy_failure


def test_one_that_hangs_is_interrupted_and_rests() -> None:
    core = mesh_of("hangs")
    for now_ms in (0, POLICY_REST_MS - 1, POLICY_REST_MS):
        placement = core.place(ask(), now_ms)
        assert isinstance(placement, Placement) and placement.policy == "least_loaded"
        assert ("rests" if now_ms == POLICY_REST_MS - 1 else "more than 50 ms") in core.policy_failure


def test_without_workers_nobody_is_blamed() -> None:
    core = mesh(P0, policy=f"{MODULE}:says_nothing")
    assert not isinstance(core.place(ask(), 0), Placement) and core.policy_failure == ""


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fastest", "there are: affinity, cost, least_loaded, round_robin; or package.module:name"),
        ("no.such.module:name", "cannot be loaded: No module named 'no'"),
        (f"{MODULE}:nothing", "cannot be loaded: module .* has no attribute 'nothing'"),
        (f"{MODULE}:", "cannot be loaded"),
        (":name", "cannot be loaded"),
        (f"{MODULE}:no_function", "is no function"),
    ],
)
def test_what_cannot_be_loaded_is_a_users_error(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        policy_named(SchedulerConfig(policy=name))


def test_the_page_s_policy_works(monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "policies.md").read_text()
    found: dict[str, Any] = {}
    exec(page.split("```python\n")[1].split("```")[0], found)
    monkeypatch.setattr(policies, "first", found["first"], raising=False)
    core = mesh_of("first")
    assert (placed(core, ask()).prefill_worker, core.policy_failure) == ("p0", "")
