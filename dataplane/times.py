"""How long the ends of the data plane wait, and how a time is marked that a slow machine makes longer.

`cards/limits.py` has the times of graphics cards.
"""

from typing import Annotated

import msgspec

SCALES = "scales"
Wait = Annotated[float, msgspec.Meta(ge=0, extra={SCALES: True})]
"""Seconds for which somebody is waited for: `[times] scale` multiplies them."""
WaitMs = Annotated[int, msgspec.Meta(ge=0, extra={SCALES: True})]
"""The same in milliseconds."""
Pace = Annotated[float, msgspec.Meta(gt=0)]
"""Seconds from one doing of something to the next. They are not multiplied."""
PaceMs = Annotated[int, msgspec.Meta(gt=0)]
"""The same in milliseconds."""


class PlaneTimes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Connections between holders and readers of KV."""

    connect_s: Wait = 5.0
    """A reader gives up connecting to a holder after so long, or at its deadline."""
    open_s: Wait = 5.0
    """A connection on which nobody has asked for anything within this time is cut."""
    holder_idle_s: Wait = 30.0
    """A reader that takes nothing for so long is cut, and a connection on which no next stream is opened."""
    max_idle_s: Wait = 10.0
    """A reader keeps an unused connection for so long. Below `holder_idle_s`, so that it is seldom the holder who ends
    it."""
    busy_send_s: Wait = 1.0
    """A holder that is full tries for so long to send its refusal; it accepts nobody meanwhile."""
    try_s: Wait = 10.0
    """4 MiB must come within this time from a holder that was never read from before: a slower way is no way."""
    broken_s: Pace = 60.0
    """A carrier that could not be set up towards a holder is left out for so long, while there is another."""
