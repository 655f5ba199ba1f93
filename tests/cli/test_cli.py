"""`kvmesh` as a user runs it: it says what is wrong in one line, and leaves nothing behind."""

import fcntl
import io
import json
import re
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from schemas.ids import WorkerId
from schemas.worker import BlockCounts, EngineLives, FleetDescribed, WorkerInfo, WorkerLoad, WorkerRole
from services.cli.status import clock_lines, device_lines, engine_lines, store_table, worker_table
from services.engine.demo_model import DEMO_MODEL_DIR
from tests.cli.commands import QUESTION, assert_one_line, our_processes, run, run_here


def test_a_port_in_use(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert_one_line(run_here(tmp_path, "up", "--port", port), port, "in use")


def test_ports_that_there_are_none_of(tmp_path: Path) -> None:
    assert_one_line(run_here(tmp_path, "up", "--port", "65535", "--gateways", "2"), "65535", "--port")


def test_a_second_mesh_while_the_first_starts(tmp_path: Path) -> None:
    """It would empty the folder that the first one's services are about to read."""
    (tmp_path / "run").mkdir()
    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert_one_line(run_here(tmp_path, "up", "--port", "0"), "already runs", str(tmp_path))
        assert (tmp_path / "run").is_dir()


def test_a_broker_that_is_not_there(tmp_path: Path) -> None:
    """Each tries for a while: both at once."""
    url = "nats://127.0.0.1:9"
    commands = (("up", "--port", "0", "--nats", url), ("status", "--nats", url))
    with ThreadPoolExecutor() as pool:
        for result in pool.map(lambda arguments: run(tmp_path, *arguments), commands):
            assert_one_line(result, url)


def test_a_model_that_is_missing_truncated_or_of_another_kind(tmp_path: Path) -> None:
    assert_one_line(run_here(tmp_path, "up", "--port", "0", "--model", str(tmp_path / "nowhere")), "nowhere")
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in ("config.json", "tokenizer.json"):
        (broken / file).write_bytes((DEMO_MODEL_DIR / file).read_bytes())
    weights = (DEMO_MODEL_DIR / "model.safetensors").read_bytes()
    (broken / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    assert_one_line(run_here(tmp_path, "up", "--port", "0", "--model", str(broken)), "broken")
    (broken / "model.safetensors").write_bytes(weights)
    config = json.loads((DEMO_MODEL_DIR / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"architectures": ["BertModel"], "model_type": "bert"}))
    assert_one_line(run_here(tmp_path, "up", "--port", "0", "--model", str(broken)), "Bert")


def test_an_unknown_policy(tmp_path: Path) -> None:
    assert_one_line(run_here(tmp_path, "up", "--port", "0", "--policy", "fastest"), "fastest", "least_loaded")


@pytest.mark.parametrize("store", ["floppy", "http://127.0.0.1:1", "redis://", "redis://127.0.0.1:port/0"])
def test_a_store_that_is_none(tmp_path: Path, store: str) -> None:
    assert_one_line(run_here(tmp_path, "up", "--port", "0", "--store", store), store, "valkey://host:port/0")
    assert our_processes(tmp_path) == []


def test_a_store_whose_server_is_not_there(tmp_path: Path) -> None:
    assert_one_line(run_here(tmp_path, "up", "--port", "0", "--store", "redis://127.0.0.1:9/0"), "127.0.0.1:9")
    assert our_processes(tmp_path) == []


def test_flags_that_contradict_or_are_no_address(tmp_path: Path) -> None:
    assert_one_line(
        run_here(tmp_path, "up", "--port", "0", "--aggregated", "1", "--prefill", "2"), "--aggregated", "--prefill"
    )
    assert_one_line(run_here(tmp_path, "up", "--port", "0", "--otlp", "foo"), "--otlp", "'foo'", "http://")
    assert_one_line(run_here(tmp_path, "trace", "--rejected"), "--failed")
    assert our_processes(tmp_path) == []


def test_the_version_is_said(tmp_path: Path) -> None:
    assert re.fullmatch(r"kvmesh \d+\.\d+\S*\n", run_here(tmp_path, "--version").stdout)


def test_a_device_that_is_none(tmp_path: Path) -> None:
    assert_one_line(run_here(tmp_path, "up", "--port", "0", "--device", "gpu"), "--device", "cuda:N")
    assert our_processes(tmp_path) == []


def test_a_carrier_between_cards_without_cards(tmp_path: Path) -> None:
    assert_one_line(run_here(tmp_path, "up", "--port", "0", "--device", "cpu", "--carrier", "cuda"), "--device cuda")
    assert our_processes(tmp_path) == []


def test_a_card_that_is_not_there(tmp_path: Path) -> None:
    """Without a driver `up` knows; with one the worker finds out, and `up` says it once, for both of them."""
    result = run_here(tmp_path, "up", "--port", "0", "--device", "cuda:77")
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
    assert clock_lines(fleet) == []
    ahead = msgspec.structs.replace(load("decode"), clock_ahead_ms=660_000)
    wrong = FleetDescribed(policy="cost", ready=True, workers=(ahead, load("prefill")))
    assert clock_lines(wrong) == ["clocks that differ from the scheduler's: decode-0 +660.0 s"]
    assert engine_lines(fleet) == []
    dead = msgspec.structs.replace(load("decode"), state="starting", engine=EngineLives(num_starts=2, num_deaths=2))
    loads = (dead, msgspec.structs.replace(dead, worker=load("prefill").worker, state="ready"))
    assert engine_lines(FleetDescribed(policy="cost", ready=True, workers=loads)) == [
        "engines of decode-0 that have died: 2; it is starting again",
        "engines of prefill-0 that have died: 2; there is one again",
    ]
    spared = msgspec.structs.replace(load("decode"), engine=EngineLives(num_spares=1, spare_bytes=412 << 20))
    assert engine_lines(FleetDescribed(policy="cost", ready=True, workers=(spared,))) == [
        "spare engines of decode-0: 1, 412 MiB of memory of their own"
    ]


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
    ):
        assert_one_line(run_here(tmp_path, "bench", *arguments), *words)
    assert our_processes(tmp_path) == []


def test_a_configuration_that_is_none(tmp_path: Path) -> None:
    bad = tmp_path / "mesh.toml"
    assert_one_line(run_here(tmp_path, "serve", "scheduler", "--config", str(bad)), "mesh.toml")
    bad.write_text("[worker]\nblock_sizes = 3\n")
    assert_one_line(run_here(tmp_path, "serve", "scheduler", "--config", str(bad)), "block_sizes")


def test_nothing_runs_here(tmp_path: Path) -> None:
    assert_one_line(run_here(tmp_path, "status"), "kvmesh up")
    assert_one_line(run_here(tmp_path, "trace"), "request")


def test_an_unknown_flag_is_a_usage_error(tmp_path: Path) -> None:
    result = run_here(tmp_path, "up", "--prefil", "2")
    assert result.returncode == 2 and "--prefil" in result.stderr


def test_the_services_without_a_model_import_no_torch() -> None:
    check = "import sys, services.gateway.service, services.scheduler.service, services.directory.service\n"
    check += "assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True, timeout=60)


def test_the_demo_question_is_the_readmes() -> None:
    assert QUESTION in Path("README.md").read_text()
