"""Whether a request is taken at all. Pure.

A queue has a bound: in predicted time where rates are measured, else in requests. Who would wait longer is sent a time
to come again. Past half of the bound no tenant gets more than its share of what is let in.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from services.scheduler.limits import CONTESTED_SHARE, MAX_RETRY_MS, MAX_TENANTS, MIN_RETRY_MS, TENANT_WINDOW_MS


class AdmissionLimits(NamedTuple):
    max_queue_ms: int = 30_000
    max_queued_requests: int = 256


class Wait(NamedTuple):
    """What one way to serve would wait. `predicted_ms` is a guess where `is_measured` is False."""

    predicted_ms: float
    num_waiting: int
    is_measured: bool


class Overload(NamedTuple):
    detail: str
    retry_after_ms: int


@dataclass(slots=True)
class Tenant:
    seen_ms: int
    num_tokens: float = 0.0
    """So much was placed for it, as of `seen_ms`; it fades."""

    def weight(self, now_ms: int) -> float:
        return self.num_tokens * 0.5 ** (max(0, now_ms - self.seen_ms) / TENANT_WINDOW_MS)


class Admission:
    """Refuses what would wait too long. Remembers how much was placed for each tenant, the older the less."""

    def __init__(self, limits: AdmissionLimits) -> None:
        self._limits = limits
        self._tenants: dict[str, Tenant] = {}

    def refusal(self, tenant: str, ways: Iterable[Wait], now_ms: int) -> Overload | None:
        """Return why a request must not be taken now, or None. `ways`: every way to serve it, one at least."""
        self._see(tenant, now_ms)
        used, best = min(((self._used(way), way) for way in ways), key=lambda pair: pair[0])
        if used > 1:
            return Overload(f"every worker's queue is full ({_describe(best)})", _retry_ms(best))
        if used > CONTESTED_SHARE and self._has_more_than_its_share(tenant, now_ms):
            return Overload(f"other tenants go first ({_describe(best)})", _retry_ms(best))
        return None

    def placed(self, tenant: str, num_tokens: int, now_ms: int) -> None:
        """Count a request that was placed for this tenant."""
        self._see(tenant, now_ms).num_tokens += num_tokens

    def _used(self, way: Wait) -> float:
        """Return the share of the bound that this way's queue takes."""
        if way.is_measured:
            return way.predicted_ms / max(1, self._limits.max_queue_ms)
        return way.num_waiting / max(1, self._limits.max_queued_requests)

    def _has_more_than_its_share(self, tenant: str, now_ms: int) -> bool:
        recent = [t for t in self._tenants.values() if now_ms - t.seen_ms <= TENANT_WINDOW_MS]
        total = sum(t.weight(now_ms) for t in recent)
        return len(recent) > 1 and self._tenants[tenant].weight(now_ms) > total / len(recent)

    def _see(self, tenant: str, now_ms: int) -> Tenant:
        """Return the tenant as of now, the latest seen."""
        known = self._tenants.pop(tenant, None)
        seen = self._tenants[tenant] = Tenant(now_ms, known.weight(now_ms) if known else 0.0)
        if len(self._tenants) > MAX_TENANTS:
            del self._tenants[next(iter(self._tenants))]
        return seen


def _retry_ms(best: Wait) -> int:
    """Return when to come again: once all that waits now in the best queue has been served.

    A queue is within its bound again much sooner, as it is refused at the bound. But whoever was refused since waits
    for that moment too, and nearly all of them would be refused again.
    """
    return round(min(MAX_RETRY_MS, max(MIN_RETRY_MS, best.predicted_ms)))


def _describe(best: Wait) -> str:
    if best.is_measured:
        return f"the shortest wait would be {best.predicted_ms / 1e3:.1f} s"
    return f"the shortest queue has {best.num_waiting} requests"
