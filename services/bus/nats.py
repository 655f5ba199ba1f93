"""The bus over NATS. The only file that knows the client library.

Subscriptions are iterated by tasks of ours: the library's callbacks run one by one, and a CancelledError inside one
silently ends its loop. The Services API leaves no choice but callbacks, so ours only put the request into a queue.

The library may be connected and receive nothing: its reading task ends at the first exception that it does not expect,
and nothing starts it again. So a watch looks at its tasks and connects anew where one has ended.
"""

import asyncio
import contextlib
import logging
import math
import random
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Coroutine, Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import ParseResult

import msgspec
import nats
import nats.errors
from nats.aio.client import Client, Srv
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription as ClientSubscription
from nats.aio.transport import TcpTransport
from nats.micro.request import Request
from nats.micro.service import Endpoint, Service, ServiceConfig
from nats.protocol.parser import ERR_OP, INFO_OP

from dataplane.lasting import lasting_task
from schemas.broker import DISCONNECTED
from schemas.permissions import INBOX, PEOPLE, SURVEY, inboxes_of
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
from services.bus.servers import ClusterView, ServerSeen, in_order, num_advertised
from services.errors import BrokerRefusesError, BrokerUnreachableError, UserError
from services.times import Times
from services.trust.certificates import client_context
from services.trust.keys import BusAccess, Identity, without_password
from services.trust.nats_jwt import sign_nonce, token_of, user_of

log = logging.getLogger(__name__)

SERVICE_VERSION = "0.1.0"

SERVER_KEY = "server"
"""Where a member of a broker of several servers says, to those who survey, which one it is connected to."""

_REFUSED = "authorization violation"
_CERTIFIED = "`kvmesh bus-config DIR --host NAME` makes a certificate for it, and ca.pem for whoever connects"
_TOO_MANY_SUBSCRIPTIONS = "subscriptions exceeded"
_BUFFER_FULL = "the broker is away and the send buffer is full"

ResultT = TypeVar("ResultT")


class _Surveyed(msgspec.Struct):
    """What a service answers to a survey (NATS ADR-32, `ping_response`)."""

    metadata: dict[str, str] = {}


class SurveyedService(Service):
    """A service of the Services API. `only_people`: it answers surveys only where those await replies who may ask:
    whoever answers may publish there what the asker may not."""

    def __init__(self, client: Client, config: ServiceConfig, *, only_people: bool) -> None:
        super().__init__(client, config)
        self._awaited = inboxes_of(*PEOPLE) if only_people else ("",)

    async def _handle_ping_request(self, msg: Msg) -> None:
        if self._is_awaited(msg):
            await super()._handle_ping_request(msg)

    async def _handle_info_request(self, msg: Msg) -> None:
        if self._is_awaited(msg):
            await super()._handle_info_request(msg)

    async def _handle_stats_request(self, msg: Msg) -> None:
        if self._is_awaited(msg):
            await super()._handle_stats_request(msg)

    def _is_awaited(self, survey: Msg) -> bool:
        if survey.reply and survey.reply.startswith(self._awaited):
            return True
        log.warning("%s is not answered: its reply would go to %r", survey.subject, survey.reply)
        return False


class NatsDelivery:
    """A message of the client library."""

    __slots__ = (
        "_bus",
        "_endpoint",
        "_received_ns",
        "_reply",
        "expects_reply",
        "headers",
        "payload",
        "reply_to",
        "subject",
    )

    def __init__(
        self, bus: "NatsBus", message: Msg, *, is_reply: bool = False, endpoint: Endpoint | None = None
    ) -> None:
        self._bus = bus
        self._endpoint = endpoint
        self._received_ns = time.monotonic_ns()
        self._reply = message.reply
        self.subject: str = message.subject
        self.payload: bytes = message.data
        self.headers: Mapping[str, str] = message.headers or {}
        self.expects_reply = bool(message.reply) and not is_reply
        self.reply_to = message.reply if self.expects_reply and bus.knows_its_clients else ""

    async def respond(self, payload: bytes, headers: Mapping[str, str]) -> None:
        if self.expects_reply:
            await self._bus.publish(self._reply, payload, headers)
        self._count_time()

    def count_failure(self, reason: str) -> None:
        self._count_time()
        if self._endpoint is not None:
            self._endpoint._num_errors += 1  # pyright: ignore[reportPrivateUsage]
            self._endpoint._last_error = reason  # pyright: ignore

    def _count_time(self) -> None:
        """The library counts what its callback takes, which only puts the request into our queue."""
        if (endpoint := self._endpoint) is not None:
            endpoint._processing_time += time.monotonic_ns() - self._received_ns  # pyright: ignore[reportPrivateUsage]
            endpoint._average_processing_time = endpoint._processing_time // max(1, endpoint._num_requests)  # pyright: ignore


class NatsSubscription:
    """See `Subscription`."""

    def __init__(self, bus: "NatsBus", subscription: ClientSubscription) -> None:
        self._bus = bus
        self._subscription = subscription

    async def __aiter__(self) -> AsyncIterator[Delivery]:
        async for message in self._subscription.messages:
            yield NatsDelivery(self._bus, message)

    async def close(self) -> None:
        with contextlib.suppress(nats.errors.Error):  # a lost connection ends it as well
            await self._subscription.unsubscribe()


