"""The servers of one broker: in which order a member tries them, and what each says of the others. Pure.

A cluster's server sends its clients the addresses of all servers that it has routes to. They are counted, and never
connected to: whoever answers could name anybody. At worst one that lies has us look at another one of our own list.
"""

from collections.abc import Mapping, Sequence, Set
from hashlib import blake2b
from ipaddress import ip_address
from typing import Any, NamedTuple

CLUSTER_SIZE = 3
"""Of fewer servers none is lonely: of two that do not see each other neither is the worse one."""


class ServerSeen(NamedTuple):
    """One of a broker's servers, as somebody who asks sees it."""

    url: str
    num_seen: int
    """How many addresses it names as those of its cluster; 0: none, or it does not answer."""
    members: frozenset[str]
    """Who is connected to it, of those that say so."""


def sharing_a_machine(addresses: Mapping[str, Set[str]]) -> list[list[str]]:
    """Return which servers are lost together, as they have an address in common. `addresses`: of each server."""
    by_address: dict[str, list[str]] = {}
    for server, found in addresses.items():
        # All of loopback is one machine, whatever its last byte.
        for address in {"loopback" if ip_address(each).is_loopback else each for each in found}:
            by_address.setdefault(address, []).append(server)
    return [servers for servers in by_address.values() if len(servers) > 1]


def in_order(servers: Sequence[str], name: str) -> list[str]:
    """Return the servers as this member tries them. Each begins with another one, always the same: so members are
    spread evenly, and a failover can be predicted."""
    first = int.from_bytes(blake2b(name.encode(), digest_size=8).digest()) % len(servers)
    return [*servers[first:], *servers[:first]]


def num_advertised(info: dict[str, Any]) -> int:
    """Return how many addresses a server's greeting names; 0: its cluster advertises none."""
    addresses = info.get("connect_urls")
    return len(addresses) if isinstance(addresses, list) else 0  # pyright: ignore[reportUnknownArgumentType]


class ClusterView:
    """What one member has been told of its broker's servers, of which it knows `num_servers`."""

    def __init__(self, num_servers: int) -> None:
        self._num_servers = num_servers
        self._most = 0
        """A server may have several addresses: the most that were named at once are those of all servers."""
        self.num_seen = 0
        """How many our server has named last."""
        self.num_reroutes = 0
        """How often it has named fewer than before: members of the others are on their way to those that are left."""
        self.num_returns = 0
        """How often it has named more than before: others may come back, each in its own time."""

    def connected(self, num_seen: int) -> None:
        """Another connection has begun, maybe to another server."""
        self.num_seen = num_seen
        self._most = max(self._most, num_seen)

    def told(self, num_seen: int) -> None:
        """The server that we are connected to names others than before."""
        self.num_reroutes += num_seen < self.num_seen
        self.num_returns += num_seen > self.num_seen
        self.connected(num_seen)

    @property
    def is_lonely(self) -> bool:
        """Our server sees half of the servers or fewer: most of the members may be on its other side."""
        is_told = self._num_servers >= CLUSTER_SIZE and self._most > 0
        return is_told and 2 * self.num_seen <= max(self._most, self._num_servers)

    @property
    def sees_all(self) -> bool:
        """Our server sees as many as there should be; or nobody can tell, or could do anything about it."""
        cannot_tell = self._num_servers < CLUSTER_SIZE or self._most == 0
        return cannot_tell or self.num_seen >= max(self._most, self._num_servers)

    @property
    def is_mute(self) -> bool:
        """There should be several servers, and ours advertises none: nobody can be told that it is lonely."""
        return self._num_servers >= CLUSTER_SIZE and self._most == 0
