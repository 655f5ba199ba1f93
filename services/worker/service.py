"""Runs one worker until it is asked to stop."""

import asyncio
import sys
from collections.abc import Callable
from functools import partial

from services.bus.base import Bus
from services.bus.typed import TypedBus
from services.config import MeshConfig
from services.engine.loading import LIBRARY_METRICS
from services.holder.limits import SWITCH_INTERVAL_S
from services.metrics import Metrics
from services.runtime import ended_before
from services.telemetry import Telemetry
from services.worker.inbox import Inbox
from services.worker.parts import WorkerParts
from services.worker.shell import Worker
from services.worker.timers import Timers, drain


async def run_worker(
    parts: WorkerParts,
    config: MeshConfig,
    connection: Bus,
    telemetry: Telemetry,
    stop: asyncio.Event,
    on_ready: Callable[[], None] | None = None,
    metrics: Metrics | None = None,
) -> bool | None:
    """Serve until `stop` is set, or an operator asks for it; then leave in order. Takes ownership of the parts' arena.
    Return whether an operator wants it to be started again; None: no operator has asked it to leave."""
    # The engine's thread shares the interpreter with the event loop: at Python's 5 ms each hop of a hand-over may wait.
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    metrics = metrics or Metrics(parts.worker_id)
    bus = TypedBus(connection, parts.info.role, metrics)
    worker = Worker(parts, config, bus, telemetry, metrics)
    if config.engine.name == "vllm":
        metrics.show_library(partial(worker.engine.library_text, LIBRARY_METRICS))
    try:
        async with asyncio.TaskGroup() as tasks:
            # The worker joins once all its subscriptions are there: the first requests may come at once.
            await worker.begin_serving(tasks)
            timeout_s = config.times.worker.answer_timeout_s
            await Inbox(worker, parts.worker_id, bus, telemetry, timeout_s).start_listening(tasks)
            worker.reporter.publish_joined()
            # The timers also run while the worker leaves: they renew the leases in use, and `leave` cancels them.
            timers = Timers(worker, parts.worker_id, bus, config.times)
            timing = tasks.create_task(timers.run(), name="timers")
            if on_ready is not None:
                on_ready()
            # Serve until the process or an operator ends it; migrate what runs or finish it; then leave in order.
            await ended_before(stop, _wait_for(worker.asked_to_leave))
            await drain(worker, config)
            await worker.leave(timing)
    finally:
        worker.holder.close_memory()
    return worker.comes_again


async def _wait_for(event: asyncio.Event) -> None:
    await event.wait()
