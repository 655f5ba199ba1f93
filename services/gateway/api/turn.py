"""Work that takes a thread for long: one request at a time has it done."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

from services.gateway.api.guard import NotNowError

ResultT = TypeVar("ResultT")


class Turn:
    """`busy`: what the others do, as who would wait for them for over `timeout_s` is told."""

    def __init__(self, busy: str, timeout_s: float) -> None:
        self._busy = busy
        self._timeout_s = timeout_s
        self._lock = asyncio.Lock()

    async def work(self, work: Callable[[], ResultT], timeout_s: float | None = None) -> ResultT:
        """Return the result of `work`, done in a thread. Raises NotNowError where the others take too long, and
        TimeoutError where the work itself does."""
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._lock.acquire()
        except TimeoutError as error:
            raise NotNowError("overloaded", self._busy) from error
        working = asyncio.get_running_loop().run_in_executor(None, work)
        # A thread cannot be stopped: its turn ends with it, whether or not somebody still waits.
        working.add_done_callback(lambda _: self._lock.release())
        async with asyncio.timeout(timeout_s):
            return await asyncio.shield(working)
