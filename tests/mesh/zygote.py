"""Processes that start in a moment: a server that has imported everything once, and forks a service for each order.

Every service is a process of its own, with its own memory, sockets and id; only what imports would take is saved, and a
fault can be repeated a thousand times. As a program: serves orders from the socket that is its standard input.
"""

import array
import asyncio
import contextlib
import ctypes
import importlib
import importlib.util
import json
import os
import select
import signal
import socket
import subprocess
import sys
from typing import Any

from services.cli.app import run
from services.engine import process
from services.engine.starter import EngineStarter
from services.restarts import FIRST_WAIT_S, Restarts

MODULES = (
    "services.bus.nats",
    "services.launch.serve",
    "services.directory.service",
    "services.engine.loading",
    "services.gateway.service",
    "services.scheduler.service",
    "services.store.service",
    "services.worker.parts",
    "services.worker.service",
)
"""What a service imports as it starts."""
WORKER_ROLES = {"prefill", "decode", "aggregated"}
MAX_MESSAGE_BYTES = 1 << 16
_PR_SET_PDEATHSIG = 1


class ForkedProcess:
    """A forked service, with what the supervisor uses of `asyncio.subprocess.Process`."""

    def __init__(self, pid: int, stdin: int, stdout: asyncio.StreamReader) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.stdout = stdout
        self._stdin = stdin
        self._ended = asyncio.Event()

    def send_signal(self, number: int) -> None:
        """Raises ProcessLookupError when it has ended."""
        if self.returncode is not None:
            raise ProcessLookupError(self.pid)
        os.kill(self.pid, number)

    async def wait(self) -> int:
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def end(self, returncode: int) -> None:
        self.returncode = returncode
        os.close(self._stdin)
        self._ended.set()


class Zygote:
    """The server, as whoever orders sees it. Belongs to one event loop."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._server = subprocess.Popen([sys.executable, "-m", "tests.mesh.zygote"], stdin=theirs.fileno())
        self._socket = ours
        self._socket.setblocking(False)
        self._processes: dict[int, ForkedProcess] = {}
        self._early_ends: dict[int, int] = {}
        self._ready = asyncio.Event()
        self._orders: list[asyncio.Future[int]] = []
        asyncio.get_running_loop().add_reader(self._socket, self._hear)

    async def spawn(self, arguments: list[str], log: int) -> ForkedProcess:
        """Start `kvmesh ARGUMENTS`; `log` takes its standard error."""
        await self._ready.wait()
        stdin_read, stdin_write = os.pipe()
        stdout_read, stdout_write = os.pipe()
        fds = array.array("i", [stdin_read, stdout_write, log])
        forked: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._orders.append(forked)
        self._socket.sendmsg([json.dumps(arguments).encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
        os.close(stdin_read)
        os.close(stdout_write)
        try:
            pid = await forked
        except asyncio.CancelledError:  # its standard input ends, and it with it
            os.close(stdin_write)
            os.close(stdout_read)
            raise
        reader = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(stdout_read, "rb", buffering=0)
        )
        process = self._processes[pid] = ForkedProcess(pid, stdin_write, reader)
        if (code := self._early_ends.pop(pid, None)) is not None:
            process.end(code)
        return process

    async def stop(self) -> None:
        """End the server; what it has forked has been stopped before, or ends with it."""
        asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()
        await asyncio.to_thread(self._server.wait)

    def _hear(self) -> None:
        try:
            data = self._socket.recv(MAX_MESSAGE_BYTES)
        except BlockingIOError:
            return
        message: dict[str, Any] = json.loads(data) if data else {"gone": True}
        match message:
            case {"ready": _}:
                self._ready.set()
            case {"forked": pid}:
                order = self._orders.pop(0)
                if not order.cancelled():
                    order.set_result(pid)
            case {"ended": pid, "code": code}:
                if pid in self._processes:
                    self._processes.pop(pid).end(code)
                else:
                    self._early_ends[pid] = code
            case _:
                asyncio.get_running_loop().remove_reader(self._socket)


def serve(orders: socket.socket) -> None:
    """Fork for every order, and tell of every end; return when nobody orders any more."""
    starter = EngineStarter("vllm" if importlib.util.find_spec("vllm") else "transformers", num_threads=1)
    for name in MODULES:
        importlib.import_module(name)
    wakeup_read, wakeup_write = os.pipe()
    os.set_blocking(wakeup_write, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakeup_write, warn_on_full_buffer=False)
    orders.send(json.dumps({"ready": True}).encode())
    while True:
        readable, _, _ = select.select([orders, wakeup_read], [], [])
        if wakeup_read in readable:
            os.read(wakeup_read, 4096)
            _tell_ends(orders)
        if orders in readable:
            data, fds, _, _ = socket.recv_fds(orders, MAX_MESSAGE_BYTES, 3)
            if not data:
                starter.close()
                return
            arguments = json.loads(data)
            if WORKER_ROLES & set(arguments):
                arguments += ["--starter", str(starter.orders)]
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                _become_service(arguments, fds, (orders.fileno(), wakeup_read, wakeup_write))
            for fd in fds:
                os.close(fd)
            orders.send(json.dumps({"forked": pid}).encode())


def _tell_ends(orders: socket.socket) -> None:
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            pid, status = ended
            orders.send(json.dumps({"ended": pid, "code": os.waitstatus_to_exitcode(status)}).encode())


def _become_service(arguments: list[str], fds: list[int], ours: tuple[int, ...]) -> None:
    """Run the command as a fresh process would. Does not return."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()
    for fd in ours:
        with contextlib.suppress(OSError):
            os.close(fd)
    for target, fd in enumerate(fds):
        os.dup2(fd, target)
        os.close(fd)
    process.Restarts = QuickRestarts
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w", buffering=1)  # noqa: SIM115
    sys.argv = ["kvmesh", *arguments]
    code = 1
    try:
        run()
        code = 0
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else 0 if ending.code is None else 1
    except BaseException as error:  # noqa: BLE001 -- as the interpreter would: a traceback, then the end
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        sys.stdout.flush()
        os._exit(code)


class QuickRestarts(Restarts):
    """Starts again soon, however often: what ends here was killed by us."""

    def ended(self, started_s: float, now_s: float) -> float:
        self.num_restarts += 1
        return FIRST_WAIT_S


if __name__ == "__main__":
    serve(socket.socket(fileno=0))
