"""Services and the broker are killed: they are started again, and requests are served."""

import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from uuid import uuid4

import httpx
import pytest

from services.config import GatewayConfig, MeshConfig, WorkerConfig
from services.launch.options import Launch
from services.launch.restart import Child
from services.restarts import ENDS_WITHIN_S, LONGEST_REST_S, LONGEST_WAIT_S, MAX_ENDS, SOUND_AFTER_S, Restarts
from tests.cli.commands import KVMESH, assert_one_line
from tests.mesh.processes import Mesh, RunningMesh


@pytest.fixture(scope="module")
def mesh(running_mesh: RunningMesh, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    options = Launch(
        num_schedulers=2,
        num_directories=2,
        num_gateways=2,
        config=MeshConfig(gateway=GatewayConfig(port=0), worker=WorkerConfig(kv_bytes=64 * 1024 * 1024)),
    )
    with running_mesh(tmp_path_factory.mktemp("restarts"), options) as running:
        yield running


def child_named(mesh: Mesh, name: str) -> Child:
    return next(child for child in mesh.supervisor.children if child.name == name)


def kill(mesh: Mesh, *names: str) -> None:
    """Kill services, and wait until each has a successor that is ready."""
    children = [child_named(mesh, name) for name in names]
    before = [child.process.pid for child in children]
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    mesh.wait_until(
        lambda: all(c.process.pid not in before and c.ready.is_set() for c in children), f"{names} are started again"
    )


def serves(mesh: Mesh, url: str = "") -> bool:
    """Say whether a fresh prompt gets its answer."""
    body = {"model": mesh.model, "prompt": f"{uuid4()} says", "temperature": 0, "max_tokens": 4}
    try:
        answer = httpx.post(f"{url or mesh.url}/v1/completions", json=body, timeout=30)
    except httpx.TransportError:
        return False
    return answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] > 0


@pytest.mark.parametrize("role", ["scheduler", "directory", "gateway"])
def test_one_of_two_is_killed_and_the_other_serves(mesh: Mesh, role: str) -> None:
    os.kill(child_named(mesh, role).process.pid, signal.SIGKILL)
    url = mesh.supervisor.urls[1]
    mesh.wait_until(lambda: serves(mesh, url), "the other one serves")
    mesh.wait_until(lambda: child_named(mesh, role).restarts.num_restarts > 0, f"the {role} is started again")
    mesh.wait_until(lambda: serves(mesh, mesh.url), f"the {role} is back")


@pytest.mark.parametrize("role", ["scheduler", "directory"])
def test_both_are_killed_and_what_they_knew_comes_back(mesh: Mesh, role: str) -> None:
    kill(mesh, role, f"{role}-1")
    mesh.wait_until(lambda: serves(mesh), "requests are served again")


def test_a_killed_worker_comes_back_and_leaves_no_arena(mesh: Mesh) -> None:
    pid = child_named(mesh, "decode-0").process.pid
    kill(mesh, "decode-0")
    assert list(Path("/dev/shm").glob(f"kvmesh-{pid}-*")) == []
    mesh.wait_until(lambda: serves(mesh), "requests are served again")


def test_the_broker_is_away_for_seconds_and_comes_back_where_it_was(mesh: Mesh) -> None:
    for _ in range(4):  # each time it stays away for longer, three seconds in all
        pid = mesh.supervisor.broker_pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        mesh.wait_until(lambda pid=pid: mesh.supervisor.broker_pid != pid, "a broker")
    mesh.wait_until(lambda: serves(mesh), "requests are served again")
    assert httpx.get(f"{mesh.url}/health", timeout=30).status_code == 200
    mesh.assert_no_blocks_held()


def test_restarts_wait_longer_and_longer_and_never_end() -> None:
    restarts, now_s, waits = Restarts(), 0.0, list[float]()
    for _ in range(MAX_ENDS + 6):
        waits.append(restarts.ended(now_s, now_s + 0.5))
        now_s += 0.5 + waits[-1]
    assert waits[:5] == [0.2, 0.4, 0.8, 1.6, 3.2] and max(waits[: MAX_ENDS - 1]) == LONGEST_WAIT_S
    assert waits[MAX_ENDS - 1 :] == [30.0, 60.0, 120.0, 240.0, 480.0, LONGEST_REST_S, LONGEST_REST_S]
    assert restarts.num_rests == 7 and restarts.num_restarts == len(waits)
    assert restarts.ended(now_s, now_s + SOUND_AFTER_S) == 0.2 and not restarts.num_rests, "it had started well"


def test_who_ends_now_and_then_is_started_again_at_once() -> None:
    restarts, now_s = Restarts(), 0.0
    for _ in range(3 * MAX_ENDS):
        now_s += SOUND_AFTER_S
        assert restarts.ended(now_s - SOUND_AFTER_S, now_s) == 0.2
    for _ in range(3 * MAX_ENDS):
        now_s += 1.2 * ENDS_WITHIN_S / MAX_ENDS
        assert restarts.ended(now_s - 1, now_s) <= LONGEST_WAIT_S


@pytest.mark.parametrize("name", ["decode-0", "prefill-0", "scheduler", "directory"])
def test_a_second_one_of_a_living_name_is_refused_and_no_request_fails(mesh: Mesh, name: str) -> None:
    """It says where the first lives, who goes on as if nothing had been."""
    living = child_named(mesh, name)
    pid, role = living.process.pid, living.role
    with ThreadPoolExecutor(max_workers=8) as pool:
        answers = [pool.submit(mesh.complete, f"{uuid4()} says", max_tokens=40) for _ in range(24)]
        config = str(mesh.run_dir / "mesh.toml")
        command = [*KVMESH, "serve", role, "--id", name, "--config", config, "--metrics-port", "-1"]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert_one_line(
            ran, f"{name} is the name of a service that lives already ({socket.gethostname()}, process {pid})"
        )
        assert all(answer.result()["usage"]["kvmesh"]["num_retries"] == 0 for answer in answers)
    assert living.process.pid == pid and living.ready.is_set()
