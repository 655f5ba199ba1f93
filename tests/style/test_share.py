"""The share of the matrices that `make test` runs meets every carrier, every role and every fault."""

import ast
from pathlib import Path
from typing import get_args

import pytest

from services.config import Carrier
from services.sim.scenario import FAULT_KINDS, Scenario, load_scenario
from tests.mesh.faults.actor import IN_PROCESSES
from tests.mesh.faults.harness import SCENARIOS
from tests.plane import harness
from tests.share import CARRIERS, SHARES, Ids, Values
from tests.share import SCENARIOS as CHOSEN

ROLES = ("gateway", "scheduler", "directory", "prefill", "decode")
NOT_ON_PROCESSES = {"plane_cut", "slowness"}
"""No scenario file has them: a dead reader's lease (test_scenarios.py) is shown behind a cut, the rest is simulated."""


@pytest.fixture(scope="module")
def chosen() -> list[Scenario]:
    return [load_scenario(SCENARIOS / f"{name}.toml") for name in CHOSEN]


def test_every_carrier_is_met() -> None:
    assert {harness.name_of(carrier) for carrier in CARRIERS} == {*harness.CARRIERS, "cuda", "nccl"}
    assert {harness.name_of(carrier) for carrier in CARRIERS} >= set(get_args(Carrier)) - {"auto"}
    assert set(CARRIERS) <= {*harness.CARRIERS, *harness.FROM_OR_TO_CARDS}
    staged = {harness.ends_of(carrier) for carrier in CARRIERS if carrier in harness.STAGED}
    assert staged == {("card", "host"), ("host", "card")}


def test_every_role_is_killed(chosen: list[Scenario]) -> None:
    killed = {fault.target.partition("-")[0] for scenario in chosen for fault in scenario.faults if fault.do == "kill"}
    assert killed == set(ROLES)


def test_every_fault_strikes_real_processes(chosen: list[Scenario]) -> None:
    done = {fault.do for scenario in chosen for fault in scenario.faults}
    assert done == IN_PROCESSES - NOT_ON_PROCESSES


def test_every_fault_strikes_in_the_simulator() -> None:
    """The share takes a number of simulations from each fault, and no fault from the table."""
    rule = SHARES["tests/sim/test_simulation.py::test_each_fault_by_itself"]
    assert rule == Ids(("1-*",)) and FAULT_KINDS


def test_the_table_names_tests_that_there_are() -> None:
    for name, rule in SHARES.items():
        file, _, test = name.partition("::")
        tree = ast.parse(Path(file).read_text())
        names = {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}
        assert not test or test in names, name
        assert not isinstance(rule, Values) or rule.parameter in Path(file).read_text(), name
