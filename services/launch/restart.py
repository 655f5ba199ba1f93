"""The record of each child process."""

import asyncio
import contextlib
import os
import signal
from dataclasses import dataclass, field

from services.launch.serve import ERROR_PREFIX, READY_LINE
from services.restarts import Restarts


@dataclass
class Child:
    """One service's process, and those that replace it."""

    role: str
    name: str
    process: asyncio.subprocess.Process
    started_s: float
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    error: str = ""
    restarts: Restarts = field(default_factory=Restarts)
    _reader: asyncio.Task[None] | None = None

    def follow(self) -> None:
        """Start to read the process's standard output."""
        self._reader = asyncio.create_task(self._read_lines(self.process), name=f"read {self.name}")

    def replace(self, process: asyncio.subprocess.Process, started_s: float) -> None:
        """The process has ended; take over the one that replaces it."""
        self.process, self.started_s, self.error = process, started_s, ""
        self.ready.clear()
        self.follow()

    async def wait_ended(self) -> None:
        """Return once the process has ended and all of its output was read."""
        if self._reader is not None:
            await asyncio.shield(self._reader)
        await self.process.wait()

    def describe_end(self) -> str:
        """Return how the process ended."""
        code = self.process.returncode
        assert code is not None
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        return f"{self.name} {how}" + (f" ({self.error})" if self.error else "")

    async def stop(self, timeout_s: float) -> bool:
        """End it by SIGTERM, after `timeout_s` by SIGKILL. False: it had to be killed."""
        if self.process.returncode is not None:
            return True
        for number in (signal.SIGTERM, signal.SIGCONT):  # a stopped process must run to get the first
            self._signal(number)
        try:
            await asyncio.wait_for(self.process.wait(), timeout_s)
        except TimeoutError:
            self.kill()
            await self.process.wait()
            return False
        return True

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                # Not `send_signal`: before Python 3.13 it takes the ending of a process from asyncio, which then knows
                # no code but 255 and logs it (python/cpython#87744).
                os.kill(self.process.pid, number)

    async def _read_lines(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        while True:
            try:
                raw = await process.stdout.readline()
            except ValueError:  # a line that is too long, of a library say
                continue
            if not raw:
                break
            line = raw.decode(errors="replace").strip()
            if line == READY_LINE:
                self.ready.set()
            elif line.startswith(ERROR_PREFIX):
                self.error = line.removeprefix(ERROR_PREFIX)
        await process.wait()
