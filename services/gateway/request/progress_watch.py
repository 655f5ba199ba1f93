"""Which of one attempt's workers to ask how far it is, and when. Pure.

The bus may lose any message, and a silent worker may be dead. A worker is asked once it has accepted, or its accept
wait is over: where a token has been missing for a moment, or where it has sent nothing for a while. Who is dead is
judged by the rules of `services.presence`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from schemas.ids import WorkerId
from services.config import MeshConfig
from services.gateway.limits import WAITING_ROUNDS
from services.presence import FailureDetector, Peer

NEVER_MS = 2**62


class Look(NamedTuple):
    """What was found when the workers of an attempt were looked at. `silent`: one is lost, and the rest was not looked
    at. `next_ms`: nothing is due before, unless something happens that is more than a token."""

    asked: tuple[WorkerId, ...] = ()
    next_ms: int = NEVER_MS
    silent: WorkerId | None = None


@dataclass(slots=True)
class _Worker:
    peer: Peer
    """Known since the attempt's beginning."""
    may_be_asked: bool = False
    is_urgent: bool = False
    """It is to be asked at once."""
    is_asked: bool = False
    asked_ms: int = 0
    is_waiting: bool = False
    """The attempt is in line there, as it reported last."""


class Watch:
    """The watch over one attempt."""

    def __init__(self, config: MeshConfig, detector: FailureDetector, workers: Sequence[WorkerId], now_ms: int) -> None:
        self._config = config.gateway
        self._times = config.times
        self._detector = detector
        self._workers = {worker_id: _Worker(Peer(now_ms)) for worker_id in workers}
        self._gap: int | None = None
        """The token that is missing while later ones are here."""
        self._gap_ms = 0

    def seen(self, worker_id: WorkerId, now_ms: int, *, is_waiting: bool = False) -> None:
        """Take note of a sign of a worker that has the attempt."""
        if worker := self._workers.get(worker_id):
            worker.peer.seen(now_ms)
            worker.may_be_asked, worker.is_waiting = True, is_waiting

    def end_accept_wait(self, worker_id: WorkerId) -> None:
        """Its reply has not come: ask it."""
        if worker := self._workers.get(worker_id):
            worker.may_be_asked = worker.is_urgent = True

    def set_gap(self, index: int | None, now_ms: int) -> bool:
        """Take note of the first token that is missing before others (None: none is). True: this is news."""
        if index == self._gap:
            return False
        self._gap, self._gap_ms = index, now_ms
        return True

    def end_question(self, worker_id: WorkerId) -> None:
        if worker := self._workers.get(worker_id):
            worker.is_asked = False

    def is_dead(self, worker_id: WorkerId, now_ms: int) -> bool:
        """Nobody serves a worker's questions: return whether it is the second time."""
        worker = self._workers.get(worker_id)
        return worker is not None and worker.peer.is_gone(worker.asked_ms, self._detector, now_ms)

    def look(self, needed: Sequence[WorkerId], now_ms: int) -> Look:
        """Return what the time makes necessary for the needed workers. Those to be asked count as asked."""
        asked: list[WorkerId] = []
        next_ms = NEVER_MS
        for worker_id in needed:
            worker = self._workers[worker_id]
            # A worker may send nothing for so long before it is asked; what is in line there has time.
            quiet_ms = self._config.progress_after_ms * (WAITING_ROUNDS if worker.is_waiting else 1)
            if worker.may_be_asked:
                # And for so long before it is lost: it must have been asked for long enough.
                silent_ms = self._config.worker_silent_ms + quiet_ms - self._config.progress_after_ms
                if self._detector.is_silent(worker.peer.seen_ms, silent_ms, now_ms):
                    return Look(silent=worker_id)
                next_ms = min(next_ms, max(worker.peer.seen_ms, self._detector.since_ms) + silent_ms)
            if (due_ms := self._due_ms(worker, quiet_ms)) <= now_ms:
                worker.is_asked, worker.is_urgent, worker.asked_ms = True, False, now_ms
                asked.append(worker_id)
            else:
                next_ms = min(next_ms, due_ms)
        return Look(tuple(asked), next_ms)

    def _due_ms(self, worker: _Worker, quiet_ms: int) -> int:
        """Return when a worker is to be asked, at the latest after `quiet_ms` without a sign of it."""
        if worker.is_asked or not worker.may_be_asked:
            return NEVER_MS
        if worker.is_urgent:
            return 0
        if worker.peer.unserved_ms is not None:
            return worker.peer.unserved_ms + self._times.presence.unserved_gap_ms
        if worker.asked_ms > worker.peer.seen_ms:  # no answer has come
            quiet_ms = self._config.progress_after_ms
        due_ms = max(worker.peer.seen_ms, worker.asked_ms) + quiet_ms
        if self._gap is None:
            return due_ms
        if worker.asked_ms >= self._gap_ms:
            return min(due_ms, worker.asked_ms + self._config.progress_after_ms)
        return min(due_ms, self._gap_ms + self._times.gateway.gap_ms)
