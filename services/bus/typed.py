"""The typed bus: messages are decoded once, here; past it everything is typed.

What does not decode is counted, logged with its subject, and dropped. Headers carry the trace context and the
schema's name.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

from dataplane.lasting import lasting
from schemas.message import Message, UndecodableMessageError, arriving, decode, departing, encode
from schemas.permissions import replies_to
from schemas.subjects import CarriesT, Subject
from services.bus import limits
from services.bus.base import (
    Bus,
    BusError,
    Delivery,
    NoRespondersError,
    RequestTimedOutError,
    Subscription,
)
from services.metric_names import BUS_CONNECTS, BUS_FAILURES, BUS_SECONDS, DROPPED, label_of
from services.metrics import Metrics
from services.runtime import now_ms

log = logging.getLogger(__name__)

ReplyT = TypeVar("ReplyT", bound=Message)
ReceivedT_co = TypeVar("ReceivedT_co", bound=Message, covariant=True)

TRACEPARENT_HEADER = "traceparent"
SCHEMA_HEADER = "Kvmesh-Schema"


class Received(NamedTuple, Generic[ReceivedT_co]):
    """A decoded message, its sender's trace context (W3C traceparent, empty if none) and its subject."""

    message: ReceivedT_co
    traceparent: str
    subject: str


@dataclass
class TypedBus:
    """Publishes, asks, listens and serves messages. `num_dropped` counts what did not decode or came too quickly.

    Handlers of `listen` are plain functions that must not block: one subject's messages are handled in order.
    `identity` is what a service reports of itself to whoever lists services; it may change.
    """

    connection: Bus
    service: str
    metrics: Metrics = field(default_factory=Metrics)
    identity: dict[str, str] = field(default_factory=dict[str, str])
    num_dropped: int = 0
    _subscriptions: list[Subscription] = field(default_factory=list[Subscription])
    _num_dropped_by_bus: int = 0

    def __post_init__(self) -> None:
        self.metrics.on_sample(lambda: self.metrics.set_series(BUS_CONNECTS, {(): self.connection.num_connects}))

    def drop(self, reason: str, num: int = 1) -> None:
        """Count messages that came to nothing. `reason`: one of `DROPPED`."""
        self.num_dropped += num
        self.metrics.inc(DROPPED, reason, by=num)

    async def announce(self, description: str) -> None:
        """Be listed as a service, before the first endpoint is served. Raises BusError."""
        self.identity.setdefault("role", self.service)
        await self.connection.announce(self.service, description, self.identity)

    async def publish(
        self, subject: Subject[CarriesT, None], ids: tuple[str, ...], message: CarriesT, trace: str = ""
    ) -> None:
        """Send an event. Raises BusError."""
        _check_carries(subject, message)
        await self.connection.publish(subject.of(*ids), _sent(message), headers_of(message, trace))

    async def ask(
        self,
        subject: Subject[CarriesT, ReplyT],
        ids: tuple[str, ...],
        message: CarriesT,
        timeout_s: float,
        trace: str = "",
    ) -> ReplyT:
        """Send a request and return its reply, one of the types that the subject allows.

        Raises BusError: nobody serves it, no reply came in time, or what came is no such reply.
        """
        _check_carries(subject, message)
        concrete, label, started_s = subject.of(*ids), label_of(subject), time.monotonic()
        # Count a failure by its reason; only a request that was answered counts in the times.
        try:
            reply = await self.connection.request(concrete, _sent(message), headers_of(message, trace), timeout_s)
        except BusError as error:
            self.metrics.inc(BUS_FAILURES, label, _failure_of(error))
            raise
        self.metrics.observe(BUS_SECONDS, time.monotonic() - started_s, label, trace=trace)
        # A reply that does not decode is a failed request too: callers handle BusError alone.
        try:
            return arriving(decode(reply.payload, *subject.reply), now_ms())
        except UndecodableMessageError as error:
            self.drop("undecodable")
            self.metrics.inc(BUS_FAILURES, label, "unreadable")
            raise BusError(concrete, "an unreadable reply came") from error

    async def listen(
        self,
        tasks: asyncio.TaskGroup,
        subject: Subject[CarriesT, Any],
        ids: tuple[str, ...],
        handle: Callable[[Received[CarriesT]], None],
    ) -> None:
        """Subscribe now, and hand every message to `handle` from a task of `tasks` until the bus closes."""
        subscription = await self.connection.subscribe(subject.of(*ids))
        self._subscriptions.append(subscription)
        name = f"listen {subject.pattern}"
        tasks.create_task(lasting(partial(self._read, subscription, subject, handle), name), name=name)

    async def serve(
        self,
        tasks: asyncio.TaskGroup,
        subject: Subject[CarriesT, ReplyT],
        ids: tuple[str, ...],
        handle: Callable[[Received[CarriesT]], Awaitable[ReplyT | None]],
        queue: str = "",
    ) -> None:
        """Answer requests: each in a task of its own, its reply is what `handle` returns; None answers nobody. Who is
        to receive every request, whoever else serves the subject, names a `queue` of its own."""
        endpoint = subject.pattern.rsplit(".", 1)[-1]
        metadata = {
            "carries": subject.carries.__name__,
            "replies": " or ".join(reply.__name__ for reply in subject.reply),
            "empty_payload": "accepted" if subject.may_be_empty else "refused",
        }
        subscription = await self.connection.serve(
            self.service, endpoint, subject.of(*ids), queue or subject.queue, metadata
        )
        self._subscriptions.append(subscription)
        name = f"serve {subject.pattern}"
        tasks.create_task(lasting(partial(self._answer_all, tasks, subscription, subject, handle), name), name=name)

    async def close(self) -> None:
        """Stop listening; then close the bus."""
        for subscription in self._subscriptions:
            await subscription.close()
        await self.connection.close()

    async def _read(
        self,
        subscription: Subscription,
        subject: Subject[CarriesT, Any],
        handle: Callable[[Received[CarriesT]], None],
    ) -> None:
        async for delivery in subscription:
            received = self._decode(delivery, subject)
            if received is not None:
                try:
                    handle(received)
                except Exception:  # one message must not end a service
                    self.drop("handler_failed")
                    log.exception("handling a message on %s failed", delivery.subject)

    async def _answer_all(
        self,
        tasks: asyncio.TaskGroup,
        subscription: Subscription,
        subject: Subject[CarriesT, ReplyT],
        handle: Callable[[Received[CarriesT]], Awaitable[ReplyT | None]],
    ) -> None:
        answering: set[asyncio.Task[None]] = set()
        async for delivery in subscription:
            # Do not answer what does not decode, nor a request whose reply would go where its sender may not publish.
            received = self._decode(delivery, subject)
            if received is None:
                delivery.count_failure("the request does not decode")
                continue
            if is_led_elsewhere(subject, delivery):
                self.drop("malformed")
                delivery.count_failure("its reply is to go where none is awaited")
                continue
            # Bound the answers under way: one more request is left to its requester's timeout.
            if len(answering) >= limits.MAX_ANSWERING:
                self.drop("too_many")
                delivery.count_failure("too many requests are being answered")
                log.warning("a request on %s found too many being answered", delivery.subject)
                continue
            # Answer in a task of its own: a slow answer must not delay the next request.
            answer = self._answer(delivery, handle(received))
            task = tasks.create_task(answer, name=f"answer {delivery.subject}")
            answering.add(task)
            task.add_done_callback(answering.discard)

    async def _answer(self, delivery: Delivery, pending: Awaitable[Message | None]) -> None:
        try:
            reply = await pending
        except Exception:  # nobody is answered: the requester's own timeout ends its wait
            self.drop("handler_failed")
            delivery.count_failure("answering failed")
            log.exception("answering on %s failed", delivery.subject)
            return
        if reply is None:
            return
        try:
            await delivery.respond(_sent(reply), headers_of(reply, ""))
        except BusError as error:
            log.warning("a reply could not be sent: %s", error)

    def _decode(self, delivery: Delivery, subject: Subject[CarriesT, Any]) -> Received[CarriesT] | None:
        if self._num_dropped_by_bus != (num_now := self.connection.num_dropped):
            self.drop("too_slow", num_now - self._num_dropped_by_bus)
            self._num_dropped_by_bus = num_now
        try:
            message = decode(_payload_of(delivery, subject), subject.carries)
        except UndecodableMessageError as error:
            self.drop("undecodable")
            log.warning("dropped %d bytes on %s: %s", len(delivery.payload), delivery.subject, error)
            return None
        if disagreement := subject.disagreement(delivery.subject, message):
            # The broker decides who may publish a subject: what is inside must not contradict it.
            self.drop("undecodable")
            log.warning("dropped a message on %s: %s", delivery.subject, disagreement)
            return None
        return Received(arriving(message, now_ms()), delivery.headers.get(TRACEPARENT_HEADER, ""), delivery.subject)


