"""One real mesh, as `make up` starts it: an answer, its trace, Ctrl-C, and nothing that is left."""

import asyncio
import json
import re
import signal
import subprocess
from pathlib import Path

import httpx
import nats
import pytest

from services.ports import free_port
from tests.cli.commands import (
    KVMESH,
    arenas_of,
    assert_one_line,
    environment,
    our_processes,
    run_here,
    stopped_with,
    wait_until_gone,
)


async def fleet_by(context: dict[str, str]) -> str:
    """Ask a scheduler as the nats command does that has this context; return what answered."""
    inbox = context["inbox_prefix"]
    client = await nats.connect(context["url"], user_credentials=context["creds"], inbox_prefix=inbox)
    reply = await client.request("mesh.v1.scheduler.status", b"", timeout=60)
    await client.close()
    return json.loads(reply.data)["type"]


@pytest.mark.parametrize("stop_with", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_up_serves_and_leaves_nothing_behind(tmp_path: Path, stop_with: signal.Signals) -> None:
    nats_port = free_port()
    command = [*KVMESH, "up", "--port", "0", "--policy", "round_robin", "--kv-mib", "64", "--nats-port", str(nats_port)]
    up = subprocess.Popen(command, env=environment(tmp_path), stdout=subprocess.PIPE, text=True)
    with stopped_with(up, stop_with) as lines:
        said = ""
        for line in lines:
            said += line
            if "Ctrl-C" in line:
                break
        curl = re.search(r"curl -s (\S+) -H '([^']+)' -d '(.+)'", said)
        assert curl is not None, said
        answer = httpx.post(curl[1], content=curl[3], headers={"content-type": "application/json"}, timeout=60).json()
        assert answer["choices"][0]["text"].strip() == "7412"
        status = json.loads(run_here(tmp_path, "status", "--json").stdout)
        assert status["ready"] and status["policy"] == "round_robin"
        assert json.loads((tmp_path / "mesh.json").read_text())["nats_url"].endswith(f":{nats_port}")
        for role in ("observer", "operator"):
            context = json.loads((tmp_path / f"run/nats/context/{role}.json").read_text())
            assert asyncio.run(fleet_by(context)) == "FleetDescribed"
        taken = run_here(tmp_path / "other", "up", "--port", "0", "--nats-port", str(nats_port))
        assert_one_line(taken, f"port {nats_port}", "--nats-port")
        steps = run_here(tmp_path, "status", "decode-0").stdout
        offered = f"KVOffered {answer['usage']['kvmesh']['request_id']} → StartRead"
        assert offered in steps and "handoff.prefill-0.decode-0." in steps
        assert_one_line(run_here(tmp_path, "status", "decode-9"), "decode-9 does not answer", "kvmesh status")
        assert_one_line(run_here(tmp_path, "up", "--port", "0"), "already")
        assert_one_line(run_here(tmp_path, "tail", "NONSENSE"), "'NONSENSE'", "x-request-id")
        trace = run_here(tmp_path, "trace", answer["usage"]["kvmesh"]["request_id"])
        assert trace.returncode == 0 and "kv.transfer" in trace.stdout, trace
        workers = our_processes(tmp_path)
        assert any(arenas_of(workers)), "the test looks for the wrong names"
    assert up.returncode == (0 if stop_with != signal.SIGKILL else -signal.SIGKILL)
    wait_until_gone(tmp_path)
    assert not any(arenas_of(workers))
