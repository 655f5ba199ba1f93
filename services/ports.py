"""Ports that stay ours: outside the range from which the system gives ports to whoever connects somewhere.

A port of that range could be somebody's as soon as its owner is started again; and who knocks at it meanwhile may by
chance be given that very port, and be connected to himself.
"""

import random
import socket
from pathlib import Path

FIRST_PORT = 20_000
NUM_TRIES = 200
_RANGE_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_DEFAULT_FIRST_LENT = 32_768


def free_port() -> int:
    """Return a port of 127.0.0.1 that nobody has. It is not held: another may come between."""
    end = _first_lent_port()
    for port in random.sample(range(FIRST_PORT, end), min(NUM_TRIES, end - FIRST_PORT)) if end > FIRST_PORT else []:
        if is_free(port):
            return port
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def is_free(port: int) -> bool:
    """Say whether a server could listen on this port of 127.0.0.1."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: TIME_WAIT is free
        try:
            sock.bind(("127.0.0.1", port))
            sock.listen(1)  # bound by several at once, listened on by one
        except OSError:
            return False
    return True


def _first_lent_port() -> int:
    try:
        return int(_RANGE_FILE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return _DEFAULT_FIRST_LENT
