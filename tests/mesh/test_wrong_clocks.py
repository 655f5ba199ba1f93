"""Machines whose clocks are wrong: everything is served, and the difference is named. Each process has clocks of its
own, which `sitecustomize` sets."""

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import httpx

from services.cli.recorded import load_spans, recorded_requests
from tests.cli.commands import KVMESH, QUESTION, environment, our_processes, run, stopped_with
from tests.waiting import wait_until

WRONG = """
import os, sys, time
AHEAD_S = {"decode-0": 660.0, "store-0": -5.0, "gateway": 5.0}
ahead_s = next((s for name, s in AHEAD_S.items() if name in sys.orig_argv), 0.0)
right, right_ns = time.time, time.time_ns
stepped = "scheduler" in sys.orig_argv and os.environ["STEPPED"]


def now_ahead_s():
    return 3600.0 if stepped and os.path.exists(stepped) else ahead_s


time.time = lambda: right() + now_ahead_s()
time.time_ns = lambda: right_ns() + round(now_ahead_s() * 1e9)
"""
PROMPT = QUESTION * 40
"""So long that reading it costs less than computing it."""


def test_wrong_clocks_cost_nothing_and_are_named(tmp_path: Path) -> None:
    site, stepped, state = tmp_path / "site", tmp_path / "stepped", tmp_path / "state"
    site.mkdir()
    (site / "sitecustomize.py").write_text(WRONG)
    places = os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH", ""))))
    wrong = environment(state) | {"PYTHONPATH": places, "STEPPED": str(stepped)}
    up = [*KVMESH, "up", "--port", "0", "--kv-mib", "64", "--store", "disk", "--drain-s", "5"]
    first = served(up, wrong, state, stepped)
    stepped.unlink()
    again = served(up, wrong, state, stepped)
    assert again["text"] == first["text"]
    assert again["num_from_store"] >= 0.5 * again["num_prompt_tokens"], "the store's clock is 5 s behind"


def served(up: list[str], wrong: dict[str, str], state: Path, stepped: Path) -> dict[str, Any]:
    """Ask a mesh before and after its scheduler's clock is set an hour ahead. Return what the first answer was."""
    running = subprocess.Popen(up, env=wrong, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    said: list[str] = []
    with stopped_with(running) as lines:  # one signal: a second one would cut short what workers leave to the store
        for line in lines:
            said.append(line)
            if "Ctrl-C" in line:
                break
        url = re.search(r"http://127.0.0.1:\d+", "".join(said))
        assert url is not None
        before = ask(url[0])
        mesh = json.loads((state / "mesh.json").read_text())
        broker = ["--nats", mesh["nats_url"], "--creds", f"{mesh['keys']}/observer.creds"]
        wait_until(lambda: "decode-0 +660.0 s, store-0 -5.0 s" in run(state, "status", *broker).stdout)
        stepped.touch()
        wait_until(lambda: "decode-0 -2940.0 s" in run(state, "status", *broker).stdout)
        assert ask(url[0])["text"] == before["text"]
        assert our_processes(state)
    assert "660.0 s ahead of the scheduler's" in (state / "run/logs/decode-0.log").read_text()
    spans = load_spans(Path(mesh["trace_dir"]))
    for request in recorded_requests(spans):
        trace = [span for span in spans if span.trace_id == request.root.trace_id]
        early_ns = request.root.start_ns - min(span.start_ns for span in trace)
        assert early_ns < 100_000_000, "what a service does for a request follows the request"
    return before


def ask(url: str) -> dict[str, Any]:
    body = {"model": "demo_model", "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
    with httpx.Client(trust_env=False, timeout=60) as client:
        answer = client.post(f"{url}/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    usage = found["usage"]["kvmesh"]
    return {
        "text": found["choices"][0]["text"],
        "num_prompt_tokens": found["usage"]["prompt_tokens"],
        "num_from_store": (usage["prefill"] or usage)["transferred_from"].get("store-0", 0),
    }
