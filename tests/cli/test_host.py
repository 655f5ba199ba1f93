"""Who may reach a gateway, as a user says it: on the command line or in mesh.toml. Real processes."""

import contextlib
import json
import re
import resource
import socket
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.bus.embedded import EmbeddedNats
from services.cli.flags import launch_of
from services.errors import UserError
from services.ports import free_port
from tests.certificates import make_certificate
from tests.cli.commands import KVMESH, assert_one_line, environment, run, stopped_with

SECRET = 'tenant_seed = "at least sixteen characters"\n'


def test_up_lets_others_in_with_keys_or_on_purpose(tmp_path: Path) -> None:
    result = run(tmp_path, "up", "--port", "0", "--host", "0.0.0.0")
    assert_one_line(result, "0.0.0.0", "--api-key", "--tenants", "--no-auth")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "somewhere.example", ""])
def test_which_addresses_let_others_in(host: str) -> None:
    with pytest.raises(UserError, match="--no-auth"):
        launch_of({"host": host})
    assert launch_of({"host": host, "no_auth": True}).config.gateway.tenants == {}
    assert launch_of({"host": host, "api_key": "x"}).config.gateway.tenants == {"x": "default"}


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_loopback_needs_no_key(host: str) -> None:
    assert launch_of({"host": host}).config.gateway.tenants == {}


@pytest.mark.parametrize(
    ("keys", "flags", "words"),
    [
        ('key-a = "two words"', {"tenants": "KEYS"}, ["two words"]),
        (f'key-a = "{"t" * 3_000}"', {"tenants": "KEYS"}, ["1 to 128 letters", "3000 characters"]),
        ("key-a = [1]", {"tenants": "KEYS"}, ["keys.toml", 'KEY = "TENANT"']),
        ("", {"tenants": "KEYS"}, ["no keys"]),
        ("", {"tenants": "none.toml"}, ["none.toml", "No such file"]),
        ('key-a = "a"', {"tenants": "KEYS", "api_key": "x"}, ["--api-key", "--tenants"]),
        ("", {"api_key": "two words"}, ["visible ASCII"]),
        ("", {"api_key": "x", "no_auth": True}, ["no_auth"]),
        ("", {"tls_cert": "own.crt"}, ["tls_key"]),
        ("", {"cors_origins": "chat.example.org"}, ["cors_origins", "https://"]),
    ],
)
def test_flags_that_do_not_fit_are_one_line(tmp_path: Path, keys: str, flags: dict[str, Any], words: list[str]) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(keys)
    flags = {name: str(path) if value == "KEYS" else value for name, value in flags.items()}
    with pytest.raises(UserError) as caught:
        launch_of(flags)
    said = str(caught.value)
    assert all(word in said for word in words) and "\n" not in said and len(said) < 400, said


def test_a_certificate_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    files = ["--tls-cert", "none.crt", "--tls-key", "none.key"]
    assert_one_line(run(tmp_path, "up", "--port", "0", *files), "none.crt", "No such file", "PEM")


def test_up_for_others_over_https(tmp_path: Path) -> None:
    own, keys = make_certificate(tmp_path), tmp_path / "keys.toml"
    keys.write_text('key-a = "team-a"\n')
    command = [*KVMESH, "up", "--port", "0", "--host", "0.0.0.0", "--tenants", str(keys), "--kv-mib", "64"]
    command += ["--tls-cert", str(own.cert), "--tls-key", str(own.key), "--hosts", "chat.example.org"]
    up = subprocess.Popen(command, env=environment(tmp_path / "state"), stdout=subprocess.PIPE, text=True)
    with stopped_with(up) as lines:
        said = "".join(iter(lambda: next(lines), "Ctrl-C stops everything.\n"))
        found = re.search(r"curl -s --cacert (\S+) (https://127.0.0.1:\d+)/v1\S+ .*'Authorization: Bearer KEY'", said)
        assert found is not None and found[1] == str(own.cert), said
        assert "key-a" not in said
        trusting = ssl.create_default_context(cafile=own.cert)
        with httpx.Client(base_url=found[2], verify=trusting, timeout=60) as client:
            body = {"model": "demo_model", "prompt": "Hi", "max_tokens": 4}
            assert client.get("/health").status_code == 200
            assert client.post("/v1/completions", json=body).status_code == 401
            headers = {"authorization": "Bearer key-a"}
            for host in ("chat.example.org", socket.gethostname()):
                answer = client.post("/v1/completions", json=body, headers=headers | {"host": host})
                assert answer.status_code == 200, answer.text
            assert client.get("/metrics", headers=headers).status_code == 404
        targets = json.loads((tmp_path / "state" / "metrics.json").read_bytes())
        [gateway] = [target["targets"][0] for target in targets if target["labels"]["role"] == "gateway"]
        assert "kvmesh_gateway_requests_total" in httpx.get(f"http://{gateway}/metrics").text
    assert up.returncode == 0


