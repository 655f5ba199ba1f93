"""A mesh over two machines: two network namespaces, what `kvmesh bus-config` writes, and nothing else in common."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from schemas.permissions import role_of
from services.bus.embedded import find_server
from services.files import write_private
from services.trust.certificates import CA_FILE
from services.trust.keys import BROKER_FILE, MeshKeys, key_file
from tests.cli.commands import QUESTION

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

EAST, WEST = "10.213.77.1", "10.213.77.2"
BROKER, GATEWAY = f"tls://{EAST}:4222", f"http://{EAST}:8000"
PLACES = {"scheduler": EAST, "gateway": EAST, "prefill": EAST, "directory": WEST, "decode": WEST}
KVMESH = [sys.executable, "-m", "services.cli.main"]
API_KEY = "a-key"
PATIENCE_S = 90.0

Inside = Callable[..., list[str]]
"""Returns a command as it is run at an address."""


@pytest.fixture(scope="module")
def inside() -> Iterator[Inside]:
    """Two namespaces with a wire between them; each ends with the process that holds it."""
    if not (shutil.which("ip") and shutil.which("nsenter") and shutil.which("unshare")):
        pytest.skip("there is no iproute2 or no util-linux")
    with contextlib.ExitStack() as stack:
        pids = {address: stack.enter_context(_namespace()) for address in (EAST, WEST)}

        def run(address: str, *command: str) -> list[str]:
            return ["nsenter", "--target", str(pids[address]), "--net", *command]

        try:
            east, west = (str(pid) for pid in pids.values())
            _ip("link", "add", "kvm0", "netns", east, "type", "veth", "peer", "name", "kvm0", "netns", west)
            for address in (EAST, WEST):
                for words in (("addr", "add", f"{address}/24", "dev", "kvm0"), ("link", "set", "kvm0", "up")):
                    subprocess.run(run(address, "ip", *words), check=True, capture_output=True)
                subprocess.run(run(address, "ip", "link", "set", "lo", "up"), check=True, capture_output=True)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces may be made here: {error.stderr}")
        yield run


@contextlib.contextmanager
def _namespace() -> Iterator[int]:
    command = ["unshare", "--net", "sh", "-c", "echo made; exec sleep 3600"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as held:
        assert held.stdout is not None
        if held.stdout.readline() != b"made\n":
            pytest.skip("no network namespaces may be made here")
        try:
            yield held.pid
        finally:
            held.kill()


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "keys"
    command = [*KVMESH, "bus-config", str(folder), "--host", f"{EAST}, broker.example"]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert CA_FILE in said and f"--nats {BROKER}" in said
    return folder


@pytest.fixture(scope="module")
def mesh(inside: Inside, keys: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The broker and five services, each with its own role's key and the CA's certificate only; give their folder."""
    root = tmp_path_factory.mktemp("mesh")
    included = os.path.relpath(keys / BROKER_FILE, root)  # nats-server takes no absolute path
    settings = f'host: "{EAST}"\nport: 4222\nmax_payload: 8MB\ninclude "{included}"\n'
    write_private(root / "nats.conf", settings)
    with contextlib.ExitStack() as stack:
        broker = inside(EAST, find_server(), "-c", str(root / "nats.conf"), "-l", str(root / "nats.log"))
        stack.enter_context(_running(broker, root / "broker.log"))
        services = {
            role: stack.enter_context(_running(_service(inside, root, keys, role), root / f"{role}.log"))
            for role in PLACES
        }
        try:
            for service in services.values():
                assert service.stdout is not None
                assert service.stdout.readline() == b"ready\n"
            _wait_until_placed(inside)
        except AssertionError:
            logs = "\n".join(f"{path}: {path.read_text()[-2000:]}" for path in root.glob("*.log"))
            raise AssertionError(f"the mesh has not started\n{logs}") from None
        yield root


def _service(inside: Inside, root: Path, keys: Path, role: str) -> list[str]:
    own, address = root / role, PLACES[role]
    own.mkdir()
    for path in (key_file(keys, role_of(role)), keys / CA_FILE):
        shutil.copy(path, own / path.name)
    config = own / "mesh.toml"
    config.write_text(
        f'[nats]\nurl = "{BROKER}"\nkeys = "{own}"\nconnect_timeout_s = 20.0\n'
        f'[gateway]\nhost = "{EAST}"\nport = 8000\ntenants = {{"{API_KEY}" = "ada"}}\n'
        f'[worker]\nkv_bytes = 33554432\nnum_threads = 1\ncarrier = "tcp"\nplane_host = "{address}"\n'
        f'[telemetry]\ntrace_dir = "{root / "traces"}"\n'
    )
    return inside(address, *KVMESH, "serve", role, "--config", str(config))


