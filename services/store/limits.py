"""The limits of the store that are not configured. What it lends is bounded as a worker's
(`services/worker/limits.py`)."""

# What it takes from workers.

MAX_OFFERED_BLOCKS = 1_024
"""Blocks that may wait to be read from one worker; what it offers beyond is not taken."""
MAX_OFFERS_HEARD = 256
"""Offers that may wait until it is known that their workers exist; one more is not taken."""

# The tier behind memory.

MAX_LOADS = 4
"""Loads from the tier at a time."""
LOAD_AHEAD = 2
"""Batches that one load has under way: one is read while the other is put in place. A thread each."""
BATCH_BYTES = 8 << 20
"""About what one call of the tier carries."""
COMPLAINT_INTERVAL_S = 10.0
"""At most one line of the log in so long for each kind of trouble."""
SCAN_PROGRESS_INTERVAL_S = 5.0
"""How often a long scan of the disk says how far it is."""

# Reading from workers.

MAX_PULLS = 4
"""Workers that are read from at once, one stream each."""
MAX_PULL_BLOCKS = 64
"""Blocks of one lease: what a worker has to keep for us at a time."""
MAX_REFUSALS = 16
"""Offered blocks in a row that the worker has given up meanwhile; one more, and the rest is taken for gone as well."""
