"""Who is alive: the rules by which a scheduler judges workers, a gateway the workers of a request, a worker the
gateways, and a worker itself. Pure: times come in, verdicts go out. Whom to ask when is each room's own.

alive: a sign was received, such as a beat, a load, an answer or tokens (`Peer.seen`).
suspect: no sign for a while. Nothing new is given to it while somebody else could take it (`FailureDetector.quiet_ms`).
dead: the broker has answered twice that nobody serves its questions (`Peer.is_gone`), or no sign came for long although
    others were seen (`FailureDetector.is_silent`).
partitioned: we ourselves have received nothing from anybody. Then nobody's silence means anything
    (`FailureDetector.is_partitioned`).
unproved: what we have sent through the broker to ourselves has not come back. The same (`FailureDetector.ask_proof`).
recovering: after a reconnection, or a partition, the others are still on their way back to the broker
    (`FailureDetector.is_recovering`).
rerouted: the broker has lost one of its servers. Who was connected there is on the way to another one
    (`FailureDetector.is_rerouted`).
standing still: our own clock has jumped. The others take us for dead (`Heartbeat`).
replaced: another incarnation speaks under the name (`Incarnations`); what has left never comes back (`Fences`).
"""

import enum
from dataclasses import dataclass

from schemas.ids import WorkerId
from schemas.worker import WorkerLeft
from services.times import PresenceTimes

OVERDUE_PINGS = 2
"""Who has sent nothing for so many of a scheduler's ping intervals is asked: a beat is missing."""
MAX_FENCES = 1_024
"""So many incarnations that have left are remembered, the latest ones."""


@dataclass(slots=True, frozen=True)
class BusConnected:
    """An event: how often the bus has connected so far, and its broker lost some of its servers or got them back. More
    than before is a reconnection, or that members of other servers are on their way to this one, or back."""

    num_connects: int
    num_reroutes: int = 0
    num_returns: int = 0


class FailureDetector:
    """When this process last received anything at all, and since when the silence of others counts.
    `partitioned_after_ms`: the silence after which it takes itself for cut off; None: that of `times`."""

    def __init__(self, times: PresenceTimes, partitioned_after_ms: int | None = None) -> None:
        self.times = times
        self._partitioned_after_ms = (
            times.partitioned_after_ms if partitioned_after_ms is None else partitioned_after_ms
        )
        self._received_ms: int | None = None
        self._known: BusConnected | None = None
        self._recovered_ms = self._rerouted_ms = 0
        self._unproved_ms: int | None = None
        """Since when a proof that the bus works has been on its way; None: none is."""
        self.since_ms = 0
        """The silence of others counts from here on only: the end of the last partition or the last reconnection."""

    def received(self, now_ms: int) -> None:
        """Something came from somebody, or from the broker itself."""
        if self.is_partitioned(now_ms):
            self.since_ms = now_ms
            if self._received_ms is not None:
                self.begin_recovery(now_ms)
        self._received_ms = now_ms

    def begin_recovery(self, now_ms: int) -> None:
        """Messages did not arrive. Who has lost the broker meanwhile needs time to come back."""
        self._recovered_ms = now_ms + self.times.recover_ms

    def ask_proof(self, now_ms: int) -> None:
        """A message to ourselves is on its way through the broker: until one has come back, silence does not grow."""
        if self._unproved_ms is None:
            self._unproved_ms = now_ms

    @property
    def is_unproved(self) -> bool:
        """None of them has come back yet. One that is lost must be followed by another."""
        return self._unproved_ms is not None

    def proved(self, now_ms: int) -> None:
        """One has come back."""
        self.received(now_ms)
        self._unproved_ms = None

    def connects(self, event: BusConnected, now_ms: int) -> bool:
        """Take note of how often the bus has connected so far. Returns whether it has reconnected since last time."""
        before, self._known = self._known or event, event
        if before.num_reroutes != event.num_reroutes:
            self._rerouted_ms = max(self._rerouted_ms, now_ms + self.times.rerouted_ms)
        if before.num_returns != event.num_returns:
            self._rerouted_ms = now_ms + self.times.recover_ms
        if before.num_connects == event.num_connects:
            return False
        self.begin_recovery(now_ms)
        self._received_ms = self.since_ms = now_ms
        return True

    def is_partitioned(self, now_ms: int) -> bool:
        """Whether nothing has come for so long that we are cut off ourselves."""
        return self._received_ms is None or now_ms - self._received_ms >= self._partitioned_after_ms

    def is_recovering(self, now_ms: int) -> bool:
        """Whether others may still be on their way back to the broker."""
        return now_ms < self._recovered_ms

    def is_rerouted(self, now_ms: int) -> bool:
        """Whether others may be on their way from a server of the broker that is lost, or be there again with one."""
        return now_ms < self._rerouted_ms

    def quiet_ms(self, seen_ms: int, now_ms: int) -> int:
        """Return how long somebody last seen at `seen_ms` has sent nothing that we could have received."""
        until_ms = now_ms if self._unproved_ms is None else min(now_ms, self._unproved_ms)
        return max(0, until_ms - max(seen_ms, self.since_ms))

    def is_silent(self, seen_ms: int, limit_ms: int, now_ms: int) -> bool:
        """Whether somebody last seen at `seen_ms` is to be taken for dead."""
        return not self.is_partitioned(now_ms) and self.quiet_ms(seen_ms, now_ms) >= limit_ms


