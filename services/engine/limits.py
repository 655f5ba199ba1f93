"""Times and limits of the engine. Seconds, bytes, counts."""

PREFILL_SHARE = 8
"""While a prompt waits, at least 1/8 of a step's budget is prefill's."""

PROBE_TIMEOUT_S = 120.0
"""A process that looks for cards has said what it found by then: it imports PyTorch."""

MAX_HEADER_BYTES = 100_000_000
"""Of a file of weights: a longer header is none."""
FULL_DIGEST_BYTES = 64 << 20
"""A file of weights up to this size is digested whole, a larger one by samples."""
NUM_SAMPLES = 256
"""Such samples of a file, from its first byte to its last."""
SAMPLE_BYTES = 64 << 10
"""Of each."""

MAX_GRAPH_ROWS = 256
"""Sequences in a decode that is recorded as a CUDA graph: a larger one computes long enough for its launches to hide
behind it."""
MOST_RESERVED_BYTES = 64 << 20
"""Of page-locked memory for a step's numbers: more is taken when a step needs it."""
