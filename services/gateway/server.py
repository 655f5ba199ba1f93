"""The HTTP server: uvicorn's, with the limits on connections that it lacks.

A connection either owes us a request or has one. While it owes one it has a limited time, and is the first to be closed
where there are too many connections: the longest idle one, or, where most connections owe us the rest of a body, the
first one of whoever has most of these. What it may take once it has one, the application decides.
"""

import asyncio
import contextlib
import functools
import resource
import socket
import ssl
from collections import Counter, OrderedDict, deque
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httptools
import uvicorn
from litestar.types import ASGIApp, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from dataplane.addresses import BACKLOG
from services.errors import UserError
from services.gateway import limits
from services.gateway.api.guard import refuse_busy
from services.times import GatewayTimes
from services.trust.certificates import CertificateFile

Owner = tuple[str, str]
"""The client's address, and the key that it shows."""


class Beginnings:
    """Requests with bodies: a few begin in each turn of the loop, of each owner in turn. So a burst of one owner's
    holds up nobody else for longer than it takes to parse."""

    def __init__(self) -> None:
        self._lines: OrderedDict[Owner, deque[asyncio.Future[None]]] = OrderedDict()
        """The owner whose turn is next in front."""

    async def turn(self, owner: Owner) -> None:
        """Return when it is this request's turn."""
        loop = asyncio.get_running_loop()
        if not self._lines:
            loop.call_soon(self._begin_some, loop)
        waiting: asyncio.Future[None] = loop.create_future()
        self._lines.setdefault(owner, deque()).append(waiting)
        await waiting

    def _begin_some(self, loop: asyncio.AbstractEventLoop) -> None:
        for _ in range(limits.BEGUN_A_TURN):
            if not self._lines:
                return
            owner, line = self._lines.popitem(last=False)
            if not (waiting := line.popleft()).done():
                waiting.set_result(None)
            if line:
                self._lines[owner] = line
        if self._lines:
            loop.call_soon(self._begin_some, loop)


