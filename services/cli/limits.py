"""How long the commands wait, and how much they keep of what they receive. Times are in seconds."""

ASK_TIMEOUT_S = 2.0
"""A question of `kvmesh top` or `kvmesh tail` over the bus."""

RATE_WINDOW_S = 10.0
"""`kvmesh top`: rates are averages over so long."""
SILENT_AFTER_S = 3.0
"""A worker publishes its load at least every 0.6 s: one that has not for so long is shown as silent."""
FORGET_AFTER_S = 30.0
"""And after so long it is not shown any more."""
OPEN_REQUEST_MAX_S = 3_600.0
"""A request whose end was not seen is dropped from the count at its deadline, or after this."""
MAX_TTFTS = 256
"""The percentiles of the time to first token are those of so many requests."""
FRAME_INTERVAL_S = 0.5
"""Between two drawings."""
ASK_INTERVAL_S = 2.0
"""Between two questions to the scheduler."""
ONE_FRAME_AFTER_S = 1.5
"""`--once` listens for so long: every worker has published its load by then."""

TAIL_LINGER_S = 0.5
"""`kvmesh tail` goes on for so long after a request's end: leases are released then."""

MAX_SHOWN_CHARACTERS = 2_000
"""`kvmesh sub` shows so much of a message, and how long it is."""

TRACE_SETTLE_S = 2.0
"""Services export every half second: of a trace whose last span is older than this, all spans are there."""
TRACE_POLL_INTERVAL_S = 0.1
"""Between two looks at the span files, until then."""
MAX_FAULTY_WORKERS = 64
"""The largest mesh of `kvmesh simulate` with faults: each request is checked token for token."""
MAX_PROBLEMS_SHOWN = 5
"""Of a simulation, and of those that failed; the number of the others is given."""

PURGE_TIMEOUT_S = 600.0
"""A holder answers within so long what it has forgotten. A store deletes its files first, one for each block: 29,490
took 26 s on a machine of two busy cores. The broker reports at once that a holder has gone."""
DRAIN_ANSWER_S = 5.0
"""How long a worker's word is waited for on whether it leaves: it asks the scheduler itself."""
LEAVE_POLL_S = 0.1
"""Between two looks at whether it has left, or come back."""
LEAVES_WITHIN_S = 300.0
"""`kvmesh drain` waits for so long: longer than any sensible `--drain-s`."""
COMES_BACK_S = 300.0
"""`kvmesh restart` waits for so long for each worker: loading a large model takes most of it."""
