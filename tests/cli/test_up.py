"""One real mesh, as `make up` starts it: an answer, its trace, Ctrl-C, and nothing that is left."""

import json
import re
import signal
import subprocess
from pathlib import Path

import httpx
import pytest

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


@pytest.mark.parametrize("stop_with", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_up_serves_and_leaves_nothing_behind(tmp_path: Path, stop_with: signal.Signals) -> None:
    command = [*KVMESH, "up", "--port", "0", "--policy", "round_robin", "--kv-mib", "64"]
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
