"""Every service asks a scheduler for the time, corrects its dates by it, and names a machine whose clock is wrong."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

from schemas import subjects
from schemas.message import UndecodableMessageError, decode, encode
from schemas.worker import AskTime, TimeTold
from services.bus.base import Bus, BusError
from services.bus.typed import headers_of
from services.metric_names import CLOCK_AHEAD
from services.metrics import Metrics
from services.telemetry import MeshClock
from services.times import TelemetryTimes

log = logging.getLogger(__name__)

NUM_SOON = 8
"""So often the time is asked for in quick succession, as a service starts."""


async def keep_time(
    bus: Bus,
    clock: MeshClock,
    metrics: Metrics,
    times: TelemetryTimes,
    follows: Callable[[TimeTold], bool] = lambda _: True,
) -> None:
    """Ask, now and every so often, until cancelled. `follows`: whether the scheduler that answers is to be believed."""
    metrics.on_sample(lambda: metrics.put(CLOCK_AHEAD, {(): clock.machine_ahead_ns / 1e9}))
    question, named_ms, num_asked = AskTime(), 0, 0
    while True:
        asked_ns = time.monotonic_ns()
        with contextlib.suppress(BusError, UndecodableMessageError):  # none is there yet, or no more
            payload = encode(question)
            reply = await bus.request(subjects.TIME.of(), payload, headers_of(question, ""), times.clock_within_s)
            told = decode(reply.payload, TimeTold)
            if follows(told):
                clock.hear(told.unix_ns, asked_ns)
        if abs(clock.named_ms - named_ms) >= 1_000:
            named_ms = clock.named_ms
            log.warning("%s", _said(named_ms))
        num_asked += 1
        await asyncio.sleep(times.clock_soon_s if num_asked < NUM_SOON else times.clock_interval_s)


def _said(ahead_ms: int) -> str:
    if not ahead_ms:
        return "this machine's clock agrees with the scheduler's again"
    side = "ahead of" if ahead_ms > 0 else "behind"
    return (
        f"this machine's clock is {abs(ahead_ms) / 1000:.1f} s {side} the scheduler's: requests are served all the "
        "same, and dates of spans are corrected by it; let both machines keep time (NTP)"
    )
