"""A message bus inside one process that loses, delays, doubles and reorders as it is set. Passes NATS' contract suite.

Without faults it keeps NATS' promises: at most once, in order for each connection, an answer at once where nobody
serves a subject. While the broker is away clients keep what they publish, within a bound, and reconnect. It may have
several servers: then clients do as `NatsBus` does where one ends, stands still, or is cut off.
"""

import asyncio
import contextvars
import itertools
import random
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass, field

from schemas.broker import DISCONNECTED, disconnected
from schemas.permissions import Permissions
from services.bus import limits
from services.bus.base import (
    LOST,
    NOTHING,
    BusClosedError,
    BusError,
    Delivery,
    NoRespondersError,
    RequestTimedOutError,
    check_size,
)
from services.bus.memory import matches
from services.bus.servers import ClusterView, in_order
from services.sim.limits import (
    BEFORE_LOOK_S,
    MAX_BUFFERED_BYTES,
    MESSAGE_GAP_S,
    MOVES_S,
    NEXT_SERVER_S,
    RECONNECT_S,
    ROUTE_OPENS_S,
    ROUTE_SILENT_S,
    SERVER_SILENT_S,
    TOLD_S,
)
from services.sim.platform.loop import lag_s
from services.sim.platform.meter import CpuMeter
from services.sim.platform.servers import Route, SimServer, make_servers
from services.times import BusTimes

Context = contextvars.Context
Tap = Callable[[str, str], None]
"""(subject, name of the sender): called for every message that reaches the broker."""
Reader = Callable[[str, bytes], None]
"""(subject, payload): the same, and for every reply, under the subject of its question."""


@dataclass
class BusConditions:
    """How messages travel. Probabilities are for each message and receiver, times in seconds."""

    delay_s: tuple[float, float] = (0.0001, 0.001)
    loss: float = 0.0
    duplication: float = 0.0
    reordering: float = 0.0
    reordering_s: float = 0.05
    """How much later a message arrives that others overtake."""
    held_until_s: dict[str, float] = field(default_factory=dict[str, float])
    """By client: it is cut off until then. What it sends and what is sent to it waits."""


@dataclass(slots=True)
class _Message:
    source: "SimBus"
    subject: str
    payload: bytes
    headers: Mapping[str, str]
    reply_id: int = 0


@dataclass(slots=True)
class SimDelivery:
    subject: str
    payload: bytes
    headers: Mapping[str, str]
    bus: "SimBus | None" = None
    """The client that answers."""
    requester: "SimBus | None" = None
    reply_id: int = 0
    reply_to: str = ""

    @property
    def expects_reply(self) -> bool:
        return self.reply_id > 0

    async def respond(self, payload: bytes, headers: Mapping[str, str]) -> None:
        if self.bus is None or self.requester is None or not self.reply_id:
            return
        self.bus.check_message(self.subject, payload, headers)
        reply = SimDelivery(self.subject, payload, dict(headers))
        bus, requester, reply_id = self.bus, self.requester, self.reply_id

        def pass_on(server: SimServer) -> None:
            bus.broker.show(reply.subject, payload)
            bus.broker.carry(bus, requester, lambda: requester.answered(reply_id, reply), server)

        bus.to_server(pass_on)

    def count_failure(self, reason: str) -> None:
        """A simulation counts no failures of endpoints."""


class SimSubscription:
    def __init__(self, bus: "SimBus", pattern: str, queue: str) -> None:
        self.bus = bus
        self.pattern = tuple(pattern.split("."))
        self.queue = queue
        wildcards = [at for at, token in enumerate(self.pattern) if token in ("*", ">")]
        self.beginning = self.pattern[: wildcards[0]] if wildcards else self.pattern
        """Its tokens before the first wildcard."""
        self.is_closed = False
        self._inbox: asyncio.Queue[SimDelivery | None] = asyncio.Queue()

    def deliver(self, delivery: SimDelivery) -> None:
        if not self.is_closed:
            self._inbox.put_nowait(delivery)

    async def __aiter__(self) -> AsyncIterator[Delivery]:
        while (delivery := await self._inbox.get()) is not None:
            yield delivery
        self._inbox.put_nowait(None)  # for another iteration

    async def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self.bus.broker.detach(self)
            self._inbox.put_nowait(None)


