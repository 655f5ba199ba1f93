"""The process that understands what clients write of answers, which a gateway starts (`grammars.py`).

A grammar of a few hundred bytes may take any time and memory to understand. So this process has the model's tokens, and
for each grammar a copy of itself (a fork), which has limits, answers, and ends; where it comes to a limit the kernel
ends it, in the middle of a library or not.
"""

import contextlib
import gc
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec

from services.ending import ignore_signals
from services.engine.grammar import GrammarError, takes, tokens_of, understood
from services.gateway import limits
from services.gateway.api.constraints import Constraint, understand
from services.gateway.api.invalid import InvalidRequestError
from services.gateway.api.json_schema import CheckGrammar


class LoadTokens(msgspec.Struct, frozen=True, array_like=True):
    """The first that is sent: a tokenizer in JSON, and what ends an answer."""

    tokenizer: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]


class ReadGrammar(msgspec.Struct, frozen=True, array_like=True):
    constraint: Constraint
    timeout_s: float


class Refused(msgspec.Struct, frozen=True, array_like=True):
    """As `InvalidRequestError`."""

    message: str
    param: str | None
    code: str | None


class Understood(msgspec.Struct, frozen=True, array_like=True):
    """The answer. `failure`: what no grammar should do to us; `is_busy`: there was no process to be had."""

    grammar: str = ""
    refused: Refused | None = None
    failure: str = ""
    is_busy: bool = False


def receive_all(sock: socket.socket) -> bytes:
    """Return what comes until the other side has sent all. Raises OSError."""
    return b"".join(iter(partial(sock.recv, 1 << 16), b""))


def main(control: int) -> None:
    """Serve the gateway at this socket until it closes it."""
    ignore_signals()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how a copy has ended
    ours = socket.socket(fileno=control)
    tokens = _receive_tokens(ours)
    check = _check_of(tokens)
    gc.collect()
    gc.freeze()  # copies share what is not touched
    while True:
        understood, descriptors, _, _ = socket.recv_fds(ours, 1, 1)
        if not understood:
            return
        with socket.socket(fileno=descriptors[0]) as asked:
            try:
                is_copy = os.fork() == 0
            except OSError:
                with contextlib.suppress(OSError):
                    asked.sendall(msgspec.msgpack.encode(Understood(is_busy=True)))
                continue
            if is_copy:
                ours.close()
                _answer(asked, check)


def _receive_tokens(control: socket.socket) -> LoadTokens:
    _, (memory, *_), _, _ = socket.recv_fds(control, 1, 1)
    with os.fdopen(memory, "rb") as file:
        return msgspec.msgpack.decode(file.read(), type=LoadTokens)


def _check_of(tokens: LoadTokens) -> CheckGrammar:
    try:
        library = tokens_of(tokens.tokenizer, tokens.vocab_size, list(tokens.eos_token_ids))
    except GrammarError as error:
        reason = str(error)

        def refuse(_: str) -> Callable[[str], bool]:
            raise GrammarError(reason)

        return refuse
    return lambda text: partial(takes, library, understood(library, text))


# In a copy.


def _answer(asked: socket.socket, check: CheckGrammar) -> None:
    """Answer one question, and end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # where memory ends libraries print, and abort
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(limits.GRAMMAR_NICE)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", "ascii")  # rather this one than whom it serves
    wanted = msgspec.msgpack.decode(receive_all(asked), type=ReadGrammar)
    # Their default is to end the process; they come whatever it does.
    signal.setitimer(signal.ITIMER_REAL, wanted.timeout_s)
    signal.setitimer(signal.ITIMER_PROF, limits.GRAMMAR_CPU_S)
    data = _data_bytes() + limits.GRAMMAR_BYTES
    threading.stack_size(limits.GRAMMAR_STACK_BYTES)
    resource.setrlimit(resource.RLIMIT_DATA, (data, data))
    thread = threading.Thread(target=_understand, args=(asked, wanted.constraint, check))
    thread.start()
    thread.join()
    os._exit(0)


def _data_bytes() -> int:
    """Return what `RLIMIT_DATA` counts of this process."""
    status = Path("/proc/self/status").read_text("ascii")
    return int(status.partition("VmData:")[2].split()[0]) * 1024


def _understand(asked: socket.socket, constraint: Constraint, check: CheckGrammar) -> None:
    try:
        understood = Understood(understand(constraint, check))
    except InvalidRequestError as error:
        understood = Understood(refused=Refused(error.message, error.param, error.code))
    except MemoryError:
        os._exit(1)
    except BaseException as error:  # noqa: BLE001  (a library may panic)
        understood = Understood(failure=f"{type(error).__name__}: {error}")
    asked.sendall(msgspec.msgpack.encode(understood))


if __name__ == "__main__":
    main(int(sys.argv[1]))
