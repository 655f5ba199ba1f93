"""When a process that has ended is started again: a service, or an engine."""

from collections import deque
from dataclasses import dataclass, field

FIRST_WAIT_S = 0.2
"""From a process' first end to its next start; doubled with each end that follows."""
LONGEST_WAIT_S = 5.0
"""The wait grows to this."""
SOUND_AFTER_S = 30.0
"""A process that has lived for this long has started well: its next end counts as the first again."""
MAX_ENDS = 10
"""After so many ends in a row within ENDS_WITHIN_S the process is started again after pauses only."""
ENDS_WITHIN_S = 60.0
"""See MAX_ENDS."""
FIRST_REST_S = 30.0
"""The first of these pauses; doubled with each end that follows, until the process has started well."""
LONGEST_REST_S = 600.0
"""The pause grows to this."""


@dataclass
class Restarts:
    """Decides when a process that has ended is started again. Pure: times are given."""

    num_restarts: int = 0
    num_rests: int = 0
    """Pauses in a row, each longer than the one before, of one that has ended too often."""
    _ends_s: deque[float] = field(default_factory=lambda: deque[float](maxlen=MAX_ENDS))

    def ended(self, started_s: float, now_s: float) -> float:
        """Return how long to wait before it is started again, in seconds."""
        if now_s - started_s >= SOUND_AFTER_S:
            self._ends_s.clear()
            self.num_rests = 0
        self._ends_s.append(now_s)
        self.num_restarts += 1
        if self.num_rests or (len(self._ends_s) == MAX_ENDS and now_s - self._ends_s[0] <= ENDS_WITHIN_S):
            self.num_rests += 1
            return min(LONGEST_REST_S, FIRST_REST_S * 2 ** (self.num_rests - 1))
        return min(LONGEST_WAIT_S, FIRST_WAIT_S * 2 ** (len(self._ends_s) - 1))
