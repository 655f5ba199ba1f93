"""The limits of attached servers that are not configured."""

MAX_SERVERS = 32
"""So many at one holder."""
MAX_PINS = 1_024
"""Questions of one server whose blocks are pinned at a time; further ones find nothing."""
PIN_MS = 60_000
"""What was found is pinned for so long at most."""
PURSES_SHARE = 8
"""Of the arena's blocks, one in so many may lie empty in the servers' purses, all of them together."""
MAX_UNSENT_BYTES = 8 << 20
"""A half that takes nothing any more is given up when so much waits for it."""
HELLO_S = 10.0
"""Whoever connects says within this time who it is."""

# The canary.

CANARY_BLOCKS = 3
"""Whole blocks of its prompt, which has half a block more."""
CANARY_RETRY_S = 60.0
"""A server whose API does not answer is asked again after so long, and a line says why nothing is shared."""
CANARY_TIMEOUT_S = 300.0
"""For one of its requests: a server compiles what it needs for the first one."""
SAVED_S = 5.0
"""So long what a canary has computed may take to be saved."""
SAVED_LOOK_S = 0.05
HEALTH_RETRY_S = 1.0
NUM_LOGPROBS = 20
MIN_IN_COMMON = 18
"""Of the likeliest tokens, where nothing was changed."""
