"""The limits of attached servers that are not configured."""

MAX_SERVERS = 32
"""So many at one holder."""
MAX_PINS = 1_024
"""Questions of one server whose blocks are pinned at a time; further ones find nothing."""
MAX_WAITING = 256
"""Questions of one server that are answered once more; further ones have what is here."""
MIN_FETCH_BLOCKS = 2
"""Fewer are computed, not read from another holder."""
MAX_RATES = 256
"""Holders of which it is known how quickly they are read."""
RATED_BLOCKS = 4
"""A step that fills fewer blocks says nothing of how quickly prompts are computed, nor a read of fewer how quickly a
holder is read from."""
DOUBT = 1.1
"""Each time that a holder is not read from, as computing is quicker, it is taken to be so much quicker than it was: it
may have been slow once, and is tried again."""
MAX_TRACED = 4_096
"""Questions of which it is known in which trace their spans are: the last ones."""
MAX_PREFIX_BYTES = 8 << 20
"""Of a router's question."""
MAX_PREFIX_CONNECTIONS = 256
"""Of routers, at a time."""
PURSES_SHARE = 8
"""Of the arena's blocks, one in so many may lie empty in the servers' purses, all of them together."""
MAX_UNSENT_BYTES = 8 << 20
"""A half that takes nothing any more is given up when so much waits for it."""

# The canary.

CANARY_BLOCKS = 3
"""Whole blocks of its prompt, which has half a block more."""
NUM_LOGPROBS = 20
MIN_IN_COMMON = 18
"""Of the likeliest tokens, where nothing was changed."""
