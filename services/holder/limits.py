"""The limits of a worker, whatever its role. What is set per mesh is in `config.py`."""

# Taking requests.

RETRY_AFTER_MS = 500
"""What a refused request is asked to wait: a queue has moved on by then."""
MAX_SOURCES = 16
"""Of one request: a source that does not answer costs seconds."""

# Waiting for what another attempt fills.

DUPLICATE_WAIT_SHARE = 2
"""An attempt waits so for at most this part of the time that it has left, a half: the rest must do to go on by
itself."""
DUPLICATE_READ_SHARE = 4
"""What another one reads comes all at once. It is waited for where at least a quarter of it is wanted here."""

# Computing ahead of the reader.

AHEAD_SHARE = 2
"""Prompts whose decode workers have no room yet may hold half of a prefill worker's blocks: the other half is for those
whose decode workers have it, so that none of them waits for one that does not move."""

# Lending.

MAX_LENT_LEASES = 256
"""So many leases that readers have asked for may be open; whoever asks for one more is refused for now."""
MAX_READER_LEASES = 64
"""The same of one reader: a holder serves so many streams at once, so one more read would find no stream."""
MAX_REQUEST_LEASES = 8
"""The same for one request, whose id a gateway has signed, where a reader's name may be invented. Each worker of an
attempt reads one piece at a time, so this is two workers through four attempts at once."""
MAX_LEASES_AWAITED = 256
"""Readers that wait for blocks that are being computed; whoever asks beyond that is asked to try again."""
READER_SHARE = 2
"""A reader that has a lease gets no further one with which it would have more than half of the blocks: the other half
can be given up for the holder's own requests. Blocks that several of its leases share count once. Who is refused asks
elsewhere or computes."""
UNREAD_AFTER_MS = 1_000
"""A lease that nobody reads for so long, though all of it could be read, is counted as unread: a reader opens its
stream as soon as it has its ticket."""

# What lies in the blocks.

CANDIDATE_SHARE = 8
"""Once fewer than 1/8 of the blocks are free, the least recently used of the cached ones are announced as the next to
be evicted."""
MAX_CANDIDATE_BLOCKS = 256
"""So many blocks are named at a time as those that go next."""
INVENTORY_PAGE_BLOCKS = 100_000
"""Blocks in one page of an inventory: 2.2 MB of JSON; fewer where the broker takes less."""
MESSAGE_BLOCKS = 1_024
"""Blocks that one message names that is no answer: 22 kB of JSON, which every broker takes that is used."""

# Metrics.

MAX_MEASURED_PAIRS = 64
"""Pairs of source and carrier whose rate is known and in the metrics: those read over last."""

# Compression on the wire.

COMPRESSION_GAIN_MIN = 1.2
"""Compression loses something: it must be so much quicker."""
CODEC_SAMPLE_BLOCKS = 64
"""Blocks of KV with which the codec is measured at the start."""
CODEC_ROUNDS = 3
"""How often it is measured; the quickest counts."""

# What is remembered of attempts that have ended.

MAX_PAST_ATTEMPTS = 4_096
"""Attempts that have ended, or were cancelled before they came: a late message must not begin them again."""

# Reading from other holders.

READ_BYTES_PER_S_MIN = 20e6
"""A read that takes longer than `read_base_s` and its bytes at this rate is given up: computing would be quicker."""

MAX_WAYS_AT_ONCE = 8
"""Ways to other holders that one tries at the same time."""
MAX_PEERS = 10_000
"""Holders of which a reader remembers where they serve; those seen last."""

# Copies: blocks that are kept on a second holder, so that they outlive their worker.

OFFER_BLOCKS = 8
"""So many new blocks of a sequence are offered to its replica at once, however short the last offer is ago."""
MAX_HEAT_BLOCKS = 65_536
"""A worker that leaves asks how hot so many blocks are, those that it has used last; the directory answers for no more
(1.4 MB of JSON). Fewer where the broker takes less."""
MAX_COPY_READS = 2
"""Copies are read beside the requests' own reads, and must not slow them."""
MAX_COPY_BLOCKS = 64
"""What a source has to keep for one read of a copy."""
MAX_COPY_REFUSALS = 16
"""Offered blocks in a row that their source has given up meanwhile; with one more, the rest is taken for gone."""
MAX_COPY_SOURCES = 256
"""Holders whose offers may wait at a time."""
MAX_OFFERED_BLOCKS = 1_024
"""Blocks of one of them that may wait; what it offers beyond is not taken."""
SPARE_SHARE = 4
"""Copies are read only while more than this part of all blocks is free: a quarter."""

LEAVING_SHARE = 2
"""Of what is free or kept for its content only a worker gives up to a half for the blocks of one that leaves."""

MAX_RECEIVED_GRAMMAR_CHARACTERS = 2 * 1024 * 1024
"""Long grammars that gateways have sent are kept up to here, those asked for last."""

# The process.

SWITCH_INTERVAL_S = 0.0005
"""The engine's thread shares the interpreter with the event loop: at Python's 5 ms each hop of a hand-over could wait
that long."""
MAX_UNSENT = 10_000
"""Messages that wait to be sent while the bus is away; beyond it the oldest of what may be lost goes."""
MAX_UNSENT_BYTES = 64 * 1024 * 1024

# What it reports of itself.

MAX_LINES = 32
"""Tenants that wait and are named in one load: those with most in line."""

MAX_LISTED = 50
"""Requests, and leases, in one description of a worker: the oldest. With the worker's rates they are some 25 kB."""
MAX_STEPS_KEPT = 200
"""Steps of a worker that are kept in words; like ones in a row are one."""
MAX_LINKED_STEPS = 16
"""So many steps of a prompt, and of an answer, are recorded and linked: a long answer has thousands."""

# Asking gateways what they still want.

MAX_ATTEMPTS_A_QUESTION = 256
"""Attempts that one question to a gateway names; more are asked about in several."""

# Measured rates.

STALE_RATE_MS = 60_000
"""A pair not read from for so long is measured anew: one bad moment must not keep it from ever being tried again."""
