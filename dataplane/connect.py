"""Which carrier a reader uses towards a holder."""

from collections.abc import Callable

from dataplane import loopback, shm, tcp
from schemas.handoff import Endpoint

CARRIERS = (loopback.NAME, shm.NAME, tcp.NAME)
"""Best first."""
AUTO = "auto"


class CarrierImpossibleError(Exception):
    """The carrier asked for, or any at all under "auto", does not lead to this holder."""

    def __init__(self, wanted: str, offered: tuple[str, ...]) -> None:
        super().__init__(
            f"carrier {wanted!r} does not lead to this holder, which offers {', '.join(offered) or 'none'}"
        )
        self.wanted = wanted
        self.offered = offered


def choose_carrier(wanted: str, endpoint: Endpoint, can_attach: Callable[[Endpoint], bool]) -> str:
    """Return the carrier to use: the one wanted, or under "auto" the best that leads there.

    Raises CarrierImpossibleError. `can_attach` says whether the endpoint's arena is on this host.
    """
    candidates = CARRIERS if wanted == AUTO else (wanted,)
    for carrier in candidates:
        if carrier in endpoint.carriers and _leads_there(carrier, endpoint, can_attach):
            return carrier
    raise CarrierImpossibleError(wanted, endpoint.carriers)


def _leads_there(carrier: str, endpoint: Endpoint, can_attach: Callable[[Endpoint], bool]) -> bool:
    if carrier == loopback.NAME:
        return loopback.find(endpoint.arena_nonce) is not None
    if carrier == shm.NAME:
        return can_attach(endpoint)
    return carrier == tcp.NAME and endpoint.port > 0
