"""The times of the decode role."""

RESERVED_AGAIN_MS = 500
"""How often the source is told again that there is room, until its offer comes: either message may be lost."""
