"""`kvmesh up` on a machine with IPv6 only, IPv4 only, or both: answers, what it says of itself, and its metrics."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.cli.commands import KVMESH, QUESTION, environment, stopped_with

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

IPV4, IPV6 = "http://127.0.0.1:8000", "http://[::1]:8000"


@pytest.mark.parametrize(
    ("machine", "flags", "urls"),
    [
        ("ip address del 127.0.0.1/8 dev lo", (), (IPV6,)),
        ("ip address del 127.0.0.1/8 dev lo", ("--host", "::", "--no-auth"), (IPV6,)),
        ("echo 1 > /proc/sys/net/ipv6/conf/all/disable_ipv6", (), (IPV4,)),
        ("true", ("--host", "::1"), (IPV6,)),
        ("true", ("--host", "::", "--no-auth"), (IPV4, IPV6, "http://localhost:8000")),
    ],
)
def test_a_mesh_on_the_addresses_that_there_are(
    machine: str, flags: tuple[str, ...], urls: tuple[str, ...], tmp_path: Path
) -> None:
    if not (shutil.which("ip") and shutil.which("nsenter") and shutil.which("unshare")):
        pytest.skip("there is no iproute2 or no util-linux")
    if subprocess.run(["unshare", "--net", "true"], capture_output=True).returncode:
        pytest.skip("no network namespaces may be made here")
    prepare = ["unshare", "--net", "sh", "-ec", f'ip link set lo up; {machine}; exec "$0" "$@"']
    up = [*prepare, *KVMESH, "up", "--port", "8000", "--kv-mib", "32", *flags]
    env = environment(tmp_path)
    mesh = subprocess.Popen(up, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    with stopped_with(mesh) as said:
        before = list[str]()
        while "Ctrl-C stops everything" not in (line := next(said, "")):
            assert line, f"it ended: {''.join(before)}"
            before.append(line)

        def inside(*command: str) -> str:
            entered = ["nsenter", "--target", str(mesh.pid), "--net", *command]
            return subprocess.run(entered, env=env, check=True, capture_output=True, text=True, timeout=60).stdout

        body = json.dumps({"model": "demo_model", "prompt": QUESTION, "max_tokens": 16, "temperature": 0})
        for url in urls:
            asked = ("curl", "-sf", f"{url}/v1/completions", "-H", "Content-Type: application/json", "-d", body)
            answer = json.loads(inside(*asked))
            usage = answer["usage"]["kvmesh"]
            assert answer["choices"][0]["text"].strip() == "7412"
            assert usage["transferred_tokens"] + usage["cached_tokens"] > 0, usage
        workers = json.loads(inside(*KVMESH, "status", "--json"))["workers"]
        assert {load["worker"]["role"] for load in workers} == {"prefill", "decode"}
        for targets in json.loads((tmp_path / "metrics.json").read_text()):
            for target in targets["targets"]:
                assert "kvmesh_" in inside("curl", "-sf", f"http://{target}/metrics")
    assert mesh.returncode == 0
