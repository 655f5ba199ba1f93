"""The messages that a worker hears: of each subject, what is done with it."""

import asyncio
from typing import Any

from schemas import subjects
from schemas.directory import Inventory, ReadInventory
from schemas.ids import WorkerId
from schemas.kv import BlocksPurged, LeaseGranted, PurgeBlocks, ReplicateBlocks, RequestLease
from schemas.message import Message
from schemas.observe import DescribeWorker, WorkerDescribed
from schemas.request import AskProgress, Progress, RefusalReason, Refused, ReserveBlocks, RunPrefill, refuse
from schemas.worker import DrainAnswered, DrainWorker, PingWorker, WorkerAlive, WorkerLeft
from services.bus.typed import Received, TypedBus
from services.keep import keep_traces
from services.runtime import now_ms
from services.telemetry import Telemetry
from services.worker.core.events import AttemptAsked, CopyOffered
from services.worker.observe.spans import times_of
from services.worker.shell import Worker


class Inbox:
    """One worker's, those of its roles among them."""

    def __init__(self, worker: Worker, worker_id: WorkerId, bus: TypedBus, telemetry: Telemetry) -> None:
        self._worker = worker
        self._cores = worker.cores
        self._reporter = worker.reporter
        self._measured = worker.measured
        self._worker_id = worker_id
        self._bus = bus
        self._telemetry = telemetry

    async def open(self, tasks: asyncio.TaskGroup) -> None:
        """Return once all subscriptions are there."""
        bus, me = self._bus, (self._worker_id,)
        for role in self._cores.roles:
            for subject, ids in role.hears():
                if subject.reply:
                    await bus.serve(tasks, subject, ids, self._on_asked)
                else:
                    await bus.listen(tasks, subject, ids, self._on_event)
        await bus.listen(tasks, subjects.REPLICATE, (*me, "*"), self._on_copy_offered)
        await bus.listen(tasks, subjects.CANCEL, ("*",), self._on_event)
        await bus.listen(tasks, subjects.LEFT, ("*",), self._on_left)
        await self._worker.peers.listen(tasks)
        await bus.serve(tasks, subjects.INVENTORY, me, self._on_inventory)
        await bus.serve(tasks, subjects.LEASE, (*me, "*"), self._on_lease)
        await bus.listen(tasks, subjects.RETURNED, (*me, "*"), self._on_event)
        await bus.serve(tasks, subjects.PROGRESS, me, self._on_progress)
        await bus.serve(tasks, subjects.PING, me, self._on_ping)
        await bus.serve(tasks, subjects.WORKER_STATUS, me, self._on_status)
        await bus.serve(tasks, subjects.PURGE, me, self._on_purge)
        await bus.serve(tasks, subjects.DRAIN, me, self._on_drain)
        await keep_traces(bus, tasks, self._telemetry)
        await bus.connection.flush()

    async def _on_asked(self, received: Received[RunPrefill] | Received[ReserveBlocks]) -> Message | None:
        """Let a role begin an attempt, unless another one of this worker has it: the engine could not tell them
        apart."""
        request, traceparent = received.message, received.traceparent
        known = self._cores.find((request.request_id, request.attempt))
        if (unproved := self._worker.unproved(request)) is not None:
            reply = unproved
        elif known is not None and type(known.request) is not type(request):
            reply = refuse(request, RefusalReason.INVALID, "another role of this worker has this attempt already")
        else:
            asked = AttemptAsked(request, times_of(traceparent, self._telemetry.clock.ahead_ns), traceparent)
            reply = self._worker.step(asked, received.subject)
        self._measured.refused("run" if isinstance(request, RunPrefill) else "reserve", reply)
        return reply

    def _on_event(self, received: Received[Any]) -> None:
        """A message that is an event as it is."""
        self._worker.step(received.message, received.subject)

    def _on_copy_offered(self, received: Received[ReplicateBlocks]) -> None:
        self._worker.step(CopyOffered(received.message, received.traceparent), received.subject)

    def _on_left(self, received: Received[WorkerLeft]) -> None:
        self._worker.left(received.message, received.subject)

    async def _on_inventory(self, received: Received[ReadInventory]) -> Inventory:
        return self._reporter.inventory(received.message.offset)

    async def _on_lease(self, received: Received[RequestLease]) -> LeaseGranted | Refused:
        reply = await self._worker.lend(received.message, received.traceparent, received.subject)
        self._measured.refused("lease", reply)
        return reply

    async def _on_progress(self, received: Received[AskProgress]) -> Progress:
        self._worker.look_at_the_clock()
        return self._reporter.progress(received.message)

    async def _on_purge(self, received: Received[PurgeBlocks]) -> BlocksPurged:
        return self._worker.purge(received.message, received.subject)

    async def _on_drain(self, received: Received[DrainWorker]) -> DrainAnswered:
        return await self._worker.drain(received.message)

    async def _on_status(self, _: Received[DescribeWorker]) -> WorkerDescribed:
        return self._reporter.describe(now_ms())

    async def _on_ping(self, _: Received[PingWorker]) -> WorkerAlive:
        return self._worker.alive()