class NatsEndpoint:
    """An endpoint of the Services API as something to iterate."""

    def __init__(self, bus: "NatsBus", service: Service) -> None:
        self._bus = bus
        self._service = service
        self._endpoint: Endpoint | None = None
        self._inbox: asyncio.Queue[Delivery | None] = asyncio.Queue()

    async def open(self, name: str, subject: str, queue: str, metadata: Mapping[str, str]) -> None:
        await self._service.add_endpoint(
            name=name, subject=subject, queue_group=queue, handler=self._handle, metadata=dict(metadata)
        )
        self._endpoint = self._service._endpoints[-1]  # pyright: ignore

    async def __aiter__(self) -> AsyncIterator[Delivery]:
        while (delivery := await self._inbox.get()) is not None:
            yield delivery
        self._inbox.put_nowait(None)  # for whoever iterates once more

    async def close(self) -> None:
        """Take no more requests; those that have come are still iterated. The library cannot remove an endpoint, but
        one that went on listening would swallow requests instead of letting the broker answer that nobody serves."""
        endpoint, self._endpoint = self._endpoint, None
        if endpoint is None:
            return
        try:
            self._service._endpoints.remove(endpoint)  # pyright: ignore
            subscription: ClientSubscription = endpoint._subscription  # pyright: ignore
            if self._bus.is_connected:
                with contextlib.suppress(nats.errors.Error):  # a lost connection ends it as well
                    await subscription.drain()
        finally:
            self._inbox.put_nowait(None)

    async def _handle(self, request: Request) -> None:
        if self._inbox.qsize() >= limits.MAX_WAITING:
            self._bus.count_drop(request.subject)
            return
        delivery = NatsDelivery(self._bus, request._msg, endpoint=self._endpoint)  # pyright: ignore[reportPrivateUsage]
        self._inbox.put_nowait(delivery)


def _look_at(closed: "asyncio.Future[None]") -> None:
    if not closed.cancelled():
        closed.exception()


class ConnectionLostError(nats.errors.Error):
    """What was asked went over a connection that has ended: no reply comes."""


class MistrustedError(nats.errors.Error):
    """Whoever answers has no certificate that is believed, or offers no TLS where it is insisted on."""


class BrokerTransport(TcpTransport):
    """The library's connection. After a TLS handshake that failed the library would wait for ever for the end of what
    the handshake began with (nats-io/nats.py issue 718)."""

    def __init__(self, ca: Path | None) -> None:
        super().__init__()
        self._ca = ca
        self.num_reads = 0
        """How often something has come."""

    def __bool__(self) -> bool:
        return True  # else the library makes one of its own

    async def connect(self, uri: ParseResult, buffer_size: int, connect_timeout: int) -> None:
        await super().connect(uri, buffer_size, connect_timeout)
        # Else asyncio may print how a connection broke that nobody awaits: the collector of garbage finds its future
        # before the protocol that would have looked at it.
        if self._io_writer is not None:
            self._io_writer._protocol._closed.add_done_callback(_look_at)  # pyright: ignore

    async def connect_tls(
        self, uri: str | ParseResult, ssl_context: ssl.SSLContext, buffer_size: int, connect_timeout: int
    ) -> None:
        if self._ca is not None:
            with contextlib.suppress(UserError):  # while it is being replaced the one before it is believed
                ssl_context = client_context(self._ca)
        try:
            await super().connect_tls(uri, ssl_context, buffer_size, connect_timeout)
        except ssl.SSLError as error:
            if error.reason == "WRONG_VERSION_NUMBER":  # a line in clear, as of a broker that lets go of us: once more
                raise nats.errors.Error("nats: no TLS handshake") from error
            reason = error.verify_message if isinstance(error, ssl.SSLCertVerificationError) else error.reason
            raise MistrustedError(f"is not believed to be ours: {reason or error}") from error
        if self._io_writer is not None:
            # Without it asyncio warns, whenever the broker ends, of how the library has made its stream.
            self._io_writer._protocol._over_ssl = True  # pyright: ignore

    async def read(self, buffer_size: int) -> bytes:
        data = await super().read(buffer_size)
        self.num_reads += 1
        return data

    def unread(self) -> bytes:
        """Return what has come and was not read: a broker that lets go of a connection sends why just before, and the
        library gets to see the end of the connection only."""
        return b"" if self._io_reader is None else bytes(self._io_reader._buffer)  # pyright: ignore

    def give_up(self) -> None:
        """Forget a connection that came to nothing."""
        if self._io_writer is not None:
            self._io_writer.transport.abort()
        self._io_reader = self._io_writer = None


class BrokerRefusedError(nats.errors.Error):
    """What the broker sent as it let go of a connection that it had just taken."""


