"""The questions for placements of one gateway: a tenant's go a few at a time.

A scheduler serves one question after another. Hundreds of one tenant's, sent at once, would keep everybody else's
waiting, and themselves: who waits for too long asks again.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from services.gateway import limits

EndTurn = Callable[[], None]
"""Idempotent; not to be called before `Ask` has returned."""
Ask = Callable[[EndTurn], bool]
"""Begins to ask; False: there is no need any more."""


@dataclass(slots=True)
class _Line:
    waiting: deque[Ask] = field(default_factory=deque[Ask])
    num_asking: int = 0


class PlaceLines:
    """`turn_s`: who has been asking for so long holds up nobody any more."""

    def __init__(self, turn_s: float) -> None:
        self._turn_s = turn_s
        self._lines: dict[str, _Line] = {}

    def join(self, tenant: str, ask: Ask) -> None:
        """Call `ask` when it is its turn, with what ends that. Who is refused may leave it to the time: the next one
        would be refused, too."""
        self._lines.setdefault(tenant, _Line()).waiting.append(ask)
        self._go_on(tenant)

    def _go_on(self, tenant: str) -> None:
        line = self._lines[tenant]
        while line.waiting and line.num_asking < limits.PLACED_AT_ONCE:
            turn = contextlib.ExitStack()
            if line.waiting.popleft()(turn.close):
                line.num_asking += 1
                turn.callback(self._end, tenant)
                turn.callback(asyncio.get_running_loop().call_later(self._turn_s, turn.close).cancel)
        if not line.num_asking:
            self._lines.pop(tenant, None)

    def _end(self, tenant: str) -> None:
        self._lines[tenant].num_asking -= 1
        self._go_on(tenant)