@dataclass(slots=True)
class Connections:
    """The connections of one server. Those without a request are in `waiting`, the longest idle one first."""

    max_connections: int
    times: GatewayTimes
    open: "set[HttpConnection]" = field(default_factory=lambda: set[HttpConnection]())
    waiting: "dict[HttpConnection, None]" = field(default_factory=lambda: dict[HttpConnection, None]())
    reading: "dict[HttpConnection, Owner]" = field(default_factory=lambda: dict[HttpConnection, Owner]())
    """Those whose body has not ended, the first one first."""
    beginnings: Beginnings = field(default_factory=Beginnings)
    last_closed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set whenever the last open one is closed."""

    @property
    def max_requests(self) -> int:
        return self.max_connections - limits.SPARE_CONNECTIONS

    def make_room(self) -> None:
        """Close connections that owe us something where there are too many."""
        while len(self.open) > self.max_connections and (self.waiting or self.reading):
            read_most = 2 * len(self.reading) > self.max_connections
            (self._greediest if read_most or not self.waiting else next(iter(self.waiting))).drop()

    @property
    def _greediest(self) -> "HttpConnection":
        """The first of those whose bodies have not ended, of the address that has most of them, and of its keys."""
        of_address = Counter(address for address, _ in self.reading.values())
        most, of_key = max(of_address.values()), Counter(self.reading.values())
        owners = [owner for owner in of_key if of_address[owner[0]] == most]
        greedy = max(owners, key=of_key.__getitem__)
        return next(connection for connection, owner in self.reading.items() if owner == greedy)


class HttpConnection(HttpToolsProtocol):
    """One connection."""

    def __init__(self, connections: Connections, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._application: Any = self.app
        self._refuse_busy = functools.partial(refuse_busy, connections.times.linger_s)
        self._all = connections
        self._timer: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None
        """Until its client takes what was written."""
        self._num_wire_bytes = self._num_body_bytes = 0
        """Of the message that is coming: all that was parsed, and what of it was body."""
        self._is_broken = False
        """What came cannot be parsed: nothing behind it is looked at."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        self._all.open.add(self)
        self._wait(self._all.times.head_s)
        self._all.make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self.loop.call_later(self._all.times.unread_s, self.drop)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_watching()

    def drop(self) -> None:
        """Close the connection at once."""
        self._forget()
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        # A little at a time, so that what the parser keeps of heads, chunk sizes and trailers stays within the bound.
        for at in range(0, len(data), limits.PARSED_BYTES):
            if self._is_broken or self.transport.is_closing():
                return
            part = data[at : at + limits.PARSED_BYTES]
            self._num_wire_bytes += len(part)
            self._parse(part)
            if self._num_wire_bytes > limits.MAX_HEAD_BYTES + limits.WIRE_BYTES_A_BYTE * self._num_body_bytes:
                self.drop()

    def _parse(self, data: bytes) -> None:
        """Like uvicorn's own, but a request that asks for another protocol (`Upgrade`) is parsed once more, as one
        that does not: a server may ignore that (RFC 9110, 7.8). The parser takes all behind such a head for the other
        protocol's, a body too."""
        self._unset_keepalive_if_required()
        try:
            while data:
                try:
                    self.parser.feed_data(data)
                    return
                except httptools.HttpParserUpgrade as upgrade:
                    lines = [b": ".join(header) for header in self.headers if header[0] != b"upgrade"]
                    top = b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, self.scope["http_version"].encode())
                    data = b"\r\n".join([top, *lines, b"", data[upgrade.args[0] :]])
                    self.parser = httptools.HttpRequestParser(self)
                    self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn has it
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")

    def send_400_response(self, msg: str) -> None:
        """Refuse what cannot be parsed, once the requests before it are answered; then the connection is closed."""
        self._is_broken = True
        self._all.reading.pop(self, None)
        cycle: Any = self.cycle
        if cycle is not None and not cycle.response_complete:
            if not cycle.more_body:
                return
            if self.pipeline:
                self.pipeline.popleft()  # it is its body that is broken
                return
            if cycle.response_started:
                self.transport.close()
                return
        super().send_400_response(msg)

    # What is raised in these ends the parser, and what came is refused with a 400.

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= limits.MAX_PIPELINED:
            raise ValueError("too many requests at once")
        self._num_wire_bytes = self._num_body_bytes = 0
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if len(self.headers) >= limits.MAX_HEADERS:  # trailers are among them
            raise ValueError("too many headers")
        super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        self._num_body_bytes += len(body)
        super().on_body(body)

    def on_headers_complete(self) -> None:
        if self.parser.get_method() == b"CONNECT":
            raise ValueError("no proxy")
        if self.parser.should_upgrade():
            self.scope["http_version"] = self.parser.get_http_version()
            return
        codings = [value.lower() for name, value in self.headers if name == b"transfer-encoding"]
        if codings and (codings != [b"chunked"] or self.parser.get_http_version() == "1.0"):
            raise ValueError("a transfer encoding that is not known")
        self._stop_waiting()
        is_busy = len(self.tasks) - len(self._all.reading) >= self._all.max_requests
        headers = dict(self.headers)
        owner = self._all.reading[self] = (self.client[0] if self.client else "", str(headers.get(b"authorization")))
        self.app: Any = self._refuse_busy if is_busy else self._application
        if codings or headers.get(b"content-length", b"0") != b"0":
            self.app = functools.partial(self._in_turn, self.app, owner)
        super().on_headers_complete()
        self.headers = self.headers.copy()  # trailers are no headers of the request
        cycle: Any = self.cycle
        if self.scope["http_version"] == "1.0":
            cycle.send = functools.partial(_send_until_closed, cycle, cycle.send)
        if self.expect_100_continue:
            cycle.send = functools.partial(_send_unread, cycle, cycle.send)

    async def _in_turn(self, app: ASGIApp, owner: Owner, *asked: Any) -> None:
        await self._all.beginnings.turn(owner)
        await app(*asked)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._all.reading.pop(self, None)
        super().on_message_complete()
        if not self.parser.should_keep_alive():  # a trailer may say so
            self.cycle.keep_alive = False
            if self.cycle.response_complete:
                self.transport.close()

    def on_response_complete(self) -> None:
        was_last = not self.pipeline
        super().on_response_complete()
        times = self._all.times
        if self.transport.is_closing():
            self._wait(times.unread_s)  # it is closed once its client has taken the rest
        elif was_last and self._is_broken:
            super().send_400_response("Invalid HTTP request received.")
        elif was_last:
            self._wait(times.keep_alive_s + times.head_s)  # uvicorn's own timer ends with the first byte

    def _wait(self, timeout_s: float) -> None:
        self._stop_waiting()
        self._all.waiting[self] = None
        self._timer = self.loop.call_later(timeout_s, self._is_over)

    def _is_over(self) -> None:
        """Its time is over. Where this process has stood still the request may have come meanwhile: it is read first,
        and only then is the connection dropped."""
        self._timer = self.loop.call_later(self._all.times.last_look_s, self.drop)

    def _stop_waiting(self) -> None:
        self._all.waiting.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _stop_watching(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _forget(self) -> None:
        self._stop_waiting()
        self._stop_watching()
        self._all.reading.pop(self, None)
        self._all.open.discard(self)
        if not self._all.open:
            self._all.last_closed.set()


async def _send_until_closed(cycle: Any, send: Send, message: Any) -> None:
    """Send to a client of HTTP/1.0, which knows no chunks: what has no length ends with the connection."""
    if message["type"] == "http.response.start":
        if all(name.lower() != b"content-length" for name, _ in message["headers"]):
            cycle.chunked_encoding = False
    elif cycle.chunked_encoding is False and not cycle.expected_content_length:
        cycle.expected_content_length = len(message.get("body", b""))
    await send(message)


async def _send_unread(cycle: Any, send: Send, message: Any) -> None:
    """Send to a client that asked whether to send its body: an answer without it ends the connection, as what comes
    next may be that body or another request."""
    if cycle.waiting_for_100_continue:
        cycle.keep_alive = False
    await send(message)


class Server(uvicorn.Server):
    """Uvicorn without signal handlers: whoever runs the gateway owns the signals. `ready`: connections are taken.

    `tls` None: http.
    """

    def __init__(self, app: ASGIApp, connections: Connections, tls: ssl.SSLContext | None) -> None:
        options = uvicorn.Config(
            app,  # pyright: ignore[reportArgumentType]
            http="httptools",
            loop="none",
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",  # a warning for each line of rubbish that anybody sends would fill the log
            access_log=False,
            server_header=False,
            backlog=BACKLOG,
            timeout_keep_alive=connections.times.keep_alive_s,  # pyright: ignore[reportArgumentType]
        )
        super().__init__(options)
        self.ready = asyncio.Event()
        self._stopping = asyncio.Event()
        self._all = connections
        self._tls = tls

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Like uvicorn's own, which makes no connections of another class and gives a TLS handshake a minute."""
        loop = asyncio.get_running_loop()
        handshake_s = self._all.times.head_s if self._tls else None
        self.servers = [
            await loop.create_server(
                self._connection, sock=sock, ssl=self._tls, backlog=BACKLOG, ssl_handshake_timeout=handshake_s
            )
            for sock in sockets or ()
        ]
        self.started = True
        self.ready.set()

    def stop(self) -> None:
        """Let `serve` end: nobody new is served, and a connection is closed when its request has ended."""
        self._stopping.set()

    async def main_loop(self) -> None:
        """Like uvicorn's own, which looks ten times a second whether it is to end."""
        while not self._stopping.is_set():
            await self.on_tick(0)  # the date that answers have
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._stopping.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Like uvicorn's own, which takes at least 0.1 s."""
        for server in self.servers:
            server.close()
        for connection in list(self._all.open):
            connection.shutdown()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._all.times.drain_s + self._all.times.linger_s):
                while self._all.open:
                    self._all.last_closed.clear()
                    await self._all.last_closed.wait()
                await asyncio.gather(*self.server_state.tasks, return_exceptions=True)
        for task in self.server_state.tasks:
            task.cancel()

    def _connection(self) -> HttpConnection:
        return HttpConnection(self._all, config=self.config, server_state=self.server_state, app_state={})


