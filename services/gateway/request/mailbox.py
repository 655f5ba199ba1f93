"""What waits for a client: its own tokens, as ids, and one end. So a client that does not read holds up nobody."""

import asyncio

from services.gateway import limits
from services.gateway.request.events import Deliver, Output


class Mailbox:
    """What the choices of one HTTP request have put out. One reader; putting never waits."""

    def __init__(self) -> None:
        self._waiting: dict[int, list[Output]] = {}
        """What each choice has put out since its reader last came."""
        self._filled = asyncio.Event()

    @property
    def num_waiting_tokens(self) -> int:
        waiting = (output for outputs in self._waiting.values() for output in outputs)
        return sum(len(output.tokens) for output in waiting if isinstance(output, Deliver))

    def put(self, choice: int, output: Output) -> None:
        """Add what a choice puts out next."""
        outputs = self._waiting.setdefault(choice, [])
        if isinstance(output, Deliver) and len(outputs) >= limits.MAX_PARTS and isinstance(outputs[-1], Deliver):
            outputs[-1] = _joined(outputs[-1], output)
        else:
            outputs.append(output)
        self._filled.set()

    async def collect(self) -> list[tuple[int, Output]]:
        """Return all there is, at least one."""
        await self._filled.wait()
        self._filled.clear()
        taken, self._waiting = self._waiting, {}
        return [(choice, output) for choice, outputs in taken.items() for output in outputs]


def _joined(first: Deliver, then: Deliver) -> Deliver:
    """Return what both bring."""
    prompt_logprobs = first.prompt_logprobs or then.prompt_logprobs
    return Deliver(first.index, first.tokens + then.tokens, first.logprobs + then.logprobs, prompt_logprobs)
