"""One of a broker's three servers ends, stands still, is sent away or is cut off under load: nobody is declared dead,
and no request is lost or fails."""

from pathlib import Path

import pytest

from tests.mesh.faults.brokers import STRIKES, ServerOutages, server_outages
from tests.mesh.faults.harness import fault_mesh, make_long_truth
from tests.mesh.forked import ForkingLoop


@pytest.mark.slow  # a minute each
@pytest.mark.parametrize("name", STRIKES)
def test_a_server_costs_a_pause_and_nothing_else(name: str, forking: ForkingLoop, tmp_path: Path) -> None:
    found, zygote = ServerOutages(), forking.zygote

    async def run() -> None:
        async with fault_mesh(tmp_path, make_long_truth(), zygote, has_cluster=True) as mesh:
            await server_outages(mesh, name, 2, lambda: None, found)

    forking.run(run())
    assert not found.complaints, "\n".join(found.complaints)
