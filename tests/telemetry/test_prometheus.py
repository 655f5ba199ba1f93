"""A real Prometheus on a real mesh under load: it finds every service, every query and rule has data, exemplars are
kept, and a decode worker that is killed raises the alert. Skips where there is no Prometheus, which
`make prometheus-test` gets.
"""

import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.ports import free_port
from tests.telemetry.test_grafana import PAGES, load, panels_of, rules

ROOT = Path(__file__).parents[2]
TOOLS = ROOT / ".kvmesh" / "tools" / "prometheus" / "usr" / "bin"
RULES = ROOT / "compose" / "prometheus" / "rules.yml"
SERVICES = ("scheduler", "directory", "prefill-0", "prefill-1", "decode-0", "decode-1", "gateway")
WORKERS = ("prefill-0", "prefill-1", "decode-0", "decode-1")
PATIENCE_S = 120
NUM_CLIENTS = 8
ALERT_WITHIN_S = 5.0
BUSY = (429, 503)
TIME_ALERTS = {"BusSlow", "RequestsFail", "RequestsRefused", "ServiceAway", "ServiceDown", "TimeToFirstTokenSlow"}
TIME_ALERTS |= {"WorkerDiedUnderLoad", "WorkerStoodStill", "KVStranded", "NoWorkerOfRole"}
"""What a machine with far too little time may raise: whoever cannot answer in time looks dead."""
WORDS = range(300, 1_300)
"""Token ids of the demo model."""
CONFIG = """
global: {scrape_interval: 1s, scrape_timeout: 1s, evaluation_interval: 500ms}
rule_files: [%s]
scrape_configs:
  - job_name: kvmesh
    file_sd_configs: [{files: [%s], refresh_interval: 1s}]
"""


def find_tool(name: str) -> str | None:
    return shutil.which(name) or (str(TOOLS / name) if (TOOLS / name).exists() else None)


needs_prometheus = pytest.mark.skipif(find_tool("prometheus") is None, reason="no prometheus: make prometheus-test")


class Prometheus:
    """A running one, asked over its API. Close it."""

    def __init__(self, url: str) -> None:
        self._client = httpx.Client(base_url=f"{url}/api/v1/", timeout=30)

    def close(self) -> None:
        self._client.close()

    def get(self, path: str, **params: Any) -> Any:
        answer = self._client.get(path, params=params)
        assert answer.status_code == 200, answer.text
        return answer.json()["data"]

    def query(self, expr: str) -> list[dict[str, Any]]:
        return self.get("query", query=expr)["result"]

    def first_s(self, expr: str, since_s: float) -> float:
        """Return the time of the first sample of an expression, looked at every tenth of a second."""
        found = self.get("query_range", query=expr, start=since_s, end=time.time(), step=0.1)["result"]
        return min((float(series["values"][0][0]) for series in found), default=math.inf)


@dataclass
class Load:
    """Clients that talk on: a prompt that others begin with as well, its answer, another question. `talks_on` False:
    every prompt is new and long, so that its KV is being handed over most of the time."""

    url: str
    talks_on: bool = True
    failures: list[str] = field(default_factory=list[str])
    num_done: int = 0
    _stop: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> "Load":
        self._pool = ThreadPoolExecutor(NUM_CLIENTS)
        self._running = [self._pool.submit(self._talk, number) for number in range(NUM_CLIENTS)]
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._pool.shutdown()
        for running in self._running:
            running.result()

    def _talk(self, number: int) -> None:
        rng = random.Random(number)
        shared = random.Random(number % 2).choices(WORDS, k=320)
        with httpx.Client(base_url=self.url, timeout=120) as client:
            while not self._stop.is_set():
                prompt = shared + rng.choices(WORDS, k=700) if self.talks_on else rng.choices(WORDS, k=2_000)
                for _ in range(2 if self.talks_on else 1):
                    body = {
                        "model": "demo_model", "prompt": prompt, "max_tokens": 24, "ignore_eos": True, "stream": True,
                        "return_token_ids": True,
                    }  # fmt: skip
                    prompt = prompt + self._complete(client, body) + rng.choices(WORDS, k=40)

    def _complete(self, client: httpx.Client, body: dict[str, Any]) -> list[int]:
        answer = client.post("/v1/completions", json=body)
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line[:7] == "data: {"]
        tokens = [token for event in events for c in event.get("choices", ()) for token in c.get("token_ids") or ()]
        self.num_done += 1
        if answer.status_code in BUSY:
            return []
        if answer.status_code != 200 or "[DONE]" not in answer.text or len(tokens) != 24:
            self.failures.append(f"{answer.status_code} {answer.text[-500:]}")
        return tokens


