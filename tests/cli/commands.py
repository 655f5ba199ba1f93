"""`kvmesh` as a user runs it, for tests: in this process, or in one of its own."""

import contextlib
import io
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from dataplane.memory.arena import SHM_DIR
from services.cli import app
from services.ending import EXIT_CODE
from tests.waiting import wait_until

KVMESH = [sys.executable, "-m", "services.cli.main"]
AS_PROCESS_1 = ("unshare", "--map-root-user", "--pid", "--fork", "--kill-child")
"""As in a container: for process 1 the kernel does not end what has no handler for a signal."""
ENDS_WITHIN_S = 10.0
"""Two seconds on an idle machine."""
QUESTION = "The code of Ada Brook is 7412. The code of Max Reed is 3055. Q: What is the code of Ada Brook? A:"


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


def run_here(state_dir: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run in this process, which spares the seconds of a start: for commands that end by themselves."""
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    code = 0
    with (
        mock.patch.dict(os.environ, environment(state_dir)),
        mock.patch.object(sys, "argv", ["kvmesh", *arguments]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            app.run()
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    said, complained = (stream.buffer.getvalue().decode() for stream in (out, err))
    return subprocess.CompletedProcess(arguments, code, said, complained)


def assert_one_line(result: "subprocess.CompletedProcess[str]", *words: str) -> None:
    assert result.returncode == 2, result
    lines = [line for line in result.stderr.splitlines() if line.strip()]
    assert len(lines) == 1 and lines[0].startswith("error: "), result.stderr
    for word in words:
        assert word in lines[0], lines[0]


def fill(folder: Path) -> Path:
    """Fill a file system, and return the file that does."""
    filling = folder / "filling"
    with contextlib.suppress(OSError), filling.open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    return filling


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


def arenas_of(pids: list[int]) -> list[Path]:
    return [path for pid in pids for path in Path("/dev/shm").glob(f"kvmesh-{pid}-*")]


def wait_until_gone(state_dir: Path) -> None:
    """After a kill the services notice by themselves; they take a moment."""
    wait_until(lambda: not our_processes(state_dir))


def may_be_process_1() -> bool:
    """Say whether a namespace of processes may be made here."""
    if shutil.which("unshare") is None:
        return False
    return not subprocess.run([*AS_PROCESS_1, "true"], capture_output=True, check=False).returncode


def child_of(pid: int) -> int:
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(child)


def end_as_it_starts(config: Path, after_s: float, *options: str) -> float:
    """Start a decode worker as process 1, tell it to end after so long, and return how long it took to."""
    command = [*AS_PROCESS_1, *KVMESH, "serve", "decode", "--id", "decode-9", "--config", str(config), *options]
    before = set(SHM_DIR.glob("kvmesh-1-*"))
    with subprocess.Popen(command, text=True) as unshare:
        with contextlib.suppress(subprocess.TimeoutExpired):
            raise AssertionError(f"it ended by itself: {unshare.wait(after_s)}")
        told_s = time.monotonic()
        os.kill(child_of(unshare.pid), signal.SIGTERM)
        assert unshare.wait(60) in (0, EXIT_CODE)
    assert set(SHM_DIR.glob("kvmesh-1-*")) <= before
    return time.monotonic() - told_s
