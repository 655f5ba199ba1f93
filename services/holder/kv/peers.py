"""Where the others serve reads: what each incarnation of a holder announced as it joined, and nothing from later.

A reader that has not seen a holder join asks the scheduler, which knows everybody from one round of loads. Who is
known to neither is not connected to.
"""

import asyncio
import logging

from schemas import subjects
from schemas.handoff import Endpoint
from schemas.ids import WorkerId
from schemas.worker import WorkerInfo, WorkerJoined, WorkerLeft
from services.bus.base import BusError
from services.bus.fleet import ask_fleet
from services.bus.typed import Received, TypedBus
from services.holder.limits import MAX_PEERS
from services.runtime import now_ms
from services.times import WorkerTimes

log = logging.getLogger(__name__)


class Peers:
    """The holders of one mesh, as one reader knows them. For the event loop."""

    def __init__(self, bus: TypedBus, times: WorkerTimes) -> None:
        self._bus = bus
        self._times = times
        self._known: dict[WorkerId, WorkerInfo] = {}
        self._asking = asyncio.Lock()
        self._asked_ms = 0

    async def listen(self, tasks: asyncio.TaskGroup) -> None:
        """Listen for who joins, and ask who has joined before, so that no read has to. Raises BusError."""
        await self._bus.listen(tasks, subjects.JOINED, ("*",), self._on_joined)
        tasks.create_task(self._learn(), name="who there is")

    def left(self, event: WorkerLeft) -> None:
        """Forget an incarnation that is over."""
        if self._knows(event.worker_id, event.incarnation):
            del self._known[event.worker_id]

    async def is_known(self, worker_id: WorkerId) -> bool:
        """Return whether there is such a holder."""
        return await self._find(worker_id, "") is not None

    def role_of(self, worker_id: WorkerId) -> str:
        """Return the role of a holder; empty: it is not known yet."""
        known = self._known.get(worker_id)
        return known.role if known is not None else ""

    async def endpoint(self, worker_id: WorkerId, incarnation: str) -> Endpoint | None:
        """Return where this incarnation announced that it serves; None: it has not joined, or serves no reads."""
        info = await self._find(worker_id, incarnation)
        return info.endpoint if info is not None else None

    async def _find(self, worker_id: WorkerId, incarnation: str) -> WorkerInfo | None:
        if not self._knows(worker_id, incarnation):
            async with self._asking:  # one question serves all who wait for its answer
                if not self._knows(worker_id, incarnation):
                    await self._ask()
        return self._known[worker_id] if self._knows(worker_id, incarnation) else None

    def _knows(self, worker_id: WorkerId, incarnation: str) -> bool:
        known = self._known.get(worker_id)
        return known is not None and incarnation in ("", known.incarnation)

    def _on_joined(self, received: Received[WorkerJoined]) -> None:
        """Note a new incarnation. What one that is known announces now is not believed."""
        info = received.message.worker
        if not self._knows(info.worker_id, info.incarnation):
            self._note(info)

    async def _ask(self) -> None:
        """Ask the scheduler who there is: not too often, as anybody may name strangers."""
        if now_ms() - self._asked_ms < self._times.fleet_ask_interval_ms:
            return
        await self._learn()
        self._asked_ms = now_ms()

    async def _learn(self) -> None:
        try:
            fleet = await ask_fleet(self._bus, self._times.fleet_answer_s)
        except BusError as error:
            log.info("the scheduler does not say who there is: %s", error.reason)
        else:
            for load in fleet.workers:
                self._note(load.worker)

    def _note(self, info: WorkerInfo) -> None:
        self._known.pop(info.worker_id, None)
        self._known[info.worker_id] = info
        if len(self._known) > MAX_PEERS:
            del self._known[next(iter(self._known))]