@dataclass
class Rig:
    prometheus: Prometheus
    url: str
    state_dir: Path
    pid: int

    def pid_of(self, service: str) -> int:
        """Return the process of a service of this mesh."""
        for folder in Path("/proc").iterdir():
            try:
                arguments = (folder / "cmdline").read_text().split("\0")
                parent = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
            except (OSError, IndexError):
                continue
            if parent == self.pid and service in arguments:
                return int(folder.name)
        raise AssertionError(f"no process of {service}")


def wait(holds: Callable[[], bool], what: Callable[[], str], patience_s: float = PATIENCE_S) -> None:
    deadline_s = time.monotonic() + patience_s
    while not holds():
        assert time.monotonic() < deadline_s, what()
        time.sleep(0.2)


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    folder = tmp_path_factory.mktemp("prometheus")
    state_dir, port = folder / "state", free_port()
    command = [
        "-m",
        "services.cli.main",
        "up",
        "--port",
        str(port),
        "--prefill",
        "2",
        "--decode",
        "2",
        "--threads",
        "1",
    ]
    environment = os.environ | {"KVMESH_STATE_DIR": str(state_dir)}
    binary = find_tool("prometheus")
    assert binary is not None
    (folder / "prometheus.yml").write_text(CONFIG % (RULES, state_dir / "metrics.json"))
    address = f"127.0.0.1:{free_port()}"
    with (folder / "mesh.log").open("wb") as mesh_log, (folder / "prometheus.log").open("wb") as log:
        mesh = subprocess.Popen([sys.executable, *command], cwd=ROOT, env=environment, stdout=mesh_log)
        prometheus = subprocess.Popen(
            [
                binary, f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address={address}", "--enable-feature=exemplar-storage", "--log.level=warn",
            ],
            cwd=folder, stderr=log,
        )  # fmt: skip
        try:
            wait((state_dir / "metrics.json").exists, lambda: (folder / "mesh.log").read_text())
            with closing(Prometheus(f"http://{address}")) as asked:
                yield Rig(asked, f"http://127.0.0.1:{port}", state_dir, mesh.pid)
        finally:
            for process in (mesh, prometheus):
                process.send_signal(signal.SIGTERM)
            for process in (mesh, prometheus):
                process.wait(60)
    assert not (state_dir / "metrics.json").exists()


def is_answered(rig: Rig, expr: str) -> bool:
    """Say whether there is a number, of any worker: with nothing to divide by there is none."""
    asked = [expr.replace("$worker", worker) for worker in WORKERS] if "$worker" in expr else [expr]
    values = [float(sample["value"][1]) for text in asked for sample in rig.prometheus.query(text)]
    return bool(values) and not all(math.isnan(value) for value in values)


def expressions() -> list[str]:
    """Return every query, as Grafana would ask it but for its worker."""
    texts = [target["expr"] for name in PAGES for panel in panels_of(load(name)) for target in panel["targets"]]
    return [text.replace("$__rate_interval", "20s") for text in texts]


@needs_prometheus
def test_every_service_is_found_and_every_query_has_data(rig: Rig) -> None:
    wait(
        lambda: {s["metric"]["service"] for s in rig.prometheus.query("up == 1")} == set(SERVICES),
        lambda: json.dumps(rig.prometheus.get("targets"), indent=1),
    )
    pending = set(expressions())
    assert len(pending) > 80
    with Load(rig.url) as clients:
        deadline_s = time.monotonic() + PATIENCE_S
        while pending and not clients.failures and time.monotonic() < deadline_s:
            pending = {expr for expr in pending if not is_answered(rig, expr)}
            time.sleep(1)
    assert clients.num_done and not clients.failures
    assert not pending, "\n".join(sorted(pending))