@contextlib.contextmanager
def _running(command: list[str], log: Path) -> Iterator["subprocess.Popen[bytes]"]:
    with log.open("wb") as file, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=file) as process:
        try:
            yield process
        finally:
            process.terminate()
            process.wait(30)


def _wait_until_placed(inside: Inside) -> None:
    """A role's services are ready one by one, and known a moment later."""
    deadline = time.monotonic() + PATIENCE_S
    while subprocess.run(inside(WEST, "curl", "-sf", f"{GATEWAY}/health"), capture_output=True).returncode:
        assert time.monotonic() < deadline, "the gateway places nothing"
        time.sleep(0.1)


def test_an_answer_is_computed_on_two_machines(inside: Inside, mesh: Path) -> None:
    body = json.dumps({"model": "demo_model", "prompt": QUESTION, "max_tokens": 16, "temperature": 0})
    ask = ["curl", "-s", f"{GATEWAY}/v1/completions", "-H", "Content-Type: application/json", "-d", body]
    refused = json.loads(subprocess.run(inside(WEST, *ask), check=True, capture_output=True).stdout)
    assert refused["error"]["code"] == "invalid_api_key"
    ask += ["-H", f"Authorization: Bearer {API_KEY}"]
    answer = json.loads(subprocess.run(inside(WEST, *ask), check=True, capture_output=True).stdout)
    assert answer["choices"][0]["text"].strip() == "7412", answer
    usage = answer["usage"]["kvmesh"]
    assert usage["carrier"] == "tcp" and usage["transferred_tokens"] > 0 and not usage["recomputed_tokens"]
    deadline = time.monotonic() + PATIENCE_S
    while not any("aes256gcm" in path.read_text() for path in (mesh / "traces").rglob("*") if path.is_file()):
        assert time.monotonic() < deadline, "no span says that the KV was encrypted"
        time.sleep(0.1)


def test_people_see_it_from_the_other_machine(inside: Inside, mesh: Path, keys: Path) -> None:
    creds = str(keys / "observer.creds")
    command = inside(WEST, *KVMESH, "status", "--nats", BROKER, "--creds", creds, "--json")
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert {load["worker"]["role"] for load in json.loads(said)["workers"]} == {"prefill", "decode"}


def test_whoever_lacks_the_ca_or_a_key_is_told_so(inside: Inside, mesh: Path, keys: Path, tmp_path: Path) -> None:
    shutil.copy(keys / "observer.creds", tmp_path / "observer.creds")
    foreign = tmp_path / "foreign"
    MeshKeys.fresh().save(foreign)
    shutil.copy(keys / CA_FILE, foreign / CA_FILE)
    status = [*KVMESH, "status", "--nats"]
    for options, words in (
        ((BROKER, "--creds", str(tmp_path / "observer.creds")), ("not believed to be ours", CA_FILE)),
        ((f"nats://{EAST}:4222", "--creds", str(tmp_path / "observer.creds")), ("not believed to be ours", CA_FILE)),
        ((BROKER,), ("not believed to be ours", CA_FILE)),
        ((BROKER, "--creds", str(foreign / "observer.creds")), ("does not know the key",)),
    ):
        done = subprocess.run(inside(WEST, *status, *options), capture_output=True, text=True)
        assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
        assert all(word in done.stderr for word in words), done.stderr


def test_a_stranger_on_the_network_hears_nothing_in_clear(inside: Inside, mesh: Path) -> None:
    """He says what a stock client would; the broker talks TLS or not at all."""
    code = (
        "import socket\n"
        f"sock = socket.create_connection(('{EAST}', 4222), timeout=10)\n"
        "print(b'\"tls_required\":true' in sock.recv(65536))\n"
        "sock.sendall(b'CONNECT {\"verbose\":false}\\r\\nSUB mesh.> 1\\r\\nPING\\r\\n')\n"
        "try:\n    print(sock.recv(65536))\nexcept ConnectionError:\n    print(b'')\n"
    )
    done = subprocess.run(inside(WEST, sys.executable, "-c", code), check=True, capture_output=True, text=True)
    assert done.stdout.splitlines()[0] == "True" and "PONG" not in done.stdout and "MSG" not in done.stdout
