"""What clients write of answers, as a gateway has it understood: once each, by a process that may die of it."""

import contextlib
import logging
import os
import socket
import subprocess
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterable
from hashlib import blake2b
from typing import Protocol

import msgspec
from tokenizers import Tokenizer

from services.config import child_environment
from services.gateway import limits
from services.gateway.api.constraints import Constraint
from services.gateway.api.grammar_child import LoadTokens, ReadGrammar, Understood, receive_all
from services.gateway.api.guard import NotNowError
from services.gateway.api.invalid import InvalidRequestError
from services.gateway.api.turn import Turn
from services.times import GatewayTimes

log = logging.getLogger(__name__)


class GrammarReader(Protocol):
    """Understands what an answer must be, for the tokens of one model."""

    def load_tokens(self) -> None:
        """Begin what the first question would have to wait for."""
        ...

    def read_grammar(self, constraint: Constraint, timeout_s: float) -> str:
        """Return the grammar, as `understand` does, within `timeout_s`. Blocks; for any thread. Raises
        InvalidRequestError and NotNowError."""
        ...


class UnderstoodGrammars:
    """Those of one gateway: what was understood is kept, and what was not waits in a line for each owner."""

    def __init__(self, reader: GrammarReader, times: GatewayTimes) -> None:
        self._reader = reader
        self._timeout_s = times.grammar_s
        busy = "what others' answers must be is being understood"
        self._turn = Turn(busy, times.turn_s, limits.GRAMMARS_AT_ONCE)
        self._kept: OrderedDict[bytes, str] = OrderedDict()
        """By the digest of what was asked for; those asked for last are at the end."""

    async def grammar_of(self, constraint: Constraint, owner: str) -> str:
        """Return the grammar of what an answer must be. Raises InvalidRequestError and NotNowError."""
        key = blake2b(msgspec.msgpack.encode(constraint), digest_size=32).digest()

        def read() -> str:
            # Another request may have asked for it meanwhile.
            return self._kept.get(key) or self._reader.read_grammar(constraint, self._timeout_s)

        self._kept[key] = self._kept.pop(key, "") or await self._turn.work(owner, read)
        num_bytes = sum(map(len, self._kept.values()))
        while len(self._kept) > limits.MAX_KEPT_GRAMMARS or num_bytes > limits.MAX_KEPT_GRAMMAR_BYTES:
            num_bytes -= len(self._kept.popitem(last=False)[1])
        return self._kept[key]


class GrammarProcess:
    """Implements `GrammarReader`, by a process that is there for that (`grammar_child.py`): it is started with the
    first question, or by `load_tokens`, and again where it has ended."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos = tuple(sorted(eos_token_ids))
        self._lock = threading.Lock()
        self._child: _Child | None = None

    def load_tokens(self) -> None:
        """Begin what the first question would have to wait for; where there is no process to be had, with that."""
        with self._lock, contextlib.suppress(OSError):
            self._running()

    def read_grammar(self, constraint: Constraint, timeout_s: float) -> str:
        """Return the grammar, as `GrammarReader` has it."""
        order = msgspec.msgpack.encode(ReadGrammar(constraint, timeout_s))
        try:
            answer = self._ask(order, timeout_s) or self._ask(order, timeout_s)
        except OSError as error:
            log.error("the process that understands grammars does not answer: %s", error)
            answer = Understood(is_busy=True)
        if answer is None or answer.is_busy:
            raise NotNowError("overloaded", "there is no process now to understand what the answer must be")
        if answer.failure:
            log.error("a grammar could not be understood: %s", answer.failure)
            raise InvalidRequestError(f"`{constraint.param}` cannot be understood", constraint.param, constraint.code)
        if answer.refused is not None:
            raise InvalidRequestError(answer.refused.message, answer.refused.param, answer.refused.code)
        if answer.grammar:
            return answer.grammar
        param, most = constraint.param, f"{limits.GRAMMAR_CPU_S:g} s and {limits.GRAMMAR_BYTES >> 20} MiB"
        message = f"`{param}` takes more than {most} to understand: simplify it"
        raise InvalidRequestError(message, param, constraint.code)

    def _ask(self, order: bytes, timeout_s: float) -> Understood | None:
        """Return the answer of a copy of the process; an empty one where it has come to a limit; None where the process
        itself has ended. Raises OSError."""
        ours, theirs = socket.socketpair()
        with ours:
            with theirs, self._lock:
                child = self._running()
                try:
                    socket.send_fds(child.control, [b"?"], [theirs.fileno()])
                except BrokenPipeError:
                    return None
            ours.settimeout(timeout_s + limits.GRAMMAR_CHILD_S)
            try:
                ours.sendall(order)
                ours.shutdown(socket.SHUT_WR)
                answer = receive_all(ours)
            except (BrokenPipeError, ConnectionResetError):
                answer = b""
            except TimeoutError:
                child.end_process()
                raise
        with contextlib.suppress(msgspec.DecodeError):  # it was ended as it sent something, or before
            return msgspec.msgpack.decode(answer, type=Understood)
        return None if child.ends_soon() else Understood()

    def _running(self) -> "_Child":
        if self._child is None or self._child.process.poll() is not None:
            if self._child is not None:
                log.error("the process that understands grammars has ended; it is started again")
                self._child.end_process()
            self._child = _Child(LoadTokens(self._tokenizer.to_str(), self._vocab_size, self._eos))
        return self._child


class _Child:
    """One process, and the socket by which it is asked. It ends with whoever holds this."""

    def __init__(self, tokens: LoadTokens) -> None:
        self.control, theirs = socket.socketpair()
        with theirs:
            module = ("-m", "services.gateway.api.grammar_child", str(theirs.fileno()))
            try:
                self.process = subprocess.Popen(
                    [sys.executable, "-P", *module],
                    stdin=subprocess.DEVNULL,
                    stdout=2,
                    pass_fds=(theirs.fileno(),),
                    env=child_environment(),
                    start_new_session=True,  # as an engine's process: what it computes is not the gateway's share
                )
            except OSError:
                self.control.close()
                raise
        self._finalizer = weakref.finalize(self, _end, self.process, self.control)
        memory = os.memfd_create("kvmesh-tokens", os.MFD_CLOEXEC)
        with os.fdopen(memory, "wb") as file:
            file.write(msgspec.msgpack.encode(tokens))
            file.flush()
            os.lseek(memory, 0, os.SEEK_SET)
            socket.send_fds(self.control, [b"!"], [memory])

    def ends_soon(self) -> bool:
        try:
            self.process.wait(limits.GRAMMAR_END_S)
        except subprocess.TimeoutExpired:
            return False
        return True

    def end_process(self) -> None:
        """Kill it. Idempotent."""
        self._finalizer()


def _end(process: "subprocess.Popen[bytes]", control: socket.socket) -> None:
    control.close()
    process.kill()
    process.wait()
