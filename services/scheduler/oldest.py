"""The time that a scheduler gives: its machine's, or, beside a scheduler that has lived longer, that one's."""

import secrets
import time

from schemas.worker import AskTime, TimeAnswered
from services.bus.typed import Received
from services.clocks import FORGOTTEN_NS, is_older
from services.telemetry import MeshClock


class OldestClock:
    """What schedulers agree on, so that all of the mesh has one clock whoever of them it asks."""

    def __init__(self, clock: MeshClock) -> None:
        self.clock = clock
        self.token = secrets.token_hex(8)
        self._began_ns = time.monotonic_ns()
        self._older_ns: int | None = None
        """When an older scheduler was last seen."""

    async def answer_time(self, _: Received[AskTime]) -> TimeAnswered:
        """Answer a service, or another scheduler."""
        now_ns = time.monotonic_ns()
        if self._older_ns is None or now_ns - self._older_ns > FORGOTTEN_NS:
            self.clock.follow_machine()
        return TimeAnswered(unix_ns=self.clock.date_ns(now_ns), age_ms=self._age_ms(), token=self.token)

    def follows(self, answer: TimeAnswered) -> bool:
        """Return whether this scheduler goes by the one that has answered; both decide alike."""
        follows = is_older(answer, self._age_ms(), self.token)
        if follows:
            self._older_ns = time.monotonic_ns()
        return follows

    def _age_ms(self) -> int:
        return (time.monotonic_ns() - self._began_ns) // 1_000_000
