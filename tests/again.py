"""`pytest --again`: a test that failed runs once more, alone, behind the rest; what passes then is named as flaky.

Tried again: as many tests as chance may have failed, each in a process of its own once every other test has ended. Not
tried again: a broken promise (tests/promises.py), a file that cannot be collected, and failures too many for chance.
"""

import subprocess
import sys
from collections.abc import Generator

import pytest

from tests.promises import is_broken_promise

MAX_TRIED_AGAIN = 10
LIMIT_S = 600.0
BROKEN_PROMISE = "promise_broken"
"""This attribute of a report goes from a test process to the one that reports."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--again", action="store_true", help="a test that failed runs once more, alone, behind the rest")


@pytest.hookimpl(trylast=True)  # the terminal's reporter is there then
def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--again") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(OnceMore(config.pluginmanager.getplugin("terminalreporter")))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(call: pytest.CallInfo[None]) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Let a report say whether its failure is a broken promise."""
    report = yield
    if call.excinfo is not None and is_broken_promise(call.excinfo.value):
        setattr(report, BROKEN_PROMISE, True)
    return report


class OnceMore:
    """Collects the failures of a run, and tries them again at its end."""

    def __init__(self, terminal: pytest.TerminalReporter) -> None:
        self._terminal = terminal
        self._failures: dict[str, list[pytest.TestReport]] = {}
        self._flaky: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failures.setdefault(report.nodeid, []).append(report)

    # Innermost: behind the end of all test processes, before the terminal's summary.
    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> Generator[None, None, None]:
        yield
        if exitstatus == pytest.ExitCode.TESTS_FAILED and not session.shouldstop:
            self._try_again(session)

    def pytest_terminal_summary(self) -> None:
        for line in self._flaky:
            self._terminal.write_line(line, yellow=True)

    def _try_again(self, session: pytest.Session) -> None:
        if len(self._failures) > MAX_TRIED_AGAIN:
            self._terminal.write_line(f"{len(self._failures)} tests failed: too many for chance, none is tried again")
            return
        for test, failures in list(self._failures.items()):
            if any(hasattr(report, BROKEN_PROMISE) for report in failures):
                self._terminal.write_line(f"not tried again, a promise was broken: {test}", red=True)
            elif passes_alone(test):
                self._flaky.append(f"flaky: {test}: {first_line(failures[0])}")
                self._take_back(test, failures)
                session.testsfailed -= len(failures)
        if not session.testsfailed:
            session.exitstatus = pytest.ExitCode.OK

    def _take_back(self, test: str, failures: list[pytest.TestReport]) -> None:
        """Let the summary count a test as flaky in place of failed."""
        stats = self._terminal.stats
        for outcome in ("failed", "error"):
            stats[outcome] = [report for report in stats.get(outcome, []) if report not in failures]
        stats.setdefault("flaky", []).append(failures[0])
        del self._failures[test]


def passes_alone(test: str) -> bool:
    """Run one test in a process of its own; what it says is shown where it fails again."""
    command = [sys.executable, "-m", "pytest", "-p", "no:xdist", "-p", "no:cacheprovider", "-q", test]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        print(f"{test} has not ended within {LIMIT_S:.0f} s")
        return False
    has_passed = done.returncode == pytest.ExitCode.OK and "1 passed" in done.stdout
    if not has_passed:
        print(done.stdout[-8_000:], done.stderr[-2_000:])
    return has_passed


def first_line(report: pytest.TestReport) -> str:
    """Return what a failure said, as the summary does."""
    crash = getattr(report.longrepr, "reprcrash", None)
    said = crash.message if crash is not None else str(report.longrepr)
    return said.strip().partition("\n")[0]
