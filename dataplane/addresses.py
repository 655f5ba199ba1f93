"""Addresses of IPv4 and IPv6: which of them are this machine's own, and how a server listens on one."""

import contextlib
import errno
import fcntl
import functools
import ipaddress
import os
import re
import socket
import struct
from collections.abc import Iterable, Sequence

BACKLOG = 2_048
MAX_PORT = 65_535
IPV4_LOOPBACK, IPV6_LOOPBACK = "127.0.0.1", "::1"
EVERYWHERE = ("", "0.0.0.0", "::")
_SIOCGIFADDR = 0x8915
_PORTS = re.compile(r"[0-9]{1,5}(-[0-9]{1,5})?")


def address_of(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the address that a text is; None: it is a name. One of IPv4 within IPv6 (::ffff:127.0.0.1), as a socket
    for both has it, is the former."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def is_loopback(host: str) -> bool:
    """Return whether a name or address is reached from this machine alone."""
    address = address_of(host)
    return host == "localhost" if address is None else address.is_loopback


@functools.cache
def own_address() -> str:
    """Return the address of this machine that no other reaches: IPv4's, but where there is no IPv4."""
    for host in (IPV4_LOOPBACK, IPV6_LOOPBACK):
        try:
            listen(host, 0).close()
        except OSError:
            continue
        return host
    return IPV4_LOOPBACK


def outer_address() -> str:
    """Return the address by which this machine reaches others, which may be how they reach it; empty: there is none."""
    for family, elsewhere in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.connect((elsewhere, 9))  # nothing is sent: the kernel chooses an address
            return str(sock.getsockname()[0])
    return next((address for address in interface_addresses() if not is_loopback(address)), "")


def interface_addresses() -> list[str]:
    """Return this machine's addresses of IPv4, one of each interface."""
    found: list[str] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has none
                request = struct.pack("256s", name.encode()[:15])
                found.append(socket.inet_ntoa(fcntl.ioctl(sock.fileno(), _SIOCGIFADDR, request)[20:24]))
    return found


def in_url(host: str) -> str:
    """Return a name or address as it stands before a port."""
    return f"[{host}]" if ":" in host else host


def ports_of(text: str) -> Sequence[int]:
    """Return the ports of a range, "7000-7015", or of one, "7000"; any free one, 0, of nothing. Raises ValueError."""
    first, _, last = text.partition("-")
    found = range(int(first), int(last or first) + 1) if _PORTS.fullmatch(text) else range(0)
    if text and not (found and found[0] > 0 and found[-1] <= MAX_PORT):
        raise ValueError(f"ports are like 7000-7015, from 1 to {MAX_PORT}, not {text!r}")
    return found or (0,)


def listen_on_any(host: str, ports: Iterable[int], backlog: int = BACKLOG) -> socket.socket:
    """Return a socket that listens on the first of these ports that is free. Raises OSError as `listen`."""
    taken = OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
    for port in ports:
        try:
            return listen(host, port, backlog)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            taken = error
    raise taken


def listen(host: str, port: int, backlog: int = BACKLOG) -> socket.socket:
    """Return a socket that listens there, `::` for IPv4 too. Raises OSError: also for an unknown name."""
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, _, _, _, address = found[0]
    # With the protocol's number: asyncio sets TCP_NODELAY on no other, and the second write of an answer would wait for
    # the client's delayed acknowledgement, 40 ms.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # TIME_WAIT is free
    if family == socket.AF_INET6:
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(host != "::"))
    return _listening(sock, address, backlog)


def listen_near(address: str, backlog: int) -> socket.socket:
    """Return a socket that listens on this address of the machine. Raises OSError."""
    return _listening(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), address, backlog)


def _listening(sock: socket.socket, address: str | tuple[object, ...], backlog: int) -> socket.socket:
    try:
        sock.bind(address)
        # Listening makes the port ours: without it another process could bind it too.
        sock.listen(backlog)
    except BaseException:
        sock.close()
        raise
    return sock
