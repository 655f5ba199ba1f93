"""The prefill role: brings the core its messages. What it decides the worker's shell carries out."""

import asyncio

import msgspec

from schemas import subjects
from schemas.handoff import BlocksReserved, HandoffAborted, KVLanded
from schemas.request import PrefillAccepted, Refused, RunPrefill, refuse
from services.bus.typed import Received
from services.prefill.core import PrefillCore
from services.worker.shell import Worker


async def start_prefill(worker: Worker, tasks: asyncio.TaskGroup) -> None:
    """Give the worker the prefill role: compute prompts, and hand over or decode."""
    worker_id = worker.parts.worker_id
    core = PrefillCore(worker.parts.limits, worker.holder.cache, worker.holder.leases)
    worker.add_core(core, leases=core)

    async def run(received: Received[RunPrefill]) -> PrefillAccepted | Refused:
        request = received.message
        key = (request.request_id, request.attempt)
        if worker.is_elsewhere(core, key):
            return refuse(request, "invalid", "this worker decodes this attempt already")
        accepted_ns = worker.spans.accepted(key, received.traceparent, "prefill")
        reply = worker.answer(lambda now: core.run(request, now))
        worker.measured.refused("run", reply)
        if isinstance(reply, Refused):
            worker.forget(key)
            return reply
        return msgspec.structs.replace(reply, accepted_ns=accepted_ns)

    def reserved(received: Received[BlocksReserved]) -> None:
        worker.decide(lambda now: core.reserved(received.message, now))

    def landed(received: Received[KVLanded]) -> None:
        worker.decide(lambda now: core.landed(received.message, now))

    def aborted(received: Received[HandoffAborted]) -> None:
        worker.decide(lambda now: core.aborted(received.message, now))

    await worker.bus.serve(tasks, subjects.RUN, (worker_id,), run)
    await worker.bus.listen(tasks, subjects.RESERVED, (worker_id, "*", "*"), reserved)
    await worker.bus.listen(tasks, subjects.LANDED, (worker_id, "*", "*"), landed)
    await worker.bus.listen(tasks, subjects.ABORTED, (worker_id, "*", "*"), aborted)
