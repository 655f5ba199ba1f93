"""What `make test` runs, what it leaves to the night, and that each carrier, role and fault is met somewhere."""

import ast
from pathlib import Path
from typing import get_args

import pytest

from services.config import Carrier
from services.sim.scenario import FAULT_KINDS, Scenario, load_scenario
from tests import nightly
from tests.mesh.faults.actor import IN_PROCESSES
from tests.mesh.faults.harness import SCENARIOS
from tests.mesh.faults.repeat import REPEATED
from tests.plane import harness
from tests.share import CARRIERS, SHARES, Ids, Values

ROLES = ("gateway", "scheduler", "directory", "prefill", "decode")
NOT_ON_PROCESSES = {"plane_cut", "slowness"}
"""No scenario file has them: a dead reader's lease (test_scenarios.py) is shown behind a cut, the rest is simulated."""


@pytest.fixture(scope="module")
def repeated() -> list[Scenario]:
    return [load_scenario(SCENARIOS / f"{name}.toml") for name in REPEATED]


def test_every_carrier_of_a_host_is_met() -> None:
    assert set(CARRIERS) == set(harness.CARRIERS) == {"loopback", *get_args(Carrier)} - {"auto", "cuda", "nccl"}


def test_every_role_is_killed(repeated: list[Scenario]) -> None:
    killed = {
        fault.target.partition("-")[0] for scenario in repeated for fault in scenario.faults if fault.do == "kill"
    }
    assert killed == set(ROLES)


def test_every_fault_strikes_real_processes(repeated: list[Scenario]) -> None:
    done = {fault.do for scenario in repeated for fault in scenario.faults}
    assert done == IN_PROCESSES - NOT_ON_PROCESSES


def test_every_file_of_the_night_is_there_and_in_one_part() -> None:
    named = [file for part in nightly.PARTS for file in part.files]
    assert len(named) == len(set(named)) and all(Path(file).exists() for file in nightly.FILES)
    files = [path.as_posix() for path in Path("tests").rglob("test_*.py")]
    inside = {file for file in files for folder in named if file.startswith(f"{folder}/")}
    assert not inside & set(named)


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
