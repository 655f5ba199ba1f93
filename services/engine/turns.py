"""Whose turn it is where several tenants wait for the same thing. Pure bookkeeping.

Start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996): a tenant's turn begins where what it was given last ends,
and not before the turn that was served last. So tenants that wait are given equally much, however many wait of each,
and who comes with nothing before it waits for one turn of each other one.
"""

from collections.abc import Iterable


class TenantTurns:
    """What tenants were given of one thing, in any unit. Not thread-safe."""

    def __init__(self) -> None:
        self._now = 0.0
        """Where the turn that was served last began."""
        self._ends: dict[str, float] = {}
        """Where what a tenant was given ends, of those for whom that is later."""

    def order(self, tenants: Iterable[str]) -> list[str]:
        """Return tenants that wait, whose turn it is in front; of equals who is named first."""
        return sorted(tenants, key=self._begin)

    def gave(self, tenant: str, amount: float) -> None:
        """A tenant has been given so much."""
        begin = self._begin(tenant)
        self._now = max(self._now, begin)
        self._ends[tenant] = begin + amount
        self._ends = {name: end for name, end in self._ends.items() if end > self._now}

    def _begin(self, tenant: str) -> float:
        return max(self._now, self._ends.get(tenant, 0.0))
