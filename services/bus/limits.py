"""Times and limits of the bus: those of every connection, of the client library, and of a broker of our own."""

MAX_PAYLOAD_BYTES = 8 * 1024 * 1024
"""Of one message, headers included; a larger one is refused before it is sent. Our NATS configuration says the same."""

MAX_WAITING = 65_536
"""Messages that may wait for one subscription's reader; one more is dropped, counted and logged."""

MAX_ANSWERING = 4_096
"""Requests of one subject that may be answered at a time; one more is left to its asker's timeout."""

# The connection to NATS.

CONNECT_TIMEOUT_S = 5.0
"""Until a service that starts gives up; it has tried again and again by then."""

BUFFER_BYTES = 2 * MAX_PAYLOAD_BYTES
"""What may wait to be sent to a broker that is away; above it publishing is an error."""

WAITING_BYTES = 8 * MAX_PAYLOAD_BYTES
"""What may wait for one subscription's reader, in bytes."""

RECONNECT_WAIT_S = 0.2
"""At least, between two attempts to connect; up to twice as long, so that clients do not all come back at once."""

PING_INTERVAL_S = 5
"""A broker whose machine is gone closes no connection: after three pings without an answer it counts as away."""

ASK_AGAIN_S = 0.1
"""Between two such attempts."""

FLUSH_TIMEOUT_S = 10
"""For one of the two round trips of a flush: the library's own default."""

CLOSE_TIMEOUT_S = 5
"""For the library to send what it still has; what is left then is thrown away."""

DROP_LOG_INTERVAL_S = 5.0
"""Between two warnings about dropped messages: all are counted, few are logged."""

# The embedded broker.

START_TIMEOUT_S = 10.0
"""Until the nats-server answers; a tenth of a second as a rule."""

STOP_TIMEOUT_S = 10.0
"""Until a nats-server that was asked to end is killed."""

POLL_INTERVAL_S = 0.02
"""Between two looks whether it has written the file that names its port."""

VERSION_TIMEOUT_S = 10.0
"""For a nats-server on the PATH to say its version; one that hangs is not used."""
