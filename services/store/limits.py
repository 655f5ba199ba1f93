"""The limits of the store that are not configured. What it lends is bounded as a worker's
(`services/holder/limits.py`)."""

# The tier behind memory.

MAX_LOADS = 4
"""Loads from the tier at a time."""
LOAD_AHEAD = 2
"""Batches that one load has under way: one is read while the other is put in place. A thread each."""
BATCH_BYTES = 8 << 20
"""About what one call of the tier carries."""
SCAN_PROGRESS_INTERVAL_S = 5.0
"""How often a long scan of the disk logs how far it is."""

# Reading from workers.

MAX_COPY_READS = 4
"""Workers that are read from at once, one stream each."""
