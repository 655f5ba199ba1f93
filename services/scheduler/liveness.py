"""Who is alive: pings, their outcomes and what workers say of themselves. Pure.

A worker that the broker says nobody serves for is dead. One that neither answers nor speaks is suspect first (stopped,
or very slow), and silent at last. The bus itself may be away: silence counts only while it is known to work.
"""

from dataclasses import dataclass
from typing import NamedTuple

from schemas.ids import WorkerId

MAX_OUTSTANDING_PINGS = 2
SETTLE_MS = 2_000
"""After a reconnection the workers reconnect as well: until then it proves nothing that nobody serves a ping."""


class LivenessLimits(NamedTuple):
    ping_interval_ms: int = 200
    suspect_after_ms: int = 600
    silent_after_ms: int = 3_000


class Ping(NamedTuple):
    """To be sent to this worker; its outcome is told to `Liveness` with it."""

    worker_id: WorkerId
    incarnation: str
    sent_ms: int


@dataclass(slots=True)
class Pulse:
    """What is known of one incarnation's life. `answers`: it has answered a ping, so it serves them."""

    incarnation: str
    heard_ms: int
    next_ping_ms: int
    num_outstanding: int = 0
    num_unserved: int = 0
    """Pings in a row that nobody served, each sent once that was known of the one before."""
    unserved_ms: int = 0
    answers: bool = False


class Liveness:
    """The pulses of the fleet. An outcome that comes for an incarnation since replaced is ignored."""

    def __init__(self, limits: LivenessLimits) -> None:
        self._limits = limits
        self._pulses: dict[WorkerId, Pulse] = {}
        self.num_seen = 0
        """Incarnations heard of so far."""
        self._proved_ms: int | None = None
        self._settled_ms = 0

    def heard(self, worker_id: WorkerId, incarnation: str, now_ms: int) -> None:
        """The worker has spoken: a load, or that it has joined."""
        self.proved(now_ms)
        pulse = self._pulses.get(worker_id)
        if pulse is None or pulse.incarnation != incarnation:
            self.num_seen += 1
            pulse = self._pulses[worker_id] = Pulse(incarnation, now_ms, next_ping_ms=now_ms)
        pulse.heard_ms = now_ms
        pulse.num_unserved = 0

    def forget(self, worker_id: WorkerId) -> None:
        self._pulses.pop(worker_id, None)

    def due(self, now_ms: int) -> list[Ping]:
        """Return the pings to send now. Each one's outcome must be told: answered, unserved or unanswered."""
        pings: list[Ping] = []
        for worker_id, pulse in self._pulses.items():
            if pulse.next_ping_ms <= now_ms and pulse.num_outstanding < MAX_OUTSTANDING_PINGS:
                pulse.num_outstanding += 1
                pulse.next_ping_ms = now_ms + self._limits.ping_interval_ms
                pings.append(Ping(worker_id, pulse.incarnation, now_ms))
        return pings

    def wait_ms(self, now_ms: int) -> int:
        """Return how long there is nothing to do, unless something is heard."""
        waits = [
            pulse.next_ping_ms - now_ms
            for pulse in self._pulses.values()
            if pulse.num_outstanding < MAX_OUTSTANDING_PINGS
        ]
        return max(1, min([self._limits.ping_interval_ms, *waits]))

    def answered(self, ping: Ping, incarnation: str, now_ms: int) -> None:
        """The worker has answered as this incarnation; another than was asked will speak for itself."""
        self.proved(now_ms)
        pulse = self._ended(ping)
        if pulse is not None and incarnation == pulse.incarnation:
            pulse.answers, pulse.heard_ms, pulse.num_unserved = True, now_ms, 0

    def unserved(self, ping: Ping, now_ms: int) -> bool:
        """The broker says that nobody serves this ping. Returns whether that proves the worker dead.

        One that has never answered may serve no pings at all; of its end silence tells.
        """
        self.proved(now_ms)
        pulse = self._ended(ping)
        if pulse is None or now_ms < self._settled_ms:
            return False
        if pulse.num_unserved and ping.sent_ms < pulse.unserved_ms:
            return False
        pulse.num_unserved, pulse.unserved_ms = pulse.num_unserved + 1, now_ms
        pulse.next_ping_ms = min(pulse.next_ping_ms, now_ms + self._limits.ping_interval_ms // 4)
        return pulse.answers and pulse.num_unserved >= 2

    def unanswered(self, ping: Ping) -> None:
        """The ping's time is over, or it could not be sent."""
        self._ended(ping)

    def proved(self, now_ms: int) -> None:
        """The bus works: something came of it. After a time without any such sign nobody's silence means a thing."""
        if self._is_mute(now_ms):
            self._start_anew(now_ms)
        self._proved_ms = now_ms

    def reconnected(self, now_ms: int) -> None:
        """The bus was away. The workers' connections may come back later than ours."""
        self._settled_ms = now_ms + SETTLE_MS
        self._proved_ms = now_ms
        self._start_anew(now_ms)

    def is_suspect(self, worker_id: WorkerId, now_ms: int) -> bool:
        """Whether this worker has been quiet for so long that it may be stopped."""
        pulse = self._pulses.get(worker_id)
        return pulse is not None and now_ms - pulse.heard_ms > self._patience_ms(pulse)

    def needs_proof(self, now_ms: int) -> bool:
        """Whether somebody's silence is about to matter, so that it should be known whether the bus works."""
        return any(self.is_suspect(worker_id, now_ms) for worker_id in self._pulses)

    def silent(self, now_ms: int) -> list[WorkerId]:
        """Return the workers that have been silent too long; none while the bus may be away."""
        if self._is_mute(now_ms):
            return []
        return [w for w, pulse in self._pulses.items() if now_ms - pulse.heard_ms > self._limits.silent_after_ms]

    def _patience_ms(self, pulse: Pulse) -> int:
        """Loads alone come too rarely to tell a stop from a pause."""
        if pulse.answers:
            return self._limits.suspect_after_ms
        return max(self._limits.suspect_after_ms, self._limits.silent_after_ms // 2)

    def _is_mute(self, now_ms: int) -> bool:
        return self._proved_ms is not None and now_ms - self._proved_ms > self._limits.silent_after_ms // 2

    def _start_anew(self, now_ms: int) -> None:
        for pulse in self._pulses.values():
            pulse.heard_ms, pulse.num_unserved = now_ms, 0

    def _ended(self, ping: Ping) -> Pulse | None:
        pulse = self._pulses.get(ping.worker_id)
        if pulse is None or pulse.incarnation != ping.incarnation:
            return None
        pulse.num_outstanding -= 1
        return pulse
