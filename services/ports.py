"""Free ports outside the range from which the system takes ports for outgoing connections.

Another process may have a port of that range by the time its owner is started again; and a client that connects to it
meanwhile may be given that very port and be connected to itself.
"""

import errno
import random
import socket
from pathlib import Path

from dataplane.addresses import in_url, listen, own_address
from services.errors import UserError

FIRST_PORT = 20_000
NUM_TRIES = 200
_RANGE_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_DEFAULT_FIRST_LENT = 32_768


def free_port() -> int:
    """Return a free port of this machine's own address. It is not held: another process may take it."""
    end = _first_lent_port()
    for port in random.sample(range(FIRST_PORT, end), min(NUM_TRIES, end - FIRST_PORT)) if end > FIRST_PORT else []:
        if is_free(port):
            return port
    with listen(own_address(), 0) as sock:
        return int(sock.getsockname()[1])


def is_free(port: int, host: str = "") -> bool:
    """Return whether a server could listen on this port of an address; empty: of this machine's own."""
    try:
        listen(host or own_address(), port).close()
    except OSError:
        return False
    return True


def _first_lent_port() -> int:
    try:
        return int(_RANGE_FILE.read_text("utf-8").split()[0])
    except (OSError, ValueError, IndexError):
        return _DEFAULT_FIRST_LENT


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that listens on the address. Raises UserError, one line."""
    try:
        sock = listen(host, port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise UserError(f"port {port} is in use on {host}; pass --port") from error
        raise UserError(f"cannot listen on {in_url(host)}:{port}: {error.strerror}") from error
    sock.setblocking(False)
    return sock
