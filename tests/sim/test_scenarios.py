"""Every scenario file, carried out in the simulator. tests/mesh/faults/test_scenarios.py has them on real processes."""

from pathlib import Path

import pytest

from services.sim.mesh import MeshShape
from services.sim.scenario import load_scenario
from services.sim.world import SimOptions, simulate
from tests.mesh.faults.harness import SCENARIOS
from tests.promises import nothing_wrong

FILES = sorted(SCENARIOS.glob("*.toml"))


@pytest.mark.parametrize("file", FILES, ids=[file.stem for file in FILES])
def test_in_the_simulator(file: Path) -> None:
    options = SimOptions(num_requests=8, shape=MeshShape(num_gateways=2), scenario=load_scenario(file))
    verdict = simulate(1, options).verdict
    nothing_wrong(verdict.problems)
    assert verdict.faults
    assert file.stem == "kill_gateway" or not verdict.failed, dict(verdict.failed)
