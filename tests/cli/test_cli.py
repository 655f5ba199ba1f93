"""`kvmesh` as a user runs it: it says what is wrong in one line, and leaves nothing behind."""

import fcntl
import io
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from rich.console import Console

from schemas.ids import WorkerId
from schemas.worker import BlockCounts, FleetDescribed, WorkerInfo, WorkerLoad, WorkerRole
from services.cli.status import device_lines, store_table, worker_table
from services.config import load_config
from services.engine.demo_model import DEMO_MODEL_DIR
from tests.mesh.test_mesh import QUESTION

KVMESH = [sys.executable, "-m", "services.cli.main"]


def environment(state_dir: Path) -> dict[str, str]:
    return dict(os.environ) | {"KVMESH_STATE_DIR": str(state_dir), "COLUMNS": "200"}


def run(state_dir: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [*KVMESH, *arguments]
    return subprocess.run(command, env=environment(state_dir), capture_output=True, text=True, timeout=120, check=False)


@contextmanager
def stopped_with(up: "subprocess.Popen[str]", number: signal.Signals = signal.SIGINT) -> Iterator[Iterator[str]]:
    """Read what `kvmesh up` says; at the end send it a signal, wait for it, and close the pipe."""
    assert up.stdout is not None
    with up:
        try:
            yield up.stdout
        finally:
            up.send_signal(number)
            up.wait(60)


def assert_one_line(result: "subprocess.CompletedProcess[str]", *words: str) -> None:
    assert result.returncode == 2, result
    lines = [line for line in result.stderr.splitlines() if line.strip()]
    assert len(lines) == 1 and lines[0].startswith("error: "), result.stderr
    for word in words:
        assert word in lines[0], lines[0]


def command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")


def our_processes(state_dir: Path) -> list[int]:
    """Return the live processes whose command lines name this state folder."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = command_of(int(entry.name))
            except OSError:
                continue
            if str(state_dir) in command:
                found.append(int(entry.name))
    return found


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
        status = json.loads(run(tmp_path, "status", "--json").stdout)
        assert status["ready"] and status["policy"] == "round_robin"
        assert_one_line(run(tmp_path, "up", "--port", "0"), "already")
        assert_one_line(run(tmp_path, "tail", "NONSENSE"), "'NONSENSE'", "x-request-id")
        trace = run(tmp_path, "trace", answer["usage"]["kvmesh"]["request_id"])
        assert trace.returncode == 0 and "kv.transfer" in trace.stdout, trace
        workers = our_processes(tmp_path)
        assert any(_arenas(workers)), "the test looks for the wrong names"
    assert up.returncode == (0 if stop_with != signal.SIGKILL else -signal.SIGKILL)
    _wait_until_gone(tmp_path)
    assert not any(_arenas(workers))


def test_what_dies_is_started_again_and_said(tmp_path: Path) -> None:
    command = [*KVMESH, "up", "--port", "0", "--gateways", "2", "--kv-mib", "64", "--drain-s", "5"]
    up = subprocess.Popen(command, env=environment(tmp_path), stdout=subprocess.PIPE, text=True)
    with stopped_with(up) as lines:
        said = "".join(itertools.takewhile(lambda line: "Ctrl-C" not in line, lines))
        assert len(re.findall(r"http://127.0.0.1:\d+/v1 ", said.replace("\n", " "))) == 2 and "2 gateways" in said
        [decode] = [pid for pid in our_processes(tmp_path) if "--id decode-0" in command_of(pid)]
        os.kill(decode, signal.SIGKILL)
        assert "decode-0 was killed by signal 9; it is started again" in next(lines)
        assert "started again: decode-0 1×" in run(tmp_path, "status", *_broker(tmp_path)).stdout
    assert up.returncode == 0  # though the new one was still starting
    assert our_processes(tmp_path) == [] and not any(_arenas([decode]))


def _broker(state_dir: Path) -> list[str]:
    """The mesh's bus, as somebody would name it who did not start it here."""
    mesh = json.loads((state_dir / "mesh.json").read_bytes())
    return ["--nats", mesh["nats_url"], "--creds", f"{mesh['keys']}/observer.creds"]


def _arenas(pids: list[int]) -> list[Path]:
    return [path for pid in pids for path in Path("/dev/shm").glob(f"kvmesh-{pid}-*")]


def _wait_until_gone(state_dir: Path) -> None:
    """After a kill the services notice by themselves; they take a moment."""
    waiting = subprocess.run(
        [sys.executable, "-c", _WAIT, str(state_dir)], capture_output=True, text=True, timeout=90, check=False
    )
    assert our_processes(state_dir) == [], waiting


_WAIT = """
import sys, time
from pathlib import Path
def alive():
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != __import__("os").getpid():
            try:
                if sys.argv[1].encode() in (entry / "cmdline").read_bytes():
                    return True
            except OSError:
                pass
    return False
deadline = time.monotonic() + 60
while alive() and time.monotonic() < deadline:
    time.sleep(0.1)
"""


def test_a_port_in_use(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert_one_line(run(tmp_path, "up", "--port", port), port, "in use")


def test_ports_that_there_are_none_of(tmp_path: Path) -> None:
    assert_one_line(run(tmp_path, "up", "--port", "65535", "--gateways", "2"), "65535", "--port")


def test_a_second_mesh_while_the_first_starts(tmp_path: Path) -> None:
    """It would empty the folder that the first one's services are about to read."""
    (tmp_path / "run").mkdir()
    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert_one_line(run(tmp_path, "up", "--port", "0"), "already runs", str(tmp_path))
        assert (tmp_path / "run").is_dir()


def test_a_broker_that_is_not_there(tmp_path: Path) -> None:
    """Each tries for a while: both at once."""
    url = "nats://127.0.0.1:9"
    commands = (("up", "--port", "0", "--nats", url), ("status", "--nats", url))
    with ThreadPoolExecutor() as pool:
        for result in pool.map(lambda arguments: run(tmp_path, *arguments), commands):
            assert_one_line(result, url)


def test_a_model_that_is_missing_truncated_or_of_another_kind(tmp_path: Path) -> None:
    assert_one_line(run(tmp_path, "up", "--port", "0", "--model", str(tmp_path / "nowhere")), "nowhere")
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in ("config.json", "tokenizer.json"):
        (broken / file).write_bytes((DEMO_MODEL_DIR / file).read_bytes())
    weights = (DEMO_MODEL_DIR / "model.safetensors").read_bytes()
    (broken / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    assert_one_line(run(tmp_path, "up", "--port", "0", "--model", str(broken)), "broken")
    (broken / "model.safetensors").write_bytes(weights)
    config = json.loads((DEMO_MODEL_DIR / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"architectures": ["BertModel"], "model_type": "bert"}))
    assert_one_line(run(tmp_path, "up", "--port", "0", "--model", str(broken)), "Bert")


def test_an_unknown_policy(tmp_path: Path) -> None:
    assert_one_line(run(tmp_path, "up", "--port", "0", "--policy", "fastest"), "fastest", "least_loaded")


@pytest.mark.parametrize("store", ["floppy", "http://127.0.0.1:1", "redis://", "redis://127.0.0.1:port/0"])
def test_a_store_that_is_none(tmp_path: Path, store: str) -> None:
    assert_one_line(run(tmp_path, "up", "--port", "0", "--store", store), store, "valkey://host:port/0")
    assert our_processes(tmp_path) == []


def test_a_store_whose_server_is_not_there(tmp_path: Path) -> None:
    assert_one_line(run(tmp_path, "up", "--port", "0", "--store", "redis://127.0.0.1:9/0"), "127.0.0.1:9")
    assert our_processes(tmp_path) == []


@pytest.mark.slow
def test_a_disk_store_is_in_the_fleet_and_outlives_the_mesh_until_it_is_purged(tmp_path: Path) -> None:
    command = [*KVMESH, "up", "--port", "0", "--kv-mib", "8", "--store", "disk", "--store-mib", "64"]

    def ask(number: int) -> dict[str, int]:
        """Return from whom blocks of a prompt came; it is too long for many of its kind to stay in a worker."""
        url = json.loads((tmp_path / "mesh.json").read_bytes())["url"]
        body = {"model": DEMO_MODEL_DIR.name, "prompt": f"word {number} " * 200, "max_tokens": 2}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()
        return answer["usage"]["kvmesh"]["transferred_from"]

    for life in range(2):
        up = subprocess.Popen(command, env=environment(tmp_path), stdout=subprocess.PIPE, text=True)
        with stopped_with(up) as lines:
            said = "".join(itertools.takewhile(lambda line: "Ctrl-C" not in line, lines))
            assert "store" in said
            workers = json.loads(run(tmp_path, "status", "--json").stdout)["workers"]
            assert [w["worker"]["worker_id"] for w in workers if w["worker"]["role"] == "store"] == ["store-0"]
            if not life:
                for number in range(8):
                    ask(number)
                continue
            assert set(ask(0)) == {"store-0"}, "it is believed in the next mesh"
            assert_one_line(run(tmp_path, "purge"), "--store, --holder ID, --tenant NAME or --all")
            assert_one_line(run(tmp_path, "purge", "--holder", "nobody"), "'nobody'", "kvmesh status")
            purged = run(tmp_path, "purge", "--all")
            assert purged.returncode == 0 and re.search(r"store-0 +[1-9]", purged.stdout), purged
            assert not list((tmp_path / "store").rglob("*.kv")) and ask(0) == {}
        assert up.returncode == 0
    assert our_processes(tmp_path) == []


def test_the_options_of_up_reach_the_configuration(tmp_path: Path) -> None:
    """It is written before anything is started; a signal ends what starts."""
    options = ["--policy", "least_loaded", "--no-prefix-cache", "--pull-tokens-min", "96", "--wire-dtype", "int8"]
    options += ["--device", "cpu", "--dtype", "bfloat16"]
    command = [*KVMESH, "up", "--port", "0", "--kv-mib", "64", *options]
    with subprocess.Popen(command, env=environment(tmp_path), stdout=subprocess.DEVNULL) as up:
        while not all((tmp_path / "run" / "logs" / f"{name}.log").exists() for name in ("gateway", "decode-0")):
            assert up.poll() is None
            time.sleep(0.02)
        config = load_config(tmp_path / "run" / "mesh.toml")
        up.send_signal(signal.SIGINT)
    assert up.returncode == 130
    assert our_processes(tmp_path) == []
    assert (config.scheduler.policy, config.scheduler.pull_tokens_min) == ("least_loaded", 96)
    assert (config.worker.prefix_cache, config.worker.wire_dtype) == (False, "int8")
    assert (config.worker.device, config.model.dtype) == ("cpu", "bfloat16")


def test_flags_that_contradict_or_are_no_address(tmp_path: Path) -> None:
    assert_one_line(
        run(tmp_path, "up", "--port", "0", "--aggregated", "1", "--prefill", "2"), "--aggregated", "--prefill"
    )
    assert_one_line(run(tmp_path, "up", "--port", "0", "--otlp", "foo"), "--otlp", "'foo'", "http://")
    assert_one_line(run(tmp_path, "trace", "--rejected"), "--failed")
    assert our_processes(tmp_path) == []


def test_the_version_is_said(tmp_path: Path) -> None:
    assert re.fullmatch(r"kvmesh \d+\.\d+\S*\n", run(tmp_path, "--version").stdout)


def test_a_device_that_is_none(tmp_path: Path) -> None:
    assert_one_line(run(tmp_path, "up", "--port", "0", "--device", "gpu"), "--device", "cuda:N")
    assert our_processes(tmp_path) == []


def test_a_carrier_between_cards_without_cards(tmp_path: Path) -> None:
    assert_one_line(run(tmp_path, "up", "--port", "0", "--device", "cpu", "--carrier", "cuda"), "--device cuda")
    assert our_processes(tmp_path) == []


def test_a_card_that_is_not_there(tmp_path: Path) -> None:
    """Without a driver `up` knows; with one the worker finds out, and `up` says it once, for both of them."""
    result = run(tmp_path, "up", "--port", "0", "--device", "cuda:77")
    assert_one_line(result)
    assert "--device cpu" in result.stderr
    assert our_processes(tmp_path) == []


def test_cached_blocks_and_stores_are_shown() -> None:
    def load(role: WorkerRole) -> WorkerLoad:
        worker = WorkerInfo(
            worker_id=WorkerId(f"{role}-0"), incarnation="i", role=role, model="m", fingerprint="f", num_blocks=60,
            block_size=16, context_length=64,
        )  # fmt: skip
        blocks = BlockCounts(total=60, free=11, cached=22, running=4, leased=23)
        return WorkerLoad(
            worker=worker, state="ready", blocks=blocks, num_running=0, num_queued=0, num_uncomputed_tokens=0
        )

    fleet = FleetDescribed(policy="cost", ready=True, workers=(load("store"), load("decode"), load("prefill")))
    shown: list[list[str]] = []
    for table in (worker_table(fleet), store_table(fleet)):
        console = Console(width=80, file=io.StringIO())
        console.print(table)
        assert isinstance(console.file, io.StringIO)
        rows = [line for line in console.file.getvalue().splitlines() if re.search(r"11 +22 +23 +60", line)]
        shown.append([worker for row in rows for worker in ("decode-0", "prefill-0", "store-0") if worker in row])
    assert shown == [["decode-0", "prefill-0"], ["store-0"]]


def test_workers_on_cards_are_shown_and_those_of_a_mesh_without_are_not() -> None:
    def load(name: str, device: str, role: WorkerRole = "decode") -> WorkerLoad:
        worker = WorkerInfo(
            worker_id=WorkerId(name), incarnation="i", role=role, model="m", fingerprint="f", num_blocks=60,
            block_size=16, context_length=64, device=device,
        )  # fmt: skip
        blocks = BlockCounts(total=60, free=60, running=0, leased=0)
        return WorkerLoad(
            worker=worker, state="ready", blocks=blocks, num_running=0, num_queued=0, num_uncomputed_tokens=0
        )

    def lines(*loads: WorkerLoad) -> list[str]:
        return device_lines(FleetDescribed(policy="cost", ready=True, workers=loads))

    store = load("store-0", "", "store")
    assert lines(store, load("d-0", "cpu"), load("d-1", "")) == []
    mixed = lines(store, load("d-2", "cuda:0 H200"), load("d-1", "cpu"), load("d-0", "cuda:0 H200"))
    assert mixed == ["on cuda:0 H200: d-0, d-2", "on cpu: d-1"]


def test_benches_say_what_is_wrong_before_they_start_anything(tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    line = '{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1]}\n'
    bad.write_text(line + "not a request\n")
    single = tmp_path / "single.jsonl"
    single.write_text(line)
    for arguments, words in (
        (["replay", str(bad)], ["bad.jsonl", "line 2"]),
        (["replay", str(tmp_path / "none.jsonl")], ["none.jsonl", "No such file"]),
        (["replay", str(single), "--groups", "2"], ["--groups", "no two prompts"]),
        (["replay", "--scale", "0"], ["--scale"]),
        (["ttft", "--large-kv", "--lengths", "10000"], ["--lengths", "3992"]),
        (["ttft", "--large-kv", "--url", "http://127.0.0.1:9"], ["--large-kv", "--url"]),
        (["multiturn", "--history", "many"], ["--history", "many"]),
        (["multiturn", "--output", "9..3"], ["--output"]),
        (["multiturn", "--restart", "--turns", "1"], ["--restart", "two turns"]),
        (["multiturn", "--restart", "--url", "http://127.0.0.1:9"], ["--restart", "--url"]),
        (["multiturn", "--plot", str(tmp_path / "nowhere" / "a.png")], ["--plot", "nowhere"]),
        (["crossover", "--carrier", "pigeon"], ["--carrier", "pigeon"]),
        (["documents", "--url", "http://127.0.0.1:9"], ["http://127.0.0.1:9"]),
    ):
        assert_one_line(run(tmp_path, "bench", *arguments), *words)
    assert our_processes(tmp_path) == []


def test_a_configuration_that_is_none(tmp_path: Path) -> None:
    bad = tmp_path / "mesh.toml"
    assert_one_line(run(tmp_path, "serve", "scheduler", "--config", str(bad)), "mesh.toml")
    bad.write_text("[worker]\nblock_sizes = 3\n")
    assert_one_line(run(tmp_path, "serve", "scheduler", "--config", str(bad)), "block_sizes")


def test_nothing_runs_here(tmp_path: Path) -> None:
    assert_one_line(run(tmp_path, "status"), "kvmesh up")
    assert_one_line(run(tmp_path, "trace"), "request")


def test_an_unknown_flag_is_a_usage_error(tmp_path: Path) -> None:
    result = run(tmp_path, "up", "--prefil", "2")
    assert result.returncode == 2 and "--prefil" in result.stderr


def test_the_services_without_a_model_import_no_torch() -> None:
    check = "import sys, services.gateway.service, services.scheduler.service, services.directory.service\n"
    check += "assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True, timeout=60)


def test_the_demo_question_is_the_readmes() -> None:
    assert QUESTION in Path("README.md").read_text()
