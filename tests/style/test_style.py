"""Rules that no linter has: one owner each for the environment and for tasks outside a group."""

import re
from pathlib import Path

ROOTS = ("schemas", "dataplane", "services")


def lines_with(pattern: str) -> set[str]:
    found = set[str]()
    for root in ROOTS:
        for path in Path(root).rglob("*.py"):
            if re.search(pattern, path.read_text()):
                found.add(path.as_posix())
    return found


def test_the_environment_is_read_in_one_place() -> None:
    assert lines_with(r"os\.environ|getenv\(") == {"services/config.py"}


TASKS_OUTSIDE_A_GROUP = {
    "services/bus/nats.py",
    "services/launch/restart.py",
    "services/launch/serve.py",
    "services/launch/supervisor.py",
    "services/runtime.py",
    "services/sim/faults.py",
    "services/worker/kv/borrow.py",
}
"""Here tasks are cancelled and awaited by hand; everywhere else a group ends with its tasks."""


def test_tasks_outside_a_group_are_in_few_files() -> None:
    found = lines_with(r"asyncio\.(create_task|ensure_future)\(|get_running_loop\(\)\.create_task\(")
    assert found <= TASKS_OUTSIDE_A_GROUP


def test_no_pickle_no_eval() -> None:
    assert lines_with(r"\bpickle\b|(?<![.\w])eval\(|(?<![.\w])exec\(|shell=True") == set()


def test_files_stay_readable() -> None:
    """A screen or three; a longer file is a second thing waiting to be named."""
    long = {
        path.as_posix(): lines
        for root in ROOTS
        for path in Path(root).rglob("*.py")
        if (lines := path.read_text().count("\n")) > 420
    }
    assert not long