def tls_context(cert: str, key: str) -> ssl.SSLContext | None:
    """Return what serves https with this certificate; None without one. Raises UserError."""
    if not cert:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        # A key that is locked by a password would ask for it at the terminal.
        context.load_cert_chain(cert, key, password=lambda: b"")
    except (OSError, ValueError) as error:  # an ssl.SSLError is an OSError
        reason = error.strerror or str(error) if isinstance(error, OSError) else str(error)
        raise UserError(
            f"no https with certificate {cert} and key {key}: {reason}; both must be PEM files that fit each other"
        ) from error
    return context


def certificate_of(context: ssl.SSLContext, cert: str, key: str) -> CertificateFile:
    """Return the certificate that a context serves, to be read again when its files change."""

    def load() -> None:
        tls_context(cert, key)  # it raises before the context in use has half of a pair
        context.load_cert_chain(cert, key)

    return CertificateFile(Path(cert), load, Path(key))


def connections_for(wanted: int, times: GatewayTimes) -> Connections:
    """Return the limit on connections: so many, or for as many as the process has descriptors. Raises UserError where
    that is too few to serve."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = wanted if allowed == resource.RLIM_INFINITY else min(wanted, allowed - limits.RESERVED_DESCRIPTORS)
    if found < limits.MIN_CONNECTIONS:
        needed = limits.RESERVED_DESCRIPTORS + limits.MIN_CONNECTIONS
        raise UserError(f"a gateway needs {needed} open files, and may have {allowed}: raise `ulimit -n`")
    return Connections(found, times)
