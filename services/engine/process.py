"""An engine in a process of its own: a worker's event loop, its plane and its leases never wait for a step.

As `EngineThread` to its worker: one thread here hears what the process says, looks at the table of layers, and calls
back. The worker's own `Sequence` is kept as the engine's is.
"""

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple, cast

import numpy as np
import numpy.typing as npt

from schemas.block import pack_tokens
from schemas.ids import RequestId
from services.config import child_environment
from services.engine.border import (
    AskLibrary,
    BorderError,
    CancelSequence,
    Channel,
    EngineReady,
    EngineRefused,
    GrammarStarted,
    LayerTable,
    LibraryCounted,
    LoadEngine,
    SequenceLeft,
    SequencesFailed,
    StartGrammar,
    StepDone,
    StepToken,
    StopEngine,
    SubmitSequence,
    ToWorker,
    layer_memory,
)
from services.engine.interface import (
    EngineCallbacks,
    EngineLoad,
    FailedSequence,
    Grammar,
    GrammarError,
    InvalidSequenceError,
    LayerListener,
    SampledToken,
    Sequence,
    StepResult,
)
from services.engine.limits import LAYER_ROWS, LIBRARY_ANSWER_S
from services.engine.thread import EngineStoppedError, EngineThread
from services.errors import UserError

log = logging.getLogger(__name__)

STOPPED = "the engine was stopped"
Spawn = Callable[[str, tuple[int, int, int]], "subprocess.Popen[bytes]"]


def spawn_child(name: str, fds: tuple[int, int, int]) -> "subprocess.Popen[bytes]":
    """Start the process of the engine of this worker. `fds`: of its socket, of its table, of what wakes the worker."""
    module = "services.engine.child"
    arguments = [sys.executable, "-P", "-m", module, name, *map(str, fds), str(os.getpid())]
    # What libraries print must not be taken for what the worker says.
    return subprocess.Popen(
        arguments, stdin=subprocess.DEVNULL, stdout=2, pass_fds=fds, env=child_environment(), close_fds=True
    )


class EngineChild:
    """An engine's process, as its worker has it, once it is ready. `told`: what it says of itself."""

    def __init__(self, order: LoadEngine, name: str, spawn: Spawn) -> None:
        """Start it, and wait until it is ready. Raises UserError. To be called on the process' main thread: the child
        ends with the thread that has started it."""
        bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        num_layers = order.shape.layout.num_layers
        table = layer_memory(LAYER_ROWS, num_layers)
        ours, theirs = socket.socketpair()
        try:
            self.layers = LayerTable(table, num_layers)
            self.process = spawn(name, (theirs.fileno(), table, bell))
        finally:
            os.close(table)
            theirs.close()
        self.channel: Channel[ToWorker] = Channel(ours, bell, ToWorker)
        self.channel.say(order)
        try:
            self.told = self._until_ready()
        except BaseException:
            self.kill_process()
            self.channel.close()
            raise

    def kill_process(self) -> None:
        """End it, and wait until it has: nothing of it writes any more. Idempotent."""
        self.process.kill()
        self.process.wait()

    def _until_ready(self) -> EngineReady:
        try:
            while True:
                for message in self.channel.hear():
                    if isinstance(message, EngineRefused):
                        raise UserError(message.reason)
                    assert isinstance(message, EngineReady), "it says nothing else first"
                    return message
        except EOFError as error:
            raise UserError(f"the engine's process {ending(self.process.wait())} while it loaded the model") from error
        except BorderError as error:
            raise UserError(f"the engine's process says what makes no sense: {error}") from error


def ending(code: int) -> str:
    """Say how a process has ended, for people."""
    if code >= 0:
        return f"ended with code {code}"
    hint = ", as the kernel does where memory is short" if -code == signal.SIGKILL else ""
    return f"was killed by {signal.Signals(-code).name}{hint}"


class _Listened(NamedTuple):
    """Who hears of a sequence's layers, the row where they are told, and what it has heard of them."""

    listener: LayerListener
    row: int
    heard: npt.NDArray[np.int64]


