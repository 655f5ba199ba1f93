"""The thread that an engine runs on: it takes sequences, computes steps, and tells their results.

Every submitted sequence ends in exactly one way, told on the engine's thread: a step's SampledToken with `local_end`,
`on_failure`, or `on_removed`. Only then may its blocks be used for something else.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import NamedTuple, Protocol

from schemas.ids import RequestId
from schemas.worker import EngineLives
from services.engine.interface import (
    EngineCallbacks,
    EngineLoad,
    InvalidSequenceError,
    Sequence,
    StartGrammar,
    StepFailedError,
    Steps,
)
from services.metrics import library_text

log = logging.getLogger(__name__)


class EngineStoppedError(RuntimeError):
    """The engine's thread takes nothing any more."""


class Changes(Protocol):
    """What is used here of `threading.Condition`."""

    def __enter__(self) -> object: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...
    def wait(self, timeout: float | None = None) -> bool: ...
    def notify(self) -> None: ...


class CancelEntry(NamedTuple):
    """Take this sequence out."""

    request_id: RequestId
    attempt: int


class EngineThread:
    """Runs an engine's steps on one thread. `submit`, `cancel` and `engine_load` may be called from any thread.

    Callbacks run on the engine's thread between steps, so they must be quick; one that raises is logged.
    """

    def __init__(
        self,
        steps: Steps,
        start_grammar: StartGrammar,
        callbacks: EngineCallbacks,
    ) -> None:
        self.start_grammar = start_grammar
        self._steps = steps
        self._callbacks = callbacks
        self._changed = self._new_condition()
        self._inbox: deque[Sequence | CancelEntry] = deque()
        self._stopping = False
        self.has_failed = False
        """The thread has ended by itself, by a mistake of ours: nothing is computed here any more."""
        self._steps_load = steps.load()
        """What there was to do when it was last looked at."""
        self._thread: threading.Thread | None = None
        self.lives = EngineLives(num_starts=1)

    def start(self) -> None:
        # A daemon, so that a step that hangs cannot keep the process from ending.
        self._thread = threading.Thread(target=self.run_steps, name="engine", daemon=True)
        self._thread.start()

    def stop_engine(self, timeout: float) -> bool:
        """End after the running step, failing what is left. Say whether the thread ended within `timeout` seconds."""
        self._ask_to_stop()
        if self._thread is None:
            return True
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def close(self) -> None:
        """Let go of the arena's memory. Only once `stop_engine` has said that the thread has ended."""
        self._steps.close()

    def library_text(self, prefix: str) -> str:
        """Return what the engine's library has counted, of names that begin so, in Prometheus' text format."""
        return library_text(prefix)

    def submit(self, sequence: Sequence) -> None:
        """Put a sequence in line; from here on it is the engine thread's.

        Raises InvalidSequenceError when its tokens or tables cannot be right, EngineStoppedError after `stop_engine`.
        """
        self._steps.check(sequence)
        self._put(sequence)

    def cancel(self, request_id: RequestId, attempt: int) -> None:
        """Take a sequence out after the running step. `on_removed` tells when; nothing does if it has ended before.

        Raises EngineStoppedError after `stop_engine`.
        """
        self._put(CancelEntry(request_id, attempt))

    def engine_load(self) -> EngineLoad:
        """Return what there is to do, what has been submitted since then included."""
        with self._changed:
            num_running, num_queued, num_uncomputed = self._steps_load
            waiting = [entry for entry in self._inbox if isinstance(entry, Sequence)]
        num_uncomputed += sum(sequence.num_uncomputed_tokens for sequence in waiting)
        return EngineLoad(num_running, num_queued + len(waiting), num_uncomputed)

    def _ask_to_stop(self) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify()

    def _new_condition(self) -> Changes:
        """What `submit` and the thread tell each other by. The simulator has one of its own."""
        return threading.Condition()

    def _put(self, entry: Sequence | CancelEntry) -> None:
        with self._changed:
            if self._stopping:
                raise EngineStoppedError("the engine is stopping")
            self._inbox.append(entry)
            self._changed.notify()

    def run_steps(self) -> None:
        """Take sequences and compute until it is stopped, on this thread."""
        try:
            while self._take():
                self._step()
        except Exception:
            log.exception("the engine's thread has failed")
            self.has_failed = True
        self._end()

    def _take(self) -> bool:
        """Wait until there is something to do and empty the inbox. False: it is time to end."""
        with self._changed:
            self._steps_load = self._steps.load()
            while not (self._inbox or self._stopping or len(self._steps)):
                self._changed.wait()
            if self._stopping:
                return False
            entries = list(self._inbox)
            self._inbox.clear()
            refused: list[Sequence] = []
            removed = [sequence for entry in entries if (sequence := self._apply(entry, refused)) is not None]
            self._steps_load = self._steps.load()
        for sequence in removed:
            call_back(self._callbacks.on_removed, sequence)
        if refused:
            call_back(self._callbacks.on_failure, refused, "the engine does not take this sequence")
        return True

    def _apply(self, entry: Sequence | CancelEntry, refused: list[Sequence]) -> Sequence | None:
        """Add or remove; return what was removed. A sequence that is here already must not end everybody's engine."""
        if isinstance(entry, CancelEntry):
            return self._steps.remove(*entry)
        try:
            self._steps.add(entry)
        except InvalidSequenceError:
            log.exception("the engine does not take %s", entry.request_id)
            refused.append(entry)
        return None

    def _step(self) -> None:
        try:
            result = self._steps.run_step()
        except StepFailedError as error:
            log.exception("an engine step of %d sequences failed", len(error.sequences))
            call_back(self._callbacks.on_failure, error.sequences, str(error))
            if error.is_lost:
                raise
            return
        if result is not None:
            call_back(self._callbacks.on_step, result)

    def _end(self) -> None:
        with self._changed:
            self._stopping = True
            refused: list[Sequence] = []
            for entry in self._inbox:
                self._apply(entry, refused)
            self._inbox.clear()
            left = [*self._steps.clear(), *refused]
            self._steps_load = self._steps.load()
        if left:
            call_back(self._callbacks.on_failure, left, "the engine was stopped")


def call_back(callback: Callable[..., None], *arguments: object) -> None:
    """Call what an engine's thread tells others by: their mistakes are not to end it."""
    try:
        callback(*arguments)
    except Exception:
        log.exception("the callback %r failed", callback)
