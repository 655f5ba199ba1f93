"""The mesh's clock: dates that mean the same in every process.

Within a process every time is by its monotonic clock. A date is made where a time leaves it: in a span, and at the end
of a stream of KV.
"""

import time


class MeshClock:
    """One process's. Until it is told more it is this machine's Unix time, as it was when the process began."""

    def __init__(self) -> None:
        self.ahead_ns = time.time_ns() - time.monotonic_ns()

    def date_ns(self, at_ns: int) -> int:
        """Return the date, in Unix ns, of a time by `time.monotonic_ns`."""
        return at_ns + self.ahead_ns

    def at_ns(self, date_ns: int) -> int:
        """Return the time by `time.monotonic_ns` of a date."""
        return date_ns - self.ahead_ns
