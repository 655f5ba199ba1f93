"""The process that forks engines' processes, as who orders them has it (`forks.py` is that process).

What an engine imports takes seconds; there it is imported once, and each engine is a copy of that process. `kvmesh up`
has one for all its workers, a worker that is served alone has its own.
"""

import contextlib
import logging
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

from services.config import EngineName, child_environment
from services.engine.limits import CLOSE_LOOK_S
from services.files import open_private

log = logging.getLogger(__name__)

KEEPS_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(256 << 20), "MALLOC_MMAP_THRESHOLD_": str(32 << 20)}
"""What glibc's `malloc` reads. By itself it gives the kernel back what a step has freed, and the next step takes every
page anew: of the time of a step with long contexts, half and more. 32 MiB is the most that it takes for the second."""
NOBODY_KNOWS = 255
"""The exit code of an engine whose starter has ended before it."""
MAX_NAME_BYTES = 256
REPORT = struct.Struct("<q")
"""The starter's reports of an engine: its process id, with a pidfd; then its exit code."""


class ForkedEngine:
    """An engine's process, with what is used of `subprocess.Popen`. From any thread."""

    def __init__(self, reports: socket.socket) -> None:
        self.pid = 0
        """0: it is not known yet."""
        self._reports = reports
        self._reports.setblocking(False)
        self._handle = -1
        """Its pidfd, which never means another process as its number may."""
        self._is_orphan = False
        """Its starter has ended, and reports nothing of its end."""
        self._code: int | None = None
        self._lock = threading.Lock()

    def wait_forked(self, timeout_s: float) -> None:
        """Wait until it has a process id, or never will, for so long at most: the starter may be importing."""
        until_s = time.monotonic() + timeout_s
        while self.poll() is None and not self.pid and time.monotonic() < until_s:
            is_readable(self._reports.fileno(), CLOSE_LOOK_S)

    def poll(self) -> int | None:
        """Return its exit code, or the negative number of the signal that ended it; None: it runs, or is to be."""
        with self._lock:
            while self._code is None:
                try:
                    report, descriptors, _, _ = socket.recv_fds(self._reports, REPORT.size, 1)
                except BlockingIOError:
                    break
                except ConnectionError:
                    report, descriptors = b"", []
                if descriptors:
                    (self._handle,), (self.pid,) = descriptors, REPORT.unpack(report)
                elif report:
                    self._end(*REPORT.unpack(report))
                elif self._handle < 0 or is_readable(self._handle, 0):
                    self._end(NOBODY_KNOWS)
                else:
                    self._is_orphan = True
                    break
        return self._code

    def wait(self) -> int:
        """Return its exit code once it has ended, which another thread may see first."""
        while (code := self.poll()) is None:
            is_readable(self._handle if self._is_orphan else self._reports.fileno(), CLOSE_LOOK_S)
        return code

    def kill(self) -> None:
        """End it; one that is not forked yet never will be. Idempotent."""
        if self.poll() is not None:
            return
        with self._lock:
            if self._handle < 0:
                self._end(-signal.SIGKILL)
            else:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._handle, signal.SIGKILL)

    def _end(self, code: int) -> None:
        self._code = code
        self._reports.close()
        if self._handle >= 0:
            os.close(self._handle)


class EngineStarter:
    """The process that forks engines. From any thread."""

    def __init__(
        self, engine: EngineName, num_threads: int, *, inherited: int | None = None, log_path: Path | None = None
    ) -> None:
        """Start one, or take the one behind a descriptor that this process has inherited. `log_path`: where it logs
        what goes wrong; None: where this process does. Raises OSError."""
        self._engine: EngineName = engine
        self._num_threads = num_threads
        self._log_path = log_path
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._orders = self._launch() if inherited is None else socket.socket(fileno=inherited)
        self._orders.set_inheritable(False)

    @property
    def orders(self) -> int:
        """The descriptor that a worker inherits; of a new process, where the one before has ended. Raises OSError."""
        with self._lock:
            if self._process is not None and self._process.poll() is not None:
                self._replace()
            return self._orders.fileno()

    def fork_engine(self, name: str, descriptors: tuple[int, int, int]) -> ForkedEngine:
        """Order the process of the engine of the worker of this name. `descriptors`: of its channel, of its table, of
        what wakes the worker. Raises OSError."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs, self._lock:
                order, passed = name.encode()[:MAX_NAME_BYTES], [theirs.fileno(), *descriptors, 2]
                try:
                    socket.send_fds(self._orders, [order], passed)
                except ConnectionError:
                    log.warning("the process that starts engines has ended; another one is started")
                    self._replace()
                    socket.send_fds(self._orders, [order], passed)
        except BaseException:
            ours.close()
            raise
        return ForkedEngine(ours)

    def close(self) -> None:
        """End the process, if it was started here. Engines go on. Idempotent."""
        with self._lock:
            self._orders.close()
            if self._process is not None:
                self._process.kill()
                self._process.wait()

    def _replace(self) -> None:
        self._orders.close()
        if self._process is not None:
            self._process.wait()
        self._orders = self._launch()

    def _launch(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # OpenMP reads it as it is loaded, and vLLM lets nobody change it afterwards.
        environment = KEEPS_MEMORY | child_environment() | {"OMP_NUM_THREADS": str(self._num_threads)}
        arguments = [sys.executable, "-P", "-m", "services.engine.forks", self._engine, str(theirs.fileno())]
        with theirs, open_private(self._log_path, "ab") if self._log_path else contextlib.nullcontext(2) as log_file:
            # What libraries print must not be taken for what the worker prints.
            self._process = subprocess.Popen(
                arguments, stdin=subprocess.DEVNULL, stdout=log_file, stderr=log_file, pass_fds=(theirs.fileno(),),
                env=environment, start_new_session=True,
            )  # fmt: skip
        return ours


def is_readable(descriptor: int, timeout_s: float) -> bool:
    """Wait until there is something to read, or the other side has ended, at most for so long; return whether it is."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(1000 * timeout_s))
