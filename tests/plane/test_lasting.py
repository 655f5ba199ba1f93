"""What goes on for as long as its process lives: whatever fails it is said, and tried again."""

import asyncio
import logging
import os
import signal
import threading

import pytest

from dataplane import lasting as module
from dataplane.lasting import lasting, lasting_task, lasting_thread

TIMEOUT_S = 60.0


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The signals that this process has sent itself."""
    sent: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append(number))
    return sent


def fails(tries: list[int]) -> None:
    """Fail three times, each time otherwise, then succeed."""
    tries.append(len(tries))
    if len(tries) <= 3:
        raise (OSError("no descriptor"), RuntimeError("can't start new thread"), KeyError("x"))[len(tries) - 1]


def test_a_thread_tries_again_whatever_fails(caplog: pytest.LogCaptureFixture) -> None:
    tries, done = list[int](), threading.Event()

    def work() -> None:
        fails(tries)
        done.set()

    thread = lasting_thread(work, "busy", done.is_set)
    thread.start()
    thread.join(TIMEOUT_S)
    assert not thread.is_alive() and len(tries) == 4
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 3 and all("\n" not in line and line.startswith("the thread busy has failed") for line in lines)
    assert "RuntimeError: can't start new thread, test_lasting.py:" in lines[1]


def test_a_thread_that_ends_by_itself_is_begun_again(caplog: pytest.LogCaptureFixture) -> None:
    tries: list[int] = []
    thread = lasting_thread(lambda: tries.append(0), "busy", lambda: len(tries) == 2)
    thread.start()
    thread.join(TIMEOUT_S)
    assert len(tries) == 2 and "has ended by itself" in caplog.text


def test_pauses_grow_and_begin_anew() -> None:
    tries = module.Tries("busy")
    tries.begin()
    pauses = [tries.pause_after(None) for _ in range(16)]
    assert pauses[:3] == [0.1, 0.2, 0.4] and pauses[-1] == module.LONGEST_PAUSE_S
    tries._began_s -= module.SOUND_AFTER_S
    assert tries.pause_after(None) == module.FIRST_PAUSE_S


def test_a_mistake_of_ours_ends_the_process(ended: list[int], caplog: pytest.LogCaptureFixture) -> None:
    def work() -> None:
        raise AssertionError

    thread = lasting_thread(work, "busy", lambda: False)
    thread.start()
    thread.join(TIMEOUT_S)
    assert ended == [signal.SIGTERM] and caplog.records[-1].levelno == logging.CRITICAL


async def test_work_tries_again_until_it_ends(caplog: pytest.LogCaptureFixture) -> None:
    tries: list[int] = []

    async def work() -> None:
        fails(tries)

    await lasting(work, "work")
    assert len(tries) == 4 and "work has failed (KeyError: 'x'" in caplog.text


async def test_who_awaits_work_hears_of_a_mistake_and_a_task_ends_the_process(ended: list[int]) -> None:
    async def work() -> None:
        raise AssertionError

    with pytest.raises(AssertionError):
        await lasting(work, "work")
    assert not ended
    await lasting_task(work, "work")
    assert ended == [signal.SIGTERM]


async def test_a_task_is_cancelled() -> None:
    task = lasting_task(asyncio.Event().wait, "wait")  # type: ignore[arg-type]
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
