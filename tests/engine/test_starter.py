"""The process that forks engines: what of it its workers see."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from services.engine import starter as starters
from services.engine.starter import EngineStarter, ForkedEngine
from tests.waiting import wait_until

NAME = "decode-0"
TIMEOUT_S = 60.0


class Ordered:
    """An engine's process and its worker's ends."""

    def __init__(self, starter: EngineStarter) -> None:
        with ExitStack() as given:
            self.ours, theirs = socket.socketpair()
            given.enter_context(theirs)
            table, bell = os.memfd_create("table"), os.eventfd(0)
            given.callback(os.close, table)
            given.callback(os.close, bell)
            self.process: ForkedEngine = starter.fork_engine(NAME, (theirs.fileno(), table, bell))

    def await_pid(self) -> int:
        self.process.wait_forked(TIMEOUT_S)
        return self.process.pid

    def close(self) -> None:
        self.ours.close()
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def shared() -> Iterator[EngineStarter]:
    starter = EngineStarter("transformers", num_threads=1)
    yield starter
    starter.close()


@pytest.fixture
def ordered(shared: EngineStarter) -> Iterator[Ordered]:
    made = Ordered(shared)
    assert made.await_pid()
    yield made
    made.close()


def state_of(pid: int) -> str:
    """Return the state (proc_pid_stat(5)), or "" where there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return ""


def open_in(pid: int) -> list[str]:
    """Return what a process has open besides the standard streams, without numbers."""
    targets: list[str] = []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        # One that closes between the listing and its turn is not open.
        with contextlib.suppress(FileNotFoundError):
            targets += [str(path.readlink())] if int(path.name) > 2 else []
    return [re.sub(r"\d", "", target).lstrip("/") for target in targets]


def test_an_engine_is_its_worker_s_by_name_and_takes_nothing_of_its_share_of_the_processors(ordered: Ordered) -> None:
    pid = ordered.process.pid
    wait_until(lambda: Path(f"/proc/{pid}/comm").read_text() == f"{NAME} engine\n")
    assert os.getsid(pid) == pid != os.getsid(0)
    own_bell = "anon_inode:[eventfd]"
    wait_until(lambda: sorted(open_in(pid)) == [own_bell, own_bell, "memfd:table (deleted)", "socket:[]"])


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_how_it_was_ended_is_reported(ordered: Ordered, number: int) -> None:
    os.kill(ordered.process.pid, number)
    assert ordered.process.wait() == -number == ordered.process.poll()


def test_its_exit_code_is_reported(ordered: Ordered) -> None:
    ordered.ours.close()  # it has nobody to compute for before it was told what
    assert ordered.process.wait() == 1
    ordered.process.kill()


def test_two_have_nothing_of_each_other(shared: EngineStarter, ordered: Ordered) -> None:
    other = Ordered(shared)
    assert other.await_pid() != ordered.process.pid
    other.close()
    assert other.process.poll() == -signal.SIGKILL and ordered.process.poll() is None


def test_one_that_is_given_up_before_it_is_forked_never_is(shared: EngineStarter) -> None:
    os.kill(_pid_of(shared), signal.SIGSTOP)
    orders = [Ordered(shared) for _ in range(2)]
    orders[0].process.kill()
    assert orders[0].process.wait() == -signal.SIGKILL and orders[0].process.pid == 0
    os.kill(_pid_of(shared), signal.SIGCONT)
    assert (second := orders[1].await_pid()) > 0
    children = Path(f"/proc/{_pid_of(shared)}/task/{_pid_of(shared)}/children").read_text().split()
    assert children == [str(second)]
    for order in orders:
        order.close()


@pytest.mark.parametrize("is_inherited", [False, True])
def test_engines_outlive_what_has_forked_them_and_the_next_is_forked_by_another(
    is_inherited: bool, caplog: pytest.LogCaptureFixture
) -> None:
    starter = EngineStarter("transformers", num_threads=1)
    before = Ordered(starter)
    assert before.await_pid()
    os.kill(first := _pid_of(starter), signal.SIGKILL)
    wait_until(lambda: state_of(first) == "Z")
    assert before.process.poll() is None and state_of(before.process.pid) != ""
    with ExitStack() as opened:
        opened.callback(starter.close)
        if is_inherited:
            inherited = EngineStarter("transformers", num_threads=1, inherited=os.dup(starter.orders))
            opened.callback(inherited.close)
            after = Ordered(inherited)
        else:
            after = Ordered(starter)
            assert "another one is started" in caplog.text
        assert after.await_pid() > 0 and _pid_of(starter) != first
        before.process.kill()
        assert before.process.wait() == starters.NOBODY_KNOWS
        after.close()
        before.close()


WORKER = """
import signal, sys
from services.engine.starter import EngineStarter
from tests.engine.test_starter import Ordered, _pid_of
starter = EngineStarter("transformers", 1, inherited=int(sys.argv[1]) if sys.argv[1:] else None)
order = Ordered(starter)
print(order.await_pid(), *([] if sys.argv[1:] else [_pid_of(starter)]), flush=True)
signal.pause()
"""


@pytest.mark.parametrize("is_shared", [True, False])
def test_an_engine_that_stands_still_ends_with_its_worker(shared: EngineStarter, is_shared: bool) -> None:
    """So does what has forked it, where nobody else can order."""
    command = [sys.executable, "-c", WORKER, *([str(shared.orders)] if is_shared else [])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, pass_fds=[shared.orders]) as worker:
        assert worker.stdout is not None
        engine, *starter = map(int, worker.stdout.readline().split())
        os.kill(engine, signal.SIGSTOP)
        worker.kill()
    wait_until(lambda: not any(map(state_of, (engine, *starter))))
    assert state_of(_pid_of(shared)) not in ("Z", "")


def test_orders_leave_no_descriptor(shared: EngineStarter) -> None:
    num_ours = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(5):
        order = Ordered(shared)
        assert order.await_pid()
        order.close()
    assert len(list(Path("/proc/self/fd").iterdir())) == num_ours
    wait_until(lambda: sorted(open_in(_pid_of(shared))) == ["anon_inode:[eventpoll]", "socket:[]"])


def _pid_of(starter: EngineStarter) -> int:
    return starter._process.pid  # type: ignore[union-attr]
