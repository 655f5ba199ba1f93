"""Times and limits of the bus: those of every connection, of the client library, and of a broker of our own."""

from schemas.broker import MAX_PAYLOAD_BYTES

MIN_PAYLOAD_BYTES = 32 * 1024
"""A broker that takes less is not used. Into so much fits what is sent of its own accord; what is longer than what the
broker takes comes in several messages, or is refused to whoever asked for it."""

MAX_WAITING = 65_536
"""So many messages may wait for one subscription's reader; one more is dropped, counted and logged."""

MAX_ANSWERING = 4_096
"""So many requests of one subject may be answered at a time; one more is left to its requester's timeout."""

# The connection to NATS.

CONNECT_TIMEOUT_S = 2.0
"""A command gives up after this long; it has tried again and again by then. A service has `nats.connect_timeout_s`."""

BUFFER_BYTES = 2 * MAX_PAYLOAD_BYTES
"""So much may wait to be sent to a broker that is away; above it publishing is an error."""

WAITING_BYTES = 8 * MAX_PAYLOAD_BYTES
"""So many bytes may wait for one subscription's reader."""

GREETING_BYTES = 64 * 1024
"""A server's greeting is no longer."""

LOOKS_SHARE = 30
"""Where a server is gone for good, members look at most so many times more rarely whether another one sees more."""

RENEW_AGAIN_S = 3600
"""So long after there was no next key it is looked for again."""

SURVEY_QUIET_S, SURVEY_AT_MOST_S = 0.25, 2.0
"""A survey ends once nobody has answered for so long, and after so long in any case."""

CANCEL_AGAIN_S = 0.01
"""What swallowed its cancellation is cancelled again after this long."""

MAX_SAID = 200
"""So many characters of a broker's own words are shown."""

# The embedded broker.

START_TIMEOUT_S = 10.0
"""The nats-server must answer within this time; it takes a tenth of a second as a rule."""

STOP_TIMEOUT_S = 10.0
"""A nats-server that was asked to end is killed after this long."""

POLL_INTERVAL_S = 0.02
"""So often we look whether the nats-server has written the file that names its port."""

VERSION_TIMEOUT_S = 10.0
"""A nats-server on the PATH has this long to print its version; one that hangs is not used."""