@needs_prometheus
def test_the_rules_are_right_and_quiet_on_a_healthy_mesh(rig: Rig) -> None:
    promtool = find_tool("promtool")
    if promtool is not None:
        subprocess.run([promtool, "check", "rules", RULES], check=True, capture_output=True, timeout=60)
    config = ROOT / "compose" / "prometheus" / "prometheus.yml"
    if promtool is not None:
        subprocess.run([promtool, "check", "config", config], check=True, capture_output=True, timeout=60)

    def evaluated() -> list[dict[str, Any]]:
        return [rule for group in rig.prometheus.get("rules")["groups"] for rule in group["rules"]]

    wait(lambda: all(rule["health"] == "ok" for rule in evaluated()), lambda: json.dumps(evaluated(), indent=1))
    assert {rule["name"] for rule in evaluated()} == {rule["alert"] for rule in rules()}
    fired = {sample["metric"]["alertname"] for sample in rig.prometheus.query('ALERTS{alertstate="firing"}')}
    assert fired <= TIME_ALERTS, "nothing is wrong with this mesh"


@needs_prometheus
def test_exemplars_are_kept_and_name_traces_that_exist(rig: Rig) -> None:
    with Load(rig.url):
        seen: list[str] = []

        def kept() -> bool:
            metric, now_s = "gen_ai_server_time_to_first_token_seconds_bucket", time.time()
            found = rig.prometheus.get("query_exemplars", query=metric, start=now_s - 300, end=now_s)
            seen[:] = [exemplar["labels"]["trace_id"] for series in found for exemplar in series["exemplars"]]
            return bool(seen)

        wait(kept, lambda: "no exemplar was kept")
    wait(lambda: any(id_ in traces_of(rig) for id_ in seen), lambda: f"no trace of {seen}")


def traces_of(rig: Rig) -> str:
    return "".join(path.read_text() for path in (rig.state_dir / "run" / "traces").glob("gateway-*.jsonl"))


def ends(rig: Rig) -> list[Any]:
    """Return how the holders' leases ended."""
    found = rig.prometheus.query("kvmesh_leases_ended_total > 0")
    return [(sample["metric"]["worker"], sample["metric"]["outcome"], sample["value"][1]) for sample in found]


@needs_prometheus
def test_a_decode_worker_killed_under_load_raises_the_alert(rig: Rig) -> None:
    """The threshold: the first sample by which blocks had no reader. Both times are Prometheus' own."""
    stranded = 'sum(kvmesh_stranded_blocks_total{worker=~"prefill.*"})'
    firing = 'ALERTS{alertname="KVStranded", alertstate="firing"}'
    with Load(rig.url, talks_on=False) as clients:
        wait(lambda: clients.num_done >= NUM_CLIENTS, lambda: "no load")
        wait(lambda: len(rig.prometheus.query(stranded)) == 1, lambda: "nobody tells stranded blocks")
        before = float(rig.prometheus.query(stranded)[0]["value"][1])
        first_pid = rig.pid_of("decode-0")
        started = rig.prometheus.query('process_start_time_seconds{service="decode-0"}')[0]["value"][1]
        leases = 'sum(kvmesh_leases{worker=~"prefill.*"}) >= 6'
        wait(lambda: bool(rig.prometheus.query(leases)), lambda: "the prefill workers have too little to do")
        since_s = time.time()
        os.kill(first_pid, signal.SIGKILL)
        wait(lambda: rig.prometheus.first_s(firing, since_s) < math.inf, lambda: f"no alert: {ends(rig)}")
        crossed_s = min(
            rig.prometheus.first_s(f"{stranded} > {before}", since_s),
            rig.prometheus.first_s("sum(kvmesh_unread_blocks) > 0", since_s),
        )
        fired_s = rig.prometheus.first_s(firing, since_s)
        assert crossed_s <= fired_s <= crossed_s + ALERT_WITHIN_S
        wait(
            lambda: rig.prometheus.first_s('ALERTS{alertname="WorkerDiedUnderLoad"}', since_s) < math.inf,
            lambda: "its death under load was not seen",
        )

        def is_back() -> bool:
            found = rig.prometheus.query('process_start_time_seconds{service="decode-0"} and on (instance) up == 1')
            return bool(found) and found[0]["value"][1] != started

        wait(is_back, lambda: "its successor is not found on the same port")
    assert not clients.failures
