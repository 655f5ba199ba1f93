"""The times and limits of a worker, whatever its role. What is set per mesh is in `config.py`; a role's own are in
`services/prefill/limits.py` and `services/decode/limits.py`."""

# Taking requests.

RETRY_AFTER_MS = 500
"""What a refused request is told to wait: a queue has moved on by then."""
MAX_SOURCES = 16
"""Of one request: a source that does not answer costs seconds."""

# Waiting for what another attempt fills.

TWIN_WAIT_SHARE = 2
"""An attempt waits so for at most this part of the time that it has left, a half: the rest must do to go on by
itself."""
TWIN_READ_SHARE = 4
"""What another one reads comes all at once. It is waited for where at least a quarter of it is wanted here."""

# Lending.

OPEN_LEASE_WITHIN_MS = 5_000
"""How long a lease that a reader has asked for waits for its read to begin."""
MAX_LENT_LEASES = 256
"""So many leases that readers have asked for may be open; whoever asks for one more is refused for now."""
MAX_READER_LEASES = 64
"""The same of one reader: a holder serves so many streams at once, so one more read would find no stream."""
MAX_REQUEST_LEASES = 8
"""The same for one request, whose id a gateway has signed, where a reader's name may be invented. Each worker of an
attempt reads one piece at a time, so this is two workers through four attempts at once."""
MAX_LEASES_AWAITED = 256
"""Readers that wait for blocks that are being computed; whoever asks beyond that is told to ask again."""
READER_SHARE = 2
"""A reader that has a lease gets no further one with which it would have more than half of the blocks: the other half
can be given up for the holder's own requests. Blocks that several of its leases share count once. Who is refused asks
elsewhere or computes."""
LENT_READ_BASE_S = 30.0
"""A lent lease ends so long after its read had to begin, and its bytes at `READ_BYTES_PER_S_MIN`, however much moves:
the most patient reader, a store, gives its read up by itself before that."""
UNREAD_AFTER_MS = 1_000
"""A lease that nobody reads for so long, though all of it could be read, is counted as unread: a reader opens its
stream as soon as it has its ticket."""

# What lies in the blocks.

COOLING_SHARE = 8
"""Once fewer than 1/8 of the blocks are free, the least recently used of the cached ones are announced as the next to
be evicted."""
MAX_COOLING_BLOCKS = 256
"""So many blocks are named at a time as those that go next."""
INVENTORY_PAGE_BLOCKS = 100_000
"""Blocks in one page of an inventory: 2.2 MB of JSON, far below the bus limit."""

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

RETAIN_ANSWER_MS = 60_000
"""How long an ended attempt's answer is kept for a gateway that has missed some of it."""
MAX_PAST_ATTEMPTS = 4_096
"""Attempts that have ended, or were cancelled before they came: a late message must not begin them again."""

# Reading from other holders.

READ_BASE_S = 2.0
READ_BYTES_PER_S_MIN = 20e6
"""A read that takes longer than `READ_BASE_S` and its bytes at this rate is given up: computing would be quicker."""

COMING_AGAIN_S = 0.05
"""The pause before a holder that is still computing is asked again; it has waited itself before it said so."""
FLEET_ANSWER_S = 1.0
"""How long a reader waits for the scheduler's word of who there is, where it has not heard a holder join."""
FLEET_ASK_INTERVAL_MS = 200
"""The least time between two such questions: whoever names strangers must not have the scheduler asked all the time."""
MAX_PEERS = 10_000
"""Holders of which a reader remembers where they serve; those heard of last."""

# Copies: blocks that are kept on a second holder, so that they outlive their worker.

OFFER_INTERVAL_MS = 250
"""The least time between two offers of one sequence's new blocks to its replica, unless `OFFER_BLOCKS` are new."""
OFFER_BLOCKS = 8
MAX_OFFER_BLOCKS = 1_024
"""Blocks that one message offers at most."""
MAX_HEAT_BLOCKS = 65_536
"""A worker that leaves asks how hot so many blocks are, those that it has used last; the directory answers for no more
(1.4 MB of JSON)."""
READ_WITHIN_MS = 10_000
"""How long an offer of blocks stands: the source gives the blocks up when it needs the room."""
MAX_COPY_READS = 2
"""Copies are read beside the requests' own reads, and must not slow them."""
MAX_COPY_BLOCKS = 64
"""What a source has to keep for one read of a copy."""
MAX_COPIES_WAITING = 64
SPARE_SHARE = 4
"""Copies are read only while more than this part of all blocks is free: a quarter."""

LEAVING_SHARE = 2
"""Of what is free or kept for its content only a worker gives up to a half for the blocks of one that leaves."""

# What goes by the clock.

LOAD_MIN_GAP_S = 0.2
"""A change is told at once, unless another one was told less than this ago: at most five loads a second."""
ROUND_INTERVAL_S = 1.0
"""Between two rounds of asking the gateways which attempts they still want."""
SUSPICIOUS_INTERVAL_S = 0.5
"""The same, where a gateway may be dead."""
ANSWER_TIMEOUT_S = 1.0
"""How long a gateway's answer to that is waited for."""

# Stopping.

ENGINE_STOP_TIMEOUT_S = 10.0
"""How long the engine's running step is waited for."""
LEAVE_ANSWER_S = 1.0
"""How long the scheduler's word is waited for on whether anybody else could go on with what runs; and the directory's
on which blocks are hot."""
COPIERS_QUIET_S = 0.3
"""A worker that leaves is done with offering its blocks once nobody has asked for any for so long."""
PROMPTS_END_S = 0.5
"""How long a worker that leaves goes on with prompts that are nearly computed, before it hands them back."""
READERS_COME_MS = 1_000
"""How long a worker that gives an answer away waits for whoever goes on with it to come for what it has."""
READERS_STAY_S = 2.0
"""How long it then waits until they have read it; and again, whatever it lends meanwhile, before it stops serving."""
LAST_WORDS_S = 5.0
"""How long the last messages are waited for: the bus may be away for good."""

# The process.

SWITCH_INTERVAL_S = 0.0005
"""The engine's thread shares the interpreter with the event loop: at Python's 5 ms each hop of a hand-over could wait
that long."""
MAX_UNSENT = 10_000
"""Messages that wait to be sent while the bus is away; beyond it the oldest of what may be lost goes."""
MAX_UNSENT_BYTES = 64 * 1024 * 1024

# What it says of itself.

MAX_LISTED = 200
"""Requests, and leases, in one description of a worker: the oldest."""
MAX_LINKED_STEPS = 16
"""So many steps of a prompt, and of an answer, are recorded and linked: a long answer has thousands."""

# Asking gateways what they still want.

ASK_AFTER_MS = 1_000
"""How long an attempt goes on before its gateway is asked: most end earlier."""
MAX_ATTEMPTS_A_QUESTION = 256
"""Attempts that one question to a gateway names; more are asked about in several."""

# Measured rates.

STALE_RATE_MS = 60_000
"""A pair not read from for so long is measured anew: one bad moment must not keep it from ever being tried again."""
