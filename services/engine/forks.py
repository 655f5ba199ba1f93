"""The process that forks engines' processes, as `starter.py` orders it.

It is `python -P -m services.engine.forks ENGINE ORDERS`. An order on the socket `ORDERS` is a worker's name with five
descriptors: a socket on which the engine's process id and its end are reported, the engine's channel, table and bell
(`ipc.py`), and the worker's log.
"""

import contextlib
import gc
import logging
import os
import selectors
import signal
import socket
import sys
from functools import partial
from pathlib import Path
from typing import NamedTuple, NoReturn

from services.ending import ignore_signals
from services.engine import child
from services.engine.loading import import_engine
from services.engine.starter import MAX_NAME_BYTES, REPORT, is_readable
from services.runtime import configure_logging

log = logging.getLogger(__name__)

NUM_DESCRIPTORS = 5


class _Copy(NamedTuple):
    """An engine's process, as the one that has forked it has it."""

    pid: int
    handle: int
    reports: socket.socket


class _Forks:
    """Forks for each order, and reports each end."""

    def __init__(self, orders: socket.socket) -> None:
        self._orders = orders
        self._selector = selectors.DefaultSelector()
        self._selector.register(orders, selectors.EVENT_READ, self._take_order)

    def serve_orders(self) -> None:
        """Return once nobody can order any more, and all copies have ended."""
        while self._selector.get_map():
            for key, _ in self._selector.select():
                key.data()

    def _take_order(self) -> None:
        name, descriptors, _, _ = socket.recv_fds(self._orders, MAX_NAME_BYTES, NUM_DESCRIPTORS)
        if not name:
            self._selector.unregister(self._orders)
            return
        reports = socket.socket(fileno=descriptors[0])
        try:
            if is_readable(reports.fileno(), 0):  # the worker has given it up
                reports.close()
            else:
                self._fork(name.decode(errors="ignore"), reports, *descriptors[1:])
        finally:
            for descriptor in descriptors[1:]:
                os.close(descriptor)

    def _fork(self, name: str, reports: socket.socket, channel: int, table: int, bell: int, log_file: int) -> None:
        try:
            pid = os.fork()
        except OSError:
            log.exception("no process for the engine of %s", name)
            reports.close()
            return
        if pid == 0:
            _be_engine(name, channel, table, bell, log_file)
        copy = _Copy(pid, os.pidfd_open(pid), reports)
        with contextlib.suppress(ConnectionError):
            socket.send_fds(reports, [REPORT.pack(pid)], [copy.handle])
        self._selector.register(copy.handle, selectors.EVENT_READ, partial(self._report_end, copy))
        self._selector.register(reports, selectors.EVENT_READ, partial(self._kill, copy))

    def _kill(self, copy: _Copy) -> None:
        """Its worker has ended: nobody is there for whom to compute."""
        self._selector.unregister(copy.reports)
        signal.pidfd_send_signal(copy.handle, signal.SIGKILL)

    def _report_end(self, copy: _Copy) -> None:
        _, status = os.waitpid(copy.pid, 0)
        with contextlib.suppress(ConnectionError):
            copy.reports.send(REPORT.pack(os.waitstatus_to_exitcode(status)))
        for watched in {copy.handle, copy.reports.fileno()} & set(self._selector.get_map()):
            self._selector.unregister(watched)
        copy.reports.close()
        os.close(copy.handle)


def _be_engine(name: str, channel: int, table: int, bell: int, log_file: int) -> NoReturn:
    """Be what a new process would be, and end as it would."""
    # Linux shares processors out among sessions first (sched(7), autogroup): in the session of others the engine would
    # wait for their shares.
    os.setsid()
    os.dup2(log_file, 1)
    os.dup2(log_file, 2)
    # What belongs to other engines ends when their workers close it, which a copy here would hide.
    kept = {0, 1, 2, channel, table, bell}
    for descriptor in {int(path.name) for path in Path("/proc/self/fd").iterdir()} - kept:
        with contextlib.suppress(OSError):  # that of the folder is closed already
            os.close(descriptor)
    code = 1
    try:
        code = child.main(name, channel, table, bell)
    except BaseException as error:  # noqa: BLE001  (as the interpreter: a traceback, then the end)
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        sys.stderr.flush()
        os._exit(code)


def main(engine: str, orders: int) -> None:
    """Serve whoever has the other end of this socket."""
    ignore_signals()
    configure_logging("engines")
    with contextlib.suppress(ImportError):  # who makes an engine says what is lacking
        import_engine(engine)
    gc.collect()
    gc.freeze()  # copies share what no collection touches
    _Forks(socket.socket(fileno=orders)).serve_orders()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
