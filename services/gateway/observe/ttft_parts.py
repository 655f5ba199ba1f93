"""One definition of time to first token, and its parts. Pure.

From the request's body having been read by the gateway to token 0 being written to the client. The parts lie end to
end; of a request that was resumed before its first token they are those of the attempt that gave it, and what came
before is `retry`.
"""

from typing import NamedTuple

from schemas.request import FirstTokenTimes
from services.telemetry.names import TTFT_PARTS


class Milestones(NamedTuple):
    """What the gateway has seen, in ns by its own clock."""

    read_ns: int
    submitted_ns: int
    """The prompt is tokenized."""
    asked_ns: int
    """The attempt that gave the first token was to be placed."""
    placed_ns: int
    written_ns: int


def fit_clock(times: FirstTokenTimes, placed_ns: int, written_ns: int) -> FirstTokenTimes:
    """Return a worker's times as they can have been. All are by the gateway's clock: what the worker has sent are dates
    of the mesh's clock, which is known to some hundred µs only, and durations are exact.

    What cannot be, having been computed before it was sent or after it was written, is moved by as little as will do.
    """
    shift_ns = max(0, placed_ns - times.accepted_ns)
    shift_ns = shift_ns or min(0, written_ns - times.computed_ns)
    accepted_ns, first_step_ns, computed_ns = (
        min(max(at_ns + shift_ns, placed_ns), written_ns)
        for at_ns in (times.accepted_ns, times.first_step_ns, times.computed_ns)
    )
    return FirstTokenTimes(accepted_ns=accepted_ns, first_step_ns=first_step_ns, computed_ns=computed_ns)


def ttft_parts(seen: Milestones, times: FirstTokenTimes) -> dict[str, float]:
    """Return the parts in seconds, which add up to the whole. `times`: fitted to the gateway's clock."""
    borders = (
        seen.read_ns,
        seen.submitted_ns,
        seen.asked_ns,
        seen.placed_ns,
        times.accepted_ns,
        times.first_step_ns,
        times.computed_ns,
        seen.written_ns,
    )
    return {
        part: (end_ns - start_ns) / 1e9
        for part, start_ns, end_ns in zip(TTFT_PARTS, borders[:-1], borders[1:], strict=True)
    }
