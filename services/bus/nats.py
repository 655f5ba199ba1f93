"""The bus over NATS. The only file that knows the client library.

Subscriptions are iterated by tasks of ours: the library's callbacks run one by one, and a CancelledError inside one
silently ends its loop. The Services API leaves no choice but callbacks, so ours only put the request into a queue.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Mapping

import nats
import nats.errors
import nats.micro
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription as ClientSubscription
from nats.micro.request import Request
from nats.micro.service import Service, ServiceConfig

from services.bus.base import (
    MAX_PAYLOAD_BYTES,
    BusClosedError,
    BusError,
    Delivery,
    MessageTooLargeError,
    NoRespondersError,
    RequestTimedOutError,
)
from services.errors import BrokerUnreachableError

log = logging.getLogger(__name__)

SERVICE_VERSION = "0.1.0"


class NatsDelivery:
    """A message of the client library, or a request of its Services API: both have the same fields."""

    __slots__ = ("_message", "expects_reply", "headers", "payload", "subject")

    def __init__(self, message: Msg | Request, expects_reply: bool) -> None:
        self._message = message
        self.subject: str = message.subject
        self.payload: bytes = message.data
        self.headers: Mapping[str, str] = message.headers or {}
        self.expects_reply = expects_reply

    async def respond(self, payload: bytes, headers: Mapping[str, str]) -> None:
        if not self.expects_reply:
            return
        if isinstance(self._message, Request):
            await self._message.respond(payload, headers=dict(headers))
            return
        client: Client = self._message._client  # pyright: ignore[reportPrivateUsage]
        await client.publish(self._message.reply, payload, headers=dict(headers))


class NatsSubscription:
    def __init__(self, subscription: ClientSubscription) -> None:
        self._subscription = subscription

    async def __aiter__(self) -> AsyncIterator[Delivery]:
        async for message in self._subscription.messages:
            yield NatsDelivery(message, bool(message.reply))

    async def close(self) -> None:
        with contextlib.suppress(nats.errors.Error):  # a lost connection ends it as well
            await self._subscription.unsubscribe()


class NatsEndpoint:
    """An endpoint of the Services API as something to iterate."""

    def __init__(self) -> None:
        self._inbox: asyncio.Queue[Delivery | None] = asyncio.Queue()

    async def handle(self, request: Request) -> None:
        self._inbox.put_nowait(NatsDelivery(request, True))

    async def __aiter__(self) -> AsyncIterator[Delivery]:
        while (delivery := await self._inbox.get()) is not None:
            yield delivery

    async def close(self) -> None:
        self._inbox.put_nowait(None)


class NatsBus:
    """See `Bus`. Make one with `connect`."""

    def __init__(self, client: Client, url: str) -> None:
        self._client = client
        self._url = url
        self._services: dict[str, Service] = {}
        self._endpoints: list[NatsEndpoint] = []
        self._denied: str | None = None

    @classmethod
    async def connect(cls, url: str, name: str, timeout_s: float = 5.0) -> "NatsBus":
        """Return a connected bus. Raises BrokerUnreachableError with a line that names the address."""
        client = Client()
        bus = cls(client, url)
        try:
            await asyncio.wait_for(
                client.connect(
                    url,
                    name=name,
                    error_cb=bus._on_error,
                    connect_timeout=max(1, int(timeout_s)),
                    max_reconnect_attempts=-1,
                    reconnect_time_wait=1,
                    allow_reconnect=True,
                ),
                timeout_s,
            )
        except (OSError, nats.errors.Error, TimeoutError, ValueError) as error:
            raise BrokerUnreachableError(
                f"no NATS server answers at {url} ({type(error).__name__}); start one, or run with --nats embedded"
            ) from error
        if client.max_payload < MAX_PAYLOAD_BYTES:
            log.warning(
                "the broker allows %d bytes a message, fewer than our %d", client.max_payload, MAX_PAYLOAD_BYTES
            )
        return bus

    async def publish(self, subject: str, payload: bytes, headers: Mapping[str, str]) -> None:
        self._check_size(subject, payload)
        try:
            await self._client.publish(subject, payload, headers=dict(headers))
        except nats.errors.ConnectionClosedError as error:
            raise BusClosedError(subject) from error
        except nats.errors.OutboundBufferLimitError as error:
            raise BusError(subject, "the broker is away and the send buffer is full") from error

    async def request(self, subject: str, payload: bytes, headers: Mapping[str, str], timeout_s: float) -> Delivery:
        self._check_size(subject, payload)
        try:
            message = await self._client.request(subject, payload, timeout=timeout_s, headers=dict(headers))
        except nats.errors.NoRespondersError as error:
            raise NoRespondersError(subject) from error
        except nats.errors.TimeoutError as error:
            raise RequestTimedOutError(subject, timeout_s) from error
        except nats.errors.ConnectionClosedError as error:
            raise BusClosedError(subject) from error
        return NatsDelivery(message, False)

    async def subscribe(self, pattern: str, queue: str = "") -> NatsSubscription:
        try:
            subscription = await self._client.subscribe(pattern, queue=queue)  # pyright: ignore[reportUnknownMemberType]
            return NatsSubscription(subscription)
        except nats.errors.ConnectionClosedError as error:
            raise BusClosedError(pattern) from error

    async def serve(self, service: str, endpoint: str, subject: str, queue: str = "") -> NatsEndpoint:
        if service not in self._services:
            config = ServiceConfig(name=service, version=SERVICE_VERSION, description=f"kvmesh {service}")
            self._services[service] = await _add_service(self._client, config)
        open_endpoint = NatsEndpoint()
        await self._services[service].add_endpoint(
            name=endpoint, subject=subject, queue_group=queue or endpoint, handler=open_endpoint.handle
        )
        self._endpoints.append(open_endpoint)
        return open_endpoint

    async def flush(self) -> None:
        """See `Bus`. Raises BrokerUnreachableError when the broker has denied us a subject: to the caller of a
        request such a denial looks like a timeout, so it must surface here, at start-up."""
        try:
            await self._client.flush(timeout=10)
        except nats.errors.ConnectionClosedError as error:
            raise BusClosedError from error
        except nats.errors.Error as error:
            raise BusError("the bus", f"the broker did not answer a ping ({type(error).__name__})") from error
        if self._denied:
            raise BrokerUnreachableError(f"the broker at {self._url} denies us a subject: {self._denied}")

    async def close(self) -> None:
        for service in self._services.values():
            with contextlib.suppress(nats.errors.Error):  # a lost connection ends it as well
                await service.stop()
        for endpoint in self._endpoints:
            await endpoint.close()
        await self._client.close()

    def _check_size(self, subject: str, payload: bytes) -> None:
        if len(payload) > min(MAX_PAYLOAD_BYTES, self._client.max_payload):
            raise MessageTooLargeError(subject, len(payload))

    async def _on_error(self, error: Exception) -> None:
        text = str(error)
        if "permissions violation" in text.lower():
            self._denied = text
        log.warning("bus: %s", text or type(error).__name__)


async def _add_service(client: Client, config: ServiceConfig) -> Service:
    return await nats.micro.add_service(client, config)  # pyright: ignore[reportUnknownMemberType]
