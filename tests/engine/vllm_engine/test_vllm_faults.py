"""Faults of `tests/mesh/faults` to real workers that compute with vLLM: the tokens of a single vLLM, whatever dies,
hangs, is asked to stop or is damaged on its way."""

from collections import defaultdict
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from schemas.block import split_hashes
from schemas.directory import BlocksStored
from schemas.message import decode
from schemas.request import SamplingParams
from services.settings import changed
from services.sim.scenario import Scenario, load_scenario
from tests.engine.vllm_engine.conftest import World
from tests.mesh.faults.client import Stream
from tests.mesh.faults.harness import OPTIONS, SCENARIOS, FaultMesh, fault_mesh, make_truth
from tests.mesh.faults.kills import Killing
from tests.mesh.faults.test_full import ROOM, an_answer_makes_room
from tests.mesh.faults.times import PHASES, cancel_to_free, death_to_free, struck_halfway
from tests.mesh.forked import ForkingLoop
from tests.mesh.reference import Case
from tests.promises import nothing_wrong

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
NAMES = (
    "drain_decode", "drain_prefill", "drain_twice", "kill_draining", "kill_while_moving",
    "pause_decode_long", "pause_decode_short", "pause_prefill_long",
    "pause_prefill_short", "disconnects", "corruption", "truncation", "stall", "refusal",
)  # fmt: skip
"""What befalls workers and what crosses between them; the other services do not know who computes."""
KILLS = [file.stem.removeprefix("kill_prefill_") for file in sorted(SCENARIOS.glob("kill_prefill_*.toml"))]
"""The phases of a request in which a worker dies."""
NUM_CASES, NUM_STREAMS, NUM_KILLS = 10, 8, 4


def both_roles(phase: str) -> tuple[str, str]:
    """Return the scenarios in which one worker of each role dies in a phase: both are started again at once."""
    return f"kill_prefill_{phase}", f"kill_decode_{phase}"


@pytest.fixture(scope="module")
def mesh(real_world: World, forking: ForkingLoop, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultMesh]:
    """One mesh for all, two workers of each role: whatever dies is started again, and must be as good as new."""
    truth = make_truth(NUM_CASES, lambda case, _: real_world.reference(case.prompt, case.sampling))
    options = changed(OPTIONS, {"config.engine.name": "vllm", "config.scheduler.replicate": True})
    around = fault_mesh(tmp_path_factory.mktemp("faults"), truth, forking.zygote, options)
    yield forking.run(around.__aenter__())
    forking.run(around.__aexit__(None, None, None))


@pytest.mark.parametrize("names", [*((name,) for name in NAMES), *map(both_roles, KILLS)], ids="+".join)
def test_a_fault(names: tuple[str, ...], forking: ForkingLoop, mesh: FaultMesh) -> None:
    scenarios = [load_scenario(SCENARIOS / f"{name}.toml") for name in names]
    faults = tuple(fault for scenario in scenarios for fault in scenario.faults)
    outcome = forking.run(mesh.run(Scenario(faults=faults, name="+".join(names)), NUM_STREAMS))
    nothing_wrong(outcome.wrong)
    assert not outcome.complaints, "\n".join(outcome.complaints)


def test_kills_over_and_over(forking: ForkingLoop, mesh: FaultMesh) -> None:
    report = forking.run(Killing(mesh, NUM_KILLS, lambda: None).run())
    assert report.num_kills == NUM_KILLS and report.num_resumed
    nothing_wrong(report.wrong)
    assert not report.complaints, "\n".join(report.complaints)


def test_what_decoding_completes_outlives_its_worker(real_world: World, forking: ForkingLoop, mesh: FaultMesh) -> None:
    """It lies on the other decode worker as well by the time that its own dies. Whether whoever resumes the answer then
    reads it or computes it again is a question of price, which no test can tell beforehand."""
    stored: defaultdict[bytes, dict[str, float]] = defaultdict(dict)

    def hear(subject: str, payload: bytes, heard_s: float) -> None:
        if fnmatchcase(subject, "mesh.v1.kv.decode-*.stored"):
            said = decode(payload, BlocksStored)
            for block_hash in split_hashes(said.block_hashes):
                stored[block_hash].setdefault(said.worker_id, heard_s)

    async def interrupt(stream: Stream) -> float:
        await mesh.settle()
        mesh.listener.hearers.append(hear)
        killed_s = await struck_halfway(mesh, stream)
        mesh.listener.hearers.remove(hear)
        await mesh.settle()
        return killed_s

    # A prompt of its own: of what an earlier answer has left on both nothing would be said.
    case = Case([7] * 320, SamplingParams(max_tokens=220, ignore_eos=True))
    mesh.truth.cases.append(case)
    mesh.truth.answers.append(real_world.reference(case.prompt, case.sampling))
    stream = mesh.new_stream(len(mesh.truth.cases) - 1)
    killed_s = forking.run(interrupt(stream))
    assert stream.ending == "finished" and not mesh.truth.problem(stream, mesh.truth.answers[stream.number])
    assert stream.num_resumed_tokens > 0
    held = [{worker for worker, at_s in holders.items() if at_s < killed_s} for holders in stored.values()]
    assert [holders for holders in held if len(holders) == 2], "nothing lay on both"


def test_a_full_worker_s_answer_makes_room(real_world: World, forking: ForkingLoop, tmp_path: Path) -> None:
    layout = real_world.link.layout
    room = ROOM // layout.block_size * layout.block_bytes
    options = changed(
        OPTIONS, {"config.engine.name": "vllm", "config.worker.kv_bytes": room, "config.engine.kv_bytes": 2 * room}
    )
    an_answer_makes_room(forking, tmp_path, options, lambda case, _: real_world.reference(case.prompt, case.sampling))


def test_a_dead_reader_s_lease_ends(forking: ForkingLoop, mesh: FaultMesh) -> None:
    assert len(forking.run(death_to_free(mesh, 1, lambda: None))) == 1


def test_a_client_may_hang_up_at_any_time(forking: ForkingLoop, mesh: FaultMesh) -> None:
    assert forking.run(cancel_to_free(mesh, 1, lambda: None)).keys() == set(PHASES)