class EngineProcess:
    """As `EngineThread`, with the engine in `child`. `check` raises InvalidSequenceError where it cannot compute."""

    def __init__(self, child: EngineChild, check: Callable[[Sequence], None], callbacks: EngineCallbacks) -> None:
        self._child = child
        self._check = check
        self._callbacks = callbacks
        self._lock = threading.Lock()
        """Of what follows, up to the empty line."""
        self._sequences: dict[int, Sequence] = {}
        self._numbers: dict[tuple[RequestId, int], int] = {}
        """The same the other way round: of those that the engine has."""
        self._grammars: dict[int, Future[Grammar]] = {}
        self._last_number = 0
        self._stopping = False

        self._listened: dict[int, _Listened] = {}
        self._free_rows = list(range(LAYER_ROWS))
        self._started: set[int] = set()
        """Sequences that have been in a step."""
        self._library = ""
        self._library_came = threading.Event()
        self.has_failed = False
        """The process has ended by itself: nothing is computed here any more."""
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop_engine(self, timeout: float) -> bool:
        """End after the running step, failing what is left; at the latest after `timeout` seconds, without regard to
        what runs. True: nothing computes any more."""
        with self._lock:
            self._stopping = True
        self._child.channel.say(StopEngine())
        if self._thread.is_alive():
            self._thread.join(timeout)
        self.close()
        return True

    def close(self) -> None:
        """End the process, which lets go of the arena's memory. Idempotent."""
        self._child.kill_process()
        if self._thread.is_alive():
            self._thread.join()
        self._child.channel.close()

    def submit(self, sequence: Sequence) -> None:
        """As `EngineThread.submit`."""
        self._check(sequence)
        key = (sequence.request_id, sequence.attempt)
        with self._lock:
            if self._stopping:
                raise EngineStoppedError("the engine is stopping")
            if key in self._numbers:
                raise InvalidSequenceError(f"{key} is in the engine already")
            number = self._next_number()
            self._sequences[number] = sequence
            self._numbers[key] = number
            row = self._listen(number, sequence.layer_listener)
        self._child.channel.say(submission(number, row, sequence))

    def cancel(self, request_id: RequestId, attempt: int) -> None:
        """As `EngineThread.cancel`."""
        with self._lock:
            if self._stopping:
                raise EngineStoppedError("the engine is stopping")
            number = self._numbers.get((request_id, attempt))
        if number is not None:
            self._child.channel.say(CancelSequence(number))

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
            if self._stopping:
                future.set_exception(GrammarError(STOPPED))
                return future
            number = self._next_number()
            self._grammars[number] = future
        self._child.channel.say(StartGrammar(number, text))
        return future

    def library_text(self, prefix: str) -> str:
        """As `EngineThread.library_text`; what was said last where the process does not answer soon."""
        self._library_came.clear()
        self._child.channel.say(AskLibrary(prefix))
        self._library_came.wait(LIBRARY_ANSWER_S)
        return self._library

    def _next_number(self) -> int:
        self._last_number += 1
        return self._last_number

    def _listen(self, number: int, listener: LayerListener | None) -> int:
        """Return the row where a sequence's layers are told; -1: nobody listens."""
        if listener is None:
            return -1
        row = self._free_rows.pop()
        self._child.layers.rows[row] = 0
        self._listened[number] = _Listened(listener, row, np.zeros_like(self._child.layers.rows[row]))
        return row

    # On the thread.

    def _run(self) -> None:
        try:
            while True:
                messages = self._child.channel.hear()
                self._tell_layers()  # written before what is said now
                for message in messages:
                    self._take(message)
        except EOFError:
            code = self._child.process.wait()
            reason = STOPPED if self._stopping else f"the engine's process {ending(code)}"
        except (BorderError, LookupError) as error:
            log.exception("the engine's process says what makes no sense")
            self._child.kill_process()
            reason = f"the engine's process says what makes no sense: {error}"
        self._end(reason)

    def _tell_layers(self) -> None:
        for listener, row, heard in list(self._listened.values()):
            now = self._child.layers.rows[row].copy()
            for layer in np.flatnonzero(now != heard):
                listener.advance(int(layer), int(now[layer]))
            heard[:] = now

    def _take(self, message: ToWorker) -> None:
        match message:
            case StepDone():
                self._call_back(self._callbacks.on_step, self._result(message))
            case SequencesFailed(numbers=numbers, reason=reason):
                self._call_back(self._callbacks.on_failure, [self._forget(number) for number in numbers], reason)
            case SequenceLeft(number=number):
                self._call_back(self._callbacks.on_removed, self._forget(number))
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
            failed=tuple(FailedSequence(self._forget(number), reason) for number, reason in done.failed),
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
            del self._numbers[sequence.request_id, sequence.attempt]
            self._started.discard(number)
            if (listened := self._listened.pop(number, None)) is not None:
                self._free_rows.append(listened.row)
        return sequence

    def _end(self, reason: str) -> None:
        with self._lock:
            self.has_failed = not self._stopping
            self._stopping = True
            left = list(self._sequences)
            grammars, self._grammars = list(self._grammars.values()), {}
        for future in grammars:
            _settle(future, reason)
        if self.has_failed:
            log.error("%s", reason)
        if left:
            self._call_back(self._callbacks.on_failure, [self._forget(number) for number in left], reason)

    def _call_back(self, callback: Callable[..., None], *arguments: object) -> None:
        try:
            callback(*arguments)
        except Exception:
            log.exception("the callback %r failed", callback)


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
