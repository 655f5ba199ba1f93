"""Asks the directory who holds a prompt's blocks. A hint: without an answer a request is placed all the same."""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import NamedTuple

from schemas import subjects
from schemas.directory import HolderPrefix, LocateBlocks
from schemas.request import PlaceRequest
from services.bus.base import BusError
from services.bus.typed import TypedBus
from services.runtime import now_ms
from services.scheduler.limits import BACKOFF_MAX_MS, BACKOFF_MIN_MS

log = logging.getLogger(__name__)


class Asked(NamedTuple):
    """What came of asking. `holders`: who holds which of a prompt's blocks; None: the directory did not answer in time.
    `took_ms` None: it was not asked."""

    holders: tuple[HolderPrefix, ...] | None
    took_ms: float | None = None


NOT_ASKED = Asked(())


class Hints:
    """A client of the directory. One that is down or slow costs a request `timeout_s`, then nothing."""

    def __init__(self, bus: TypedBus, timeout_s: float, clock: Callable[[], int] = now_ms) -> None:
        self._bus = bus
        self._timeout_s = timeout_s
        self._clock = clock
        self._quiet_until_ms = 0
        self._backoff_ms = 0

    async def ask(self, request: PlaceRequest, trace: str = "") -> Asked:
        """Ask on behalf of a request, whose `trace` the directory is to go on with."""
        if not request.block_hashes:
            return NOT_ASKED
        if self._clock() < self._quiet_until_ms:
            return Asked(None)
        question = LocateBlocks(
            request_id=request.request_id,
            attempt=request.attempt,
            deadline_ms=request.deadline_ms,
            block_hashes=request.block_hashes,
        )
        began_ns = time.monotonic_ns()
        try:
            async with asyncio.timeout(2 * self._timeout_s):  # sending may wait as well
                located = await self._bus.ask(subjects.LOCATE, (), question, self._timeout_s, trace)
        except (BusError, TimeoutError) as error:
            self._back_off(error)
            return Asked(None, _ms_since(began_ns))
        self._backoff_ms = 0
        return Asked(located.holders, _ms_since(began_ns))

    def _back_off(self, error: BusError | TimeoutError) -> None:
        if not self._backoff_ms:
            log.warning("placing without the directory: %s", error or "it cannot be asked")
        self._backoff_ms = min(max(2 * self._backoff_ms, BACKOFF_MIN_MS), BACKOFF_MAX_MS)
        self._quiet_until_ms = self._clock() + self._backoff_ms


def _ms_since(began_ns: int) -> float:
    return (time.monotonic_ns() - began_ns) / 1e6
