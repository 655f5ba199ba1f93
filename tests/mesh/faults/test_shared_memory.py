"""A /dev/shm that is full: the mesh says so at its start, and whoever dies finds room again."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import httpx
import pytest

from tests.cli.commands import KVMESH, command_of, environment, fill, our_processes
from tests.mesh.faults.actor import engine_of

IN_A_SMALL_ONE = 'mount -t tmpfs -o size="$0" none /dev/shm && exec "$@"'
ARENA_MIB = 16


def small_shm(num_mib: int, *command: str) -> list[str]:
    """Return the command that runs with a /dev/shm of its own. Skips where this host does not let us."""
    around = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", IN_A_SMALL_ONE, f"{num_mib}m"]
    try:
        subprocess.run([*around, "true"], check=True, capture_output=True, timeout=30)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no mount of our own on this host: {error}")
    return [*around, *command]


def up(state_dir: Path, num_mib: int, num_decode: int) -> subprocess.Popen[str]:
    mesh = [*KVMESH, "up", "--port", "0", "--prefill", "1", "--decode", str(num_decode)]
    return subprocess.Popen(
        small_shm(num_mib, *mesh, "--kv-mib", str(ARENA_MIB)),
        env=environment(state_dir),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_too_little_for_all_is_one_clear_line(tmp_path: Path) -> None:
    process = up(tmp_path, ARENA_MIB + 4, num_decode=1)
    said, _ = process.communicate(timeout=120)
    errors = [line for line in said.splitlines() if "error" in line.lower()]
    assert process.returncode == 2 and len(errors) == 1, said
    assert "shared memory" in errors[0] and "--kv-mib" in errors[0]
    assert "Traceback" not in said


@pytest.mark.slow
def test_who_dies_finds_room_again(tmp_path: Path) -> None:
    """There is room for the living only: what the dead one held must be let go of, by its readers too."""
    process = up(tmp_path, 3 * ARENA_MIB + 4, num_decode=2)
    try:
        url = await_url(process)
        first = our_process(tmp_path, "prefill-0")
        filling = fill(Path(f"/proc/{first}/root/dev/shm"))
        for number in range(8):  # both decode workers read from it
            complete(url, number)
        for name in ("prefill-0", "decode-0", "decode-1"):
            engine = engine_of(our_process(tmp_path, name))
            assert engine is not None
            os.kill(engine, signal.SIGKILL)
        for number in range(12):  # their engines come back, though it is full
            complete(url, number, waits=True)
        filling.unlink()
        for _ in range(2):
            before = incarnation(tmp_path)
            os.kill(first, signal.SIGKILL)
            await_successor(tmp_path, before)
            first = our_process(tmp_path, "prefill-0")
            for number in range(8, 12):
                complete(url, number)
    finally:
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=60)
    assert process.returncode == 0 and said.count("is started again") == 2, said


def await_url(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if "kvmesh is up" in line:
            return next(word for word in line.split() if word.startswith("http://")).removesuffix("/v1")
    raise AssertionError("the mesh did not start")


def complete(url: str, number: int, *, waits: bool = False) -> None:
    """Have a prompt of its own answered. `waits`: until the engines are back, as the mesh says where none is for
    `gateway.place_wait_s`."""
    prompt = [7 + (number * 31 + at) % 400 for at in range(200)]
    body = {"model": "demo_model", "prompt": prompt, "max_tokens": 4, "ignore_eos": True}
    until_s = time.monotonic() + 60
    while True:
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
        if answer.status_code != 503 or not waits or time.monotonic() > until_s:
            break
        assert "is starting again" in answer.text
        time.sleep(int(answer.headers["retry-after"]))
    assert answer.status_code == 200, answer.text


def our_process(state_dir: Path, name: str) -> int:
    found = [pid for pid in our_processes(state_dir) if f"--id {name} " in command_of(pid)]
    assert len(found) == 1, found
    return found[0]


def incarnation(state_dir: Path) -> str | None:
    """Return the incarnation of the prefill worker, once the mesh uses it; None: it does not."""
    status = [*KVMESH, "status", "--json"]
    told = subprocess.run(status, env=environment(state_dir), capture_output=True, text=True, timeout=60, check=True)
    workers = {load["worker"]["worker_id"]: load for load in json.loads(told.stdout)["workers"]}
    worker = workers.get("prefill-0")
    return worker["worker"]["incarnation"] if worker and worker["state"] == "ready" else None


def await_successor(state_dir: Path, before: str | None) -> None:
    """Wait until the mesh uses another incarnation than this one."""
    until_s = time.monotonic() + 60
    while incarnation(state_dir) in (None, before):
        assert time.monotonic() < until_s, "prefill-0 did not come back within a minute"
