"""Meshes of forked services, and the loop that they and their zygote belong to."""

import asyncio
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import TypeVar, cast

from services.files import open_private
from services.launch.options import Launch
from services.launch.supervisor import Supervisor
from tests.mesh.zygote import Zygote

ResultT = TypeVar("ResultT")


class ForkedSupervisor(Supervisor):
    """As `kvmesh up`, but for its services being forked: what `import torch` takes is paid once."""

    def __init__(self, options: Launch, run_dir: Path, zygote: Zygote) -> None:
        super().__init__(options, run_dir)
        self._zygote = zygote

    async def _spawn(self, role: str, name: str) -> asyncio.subprocess.Process:
        with open_private(self.log_dir / f"{name}.log", "ab") as log:
            process = await self._zygote.spawn(self._arguments(role, name), log.fileno())
        return cast("asyncio.subprocess.Process", process)


class ForkingLoop:
    """An event loop in a thread of its own, and the zygote that belongs to it. One for a whole session: tests of many
    files share what the zygote has imported."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="mesh loop")
        self._thread.start()
        self._zygote: Zygote | None = None

    def run(self, work: Coroutine[object, object, ResultT], limit_s: float | None = None) -> ResultT:
        """Carry out a coroutine on the loop. Raises TimeoutError, and cancels it, where that takes too long."""
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return future.result(limit_s)
        finally:
            future.cancel()

    @property
    def zygote(self) -> Zygote:
        """The zygote; the first who asks starts it."""
        if self._zygote is None:
            self._zygote = self.run(self._start_zygote())
        return self._zygote

    def close(self) -> None:
        if self._zygote is not None:
            self.run(self._zygote.stop())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    async def _start_zygote(self) -> Zygote:
        return Zygote()
