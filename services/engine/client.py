"""A worker's side of its engine: what the engine has been given, and whom its messages are for."""

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple, cast

import msgspec

from schemas.block import TOKEN_BYTES
from schemas.ids import RequestId
from schemas.worker import EngineLives
from services.engine.interface import Grammar, GrammarError, LayerListener
from services.engine.limits import LAYER_ROWS, LIBRARY_ANSWER_S
from services.engine.messages import (
    AskLibrary,
    CancelSequence,
    GrammarStarted,
    LibraryCounted,
    SequenceLeft,
    SequencesFailed,
    StartGrammar,
    StepResult,
    SubmitSequence,
    ToEngine,
    ToWorker,
)

log = logging.getLogger(__name__)

STOPPED = "the engine was stopped"


class EngineStoppedError(RuntimeError):
    """The engine takes nothing any more, or not yet again."""


class EngineLoad(NamedTuple):
    """What there is to do. `num_running`: sequences that decode or have had a part of their prompt computed here;
    `num_queued`: the others. `num_uncomputed_tokens`: of prompts (or of answers to be recomputed) that await prefill.
    """

    num_running: int
    num_queued: int
    num_uncomputed_tokens: int


class EngineDeath(NamedTuple):
    """An engine's process has ended by itself: what it had is not in it any more, and nothing writes. `had`: the
    numbers of that; `in_step`: of what of it was being computed."""

    reason: str
    had: frozenset[int]
    in_step: frozenset[int]


class EngineCallbacks(NamedTuple):
    """Whom an engine notifies, on a thread of its own: of a step, of the numbers of sequences that it cannot compute
    and why, of one that was taken out, of its death, which ends all that it had, and that it is there again."""

    on_step: Callable[[StepResult], None]
    on_failure: Callable[[tuple[int, ...], str], None]
    on_removed: Callable[[int], None]
    on_died: Callable[[EngineDeath], None] = lambda _: None
    on_back: Callable[[], None] = lambda: None


@dataclass(slots=True)
class _Given:
    """A sequence that the engine has. `row`: by which its layers are announced; -1: to nobody."""

    request_id: RequestId
    row: int
    num_tokens: int
    num_computed_tokens: int
    has_started: bool = False


