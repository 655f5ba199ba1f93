"""Exports traces that were not sampled and are asked for later: every service exports what it has of them."""

import asyncio

from schemas import subjects
from schemas.observe import KeepTrace
from services.bus.typed import Received, TypedBus
from services.telemetry import Telemetry


async def keep_traces(bus: TypedBus, tasks: asyncio.TaskGroup, telemetry: Telemetry) -> None:
    """Subscribe to requests for traces."""

    def keep(received: Received[KeepTrace]) -> None:
        telemetry.keep_trace(received.message.trace_id)

    await bus.listen(tasks, subjects.KEEP, ("*",), keep)
