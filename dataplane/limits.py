"""The plane's times and limits. Seconds, bytes, counts; `cards/limits.py` has those of graphics cards."""

# Connections.

MAX_IDLE_PER_HOLDER = 4
"""Unused connections that a reader keeps to one holder."""
MAX_IDLE = 64
"""Unused connections that a reader keeps in all."""
LINGER_S = 1.0
"""Who has sent its last message gives the peer so long to read it before it closes."""
BACKLOG = 64
"""Connections that wait to be accepted."""
ACCEPT_PAUSE_S = 0.05
"""A holder that is out of descriptors waits so long for streams to end before it accepts again."""
MAX_STREAMS = 64
"""Connections that a holder serves at once."""
MAX_BROKEN = 256
"""Such carriers and holders that a reader remembers."""
MAX_ATTACHED = 16
"""Holders' arenas that a reader keeps mapped."""
LOG_INTERVAL_S = 1.0
"""At most one line in this time about each peer that does not speak the protocol."""
MAX_LOGGED_PEERS = 256
"""Peers of which it is remembered when the last line was."""

# The stream: every size that is sent on a wire has a limit.

MAX_TICKET_CHARS = 2048
"""Characters of a ticket."""
MAX_CONTROL_BYTES = 8 << 10
"""Bytes of an Open, Refused or Fail."""
MAX_ACCEPTED_BYTES = 4 << 20
"""Of an Accepted, which may name many blocks."""
MAX_TRAILER_BYTES = 64 << 10
"""Of what a holder sends behind the KV."""
WAY_BYTES = 4 << 20
"""So much crosses to try a way."""
MAX_REASON_CHARS = 1000
"""Characters of the sentence in a Fail."""
MAX_FRAME_BYTES = 128 << 20
"""Payload of one Data frame."""
SHM_FRAME_BYTES = 16 << 20
"""Payload of a frame over shm: it costs no memory, and fewer frames cost fewer words."""
TCP_FRAME_BYTES = 4 << 20
"""Payload of a frame over tcp: what is believed grows by so much at a time."""
MAX_UNACKED_FRAMES = 8
"""How far a holder announces and digests ahead of the reader's copying."""
MAX_OUTSTANDING_FRAMES = 16
"""Frames that a reader takes before the first of them is committed. At least MAX_UNACKED_FRAMES."""
MAX_FRAMES_PER_ACK = 4
"""A reader that has finished with so many frames acknowledges them, even if the holder has sent more meanwhile."""
