"""Which carrier a reader uses towards a holder, and why."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dataplane.carriers import loopback, shm, tcp
from schemas.handoff import Endpoint

CUDA, NCCL = "cuda", "nccl"
CARRIERS = (loopback.NAME, CUDA, NCCL, shm.NAME, tcp.NAME)
"""Best first."""
AUTO = "auto"
BROKEN_S = 60.0
"""A carrier that could not be set up towards a holder is left out for so long, while there is another."""
_MAX_BROKEN = 256


class CarrierImpossibleError(Exception):
    """The carrier asked for, or any at all under "auto", does not lead to this holder."""

    def __init__(self, wanted: str, offered: tuple[str, ...]) -> None:
        super().__init__(
            f"carrier {wanted!r} does not lead to this holder, which offers {', '.join(offered) or 'none'}"
        )
        self.wanted = wanted
        self.offered = offered


class CarrierBrokenError(Exception):
    """A carrier that should lead to this holder cannot be set up. Nothing has crossed yet: another may be tried."""

    def __init__(self, carrier: str, reason: str) -> None:
        super().__init__(f"{carrier} cannot be set up: {reason}")
        self.carrier = carrier
        self.reason = reason


class Choice(NamedTuple):
    """A carrier and why it was taken, for people."""

    carrier: str
    reason: str


@dataclass(slots=True, frozen=True)
class ReaderPlace:
    """Where a reader's arena is, and what can be reached from there. `card`: the uuid of its card, "" in host memory.

    `can_attach` says whether the endpoint's shared memory is on this host, `can_map` whether the reader's card reads
    the memory of the card of this uuid, `has_nccl` whether communicators can be made here.
    """

    can_attach: Callable[[Endpoint], bool]
    card: str = ""
    can_map: Callable[[str], bool] = lambda _: False
    has_nccl: bool = False


def offered_carriers(wanted: str, *, on_card: bool, has_nccl: bool = False) -> tuple[str, ...]:
    """Return what a holder offers whose arena is in host memory or on a card, best first."""
    if wanted != AUTO:
        return (wanted,)
    if not on_card:
        return (shm.NAME, tcp.NAME)
    return (CUDA, NCCL, shm.NAME, tcp.NAME) if has_nccl else (CUDA, shm.NAME, tcp.NAME)


def choices(wanted: str, endpoint: Endpoint, place: ReaderPlace) -> list[Choice]:
    """Return the carriers that lead to this holder, best first: the one wanted, or under "auto" each.

    Raises CarrierImpossibleError when there is none.
    """
    found: list[Choice] = []
    for carrier in CARRIERS if wanted == AUTO else (wanted,):
        reason = _RULES[carrier](endpoint, place) if carrier in endpoint.carriers and carrier in _RULES else None
        if reason is not None:
            found.append(Choice(carrier, reason if wanted == AUTO else f"{reason}; asked for"))
    if not found:
        raise CarrierImpossibleError(wanted, endpoint.carriers)
    return found


def _loopback(endpoint: Endpoint, place: ReaderPlace) -> str | None:
    in_memory = not endpoint.card and not place.card
    return "one process" if in_memory and loopback.find(endpoint.arena_nonce) is not None else None


def _cuda(endpoint: Endpoint, place: ReaderPlace) -> str | None:
    if not endpoint.card or not place.card or not place.can_map(endpoint.card):
        return None
    cards = "one card" if endpoint.card == place.card else "cards that see each other's memory"
    if loopback.find(endpoint.arena_nonce) is not None:
        return f"one process, {cards}"
    return f"one host, {cards}" if place.can_attach(endpoint) else None


def _nccl(endpoint: Endpoint, place: ReaderPlace) -> str | None:
    if not endpoint.card or not place.card or endpoint.card == place.card:
        return None
    if endpoint.pair is None or not place.has_nccl:
        return None
    return "two cards"


def _shm(endpoint: Endpoint, place: ReaderPlace) -> str | None:
    return f"one host{_staging(endpoint, place)}" if place.can_attach(endpoint) else None


def _tcp(endpoint: Endpoint, place: ReaderPlace) -> str | None:
    return f"a network{_staging(endpoint, place)}" if endpoint.port > 0 else None


def _staging(endpoint: Endpoint, place: ReaderPlace) -> str:
    """Say what passes through host memory."""
    ends = [end for end, card in (("the holder's", endpoint.card), ("the reader's", place.card)) if card]
    return f", {' and '.join(ends)} card staged through host memory" if ends else ""


_RULES: dict[str, Callable[[Endpoint, ReaderPlace], str | None]] = {
    loopback.NAME: _loopback,
    CUDA: _cuda,
    NCCL: _nccl,
    shm.NAME: _shm,
    tcp.NAME: _tcp,
}
"""Each returns why its carrier leads there, or None."""


class BrokenWays:
    """The carriers that could not be set up of late, by holder. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._until: dict[tuple[str, str], float] = {}

    def add(self, arena_nonce: str, carrier: str) -> None:
        with self._lock:
            self._until.pop((arena_nonce, carrier), None)
            self._until[(arena_nonce, carrier)] = time.monotonic() + BROKEN_S
            while len(self._until) > _MAX_BROKEN:
                del self._until[next(iter(self._until))]

    def without(self, arena_nonce: str, found: Sequence[Choice]) -> list[Choice]:
        """Return the choices that are not broken; all, where none is left."""
        with self._lock:
            now = time.monotonic()
            whole = [choice for choice in found if self._until.get((arena_nonce, choice.carrier), now) <= now]
        return whole or list(found)
