"""How long the makers of pages wait for the mesh that they show, in seconds."""

TIMEOUT_S = 120.0
"""A request to the gateway, or a question over the bus."""
SETTLE_S = 1.0
"""After a request's end: leases are released, spans are written."""
WATCH_S = 8.0
"""`kvmesh top` listens for so long before its picture is taken."""
