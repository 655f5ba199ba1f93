"""SIGTERM from the first moment of a process on, before a loop handles it. Imports nothing that takes time.

The kernel keeps a signal that has no handler from process 1, which a service is in a container; and Python calls
handlers only between two of its own steps, not while a library loads weights. So a handler ends the process as an
exception does, and a thread ends it where that takes too long.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Generator
from types import FrameType
from typing import NoReturn

UNWINDING_S = 1.0
"""What the main thread has to end by itself: a service that is still starting is gone within two seconds."""
EXIT_CODE = 128 + signal.SIGTERM
_OF_GROUPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def ignore_signals() -> None:
    """From now on this process, which another one starts and ends, ignores what a terminal or an init sends to all
    processes of a group: that is for the one that started it."""
    for number in _OF_GROUPS:
        signal.signal(number, signal.SIG_IGN)


def end_on_signal() -> None:
    """From now on SIGTERM ends this process, until a loop that handles it runs (`run_until_signal`)."""
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    signal.set_wakeup_fd(write_end)  # written as the signal comes, whatever the main thread does
    signal.signal(signal.SIGTERM, _unwind)
    threading.Thread(target=_end_late, args=(read_end,), name="end on signal", daemon=True).start()


@contextlib.contextmanager
def leaving_at_once() -> Generator[None]:
    """End the process behind the block, but where an error leaves it: Python itself would first take apart all that was
    imported, which takes seconds, and no thread could end it meanwhile."""
    code: object = 0
    try:
        yield
    except SystemExit as ended:
        code = ended.code
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    _leave(code if isinstance(code, int) else 1)


def _unwind(number: int, frame: FrameType | None) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one must not cut short what the first has begun
    sys.exit(EXIT_CODE)


def _end_late(read_end: int) -> None:
    while signal.SIGTERM not in os.read(read_end, 64):
        pass
    time.sleep(UNWINDING_S)
    _leave(EXIT_CODE)


def _leave(code: int) -> NoReturn:
    # Not imported: the main thread may be in the middle of it, and then there is no arena.
    if arenas := sys.modules.get("dataplane.memory.arena"):
        arenas.unlink_owned()
    os._exit(code)