@contextlib.contextmanager
def gateway(tmp_path: Path, settings: str, num_files: int = 0) -> Iterator[tuple["subprocess.Popen[str]", int]]:
    """Run one gateway process, with a broker and nobody else; yield it and its port."""
    nats, port = EmbeddedNats.launch(None, tmp_path), free_port()
    config = tmp_path / "mesh.toml"
    config.write_text(f'{SECRET}[nats]\nopen = true\nurl = "{nats.url}"\n[gateway]\nport = {port}\n{settings}')

    def limit() -> None:
        if num_files:
            resource.setrlimit(resource.RLIMIT_NOFILE, (num_files, num_files))

    command = [*KVMESH, "serve", "gateway", "--config", str(config)]
    process = subprocess.Popen(
        command, env=environment(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=limit
    )
    try:
        yield process, port
    finally:
        process.terminate()
        process.communicate(timeout=60)
        nats.stop()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ('host = "0.0.0.0"', "set tenants, or no_auth = true"),
        ('tls_cert = "none.crt"\ntls_key = "none.key"', "none.crt"),
        ('tls_cert = "none.crt"', "tls_cert and tls_key go together"),
        ('no_auth = true\ntenants = {key = "a"}', "leave one out"),
    ],
)
def test_a_gateway_that_must_not_be_served_says_so(tmp_path: Path, settings: str, said: str) -> None:
    with gateway(tmp_path, settings) as (process, _):
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 2
        assert len(errors.splitlines()) == 1 and errors.startswith("error: ") and said in errors, errors


@pytest.mark.parametrize("settings", ['host = "0.0.0.0"\nno_auth = true', 'host = "0.0.0.0"\ntenants = {key = "a"}'])
def test_a_gateway_for_others_says_whom_it_asks(tmp_path: Path, settings: str) -> None:
    with gateway(tmp_path, settings) as (process, port):
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        status = 401 if "tenants" in settings else 200
        assert httpx.get(f"http://127.0.0.1:{port}/v1/models").status_code == status


def test_300_idle_connections_do_not_lock_a_gateway_with_256_descriptors(tmp_path: Path) -> None:
    with gateway(tmp_path, "", num_files=256) as (process, port), contextlib.ExitStack() as held:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        for _ in range(300):
            held.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60))
        for _ in range(3):
            assert httpx.get(f"http://127.0.0.1:{port}/v1/models", timeout=60).status_code == 200
        files = list(Path(f"/proc/{process.pid}/fd").iterdir())
        assert len(files) < 256


def test_a_body_of_20_mb_takes_little_memory(tmp_path: Path) -> None:
    with gateway(tmp_path, "") as (process, port):
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        body = {"model": "demo_model", "prompt": "The harbour of Bergen. " * 870_000}
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            for _ in range(4):
                answer = client.post("/v1/completions", json=body)
                assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
        status = Path(f"/proc/{process.pid}/status").read_text()
        peak = re.search(r"VmHWM:\s+(\d+) kB", status)
        assert peak is not None and int(peak[1]) < 600_000, "it was 4,400,000 when such a text was tokenized"
