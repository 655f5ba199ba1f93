"""A bus inside one process, for tests and the simulator. Passes the same contract suite as NATS."""

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field

from schemas.broker import DISCONNECTED, disconnected
from services.bus import limits
from services.bus.base import (
    NOTHING,
    BusClosedError,
    Delivery,
    NoRespondersError,
    RequestTimedOutError,
    check_size,
)

log = logging.getLogger(__name__)


@dataclass(slots=True)
class MemoryDelivery:
    """See `Delivery`. `reply` is where a request's requester waits; None for an event."""

    subject: str
    payload: bytes
    headers: Mapping[str, str]
    reply: "asyncio.Future[MemoryDelivery] | None" = None
    max_bytes: int = limits.MAX_PAYLOAD_BYTES
    reply_to: str = ""

    @property
    def expects_reply(self) -> bool:
        return self.reply is not None

    async def respond(self, payload: bytes, headers: Mapping[str, str]) -> None:
        check_size(self.subject, payload, headers, self.max_bytes)
        if self.reply is not None and not self.reply.done():
            self.reply.set_result(MemoryDelivery(self.subject, payload, dict(headers)))

    def count_failure(self, reason: str) -> None:
        """Does nothing: there are no statistics to look at."""


@dataclass(eq=False)
class MemorySubscription:
    """See `Subscription`. `pattern` is split into its tokens; None in the inbox ends the iteration."""

    bus: "MemoryBus"
    pattern: tuple[str, ...]
    queue: str
    inbox: "asyncio.Queue[MemoryDelivery | None]" = field(default_factory=lambda: asyncio.Queue())

    async def __aiter__(self) -> AsyncIterator[Delivery]:
        while (delivery := await self.inbox.get()) is not None:
            yield delivery
        self.inbox.put_nowait(None)  # for whoever iterates once more

    def offer(self, delivery: MemoryDelivery) -> None:
        """Take a message in, unless too many wait already."""
        if self.inbox.qsize() < limits.MAX_WAITING:
            self.inbox.put_nowait(delivery)
            return
        if self.bus.num_dropped == 0:
            log.warning("dropped a message on %s: its reader is too slow", delivery.subject)
        self.bus.num_dropped += 1

    async def close(self) -> None:
        self.bus.unsubscribe(self)
        self.inbox.put_nowait(None)


@dataclass(eq=False)
class MemoryBroker:
    """What the buses of one process share, as clients share a server. `max_bytes`: of a message."""

    max_bytes: int = limits.MAX_PAYLOAD_BYTES
    subscriptions: list[MemorySubscription] = field(default_factory=list[MemorySubscription])
    turn: Iterator[int] = field(default_factory=itertools.count)


class MemoryBus:
    """See `Bus`. One client of a broker, a new one unless given. Queue groups take turns. The broker publishes
    the end of the connection of one with a `name`."""

    def __init__(self, broker: MemoryBroker | None = None, name: str = "") -> None:
        self._broker = broker or MemoryBroker()
        self._name = name
        self._requests: set[asyncio.Future[MemoryDelivery]] = set()
        self._closed = False
        self.is_connected = True
        self.num_connects = 1
        self.num_reroutes = self.num_returns = 0
        self.num_dropped = 0

    @property
    def max_bytes(self) -> int:
        return self._broker.max_bytes

    async def publish(self, subject: str, payload: bytes, headers: Mapping[str, str]) -> None:
        self._deliver(MemoryDelivery(subject, payload, dict(headers)))
        await asyncio.sleep(0)

    async def request(self, subject: str, payload: bytes, headers: Mapping[str, str], timeout_s: float) -> Delivery:
        reply: asyncio.Future[MemoryDelivery] = asyncio.get_running_loop().create_future()
        if not self._deliver(MemoryDelivery(subject, payload, dict(headers), reply, self.max_bytes)):
            raise NoRespondersError(subject)
        self._requests.add(reply)
        try:
            async with asyncio.timeout(timeout_s):
                return await reply
        except TimeoutError as error:
            raise RequestTimedOutError(subject, timeout_s) from error
        finally:
            self._requests.discard(reply)

    async def subscribe(self, pattern: str, queue: str = "") -> MemorySubscription:
        if self._closed:
            raise BusClosedError(pattern)
        subscription = MemorySubscription(self, tuple(pattern.split(".")), queue)
        self._broker.subscriptions.append(subscription)
        return subscription

    async def serve(
        self, service: str, endpoint: str, subject: str, queue: str = "", metadata: Mapping[str, str] = NOTHING
    ) -> MemorySubscription:
        return await self.subscribe(subject, queue or endpoint)

    async def announce(self, service: str, description: str, metadata: dict[str, str]) -> None:
        """Does nothing: nobody lists the services of a process."""

    async def flush(self, timeout_s: float | None = None) -> None:
        """See `Bus`. What is sent here has arrived at once."""
        if self._closed:
            raise BusClosedError
        await asyncio.sleep(0)

    async def close(self) -> None:
        was_closed, self._closed = self._closed, True
        for subscription in [s for s in self._broker.subscriptions if s.bus is self]:
            await subscription.close()
        if self._name and not was_closed:
            self._route(MemoryDelivery(DISCONNECTED, disconnected(self._name), {}))
        for reply in self._requests:
            if not reply.done():
                reply.set_exception(BusClosedError())

    def unsubscribe(self, subscription: MemorySubscription) -> None:
        if subscription in self._broker.subscriptions:
            self._broker.subscriptions.remove(subscription)

    def _deliver(self, delivery: MemoryDelivery) -> bool:
        """Hand the message to every listener, and to one member of each queue group. False: nobody listens."""
        if self._closed:
            raise BusClosedError(delivery.subject)
        check_size(delivery.subject, delivery.payload, delivery.headers, self.max_bytes)
        return self._route(delivery)

    def _route(self, delivery: MemoryDelivery) -> bool:
        tokens = tuple(delivery.subject.split("."))
        matching = [s for s in self._broker.subscriptions if matches(s.pattern, tokens)]
        groups: dict[str, list[MemorySubscription]] = {}
        for subscription in matching:
            if subscription.queue:
                groups.setdefault(subscription.queue, []).append(subscription)
            else:
                subscription.offer(delivery)
        for members in groups.values():
            members[next(self._broker.turn) % len(members)].offer(delivery)
        return bool(matching)


def matches(pattern: tuple[str, ...], subject: tuple[str, ...]) -> bool:
    """Return whether a subject's tokens fit a pattern's (`*` one token, a last `>` one or more)."""
    for at, token in enumerate(pattern):
        if token == ">":
            return len(subject) > at
        if at >= len(subject) or token not in ("*", subject[at]):
            return False
    return len(pattern) == len(subject)
