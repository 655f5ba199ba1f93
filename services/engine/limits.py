"""Times and limits of the engine. Seconds, bytes, counts."""

PREFILL_SHARE = 8
"""While a prompt waits, at least 1/8 of a step's budget is prefill's."""

PROBE_TIMEOUT_S = 120.0
"""A process that looks for cards has said what it found by then: it imports PyTorch."""

MAX_HEADER_BYTES = 100_000_000
"""A file of weights whose header claims to be longer is not one."""
FULL_DIGEST_BYTES = 64 << 20
"""A file of weights up to this size is digested whole, a larger one by samples."""
NUM_SAMPLES = 256
"""A larger file is digested by so many samples, the first at its first byte, the last at its end."""
SAMPLE_BYTES = 64 << 10
"""Each sample has this size."""

MAX_GRAPH_ROWS = 256
"""Sequences in a decode that is recorded as a CUDA graph: a larger one computes long enough for its launches to hide
behind it."""
MOST_RESERVED_BYTES = 64 << 20
"""At most so much page-locked memory is taken for a step's numbers in advance: a step that needs more takes it then."""
