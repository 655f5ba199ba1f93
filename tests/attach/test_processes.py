"""`kvmesh up --attach` and `kvmesh attach` as users start them, with servers that stand in for vLLM."""

import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path

import pytest

from schemas.attach import Half, KVIdentity
from services.engine.checkpoint import read_checkpoint
from services.engine.demo_model import DEMO_MODEL_DIR
from tests.attach.fake_server import fake_server
from tests.attach.servers import Holder
from tests.waiting import wait_until

ASKED = {"do_remote_decode": True}
"""What a proxy sends with a prompt that is to be decoded elsewhere."""


@pytest.fixture
def holder(tmp_path: Path) -> Generator[Holder]:
    made = Holder(tmp_path)
    made.start()
    yield made
    made.stop()


def identity() -> KVIdentity:
    demo = read_checkpoint(str(DEMO_MODEL_DIR), "vllm")
    return KVIdentity(
        weights=demo.weights, kv_format="fake", dtype="float32", num_layers=demo.num_layers,
        num_kv_heads=demo.num_kv_heads, head_dim=demo.head_dim, block_size=32,
    )  # fmt: skip


def run(holder: Holder, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "services.cli.main", *words], capture_output=True, text=True, check=False,
        env=holder.environment,
    )  # fmt: skip


def test_servers_attach_are_shown_and_survive_the_holder(holder: Holder) -> None:
    prompt = list(range(200))
    with (
        fake_server(holder.socket, "a", identity=identity()) as one,
        fake_server(holder.socket, "b", identity=identity()) as other,
    ):
        one.await_proven()
        other.await_proven()
        right = one.run(prompt).answer
        wait_until(lambda: other.run(prompt).num_loaded == 192)
        wait_until(lambda: any(each["num_loaded_tokens"] for each in holder.servers()))
        shown = run(holder, "status", "attach-0").stdout
        assert "server" in shown and " on " in shown
        assert "for servers that attach" in run(holder, "status").stdout
        os.kill(holder.pid, signal.SIGKILL)
        assert one.run(prompt).answer == right
        wait_until(lambda: one.clients[Half.SCHEDULER].welcome is None)
        one.await_proven()  # the next holder's
        wait_until(lambda: one.run(prompt).num_loaded == 192)
        assert one.run(prompt).answer == right
    wait_until(lambda: not holder.servers())


def test_when_it_ends_nothing_is_left(tmp_path: Path) -> None:
    holder = Holder(tmp_path)
    holder.start()
    with fake_server(holder.socket, "a", identity=identity()) as server:
        server.await_proven()
        arenas = holder.arenas()
        assert len(arenas) == 1
        holder.stop()
        assert not arenas[0].exists() and not holder.socket.exists()
        assert server.run(list(range(100))).num_loaded == 0


def test_what_a_server_is_given_is_printed(holder: Holder) -> None:
    url = ("--url", "http://127.0.0.1:8000")
    printed = run(holder, "attach", "--print-config", *url, "--socket", str(holder.socket))
    config = json.loads(printed.stdout)
    assert config["kv_load_failure_policy"] == "recompute"
    assert config["kv_connector_extra_config"]["socket"] == str(holder.socket)
    refused = run(holder, "attach", "--print-config")
    assert refused.returncode == 2 and "--url" in refused.stderr
    (line,) = run(holder, "attach", "--wheel", str(holder.folder)).stdout.splitlines()
    assert Path(line).is_file()


def test_a_disk_behind_the_holder_outlives_it(tmp_path: Path) -> None:
    holder = Holder(tmp_path, arguments=("--store", "disk", "--prefix-port", "0"))
    prompt = list(range(200))
    with fake_server(holder.socket, "a", identity=identity()) as server:
        holder.start()
        server.await_proven()
        right = server.run(prompt).answer
        wait_until(lambda: server.run(prompt).num_loaded == 192)
        holder.stop()
        holder.start()
        server.await_proven()
        ran = server.run(prompt)
        assert (ran.num_loaded, ran.answer) == (192, right)
        holder.stop()


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("up", "--attach", "--prefill", "2"), "--prefill"),
        (("up", "--attach", "--engine", "vllm"), "--engine"),
        (("up", "--attach", "--memory-gib", "100000"), "store.memory_bytes"),
        (("attach", "--model", "/nowhere"), "/nowhere"),
        (("attach", "--keys", "/nowhere"), "/nowhere"),
        (("attach", "--store", "elsewhere"), "--store 'elsewhere' is no store"),
        (("attach", "--store", "redis://127.0.0.1:1/0"), "127.0.0.1:1"),
    ],
)
def test_what_cannot_be_is_a_line(tmp_path: Path, words: tuple[str, ...], text: str) -> None:
    refused = run(Holder(tmp_path), *words)
    assert refused.returncode == 2 and text in refused.stderr