class SimBroker:
    """The broker that the buses of one simulation share. It, or one of its servers, can go down and come back, stand
    still and go on, and be cut off from the others."""

    def __init__(
        self,
        rng: random.Random,
        conditions: BusConditions | None = None,
        meter: CpuMeter | None = None,
        *,
        num_servers: int = 1,
    ) -> None:
        self._meter = meter
        self.conditions = conditions or BusConditions()
        self.rng = rng
        self.servers = make_servers(num_servers)
        self.stranger = SimServer("stranger")
        """A server that is named by those of a cluster and is none of ours: who goes there is lost."""
        self.sides: dict[str, str] = {}
        """By client: on which side of a cut of the network it is, as `SimServer.side`."""
        self.max_bytes = limits.MAX_PAYLOAD_BYTES
        self.taps: list[Tap] = []
        self.readers: list[Reader] = []
        self.observes_lost: list[Callable[[str], None]] = []
        """Called with the subject of each message that no tap has seen, as the broker died before it had read it, or
        that taps see late, as another server has passed on what was said after it."""
        self.num_messages = 0
        self.denied: set[str] = set()
        """What clients wanted to publish or receive that their permissions do not cover."""
        self.deserted: list[str] = []
        """Which clients have left a server that served them, for none that did."""
        self._context = contextvars.copy_context()
        """Deliveries run in this context, not in their sender's: a message on its way arrives even where its sender has
        died."""
        # It selects the members of queue groups in rotation.
        self._turn = itertools.count()
        self._buses: list[SimBus] = []
        # The broker as the sender of its own notices. It is not in `_buses`: no fault disconnects it.
        self._itself = SimBus(self, "the broker", None)
        # An index of the subscriptions: a subject is compared only with the patterns that begin as it does.
        self._by_beginning: dict[tuple[str, ...], dict[tuple[str, ...], dict[SimSubscription, int]]] = {}
        """Each pattern's subscriptions, and which one each is in order, by the tokens before the first wildcard."""
        self._num_added = 0
        self._listening: dict[str, list[SimSubscription]] = {}
        """The subscriptions that match a subject. Cleared when a subscription is added or removed."""

    def connect(self, name: str, permissions: Permissions | None = None) -> "SimBus":
        """Return a new client's connection. `permissions`: what it may publish and receive; None: everything."""
        bus = SimBus(self, name, permissions)
        self._buses.append(bus)
        return bus

    @property
    def has_all(self) -> bool:
        """Every client is connected, and what it kept has been sent."""
        return all(bus.is_connected for bus in self._buses)

    @property
    def is_up(self) -> bool:
        return any(server.is_up for server in self.servers)

    @property
    def routes(self) -> list[Route]:
        return list({id(route): route for server in self.servers for route in server.routes.values()}.values())

    def go_down(self) -> None:
        """The broker dies: messages on their way are lost, every client is disconnected."""
        for server in self.servers:
            self.kill_server(server)

    def come_up(self) -> None:
        """The broker is back. Its clients reconnect one after another."""
        for server in self.servers:
            server.is_up = True
        self._routes_changed()
        for bus in self._buses:
            self.call_later(self.rng.uniform(*RECONNECT_S), bus.connected)

    def stand_still(self) -> None:
        """The broker's process is stopped: what clients send waits, and nothing is lost. What it has sent arrives."""
        for server in self.servers:
            self.stop_server(server)

    def go_on(self) -> None:
        """It goes on: all that waited is passed on at once."""
        for server in self.servers:
            self.resume_server(server)

    def problems(self) -> list[str]:
        """Return which clients have gone where nobody has sent them, or away from where they were served."""
        strayed = [
            f"{bus.name} is connected to {bus.server.name}" for bus in self._buses if bus.server is self.stranger
        ]
        return strayed + self.deserted

    # One server of several.

    def kill_server(self, server: SimServer) -> None:
        """A server dies: what it had not read is lost. The others know at once, and nobody says who was connected."""
        server.is_up = server.is_still = False
        unread, server.unread = server.unread, []
        self.report_lost(subject for subject, _ in unread)
        for other, route in server.routes.items():
            if route.is_open:
                route.close()
                self._tell(other)
        for bus in self._buses:
            if bus.server is server:
                self._lose(bus)

    def start_server(self, server: SimServer) -> None:
        """A server that has died is there again."""
        server.is_up = True
        self._routes_changed()
        self._reconnect_all()

    def stop_server(self, server: SimServer) -> None:
        """A server's process is stopped. Its clients, and the other servers, find out by its silence."""
        server.is_still = server.is_up
        self._routes_changed()
        self._fall_silent(server)

    def resume_server(self, server: SimServer) -> None:
        server.is_still = False
        unread, server.unread = server.unread, []
        if len(self.servers) > 1:  # its clients have said more elsewhere meanwhile
            self.report_lost(subject for subject, _ in unread)
        for _, act in unread:
            act()
        self._tell(server)  # what it finds closed
        self._routes_changed()
        self._reconnect_all()

    def split(self, server: SimServer, *, silently: bool) -> None:
        """Cut the routes of one server, and no client's connection. `silently`: no end of a route is told."""
        for other, route in server.routes.items():
            route.is_cut = True
            if route.is_open and not silently:
                route.close()
                self._tell(other)
        self._tell(server)
        self._routes_changed()

    def mend(self, server: SimServer) -> None:
        """End what `split` has begun."""
        for route in server.routes.values():
            route.is_cut = False
        self._routes_changed()

    def unplug(self, server: SimServer, names: list[str]) -> None:
        """Cut a machine off from all others: its server, and the clients of these names. Nobody is told."""
        server.side = server.name
        self.sides |= dict.fromkeys(names, server.name)
        self._routes_changed()
        for each in self.servers:
            self._fall_silent(each)

    def plug(self, server: SimServer) -> None:
        """End what `unplug` has begun. What nobody has given up meanwhile arrives."""
        self.sides = {name: side for name, side in self.sides.items() if side != server.name}
        server.side = ""
        for bus in self._buses:
            bus.flush_held()
        self._routes_changed()
        self._reconnect_all()

    def heal_servers(self) -> None:
        """All servers are there, see each other, and are reached by everybody."""
        for server in self.servers:
            self.plug(server)
            self.mend(server)
            if not server.is_up and len(self.servers) > 1:
                self.start_server(server)

    def _routes_changed(self) -> None:
        """Each end of a route finds out by itself, in its own time, whether it is there."""
        for route in self.routes:
            if route.is_whole and route.waiting:
                route.arrive()
            if route.is_open != route.should_be_open:
                times_s = ROUTE_SILENT_S if route.is_open else ROUTE_OPENS_S
                self.call_later(self.rng.uniform(*times_s), lambda route=route: self._settle(route))

    def _settle(self, route: Route) -> None:
        if route.is_open == route.should_be_open:
            return  # it was a moment only
        if route.is_open:
            route.close()
        else:
            route.is_open = True
        for end in route.ends:
            self._tell(end)

    def _tell(self, server: SimServer) -> None:
        """A server tells its clients how many of its cluster it sees."""
        for bus in self._buses:
            if bus.server is server and bus.is_connected and server.is_well:
                self._if_still(bus, self.rng.uniform(*TOLD_S), lambda bus=bus: self._told(bus))

    def _told(self, bus: "SimBus") -> None:
        if bus.reaches(bus.server):
            bus.view.told(bus.server.num_seen)
            self.found_fewer(bus)

    def found_fewer(self, bus: "SimBus") -> None:
        """See `NatsBus`: a client whose server does not see all leaves it once another one has answered that sees
        more; where it sees more than half, at the second look."""
        bus.num_news += 1
        if not bus.view.sees_all:
            self._look_around(bus, bus.num_news, 0.0, BusTimes().server_ping_interval_s)

    def _look_around(
        self, bus: "SimBus", news: int, after_s: float, pause_s: float, *, saw_better: bool = False
    ) -> None:
        def look() -> None:
            if bus.num_news != news or not bus.is_connected:
                return
            better = [s for s in bus.order if s.is_well and bus.reaches(s) and s.num_seen > bus.view.num_seen]
            if better and (saw_better or bus.view.is_lonely):
                left = bus.server
                bus.disconnected(max(better, key=lambda server: server.num_seen))
                self.call_later(self.rng.uniform(*MOVES_S), bus.connected)
                self._publish_end(bus, left)
                return
            least_s = BusTimes().look_around_s
            after_s = pause_s if better else max(pause_s, least_s)
            longest_s = limits.LOOKS_SHARE * least_s
            self._look_around(bus, news, after_s, min(max(2 * after_s, least_s), longest_s), saw_better=bool(better))

        self.call_later(after_s + self.rng.uniform(*BEFORE_LOOK_S), look)

    def _fall_silent(self, server: SimServer) -> None:
        """Clients that hear nothing of their server go to another one, where there are several."""
        for bus in self._buses if len(self.servers) > 1 else ():
            if bus.server is server and not (server.is_well and bus.reaches(server)):
                self._if_still(bus, self.rng.uniform(*SERVER_SILENT_S), lambda bus=bus: self._leave_silent(bus))

    def _leave_silent(self, bus: "SimBus") -> None:
        left = bus.server
        if left.is_well and bus.reaches(left):
            return
        self._lose(bus)
        self._publish_end(bus, left)

    def _lose(self, bus: "SimBus") -> None:
        """A client's connection has ended. With several servers it goes to the next one at once."""
        bus.disconnected()
        if len(self.servers) > 1:
            self.call_later(self.rng.uniform(*NEXT_SERVER_S), bus.connected)

    def _reconnect_all(self) -> None:
        """Clients that found no server look again, where there are several."""
        for bus in self._buses if len(self.servers) > 1 else ():
            if not bus.is_connected:
                self.call_later(self.rng.uniform(*RECONNECT_S), bus.connected)

    def _if_still(self, bus: "SimBus", after_s: float, call: Callable[[], None]) -> None:
        """Call it later, unless that client has another connection by then, or none."""
        connection = bus.num_connects

        def look() -> None:
            if bus.is_connected and bus.num_connects == connection:
                call()

        self.call_later(after_s, look)

    def cut(self, name: str) -> None:
        """The connection of a client is reset, and none is taken of it, until `restore`. It is published."""
        for bus in [bus for bus in self._buses if bus.name == name]:
            bus.is_cut = True
            bus.disconnected()
            self._publish_end(bus, bus.server)

    def restore(self, name: str) -> None:
        """Take connections of a client again."""
        for bus in [bus for bus in self._buses if bus.name == name]:
            bus.is_cut = False
            self.call_later(self.rng.uniform(*RECONNECT_S), bus.connected)

    def restore_all(self) -> None:
        """Take connections of everybody again."""
        for name in [bus.name for bus in self._buses if bus.is_cut]:
            self.restore(name)

    def accept(self, server: SimServer, pass_on: Callable[[SimServer], None], subject: str = "") -> None:
        """A client has sent something to a server: pass it on, now or once that goes on. `subject`: of what taps
        see."""
        if self._meter is None or server.is_still:
            server.accept(lambda: pass_on(server), subject)
        else:  # a broker of its own would do this, and not who sends
            before = self._meter.switch(self._meter.rest)
            pass_on(server)
            self._meter.switch(before)

    def report_lost(self, subjects: Iterable[str]) -> None:
        """What clients have sent under these subjects is lost or late; those of which no tap needs to know are
        empty."""
        for subject in subjects:
            for observe in self.observes_lost:
                observe(subject)

    def show(self, subject: str, payload: bytes) -> None:
        """Let those read a message, or a reply, who are to see all that is sent."""
        for reader in self.readers:
            reader(subject, payload)

    def drop(self, bus: "SimBus") -> None:
        """A client has disconnected for good: remove its subscriptions, and publish it as NATS does."""
        bus.is_connected, bus.is_closed = False, True
        if bus in self._buses:
            self._buses.remove(bus)
            self._publish_end(bus, bus.server)
        for subscription in bus.subscriptions:
            self.detach(subscription)

    def _publish_end(self, bus: "SimBus", server: SimServer) -> None:
        """A server says that a client is gone. Where that is on another side of a cut it finds out as late as the
        client did."""
        message = _Message(self._itself, DISCONNECTED, disconnected(bus.name), {})

        def say() -> None:
            if server.is_up:
                self.accept(server, lambda server: self.route(message, server))

        if bus.reaches(server):
            say()
        else:
            self.call_later(self.rng.uniform(*SERVER_SILENT_S), say)

    def attach(self, subscription: SimSubscription) -> None:
        self._num_added += 1
        patterns = self._by_beginning.setdefault(subscription.beginning, {})
        patterns.setdefault(subscription.pattern, {})[subscription] = self._num_added
        self._listening.clear()

    def detach(self, subscription: SimSubscription) -> None:
        patterns = self._by_beginning.get(subscription.beginning, {})
        if patterns.get(subscription.pattern, {}).pop(subscription, None) is not None:
            self._listening.clear()

    def route(self, message: _Message, server: SimServer) -> None:
        """Deliver a message, which a server has been sent, to every subscription that it knows of and to one member of
        each queue group. A request that nobody serves is answered with NoRespondersError."""
        if message.source is not self._itself:
            self.num_messages += 1
            for tap in self.taps:
                tap(message.subject, message.source.name)
            self.show(message.subject, message.payload)
        groups: dict[str, list[SimSubscription]] = {}
        num_delivered = 0
        for subscription in self._listeners(message.subject):
            if not (subscription.bus.is_connected and server.sees(subscription.bus.server)):
                continue
            num_delivered += 1
            if subscription.queue:
                groups.setdefault(subscription.queue, []).append(subscription)
            else:
                self._deliver(message, subscription, server)
        for members in groups.values():
            self._deliver(message, members[next(self._turn) % len(members)], server)
        if not num_delivered and message.reply_id:
            source, reply_id, subject = message.source, message.reply_id, message.subject
            self.carry(source, source, lambda: source.unanswered(reply_id, NoRespondersError(subject)), server)

    def carry(self, source: "SimBus", target: "SimBus", arrive: Callable[[], None], server: SimServer) -> None:
        """Carry something from one client, whose server this was, to another."""
        connection = target.num_connects

        def carry_on() -> None:  # what is on its way to where a client was is lost
            if target.num_connects == connection:
                self._carry(source, target, arrive)

        server.pass_on(target.server, carry_on)

    def _carry(self, source: "SimBus", target: "SimBus", arrive: Callable[[], None]) -> None:
        """Carry it: delayed, twice or never, as `conditions` say."""
        if not (source.is_connected and target.is_connected):
            return
        conditions, rng = self.conditions, self.rng
        if conditions.loss and rng.random() < conditions.loss:
            return
        now = asyncio.get_running_loop().time() + lag_s()
        at = now + rng.uniform(*conditions.delay_s)
        if held := conditions.held_until_s:
            at = max(at, held.get(source.name, 0.0), held.get(target.name, 0.0))
        if conditions.reordering and rng.random() < conditions.reordering:
            at += rng.uniform(0.0, conditions.reordering_s)
        else:
            at = target.last_arrival_s[source] = max(at, target.last_arrival_s.get(source, 0.0) + MESSAGE_GAP_S)
        self._arrive(at, target, arrive)
        if conditions.duplication and rng.random() < conditions.duplication:
            self._arrive(at + rng.uniform(0.0, conditions.reordering_s), target, arrive)

    def echo(self, bus: "SimBus", arrive: Callable[[], None]) -> None:
        """Send something back to its sender. A connection loses nothing, so it is late at most."""
        at_s = asyncio.get_running_loop().time() + 2 * self.conditions.delay_s[1]
        self._arrive(max(at_s, self.conditions.held_until_s.get(bus.name, 0.0)), bus, arrive)

    def _deliver(self, message: _Message, subscription: SimSubscription, server: SimServer) -> None:
        delivery = SimDelivery(
            message.subject, message.payload, message.headers, subscription.bus, message.source, message.reply_id
        )
        self.carry(message.source, subscription.bus, lambda: subscription.deliver(delivery), server)

    def _arrive(self, at_s: float, target: "SimBus", arrive: Callable[[], None]) -> None:
        connection = target.num_connects

        def land() -> None:  # what was on its way to a connection that has ended is lost
            if target.is_connected and target.num_connects == connection:
                if target.reaches(target.server):
                    arrive()
                else:
                    target.held.append(("", arrive))

        asyncio.get_running_loop().call_at(at_s, land, context=self._context)

    def call_later(self, delay_s: float, call: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_later(delay_s, call, context=self._context)

    def _listeners(self, subject: str) -> list[SimSubscription]:
        found = self._listening.get(subject)
        if found is None:
            tokens = tuple(subject.split("."))
            subscribed: dict[SimSubscription, int] = {}
            for length in range(len(tokens) + 1):
                for pattern, subscriptions in self._by_beginning.get(tokens[:length], {}).items():
                    if matches(pattern, tokens):
                        subscribed |= subscriptions
            found = self._listening[subject] = sorted(subscribed, key=subscribed.__getitem__)
        return found


class SimBus:
    """One client's connection. See `services.bus.base.Bus`."""

    def __init__(self, broker: SimBroker, name: str, permissions: Permissions | None) -> None:
        self.broker = broker
        self.name = name
        self._may = None if permissions is None else {
            "publish": [tuple(pattern.split(".")) for pattern in permissions.publish],
            "receive": [tuple(pattern.split(".")) for pattern in permissions.subscribe],
        }  # fmt: skip
        self._allowed: set[tuple[str, str]] = set()
        """What was found to be allowed."""
        servers = {server.name: server for server in broker.servers}
        self.order = [servers[each] for each in in_order(list(servers), name)]
        """The servers, as it tries them: the one that it has left last comes last."""
        self.server = self._next_server() or self.order[0]
        self.view = ClusterView(len(self.order))
        self.view.connected(self.server.num_seen)
        self.num_news = 0
        """How often our server has named other servers than before."""
        self.held: list[tuple[str, Callable[[], None]]] = []
        """What was sent either way, by subject, over a connection that is cut and that nobody has given up yet."""
        self.is_connected = self.server.is_up
        self.is_cut = False
        self.num_connects = 1
        self.num_dropped = 0
        self.subscriptions: list[SimSubscription] = []
        self.last_arrival_s: dict[SimBus, float] = {}
        self.is_closed = False
        self._waiting: dict[int, asyncio.Future[SimDelivery]] = {}
        self._trips: set[asyncio.Future[None]] = set()
        self._num_asked = 0
        self._buffered: deque[_Message] = deque()
        self._num_buffered_bytes = 0

    @property
    def max_bytes(self) -> int:
        return self.broker.max_bytes

    @property
    def num_reroutes(self) -> int:
        return self.view.num_reroutes

    @property
    def num_returns(self) -> int:
        return self.view.num_returns

    async def publish(self, subject: str, payload: bytes, headers: Mapping[str, str]) -> None:
        self.check_message(subject, payload, headers)
        self._send(_Message(self, subject, payload, dict(headers)))
        await asyncio.sleep(0)

    async def request(self, subject: str, payload: bytes, headers: Mapping[str, str], timeout_s: float) -> Delivery:
        self.check_message(subject, payload, headers)
        reply: asyncio.Future[SimDelivery] = asyncio.get_running_loop().create_future()
        self._num_asked += 1
        reply_id = self._num_asked
        self._waiting[reply_id] = reply
        try:
            self._send(_Message(self, subject, payload, dict(headers), reply_id))
            async with asyncio.timeout(timeout_s):
                return await reply
        except TimeoutError as error:
            raise RequestTimedOutError(subject, timeout_s) from error
        finally:
            self._waiting.pop(reply_id, None)

    async def subscribe(self, pattern: str, queue: str = "") -> SimSubscription:
        if self.is_closed:
            raise BusClosedError(pattern)
        self._is_denied("receive", pattern)
        subscription = SimSubscription(self, pattern, queue)
        self.subscriptions.append(subscription)
        self.broker.attach(subscription)
        return subscription

    async def serve(
        self, service: str, endpoint: str, subject: str, queue: str = "", metadata: Mapping[str, str] = NOTHING
    ) -> SimSubscription:
        return await self.subscribe(subject, queue or endpoint)

    async def announce(self, service: str, description: str, metadata: dict[str, str]) -> None:
        """Does nothing: nobody lists the services of a simulation."""

    async def flush(self, timeout_s: float | None = None) -> None:
        timeout_s = BusTimes().flush_timeout_s if timeout_s is None else timeout_s
        if self.is_closed:
            raise BusClosedError
        if not self.is_connected:
            raise BusError("the bus", "the broker is away")
        trip: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._trips.add(trip)
        self.to_server(lambda _: self.broker.echo(self, lambda: None if trip.done() else trip.set_result(None)))
        try:
            async with asyncio.timeout(timeout_s):
                await trip
        except TimeoutError as error:
            raise RequestTimedOutError("the bus", timeout_s) from error
        finally:
            self._trips.discard(trip)

    async def close(self) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        for subscription in self.subscriptions:
            await subscription.close()
        self.broker.drop(self)
        for waiting in (*self._waiting.values(), *self._trips):
            if not waiting.done():
                waiting.set_exception(BusClosedError())

    # For the broker.

    def reaches(self, server: SimServer) -> bool:
        """Return whether it is on the same side of every cut."""
        return self.broker.sides.get(self.name, "") == server.side

    def to_server(self, act: Callable[[SimServer], None], subject: str = "") -> None:
        """Have our server do something, if it is reached."""
        server = self.server
        if self.reaches(server):
            self.broker.accept(server, act, subject)
        else:
            self.held.append((subject, lambda: self.broker.accept(server, act, subject)))

    def flush_held(self) -> None:
        """What has waited for the end of a cut arrives."""
        if self.held and self.reaches(self.server):
            held, self.held = self.held, []
            for _, act in held:
                act()

    def disconnected(self, prefers: SimServer | None = None) -> None:
        """The broker has died, or this connection of it. `prefers`: the server that is tried first."""
        # Judged now: the server that is preferred may be struck a moment later, and who has left could not know it.
        was_served = self.is_connected and self._is_served_by(self.server) and not self.is_cut
        if was_served and not (prefers is not None and self._is_served_by(prefers)):
            self.broker.deserted.append(f"{self.name} has left {self.server.name}, which served it, for none that did")
        self.is_connected = False
        self.broker.report_lost(subject for subject, _ in self.held)
        self.held.clear()
        self.order.remove(self.server)
        self.order.append(self.server)
        if prefers is not None:
            self.order.remove(prefers)
            self.order.insert(0, prefers)
        for waiting in (*self._waiting.values(), *self._trips):
            if not waiting.done():
                waiting.set_exception(BusError("the bus", LOST))

    def connected(self) -> None:
        """The broker is reachable again: publish what was kept."""
        if self.is_closed or self.is_connected or self.is_cut:
            return
        server = self._next_server()
        if server is None:
            return  # whatever changes that has us look again
        # One that has died refuses at once; one that is silent costs a timeout each.
        num_silent = 0
        while self.order[0] is not server:
            num_silent += self.order[0].is_up
            self.order.append(self.order.pop(0))
        if num_silent:
            self.broker.call_later(num_silent * BusTimes().server_connect_timeout_s, self.connected)
            return
        self.is_connected = True
        self.server = server
        self.view.connected(server.num_seen)
        self.num_connects += 1
        self._num_buffered_bytes = 0
        while self._buffered:
            self._pass_to_broker(self._buffered.popleft())
        self.broker.found_fewer(self)

    def _next_server(self) -> SimServer | None:
        """Return the first one that would let us in; the only one also where it stands still: we wait for it."""
        if len(self.order) == 1:
            return self.order[0] if self.order[0].is_up else None
        return next((server for server in self.order if self._is_served_by(server)), None)

    def _is_served_by(self, server: SimServer) -> bool:
        return server.is_well and self.reaches(server)

    def answered(self, reply_id: int, reply: SimDelivery) -> None:
        waiting = self._waiting.get(reply_id)
        if waiting is not None and not waiting.done():
            waiting.set_result(reply)

    def unanswered(self, reply_id: int, error: BusError) -> None:
        waiting = self._waiting.get(reply_id)
        if waiting is not None and not waiting.done():
            waiting.set_exception(error)

    def check_message(self, subject: str, payload: bytes, headers: Mapping[str, str]) -> None:
        """Check that the message may be sent. Raises BusClosedError, MessageTooLargeError."""
        if self.is_closed:
            raise BusClosedError(subject)
        check_size(subject, payload, headers, self.max_bytes)

    def _is_denied(self, verb: str, subject: str) -> bool:
        """Return whether the broker would deny this, which is a fault of ours: it is noted."""
        if self._may is None or (verb, subject) in self._allowed:
            return False
        tokens = tuple(subject.split("."))
        if any(matches(pattern, tokens) for pattern in self._may[verb]):
            self._allowed.add((verb, subject))
            return False
        self.broker.denied.add(f"{self.name} may not {verb} {subject}")
        return True

    def _send(self, message: _Message) -> None:
        if self._is_denied("publish", message.subject):
            return
        if self.is_connected:
            self._pass_to_broker(message)
            return
        if self._num_buffered_bytes + len(message.payload) > MAX_BUFFERED_BYTES:
            raise BusError(message.subject, "the broker is away and the send buffer is full")
        self._num_buffered_bytes += len(message.payload)
        self._buffered.append(message)

    def _pass_to_broker(self, message: _Message) -> None:
        self.to_server(lambda server: self.broker.route(message, server), message.subject)
