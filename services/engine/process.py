"""An engine in a process of its own: a worker's event loop, its plane and its leases never wait for a step.

As `EngineThread` to its worker: one thread here hears what the process says, looks at the table of layers, and calls
back. The worker's own `Sequence` is kept as the engine's is.
"""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple, cast

import msgspec
import numpy as np
import numpy.typing as npt

from dataplane.lasting import lasting_thread
from schemas.block import pack_tokens
from schemas.ids import RequestId
from schemas.worker import EngineLives
from services.engine.border import (
    AskLibrary,
    BorderError,
    CancelSequence,
    EngineReady,
    EngineRefused,
    GrammarStarted,
    LibraryCounted,
    SequenceLeft,
    SequencesFailed,
    StartGrammar,
    StepDone,
    StepToken,
    StopEngine,
    SubmitSequence,
    ToWorker,
)
from services.engine.interface import (
    EngineCallbacks,
    EngineDeath,
    EngineLoad,
    FailedSequence,
    Grammar,
    GrammarError,
    InvalidSequenceError,
    LayerListener,
    SampledToken,
    Sequence,
    SequenceKey,
    StepResult,
)
from services.engine.limits import CLOSE_LOOK_S, LAYER_ROWS, LIBRARY_ANSWER_S, LOOKS_A_TIMEOUT
from services.engine.spawn import EngineChild, SpareEngines, ending
from services.engine.thread import EngineStoppedError, EngineThread, call_back
from services.errors import UserError
from services.restarts import Restarts

log = logging.getLogger(__name__)

STOPPED = "the engine was stopped"
OF_STEPS = (StepDone, SequencesFailed, SequenceLeft)
"""What the thread says that computes: others answer even while a step hangs."""


class _Listened(NamedTuple):
    """Who hears of a sequence's layers, the row where they are told, and what it has heard of them."""

    listener: LayerListener
    row: int
    heard: npt.NDArray[np.int64]


