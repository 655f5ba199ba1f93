"""The times of the prefill role."""

UNOFFERED_HOLD_MS = 500
"""How long a computed prompt keeps its blocks from a queued one while its decode worker has no room: two workers whose
requests wait for each other's blocks would otherwise wait for ever. What it gives up stays cached as long as it can."""
UNKNOWN_AFTER_MS = 1_500
"""How long a decode worker may say that it has room for a hand-over that nobody has asked for here. The two requests
are sent at once: what was not heard by then was taken by a predecessor of this process, or is lost."""
OFFER_AGAIN_MS = 250
"""The least time between two offers of one lease."""
FINISHED_TOKENS = 256
"""A worker that drains finishes the prompts of which it has so few tokens to compute: less than a step's worth."""
LANDED_GRACE_MS = 2_000
"""How long a lease waits for its reader's message once the stream has ended, well or not: the message may be lost."""
TWIN_COMPUTES_WITHIN_MS = 600_000
"""How long a prompt waits for the blocks that another one's computation fills. It would be computed beside it, and no
sooner: its deadline is the bound."""
