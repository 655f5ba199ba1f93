"""The compose mesh, as far as it can be checked where no container engine runs."""

import asyncio
import json
import re
import subprocess
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from services.bus.base import MAX_PAYLOAD_BYTES
from services.bus.embedded import find_server
from services.cli.main import RoleName
from services.config import load_config

ROOT = Path(__file__).parents[2]
COMPOSE = ROOT / "compose"
ROLES = ["gateway", "scheduler", "directory", "prefill", "decode"]
WORKERS = ["prefill", "decode"]
UNITS = {"mb": 1024**2, "gb": 1024**3}


def read(name: str) -> Any:
    return yaml.safe_load((COMPOSE / name).read_text())


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    return read("compose.yaml")["services"]


def test_every_port_is_published_on_loopback(services: dict[str, Any]) -> None:
    ports = [port for service in services.values() for port in service.get("ports", [])]
    assert sorted(ports) == ["127.0.0.1:3000:3000", "127.0.0.1:4222:4222", "127.0.0.1:8000:8000"]
    assert not any("network_mode" in service or service.get("privileged") for service in services.values())


def test_every_role_that_is_served_exists(services: dict[str, Any]) -> None:
    served = {name: service["command"] for name, service in services.items() if service["image"] == "kvmesh"}
    assert sorted(served) == sorted(ROLES)
    for name, command in served.items():
        assert command == ["kvmesh", "serve", name, "--config", "/etc/kvmesh/mesh.toml"]
        assert name in get_args(RoleName)


def test_what_is_mounted_built_and_needed_exists(services: dict[str, Any]) -> None:
    volumes = read("compose.yaml")["volumes"]
    for service in services.values():
        for mount in service.get("volumes", []):
            source = mount.split(":")[0]
            assert source in volumes if not source.startswith(".") else (COMPOSE / source).exists(), mount
            assert not source.startswith(".") or mount.endswith(":ro")
        for needed, how in service.get("depends_on", {}).items():
            assert how["condition"] != "service_healthy" or "healthcheck" in services[needed]
        if "build" in service:
            context = COMPOSE / service["build"]["context"]
            assert (context / service["build"]["dockerfile"]).is_file()


def test_images_are_pinned(services: dict[str, Any]) -> None:
    for service in services.values():
        assert service["image"] == "kvmesh" or re.fullmatch(r"[a-z/]+:\d+\.\d+[\w.-]*", service["image"])


def test_the_configuration_loads_and_fits_containers(services: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("KVMESH_NATS_URL", "KVMESH_SECRET", "OTEL_EXPORTER_OTLP_ENDPOINT"):
        monkeypatch.delenv(variable, raising=False)
    config = load_config(COMPOSE / "mesh.toml")
    assert config.secret == "", "a secret that everybody knows is none"
    assert (config.worker.carrier, config.worker.plane_host) == ("tcp", "0.0.0.0")
    assert (config.gateway.host, config.gateway.port) == ("0.0.0.0", 8000)
    for name in WORKERS:
        number, unit = re.fullmatch(r"(\d+)(\w+)", services[name]["shm_size"]).groups()  # type: ignore[union-attr]
        assert int(number) * UNITS[unit] > config.worker.kv_bytes
    for name in ROLES:
        monkeypatch.setenv("KVMESH_NATS_URL", services[name]["environment"]["KVMESH_NATS_URL"])
        assert load_config(COMPOSE / "mesh.toml").nats == config.nats


def test_only_workers_have_the_secret(services: dict[str, Any]) -> None:
    for name, service in services.items():
        has_secret = "KVMESH_SECRET" in service.get("environment", {})
        mounts_it = any(mount.startswith("secret:") for mount in service.get("volumes", []))
        assert has_secret == mounts_it == (name in WORKERS)
    assert services["prefill"]["environment"]["KVMESH_SECRET"] == "${KVMESH_SECRET:-}"


def test_traces_reach_tempo_and_grafana_finds_them(services: dict[str, Any]) -> None:
    tempo = read("tempo.yaml")
    port = tempo["distributor"]["receivers"]["otlp"]["protocols"]["http"]["endpoint"].rsplit(":", 1)[1]
    for name in ROLES:
        assert services[name]["environment"]["OTEL_EXPORTER_OTLP_ENDPOINT"] == f"http://tempo:{port}"
    [source] = read("grafana/provisioning/datasources/tempo.yaml")["datasources"]
    assert source["type"] == "tempo"
    assert source["url"] == f"http://tempo:{tempo['server']['http_listen_port']}"


async def test_the_broker_takes_its_configuration(services: dict[str, Any]) -> None:
    """A real nats-server reads the file; it says the limit in its greeting."""
    checked = await asyncio.create_subprocess_exec(
        find_server(), "-t", "-c", str(COMPOSE / "nats.conf"), stderr=asyncio.subprocess.PIPE
    )
    _, said = await checked.communicate()
    assert checked.returncode == 0, said
    text = (COMPOSE / "nats.conf").read_text()
    assert f"max_payload: {MAX_PAYLOAD_BYTES}\n" in text
    monitoring = re.search(r'http: "127\.0\.0\.1:(\d+)"', text)
    assert monitoring is not None and f":{monitoring[1]}/healthz" in services["nats"]["healthcheck"]["test"][-1]


def test_the_image_is_pinned_and_runs_as_nobody_special() -> None:
    lines = (COMPOSE / "Dockerfile").read_text().splitlines()
    assert "FROM python:3.11-slim" in lines
    assert any(line.startswith("RUN pip install") and "-c constraints.txt" in line for line in lines)
    assert "USER kvmesh" in lines[lines.index("WORKDIR /src") :]
    ignored = (COMPOSE / "Dockerfile.dockerignore").read_text().splitlines()
    for line in lines:
        if line.startswith("COPY "):
            for source in line.split()[1:-1]:
                assert (ROOT / source).exists() and f"!{source}" in ignored, source


def run_entrypoint(folder: Path, **environment: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        ["sh", str(COMPOSE / "entrypoint.sh"), "sh", "-c", 'printf %s "${KVMESH_SECRET:-}"'],
        env={"PATH": "/usr/bin:/bin", "KVMESH_SECRET_DIR": str(folder), **environment},
        stdout=subprocess.PIPE,
        text=True,
    )


def test_workers_that_start_at_once_agree_on_a_secret(tmp_path: Path) -> None:
    first = [run_entrypoint(tmp_path) for _ in range(10)]
    said = {process.communicate()[0] for process in first}
    said.add(run_entrypoint(tmp_path).communicate()[0])
    assert len(said) == 1 and len(said.pop()) >= 40
    assert [path.name for path in tmp_path.iterdir()] == ["secret"]
    assert (tmp_path / "secret").stat().st_mode & 0o077 == 0


def test_a_secret_of_the_users_own_is_taken(tmp_path: Path) -> None:
    assert run_entrypoint(tmp_path, KVMESH_SECRET="my own").communicate()[0] == "my own"
    assert not list(tmp_path.iterdir())


def test_a_service_without_the_folder_has_no_secret(tmp_path: Path) -> None:
    assert run_entrypoint(tmp_path / "missing").communicate()[0] == ""


def test_the_files_are_plain_data() -> None:
    """No tabs, nothing that YAML reads otherwise than it looks."""
    for path in COMPOSE.rglob("*.yaml"):
        assert "\t" not in path.read_text()
        assert json.loads(json.dumps(yaml.safe_load(path.read_text())))
