"""Incarnations that were declared left. Pure.

What such a one says counts no more. It is told again that it has left, so that a worker that was stopped and goes on,
or has missed the first word, comes back as a new incarnation.
"""

from dataclasses import dataclass

from schemas.ids import WorkerId
from schemas.worker import WorkerLeft

MAX_FENCES = 1_024
REPEAT_MS = 1_000


@dataclass(slots=True)
class Fence:
    left: WorkerLeft
    said_ms: int


class Fences:
    """Remembers the latest ones."""

    def __init__(self, max_fences: int = MAX_FENCES) -> None:
        self._max_fences = max_fences
        self._fences: dict[tuple[WorkerId, str], Fence] = {}

    def add(self, left: WorkerLeft, now_ms: int) -> None:
        """This incarnation has left, and somebody says so now."""
        key = (left.worker_id, left.incarnation)
        known = self._fences.pop(key, None)
        self._fences[key] = Fence(known.left if known else left, now_ms)
        if len(self._fences) > self._max_fences:
            del self._fences[next(iter(self._fences))]

    def holds(self, worker_id: WorkerId, incarnation: str) -> bool:
        return (worker_id, incarnation) in self._fences

    def repeat(self, worker_id: WorkerId, incarnation: str, now_ms: int) -> list[WorkerLeft]:
        """Return what to tell a fenced incarnation that has just spoken: at most once in `REPEAT_MS`."""
        fence = self._fences[(worker_id, incarnation)]
        if now_ms - fence.said_ms < REPEAT_MS:
            return []
        fence.said_ms = now_ms
        return [fence.left]
