"""The workers, as one gateway sees them: which incarnation of each there is, and what it reported of its blocks. Pure.

The scheduler decides who is dead. A gateway needs to know it too, since an incarnation that is over has lost the
requests that it had taken; and it may have missed the message about it.
"""

from schemas.ids import WorkerId
from schemas.worker import BlockCounts, WorkerJoined, WorkerLeft, WorkerLoad, WorkerState
from services.config import MeshConfig
from services.gateway.request.events import FleetEvent, WorkerLost, WorkerReady
from services.presence import FailureDetector, Incarnations, Speaker

FleetMessage = WorkerJoined | WorkerLoad | WorkerLeft


class Fleet:
    """The workers that have been seen. `detector`: when this gateway received anything at all; a load is to be handled
    before that notes it. A worker that is silent for `worker_silent_ms` while its name speaks was replaced."""

    def __init__(self, detector: FailureDetector, config: MeshConfig) -> None:
        self._incarnations = Incarnations(detector, config.gateway.worker_silent_ms)
        self._kept_ms = config.times.gateway.load_kept_ms
        self._loads: dict[WorkerId, tuple[int, WorkerLoad]] = {}
        """When a worker last published its load, and which."""

    def apply(self, message: FleetMessage, now_ms: int) -> list[FleetEvent]:
        """Note what a worker, or the scheduler on its behalf, has published. Return the events that requests get."""
        match message:
            case WorkerLeft(worker_id=worker_id, incarnation=incarnation):
                if not self._incarnations.left(worker_id, incarnation):
                    return []  # news of a predecessor
                self._loads.pop(worker_id, None)
                return [WorkerLost(worker_id, message.reason)]
            case WorkerJoined(worker=worker):
                if not self._incarnations.joined(worker.worker_id, worker.incarnation, now_ms):
                    return []
                self._loads.pop(worker.worker_id, None)
                return [_restarted(worker.worker_id)]
            case WorkerLoad(worker=worker):
                speaker = self._incarnations.spoke(worker.worker_id, worker.incarnation, now_ms)
                if speaker is Speaker.PREDECESSOR:
                    return []
                _, before = self._loads.get(worker.worker_id, (0, None))
                self._loads[worker.worker_id] = now_ms, message
                lost = [_restarted(worker.worker_id)] if speaker is Speaker.SUCCESSOR else []
                was_ready = before is not None and before.state == WorkerState.READY and not lost
                return [*lost, WorkerReady()] if message.state == WorkerState.READY and not was_ready else [*lost]

    def role_of(self, worker_id: WorkerId) -> str:
        """Return the role of a worker; empty: it has not published it."""
        _, load = self._loads.get(worker_id, (0, None))
        return load.worker.role if load is not None else ""

    def block_counts(self, now_ms: int) -> dict[WorkerId, BlockCounts]:
        """Return what the workers last reported of their blocks. One that has sent nothing for long is left out."""
        oldest_ms = now_ms - self._kept_ms
        for worker_id in [w for w, (seen_ms, _) in self._loads.items() if seen_ms < oldest_ms]:
            del self._loads[worker_id]
        return {worker_id: load.blocks for worker_id, (_, load) in self._loads.items()}


def _restarted(worker_id: WorkerId) -> WorkerLost:
    """A new incarnation knows nothing of what its predecessor had taken, which nobody may have seen leave."""
    return WorkerLost(worker_id, "it was restarted", is_back=True)
