"""What the simulator has found, each kept as the scenario that showed it, with the seed of that day."""

from dataclasses import dataclass

import pytest

from services.sim.mesh import MeshShape
from services.sim.scenario import Fault, Scenario
from services.sim.world import SimOptions, simulate
from tests.promises import nothing_wrong


@dataclass(frozen=True)
class Found:
    """`all_answered`: the faults are such that every request can be answered."""

    name: str
    seed: int
    shape: MeshShape
    faults: tuple[Fault, ...]
    all_answered: bool = True
    num_requests: int = 24


FOUND = (
    # It kept the incarnation that had been declared lost, and nobody listened to it any more.
    Found(
        "a store that was declared lost comes back",
        427,
        MeshShape(has_store=True),
        (Fault(do="partition", target="store", at_s=0.2, for_s=4.0),),
    ),
    # What was published while the broker was away reached it before those who serve had come back.
    Found(
        "requests that come while the broker comes back are answered",
        302,
        MeshShape(num_prefill=1, policy="least_loaded"),
        (Fault(do="broker", at_s=0.4, for_s=1.0),),
    ),
    Found(
        "requests under way while the broker is away for five seconds are answered",
        303,
        MeshShape(step_s=0.02),
        (Fault(do="broker", at_s=0.7, for_s=5.0),),
    ),
    # Workers that had given its answers up knew of no end to them: they stood still for a minute.
    Found(
        "answers of a gateway that is cut off for five seconds go on as it is back",
        304,
        MeshShape(num_gateways=2, step_s=0.3),
        (Fault(do="bus_cut", target="gateway-1", at_s=0.5, for_s=5.0),),
        all_answered=False,
    ),
    # A gateway that found no scheduler failed at once; one that had just started knew no worker yet.
    Found(
        "requests wait for the only scheduler to start again",
        326,
        MeshShape(),
        (Fault(do="kill", target="scheduler", at_s=0.3, for_s=1.5),),
    ),
    # The only scheduler was stopped: what it was asked never came back.
    Found(
        "requests wait for the only scheduler to wake up",
        327,
        MeshShape(),
        (Fault(do="pause", target="scheduler", at_s=0.3, for_s=3.0),),
    ),
    # No store ever told of a release; of a worker's lease it was lost where a broken connection was tried again.
    Found(
        "what a store lends is released in the request's trace",
        902,
        MeshShape(replicate=True, has_store=True, num_blocks=40, step_s=0.01),
        (Fault(do="duplication", share=0.05, at_s=0.1),),
    ),
    Found(
        "a lease is released in its trace however many streams were opened on it",
        900,
        MeshShape(num_blocks=40, step_s=0.01, policy="least_loaded", carrier="tcp"),
        (Fault(do="truncation", at_s=0.3, share=0.8, for_s=2.0),),
    ),
    # The restarted prefill worker took the reservations of its predecessor's hand-overs for early ones, and the
    # requests waited for their deadline; those that came while it started were told at once that there is none.
    Found(
        "a decode worker that slept wakes up to a prefill worker that knows nothing",
        3,
        MeshShape(num_blocks=40, step_s=0.02),
        (
            Fault(do="pause", target="decode-0", at_s=0.3, for_s=2.0),
            Fault(do="kill", target="prefill-0", at_s=0.6, for_s=0.5),
            Fault(do="kill", target="prefill-1", at_s=0.9, for_s=0.5),
        ),
    ),
    # The shape of the run of 100,000 in which it was first seen.
    Found(
        "a reservation that outlives its hand-over is refused on a bus that loses messages",
        1892,
        MeshShape(num_decode=3, replicate=True, num_blocks=40, carrier="tcp", step_s=0.02),
        (
            Fault(do="pause", target="decode-2", at_s=0.3558, for_s=2.7246),
            Fault(do="kill", target="prefill-1", at_s=1.1189, for_s=0.887),
            Fault(do="pause", target="decode-0", at_s=1.3745, for_s=3.1435),
            Fault(do="loss", at_s=1.6958, for_s=1.8651, share=0.2436),
            Fault(do="pause", target="decode-2", at_s=1.8692, for_s=0.6788),
        ),
        all_answered=False,
    ),
    # What it had not read yet was counted as never said.
    Found(
        "a broker dies while it stands still",
        368,
        MeshShape(num_gateways=2),
        (Fault(do="broker_pause", at_s=0.3, for_s=3.0), Fault(do="broker", at_s=1.2, for_s=0.3)),
    ),
    # It was judged before the last client had come back, and had said what it had kept.
    Found(
        "a broker is away until after the deadlines",
        2224,
        MeshShape(
            num_schedulers=2,
            num_gateways=2,
            replicate=True,
            num_blocks=128,
            token_budget=64,
            carrier="tcp",
            lease_ms=400,
        ),
        (Fault(do="broker", at_s=0.3, for_s=26.0),),
        all_answered=False,
    ),
    # A damaged length had the reader wait for bytes that never came, and the lease with it.
    Found(
        "streams to a store are damaged",
        3734,
        MeshShape(num_prefill=3, has_store=True, replicate=True, num_blocks=40, token_budget=16, lease_ms=3_000),
        (Fault(do="corruption", at_s=0.3, for_s=1.5, share=0.6),),
    ),
    # The gateway was still giving it a piece: that request's trace had no root yet.
    Found(
        "slow clients hang up",
        7,
        MeshShape(),
        (
            Fault(do="slow_client", at_s=0.0, for_s=5.0, share=1.0),
            Fault(do="disconnect", at_s=0.0, for_s=5.0, share=0.9),
        ),
        all_answered=False,
    ),
)


@pytest.mark.parametrize("later", range(3))
@pytest.mark.parametrize("found", FOUND, ids=[found.name.replace(" ", "_") for found in FOUND])
def test_found(found: Found, later: int) -> None:
    scenario = Scenario(faults=found.faults)
    options = SimOptions(num_requests=found.num_requests, shape=found.shape, scenario=scenario)
    verdict = simulate(found.seed + later, options).verdict
    nothing_wrong(verdict.problems)
    assert verdict.faults
    if found.all_answered:
        assert verdict.num_finished == found.num_requests, dict(verdict.failed)
