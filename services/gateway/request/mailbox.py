"""What waits for a client: its own tokens, as ids, and one end. So a client that does not read holds up nobody."""

import asyncio
from dataclasses import dataclass, field

from services.gateway import limits
from services.gateway.request.events import Abandon, Deliver, FailRequest, Finish, Output


@dataclass(slots=True)
class _Waiting:
    """What one choice has put out since its reader last came."""

    index: int = 0
    parts: list[list[int]] = field(default_factory=list[list[int]])
    end: Finish | FailRequest | Abandon | None = None


class Mailbox:
    """What the choices of one HTTP request have put out. One reader; putting never waits."""

    def __init__(self) -> None:
        self._waiting: dict[int, _Waiting] = {}
        self._filled = asyncio.Event()

    @property
    def num_waiting_tokens(self) -> int:
        return sum(len(part) for waiting in self._waiting.values() for part in waiting.parts)

    def put(self, choice: int, output: Output) -> None:
        """Add what a choice puts out next."""
        waiting = self._waiting.setdefault(choice, _Waiting())
        if isinstance(output, Deliver):
            if not waiting.parts:
                waiting.index = output.index
            if len(waiting.parts) < limits.MAX_PARTS:
                waiting.parts.append([])
            waiting.parts[-1] += output.tokens
        else:
            waiting.end = output
        self._filled.set()

    async def take(self) -> list[tuple[int, Output]]:
        """Return all there is, at least one."""
        await self._filled.wait()
        self._filled.clear()
        taken, self._waiting = self._waiting, {}
        items: list[tuple[int, Output]] = []
        for choice, waiting in taken.items():
            index = waiting.index
            for part in waiting.parts:
                items.append((choice, Deliver(index, tuple(part))))
                index += len(part)
            if waiting.end is not None:
                items.append((choice, waiting.end))
        return items
