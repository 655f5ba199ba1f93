"""Threads that take turns on an event loop. Code that blocks, as the data plane's and the engine's does, runs
unchanged.

Each thread is a greenlet. While one waits the loop runs; nothing else interrupts a thread. On a loop with virtual time
waiting takes no real time. The loop sees a thread as callbacks in the context in which it was made.
"""

import asyncio
import contextvars
import logging
import time
from collections.abc import Callable
from typing import Self
from weakref import WeakKeyDictionary

from greenlet import GreenletExit, getcurrent, greenlet

log = logging.getLogger(__name__)

_FOREVER = float("inf")

_living: "WeakKeyDictionary[asyncio.AbstractEventLoop, dict[CoThread, None]]" = WeakKeyDictionary()
"""Threads are kept until they end: the collector would unwind a waiting one at a time that no seed decides."""


class NotAThreadError(RuntimeError):
    """Code outside a cooperative thread tried to wait."""


class CoThread:
    """One thread on the loop on which it is started. Like `threading.Thread`, with `wake` and `pause`."""

    def __init__(self, run: Callable[[], None], name: str, context: contextvars.Context | None = None) -> None:
        self.name = name
        self._context = contextvars.copy_context() if context is None else context.copy()
        self._greenlet = _Greenlet(self, self._main)
        self._greenlet.gr_context = self._context
        self._run = run
        self._loop: asyncio.AbstractEventLoop | None = None
        self._hub: greenlet | None = None
        self._is_waiting = False
        self._is_woken = False
        self._until = _FOREVER
        self._timer: asyncio.TimerHandle | None = None
        self._ended = False
        self._ended_condition = CoCondition()
        self._abandoned = False

    def __repr__(self) -> str:
        return f"<cooperative thread {self.name}>"

    def is_alive(self) -> bool:
        """It was started and has not ended."""
        return self._loop is not None and not self._ended

    def start(self) -> None:
        """Run as soon as the loop gets to it."""
        assert self._loop is None, "a thread is started once"
        loop = self._loop = asyncio.get_running_loop()
        _living.setdefault(loop, {})[self] = None
        self._is_waiting = True
        self.wake()

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end where this is called in a cooperative thread; on the loop itself return at once."""
        deadline = _FOREVER if timeout is None else time.monotonic() + timeout
        while self.is_alive() and is_thread() and (remaining := deadline - time.monotonic()) > 0:
            self._ended_condition.wait(None if timeout is None else remaining)

    def wake(self) -> None:
        """End its `pause`. Does nothing if it does not wait."""
        if self._is_waiting and not self._is_woken:
            assert self._loop is not None
            if self._loop.is_closed():
                return
            self._is_woken = True
            self._loop.call_soon(self._resume, context=self._context)

    def wake_at(self, when_s: float) -> None:
        """End its `pause` at this time of the loop, if it still waits then."""
        assert self._loop is not None
        if self._is_waiting and when_s < self._until and not self._loop.is_closed():
            self._until = when_s
            self._arm()

    def pause(self, timeout_s: float | None) -> bool:
        """See `pause`. Only for the thread itself."""
        if self._abandoned:
            raise GreenletExit
        assert self._loop is not None and self._hub is not None
        self._until = _FOREVER if timeout_s is None else self._loop.time() + max(0.0, timeout_s)
        self._is_waiting = True
        self._arm()
        self._hub.switch()
        woken, self._is_woken = self._is_woken, False
        return woken

    def abandon(self) -> None:
        """Unwind it where it stands. Not for a thread that runs."""
        self._abandoned = True
        self._is_waiting = False
        if self._timer is not None:
            self._timer.cancel()
        if self._hub is None:
            self._forget()  # it never ran
            return
        self._greenlet.parent = getcurrent()
        self._greenlet.throw(GreenletExit)

    def _arm(self) -> None:
        """Set the timer for `_until` or earlier. One that fires too early is set again then."""
        timer = self._timer
        if self._until == _FOREVER or (timer is not None and timer.when() <= self._until):
            return
        if timer is not None:
            timer.cancel()
        assert self._loop is not None
        self._timer = self._loop.call_at(self._until, self._ring, context=self._context)

    def _ring(self) -> None:
        timer, self._timer = self._timer, None
        if not self._is_waiting or self._is_woken or timer is None:
            return
        if timer.when() >= self._until:
            self._switch()
        else:
            self._arm()

    def _resume(self) -> None:
        if self._is_waiting:
            self._switch()

    def _switch(self) -> None:
        self._is_waiting = False
        hub = getcurrent()
        if hub is not self._hub:
            self._hub = self._greenlet.parent = hub
        self._greenlet.switch()

    def _main(self) -> None:
        self._is_woken = False
        try:
            self._run()
        except GreenletExit:
            pass
        except BaseException:
            log.exception("the thread %s failed", self.name)
        finally:
            self._forget()

    def _forget(self) -> None:
        self._ended = True
        if self._timer is not None:
            self._timer.cancel()
        if self._loop is not None:
            _living.get(self._loop, {}).pop(self, None)
        self._ended_condition.notify_all()


class _Greenlet(greenlet):
    """Refers to its thread."""

    def __init__(self, thread: CoThread, run: Callable[[], None]) -> None:
        super().__init__(run)
        self.thread = thread


def spawn(run: Callable[[], None], name: str, context: contextvars.Context | None = None) -> CoThread:
    """Start a thread on the running loop, in `context` or a copy of the present one."""
    thread = CoThread(run, name, context)
    thread.start()
    return thread


def current() -> CoThread:
    """Return the running thread. Raises NotAThreadError."""
    now = getcurrent()
    if not isinstance(now, _Greenlet):
        raise NotAThreadError("this code does not run in a cooperative thread")
    return now.thread


def is_thread() -> bool:
    """Return whether a cooperative thread runs."""
    return isinstance(getcurrent(), _Greenlet)


def pause(timeout_s: float | None) -> bool:
    """Wait until this thread is woken (True) or the time is over (False). Everything else runs meanwhile."""
    return current().pause(timeout_s)


def now_s() -> float:
    """Return the simulation's own time, by which what happens between processes goes: each has clocks of its own."""
    return asyncio.get_running_loop().time()


def living(loop: asyncio.AbstractEventLoop) -> list[CoThread]:
    """Return the threads of a loop that have not ended."""
    return list(_living.get(loop, {}))


def abandon_all(loop: asyncio.AbstractEventLoop) -> None:
    """End all threads of a loop that has stopped: those of killed processes would never end."""
    for thread in living(loop):
        thread.abandon()
    _living.pop(loop, None)


def abandon_closed() -> None:
    """End the threads of all loops that were closed."""
    for loop in [loop for loop in _living if loop.is_closed()]:
        abandon_all(loop)


class CoCondition:
    """Like `threading.Condition`, for threads of one loop. Its lock does nothing: no thread may pause while it holds
    it, but in `wait`."""

    def __init__(self) -> None:
        self._waiting: dict[CoThread, None] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def wait(self, timeout: float | None = None) -> bool:
        """Return whether it was notified in time. May also return early."""
        thread = current()
        self._waiting[thread] = None
        try:
            return thread.pause(timeout)
        finally:
            self._waiting.pop(thread, None)

    def notify(self) -> None:
        self.notify_all()

    def notify_all(self) -> None:
        for thread in self._waiting:
            thread.wake()
