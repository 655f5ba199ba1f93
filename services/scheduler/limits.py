"""The scheduler room's limits and starting values. What operators set is in `services.config`."""

# Pings.

MAX_OUTSTANDING_PINGS = 2
"""So many pings of one worker may be unanswered at once."""
SECOND_PING_SHARE, WORDLESS_SHARE = 4, 2
"""A ping that nobody serves is followed by a second one after this part of the ping interval, a second proof soon; the
second: where the broker has not reported that the worker's connection has ended."""
LOOK_GAP_MS = 10
"""Two looks at who is overdue are at least this far apart."""

# Answers to placement requests.

RETRY_AFTER_MS = 1_000
"""A request for which a role has no worker may come again after this long."""

# The directory.

BACKOFF_MIN_MS, BACKOFF_MAX_MS = 100, 1_000
"""A directory that failed is left alone for this long: doubled by each failure in a row."""

# Admission.

MIN_RETRY_MS, MAX_RETRY_MS = 1_000, 60_000
"""A request that is refused for load may come again after a time within these."""
TENANT_WINDOW_MS = 10_000
"""A tenant counts for this long after its last request, and half of what was placed for it is forgotten in this
time."""
MAX_TENANTS = 1_024
"""So many tenants are remembered, the latest seen."""
CONTESTED_SHARE = 0.5
"""From this part of the queue's bound on, the tenants' shares matter."""

# Prices (`placement/cost.py`).

MAX_SOURCES = 4
"""A prompt is read from so many sources at most. Each one is a round trip, one after the other."""
MAX_ALTERNATIVES = 3
"""A decision names at most so many placements beside the chosen one."""
STALL_WEIGHT = 0.2
"""A pause in a running answer counts this much of an equally long wait for a first token. A larger weight gives
steadier answers and later first tokens."""
LOAD_WEIGHT = 1.0
"""A request that is already in the batch counts as so many decode steps."""
OVERLAPPED_SHARE = 0.25
"""A hand-over that hides behind the computation costs this part of its time: it takes both workers' memory
bandwidth."""
NO_ROOM_MS = 500.0
"""Where blocks are short the request waits for another one's end, which is taken to last this long."""
EQUAL_MS, EQUAL_SHARE = 1.0, 0.02
"""Costs this close are equal: the rates are no better than that, and the load should spread."""
SUSPECT_PENALTY, FAILED_PENALTY = 3, 1
"""This much speaks against a worker: to be suspect, as it may be stopped, is worse than to have failed the request
once."""

ROWS_AT_ONCE = 16
"""So many prefill workers are priced with all decode workers at once."""

# What was placed, and is not yet computed (`placement/inflight.py`).

IN_FLIGHT_MS = 30_000
"""So long a placement is taken to be computing its prompt at most."""
IN_FLIGHT_SHARE, IN_FLIGHT_SLACK_MS = 2, 1_000
"""It is taken to do so for this many times of what was predicted, and so much longer: then the directory knows what it
has, and what was evicted meanwhile."""
MARK_BLOCKS = 16
"""Every so many blocks of a prompt are noted."""
MAX_MARKS = 65_536
"""In all: about 4,000 prompts of 4,000 tokens."""

# Policies of others.

POLICY_LIMIT_S = 0.05
"""A policy that has not answered after this is interrupted, and another one chooses."""
POLICY_REST_MS = 1_000
"""It is not asked again before this: it would hold up every request."""

# Rates until workers have measured their own (`placement/known_rates.py`).

START_PREFILL_TOKENS_PER_S = 3_000.0
"""A small model on a few cores computes this quickly; an accelerator's first report corrects it."""
START_DECODE_STEP_MS = 10.0
"""One step of a small batch of such a model takes this long."""
START_TOKEN_BYTES = 65_536
"""The KV of a model of about a billion parameters in 16 bits has this size."""
TRUST_HALF_LIFE_MS = 60_000
"""After this long without a new measurement a pair is taken to be half way (in orders of magnitude) to its like."""
REWEIGH_MS = 2_000
"""Measurements that have not changed are weighed anew this often."""

MAX_BORDERS = 64
"""So many context positions are told apart; what workers measure at others is ignored."""
MIN_RATE = 0.001
"""Bytes or tokens a second: what is slower is not measured, or absurd, and must not be divided by."""