def test_a_second_holder_does_not_take_the_socket(holder: Holder) -> None:
    mesh = json.loads((holder.folder / "mesh.json").read_bytes())
    refused = run(
        holder, "attach", "--socket", str(holder.socket), "--bus", mesh["nats_url"], "--keys", mesh["keys"], "--id", "b"
    )
    assert refused.returncode == 2 and "another holder has the socket" in refused.stderr


@pytest.fixture
def second(holder: Holder, tmp_path: Path) -> Generator[Path]:
    """The socket of `attach-1`, another holder of the same mesh."""
    mesh = json.loads((holder.folder / "mesh.json").read_bytes())
    path = tmp_path / "second.sock"
    process = subprocess.Popen(
        [
            sys.executable, "-m", "services.cli.main", "attach", "--socket", str(path), "--bus", mesh["nats_url"],
            "--keys", mesh["keys"], "--id", "attach-1",
        ],
        env=holder.environment, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    wait_until(path.exists)
    yield path
    process.terminate()
    assert process.wait(60) == 0


def test_a_second_holder_of_the_mesh_brings_what_the_first_one_has(holder: Holder, second: Path) -> None:
    with (
        fake_server(holder.socket, "a", identity=identity()) as one,
        fake_server(second, "c", identity=identity()) as other,
    ):
        one.await_proven()
        other.await_proven()
        wait_until(lambda: "attach-1" in run(holder, "status").stdout)
        prompt = list(range(200))
        ran = one.run(prompt, kv_transfer_params=ASKED)
        assert ran.params is not None and ran.params["kvmesh"] == {"holder": "attach-0", "tokens": 192}
        there = other.run(prompt, kv_transfer_params=ran.params)
        assert (there.num_loaded, there.answer) == (192, ran.answer)
        described = json.loads(run(holder, "status", "attach-1", "--json").stdout)
        (shown,) = described["servers"]
        assert shown["num_brought_blocks"] >= 6, "and the canary's"
        # Without a hint, by the directory: it has what is a moment old.
        numbers = itertools.count(1)

        def is_found() -> bool:
            prompt = list(range(next(numbers), 200))
            one.run(prompt)
            return other.run(prompt).num_loaded >= 160

        wait_until(is_found)


def test_what_cannot_be_brought_is_computed_and_what_is_here_needs_no_broker(holder: Holder, second: Path) -> None:
    with (
        fake_server(holder.socket, "a", identity=identity()) as one,
        fake_server(second, "c", identity=identity()) as other,
    ):
        one.await_proven()
        other.await_proven()
        there = [list(range(first, 200)) for first in range(3)]
        computed = [one.run(prompt, kv_transfer_params=ASKED) for prompt in there]

        def is_computed(which: int) -> bool:
            ran = other.run(there[which], kv_transfer_params=computed[which].params)
            return (ran.num_loaded, ran.answer) == (0, computed[which].answer)

        # Who has it stands still, and is killed: its successor has nothing, whatever the directory says.
        source = holder.pid
        os.kill(source, signal.SIGSTOP)
        assert is_computed(0)
        os.kill(source, signal.SIGKILL)
        assert is_computed(1)
        wait_until(lambda: other.run(there[0]).num_loaded == 192)
        broker = holder.broker_pid
        os.kill(broker, signal.SIGSTOP)
        try:
            ran = other.run(there[0])
            assert (ran.num_loaded, ran.answer) == (192, computed[0].answer)
            assert is_computed(2)
        finally:
            os.kill(broker, signal.SIGCONT)