@dataclass(slots=True)
class Peer:
    """What one process knows of the life of another."""

    seen_ms: int
    """The last sign of it, or when it was first known."""
    unserved_ms: int | None = None
    """When it was first known that nobody serves its questions; None once anything was received from it since."""

    def seen(self, now_ms: int) -> None:
        """Take note of a sign of life."""
        self.seen_ms, self.unserved_ms = now_ms, None

    def is_gone(self, asked_ms: int, detector: FailureDetector, now_ms: int, gap_ms: int | None = None) -> bool:
        """The broker answers that nobody serves a question asked at `asked_ms`. Returns whether its process has
        ended: true at the second such answer, if that question was asked at least `gap_ms` after the first answer came
        (None: as `detector` has it), and not while it may be on its way from a lost server. Two questions that waited
        for the same broker are one proof."""
        if detector.is_recovering(now_ms):
            return False
        if self.unserved_ms is None or self.unserved_ms < detector.since_ms:
            self.unserved_ms = now_ms
            return False
        if detector.is_rerouted(now_ms):
            return False
        return asked_ms - self.unserved_ms >= (detector.times.unserved_gap_ms if gap_ms is None else gap_ms)


class Heartbeat:
    """When this process's own timer last fired, by a clock that never jumps (seconds).

    Others take a worker that stands still (stopped, swapped out, blocked) for dead and serve its requests elsewhere, so
    it must not go on as if nothing had happened.
    """

    def __init__(self, interval_s: float, fence_after_s: float) -> None:
        self._interval_s = interval_s
        self._fence_after_s = fence_after_s
        self._last_s: float | None = None
        """When it last fired; None: it has not begun."""
        self._lag_s = 0.0

    def beat(self, now_s: float) -> None:
        """The timer has fired."""
        self._lag_s = self._late_by(now_s)
        self._last_s = now_s

    def stood_still(self, now_s: float) -> bool:
        """Return, once, whether the process has stood still for too long until now."""
        if self._last_s is None or now_s - self._last_s < self._fence_after_s:
            return False
        self.beat(now_s)
        return True

    def lag_ms(self, now_s: float) -> int:
        """Return how late the last beat was, or the next one already is."""
        return round(1000 * max(self._lag_s, self._late_by(now_s)))

    def _late_by(self, now_s: float) -> float:
        return 0.0 if self._last_s is None else max(0.0, now_s - self._last_s - self._interval_s)


