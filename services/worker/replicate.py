"""Brings a worker's copies their messages: what it completes goes out, what others have completed comes in."""

import asyncio

from schemas import subjects
from schemas.kv import ReplicateBlocks
from services.bus.typed import Received
from services.worker.core.replicas import ReplicaCore
from services.worker.shell import Worker


async def start_replication(worker: Worker, tasks: asyncio.TaskGroup) -> ReplicaCore:
    """Let the worker offer its blocks where a request names a replica, and be one itself."""
    core = ReplicaCore(worker.parts.limits, worker.holder.cache)
    worker.add_core(core)
    worker.on_submitted = core.submitted

    def offered(received: Received[ReplicateBlocks]) -> None:
        worker.decide(lambda now: core.offered(received.message, received.traceparent, now))

    await worker.bus.listen(tasks, subjects.REPLICATE, (worker.parts.worker_id,), offered)
    return core
