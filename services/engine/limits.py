"""Times and limits of the engine. Seconds, bytes, counts."""

PREFILL_SHARE = 8
"""While a prompt waits, at least 1/8 of a step's budget is prefill's."""

PROBE_TIMEOUT_S = 120.0
"""A process that looks for cards has reported what it found by then: it imports PyTorch."""

GRAMMAR_TIMEOUT_S = 30.0
"""So long an engine's step waits for a grammar that is still being understood, which has limits of its own."""
LOGPROB_ROWS = 64
"""Logprobs of so many of a prompt's tokens are taken at a time: 39 MB in float32 for a vocabulary of 152,000."""

MAX_HEADER_BYTES = 100_000_000
"""A file of weights whose header claims to be longer is not one."""
FULL_DIGEST_BYTES = 64 << 20
"""A file of weights up to this size is digested whole, a larger one by samples."""
NUM_SAMPLES = 256
"""A larger file is digested by so many samples, the first at its first byte, the last at its end."""
SAMPLE_BYTES = 64 << 10
"""Each sample has this size."""

MAX_KEPT_GRAMMARS = 64
MAX_KEPT_GRAMMAR_CHARACTERS = 512 * 1024
"""Understood grammars that are kept for those who ask again; those asked for last. Each takes 120 bytes of memory for
each of its characters, and half a second to understand at most."""
COMPILER_STACK_BYTES = 256 << 20
"""Of the thread that understands grammars: it calls itself for each rule of a chain of rules, and a process whose stack
is too small for that dies. The system gives memory only for what is used of it."""
ROW_ITEMS_MAX = 1_000
"""What a grammar may still become at one place of the text. A property that may be left out needs four of them."""
STEP_ITEMS_MAX = 10_000
"""Of these for one token: 20 ms of work for the most ambiguous grammars, 0.1 ms for a JSON schema."""
STEP_LEXER_FUEL = 50_000
"""The same for its regular expressions, in the library's unit."""
LEXER_FUEL = 1_000_000
"""For all regular expressions when a grammar is begun."""
LEXER_STATES_MAX = 25_000
"""States of a grammar's regular expressions, 1 kB each, that the answers to one grammar may share."""

LAYER_ROWS = 16_384
"""So many sequences whose KV is handed over may be in an engine's process at a time: more than an arena has blocks for.
Memory is taken only for rows that are used."""
LIBRARY_ANSWER_S = 1.0
"""So long a scrape waits for what the engine's library has counted."""
CLOSE_LOOK_S = 0.2
"""Who waits for an engine's end looks so often whether another thread has seen it, or was just starting another one."""
LOOKS_A_TIMEOUT = 20
"""Whether a step hangs is looked at so often within the time that it may take."""
LOAD_TIMES = 10
"""A spare engine that takes so many times as long to load as another one has taken hangs, and is ended."""
LOAD_MIN_S = 2.0
"""No engine is expected to load quicker than this."""
SPARE_LOOK_S = 1.0
"""Between two looks at spare engines: whether they live, and whether there is memory for another one."""
