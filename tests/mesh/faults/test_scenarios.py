"""Every scenario file, carried out on real processes. tests/sim/test_scenarios.py has them in the simulator."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from services.sim.scenario import load_scenario
from tests.mesh.faults.harness import SCENARIOS, FaultMesh, fault_mesh, make_documents, make_truth
from tests.mesh.faults.kills import Killing, KillReport
from tests.mesh.faults.times import PHASES, cancel_to_free, death_to_free
from tests.mesh.forked import ForkingLoop
from tests.promises import nothing_wrong

NUM_KILLS, NUM_DOCUMENT_KILLS, NUM_DEATHS = 8, 4, 2
FILES = sorted(SCENARIOS.glob("*.toml"))


@pytest.fixture(scope="module")
def mesh(forking: ForkingLoop, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultMesh]:
    """One mesh for all: whatever dies is started again, and must be as good as new."""
    around = fault_mesh(tmp_path_factory.mktemp("faults"), make_truth(), forking.zygote)
    yield forking.run(around.__aenter__())
    forking.run(around.__aexit__(None, None, None))


@pytest.mark.parametrize("file", FILES, ids=[file.stem for file in FILES])
def test_on_real_processes(file: Path, forking: ForkingLoop, mesh: FaultMesh) -> None:
    outcome = forking.run(mesh.run(load_scenario(file)))
    nothing_wrong(outcome.wrong)
    assert not outcome.complaints, "\n".join(outcome.complaints)


def test_kills_over_and_over(forking: ForkingLoop, mesh: FaultMesh) -> None:
    report = forking.run(Killing(mesh, NUM_KILLS, lambda: None).run())
    assert report.num_kills == NUM_KILLS and report.num_streams
    nothing_wrong(report.wrong)
    assert not report.complaints, "\n".join(report.complaints)


def test_documents_survive_kills(forking: ForkingLoop, tmp_path: Path) -> None:
    truth, zygote = (
        make_documents(num_cases=4),
        forking.zygote,
    )  # it is made on the loop, which must not wait for itself

    async def killed() -> KillReport:
        async with fault_mesh(tmp_path, truth, zygote) as mesh:
            return await Killing(mesh, NUM_DOCUMENT_KILLS, lambda: None, aimed=True).run()

    report = forking.run(killed())
    assert report.num_kills == NUM_DOCUMENT_KILLS and report.num_documents and report.num_cut_documents
    nothing_wrong(report.wrong)
    assert not report.complaints, "\n".join(report.complaints)


def test_a_dead_reader_s_lease_ends(forking: ForkingLoop, mesh: FaultMesh) -> None:
    assert len(forking.run(death_to_free(mesh, NUM_DEATHS, lambda: None))) == NUM_DEATHS


@pytest.mark.slow
def test_a_client_may_hang_up_at_any_time(forking: ForkingLoop, mesh: FaultMesh) -> None:
    assert forking.run(cancel_to_free(mesh, 1, lambda: None)).keys() == set(PHASES)
