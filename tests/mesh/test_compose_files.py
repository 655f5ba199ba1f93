"""The files of compose/ agree with the code. No container engine is needed."""

import importlib.util
import json
import re
import subprocess
import time
import urllib.request
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import pytest
import yaml

from services.bus.base import MAX_PAYLOAD_BYTES
from services.bus.embedded import find_server
from services.cli.main import RoleName
from services.config import MeshConfig, load_config, require_secret

ROOT = Path(__file__).parents[2]
COMPOSE = ROOT / "compose"
SIZES = {"kb": 1024, "mb": 1024**2, "gb": 1024**3}


def load_yaml(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    return load_yaml(COMPOSE / "compose.yaml")["services"]


@pytest.fixture
def template(monkeypatch: pytest.MonkeyPatch) -> MeshConfig:
    monkeypatch.setenv("KVMESH_SECRET", "s" * 32)
    monkeypatch.setenv("KVMESH_NATS_URL", "nats://nats:4222")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://tempo:4318")
    return load_config(COMPOSE / "mesh.toml")


def make_config_module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_config", COMPOSE / "make_config.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def bytes_of(text: str) -> int:
    number, unit = re.fullmatch(r"(\d+)\s*([kmg]b)", text.lower()).groups()  # type: ignore[union-attr]
    return int(number) * SIZES[unit]


@pytest.mark.parametrize("path", sorted(COMPOSE.rglob("*.yaml")), ids=lambda path: path.name)
def test_every_yaml_file_is_valid(path: Path) -> None:
    assert load_yaml(path)


def test_the_template_loads_and_has_no_secret(template: MeshConfig) -> None:
    assert "secret =" not in (COMPOSE / "mesh.toml").read_text()
    require_secret(template)
    assert template.worker.carrier == "tcp"
    assert (template.worker.plane_host, template.worker.advertise_host) == ("0.0.0.0", "")
    assert template.telemetry.otlp_endpoint == "http://tempo:4318"


def test_ports_are_published_on_loopback_only(services: dict[str, Any]) -> None:
    ports = [port for service in services.values() for port in service.get("ports", [])]
    assert sorted(ports) == ["127.0.0.1:3000:3000", "127.0.0.1:4222:4222", "127.0.0.1:8000:8000"]
    assert all(service.get("network_mode") != "host" for service in services.values())


def test_every_served_role_exists(services: dict[str, Any]) -> None:
    served = {s["command"][2] for s in services.values() if s.get("command", [])[:2] == ["kvmesh", "serve"]}
    assert served == {"gateway", "scheduler", "directory", "prefill", "decode"} <= set(get_args(RoleName))
    for role in served:
        service = services[role]
        assert service["command"][3:] == ["--config", "/etc/kvmesh/mesh.toml"]
        assert service["image"] == services["config"]["image"] == "kvmesh"
        assert "config:/etc/kvmesh:ro" in service["volumes"]
        assert service["depends_on"]["config"]["condition"] == "service_completed_successfully"
        assert service["depends_on"]["nats"]["condition"] == "service_healthy"
        assert not set(service["depends_on"]) - set(services)
        assert set(service["environment"]) == {"KVMESH_NATS_URL", "KVMESH_SECRET", "OTEL_EXPORTER_OTLP_ENDPOINT"}


def test_the_arena_fits_into_the_workers_shared_memory(services: dict[str, Any], template: MeshConfig) -> None:
    for role in ("prefill", "decode"):
        assert bytes_of(services[role]["shm_size"]) > template.worker.kv_bytes + 16 * 1024**2


def test_mounted_and_copied_files_exist(services: dict[str, Any]) -> None:
    mounts = [volume for service in services.values() for volume in service.get("volumes", [])]
    for mount in mounts:
        source = mount.split(":")[0]
        assert source == "config" or (COMPOSE / source).exists(), source
    for line in (COMPOSE / "Dockerfile").read_text().splitlines():
        if line.startswith("COPY"):
            assert all((ROOT / source).exists() for source in line.split()[1:-1]), line
    build = services["config"]["build"]
    assert (COMPOSE / build["context"]).resolve() == ROOT and (ROOT / build["dockerfile"]).is_file()
    kept = [line[1:] for line in (COMPOSE / "Dockerfile.dockerignore").read_text().splitlines() if line[:1] == "!"]
    assert kept and all((ROOT / path).exists() for path in kept)


def test_grafana_asks_the_tempo_that_the_services_write_to(services: dict[str, Any]) -> None:
    tempo = load_yaml(COMPOSE / "tempo.yaml")
    source = load_yaml(COMPOSE / "grafana/provisioning/datasources/tempo.yaml")["datasources"][0]
    assert source["url"] == f"http://tempo:{tempo['server']['http_listen_port']}"
    endpoint = tempo["distributor"]["receivers"]["otlp"]["protocols"]["http"]["endpoint"]
    assert services["gateway"]["environment"]["OTEL_EXPORTER_OTLP_ENDPOINT"].endswith(endpoint.removeprefix("0.0.0.0"))


def test_the_broker_takes_its_configuration(tmp_path: Path) -> None:
    """The committed file, run by a real server with its ports moved aside."""
    text = (COMPOSE / "nats.conf").read_text()
    subprocess.run([find_server(), "-t", "-c", COMPOSE / "nats.conf"], check=True, capture_output=True, timeout=30)
    moved = text.replace("port: 4222", f'port: -1\nports_file_dir: "{tmp_path}"').replace(":8222", ":-1")
    moved = moved.replace('"0.0.0.0"', '"127.0.0.1"')
    assert "port: -1" in moved and "127.0.0.1:-1" in moved
    (tmp_path / "nats.conf").write_text(moved)
    server = subprocess.Popen([find_server(), "-c", tmp_path / "nats.conf"], stderr=subprocess.DEVNULL)
    try:
        monitoring = wait_for_ports(tmp_path)["monitoring"][0]
        with urllib.request.urlopen(f"{monitoring}/varz", timeout=10) as answer:
            assert json.load(answer)["max_payload"] == MAX_PAYLOAD_BYTES
        with urllib.request.urlopen(f"{monitoring}/healthz", timeout=10) as answer:
            assert answer.status == 200
    finally:
        server.terminate()
        server.wait(10)


def wait_for_ports(folder: Path) -> dict[str, list[str]]:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        for path in folder.glob("*.ports"):
            if text := path.read_text():
                return json.loads(text)
        time.sleep(0.02)
    raise AssertionError("the broker did not say its ports")


def test_the_secret_is_drawn_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KVMESH_SECRET", "KVMESH_NATS_URL", "OTEL_EXPORTER_OTLP_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    target = tmp_path / "mesh.toml"
    make_config = make_config_module().make_config
    make_config(COMPOSE / "mesh.toml", target)
    first = load_config(target)
    require_secret(first)
    make_config(COMPOSE / "mesh.toml", target)
    assert load_config(target) == first
    assert first.gateway.host == "0.0.0.0"
    assert {path.name: path.stat().st_mode & 0o077 for path in tmp_path.iterdir()} == {"mesh.toml": 0, "secret": 0}
    other = tmp_path / "other" / "mesh.toml"
    other.parent.mkdir()
    make_config(COMPOSE / "mesh.toml", other)
    assert load_config(other).secret != first.secret
