"""The engine's process: `python -P -m services.engine.child`, which a worker starts (`process.py`).

Its main thread is the engine's; another one reads what the worker says.
"""

import contextlib
import ctypes
import gc
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from functools import partial

from dataplane.memory.arena import Arena
from schemas.block import unpack_tokens
from services.ending import hear_no_signal
from services.engine.border import (
    AskLibrary,
    CancelSequence,
    Channel,
    EngineReady,
    EngineRefused,
    GrammarStarted,
    LibraryCounted,
    LoadEngine,
    SequenceLeft,
    SequencesFailed,
    StartGrammar,
    StepDone,
    StepTable,
    StepToken,
    StopEngine,
    SubmitSequence,
    TableListener,
    ToEngine,
)
from services.engine.interface import EngineCallbacks, Grammar, InvalidSequenceError, SampledToken, Sequence, StepResult
from services.engine.loading import load_host_engine
from services.engine.thread import EngineStoppedError, EngineThread
from services.errors import UserError
from services.metrics import library_text
from services.runtime import configure_logging

log = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1


class EngineServer:
    """One engine, told what to do by a worker. `table` and `bell`: file descriptors of the layers' table, and of what
    wakes who looks at it."""

    def __init__(self, channel: Channel[ToEngine], table: int, bell: int) -> None:
        self._channel = channel
        self._table = table
        self._bell = bell
        self._sequences: dict[int, Sequence] = {}
        self._numbers: dict[Sequence, int] = {}
        """The same the other way round: of the sequences that the engine has."""

    def serve_worker(self) -> int:
        """Make the engine, and serve until the worker says that it is enough; return the exit code."""
        order = self._receive_first()
        arena = Arena.attach(order.arena, order.nonce, writes=True)
        try:
            loaded = load_host_engine(order.checkpoint, order.shape, arena.buffer, order.worker, order.engine)
        except UserError as error:
            self._channel.send_message(EngineRefused(str(error)))
            self._channel.close()
            return 2
        self._steps = StepTable(self._table, order.shape.layout.num_layers)
        self._start_grammar = loaded.rules.start_grammar
        callbacks = EngineCallbacks(self._on_step, self._on_failure, self._on_removed)
        loaded.steps.on_begin = self._on_begin
        self._engine = EngineThread(loaded.steps, self._start_grammar, callbacks)
        gc.collect()
        gc.freeze()  # what was loaded stays: a collection would look it all through
        self._channel.send_message(EngineReady(loaded.device, tuple(sorted(loaded.rules.eos_token_ids))))
        threading.Thread(target=self._listen, name="listen", daemon=True).start()
        self._engine.run_steps()
        self._channel.close()
        return int(self._engine.has_failed)

    def _receive_first(self) -> LoadEngine:
        while not (received := self._channel.wait_messages()):
            pass
        assert isinstance(received[0], LoadEngine), "that is said first"
        return received[0]

    def _listen(self) -> None:
        try:
            while True:
                for message in self._channel.wait_messages():
                    self._take(message)
        except EOFError:
            os._exit(0)  # nobody is there for whom to compute
        except BaseException:
            log.exception("hearing the worker has failed")
            os._exit(1)  # who hears nothing computes what nobody wants; the worker starts another one

    def _take(self, message: ToEngine) -> None:
        match message:
            case SubmitSequence():
                self._submit(message)
            case CancelSequence(number=number):
                if (sequence := self._sequences.get(number)) is not None:
                    with contextlib.suppress(EngineStoppedError):  # its end fails the sequence anyway
                        self._engine.cancel(sequence.request_id, sequence.attempt)
            case StartGrammar(number=number, text=text):
                self._start_grammar(text).add_done_callback(partial(self._on_understood, number))
            case AskLibrary(prefix=prefix):
                self._channel.send_message(LibraryCounted(library_text(prefix)))
            case StopEngine():
                self._engine.stop_engine(0)
            case LoadEngine():
                raise AssertionError("that is said once")

    def _submit(self, message: SubmitSequence) -> None:
        sampling, row = message.sampling, message.row
        sequence = Sequence(
            request_id=message.request_id,
            attempt=message.attempt,
            token_ids=unpack_tokens(message.tokens),
            num_prompt_tokens=message.num_prompt_tokens,
            sampling=sampling,
            tables=message.tables,
            num_computed_tokens=message.num_computed_tokens,
            max_local_tokens=message.max_local_tokens,
            layer_listener=TableListener(self._steps.rows[row], self._bell) if row >= 0 else None,
            stop_token_ids=frozenset(message.stop_token_ids),
            tenant=message.tenant,
            wants_prompt_logprobs=message.wants_prompt_logprobs,
            # It was understood before it came, and is kept.
            grammar=self._start_grammar(sampling.grammar) if sampling.grammar else None,
        )
        self._sequences[message.number] = sequence
        self._numbers[sequence] = message.number
        try:
            self._engine.submit(sequence)
        except (EngineStoppedError, InvalidSequenceError) as error:
            self._on_failure([sequence], str(error))

    def _on_understood(self, number: int, future: "Future[Grammar]") -> None:
        error = future.exception()
        self._channel.send_message(GrammarStarted(number, "" if error is None else str(error)))

    # On the engine's thread.

    def _on_begin(self, sequences: Seq[Sequence]) -> None:
        self._steps.begin_step([self._numbers[sequence] for sequence in sequences])

    def _on_step(self, result: StepResult) -> None:
        numbers = self._numbers
        told = StepDone(
            started_ns=result.started_ns,
            ended_ns=result.ended_ns,
            num_prefill_tokens=result.num_prefill_tokens,
            num_decode_tokens=result.num_decode_tokens,
            num_preempted=result.num_preempted,
            computed=tuple((numbers[one], num_tokens, one.num_reused_tokens) for one, num_tokens in result.computed),
            sampled=tuple(_step_token(numbers[token.sequence], token) for token in result.sampled),
            failed=tuple((numbers[sequence], reason, is_spent) for sequence, reason, is_spent in result.failed),
        )
        for token in result.sampled:
            if token.local_end:
                self._forget(token.sequence)
        for sequence, *_ in result.failed:
            self._forget(sequence)
        self._channel.send_message(told)
        self._steps.begin_step(())

    def _on_failure(self, sequences: Seq[Sequence], reason: str) -> None:
        self._channel.send_message(SequencesFailed(tuple(self._forget(sequence) for sequence in sequences), reason))

    def _on_removed(self, sequence: Sequence) -> None:
        self._channel.send_message(SequenceLeft(self._forget(sequence)))

    def _forget(self, sequence: Sequence) -> int:
        number = self._numbers.pop(sequence)
        del self._sequences[number]
        return number


def _step_token(number: int, token: SampledToken) -> StepToken:
    sequence = token.sequence
    is_first = sequence.num_local_tokens == 1
    return StepToken(
        number=number,
        token_id=token.token_id,
        finish_reason=token.finish_reason,
        local_end=token.local_end,
        logprob=token.logprob,
        prompt_logprobs=tuple(sequence.prompt_logprobs) if is_first else (),
    )


def main(name: str, channel: int, table: int, bell: int, parent: int) -> int:
    """Be the engine of the worker of this name and process id. The others are file descriptors."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before that
        return 1
    hear_no_signal()
    configure_logging(name)
    ours: Channel[ToEngine] = Channel(socket.socket(fileno=channel), os.eventfd(0, os.EFD_CLOEXEC), ToEngine)
    return EngineServer(ours, table, bell).serve_worker()


if __name__ == "__main__":
    code = main(sys.argv[1], *map(int, sys.argv[2:]))
    sys.stderr.flush()
    os._exit(code)  # Python would first take apart all that was imported
