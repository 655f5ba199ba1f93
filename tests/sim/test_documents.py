"""Documents survive their workers; `python -m tests.mesh.faults.figures --only documents` has a thousand."""

from tests.sim.documents import cut_documents


def test_documents_survive_their_workers() -> None:
    found = cut_documents(20)
    assert found.num_cut >= 20 and found.num_documents >= 20
    assert not found.problems, "\n".join(found.problems)
