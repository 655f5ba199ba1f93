"""Which mesh a command means."""

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from schemas.worker import FleetDescribed
from services.cli import running, status
from services.cli.running import (
    BusOptions,
    RunningMesh,
    access_of,
    find_mesh,
    states_elsewhere,
    trace_dir,
    traces_of,
)
from services.errors import MeshNotRunningError, UserError
from services.trust.keys import BusAccess


def url_of(given: str) -> str:
    options = BusOptions(given)
    return access_of(options).url


def state_of(folder: Path, pid: int, port: int) -> Path:
    """Write what a mesh that runs there would write; return its state folder."""
    state = folder / ".kvmesh"
    state.mkdir(parents=True)
    mesh = RunningMesh(
        pid=pid, url="http://x", nats_url=f"nats://127.0.0.1:{port}", keys="", trace_dir=str(traces_of(state))
    )
    (state / running.STATE_FILE).write_bytes(msgspec.json.encode(mesh))
    return state


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which no mesh was ever started: the one in which the commands run."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.delenv("KVMESH_STATE_DIR", raising=False)
    return folder


def elsewhere_are(monkeypatch: pytest.MonkeyPatch, *states: Path) -> None:
    monkeypatch.setattr(running, "states_elsewhere", lambda: set(states))


@pytest.mark.parametrize("named", ["", "of-its-own"])
def test_a_process_tells_where_its_mesh_has_its_state(tmp_path: Path, named: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "KVMESH_STATE_DIR"}
    if named:
        environment["KVMESH_STATE_DIR"] = named
    command = [sys.executable, "-c", "import sys; print('!', flush=True); sys.stdin.read()", "up"]
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert tmp_path / (named or ".kvmesh") in states_elsewhere()
        assert process.stdin is not None
        process.stdin.close()
    assert tmp_path / (named or ".kvmesh") not in states_elsewhere()


def test_the_only_mesh_is_meant_from_any_folder(here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = state_of(tmp_path / "a", os.getpid(), 1)
    elsewhere_are(monkeypatch, state)
    assert url_of("") == "nats://127.0.0.1:1"
    assert trace_dir() == traces_of(state)
    assert url_of("nats://127.0.0.1:9") == "nats://127.0.0.1:9"
    state_of(here, os.getpid(), 2)
    assert url_of("") == "nats://127.0.0.1:2", "the mesh of this folder comes first"


def test_of_several_meshes_one_has_to_be_named(here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    states = [state_of(tmp_path / name, os.getpid(), port) for name, port in (("a", 1), ("b", 2))]
    elsewhere_are(monkeypatch, *states)
    with pytest.raises(UserError, match="KVMESH_STATE_DIR") as caught:
        find_mesh()
    assert all(str(state) in str(caught.value) for state in states)
    monkeypatch.setenv("KVMESH_STATE_DIR", str(states[1]))
    assert url_of("") == "nats://127.0.0.1:2"


def test_a_mesh_that_has_ended_is_none(here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    elsewhere_are(monkeypatch, state_of(tmp_path / "a", ended.pid, 1))
    with pytest.raises(MeshNotRunningError, match="kvmesh up"):
        url_of("")
    assert trace_dir() == traces_of(here / ".kvmesh")


def test_who_names_a_broker_is_not_asked_which_mesh(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    elsewhere_are(monkeypatch, *(state_of(tmp_path / name, os.getpid(), port) for name, port in (("a", 1), ("b", 2))))
    asked: list[str] = []

    async def describe(access: BusAccess) -> FleetDescribed:
        asked.append(access.url)
        return FleetDescribed(policy="cost", ready=True, workers=())

    monkeypatch.setattr(status, "describe_fleet", describe)
    status.run_status(BusOptions("nats://127.0.0.1:2"), as_json=False)
    assert asked == ["nats://127.0.0.1:2"] and "policy cost" in capsys.readouterr().out
    with pytest.raises(UserError, match="--nats"):
        status.run_status(BusOptions(), as_json=False)
