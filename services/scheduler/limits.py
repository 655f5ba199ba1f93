"""The scheduler room's times, limits and starting values. What operators set is in `services.config`; what several
rooms rely on is in `services.presence`."""

from services.presence import LOAD_INTERVAL_MS

# Pings.

MAX_OUTSTANDING_PINGS = 2
"""So many pings of one worker may be unanswered at once."""
SECOND_PING_SHARE = 4
"""A ping that nobody serves is followed by a second one after this part of the ping interval: a second proof soon."""
PROOF_TIMEOUT_S = 1.0
"""How long a round trip to the broker may take that is to show that the bus works."""

# Answers to placement requests.

LEARN_S = 2 * LOAD_INTERVAL_MS / 1000
"""Before this a scheduler that has just started may not know the fleet, and refuses nobody for want of workers."""
RETRY_AFTER_MS = 1_000
"""When to come again where a role has no worker."""

# The directory.

LOCATE_TIMEOUT_S = 0.05
"""What a directory that is down or slow may cost a request."""
BACKOFF_MIN_MS, BACKOFF_MAX_MS = 100, 1_000
"""How long a directory that failed is left alone: doubled by each failure in a row."""

# Admission.

MIN_RETRY_MS, MAX_RETRY_MS = 1_000, 60_000
"""When a request that is refused for load may come again: within these."""
TENANT_WINDOW_MS = 10_000
"""How long a tenant counts after its last request, and how quickly what was placed for it is forgotten (by half)."""
MAX_TENANTS = 1_024
"""So many tenants are remembered, the latest seen."""
CONTESTED_SHARE = 0.5
"""Of the queue's bound: from there on the tenants' shares matter."""

# Prices (`placement/cost.py`).

MAX_SOURCES = 4
"""Sources of one prompt. Each one is a round trip, one after the other."""
MAX_ALTERNATIVES = 3
"""A decision names at most so many placements beside the chosen one."""
STALL_WEIGHT = 0.2
"""Weight of a pause in a running answer, compared with an equally long wait for a first token. A larger one gives
steadier answers and later first tokens."""
LOAD_WEIGHT = 1.0
"""A request already in the batch counts as one decode step."""
OVERLAPPED_SHARE = 0.25
"""What a hand-over costs that hides behind the computation: it takes both workers' memory bandwidth."""
NO_ROOM_MS = 500.0
"""Blocks are short: the request waits for another one's end."""
EQUAL_MS, EQUAL_SHARE = 1.0, 0.02
"""Costs this close are equal: the rates are no better than that, and the load should spread."""
SUSPECT_PENALTY, FAILED_PENALTY = 3, 1
"""What speaks against a worker: to be suspect, as it may be stopped, is worse than to have failed the request once."""

# Rates until workers have measured their own (`placement/known_rates.py`).

START_PREFILL_TOKENS_PER_S = 3_000.0
"""A small model on a few cores; an accelerator's first report corrects it."""
START_DECODE_STEP_MS = 10.0
"""One step of a small batch of such a model."""
START_TOKEN_BYTES = 65_536
"""A model of about a billion parameters in 16 bits."""
TRUST_HALF_LIFE_MS = 60_000
"""After this long without a new measurement a pair is taken to be half way (in orders of magnitude) to its like."""
