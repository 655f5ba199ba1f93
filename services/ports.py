"""Free ports outside the range from which the system takes ports for outgoing connections.

Another process may have a port of that range by the time its owner is started again; and a client that connects to it
meanwhile may be given that very port and be connected to itself.
"""

import errno
import ipaddress
import random
import socket
from pathlib import Path

from services.errors import UserError

FIRST_PORT = 20_000
NUM_TRIES = 200
_RANGE_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_DEFAULT_FIRST_LENT = 32_768
BACKLOG = 2_048


def is_loopback(host: str) -> bool:
    """Say whether a name or address is reached from this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def free_port() -> int:
    """Return a free port of 127.0.0.1. It is not held: another process may take it."""
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


def bind(host: str, port: int) -> socket.socket:
    """Return a socket bound to the address, not yet listening. Raises UserError, one line."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol's number: asyncio sets TCP_NODELAY on no other, and the second write of an answer would wait for
    # the client's delayed acknowledgement, 40 ms.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        # Listening makes the port ours: without it another process could bind it too.
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise UserError(f"port {port} is in use on {host}; pass --port") from error
        raise UserError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    sock.setblocking(False)
    return sock
