"""Times and bounds of a simulation, in virtual seconds unless the name says otherwise.

Those of the simulated machine come first, then those that a simulation is judged by.
"""

REQUEST_TIMEOUT_S = 20.0
"""The gateways' `request_timeout_s`: every request's deadline."""
RESTART_S = 0.5
"""From a process' failed start to its next, and from the end of an engine that hangs to its next."""
STEP_TIMEOUT_S = 1.0
"""The workers' `engine.step_timeout_s`."""
EXECUTOR_S = (0.0002, 0.003)
"""Work that is given to another thread takes between these."""
RECONNECT_S = (0.02, 0.4)
"""A client of the broker finds out between these that it is back."""
NEXT_SERVER_S = (0.008, 0.08)
"""A client whose server of several has ended is connected to the next between these, where that answers."""
SERVER_SILENT_S = (0.4, 0.65)
"""A client, or a server, gives up a connection over which nothing comes: two pings, 0.2 s apart."""
ROUTE_SILENT_S = (0.4, 0.6)
"""The same between two servers: two pings, 0.2 s apart."""
ROUTE_OPENS_S = (0.05, 1.0)
"""Servers that reach each other again find out between these."""
TOLD_S = (0.001, 0.05)
"""A client hears between these that its server sees more or fewer others..."""
MOVES_S = (0.003, 0.03)
"""A client that goes to another server by itself is there between these."""
BEFORE_LOOK_S = (0.001, 0.05)
"""... and has looked for a better one between these."""
MESSAGE_GAP_S = 1e-7
"""At least so long between two messages from one client to another: they stay in order."""
MAX_BUFFERED_BYTES = 2 * 1024 * 1024
"""What a client keeps of what it publishes while the broker is away: `pending_size` of the NATS client."""
CONNECTION_LINGER_S = 1.0
"""After its last byte an end of a connection reads on for so long, until the other end has closed."""
SLOW_READ_S = 0.05
"""What a slow client takes for each piece of an answer."""
LONG_S = 40.0
"""Some faults last so long that those who wait give up: such ends must be right too."""
CHARGED_AT_LEAST_S = 20e-6
"""Real CPU time that passes in virtual time too does so in pieces that are not shorter."""
MAX_STEP_S = 4_000.0
"""A clock is set by so much at most, either way; its share says by how much."""
MAX_DRIFT = 0.01
"""A clock goes so much too quickly or too slowly at most."""
MAX_CALLBACKS_AT_ONCE = 2_000_000
"""More callbacks without a tick of the clock are a loop that never ends."""

READY_WITHIN_S = 30.0
"""From the start of all services to a mesh that serves."""
REST_WITHIN_S = 12.0
"""After the last request's end: leases of lost readers run out, the last of the dead are noticed."""
RETURNED_WITHIN_S = 1.0
"""The same where no message was lost: every lease is then ended by a message, and none by its time."""
USED_AGAIN_S = 2.0
"""After a server of the broker is back, or its cut is mended, every worker is used again within so long."""
CHECK_INTERVAL_S = 0.25
"""Between two looks at what must hold at any time."""
LONG_AWAY_S = REQUEST_TIMEOUT_S / 2
"""A fault that lasts longer may cost a request its deadline; a shorter one may not."""
END_GRACE_S = 1.0
"""How long after its deadline an answer may take to end."""
OVERDUE_MS = 1_000
"""How long after its expiry a lease may be found open: the sweep goes by a clock of its own."""
GOES_ON_WITHIN_S = 0.2
"""From a worker's word that it migrates an answer to the attempt that goes on, where nothing is lost or held up."""
LEAVES_WITHIN_S = 1.0
"""What a worker may take to leave beside its own waits and the time of its bytes."""