class EngineClient(ABC):
    """A worker's engine, wherever it runs (`thread.py`, `process.py`). `submit`, `cancel`, `engine_load`,
    `start_grammar` and `library_text` may be called from any thread.

    Every sequence that was submitted ends in exactly one way, reported by the callbacks, which must be quick; one that
    raises is logged.
    """

    def __init__(self, callbacks: EngineCallbacks) -> None:
        self._callbacks = callbacks
        self.has_failed = False
        """It has ended by itself, and nothing follows it: nothing is computed here any more."""
        self._lives = EngineLives(num_starts=1)
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        """Of what follows, up to the empty line."""
        self._is_ready = True
        self._given: dict[int, _Given] = {}
        self._free_rows: list[int] = []
        self._new_rows = iter(range(LAYER_ROWS))
        self._grammars: dict[int, Future[Grammar]] = {}
        self._last_grammar = 0

        self._library = ""
        self._library_came = threading.Event()

    @abstractmethod
    def start_engine(self) -> None: ...

    @abstractmethod
    def stop_engine(self, timeout: float) -> bool:
        """End after the running step, failing what is left. True: nothing computes any more after `timeout` seconds."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the arena's memory. Only once `stop_engine` has returned True."""

    @abstractmethod
    def _send(self, message: ToEngine) -> None: ...

    @abstractmethod
    def _listen(self, row: int, listener: LayerListener) -> None:
        """Have this listener notified of the layers that are announced by this row."""

    @abstractmethod
    def _unlisten(self, row: int) -> None: ...

    @property
    def lives(self) -> EngineLives:
        return self._lives

    def submit(self, sequence: SubmitSequence, listener: LayerListener | None = None) -> None:
        """Give the engine a sequence. `listener` is notified of each layer of it that is written.

        Raises EngineStoppedError after `stop_engine`, and while a process is being started.
        """
        with self._lock:
            self._check_ready()
            assert sequence.number not in self._given, f"{sequence.request_id} is in the engine already"
            row = -1
            if listener is not None:
                row = self._free_rows.pop() if self._free_rows else next(self._new_rows)
                self._listen(row, listener)
            num_tokens = len(sequence.tokens) // TOKEN_BYTES
            self._given[sequence.number] = _Given(sequence.request_id, row, num_tokens, sequence.num_computed_tokens)
        self._send(msgspec.structs.replace(sequence, row=row))

    def cancel(self, number: int) -> None:
        """Take a sequence out after the running step. `on_removed` reports when; nothing does if it has ended before.

        Raises EngineStoppedError as `submit` does.
        """
        with self._lock:
            self._check_ready()
            is_here = number in self._given
        if is_here:
            self._send(CancelSequence(number))

    def engine_load(self) -> EngineLoad:
        """Return what there is to do."""
        with self._lock:
            left = [(one.has_started, one.num_tokens - one.num_computed_tokens) for one in self._given.values()]
        num_running = sum(has_started or num_tokens == 1 for has_started, num_tokens in left)
        return EngineLoad(num_running, len(left) - num_running, sum(number for _, number in left if number > 1))

    def start_grammar(self, text: str) -> "Future[Grammar]":
        """Have the engine begin to understand a grammar, which it keeps. The future ends as it has, without it."""
        future: Future[Grammar] = Future()
        with self._lock:
            if not self._is_ready or self._stopping.is_set():
                future.set_exception(GrammarError(STOPPED))
                return future
            self._last_grammar += 1
            number = self._last_grammar
            self._grammars[number] = future
        self._send(StartGrammar(number, text))
        return future

    def library_text(self, prefix: str) -> str:
        """Return what the engine's library has counted, of names that begin so, in Prometheus' text format; what was
        answered last where the engine does not answer soon."""
        self._library_came.clear()
        self._send(AskLibrary(prefix))
        self._library_came.wait(LIBRARY_ANSWER_S)
        return self._library

    def _check_ready(self) -> None:
        if self._stopping.is_set():
            raise EngineStoppedError("the engine is stopping")
        if not self._is_ready:
            raise EngineStoppedError("the engine is starting")

    # What the engine sends.

    def _take(self, message: ToWorker) -> None:
        """Raises LookupError where it is about nothing that the engine has."""
        match message:
            case StepResult():
                self._note_step(message)
                call_back(self._callbacks.on_step, message)
            case SequencesFailed(numbers=numbers, reason=reason):
                self._forget(numbers)
                call_back(self._callbacks.on_failure, numbers, reason)
            case SequenceLeft(number=number):
                self._forget((number,))
                call_back(self._callbacks.on_removed, number)
            case GrammarStarted(number=number, error=error):
                with self._lock:
                    future = self._grammars.pop(number)
                _settle(future, error)
            case LibraryCounted(text=text):
                self._library = text
                self._library_came.set()

    def _note_step(self, result: StepResult) -> None:
        for number, num_tokens in result.computed:
            one = self._given[number]
            one.num_computed_tokens, one.has_started = num_tokens, True
        for token in result.sampled:
            self._given[token.number].num_tokens += 1
        self._forget(token.number for token in result.sampled if token.local_end)
        self._forget(number for number, *_ in result.failed)

    def _forget(self, numbers: Iterable[int]) -> None:
        """The engine has these no more."""
        with self._lock:
            for number in numbers:
                if (row := self._given.pop(number).row) >= 0:
                    self._unlisten(row)
                    self._free_rows.append(row)

    def _report_death(self, reason: str, in_step: Iterable[int]) -> None:
        """The engine is dead, and had these in its step: it has nothing any more."""
        had = self._end_all(reason)
        computed = {number: had[number].request_id for number in in_step if number in had}
        named = ", ".join(sorted(computed.values()))
        log.error("%s%s; it is started again", reason, f" while it computed {named}" if named else "")
        call_back(self._callbacks.on_died, EngineDeath(reason, frozenset(had), frozenset(computed)))

    def _fail_left(self) -> None:
        """The engine was stopped: it takes nothing any more."""
        if had := self._end_all(STOPPED):
            call_back(self._callbacks.on_failure, tuple(had), STOPPED)

    def _end_all(self, reason: str) -> dict[int, _Given]:
        """Forget all that the engine had, and return it."""
        with self._lock:
            self._is_ready = False
            had = dict(self._given)
            grammars, self._grammars = list(self._grammars.values()), {}
        self._forget(had)
        for future in grammars:
            _settle(future, reason)
        return had


def call_back(callback: Callable[..., None], *arguments: object) -> None:
    """Call what an engine's thread notifies others by: their mistakes are not to end it."""
    try:
        callback(*arguments)
    except Exception:
        log.exception("the callback %r failed", callback)


def _settle(future: "Future[Grammar]", error: str) -> None:
    if error:
        future.set_exception(GrammarError(error))
    else:
        future.set_result(cast("Grammar", None))
