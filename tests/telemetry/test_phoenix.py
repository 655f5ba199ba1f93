"""Traces as a real back end has them: Arize Phoenix, from its own environment (`make otlp-test` sets it up)."""

import os
import secrets
import signal
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.config import GatewayConfig, MeshConfig, SchedulerConfig, TelemetryConfig, WorkerConfig
from services.launch.options import Launch
from services.ports import free_port
from services.telemetry import Key, SpanName
from services.times import TelemetryTimes
from tests.mesh.processes import Mesh, RunningMesh, in_parallel

PHOENIX = Path(__file__).parents[2] / ".kvmesh" / "phoenix" / "bin" / "phoenix"
NUM_PLAIN, NUM_CANCELLED, NUM_INVALID = 80, 14, 6
KILL_AT, KILLED = 30, "decode-0"
UNSENT_S = 2 * TelemetryTimes().export_interval_s
"""A span leaves its process within this time: what was recorded later goes with a process that is killed."""
CONCURRENCY = 4
SPLIT = {
    SpanName.TOKENIZE, SpanName.PLACE, SpanName.DISPATCH, SpanName.PREFILL, SpanName.FIRST_TOKEN, SpanName.KV_TRANSFER,
    SpanName.DECODE, SpanName.KV_RELEASE,
}  # fmt: skip

pytestmark = [
    pytest.mark.skipif(not PHOENIX.exists(), reason="no Phoenix here: `make otlp-test` installs it"),
    pytest.mark.timeout(500),
]

Span = dict[str, Any]


@pytest.fixture(scope="module")
def phoenix(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder, port = tmp_path_factory.mktemp("phoenix"), free_port()
    environment = os.environ | {
        "PHOENIX_WORKING_DIR": str(folder),
        "PHOENIX_HOST": "127.0.0.1",
        "PHOENIX_PORT": str(port),
        "PHOENIX_GRPC_PORT": str(free_port()),
        "PHOENIX_TELEMETRY_ENABLED": "false",
    }
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen([PHOENIX, "serve"], env=environment, stdout=log, stderr=log)
    client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30)
    try:
        for _ in range(600):
            assert server.poll() is None, (folder / "log").read_text()[-2000:]
            if is_up(client):
                break
            with pytest.raises(subprocess.TimeoutExpired):
                server.wait(0.2)
        yield client
    finally:
        client.close()
        server.terminate()
        server.wait(30)


def is_up(client: httpx.Client) -> bool:
    try:
        return client.get("/healthz").status_code == 200
    except httpx.TransportError:
        return False


def all_spans(phoenix: httpx.Client) -> list[Span]:
    spans: list[Span] = []
    cursor: str | None = None
    while True:
        query = {"limit": 1000} | ({"cursor": cursor} if cursor else {})
        reply = phoenix.get("/v1/projects/default/spans", params=query)
        if reply.status_code == 404:
            return []  # nothing has come yet, so there is no project
        page = reply.raise_for_status().json()
        spans += page["data"]
        cursor = page["next_cursor"]
        if cursor is None:
            return spans


def one(mesh: Mesh, number: int, killed: list[datetime]) -> str:
    """Send a request, which finishes, is cancelled, or is invalid; return its trace's id. `killed`: gets when a worker
    was."""
    if number == KILL_AT:
        (decode,) = (child for child in mesh.supervisor.children if child.name == KILLED)
        os.kill(decode.process.pid, signal.SIGKILL)
        killed.append(datetime.now(UTC))
    is_cancelled = number % 7 == 3
    body: dict[str, Any] = {
        "model": mesh.model, "prompt": [3 + secrets.randbelow(200) for _ in range(60)], "ignore_eos": True,
        "max_tokens": 2_000 if is_cancelled else 20, "stream": True,
    }  # fmt: skip
    if number >= NUM_PLAIN + NUM_CANCELLED:
        body["max_tokens"] = -1
    with httpx.stream("POST", f"{mesh.url}/v1/completions", json=body, timeout=120) as answer:
        for line in answer.iter_lines():
            if is_cancelled and line.startswith("data: {"):
                break
    return answer.headers["traceparent"].split("-")[1]


def test_100_requests_make_100_whole_trees_and_no_orphan(
    phoenix: httpx.Client, running_mesh: RunningMesh, tmp_path: Path
) -> None:
    options = Launch(
        num_prefill=2,
        num_decode=2,
        config=MeshConfig(
            gateway=GatewayConfig(port=0),
            scheduler=SchedulerConfig(unsplit_tokens_max=0),
            worker=WorkerConfig(kv_bytes=64 << 20, num_threads=1),
            telemetry=TelemetryConfig(otlp_endpoint=str(phoenix.base_url).rstrip("/")),
        ),
    )
    num_requests = NUM_PLAIN + NUM_CANCELLED + NUM_INVALID
    with running_mesh(tmp_path, options) as mesh:
        killed: list[datetime] = []
        trace_ids = set(in_parallel([lambda n=n: one(mesh, n, killed) for n in range(num_requests)], CONCURRENCY))
        assert len(trace_ids) == num_requests
        children = mesh.supervisor.children
        mesh.wait_until(lambda: all(c.ready.is_set() and c.process.returncode is None for c in children), "all back")
        mesh.assert_no_blocks_held()
    # The mesh has ended: whoever was not killed has exported all that it had.
    traces: dict[str, list[Span]] = {}

    def roots() -> int:
        grouped = defaultdict[str, list[Span]](list)
        for span in all_spans(phoenix):
            grouped[span["context"]["trace_id"]].append(span)
        traces.clear()
        traces.update(grouped)
        return sum(span["parent_id"] is None for t in trace_ids for span in traces.get(t, ()))

    num_before = -1
    ends_s = time.monotonic() + 60
    while time.monotonic() < ends_s:  # it takes them in one after another
        num_roots, num_spans = roots(), sum(map(len, traces.values()))
        if num_roots == num_requests and num_spans == num_before:
            break
        num_before = num_spans
        time.sleep(0.5)
    assert num_roots == num_requests
    outcomes = defaultdict[str, int](int)
    for spans in traces.values():
        known = {span["context"]["span_id"] for span in spans}
        orphans = [span["name"] for span in spans if span["parent_id"] and span["parent_id"] not in known]
        assert not orphans
        assert sum(span["parent_id"] is None for span in spans) == 1, "one root a trace"
    for trace_id in trace_ids:
        (root,) = (span for span in traces[trace_id] if span["parent_id"] is None)
        outcome = root["attributes"][Key.OUTCOME]
        outcomes[outcome] += 1
        names = {span["name"] for span in traces[trace_id]}
        if outcome == "ok" and SPLIT - names:
            # What the killed worker had recorded and not sent went with it.
            assert root["attributes"][Key.DECODE_WORKER] == KILLED and SPLIT - names <= {SpanName.DECODE}
            began, ended = (datetime.fromisoformat(root[each]) for each in ("start_time", "end_time"))
            assert began <= killed[0] <= ended + timedelta(seconds=UNSENT_S)
        elif outcome == "invalid":
            assert names == {root["name"], SpanName.TOKENIZE}
    assert outcomes["invalid"] == NUM_INVALID
    assert outcomes["client_gone"] > 0
    assert outcomes["ok"] + outcomes["client_gone"] == num_requests - NUM_INVALID
    attempts = [span["attributes"].get(Key.ATTEMPT, 0) for t in trace_ids for span in traces[t]]
    assert max(attempts) > 1, "the killed worker had a request, which was resumed"
