"""The mesh's clock: dates that mean the same in every process, whatever the machines' own clocks say.

Within a process every time is by its monotonic clock, and deadlines cross the bus as what is left of them. A date is
made where a time leaves its process as one: in a span, in what a gateway is sent of a first token, at the end of a
stream of KV. The mesh's clock is that of the scheduler that has lived longest.
"""

import time

NAMED_NS = 1_000_000_000
"""A machine's clock that is wrong by more than this is named."""


class MeshClock:
    """One process's. Until it has asked a scheduler it is the machine's own Unix time."""

    def __init__(self) -> None:
        self.ahead_ns = 0
        """What makes a date, in Unix ns, of a time by `time.monotonic_ns`."""
        self.follow_machine()

    def follow_machine(self) -> None:
        """Be what this machine's clock says now."""
        self.ahead_ns = time.time_ns() - time.monotonic_ns()

    def date_ns(self, at_ns: int) -> int:
        """Return the date, in Unix ns, of a time by `time.monotonic_ns`."""
        return at_ns + self.ahead_ns

    def at_ns(self, date_ns: int) -> int:
        """Return the time by `time.monotonic_ns` of a date."""
        return date_ns - self.ahead_ns

    def compare(self, unix_ns: int, asked_ns: int) -> None:
        """A scheduler has answered, just now, with the date what it was asked at `asked_ns`.

        It is taken to have read its clock half-way, as NTP does (RFC 5905, section 8), and a difference that the way
        itself can explain to be none: processes of one machine then agree to the nanosecond.
        """
        way_ns = (time.monotonic_ns() - asked_ns) // 2
        off_ns = unix_ns - self.date_ns(asked_ns + way_ns)
        if abs(off_ns) > way_ns:
            self.ahead_ns += off_ns

    @property
    def machine_ahead_ns(self) -> int:
        """By how much this machine's clock is ahead of the mesh's."""
        return time.time_ns() - self.date_ns(time.monotonic_ns())

    @property
    def named_ms(self) -> int:
        """The same in milliseconds, to the tenth of a second; 0: not enough to be named."""
        ahead_ns = self.machine_ahead_ns
        return round(ahead_ns / 1e8) * 100 if abs(ahead_ns) >= NAMED_NS else 0
