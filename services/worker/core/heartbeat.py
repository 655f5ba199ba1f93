"""Notices that this worker stood still: stopped, swapped out, or blocked. Pure."""


class Pulse:
    """When the worker's timers last ticked, by a clock that never jumps.

    Others take a worker that stands still for lost and serve its requests elsewhere, so it must not go on as if nothing
    had happened.
    """

    def __init__(self, interval_s: float, fence_after_s: float) -> None:
        self._interval_s = interval_s
        self._fence_after_s = fence_after_s
        self._last_s: float | None = None
        """None: it has not begun."""
        self._lag_s = 0.0

    def beat(self, now_s: float) -> None:
        """The timers has ticked."""
        self._lag_s = self._late_by(now_s)
        self._last_s = now_s

    def stood_still(self, now_s: float) -> bool:
        """Say, once, whether the worker has stood still for too long until now."""
        if self._last_s is None or now_s - self._last_s < self._fence_after_s:
            return False
        self.beat(now_s)
        return True

    def lag_ms(self, now_s: float) -> int:
        """Return how late the last tick was, or the next one already is."""
        return round(1000 * max(self._lag_s, self._late_by(now_s)))

    def _late_by(self, now_s: float) -> float:
        return 0.0 if self._last_s is None else max(0.0, now_s - self._last_s - self._interval_s)
