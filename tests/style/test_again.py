"""Who is tried again, and what a run comes to then: a run of pytest inside a test."""

import subprocess
import sys
from pathlib import Path

TESTS = """
import pathlib, pytest
from tests.promises import same_tokens

def before(name):
    path = pathlib.Path(__file__).with_name(name)
    was_there = path.exists()
    path.touch()
    return was_there

@pytest.fixture
def slow_start():
    assert before("slow start"), "too slow"

def test_good(): pass
def test_flaky(): assert before("flaky"), "the first line\\nthe second"
def test_flaky_start(slow_start): pass
def test_fails(): assert False, "always"
def test_promise():
    if not before("promise"):
        raise ExceptionGroup("of tasks", [AssertionError("first"), wrong_token()])

def wrong_token():
    try:
        same_tokens([1], [2])
    except AssertionError as error:
        return error
"""


def run(folder: Path, chosen: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_some.py").write_text(TESTS)
    (folder / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-p", "xdist", "-p", "tests.again", "--again", "-n", "2", "-k", chosen]
    env = {"PYTHONPATH": str(Path(__file__).parents[2]), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # some take seconds
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=120, check=False)


def test_what_passes_alone_is_named_and_fails_nothing(tmp_path: Path) -> None:
    done = run(tmp_path, "good or flaky")
    assert done.returncode == 0, done.stdout
    assert "flaky: test_some.py::test_flaky: AssertionError: the first line\n" in done.stdout
    assert "flaky: test_some.py::test_flaky_start: AssertionError: too slow\n" in done.stdout
    assert "1 passed, 2 flaky in" in done.stdout


def test_what_fails_twice_and_a_broken_promise_fail(tmp_path: Path) -> None:
    done = run(tmp_path, "good or fails or promise")
    assert done.returncode == 1
    assert "not tried again, a promise was broken: test_some.py::test_promise" in done.stdout
    assert "2 failed, 1 passed in" in done.stdout and "flaky:" not in done.stdout