class Speaker(enum.Enum):
    """Who it is that has published its load."""

    CURRENT = enum.auto()
    """The incarnation that is known, or the first that is seen."""
    SUCCESSOR = enum.auto()
    """Another one. The end of the one that was known, and the beginning of this one, were not received."""
    PREDECESSOR = enum.auto()
    """Another one than is known, which is well: an old message."""


@dataclass(slots=True)
class _Incarnation:
    incarnation: str
    seen_ms: int


class Incarnations:
    """Which incarnation each worker's name stands for, as one who only listens knows it. `quiet_ms`: one that has sent
    nothing for so long while another speaks under its name has been replaced."""

    def __init__(self, detector: FailureDetector, quiet_ms: int) -> None:
        self._detector = detector
        self._quiet_ms = quiet_ms
        self._known: dict[WorkerId, _Incarnation] = {}

    def joined(self, worker_id: WorkerId, incarnation: str, now_ms: int) -> bool:
        """A worker has joined. Returns whether this is news: what was given to the one before it is lost."""
        known = self._known.get(worker_id)
        self._known[worker_id] = _Incarnation(incarnation, now_ms)
        return known is None or known.incarnation != incarnation

    def spoke(self, worker_id: WorkerId, incarnation: str, now_ms: int) -> Speaker:
        """A worker has published its load, which may be an old message: it replaces nobody that is well. To be called
        before `detector` notes it."""
        known = self._known.setdefault(worker_id, _Incarnation(incarnation, now_ms))
        if known.incarnation == incarnation:
            known.seen_ms = now_ms
            return Speaker.CURRENT
        if now_ms - known.seen_ms <= self._quiet_ms or self._detector.is_partitioned(now_ms):
            return Speaker.PREDECESSOR
        self._known[worker_id] = _Incarnation(incarnation, now_ms)
        return Speaker.SUCCESSOR

    def left(self, worker_id: WorkerId, incarnation: str) -> bool:
        """An incarnation has left. Returns whether it is the one that the name stands for, as far as is known."""
        known = self._known.get(worker_id)
        if known is not None and known.incarnation != incarnation:
            return False
        self._known.pop(worker_id, None)
        return True


@dataclass(slots=True)
class _Fence:
    left: WorkerLeft
    published_ms: int


class Fences:
    """The incarnations that were reported to have left. What such a one sends counts no more. It is notified again,
    so that a worker that was stopped and goes on, or has missed the first word, comes back as a new one."""

    def __init__(self, times: PresenceTimes, max_fences: int = MAX_FENCES) -> None:
        self._repeat_left_ms = times.repeat_left_ms
        self._max_fences = max_fences
        self._fences: dict[tuple[WorkerId, str], _Fence] = {}

    def fence(self, left: WorkerLeft, now_ms: int) -> None:
        """This incarnation has left, and somebody reports it now. The first reason stays."""
        key = (left.worker_id, left.incarnation)
        known = self._fences.pop(key, None)
        self._fences[key] = _Fence(known.left if known else left, now_ms)
        if len(self._fences) > self._max_fences:
            del self._fences[next(iter(self._fences))]

    def holds(self, worker_id: WorkerId, incarnation: str) -> bool:
        """Whether this incarnation has left."""
        return (worker_id, incarnation) in self._fences

    def repeat(self, worker_id: WorkerId, incarnation: str, now_ms: int) -> WorkerLeft | None:
        """Return what to publish to one that has left and just spoke; None where that was published a moment ago."""
        fence = self._fences[(worker_id, incarnation)]
        if now_ms - fence.published_ms < self._repeat_left_ms:
            return None
        fence.published_ms = now_ms
        return fence.left

    def servers_returned(self, now_ms: int) -> None:
        """Who was behind servers of the broker that are back has not received what was published meanwhile: whoever
        still speaks is notified at once."""
        for fence in self._fences.values():
            fence.published_ms = now_ms - self._repeat_left_ms
