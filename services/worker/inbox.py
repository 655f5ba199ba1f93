"""The messages that a worker of any role hears, brought to its cores."""

import asyncio
import time

from schemas import subjects
from schemas.directory import ReadInventory
from schemas.kv import RequestLease, ReturnLease
from schemas.message import Message
from schemas.observe import DescribeWorker
from schemas.request import AskProgress, CancelRequest, Progress, Refused
from schemas.worker import PingWorker, WorkerAlive, WorkerLeft
from services.bus.typed import Received
from services.keep import keep_traces
from services.runtime import now_ms
from services.worker.kv.holder import num_blocks_of
from services.worker.observe.transfers import LeaseTrace
from services.worker.shell import Worker


class Inbox:
    """One worker's, beside those of its roles."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    async def open(self, tasks: asyncio.TaskGroup) -> None:
        """Return once all ears are open."""
        bus, me = self._worker.bus, (self._worker.parts.worker_id,)
        await bus.listen(tasks, subjects.CANCEL, ("*",), self._on_cancel)
        await bus.listen(tasks, subjects.LEFT, ("*",), self._on_left)
        await bus.serve(tasks, subjects.INVENTORY, me, self._on_inventory)
        await bus.serve(tasks, subjects.LEASE, me, self._on_lease)
        await bus.listen(tasks, subjects.RETURNED, me, self._on_returned)
        await bus.serve(tasks, subjects.PROGRESS, me, self._on_progress)
        await bus.serve(tasks, subjects.PING, me, self._on_ping)
        await bus.serve(tasks, subjects.WORKER_STATUS, me, self._on_status)
        await keep_traces(bus, tasks, self._worker.telemetry)
        await bus.connection.flush()

    def _on_cancel(self, received: Received[CancelRequest]) -> None:
        self._worker.decide_all(lambda core, now: core.cancelled(received.message, now))

    def _on_left(self, received: Received[WorkerLeft]) -> None:
        worker, event = self._worker, received.message
        if event.worker_id != worker.parts.worker_id:
            worker.decide_all(lambda core, now: core.left(event, now))
            worker.decide(lambda _now: worker.lending.left(event))
        elif event.incarnation == worker.holder.incarnation:
            worker.fence(f"it was declared lost: {event.reason}")

    async def _on_inventory(self, received: Received[ReadInventory]) -> Message:
        return self._worker.holder.inventory(received.message.offset)

    async def _on_lease(self, received: Received[RequestLease]) -> Message:
        worker, request = self._worker, received.message
        lease = worker.answer(lambda now: (worker.lending.lend(request, now), []))
        if isinstance(lease, Refused):
            worker.measured.refused("lease", lease)
            return lease
        worker.measured.leases.granted(lease.lease_id, num_blocks_of(lease))
        key = (request.request_id, request.attempt)
        trace = LeaseTrace(key, received.traceparent, time.time_ns(), is_lent=True)
        worker.lease_traces.granted(lease.lease_id, trace)
        return worker.holder.lend(lease, request)

    def _on_returned(self, received: Received[ReturnLease]) -> None:
        self._worker.decide(lambda _now: self._worker.lending.returned(received.message))

    async def _on_progress(self, received: Received[AskProgress]) -> Message:
        worker, asked = self._worker, received.message
        worker.look_at_the_clock()
        key = (asked.request_id, asked.attempt)
        return Progress(
            request_id=asked.request_id,
            attempt=asked.attempt,
            deadline_ms=asked.deadline_ms,
            worker_id=worker.parts.worker_id,
            known=key in worker.answers or worker.has(key),
            tokens=worker.answers.since(key, asked.index),
            is_waiting=any(core.is_waiting(key) for core in worker.cores),
        )

    async def _on_status(self, received: Received[DescribeWorker]) -> Message:
        return self._worker.reporter.describe(now_ms())

    async def _on_ping(self, received: Received[PingWorker]) -> Message:
        worker = self._worker
        worker.look_at_the_clock()
        lag_ms = worker.heartbeat.lag_ms(time.monotonic())
        return WorkerAlive(worker_id=worker.parts.worker_id, incarnation=worker.holder.incarnation, lag_ms=lag_ms)