class BrokerClient(Client):
    """The library's client, put right in six ways.

    It goes on reading after a PONG that nobody awaits any more: the library hands each PONG to whoever has waited
    longest, and one that was cancelled meanwhile would end its reading task. It connects to the address that it was
    given only, with TLS where that is asked for: the library leaves both to the first line that comes, in clear, from
    whoever answers. It leaves a connection that is broken at once, and one of several servers that sends nothing, as
    long as it is not our own process that stood still. It keeps what the broker announces of its limits,
    which the library drops with the connection. And once closed it stays closed: asyncio.wait_for of
    Python 3.11 swallows a cancellation that comes together with what it waits for, and the library's reconnection would
    go on for ever, in a client that takes itself for closed.
    """

    def __init__(self, *, num_servers: int = 1, is_encrypted: bool, ca: Path | None = None) -> None:
        super().__init__()
        self._own_transport = self._transport = BrokerTransport(ca)
        self._is_encrypted = is_encrypted
        self.view = ClusterView(num_servers)
        self.has_news = asyncio.Event()
        """Our server has named other servers than before."""
        self.broker_error = ""
        """The broker's own words, of the last error that it sent; empty once it has let us in."""

    async def _process_connect_init(self) -> None:
        try:
            await super()._process_connect_init()
        except BaseException as error:
            unread = self._own_transport.unread()
            self._own_transport.give_up()
            if isinstance(error, Exception) and unread.startswith(ERR_OP):
                self.broker_error = _words(unread.split(b"\r\n", 1)[0].removeprefix(ERR_OP).decode(errors="replace"))
                raise BrokerRefusedError(self.broker_error) from error
            if isinstance(error, nats.errors.Error) and str(error).startswith("nats: '"):
                self.broker_error = _words(str(error))
            raise
        self.broker_error = ""

    async def _process_err(self, err_msg: str) -> None:
        self.broker_error = _words(err_msg)
        if _TOO_MANY_SUBSCRIPTIONS in err_msg.lower():  # the connection stays, which the library would close for good
            await self._error_cb(BrokerRefusedError(self.broker_error))
            return
        await super()._process_err(err_msg)

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        if initial_connection and self._is_encrypted and not info.get("tls_required"):
            raise MistrustedError(
                "does not encrypt, and that is insisted on: it is on another machine, or has a ca.pem"
            )
        (self.view.connected if initial_connection else self.view.told)(num_advertised(info))
        self.has_news.set()
        # The other servers of a cluster: whoever answers could name anybody, and the library would go there in clear.
        await super()._process_info({**info, "connect_urls": []}, initial_connection)

    @property
    def server(self) -> str:
        """The address of the server that we are connected to, or were last."""
        return "" if self._current_server is None else _shown(self._current_server)

    @property
    def other_servers(self) -> list[Srv]:
        """Those that we are not connected to, in the order in which they are tried."""
        return [server for server in self._server_pool if server is not self._current_server]

    def prefer(self, server: Srv) -> None:
        """Try this one first when we connect next."""
        self._server_pool.remove(server)
        self._server_pool.insert(0, server)

    async def _ping_interval(self) -> None:
        interval_s, most = self.options["ping_interval"], self.options["max_outstanding_pings"]
        num_silent = num_reads = 0
        while True:
            began_s = time.monotonic()
            await asyncio.sleep(interval_s)
            if not self.is_connected:
                continue
            # Whatever comes is a sign of life. Where it is we who stood still, it may not have been read yet.
            stood_still = time.monotonic() - began_s > 2 * interval_s
            is_silent = self._own_transport.num_reads == num_reads and not stood_still
            num_silent, num_reads = num_silent + 1 if is_silent else 0, self._own_transport.num_reads
            if num_silent >= most:
                await self._process_op_err(nats.errors.StaleConnectionError())
                return
            with contextlib.suppress(RuntimeError, AttributeError):  # the connection is being closed
                await self._send_ping()  # pyright: ignore[reportUnknownMemberType]

    async def _attempt_reconnect(self) -> None:
        _abort(self)  # over TLS the library would first wait 30 s for the goodbye of a broker that sends nothing
        await super()._attempt_reconnect()

    async def _close(self, status: int, do_cbs: bool = True) -> None:
        if self._reconnection_task is not None and self._reconnection_task is not asyncio.current_task():
            await _end(self._reconnection_task)
        await super()._close(status, do_cbs)

    async def _process_pong(self) -> None:
        pongs: list[asyncio.Future[bool]] = self._pongs  # pyright: ignore
        if pongs and pongs[0].done():
            pongs[0] = asyncio.Future()
        await super()._process_pong()


