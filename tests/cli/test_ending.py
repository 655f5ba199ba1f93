"""SIGTERM before a service runs: the process ends, as process 1 too, whatever it does, and leaves no arena. Who started
it knows how it ended."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from dataplane.memory.arena import SHM_DIR
from services.ending import EXIT_CODE
from services.launch.restart import Child
from tests.cli.commands import AS_PROCESS_1, child_of, may_be_process_1

LIMIT_S = 60.0
START = """
import time
from services.ending import end_on_signal
end_on_signal()
from dataplane.memory.arena import Arena
arena = Arena.create_bytes(4096)
print(arena.name, flush=True)
"""
RUNS = "while True: pass"
"""The exception of the handler ends it."""
HEARS_NOTHING = """
while True:
    try:
        time.sleep(60)
    except BaseException:
        pass
"""
"""As a library that runs for long: only the thread ends it."""


@contextlib.contextmanager
def started(*command: str) -> Iterator["subprocess.Popen[str]"]:
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("doing", [RUNS, HEARS_NOTHING])
def test_a_signal_ends_what_has_not_begun_to_serve(doing: str) -> None:
    with started(sys.executable, "-c", START + doing) as process:
        assert process.stdout is not None
        arena = SHM_DIR / process.stdout.readline().strip()
        assert arena.exists()
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT_S) == EXIT_CODE
        assert not arena.exists()


@pytest.mark.skipif(not may_be_process_1(), reason="no namespace of processes may be made here")
@pytest.mark.parametrize("doing", [RUNS, HEARS_NOTHING])
def test_a_signal_ends_process_1(doing: str) -> None:
    with started(*AS_PROCESS_1, sys.executable, "-c", START + doing) as unshare:
        assert unshare.stdout is not None
        arena = SHM_DIR / unshare.stdout.readline().strip()
        assert arena.name.startswith("kvmesh-1-")
        os.kill(child_of(unshare.pid), signal.SIGTERM)
        assert unshare.wait(LIMIT_S) == EXIT_CODE
        assert not arena.exists()


async def test_a_signal_at_its_end_takes_no_code_from_who_waits_for_it() -> None:
    for _ in range(5):
        child = Child("decode", "decode-0", await asyncio.create_subprocess_exec("sleep", "60"), 0.0)
        for _ in range(2_000):  # it ends meanwhile, and the loop does not run: nobody here knows it yet
            child.kill()
        await child.wait_ended()
        assert child.describe_end() == "decode-0 was killed by signal 9"
