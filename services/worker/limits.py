"""The times and limits of a worker that are not configured."""

# Taking requests.

RETRY_AFTER_MS = 500
"""What a refused request is told to wait: a queue has moved on by then."""

# Lending.

OPEN_LEASE_WITHIN_MS = 5_000
"""How long a lease that a reader has asked for waits for its read to begin."""
MAX_LENT_LEASES = 256
"""So many leases that readers have asked for may be open; whoever asks for one more is refused for now."""
MAX_ENDED_LEASES = 1_024
"""So many leases are remembered that have ended before any stream on them; most of these are never opened."""
UNREAD_AFTER_MS = 1_000
"""A lease that nobody reads for so long, though all of it could be read, is counted as unread: a reader opens its
stream as soon as it has its ticket."""

# What lies in the blocks.

COOLING_SHARE = 8
"""Once fewer than 1/8 of the blocks are free, the coldest of the cached ones are said to go."""
MAX_COOLING_BLOCKS = 256
"""So many blocks are named at a time as those that go next."""
INVENTORY_PAGE_BLOCKS = 100_000
"""Blocks in one page of an inventory: 2.2 MB of JSON, far below the bus limit."""

# Stopping.

READERS_COME_S = 1.0
"""How long a worker that hands back waits for those who go on elsewhere to come for what it has."""
READERS_STAY_S = 2.0
"""How long it then waits until they have read it; and again, whatever it lends meanwhile, before it stops serving."""

# Metrics.

MAX_MEASURED_PAIRS = 64
"""Pairs of source and carrier whose rate is in the metrics: those read over last."""

# Compression on the wire.

COMPRESSION_GAIN_MIN = 1.2
"""Compression loses something: it must be so much quicker."""
CODEC_SAMPLE_BLOCKS = 64
"""Blocks of KV with which the codec is measured at the start."""
CODEC_ROUNDS = 3
"""How often it is measured; the quickest counts."""
