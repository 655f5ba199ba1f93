"""The servers of a simulated broker, and the routes between them: what passes, what waits, what is lost. Pure.

As nats-server has it: a route over which nothing comes is closed by both ends; messages that were on their way then
are lost, and a server that stands still says what it has been told once it goes on, however late.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

Act = Callable[[], None]


@dataclass(eq=False)
class SimServer:
    """One server. It can end, stand still, and be on another side of a cut than others."""

    name: str
    is_up: bool = True
    is_still: bool = False
    side: str = ""
    """Of the network: two that are on different sides reach each other no more, and neither is told."""
    unread: list[tuple[str, Act]] = field(default_factory=list[tuple[str, Act]])
    """What it has been sent since it stands still, in order, by subject."""
    routes: "dict[SimServer, Route]" = field(default_factory=dict["SimServer", "Route"])

    @property
    def is_well(self) -> bool:
        return self.is_up and not self.is_still

    @property
    def num_seen(self) -> int:
        """How many servers of its cluster it names, itself among them."""
        return 1 + sum(route.is_open for route in self.routes.values())

    def sees(self, other: "SimServer") -> bool:
        """Return whether it takes messages for that server's clients."""
        return other is self or (other in self.routes and self.routes[other].is_open)

    def accept(self, act: Act, subject: str = "") -> None:
        """Somebody has sent it something: do it now, or once it goes on. `subject`: of what taps see."""
        if self.is_still:
            self.unread.append((subject, act))
        else:
            act()

    def pass_on(self, other: "SimServer", act: Act) -> None:
        """Have that server do something, if messages go there."""
        if other is self:
            act()
        elif self.sees(other):
            route = self.routes[other]
            other.accept(act) if route.is_whole else route.waiting.append((other, act))


@dataclass(eq=False)
class Route:
    """Two servers tell each other what their clients say."""

    ends: tuple[SimServer, SimServer]
    is_open: bool = True
    """Both ends take it for open."""
    is_cut: bool = False
    waiting: list[tuple[SimServer, Act]] = field(default_factory=list[tuple[SimServer, Act]])
    """What is on its way over a cut that nobody has noticed."""

    @property
    def is_whole(self) -> bool:
        """Bytes go from one end to the other."""
        one, other = self.ends
        return not self.is_cut and one.side == other.side

    @property
    def should_be_open(self) -> bool:
        return self.is_whole and all(end.is_well for end in self.ends)

    def close(self) -> None:
        self.is_open = False
        self.waiting.clear()

    def arrive(self) -> None:
        """What has waited for the end of a cut arrives."""
        waiting, self.waiting = self.waiting, []
        for end, act in waiting:
            end.accept(act)


def make_servers(number: int) -> list[SimServer]:
    """Return the servers of one broker, each with a route to each other."""
    servers = [SimServer(f"nats-{index}") for index in range(number)]
    for index, one in enumerate(servers):
        for other in servers[index + 1 :]:
            one.routes[other] = other.routes[one] = Route((one, other))
    return servers
