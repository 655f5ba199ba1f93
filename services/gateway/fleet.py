"""The workers, as one gateway hears of them: which incarnation of each there is, and what it said of its blocks. Pure.

The scheduler decides who is dead. A gateway needs to know it too, since an incarnation that is over has lost the
requests that it had taken; and it may have missed the message that says so.
"""

from schemas.ids import WorkerId
from schemas.worker import BlockCounts, WorkerInfo, WorkerJoined, WorkerLeft, WorkerLoad
from services.gateway.limits import INCARNATION_QUIET_MS, LOAD_KEPT_MS
from services.gateway.request.events import WorkerLost
from services.gateway.request.progress_watch import Ears

FleetMessage = WorkerJoined | WorkerLoad | WorkerLeft


class Fleet:
    """The workers that have been heard. `ears`: when this gateway heard anything at all."""

    def __init__(self, ears: Ears) -> None:
        self._ears = ears
        self._incarnations: dict[WorkerId, str] = {}
        self._loads: dict[WorkerId, tuple[int, BlockCounts]] = {}
        """When a worker last said its load, and its blocks."""

    def handle(self, message: FleetMessage, now_ms: int) -> list[WorkerLost]:
        """Take in what a worker, or the scheduler on its behalf, has said; return whose requests are lost by it."""
        match message:
            case WorkerLeft():
                return self._left(message)
            case WorkerJoined(worker=worker):
                return self._begin(worker)
            case WorkerLoad():
                return self._load(message, now_ms)

    def block_counts(self, now_ms: int) -> dict[WorkerId, BlockCounts]:
        """Return what the workers last said of their blocks. One that has said nothing for long is left out."""
        oldest_ms = now_ms - LOAD_KEPT_MS
        for worker_id in [w for w, (heard_ms, _) in self._loads.items() if heard_ms < oldest_ms]:
            del self._loads[worker_id]
        return {worker_id: blocks for worker_id, (_, blocks) in self._loads.items()}

    def _left(self, message: WorkerLeft) -> list[WorkerLost]:
        known = self._incarnations.pop(message.worker_id, message.incarnation)
        if known != message.incarnation:  # news of a predecessor
            self._incarnations[message.worker_id] = known
            return []
        self._loads.pop(message.worker_id, None)
        return [WorkerLost(message.worker_id, message.reason)]

    def _begin(self, worker: WorkerInfo) -> list[WorkerLost]:
        """A new incarnation knows nothing of what its predecessor had taken, which nobody may have seen leave."""
        if self._incarnations.get(worker.worker_id) == worker.incarnation:
            return []
        self._incarnations[worker.worker_id] = worker.incarnation
        return [WorkerLost(worker.worker_id, "it was restarted", is_back=True)]

    def _load(self, message: WorkerLoad, now_ms: int) -> list[WorkerLost]:
        """A load may be of an incarnation that has been replaced: it names one only where none is known, or where the
        one that is known has said nothing for long. That one's end and the other's beginning were not heard."""
        worker, lost = message.worker, list[WorkerLost]()
        heard_ms, _ = self._loads.setdefault(worker.worker_id, (now_ms, message.blocks))
        if now_ms - heard_ms > INCARNATION_QUIET_MS and not self._ears.is_deaf(now_ms):
            lost = self._begin(worker)
        if self._incarnations.setdefault(worker.worker_id, worker.incarnation) == worker.incarnation:
            self._loads[worker.worker_id] = now_ms, message.blocks
        return lost
