"""The times of the decode role."""

RESERVED_AGAIN_MS = 500
"""How often the source is told again that there is room, until its offer comes: either message may be lost."""
TWIN_LANDS_WITHIN_MS = 60_000
"""How long a reservation waits for the blocks that come for another one: as long as a long prompt may take in line and
in computation. What is sent again costs bytes, no more."""
