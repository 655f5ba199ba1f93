"""What goes on for as long as its process lives. A try that fails, for whatever reason, is logged in a line, and there
is another one after a pause, which grows.

An assertion that fails is a mistake of ours and no failure: it ends the process, which is started again.
"""

import asyncio
import logging
import os
import signal
import threading
import time
from collections.abc import Awaitable, Callable
from traceback import extract_tb

log = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.1
"""After the first failure; doubled with each that follows."""
LONGEST_PAUSE_S = 5.0
SOUND_AFTER_S = 30.0
"""A try that has lasted for so long was a good one: its end counts as the first failure again."""


class Tries:
    """Those of one piece of work."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._pause_s = FIRST_PAUSE_S
        self._began_s = 0.0

    def begin(self) -> None:
        self._began_s = time.monotonic()

    def pause_after(self, error: Exception | None) -> float:
        """Log that a try has failed; None: it has ended, and was not to. Return how long to wait before the next."""
        if time.monotonic() - self._began_s >= SOUND_AFTER_S:
            self._pause_s = FIRST_PAUSE_S
        pause_s, self._pause_s = self._pause_s, min(LONGEST_PAUSE_S, 2 * self._pause_s)
        log.error("%s %s; it goes on in %.1f s", self._name, _described(error), pause_s)
        return pause_s


def lasting_thread(work: Callable[[], None], name: str, is_over: Callable[[], bool]) -> threading.Thread:
    """Return a thread, not started, that does `work`, and again until `is_over`. It ends with its process."""

    def run() -> None:
        tries = Tries(f"the thread {name}")
        while True:
            tries.begin()
            failure: Exception | None = None
            try:
                work()
            except AssertionError:
                return _end_process(name)
            except Exception as error:  # noqa: BLE001  (nobody else would notice)
                failure = error
            if is_over():
                return None
            time.sleep(tries.pause_after(failure))

    return threading.Thread(target=run, name=name, daemon=True)


async def lasting(work: Callable[[], Awaitable[None]], name: str) -> None:
    """Do `work` until it ends by itself, and again where it fails. Whoever awaits it, a group of tasks say, ends by an
    assertion that fails."""
    tries = Tries(name)
    while True:
        tries.begin()
        try:
            await work()
        except AssertionError:
            raise
        except Exception as error:  # noqa: BLE001  (nobody else would notice)
            await asyncio.sleep(tries.pause_after(error))
        else:
            return


def lasting_task(work: Callable[[], Awaitable[None]], name: str) -> "asyncio.Task[None]":
    """Do the same in a task that nobody awaits: whoever makes it cancels it."""

    async def run() -> None:
        try:
            await lasting(work, name)
        except AssertionError:
            _end_process(name)

    return asyncio.create_task(run(), name=name)


def _end_process(name: str) -> None:
    """Have this process leave in order."""
    log.critical("%s has met a mistake of ours: this process ends", name, exc_info=True)
    os.kill(os.getpid(), signal.SIGTERM)


def _described(error: Exception | None) -> str:
    if error is None:
        return "has ended by itself"
    where = extract_tb(error.__traceback__)[-1]
    return f"has failed ({type(error).__name__}: {error}, {where.filename.rpartition('/')[2]}:{where.lineno})"
