"""What `make attack` tries, with fewer tries."""

import math
from collections.abc import Iterator

import pytest

from tests.mesh.attack.__main__ import attacks
from tests.mesh.attack.findings import FINDINGS, ROOT
from tests.mesh.attack.mesh import Target, attacked, under_load
from tests.mesh.faults.harness import FaultMesh, make_truth
from tests.mesh.forked import ForkingLoop

ATTACKS = attacks(num_frames=1_000, num_messages=2_000, num_repeated=150, health_s=math.inf)


@pytest.fixture(scope="module")
def mesh(forking: ForkingLoop) -> Iterator[FaultMesh]:
    around = attacked(make_truth(), forking.zygote)
    yield forking.run(around.__aenter__())
    forking.run(around.__aexit__(None, None, None))


@pytest.mark.slow
@pytest.mark.parametrize("name", ATTACKS)
def test_nothing_gets_through(name: str, forking: ForkingLoop, mesh: FaultMesh) -> None:
    row = forking.run(under_load(Target(mesh), name, ATTACKS[name]))
    assert not row.complaints, "\n".join(row.complaints)


def test_the_findings_name_tests_that_there_are() -> None:
    assert not [path for paths in FINDINGS.values() for path in paths if not (ROOT / "tests" / path).exists()]
