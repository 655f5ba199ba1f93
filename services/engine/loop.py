"""The engine's loop: it takes sequences, computes steps, and reports their results.

The same in a process of the engine's own, on a thread of its worker, and in the simulator.
"""

import logging
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from functools import partial
from types import TracebackType
from typing import Protocol

from schemas.block import unpack_tokens
from services.engine.interface import (
    CompileGrammar,
    Grammar,
    InvalidSequenceError,
    LayerListener,
    Sequence,
    StepFailedError,
    Steps,
)
from services.engine.messages import (
    AskLibrary,
    CancelSequence,
    GrammarStarted,
    LibraryCounted,
    SequenceLeft,
    SequencesFailed,
    StartGrammar,
    StopEngine,
    SubmitSequence,
    ToEngine,
    ToWorker,
)
from services.metrics import library_text

log = logging.getLogger(__name__)


class Changes(Protocol):
    """What is used here of `threading.Condition`. The simulator has one of its own."""

    def __enter__(self) -> object: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...
    def wait(self, timeout: float | None = None) -> bool: ...
    def notify(self) -> None: ...


class EngineLoop:
    """One engine. `put_message` may be called from any thread; `send` gives the worker a message, from any thread too.

    Of each sequence that was put the worker is sent one end: a `SampledToken` with `local_end`, an entry of `failed`,
    `SequencesFailed` or `SequenceLeft`; only then may its blocks be used for something else.

    `listener_of`: who is notified of a row's layers. `on_step`: called with the numbers of those whom a step computes,
    and with none once its result is sent. `changed`: by it `put_message` wakes the loop.
    """

    def __init__(
        self,
        steps: Steps,
        start_grammar: CompileGrammar,
        send: Callable[[ToWorker], None],
        listener_of: Callable[[int], LayerListener],
        *,
        on_step: Callable[[Seq[int]], None],
        changed: Changes,
    ) -> None:
        self._steps = steps
        self._start_grammar = start_grammar
        self._send = send
        self._listener_of = listener_of
        self._on_step = steps.on_begin = on_step
        self._changed = changed
        """Of what follows."""
        self._inbox: deque[SubmitSequence | CancelSequence] = deque()
        self._stopping = False

    def put_message(self, message: ToEngine) -> None:
        """Take in a message. Only what is about sequences waits for the step that runs."""
        match message:
            case StartGrammar(number=number, text=text):
                self._start_grammar(text).add_done_callback(partial(self._understood, number))
            case AskLibrary(prefix=prefix):
                self._send(LibraryCounted(library_text(prefix)))
            case SubmitSequence() | CancelSequence() | StopEngine():
                with self._changed:
                    if isinstance(message, StopEngine):
                        self._stopping = True
                    else:
                        self._inbox.append(message)
                    self._changed.notify()

    def run_steps(self) -> bool:
        """Compute until it is asked to stop, on this thread. False: a mistake of ours, or of what it computes on, has
        ended it. Whoever had it run then reports the ends of what is left."""
        has_failed = False
        try:
            while self._take():
                self._step()
        except Exception:
            log.exception("the engine's loop has failed")
            has_failed = True
        self._steps.clear()
        return not has_failed

    def _take(self) -> bool:
        """Wait until there is something to do, and empty the inbox. False: it is time to end."""
        with self._changed:
            while not (self._inbox or self._stopping or len(self._steps)):
                self._changed.wait()
            if self._stopping:
                return False
            messages = list(self._inbox)
            self._inbox.clear()
        for message in messages:
            if isinstance(message, SubmitSequence):
                self._add(message)
            elif self._steps.remove(message.number):
                self._send(SequenceLeft(message.number))
        return True

    def _add(self, message: SubmitSequence) -> None:
        """One that cannot be computed must not end everybody's step."""
        sequence, grammar = sequence_of(message), message.sampling.grammar
        sequence.layer_listener = self._listener_of(message.row) if message.row >= 0 else None
        sequence.grammar = self._start_grammar(grammar) if grammar else None  # it was understood before, and is kept
        try:
            self._steps.add(sequence)
        except InvalidSequenceError as error:
            log.error("%s is not computed: %s", message.request_id, error)
            self._send(SequencesFailed((message.number,), str(error)))

    def _step(self) -> None:
        try:
            result = self._steps.run_step()
        except StepFailedError as error:
            log.exception("an engine step of %d sequences failed", len(error.numbers))
            self._send(SequencesFailed(error.numbers, str(error)))
            if error.is_lost:
                raise
        else:
            if result is not None:
                self._send(result)
        self._on_step(())

    def _understood(self, number: int, future: "Future[Grammar]") -> None:
        error = future.exception()
        self._send(GrammarStarted(number, "" if error is None else str(error)))


def sequence_of(message: SubmitSequence) -> Sequence:
    """Return what the engine keeps of a sequence that was submitted."""
    return Sequence(
        request_id=message.request_id,
        number=message.number,
        token_ids=unpack_tokens(message.tokens),
        num_prompt_tokens=message.num_prompt_tokens,
        sampling=message.sampling,
        tables=message.tables,
        num_computed_tokens=message.num_computed_tokens,
        max_local_tokens=message.max_local_tokens,
        stop_token_ids=frozenset(message.stop_token_ids),
        tenant=message.tenant,
        wants_prompt_logprobs=message.wants_prompt_logprobs,
    )