class EngineProcess:
    """As `EngineThread`, with the engine in a process of its own: `child`, and whom `spares` gives to follow it.
    `check` raises InvalidSequenceError for what an engine cannot compute. One that has something to compute and
    ends no step for `step_timeout_s` hangs, and is killed."""

    def __init__(
        self,
        child: EngineChild,
        spares: SpareEngines,
        check: Callable[[Sequence], None],
        step_timeout_s: float,
        callbacks: EngineCallbacks,
    ) -> None:
        self._spares = spares
        self._check = check
        self._step_timeout_s = step_timeout_s
        self._callbacks = callbacks
        self.has_failed = False
        """Never: who dies is replaced."""
        self._lives = EngineLives(num_starts=1, ready_ms=child.ready_ms)
        self._lock = threading.Lock()
        """Of what follows, up to the empty line."""
        self._child = child
        self._is_ready = True
        self._sequences: dict[int, Sequence] = {}
        self._numbers: dict[SequenceKey, int] = {}
        """The same the other way round: of those that the engine has."""
        self._grammars: dict[int, Future[Grammar]] = {}
        self._last_number = 0

        self._stopping = threading.Event()
        self._listened: dict[int, _Listened] = {}
        self._free_rows = list(range(LAYER_ROWS))
        self._started: set[int] = set()
        """Sequences that have been in a step."""
        self._library = ""
        self._library_came = threading.Event()
        self._thread = lasting_thread(self._run, "engine", self._stopping.is_set)

    @property
    def lives(self) -> EngineLives:
        num_spares, spare_bytes = self._spares.count_loaded()
        return msgspec.structs.replace(self._lives, num_spares=num_spares, spare_bytes=spare_bytes)

    def start(self) -> None:
        self._thread.start()
        self._spares.keep_loaded(self._child.ready_ms / 1000)

    def stop_engine(self, timeout: float) -> bool:
        """End after the running step, failing what is left; at the latest after `timeout` seconds, without regard to
        what runs. True: nothing computes any more."""
        self._stopping.set()
        self._child.channel.send_message(StopEngine())
        if self._thread.is_alive():
            self._thread.join(timeout)
        self.close()
        return True

    def close(self) -> None:
        """End the process, which lets go of the arena's memory. Idempotent."""
        self._stopping.set()
        self._spares.close()
        while True:
            with self._lock:
                child = self._child
            child.kill_process()
            if not self._thread.is_alive():
                break
            self._thread.join(CLOSE_LOOK_S)  # another one may just have been started
        self._child.channel.close()

    def submit(self, sequence: Sequence) -> None:
        """As `EngineThread.submit`."""
        self._check(sequence)
        key = _key(sequence)
        with self._lock:
            self._check_ready()
            if key in self._numbers:
                raise InvalidSequenceError(f"{key} is in the engine already")
            number = self._next_number()
            self._sequences[number] = sequence
            self._numbers[key] = number
            row = self._listen(number, sequence.layer_listener)
        self._child.channel.send_message(submission(number, row, sequence))

    def cancel(self, request_id: RequestId, attempt: int) -> None:
        """As `EngineThread.cancel`."""
        with self._lock:
            self._check_ready()
            number = self._numbers.get((request_id, attempt))
        if number is not None:
            self._child.channel.send_message(CancelSequence(number))

    def engine_load(self) -> EngineLoad:
        """As `EngineThread.engine_load`."""
        with self._lock:
            left = [(number in self._started, one.num_uncomputed_tokens) for number, one in self._sequences.items()]
        num_running = sum(has_started or num_tokens == 1 for has_started, num_tokens in left)
        return EngineLoad(num_running, len(left) - num_running, sum(number for _, number in left if number > 1))

    def start_grammar(self, text: str) -> "Future[Grammar]":
        """Have the engine begin to understand a grammar, which it keeps. The future ends as it has, without it."""
        future: Future[Grammar] = Future()
        with self._lock:
            if not self._is_ready or self._stopping.is_set():
                future.set_exception(GrammarError(STOPPED))
                return future
            number = self._next_number()
            self._grammars[number] = future
        self._child.channel.send_message(StartGrammar(number, text))
        return future

    def library_text(self, prefix: str) -> str:
        """As `EngineThread.library_text`; what was said last where the process does not answer soon."""
        self._library_came.clear()
        self._child.channel.send_message(AskLibrary(prefix))
        self._library_came.wait(LIBRARY_ANSWER_S)
        return self._library

    def _check_ready(self) -> None:
        if self._stopping.is_set():
            raise EngineStoppedError("the engine is stopping")
        if not self._is_ready:
            raise EngineStoppedError("the engine is starting")

    def _next_number(self) -> int:
        self._last_number += 1
        return self._last_number

    def _listen(self, number: int, listener: LayerListener | None) -> int:
        """Return the row where a sequence's layers are told; -1: nobody listens."""
        if listener is None:
            return -1
        row = self._free_rows.pop()
        self._child.table.rows[row] = 0
        self._listened[number] = _Listened(listener, row, np.zeros_like(self._child.table.rows[row]))
        return row

    # On the thread.

    def _run(self) -> None:
        restarts = Restarts()
        started_s = time.monotonic()
        while True:
            reason = self._serve_child()
            if self._stopping.is_set():
                return self._fail_left(STOPPED)
            self._tell_death(reason)
            is_back = False
            while not is_back:
                wait_s = restarts.ended(started_s, time.monotonic())
                has_spare = self._spares.count_loaded()[0] > 0
                if self._stopping.wait(0 if has_spare else wait_s):
                    return None
                started_s = time.monotonic()
                is_back = self._replace_child()
            call_back(self._callbacks.on_back)

    def _serve_child(self) -> str:
        """Hear what the engine says until it has ended, which it has when this returns; return how."""
        child, silent_s, look_s = self._child, 0.0, self._step_timeout_s / LOOKS_A_TIMEOUT
        try:
            while silent_s < self._step_timeout_s:
                is_busy, began_s = bool(self._sequences), time.monotonic()
                messages = child.channel.wait_messages(look_s)
                self._tell_layers()  # written before what is said now
                for message in messages:
                    self._take(message)
                if not is_busy or any(isinstance(message, OF_STEPS) for message in messages):
                    silent_s = 0.0
                else:  # a time in which this process stood still itself counts as one look
                    silent_s += min(time.monotonic() - began_s, look_s)
            child.kill_process()
            return f"the engine's process computed nothing for {self._step_timeout_s:g} s (engine.step_timeout_s)"
        except EOFError:
            return f"the engine's process {ending(child.process.wait())}"
        except (BorderError, LookupError) as error:
            log.exception("the engine's process says what makes no sense")
            child.kill_process()
            return f"the engine's process says what makes no sense: {error}"
        except Exception as error:
            log.exception("hearing the engine's process has failed")
            child.kill_process()
            return f"hearing the engine's process has failed: {type(error).__name__}: {error}"

    def _tell_death(self, reason: str) -> None:
        with self._lock:
            self._is_ready = False
            had = {number: _key(sequence) for number, sequence in self._sequences.items()}
            in_step = frozenset(had[number] for number in self._child.table.in_step() if number in had)
        self._child.channel.close()
        for number in had:
            self._forget(number)
        self._fail_grammars(reason)
        named = ", ".join(sorted(request_id for request_id, _ in in_step))
        log.error("%s%s; it is started again", reason, f" while it computed {named}" if named else "")
        self._lives = msgspec.structs.replace(self._lives, num_deaths=self._lives.num_deaths + 1)
        call_back(self._callbacks.on_died, EngineDeath(reason, frozenset(had.values()), in_step))

    def _replace_child(self) -> bool:
        """Take another one, and say whether it is ready: the one before may have been ended by what it loads."""
        wanted_s = time.monotonic()
        try:
            child = self._spares.next_child()
            with self._lock:
                self._child = child
            child.wait_ready(self._spares.max_load_s)
        except (UserError, OSError) as error:
            log.error("the engine does not start: %s", error)
            return False
        num_starts, ready_ms = self._lives.num_starts + 1, round(1000 * (time.monotonic() - wanted_s))
        self._lives = msgspec.structs.replace(self._lives, num_starts=num_starts, ready_ms=ready_ms)
        with self._lock:
            self._is_ready = True
        return True

    def _tell_layers(self) -> None:
        for listener, row, heard in list(self._listened.values()):
            now = self._child.table.rows[row].copy()
            for layer in np.flatnonzero(now != heard):
                listener.advance(int(layer), int(now[layer]))
            heard[:] = now

    def _take(self, message: ToWorker) -> None:
        match message:
            case StepDone():
                call_back(self._callbacks.on_step, self._result(message))
            case SequencesFailed(numbers=numbers, reason=reason):
                call_back(self._callbacks.on_failure, [self._forget(number) for number in numbers], reason)
            case SequenceLeft(number=number):
                call_back(self._callbacks.on_removed, self._forget(number))
            case GrammarStarted(number=number, error=error):
                with self._lock:
                    future = self._grammars.pop(number)
                _settle(future, error)
            case LibraryCounted(text=text):
                self._library = text
                self._library_came.set()
            case EngineReady() | EngineRefused():
                raise BorderError("it was ready before")

    def _result(self, done: StepDone) -> StepResult:
        """Bring the sequences to where they are in the engine, and return the step's result."""
        computed: list[tuple[Sequence, int]] = []
        for number, num_tokens, num_reused in done.computed:
            sequence = self._sequences[number]
            sequence.num_computed_tokens, sequence.num_reused_tokens = num_tokens, num_reused
            self._started.add(number)
            computed.append((sequence, num_tokens))
        return StepResult(
            started_ns=done.started_ns,
            ended_ns=done.ended_ns,
            num_prefill_tokens=done.num_prefill_tokens,
            num_decode_tokens=done.num_decode_tokens,
            computed=tuple(computed),
            sampled=tuple(self._sampled(token) for token in done.sampled),
            num_preempted=done.num_preempted,
            failed=tuple(FailedSequence(self._forget(number), reason, spent) for number, reason, spent in done.failed),
        )

    def _sampled(self, token: StepToken) -> SampledToken:
        sequence = self._sequences[token.number]
        index = sequence.index
        sequence.token_ids.append(token.token_id)
        sequence.num_local_tokens += 1
        sequence.prompt_logprobs += token.prompt_logprobs
        if token.local_end:
            self._forget(token.number)
        return SampledToken(sequence, index, token.token_id, token.finish_reason, token.local_end, token.logprob)

    def _forget(self, number: int) -> Sequence:
        """The engine has a sequence no more."""
        with self._lock:
            sequence = self._sequences.pop(number)
            del self._numbers[_key(sequence)]
            self._started.discard(number)
            if (listened := self._listened.pop(number, None)) is not None:
                self._free_rows.append(listened.row)
        return sequence

    def _fail_left(self, reason: str) -> None:
        with self._lock:
            self._is_ready = False
            left = list(self._sequences)
        self._fail_grammars(reason)
        if left:
            call_back(self._callbacks.on_failure, [self._forget(number) for number in left], reason)

    def _fail_grammars(self, reason: str) -> None:
        with self._lock:
            grammars, self._grammars = list(self._grammars.values()), {}
        for future in grammars:
            _settle(future, reason)


def _key(sequence: Sequence) -> SequenceKey:
    return sequence.request_id, sequence.attempt


RunningEngine = EngineThread | EngineProcess


def submission(number: int, row: int, sequence: Sequence) -> SubmitSequence:
    """Return the message that gives the engine a sequence."""
    return SubmitSequence(
        number=number,
        row=row,
        request_id=sequence.request_id,
        attempt=sequence.attempt,
        tokens=pack_tokens(sequence.token_ids),
        num_prompt_tokens=sequence.num_prompt_tokens,
        sampling=sequence.sampling,
        tables=sequence.tables,
        num_computed_tokens=sequence.num_computed_tokens,
        max_local_tokens=sequence.max_local_tokens,
        stop_token_ids=tuple(sequence.stop_token_ids),
        tenant=sequence.tenant,
        wants_prompt_logprobs=sequence.wants_prompt_logprobs,
    )


def _settle(future: "Future[Grammar]", error: str) -> None:
    if error:
        future.set_exception(GrammarError(error))
    else:
        future.set_result(cast("Grammar", None))
