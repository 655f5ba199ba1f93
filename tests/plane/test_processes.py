"""Holder and reader in two processes, and the end of either."""

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from dataplane.ends.reader import Landed
from dataplane.memory.arena import SHM_DIR, remove_stale_arenas
from dataplane.protocol.stream import TransferFailedError
from schemas.handoff import Endpoint
from tests.plane.harness import DEADLINE_S, ON_GPU, Holder, Target, name_of, random_kv, running
from tests.waiting import wait_until


class HolderProcess:
    def __init__(self, param: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.plane.holder_process", param],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        self.endpoint = msgspec.json.decode(self.hear(), type=Endpoint)
        self.ticket = self.hear()

    def hear(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        assert line, "the holder has died"
        return line

    def do(self, command: str) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        return self.hear()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        self._process.communicate("exit\n" if self._process.poll() is None else None, timeout=DEADLINE_S)


@pytest.fixture(params=["shm", "tcp", "card>card:tcp", "card>host:tcp", "host>card:tcp", "card>card:cuda", *ON_GPU])
def carrier(request: pytest.FixtureRequest) -> str:
    return name_of(request.param)


@pytest.fixture
def process(carrier: str, request: pytest.FixtureRequest) -> Iterator[HolderProcess]:
    process = HolderProcess(request.node.callspec.params["carrier"])
    yield process
    process.close()


def read(
    target: Target, process: HolderProcess, carrier: str, on_started: Callable[[str], None] = lambda _: None
) -> Landed:
    request = target.request(process.endpoint, process.ticket, carrier, 300)
    return target.reader.read_blocking(request, on_started=on_started)


def test_streams_between_processes(carrier: str, process: HolderProcess, target: Target) -> None:
    landed: list[Landed] = []
    started = threading.Event()
    with running(lambda: landed.append(read(target, process, carrier, lambda _: started.set()))):
        process.do("compute 0 40")
        assert started.wait(DEADLINE_S)
        process.do("compute 40 300")
        process.do("finish seven")
    assert landed[0].trailer == b"seven"
    assert np.array_equal(target.landed(300), random_kv(300))
    assert process.do("outcome") == "served"


def test_auto_finds_the_other_process_s_arena(process: HolderProcess, carrier: str, target: Target) -> None:
    process.do("compute 0 300")
    process.do("finish x")
    assert read(target, process, "auto").stats.carrier == carrier


def test_holder_killed_in_mid_stream(carrier: str, process: HolderProcess, target: Target) -> None:
    started = threading.Event()
    errors: list[TransferFailedError] = []

    def attempt() -> None:
        with pytest.raises(TransferFailedError) as raised:
            read(target, process, carrier, lambda _: started.set())
        errors.append(raised.value)

    with running(attempt):
        process.do("compute 0 40")
        assert started.wait(DEADLINE_S)
        process.kill()
    assert errors[0].code == "closed"
    assert errors[0].num_landed_tokens <= 40
    landed = errors[0].num_landed_tokens
    assert np.array_equal(target.landed(landed), random_kv(300)[:, :, :landed])
    with pytest.raises(TransferFailedError) as raised:  # and nobody is there any more
        read(target, process, carrier)
    assert raised.value.code == "connect"
    remove_stale_arenas()
    wait_until(lambda: not (SHM_DIR / process.endpoint.arena).exists())  # a process beside this one may be at it


def test_reader_killed_in_mid_stream(
    carrier: str, holder: Holder, target: Target, request: pytest.FixtureRequest
) -> None:
    """The holder hears of it, keeps nothing for the dead, and serves the next one."""
    holder.compute(40, end=40)
    arguments = [request.node.callspec.params["carrier"], msgspec.json.encode(holder.endpoint).decode()]
    reader = subprocess.Popen(
        [sys.executable, "-m", "tests.plane.reader_process", *arguments, holder.ticket()],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert reader.stdout is not None
    with reader.stdout:
        assert reader.stdout.readline() == "started\n"
        reader.kill()
        reader.wait(DEADLINE_S)
    holder.compute(64, start=40)
    stats, outcome = holder.gate.wait_outcome()
    assert outcome.startswith("the reader has gone") and stats.num_frames
    holder.progress.complete(b"later")
    assert target.read_from(holder, carrier).trailer == b"later"
    assert np.array_equal(target.landed(300), holder.kv)
    remove_stale_arenas()
