"""Checks that a worker that leaves is soon gone, however long the answers are that ran there."""

from collections.abc import Callable

from schemas.message import decode
from schemas.worker import LeaveAnswered, LeaveMesh
from services.sim.limits import LEAVES_WITHIN_S
from services.sim.mesh import Service, SimMesh
from services.sim.scenario import FaultKind


class LeaveTap:
    """Collects who leaves and has others to give its work to: the last of its role may finish it. `note_message`
    is a tap of `SimBroker`; `now_s` is the clock."""

    def __init__(self, mesh: SimMesh, now_s: Callable[[], float]) -> None:
        self._mesh = mesh
        self._now_s = now_s
        self._leaving: dict[Service, float] = {}
        """Since when, by what they were answered; a worker that no scheduler answers takes itself for the last."""

    def note_message(self, subject: str, payload: bytes) -> None:
        match subject.split(".")[2:]:
            case ["worker", worker_id, "leave"]:
                published = decode(payload, LeaveAnswered, LeaveMesh)
                if isinstance(published, LeaveAnswered) and not published.is_last:
                    self._leaving[self._mesh.services[worker_id]] = self._now_s()
            case _:
                pass

    @property
    def within_s(self) -> float:
        """What leaving may take: all blocks are read twice at most, by those who go on and by those who keep them."""
        shape = self._mesh.shape
        times = self._mesh.config.times.worker
        waits_s = times.prompts_end_s + times.readers_come_ms / 1000 + times.copiers_quiet_s
        num_bytes = 2 * shape.num_blocks * shape.layout.block_bytes
        return LEAVES_WITHIN_S + waits_s + num_bytes / self._mesh.network.bytes_per_s

    def problems_now(self, kinds: set[FaultKind]) -> list[str]:
        """Return who should be gone by now. Judged where all faults, by their kinds, are drains: whoever waits for the
        dead or the silent waits for longer."""
        if kinds - {"drain"}:
            return []
        self._leaving = {service: since_s for service, since_s in self._leaving.items() if service.is_running}
        now_s, within_s = self._now_s(), self.within_s
        return [
            f"{service.name} leaves since {now_s - since_s:.2f} s, {within_s:.2f} s would do"
            for service, since_s in self._leaving.items()
            if now_s - since_s > within_s
        ]