class NatsBus:
    """See `Bus`. Make one with `connect`."""

    def __init__(self, client: BrokerClient, access: BusAccess, name: str, times: Times) -> None:
        self._client = client
        self._times = times.bus
        self._recover_s = times.presence.recover_ms / 1000
        self._identity = access.identity
        self._renew = access.renew
        self._ca = access.ca
        self._tls = client_context(access.ca) if access.is_encrypted else None
        self._renew_s = math.inf if access.identity is None or access.renew is None else _renewal_of(access.identity)
        """When the next identity is asked for, by the monotonic clock."""
        self._name = name
        self._url = access.shown
        self._num_servers = len(access.servers)
        self._refused: dict[str, str] = {}
        """Why a server of several does not let us in, at the first try."""
        self._is_sent_away = False
        """Our server has said that it will end."""
        self._look_at_s = self._look_pause_s = 0.0
        """When we look next for a server that sees more than ours, should it not see all, and how long after that
        again."""
        self._saw_better = False
        self._services: dict[str, Service] = {}
        self._described: list[dict[str, str]] = []
        """What those services say of us to whoever surveys."""
        self._endpoints: list[NatsEndpoint] = []
        self._denied: str | None = None
        self._last_logged = ""
        self._inbox = ""
        """Where the messages of our round trips come back."""
        self._trips: dict[bytes, asyncio.Future[None]] = {}
        """The round trips under way, by the payload of each one's message."""
        self._num_trips = 0
        self._watching: asyncio.Task[None] | None = None
        self.num_connects = 0
        self.num_dropped = 0
        self.closed = asyncio.Event()
        """Set once the connection is closed for good, by us or by the broker."""
        self._reconnected_s = -self._recover_s

    @property
    def is_connected(self) -> bool:
        return self._client.is_connected

    @property
    def server(self) -> str:
        """The address of the server that the bus is connected to, or was last."""
        return self._client.server

    @property
    def num_seen(self) -> int:
        """How many addresses that server has named last, as those of its cluster; 0: none."""
        return self._client.view.num_seen

    @property
    def num_reroutes(self) -> int:
        return self._client.view.num_reroutes

    @property
    def num_returns(self) -> int:
        return self._client.view.num_returns

    @property
    def broker_error(self) -> str:
        """What the broker answered to the last thing that it would not do; empty: nothing."""
        return self._client.broker_error

    @property
    def knows_its_clients(self) -> bool:
        """Whether the broker asks who somebody is."""
        return self._identity is not None

    @property
    def max_bytes(self) -> int:
        return min(limits.MAX_PAYLOAD_BYTES, self._client.max_payload)

    @classmethod
    async def connect(
        cls, access: BusAccess, name: str, timeout_s: float = limits.CONNECT_TIMEOUT_S, times: Times | None = None
    ) -> "NatsBus":
        """Return a connected bus; tries again until `timeout_s` is over. Raises BrokerUnreachableError with a line that
        names the address, BrokerRefusesError where the broker does not know us, UserError where it takes small messages
        only."""
        _, identity, ca, _ = access
        times, servers = times or Times(), in_order(access.servers, name)
        has_several = len(servers) > 1
        server_timeout_s = min(timeout_s, times.bus.server_connect_timeout_s) if has_several else int(timeout_s)
        ping_interval_s = times.bus.server_ping_interval_s if has_several else times.bus.ping_interval_s
        # Make the bus before it connects: the client's callbacks below are its methods.
        client = BrokerClient(num_servers=len(servers), is_encrypted=access.is_encrypted, ca=ca)
        bus = cls(client, access, name, times)
        try:
            connecting = client.connect(
                servers,
                dont_randomize=True,
                name=name,
                error_cb=bus._on_error,
                disconnected_cb=bus._on_disconnected,
                reconnected_cb=bus._on_reconnected,
                closed_cb=bus._on_closed,
                lame_duck_mode_cb=bus._on_lame_duck,
                connect_timeout=max(1, server_timeout_s),  # pyright: ignore[reportArgumentType]
                max_reconnect_attempts=-1,
                # Clients that were cut off together do not come back together.
                reconnect_time_wait=times.bus.reconnect_wait_s * random.uniform(1, 2),  # pyright: ignore[reportArgumentType]
                allow_reconnect=True,
                pending_size=limits.BUFFER_BYTES,
                ping_interval=ping_interval_s,  # pyright: ignore[reportArgumentType]
                # The client calls these at each connect: after a renewal a reconnect shows the new identity.
                user_jwt_cb=None if identity is None else bus._token,
                signature_cb=None if identity is None else bus._sign_nonce,
                inbox_prefix=INBOX if identity is None else identity.inbox,
                tls=bus._tls,
            )
            await _within(timeout_s, connecting)
        except (asyncio.CancelledError, BrokerRefusesError):
            # Close without callbacks: nothing was connected, and they would report a loss.
            await client._close(Client.CLOSED, False)  # pyright: ignore[reportPrivateUsage]
            raise
        except (OSError, nats.errors.Error, ValueError) as error:
            # A timeout leaves the client half open: close it. The broker's own words say more than the library's error.
            if isinstance(error, TimeoutError):
                await client.close()
            if client.broker_error:
                refusal = f"the broker at {bus._url} does not let us in: {client.broker_error}"
                raise BrokerUnreachableError(refusal) from error
            cause = client.last_error or error
            reason = str(cause) if isinstance(cause, nats.errors.Error) else type(cause).__name__
            raise BrokerUnreachableError(
                f"no NATS server answers at {bus._url} ({reason}); start one, or run with --nats embedded"
            ) from error
        bus.num_connects += 1
        # Check the broker's message limit now: with one that is too low the bus would fail later, message by message.
        if (max_bytes := client.max_payload) < limits.MIN_PAYLOAD_BYTES:
            await client.close()
            raise UserError(
                f"the broker at {bus._url} takes messages of {max_bytes} bytes, and {limits.MIN_PAYLOAD_BYTES} are "
                f"needed: set max_payload in its configuration, best to {limits.MAX_PAYLOAD_BYTES}"
            )
        if max_bytes < limits.MAX_PAYLOAD_BYTES:
            log.info("the broker takes messages of %d bytes: longer prompts are refused", max_bytes)
        if client.view.is_mute:
            log.warning(
                "%s names no other server: who is connected to one that is cut off from the others stays there; leave "
                "out no_advertise in its cluster", bus.server
            )  # fmt: skip
        # Prepare what the connection needs: an inbox for the round trips of `flush`, a watch over the library's tasks.
        bus._inbox = client.new_inbox()
        await client.subscribe(bus._inbox, cb=bus._on_returned)  # pyright: ignore[reportUnknownMemberType]
        bus._watching = lasting_task(bus._watch, f"watch the connection of {name}")
        return bus

    async def publish(self, subject: str, payload: bytes, headers: Mapping[str, str]) -> None:
        check_size(subject, payload, headers, self.max_bytes)
        try:
            await _cancellable(self._client.publish(subject, payload, headers=dict(headers)))
        except nats.errors.Error as error:
            raise _bus_error(subject, error) from error

    async def request(self, subject: str, payload: bytes, headers: Mapping[str, str], timeout_s: float) -> Delivery:
        check_size(subject, payload, headers, self.max_bytes)
        if not self.is_connected and self._client.pending_data_size + len(payload) > limits.BUFFER_BYTES:
            # The library finds that out too, and would then keep the request's place for ever.
            raise BusError(subject, _BUFFER_FULL)
        ends_s = time.monotonic() + timeout_s
        while True:
            try:
                message = await self._ask(subject, payload, headers, timeout_s)
                return NatsDelivery(self, message, is_reply=True)
            except NoRespondersError:
                # Who serves it may be on its way back to the broker, as we were a moment ago: ask again meanwhile.
                now_s = time.monotonic()
                if now_s - self._reconnected_s > self._recover_s or now_s + self._times.ask_again_s > ends_s:
                    raise
            await asyncio.sleep(self._times.ask_again_s)
            timeout_s = ends_s - time.monotonic()

    async def _ask(self, subject: str, payload: bytes, headers: Mapping[str, str], timeout_s: float) -> Msg:
        try:
            return await _cancellable(self._client.request(subject, payload, timeout=timeout_s, headers=dict(headers)))
        except nats.errors.NoRespondersError as error:
            raise NoRespondersError(subject) from error
        except nats.errors.TimeoutError as error:
            raise RequestTimedOutError(subject, timeout_s) from error
        except nats.errors.Error as error:
            raise _bus_error(subject, error) from error

    async def subscribe(self, pattern: str, queue: str = "") -> NatsSubscription:
        try:
            subscription = await _cancellable(
                self._client.subscribe(  # pyright: ignore[reportUnknownMemberType]
                    pattern,
                    queue=queue,
                    pending_msgs_limit=limits.MAX_WAITING,
                    pending_bytes_limit=limits.WAITING_BYTES,
                )
            )
        except nats.errors.Error as error:
            raise _bus_error(pattern, error) from error
        return NatsSubscription(self, subscription)

    async def serve(
        self, service: str, endpoint: str, subject: str, queue: str = "", metadata: Mapping[str, str] = NOTHING
    ) -> NatsEndpoint:
        try:
            opened = NatsEndpoint(self, await self._service(service))
            await opened.open(endpoint, subject, queue or endpoint, metadata)
        except nats.errors.Error as error:
            raise _bus_error(subject, error) from error
        self._endpoints.append(opened)
        return opened

    async def announce(self, service: str, description: str, metadata: dict[str, str]) -> None:
        try:
            await self._service(service, description, metadata)
        except nats.errors.Error as error:
            raise _bus_error(service, error) from error

    async def _service(self, name: str, description: str = "", metadata: dict[str, str] | None = None) -> Service:
        if name not in self._services:
            identity = {} if metadata is None else metadata
            identity.setdefault("id", self._name)
            self._described.append(identity)
            self._say_server()
            config = ServiceConfig(
                name=name, version=SERVICE_VERSION, description=description or f"kvmesh {name}", metadata=identity
            )
            service = SurveyedService(self._client, config, only_people=self.knows_its_clients)
            await service.start()
            self._services[name] = service
        return self._services[name]

    def _say_server(self) -> None:
        if self._num_servers > 1:
            for described in self._described:
                described[SERVER_KEY] = self.server

    async def survey(self) -> list[ServerSeen]:
        """Return each server of ours, and those that members name besides, with the members that are on it: these
        answer people only. Takes as long as answers come, and a quarter of a second. Raises BusError."""
        try:
            on_server = await self._members()
        except nats.errors.Error as error:
            raise _bus_error(SURVEY, error) from error
        # The server that we are connected to has told us what it sees: the others are asked.
        others = self._client.other_servers
        numbers = await asyncio.gather(*map(self._num_seen_by, others))
        seen = {_shown(server): number for server, number in zip(others, numbers, strict=True)}
        seen[self.server] = self.num_seen
        return [
            ServerSeen(url, seen.get(url, 0), frozenset(on_server.get(url, ()))) for url in sorted({*seen, *on_server})
        ]

    async def _members(self) -> dict[str, set[str]]:
        """Ask everybody which server they are on; return the members of each. Not the library's request: it takes one
        answer."""
        found: dict[str, set[str]] = {}
        answered = asyncio.Event()

        async def take(message: Msg) -> None:
            with contextlib.suppress(msgspec.DecodeError):
                said = msgspec.json.decode(message.data, type=_Surveyed).metadata
                found.setdefault(said.get(SERVER_KEY, ""), set()).add(said.get("id", ""))
            answered.set()

        inbox = self._client.new_inbox()
        answers = await self._client.subscribe(inbox, cb=take)  # pyright: ignore[reportUnknownMemberType]
        await self._client.publish(f"{SURVEY}.PING", reply=inbox)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limits.SURVEY_AT_MOST_S):
                while True:
                    answered.clear()
                    await asyncio.wait_for(answered.wait(), limits.SURVEY_QUIET_S)
        await answers.unsubscribe()
        return found

    async def flush(self, timeout_s: float | None = None) -> None:
        """See `Bus`. Raises BrokerUnreachableError when the broker has denied us a subject: to the caller of a
        request such a denial looks like a timeout, so it must surface here, at start-up."""
        if self._client.is_closed:
            raise BusClosedError
        if not self.is_connected:
            raise BusError("the bus", "the broker is away")
        # Not the library's flush: its ping overtakes what still lies in its send buffer, and where the library's tasks
        # have ended it returns although nothing came back.
        timeout_s = self._times.flush_timeout_s if timeout_s is None else timeout_s
        # Send a numbered message to our own inbox: the broker works in order, so it has all before it once it is back.
        self._num_trips += 1
        payload = b"%d" % self._num_trips
        returned = self._trips[payload] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(timeout_s):
                await _cancellable(self._client.publish(self._inbox, payload))
                await returned
        except TimeoutError as error:
            # A denied subject may be why nothing came back: it is the better reason, and is raised below.
            if not self._denied:
                raise RequestTimedOutError("the bus", timeout_s) from error
        except nats.errors.Error as error:
            raise _bus_error("the bus", error) from error
        finally:
            del self._trips[payload]
        if self._denied:
            raise BrokerUnreachableError(f"the broker at {self._url} denies us a subject: {self._denied}")

    async def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        for endpoint in self._endpoints:
            await endpoint.close()
        client = self._client
        if not client.is_connected:
            _forget_unsent(client)
        closing = asyncio.create_task(client.close(), name="close the bus")
        await asyncio.wait({closing}, timeout=self._times.close_timeout_s)
        if not closing.done():
            _forget_unsent(client)
        try:
            await closing
        except OSError:  # the connection was lost while the library sent what it still had
            client._status = Client.DISCONNECTED  # pyright: ignore[reportPrivateUsage]
            await client.close()

    def count_drop(self, subject: str) -> None:
        """A message came that its reader was too slow for."""
        self.num_dropped += 1
        log.warning("dropped a message on %s: its reader is too slow", subject)

    async def _watch(self) -> None:
        """Connect anew whenever one of the library's tasks has ended that it needs. Ends with the connection."""
        while not self._client.is_closed:
            if ended := _ended_task(self._client):
                log.error("the connection to the broker is broken, as %s has ended: connecting anew", ended)
                await _reconnect(self._client)
            if time.monotonic() > self._renew_s and self._take_next_identity() and self.is_connected:
                log.info("the next key of %s is taken: connecting anew with it", self._name)
                await _reconnect(self._client)
            if self._is_sent_away and self.is_connected:
                await self._go_away()
            if self._client.has_news.is_set():
                self._client.has_news.clear()
                self._look_at_s, self._look_pause_s, self._saw_better = 0.0, self._times.server_ping_interval_s, False
            if self.is_connected and not self._client.view.sees_all and time.monotonic() > self._look_at_s:
                await self._look_around()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._times.watch_interval_s):
                    await self._client.has_news.wait()

    async def _look_around(self) -> None:
        """Go to a server that sees more of the cluster than ours; stay where none answers that does.

        Where ours sees more than half we go at the second look: that a server has gone, or is back, is noticed by one
        after another.
        """
        better = await self._server_that_sees_more()
        if better is None:
            self._log_once(f"{self.server} sees {self.num_seen} of its cluster, and no other one sees more")
        elif self.is_connected and (self._saw_better or self._client.view.is_lonely):
            log.warning("%s sees %d of its cluster: connecting to one that sees more", self.server, self.num_seen)
            self._client.prefer(better)
            await _reconnect(self._client)
        self._saw_better = better is not None
        # Look soon after news, then less and less often: a server may be gone for good.
        if not self._saw_better:
            self._look_pause_s = max(self._look_pause_s, self._times.look_around_s)
        self._look_at_s = time.monotonic() + self._look_pause_s
        longest_s = limits.LOOKS_SHARE * self._times.look_around_s
        self._look_pause_s = min(max(2 * self._look_pause_s, self._times.look_around_s), longest_s)

    async def _server_that_sees_more(self) -> Srv | None:
        """Return the one that sees most, if that is more than ours does."""
        others = self._client.other_servers
        seen = await asyncio.gather(*map(self._num_seen_by, others))
        most, better = max(zip(seen, others, strict=True), key=itemgetter(0), default=(0, None))
        return better if most > self.num_seen else None

    async def _num_seen_by(self, server: Srv) -> int:
        """Return how many addresses another server of ours advertises; 0: it does not answer, or is not believed."""
        transport, timeout_s = BrokerTransport(self._ca), math.ceil(self._times.server_connect_timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                await transport.connect(server.uri, limits.GREETING_BYTES, timeout_s)
                greeting = (await transport.readline()).removeprefix(INFO_OP)
                if self._tls is not None:
                    await transport.connect_tls(server.uri.hostname or "", self._tls, limits.GREETING_BYTES, timeout_s)
            return num_advertised(msgspec.json.decode(greeting, type=dict[str, Any]))
        except (OSError, ValueError, nats.errors.Error, msgspec.DecodeError):
            return 0
        finally:
            transport.give_up()

    async def _on_lame_duck(self) -> None:
        self._is_sent_away = self._num_servers > 1

    async def _go_away(self) -> None:
        """Our server will end: go to another one before it does, once what we have said is there."""
        log.info("%s is about to end: connecting to another server", self.server)
        self._is_sent_away = False
        with contextlib.suppress(BusError):
            await self.flush(self._times.server_ping_interval_s)
        await _reconnect(self._client)

    def _take_next_identity(self) -> bool:
        """Return whether there is one: the broker takes the one before until its end only."""
        assert self._identity is not None and self._renew is not None
        self._renew_s = time.monotonic() + limits.RENEW_AGAIN_S
        try:
            found = self._renew()
        except UserError as error:
            log.warning("no next key for %s: %s", self._name, error)
            return False
        if found == self._identity:
            log.warning("the key of %s ends soon: `kvmesh bus-config --member` makes the next", found.name)
            return False
        self._identity, self._renew_s = found, _renewal_of(found)
        return True

    def _token(self) -> bytes:
        assert self._identity is not None
        return token_of(self._identity.credentials).encode()

    def _sign_nonce(self, nonce: str) -> bytes:
        assert self._identity is not None
        return sign_nonce(self._identity.credentials, nonce)

    async def _on_returned(self, message: Msg) -> None:
        trip = self._trips.get(message.data)
        if trip is not None and not trip.done():
            trip.set_result(None)

    def _end_trips(self, error: BusError) -> None:
        """What the connection carried will not come back."""
        for trip in self._trips.values():
            if not trip.done():
                trip.set_exception(error)

    def _end_requests(self, error: nats.errors.Error) -> None:
        """Their replies will not come: the library would leave them to their timeouts."""
        waiting: dict[str, asyncio.Future[Msg]] = self._client._resp_map  # pyright: ignore
        for reply in list(waiting.values()):
            if not reply.done():
                reply.set_exception(error)

    async def _on_error(self, error: Exception) -> None:
        # A reader that is too slow loses messages; the connection itself is fine.
        if isinstance(error, nats.errors.SlowConsumerError):
            self.count_drop(error.subject)
            return
        text = str(error) or type(error).__name__
        if self.num_connects == 0 and _REFUSED in text.lower():
            # Who connects gets this at once: the library would try again and again with the same key.
            self._refuse(_refusal(self.server, self._identity))
            return
        # The broker has no trusted certificate: the caller of the first connect gets the error, later only the log.
        if isinstance(error, MistrustedError):
            text = f"the broker at {self.server} {error}; {_CERTIFIED}"
            if self.num_connects == 0:
                self._refuse(text)
            else:
                self._log_once(text)
            return
        if _REFUSED in text.lower() and self._renew is not None:
            self._renew_s = 0.0  # what we have is of no use any more
        # The library tries again several times a second: log the broker's words once, and not with each attempt.
        if not self.is_connected and self._client.broker_error and self.num_connects:
            self._log_once(f"the broker at {self.server} does not let us in: {self._client.broker_error}")
            return
        # The subject of ended connections is optional: without it the scheduler relies on its pings.
        if "permissions violation" in text.lower() and DISCONNECTED.lower() in text.lower():
            log.info("the broker does not say whose connection ends: who is quiet is asked")
            return
        # Keep the denial: `flush` raises it from now on.
        if "permissions violation" in text.lower() or _TOO_MANY_SUBSCRIPTIONS in text.lower():
            self._denied = text
        # Every attempt to connect that fails comes here: who connects gets the last of them, as an exception.
        log.log(logging.WARNING if self.is_connected else logging.DEBUG, "bus: %s", text)

    def _refuse(self, text: str) -> None:
        """A server does not let us in as we connect for the first time. Raises BrokerRefusesError where all do not;
        else one of them may have been forgotten when keys were changed."""
        self._refused[self.server] = text
        if len(self._refused) == self._num_servers:
            raise BrokerRefusesError(text)
        self._log_once(text)

    def _log_once(self, text: str) -> None:
        """Log once what comes again with every attempt to connect."""
        if text != self._last_logged:
            self._last_logged = text
            log.warning("%s", text)

    async def _on_disconnected(self) -> None:
        is_closed = self._client.is_closed
        self._end_trips(BusClosedError() if is_closed else BusError("the bus", LOST))
        self._end_requests(nats.errors.ConnectionClosedError() if is_closed else ConnectionLostError())
        if not is_closed:
            log.warning("lost the broker at %s; trying again several times a second", self.server)

    async def _on_reconnected(self) -> None:
        self.num_connects += 1
        self._is_sent_away = False
        self._last_logged = ""
        self._reconnected_s = time.monotonic()
        self._say_server()
        log.warning("the broker is back, at %s", self.server)

    async def _on_closed(self) -> None:
        self.closed.set()
        self._end_requests(nats.errors.ConnectionClosedError())
        for endpoint in self._endpoints:
            await endpoint.close()


def _shown(server: Srv) -> str:
    return without_password(server.uri.geturl())


def _bus_error(subject: str, error: nats.errors.Error) -> BusError:
    """Return our error for one of the library's."""
    match error:
        case nats.errors.ConnectionClosedError() | nats.errors.ConnectionDrainingError():
            return BusClosedError(subject)
        case ConnectionLostError():
            return BusError(subject, LOST)
        case nats.errors.OutboundBufferLimitError():
            return BusError(subject, _BUFFER_FULL)
        case _:
            return BusError(subject, f"the broker did not do it ({error})")


def _words(text: str) -> str:
    """Return a broker's error as a line may show it."""
    shown = "".join(c for c in text.removeprefix("nats: ").strip().strip("'") if c.isprintable())
    return shown[: limits.MAX_SAID]


def _refusal(url: str, identity: Identity | None) -> str:
    if identity is None:
        return (
            f"the broker at {url} lets nobody in without a key or a password that it knows: name your credentials with "
            "--creds, or, for a service, the folder of its keys with --keys"
        )
    return (
        f"the broker at {url} does not know the key of {identity.role} {identity.name}: it has expired, is revoked, "
        "or is of another mesh; --keys (a service's) or --creds (a person's) names what was made for this broker"
    )


def _renewal_of(identity: Identity) -> float:
    """Return when an identity's next one is asked for, by the monotonic clock: with a third of its life left, and
    members that began together not together."""
    user = user_of(identity.credentials)
    if user.exp is None:
        return math.inf
    left_s = user.exp - time.time() - (user.exp - user.iat) * random.uniform(0.3, 0.4)
    return time.monotonic() + max(0.0, left_s)


def _forget_unsent(client: Client) -> None:
    """The library would write it to a connection that is lost, fail, and leave its closing half done."""
    client._pending.clear()  # pyright: ignore[reportPrivateUsage]
    client._pending_data_size = 0  # pyright: ignore[reportPrivateUsage]
    _abort(client)


def _abort(client: Client) -> None:
    """Cut the connection: what the transport still has is not waited for."""
    transport = client._transport  # pyright: ignore[reportPrivateUsage]
    if isinstance(transport, TcpTransport) and transport._io_writer is not None:  # pyright: ignore
        transport._io_writer.transport.abort()  # pyright: ignore


def _ended_task(client: Client) -> str:
    """Return which of the tasks that a client needs in its state has ended; empty: none."""
    needed: dict[str, asyncio.Task[None] | None] = {}
    if client.is_connected:
        needed["reading"] = client._reading_task  # pyright: ignore
        needed["sending"] = client._flusher_task  # pyright: ignore
        needed["pinging"] = client._ping_interval_task  # pyright: ignore
    elif not client.is_closed:
        needed["reconnecting"] = client._reconnection_task  # pyright: ignore[reportPrivateUsage]
    return next((name for name, task in needed.items() if task is None or task.done()), "")


async def _reconnect(client: Client) -> None:
    """Begin the library's own reconnection, which brings subscriptions and endpoints back."""
    if not client.is_connected:
        client._status = Client.CONNECTED  # pyright: ignore[reportPrivateUsage]  # it takes itself for reconnecting
    await client.force_reconnect()
    _abort(client)


async def _end(task: asyncio.Task[Any]) -> None:
    """Cancel one of the library's tasks until it has ended: what swallows a cancellation goes on for ever."""
    while not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=limits.CANCEL_AGAIN_S)


async def _within(timeout_s: float, operation: Coroutine[Any, Any, None]) -> None:
    """Await one of the library's operations. Raises TimeoutError; `asyncio.wait_for` would then wait for what swallows
    its cancellation, which tries for ever to connect."""
    task = asyncio.create_task(operation)
    try:
        await asyncio.wait({task}, timeout=timeout_s)
    finally:
        await _end(task)
    if task.cancelled():
        raise TimeoutError
    task.result()


async def _cancellable(operation: Awaitable[ResultT]) -> ResultT:
    """Await one of the library's operations. It swallows a cancellation that reaches it while it flushes its buffer,
    and the task that was cancelled would go on."""
    task = asyncio.current_task()
    assert task is not None
    num_before = task.cancelling()
    try:
        return await operation
    finally:
        if task.cancelling() > num_before:
            raise asyncio.CancelledError
