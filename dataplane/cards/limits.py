"""Times and limits of KV on cards. Seconds, bytes, counts."""

# A card and what waits for it.

DRAIN_S = 30.0
"""A card that has not done by then what was put on a side stream is taken for broken."""
TABLE_WAIT_S = 30.0
"""A kernel's table comes back by then, or the card is taken for broken."""
TABLE_PAUSE_S = 50e-6
"""Who waits for a table looks so often."""
FIRST_PAUSE_S = 20e-6
"""Who waits for an event looks again after this time, then after half as long again, …"""
LAST_PAUSE_S = 1e-3
"""… up to this."""
MARK_POLL_S = 0.0002
"""Who waits for another process's mark asks so often."""
MARK_LOOK_S = 0.01
"""Who waits for a mark looks so often whether the holder is still there."""
PEER_LOOK_S = 0.05
"""Who waits for its own card, or for a slot of the staging ring, looks so often whether the peer is still there."""
PEER_DEATH_S = 0.5
"""A holder's death voids its names so long before its connection is closed."""
PEER_PAUSE_S = 0.01
"""Who waits for a peer to go looks so often."""
MAX_OPENED = 64
"""Holders whose memory a reader has open at once."""
MAX_TABLES = 64
"""Tables of one size, at a time. Each is a launched kernel's, and every kernel ends."""

CUDA_FRAME_BYTES = 128 << 20
"""Payload of a frame between cards: nothing is staged, and a card copies this in some tens of microseconds, which is
less than the words about it take."""

# Staging.

STAGED_FRAME_BYTES = 4 << 20
"""Payload of a staged frame: enough for the host link's full speed, and little enough for many streams to share a
ring."""
MAX_BEGUN = 3
"""Frames on their way out: one is being sent, one is on its way to the host, one is being packed."""
MAX_PASSING = 4
"""Frames on their way in."""

# Pairs.

INIT_TIMEOUT_S = 20.0
"""A communicator is made by then, or the pair is broken."""
SLOT_TIMEOUT_S = 10.0
"""The oldest slot under way has crossed by then, or the pair is broken."""
WATCH_S = 1.0
"""How long a limit of time may be overrun before somebody notices."""
JOIN_S = 5.0
"""How long a read waits for its pair to be made, before another carrier is tried."""
PAIR_OPEN_S = 5.0
"""How long a reader waits for a holder to say yes to a pair."""
TELL_S = 5.0
"""How long a holder tries to tell of a slot."""
OUT_S = 0.5
"""So long an abort waits for the thread that uses the communicator to come out of it: beside each other they crash."""
CLOSE_S = 10.0
"""How long the end of a pair waits for the library."""
CROSSED_POLL_S = 0.0005
"""The library's thread looks so often whether a slot has crossed."""
PAIR_PEER_POLL_S = 0.02
"""Who waits for a pair looks so often whether the read is over."""
PAIR_IDLE_S = 300.0
"""A pair that nobody has read over for so long is ended."""
ID_RETRY_S = 30.0
"""After the library could make no id, none is asked for in this time."""
MAX_PAIRS = 16
"""At each end. Their buffers are 32 MiB of the card's memory each."""
MAX_ORDERED = 64
"""Slots that a holder may have told and a reader has no buffer for. Ours has fewer on their way."""
MAX_ABANDONED = 4
"""Library threads that do not come back: with so many of them this process makes no more communicators."""
