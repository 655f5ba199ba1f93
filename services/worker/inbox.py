"""The messages that a worker hears: of each subject, what is done with it."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from schemas import subjects
from schemas.directory import Inventory, ReadInventory
from schemas.ids import WorkerId
from schemas.kv import LeaseGranted, ReplicateBlocks, RequestLease, ReturnLease
from schemas.message import Message
from schemas.observe import DescribeWorker, WorkerDescribed
from schemas.request import AskProgress, CancelRequest, Progress, Refused, refuse
from schemas.worker import PingWorker, WorkerAlive, WorkerLeft
from services.bus.typed import Received, TypedBus
from services.keep import keep_traces
from services.runtime import now_ms
from services.telemetry import Telemetry
from services.worker.core.events import CopyOffered, ReserveAsked, RunAsked
from services.worker.roles import Role, RoleSubject
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
            for subscription in role.subscriptions:
                await self._subscribe(tasks, role, subscription)
        await bus.listen(tasks, subjects.REPLICATE, me, self._on_copy_offered)
        await bus.listen(tasks, subjects.CANCEL, ("*",), self._on_cancel)
        await bus.listen(tasks, subjects.LEFT, ("*",), self._on_left)
        await bus.serve(tasks, subjects.INVENTORY, me, self._on_inventory)
        await bus.serve(tasks, subjects.LEASE, me, self._on_lease)
        await bus.listen(tasks, subjects.RETURNED, me, self._on_returned)
        await bus.serve(tasks, subjects.PROGRESS, me, self._on_progress)
        await bus.serve(tasks, subjects.PING, me, self._on_ping)
        await bus.serve(tasks, subjects.WORKER_STATUS, me, self._on_status)
        await keep_traces(bus, tasks, self._telemetry)
        await bus.connection.flush()

    async def _subscribe(self, tasks: asyncio.TaskGroup, role: Role, subscription: RoleSubject) -> None:
        subject, ids = subscription.subject, subscription.ids
        if subject.reply:
            await self._bus.serve(tasks, subject, ids, self._answer(role, subscription))
        else:
            await self._bus.listen(tasks, subject, ids, self._hear(role, subscription))

    def _answer(
        self, role: Role, subscription: RoleSubject
    ) -> Callable[[Received[Message]], Awaitable[Message | None]]:
        async def answer(received: Received[Any]) -> Message | None:
            event = subscription.event(received)
            assert isinstance(event, RunAsked | ReserveAsked), "the only questions that roles are asked"
            reply = self._begin(event, role)
            if reply is not None:
                self._measured.refused(subscription.refused_as, reply)
            return reply

        return answer

    def _begin(self, event: RunAsked | ReserveAsked, role: Role) -> Message | None:
        """Let a role begin an attempt, unless another one of this worker has it: the engine could not tell them
        apart."""
        if self._cores.is_elsewhere((event.request.request_id, event.request.attempt), role):
            return refuse(event.request, "invalid", "another role of this worker has this attempt already")
        return self._worker.handle(event, role)

    def _hear(self, role: Role, subscription: RoleSubject) -> Callable[[Received[Message]], None]:
        def hear(received: Received[Any]) -> None:
            self._worker.handle(subscription.event(received), role)

        return hear

    def _on_copy_offered(self, received: Received[ReplicateBlocks]) -> None:
        self._worker.handle(CopyOffered(received.message, received.traceparent))

    def _on_cancel(self, received: Received[CancelRequest]) -> None:
        self._worker.handle(received.message)

    def _on_left(self, received: Received[WorkerLeft]) -> None:
        self._worker.left(received.message)

    async def _on_inventory(self, received: Received[ReadInventory]) -> Inventory:
        return self._reporter.inventory(received.message.offset)

    async def _on_lease(self, received: Received[RequestLease]) -> LeaseGranted | Refused:
        reply = self._worker.lend(received.message, received.traceparent)
        self._measured.refused("lease", reply)
        return reply

    def _on_returned(self, received: Received[ReturnLease]) -> None:
        self._worker.handle(received.message)

    async def _on_progress(self, received: Received[AskProgress]) -> Progress:
        self._worker.look_at_the_clock()
        return self._reporter.progress(received.message)

    async def _on_status(self, _: Received[DescribeWorker]) -> WorkerDescribed:
        return self._reporter.describe(now_ms())

    async def _on_ping(self, _: Received[PingWorker]) -> WorkerAlive:
        return self._worker.alive()
