"""Every service asks a scheduler for the time, corrects its dates by it, and names a machine whose clock is wrong."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

from schemas import subjects
from schemas.message import UndecodableMessageError, decode, encode
from schemas.worker import AskTime, TimeAnswered
from services.bus.base import Bus, BusError
from services.bus.typed import headers_of
from services.metric_names import CLOCK_AHEAD
from services.metrics import Metrics
from services.telemetry import MeshClock
from services.times import TelemetryTimes

log = logging.getLogger(__name__)

NUM_SOON = 8
"""So often the time is asked for in quick succession, as a service starts."""
NUM_OWN = 24
"""After so many answers of its own a scheduler does not ask again at once any more: it is alone."""
TOGETHER_MS = 1_000
"""Of two schedulers whose ages differ by less the tokens decide: ages come with the delay of a message."""
FORGOTTEN_NS = 60_000_000_000
"""A scheduler that has not answered for so long lives no more."""


def is_older(answer: TimeAnswered, age_ms: int, token: str) -> bool:
    """Return whether the scheduler that answered counts beside one of this age and token; all decide alike."""
    ahead_ms = answer.age_ms - age_ms
    return answer.token < token if abs(ahead_ms) < TOGETHER_MS else ahead_ms > 0


class OldestScheduler:
    """The scheduler that a service goes by, the eldest of those that answer it: until schedulers of machines with other
    clocks have agreed, who asks now the one and now the other would go to and fro."""

    def __init__(self) -> None:
        self._answer: TimeAnswered | None = None
        self._received_ns = 0

    def follows(self, answer: TimeAnswered) -> bool:
        """Return whether to go by the scheduler that answered."""
        now_ns, known = time.monotonic_ns(), self._answer
        passed_ns = now_ns - self._received_ns
        if known is not None and answer.token != known.token and passed_ns < FORGOTTEN_NS:
            age_ms = known.age_ms + passed_ns // 1_000_000
            if not is_older(answer, age_ms, known.token):
                return False
        self._answer, self._received_ns = answer, now_ns
        return True


async def keep_time(
    bus: Bus,
    clock: MeshClock,
    metrics: Metrics,
    times: TelemetryTimes,
    follows: Callable[[TimeAnswered], bool] | None = None,
    own_token: str = "",
) -> None:
    """Ask, now and every so often, until cancelled. `follows`: whether the scheduler that answers is to be believed;
    None: the oldest is. `own_token`: of the scheduler that asks."""
    follows = follows or OldestScheduler().follows
    metrics.on_sample(lambda: metrics.set_series(CLOCK_AHEAD, {(): clock.machine_ahead_ns / 1e9}))
    question, named_ms, num_asked, num_own = AskTime(), 0, 0, 0
    while True:
        asked_ns, is_own = time.monotonic_ns(), False
        with contextlib.suppress(BusError, UndecodableMessageError):  # none is there yet, or no more
            payload = encode(question)
            reply = await bus.request(subjects.TIME.of(), payload, headers_of(question, ""), times.clock_within_s)
            answer = decode(reply.payload, TimeAnswered)
            is_own = answer.token == own_token
            if follows(answer):
                clock.compare(answer.unix_ns, asked_ns)
        if abs(clock.named_ms - named_ms) >= 1_000:
            named_ms = clock.named_ms
            log.warning("%s", _described(named_ms))
        # The broker gives a question to any of the schedulers: one that has answered itself asks again at once.
        if is_own and num_own < NUM_OWN:
            num_own += 1
            continue
        num_asked += 1
        await asyncio.sleep(times.clock_soon_s if num_asked < NUM_SOON else times.clock_interval_s)


def _described(ahead_ms: int) -> str:
    if not ahead_ms:
        return "this machine's clock agrees with the scheduler's again"
    side = "ahead of" if ahead_ms > 0 else "behind"
    return (
        f"this machine's clock is {abs(ahead_ms) / 1000:.1f} s {side} the scheduler's: requests are served all the "
        "same, and dates of spans are corrected by it; let both machines keep time (NTP)"
    )
