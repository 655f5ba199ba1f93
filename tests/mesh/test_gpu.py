"""Whole meshes on a graphics card: what one process on the CPU says, token for token. Needs a card: `make gpu-test`."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from services.cli.trace import load_spans
from services.config import GatewayConfig, MeshConfig, ModelConfig, WorkerConfig
from services.launch.options import Launch
from services.telemetry import Key, SpanName
from tests.gpu import needs_gpu
from tests.mesh.processes import Mesh, RunningMesh, TokenRecorder, in_parallel
from tests.mesh.reference import Case, Judge
from tests.mesh.test_equality import WIDTH, cases, expected, send
from tests.promises import nothing_wrong

__all__ = ["cases", "expected"]  # fixtures

CARD = ("cuda:0",)
CASES = {
    "auto": (CARD, "auto", "cuda"),
    "tcp": (CARD, "tcp", "tcp"),
    "prefill on a card": (("cuda:0", "cpu"), "auto", "tcp"),
    "decode on a card": (("cpu", "cuda:0"), "auto", "tcp"),
}
"""The devices of two prefill and two decode workers, in turn; the carrier asked for; the one taken."""


def options(devices: tuple[str, ...], carrier: str) -> Launch:
    """The demo model's weights are float32, and so are its numbers on a card: only rounding differs."""
    per_worker = tuple(device for device in devices for _ in range(2)) if len(devices) > 1 else devices
    return Launch(
        num_prefill=2,
        num_decode=2,
        devices=per_worker,
        config=MeshConfig(
            model=ModelConfig(dtype="float32"),
            gateway=GatewayConfig(port=0),
            worker=WorkerConfig(carrier=carrier),  # type: ignore[arg-type]
        ),
    )


@needs_gpu
@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", CASES)
def test_the_split_on_a_card_says_what_one_process_says(
    case: str,
    running_mesh: RunningMesh,
    tmp_path: Path,
    cases: list[Case],
    expected: Callable[[int], list[int]],
    judge: Judge,
) -> None:
    devices, asked, taken = CASES[case]
    with running_mesh(tmp_path, options(devices, asked), forked=False) as mesh, TokenRecorder(mesh) as recorder:
        request_ids = in_parallel([lambda each=each: send(mesh, each) for each in cases], WIDTH)
        for number, (each, request_id) in enumerate(zip(cases, request_ids, strict=True)):
            judge.compare(f"{case} and one process", each, expected(number), recorder.tokens(request_id))
        mesh.assert_no_blocks_held()
        on_cards = [load.worker.device.startswith("cuda:0 ") for load in mesh.fleet.workers]
        assert sum(on_cards) == (4 if len(devices) == 1 else 2)
    print(f"\n{case}: {dict(judge.verdict.counts)}")
    nothing_wrong(judge.verdict.wrong)
    reads = [
        s for s in load_spans(tmp_path / "traces") if s.name == SpanName.KV_TRANSFER and Key.CARRIER in s.attributes
    ]
    assert {read.attributes[Key.CARRIER] for read in reads} == {taken}
    assert all(read.attributes.get(Key.CARRIER_REASON) for read in reads if read.attributes[Key.END] == "target")


@needs_gpu
@pytest.mark.timeout(900)
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_killed_worker_on_a_card_costs_no_request(
    role: str,
    running_mesh: RunningMesh,
    tmp_path: Path,
    cases: list[Case],
    expected: Callable[[int], list[int]],
    judge: Judge,
) -> None:
    """kill -9 while streams are under way; the card's memory of the dead goes with its process."""
    some = cases[:64]
    with running_mesh(tmp_path, options(CARD, "auto"), forked=False) as mesh, TokenRecorder(mesh) as recorder:
        jobs = [lambda each=each: answer(mesh, each) for each in some]
        jobs.insert(len(jobs) // 2, lambda: kill(mesh, role))
        request_ids = [request_id for request_id in in_parallel(jobs, WIDTH) if request_id]
        for number, (each, request_id) in enumerate(zip(some, request_ids, strict=True)):
            judge.compare(f"killed {role} and one process", each, expected(number), recorder.tokens(request_id))
        mesh.wait_until(lambda: len(mesh.fleet.workers) == 4, "the killed worker is back")
        mesh.assert_no_blocks_held()
        assert sum(record.num_restarts for record in mesh.supervisor.records.values()) == 1
    nothing_wrong(judge.verdict.wrong)


def answer(mesh: Mesh, case: Case) -> str:
    done = mesh.complete(**case.fields)
    return done["usage"]["kvmesh"]["request_id"]


def kill(mesh: Mesh, role: str) -> str:
    victim = next(child for child in mesh.supervisor.children if child.role == role)
    os.kill(victim.process.pid, signal.SIGKILL)
    return ""
