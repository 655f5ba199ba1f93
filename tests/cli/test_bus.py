"""A broker of one's own: what is refused, and why, in one line."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from services.bus.embedded import EmbeddedNats
from services.config import GatewayConfig, MeshConfig
from services.files import write_private
from services.launch.options import Launch
from services.trust.certificates import CA_FILE
from services.trust.keys import BROKER_FILE, MeshKeys
from tests.cli.commands import QUESTION, assert_one_line, run
from tests.mesh.processes import Mesh, RunningMesh


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """A broker that knows the keys of a folder, and the folder."""
    folder, keys = tmp_path_factory.mktemp("closed"), MeshKeys.fresh()
    keys.save(folder / "keys")
    server = EmbeddedNats.launch(None, folder, keys.broker_config)
    yield server.url, folder / "keys"
    server.stop()


def test_an_open_broker_is_taken_on_purpose_only(nats_url: str, tmp_path: Path) -> None:
    assert_one_line(run(tmp_path, "up", "--nats", nats_url, "--port", "0"), "lets anybody in", "--keys", "--open-bus")


def test_the_environment_may_name_the_broker(nats_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVMESH_NATS_URL", nats_url)
    assert_one_line(run(tmp_path, "up", "--port", "0"), nats_url, "lets anybody in")
    assert_one_line(run(tmp_path, "up", "--port", "0", "--nats-port", "4222"), "leave it out with --nats URL")


def test_a_closed_broker_needs_its_keys(closed: tuple[str, Path], tmp_path: Path) -> None:
    url, _ = closed
    assert_one_line(run(tmp_path, "up", "--nats", url, "--port", "0"), "lets nobody in", "--keys")
    other = tmp_path / "other"
    MeshKeys.fresh().save(other)
    assert_one_line(run(tmp_path, "up", "--nats", url, "--port", "0", "--keys", str(other)), "does not know the key")
    assert_one_line(run(tmp_path, "up", "--nats", url, "--port", "0", "--keys", "/none"), "/none", "No such file")
    assert_one_line(run(tmp_path, "status", "--nats", url), "lets nobody in", "--creds")


@pytest.mark.parametrize("role", ["gateway", "scheduler", "directory"])
def test_a_service_without_its_role_s_key_says_so(closed: tuple[str, Path], tmp_path: Path, role: str) -> None:
    url, keys = closed
    (tmp_path / "mesh.toml").write_text(f'[nats]\nurl = "{url}"\n')
    assert_one_line(
        run(tmp_path, "serve", role, "--config", str(tmp_path / "mesh.toml")), f"{role}.key.json", "bus-config"
    )
    mine = tmp_path / "keys"
    mine.mkdir()
    write_private(mine / f"{role}.key.json", (keys / "holder.key.json").read_bytes())
    assert_one_line(run(tmp_path, "serve", role, "--config", str(tmp_path / "mesh.toml")), "holder", role)


def test_a_mesh_on_a_broker_of_one_s_own_that_encrypts(running_mesh: RunningMesh, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    MeshKeys.fresh(["127.0.0.1"]).save(keys)
    broker = EmbeddedNats.launch(None, tmp_path / "broker", (keys / BROKER_FILE).read_text())
    try:
        assert broker.url.startswith("tls://")
        with running_mesh(
            tmp_path, Launch(nats=broker.url, keys=str(keys), config=MeshConfig(gateway=GatewayConfig(port=0)))
        ) as mesh:
            assert isinstance(mesh, Mesh) and mesh.complete(QUESTION)["choices"][0]["text"].strip() == "7412"
            said = run(tmp_path, "status", "--nats", broker.url, "--creds", str(keys / "observer.creds"))
            assert said.returncode == 0 and "decode-0" in said.stdout
            (keys / CA_FILE).rename(tmp_path / CA_FILE)
            lost = run(tmp_path, "status", "--nats", broker.url, "--creds", str(keys / "observer.creds"))
            assert_one_line(lost, "not believed to be ours", CA_FILE)
    finally:
        broker.stop()