def _sent(message: Message) -> bytes:
    return encode(departing(message, now_ms()))


def _check_carries(subject: Subject[Any, Any], message: Message) -> None:
    """Assert what the types say, for callers that hold subjects of several types (a queue of messages)."""
    assert isinstance(message, subject.carries), f"{type(message).__name__} does not belong on {subject.pattern}"


def _payload_of(delivery: Delivery, subject: Subject[Any, Any]) -> bytes:
    """Return what is to be decoded. Nothing but a missing payload stands for an empty message."""
    return b"{}" if subject.may_be_empty and not delivery.payload else delivery.payload


def is_led_elsewhere(subject: Subject[Any, Any], delivery: Delivery) -> bool:
    """Return whether a reply would not go to somebody who may ask this: whoever answers may publish there what the
    requester may not. What is so led is not answered."""
    if not delivery.reply_to or delivery.reply_to.startswith(replies_to(subject)):
        return False
    log.warning("a question on %s is not answered: its reply would go to %s", delivery.subject, delivery.reply_to)
    return True


def _failure_of(error: BusError) -> str:
    if isinstance(error, NoRespondersError):
        return "no_responders"
    return "timed_out" if isinstance(error, RequestTimedOutError) else "failed"


def headers_of(message: Message, trace: str) -> dict[str, str]:
    headers = {SCHEMA_HEADER: type(message).__name__}
    if trace:
        headers[TRACEPARENT_HEADER] = trace
    return headers
