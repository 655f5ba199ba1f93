"""Meshes of `kvmesh up`: what dies is started again, what is stored stays, options reach the configuration."""

import itertools
import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import httpx
import pytest

from services.config import load_config
from services.engine.demo_model import DEMO_MODEL_DIR
from tests.cli.commands import (
    KVMESH,
    arenas_of,
    assert_one_line,
    command_of,
    environment,
    fill,
    our_processes,
    run,
    stopped_with,
    wait_until,
)


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
    assert our_processes(tmp_path) == [] and not any(arenas_of([decode]))


def test_whoever_reads_what_it_says_goes_away_and_the_mesh_goes_on(tmp_path: Path) -> None:
    command = [*KVMESH, "up", "--port", "0", "--kv-mib", "64", "--drain-s", "5"]
    with (tmp_path / "stderr").open("w") as stderr:
        up = subprocess.Popen(command, env=environment(tmp_path), stdout=subprocess.PIPE, stderr=stderr, text=True)
    assert up.stdout is not None
    for line in up.stdout:
        if "Ctrl-C" in line:
            break
    up.stdout.close()

    def decode() -> set[int]:
        return {pid for pid in our_processes(tmp_path) if "--id decode-0" in command_of(pid)}

    for number in (1, 2):
        before = decode()
        os.kill(*before, signal.SIGKILL)
        wait_until(lambda number=number: restarts_of(tmp_path) == {"decode-0": number})
        wait_until(lambda before=before: decode() - before)
    up.terminate()
    assert up.wait(60) == 0 and not (tmp_path / "stderr").read_text()
    assert our_processes(tmp_path) == []


def test_a_full_state_folder_keeps_nobody_from_coming_back(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", state], check=False).returncode:
        pytest.skip("file systems are root's to mount")
    try:
        command = [*KVMESH, "up", "--port", "0", "--kv-mib", "64", "--drain-s", "5"]
        up = subprocess.Popen(command, env=environment(state), stdout=subprocess.PIPE, text=True)
        with stopped_with(up) as lines:
            said = "".join(itertools.takewhile(lambda line: "Ctrl-C" not in line, lines))
            url = re.search(r"http://\S+?/v1", said)
            assert url is not None, said
            filling = fill(state)
            for _ in ("full", "room again"):
                [decode] = [pid for pid in our_processes(state) if "--id decode-0" in command_of(pid)]
                os.kill(decode, signal.SIGKILL)
                assert "decode-0 was killed by signal 9; it is started again" in next(lines)
                wait_until(lambda: any("--id decode-0" in command_of(pid) for pid in our_processes(state)))
                body = {"model": "demo_model", "prompt": str(decode), "max_tokens": 4, "ignore_eos": True}
                wait_until(
                    lambda body=body: httpx.post(f"{url[0]}/completions", json=body, timeout=60).status_code == 200
                )
                filling.unlink(missing_ok=True)
            wait_until(lambda: restarts_of(state) == {"decode-0": 2})
        assert up.returncode == 0
    finally:
        subprocess.run(["umount", "-l", state], check=True)


def restarts_of(state_dir: Path) -> dict[str, int]:
    return json.loads((state_dir / "mesh.json").read_bytes())["restarts"]


def _broker(state_dir: Path) -> list[str]:
    """The mesh's bus, as somebody would name it who did not start it here."""
    mesh = json.loads((state_dir / "mesh.json").read_bytes())
    return ["--nats", mesh["nats_url"], "--creds", f"{mesh['keys']}/observer.creds"]


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
