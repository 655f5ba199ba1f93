"""Runs one worker of any role until it is told to stop."""

import asyncio
import contextlib
import sys
from collections.abc import Callable

from services.bus.base import Bus
from services.config import MeshConfig
from services.decode.service import Reads, start_decode
from services.metrics import Metrics
from services.prefill.service import start_prefill
from services.telemetry import Telemetry
from services.worker.inbox import Inbox
from services.worker.parts import WorkerParts
from services.worker.replicate import start_replication
from services.worker.shell import Worker
from services.worker.timers import Clockwork, drain

SWITCH_INTERVAL_S = 0.0005
"""The engine's thread shares the interpreter with the event loop: at Python's 5 ms each hop of a hand-over could wait
that long."""

LAST_WORDS_S = 5.0


async def run_worker(
    parts: WorkerParts,
    config: MeshConfig,
    connection: Bus,
    telemetry: Telemetry,
    stop: asyncio.Event,
    on_ready: Callable[[], None] | None = None,
    metrics: Metrics | None = None,
) -> None:
    """Serve until `stop` is set; then leave in order. Takes ownership of the parts' arena."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    worker = Worker(parts, config, connection, telemetry, metrics)
    reads: Reads | None = None
    try:
        async with asyncio.TaskGroup() as tasks:
            worker.holder.start(config.worker)
            await worker.announce()
            await start_prefill(worker, tasks)  # a decode worker, too, may serve a request whose KV it holds alone
            if parts.role == "decode":
                reads = await start_decode(worker, tasks)
            await start_replication(worker, tasks)
            await worker.start(tasks)
            await Inbox(worker).open(tasks)
            worker.join()
            clockwork = tasks.create_task(Clockwork(worker).run(), name="clockwork")
            if on_ready is not None:
                on_ready()
            await stop.wait()
            await drain(worker, config.worker.drain_s)
            worker.stop_intake()
            clockwork.cancel()
            if reads is not None:
                await reads.close()
            await worker.stop_fetches()
            await worker.close()
            with contextlib.suppress(TimeoutError):  # the bus may be away for good
                async with asyncio.timeout(LAST_WORDS_S):
                    await worker.outbox.sent.wait()
            await worker.bus.close()
    finally:
        worker.holder.close()  # whatever ended us, the memory is given back
