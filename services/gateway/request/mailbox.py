"""What waits for a client: its own tokens, as ids, and one end. So a client that does not read holds up nobody."""

import asyncio
from dataclasses import dataclass, field

from services.gateway import limits
from services.gateway.request.events import Abandon, Deliver, FailRequest, Finish, Output


@dataclass(slots=True)
class _Waiting:
    """What one choice has put out since its reader last came."""

    parts: list[Deliver] = field(default_factory=list[Deliver])
    end: Finish | FailRequest | Abandon | None = None


class Mailbox:
    """What the choices of one HTTP request have put out. One reader; putting never waits."""

    def __init__(self) -> None:
        self._waiting: dict[int, _Waiting] = {}
        self._filled = asyncio.Event()

    @property
    def num_waiting_tokens(self) -> int:
        return sum(len(part.tokens) for waiting in self._waiting.values() for part in waiting.parts)

    def put(self, choice: int, output: Output) -> None:
        """Add what a choice puts out next."""
        waiting = self._waiting.setdefault(choice, _Waiting())
        if isinstance(output, Deliver):
            if len(waiting.parts) < limits.MAX_PARTS:
                waiting.parts.append(output)
            else:
                waiting.parts[-1] = _joined(waiting.parts[-1], output)
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
            items += ((choice, part) for part in waiting.parts)
            if waiting.end is not None:
                items.append((choice, waiting.end))
        return items


def _joined(first: Deliver, then: Deliver) -> Deliver:
    """Return what both bring."""
    prompt_logprobs = first.prompt_logprobs or then.prompt_logprobs
    return Deliver(first.index, first.tokens + then.tokens, first.logprobs + then.logprobs, prompt_logprobs)
