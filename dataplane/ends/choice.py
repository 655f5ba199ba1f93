"""Which carrier a reader uses towards a holder, and why."""

import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

from dataplane import limits
from dataplane.carriers.carrier import AUTO, KVArena
from schemas.handoff import Endpoint


class CarrierImpossibleError(Exception):
    """The carrier asked for, or any at all under "auto", does not lead to this holder."""

    def __init__(self, wanted: str, offered: tuple[str, ...]) -> None:
        super().__init__(
            f"carrier {wanted!r} does not lead to this holder, which offers {', '.join(offered) or 'none'}"
        )
        self.wanted = wanted
        self.offered = offered


class CarrierChoice(NamedTuple):
    """A carrier and why it was taken, for people."""

    carrier: str
    reason: str


def choices(wanted: str, endpoint: Endpoint, arena: KVArena) -> list[CarrierChoice]:
    """Return the carriers that lead from this holder to the arena, best first: the one wanted, or under "auto" each.

    Raises CarrierImpossibleError when there is none.
    """
    found: list[CarrierChoice] = []
    for carrier in arena.carriers if wanted == AUTO else (wanted,):
        reason = arena.leads_from(carrier, endpoint) if carrier in endpoint.carriers else None
        if reason is not None:
            found.append(CarrierChoice(carrier, reason if wanted == AUTO else f"{reason}; asked for"))
    if not found:
        raise CarrierImpossibleError(wanted, endpoint.carriers)
    return found


class BrokenCarriers:
    """The carriers that could not be set up within the last `broken_s`, by holder. Thread-safe."""

    def __init__(self, broken_s: float) -> None:
        self._broken_s = broken_s
        self._lock = threading.Lock()
        self._until: dict[tuple[str, str], float] = {}

    def note_broken(self, arena_nonce: str, carrier: str) -> None:
        with self._lock:
            self._until.pop((arena_nonce, carrier), None)
            self._until[(arena_nonce, carrier)] = time.monotonic() + self._broken_s
            while len(self._until) > limits.MAX_BROKEN:
                del self._until[next(iter(self._until))]

    def without(self, arena_nonce: str, found: Sequence[CarrierChoice]) -> list[CarrierChoice]:
        """Return the choices that are not broken; all, where none is left."""
        with self._lock:
            now = time.monotonic()
            whole = [choice for choice in found if self._until.get((arena_nonce, choice.carrier), now) <= now]
        return whole or list(found)
