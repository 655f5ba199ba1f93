"""Starts engines' processes, as their worker has them; some before they are needed, so that whose engine dies has the
next one at once."""

import contextlib
import logging
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable

from dataplane.lasting import lasting_thread
from dataplane.machine import own_bytes
from services.engine.channel import Channel, IpcError
from services.engine.ipc import EngineReady, EngineRefused, FromProcess, LoadEngine, StepTable, table_memory
from services.engine.limits import CLOSE_LOOK_S, LOAD_MIN_S, LOAD_TIMES, SPARE_LOOK_S
from services.engine.starter import ForkedEngine
from services.errors import UserError
from services.restarts import Restarts

log = logging.getLogger(__name__)

Fork = Callable[[str, tuple[int, int, int]], ForkedEngine]
"""`EngineStarter.fork_engine`."""


class EngineChild:
    """An engine's process, as its worker has it."""

    def __init__(self, order: LoadEngine, name: str, fork: Fork) -> None:
        """Start it. Raises OSError where there is no process or descriptor to be had."""
        self.ready_ms = self.num_bytes = 0
        """What it took to be ready, and the memory that it has of its own, once it is."""
        self._ready: EngineReady | None = None
        self._started_s = time.monotonic()
        num_layers = order.shape.layout.num_layers
        with contextlib.ExitStack() as kept, contextlib.ExitStack() as given:
            bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            kept.callback(os.close, bell)
            table = table_memory(num_layers)
            given.callback(os.close, table)
            ours, theirs = socket.socketpair()
            kept.enter_context(ours)
            given.enter_context(theirs)
            self.table = StepTable(table, num_layers)
            self.process = fork(name, (theirs.fileno(), table, bell))
            kept.pop_all()
        self.channel: Channel[FromProcess] = Channel(ours, bell, FromProcess)
        self.channel.send_message(order)

    @property
    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def end_child(self) -> None:
        """Kill it, and let go of the way to it."""
        self.kill_process()
        self.channel.close()

    def kill_process(self) -> None:
        """End it, and wait until it has: nothing of it writes any more. Idempotent."""
        self.process.kill()
        self.process.wait()

    def wait_ready(self, timeout_s: float = math.inf) -> EngineReady:
        """Return what it reports of itself once it is ready. Raises UserError where it will not be: it has ended, or
        takes more than `timeout_s` from its start, and is ended."""
        if self._ready is not None:
            return self._ready
        # The starter may still be importing: the time until it forks counts towards `timeout_s`.
        self.process.wait_forked(timeout_s)
        try:
            while True:
                # The bell may end a wait without a message, so the time that is left is computed for each wait.
                left_s = self._started_s + timeout_s - time.monotonic()
                if left_s <= 0:
                    raise UserError(f"the engine's process has not loaded the model within {timeout_s:.0f} s")
                for message in self.channel.wait_messages(None if timeout_s == math.inf else left_s):
                    if isinstance(message, EngineRefused):
                        raise UserError(message.reason)
                    assert isinstance(message, EngineReady), "it says nothing else first"
                    # Measure load time and memory: from the first engine's time follows how long others may load.
                    self.ready_ms = round(1000 * (time.monotonic() - self._started_s))
                    self.num_bytes = own_bytes(self.process.pid)
                    self._ready = message
                    return message
        except BaseException as error:
            # Leave no process behind. Take the exit code of one that ended by itself before `end_child`, whose kill
            # would hide it.
            code = self.process.wait() if isinstance(error, EOFError) else None
            self.end_child()
            if code is not None:
                raise UserError(f"the engine's process {ending(code)} while it loaded the model") from error
            if isinstance(error, IpcError):
                raise UserError(f"the engine's process sent what makes no sense: {error}") from error
            raise


def ending(code: int) -> str:
    """Return how a process has ended, for people."""
    if code >= 0:
        return f"ended with code {code}"
    hint = ", as the kernel does where memory is short" if -code == signal.SIGKILL else ""
    return f"was killed by {signal.Signals(-code).name}{hint}"


class SpareEngines:
    """Keeps `number` processes loaded, with nothing to do, by a thread of its own; none where `number` is 0. Each is
    started only while `has_room` finds memory for one more."""

    def __init__(
        self,
        start_child: Callable[[], EngineChild],
        number: int,
        has_room: Callable[[], bool],
        close_starter: Callable[[], None],
    ) -> None:
        self._start_child = start_child
        self._number = number
        self._has_room = has_room
        self._close_starter = close_starter
        self._load_s = LOAD_MIN_S
        """What an engine takes to load."""
        self._changed = threading.Condition()
        """Of what follows."""
        self._ready: list[EngineChild] = []
        self._loading: EngineChild | None = None
        self._is_closed = False
        self._thread = lasting_thread(self._keep_ready, "spares", lambda: self._is_closed)

    def keep_loaded(self, load_s: float) -> None:
        """Begin to. `load_s`: what the engine that runs has taken to load."""
        self._load_s = max(LOAD_MIN_S, load_s)
        if self._number:
            self._thread.start()

    def next_child(self) -> EngineChild:
        """Return one that is loaded, or the one that is being loaded once it is, for which nobody waits longer than an
        engine takes to load; where there is neither, a new one. Raises OSError."""
        with self._changed:
            self._changed.wait_for(lambda: self._loading is None or self._ready, self._load_s)
            self._end_dead()
            if self._ready:
                self._changed.notify_all()
                return self._ready.pop(0)
        return self._start_child()

    @property
    def max_load_s(self) -> float:
        """An engine that takes longer to load hangs."""
        return LOAD_TIMES * self._load_s

    def count_loaded(self) -> tuple[int, int]:
        """Return how many are loaded, and the bytes of memory that they have of their own."""
        with self._changed:
            return len(self._ready), sum(child.num_bytes for child in self._ready)

    def close(self) -> None:
        """End all, and what starts them. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._close_starter()
        while self._thread.is_alive():
            if (loading := self._loading) is not None:
                loading.kill_process()
            self._thread.join(CLOSE_LOOK_S)
        with self._changed:
            for child in self._ready:
                child.end_child()
            self._ready.clear()

    # On the thread.

    def _keep_ready(self) -> None:
        restarts, is_short = Restarts(), False
        while self._is_wanted():
            if not self._has_room():
                if not is_short:
                    log.warning("there is no memory for a spare engine; it is started once there is")
                is_short = True
                self._pause(SPARE_LOOK_S)
                continue
            is_short, started_s = False, time.monotonic()
            if (error := self._load_one()) is not None:
                log.error("a spare engine does not start: %s", error)
                self._pause(restarts.ended(started_s, time.monotonic()))

    def _is_wanted(self) -> bool:
        """Wait until one is lacking. False: none is wanted any more."""
        with self._changed:
            while not self._is_closed and len(self._ready) >= self._number:
                self._changed.wait(SPARE_LOOK_S)
                self._end_dead()
            return not self._is_closed

    def _load_one(self) -> Exception | None:
        try:
            child, error = self._start_child(), None
        except OSError as failed:
            return failed
        with self._changed:
            self._loading = child
        try:
            child.wait_ready(self.max_load_s)
        except UserError as failed:
            error = failed
        with self._changed:
            self._loading = None
            if error is None:
                self._ready.append(child)
            self._changed.notify_all()
        return error

    def _pause(self, for_s: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed, for_s)

    def _end_dead(self) -> None:
        for child in [child for child in self._ready if child.has_ended]:
            log.warning("a spare engine has ended; another one is started")
            self._ready.remove(child)
            child.end_child()
