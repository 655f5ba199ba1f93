"""Work that takes a thread for long: a few requests at a time have it done, one of each owner, in turn."""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import TypeVar

from services.gateway.api.guard import NotNowError

ResultT = TypeVar("ResultT")


class Turn:
    """`busy`: what the others do, for the error of whoever would wait for them for over `timeout_s`. `at_once`: so many
    owners have work done at a time."""

    def __init__(self, busy: str, timeout_s: float, at_once: int = 1) -> None:
        self._busy = busy
        self._timeout_s = timeout_s
        self._at_once = at_once
        self._working: set[str] = set()
        self._lines: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        """Who waits, by owner; those whose work has ended last are at the end."""

    async def work(self, owner: str, work: Callable[[], ResultT]) -> ResultT:
        """Return the result of `work`, done in a thread. Raises NotNowError where the others take too long."""
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._begin(owner)
        except TimeoutError as error:
            raise NotNowError("overloaded", self._busy) from error
        working = asyncio.get_running_loop().run_in_executor(None, work)
        # A thread cannot be stopped: its turn ends with it, whether or not somebody still waits.
        working.add_done_callback(lambda _: self._end(owner))
        try:
            return await asyncio.shield(working)
        finally:
            # Its error keeps this frame, and so all that the work had in hand until the collector comes.
            del working

    async def _begin(self, owner: str) -> None:
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._lines.setdefault(owner, deque()).append(waiting)
        self._begin_next()
        try:
            await waiting
        except asyncio.CancelledError:
            if waiting.done() and not waiting.cancelled():  # it was its turn just now
                self._end(owner)
            raise

    def _end(self, owner: str) -> None:
        self._working.discard(owner)
        if owner in self._lines:
            self._lines.move_to_end(owner)
        self._begin_next()

    def _begin_next(self) -> None:
        """Let the first of each line begin, as long as there is room: the owners who were served longest ago first."""
        for owner in [owner for owner in self._lines if owner not in self._working]:
            line = self._lines[owner]
            while line and line[0].done():  # it was cancelled
                line.popleft()
            if line and len(self._working) < self._at_once:
                line.popleft().set_result(None)
                self._working.add(owner)
            if not line:
                del self._lines[owner]
