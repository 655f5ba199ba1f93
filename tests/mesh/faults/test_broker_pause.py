"""The broker's process stands still under load, or a gateway loses it: nobody is declared dead, no request is lost or
fails."""

from pathlib import Path

import pytest

from services.settings import changed
from tests.mesh.faults.harness import OPTIONS, fault_mesh, make_long_truth, make_truth
from tests.mesh.faults.times import BROKER_PAUSES_S, CUT_S, Outages, broker_pauses, gateway_cuts
from tests.mesh.forked import ForkingLoop


@pytest.mark.slow  # `make test` has the scenario of the same name
@pytest.mark.parametrize("for_s", BROKER_PAUSES_S)
@pytest.mark.parametrize("num_schedulers", [1, 2])
def test_a_paused_broker_kills_nobody(num_schedulers: int, for_s: float, forking: ForkingLoop, tmp_path: Path) -> None:
    options, zygote = changed(OPTIONS, {"num_schedulers": num_schedulers}), forking.zygote

    async def run() -> Outages:
        async with fault_mesh(tmp_path, make_truth(), zygote, options) as mesh:
            return await broker_pauses(mesh, [for_s], lambda: None)

    found = forking.run(run())
    assert not found.complaints, "\n".join(found.complaints)


@pytest.mark.slow  # as above
def test_a_gateway_that_is_cut_off_kills_nobody_and_goes_on_at_once(forking: ForkingLoop, tmp_path: Path) -> None:
    zygote = forking.zygote

    async def run() -> Outages:
        async with fault_mesh(tmp_path, make_long_truth(), zygote) as mesh:
            return await gateway_cuts(mesh, [CUT_S], lambda: None)

    found = forking.run(run())
    assert not found.complaints, "\n".join(found.complaints)
    assert max(found.gaps_s) < 30.0, "they stood still until workers had forgotten them, a minute later"
