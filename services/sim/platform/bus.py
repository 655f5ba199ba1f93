"""A message bus inside one process that loses, delays, doubles and reorders as it is set. Passes NATS' contract suite.

Without faults it keeps NATS' promises: at most once, in order for each connection, an answer at once where nobody
serves a subject. While the broker is away clients keep what they publish, within a bound, and reconnect.
"""

import asyncio
import contextvars
import itertools
import random
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
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
from services.sim.limits import MAX_BUFFERED_BYTES, MESSAGE_GAP_S, RECONNECT_S
from services.sim.platform.loop import lag_s
from services.sim.platform.meter import CpuMeter
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

        def pass_on() -> None:
            bus.broker.show(reply.subject, payload)
            bus.broker.carry(bus, requester, lambda: requester.answered(reply_id, reply))

        bus.broker.accept(pass_on)

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
    """The broker that the buses of one simulation share. It can go down and come back, or stand still and go on."""

    def __init__(
        self, rng: random.Random, conditions: BusConditions | None = None, meter: CpuMeter | None = None
    ) -> None:
        self._meter = meter
        self.conditions = conditions or BusConditions()
        self.rng = rng
        self.is_up = True
        self.max_bytes = limits.MAX_PAYLOAD_BYTES
        self._is_still = False
        self._unread: list[tuple[str, Callable[[], None]]] = []
        """What clients have sent since it stands still, in order, by subject."""
        self.taps: list[Tap] = []
        self.readers: list[Reader] = []
        self.observes_lost: list[Callable[[str], None]] = []
        """Called with the subject of each message that no tap has seen: the broker died before it had read it."""
        self.num_messages = 0
        self.denied: set[str] = set()
        """What clients wanted to publish or receive that their permissions do not cover."""
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

    def go_down(self) -> None:
        """The broker dies: messages on their way are lost, every client is disconnected."""
        self.is_up = self._is_still = False
        unread, self._unread = self._unread, []
        for observe in self.observes_lost:
            for subject, _ in unread:
                observe(subject)
        for bus in self._buses:
            bus.disconnected()

    def come_up(self) -> None:
        """The broker is back. Its clients reconnect one after another."""
        self.is_up = True
        for bus in self._buses:
            self._later(self.rng.uniform(*RECONNECT_S), bus.connected)

    def stand_still(self) -> None:
        """The broker's process is stopped: what clients send waits, and nothing is lost. What it has sent arrives."""
        self._is_still = self.is_up

    def go_on(self) -> None:
        """It goes on: all that waited is passed on at once."""
        self._is_still = False
        unread, self._unread = self._unread, []
        for _, pass_on in unread:
            pass_on()

    def cut(self, name: str) -> None:
        """The connection of a client is reset, and none is taken of it, until `restore`. It is published."""
        for bus in [bus for bus in self._buses if bus.name == name]:
            bus.is_cut = True
            bus.disconnected()
            self._publish_end(bus)

    def restore(self, name: str) -> None:
        """Take connections of a client again."""
        for bus in [bus for bus in self._buses if bus.name == name]:
            bus.is_cut = False
            self._later(self.rng.uniform(*RECONNECT_S), bus.connected)

    def restore_all(self) -> None:
        """Take connections of everybody again."""
        for name in [bus.name for bus in self._buses if bus.is_cut]:
            self.restore(name)

    def accept(self, pass_on: Callable[[], None], subject: str = "") -> None:
        """A client has sent something: pass it on, now or once the broker goes on. `subject`: of what taps see."""
        if self._is_still:
            self._unread.append((subject, pass_on))
        elif self._meter is None:
            pass_on()
        else:  # a broker of its own would do this, and not who sends
            before = self._meter.switch(self._meter.rest)
            pass_on()
            self._meter.switch(before)

    def show(self, subject: str, payload: bytes) -> None:
        """Let those read a message, or a reply, who are to see all that is sent."""
        for reader in self.readers:
            reader(subject, payload)

    def drop(self, bus: "SimBus") -> None:
        """A client has disconnected for good: remove its subscriptions, and publish it as NATS does."""
        bus.is_connected, bus.is_closed = False, True
        if bus in self._buses:
            self._buses.remove(bus)
            self._publish_end(bus)
        for subscription in bus.subscriptions:
            self.detach(subscription)

    def _publish_end(self, bus: "SimBus") -> None:
        message = _Message(self._itself, DISCONNECTED, disconnected(bus.name), {})
        self.accept(lambda: self.route(message))

    def attach(self, subscription: SimSubscription) -> None:
        self._num_added += 1
        patterns = self._by_beginning.setdefault(subscription.beginning, {})
        patterns.setdefault(subscription.pattern, {})[subscription] = self._num_added
        self._listening.clear()

    def detach(self, subscription: SimSubscription) -> None:
        patterns = self._by_beginning.get(subscription.beginning, {})
        if patterns.get(subscription.pattern, {}).pop(subscription, None) is not None:
            self._listening.clear()

    def route(self, message: _Message) -> None:
        """Deliver a message to every subscription and to one member of each queue group. A request that nobody serves
        is answered with NoRespondersError."""
        if message.source is not self._itself:
            self.num_messages += 1
            for tap in self.taps:
                tap(message.subject, message.source.name)
            self.show(message.subject, message.payload)
        groups: dict[str, list[SimSubscription]] = {}
        num_delivered = 0
        for subscription in self._listeners(message.subject):
            if not subscription.bus.is_connected:
                continue
            num_delivered += 1
            if subscription.queue:
                groups.setdefault(subscription.queue, []).append(subscription)
            else:
                self._deliver(message, subscription)
        for members in groups.values():
            self._deliver(message, members[next(self._turn) % len(members)])
        if not num_delivered and message.reply_id:
            source, reply_id, subject = message.source, message.reply_id, message.subject
            self.carry(source, source, lambda: source.unanswered(reply_id, NoRespondersError(subject)))

    def carry(self, source: "SimBus", target: "SimBus", arrive: Callable[[], None]) -> None:
        """Carry something from one client to another: delayed, twice or never, as `conditions` say."""
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

    def _deliver(self, message: _Message, subscription: SimSubscription) -> None:
        delivery = SimDelivery(
            message.subject, message.payload, message.headers, subscription.bus, message.source, message.reply_id
        )
        self.carry(message.source, subscription.bus, lambda: subscription.deliver(delivery))

    def _arrive(self, at_s: float, target: "SimBus", arrive: Callable[[], None]) -> None:
        connection = target.num_connects

        def land() -> None:  # what was on its way to a connection that has ended is lost
            if target.is_connected and target.num_connects == connection:
                arrive()

        asyncio.get_running_loop().call_at(at_s, land, context=self._context)

    def _later(self, delay_s: float, call: Callable[[], None]) -> None:
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
        self.is_connected = broker.is_up
        self.is_cut = False
        self.num_connects = 1
        self.num_reroutes = 0
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
        self.broker.accept(lambda: self.broker.echo(self, lambda: None if trip.done() else trip.set_result(None)))
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

    def disconnected(self) -> None:
        """The broker has died, or this connection of it."""
        self.is_connected = False
        for waiting in (*self._waiting.values(), *self._trips):
            if not waiting.done():
                waiting.set_exception(BusError("the bus", LOST))

    def connected(self) -> None:
        """The broker is reachable again: publish what was kept."""
        if self.is_closed or self.is_connected or self.is_cut or not self.broker.is_up:
            return
        self.is_connected = True
        self.num_connects += 1
        self._num_buffered_bytes = 0
        while self._buffered:
            self._pass_to_broker(self._buffered.popleft())

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
        self.broker.accept(lambda: self.broker.route(message), message.subject)
