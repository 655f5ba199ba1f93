"""Who is let in: by what a client calls us, by its key, by what it sends. And the answer to somebody who is not."""

import asyncio
import contextlib
import hashlib
import secrets
from collections.abc import Iterable, Mapping
from typing import Any, cast, get_args

from litestar.types import ASGIApp, Receive, Scope, Send

from dataplane.addresses import address_of, is_loopback
from services.config import SplitMode
from services.gateway import limits
from services.gateway.api.invalid import InvalidRequestError
from services.gateway.api.replies import (
    JSON_TYPE,
    ErrorReply,
    encode_reply,
    error_of_fail,
    error_of_invalid,
    retry_after_of,
)
from services.gateway.request.events import FailRequest

Headers = Mapping[str, str]

SPLIT_HEADER = "x-kvmesh-split"


class NotNowError(Exception):
    """A request that may come again in a moment: `fail` says why it is refused. 429: as others of its sender go on."""

    def __init__(self, code: str, message: str, status: int = 503) -> None:
        super().__init__(message)
        self.fail = FailRequest(code, message, status, limits.DEFAULT_RETRY_AFTER_MS)


class EarlyRefusal:
    """An ASGI response to what has not been read to its end; the connection is closed after it, once what the client
    still sends has ended or `linger_s` has passed."""

    def __init__(self, reply: ErrorReply, status: int, linger_s: float, headers: Headers | None = None) -> None:
        self._linger_s = linger_s
        self._body = encode_reply(reply)
        self._status = status
        named = {"connection": "close", "content-length": str(len(self._body)), **(headers or {})}
        self._headers = [(b"content-type", JSON_TYPE), *((k.encode(), v.encode()) for k, v in named.items())]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self._status, "headers": self._headers})
        await send({"type": "http.response.body", "body": self._body, "more_body": True})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._linger_s):
                while _has_more(await receive()):
                    pass
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class HostGuard:
    """Lets in who calls this gateway by a name of its own.

    A page of another site may have its own name lead to our address (DNS rebinding), and could then ask here as if it
    were ours; `Host` still has that site's name. A loopback address, and the one that the client has connected to, are
    nobody's name.
    """

    def __init__(self, app: ASGIApp, hosts: Iterable[str], linger_s: float) -> None:
        self._app = app
        self._linger_s = linger_s
        self._hosts = {"localhost", *(host.lower().rstrip(".") for host in hosts)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        names = [value.decode("latin-1") for key, value in scope["headers"] if key == b"host"]
        if len(names) == 1 and self._is_ours(_without_port(names[0]), scope):
            # The server leaves out the body of what is answered to HEAD.
            asked = cast(Scope, {**scope, "method": "GET"}) if cast(Any, scope)["method"] == "HEAD" else scope
            await self._app(asked, receive, send)
            return
        host = repr(names[0]) if names else "nothing"
        message = f"the header Host says {host}, which is no name of this gateway: add it to gateway.hosts in mesh.toml"
        reply = error_of_invalid(InvalidRequestError(message, code="unknown_host"))
        await EarlyRefusal(reply, 421, self._linger_s)(scope, receive, send)

    def _is_ours(self, name: str, scope: Scope) -> bool:
        if name in self._hosts or is_loopback(name):
            return True
        address, server = address_of(name), scope["server"]
        return address is not None and server is not None and address == address_of(server[0])


async def refuse_busy(linger_s: float, scope: Scope, receive: Receive, send: Send) -> None:
    """An ASGI application for a connection that is one too many."""
    fail = NotNowError("overloaded", "this gateway answers as many requests as it can").fail
    headers = {"retry-after": retry_after_of(fail)}
    await EarlyRefusal(error_of_fail(fail), fail.status, linger_s, headers)(scope, receive, send)


class ApiKeys:
    """The tenants' keys, each under a digest that only this process can make: one look finds a key, however many there
    are, and how long it takes reveals nothing of any."""

    def __init__(self, tenants: Mapping[str, str]) -> None:
        self._secret = secrets.token_bytes(hashlib.blake2b.MAX_KEY_SIZE)
        self._tenants = {self._digest(key): tenant for key, tenant in tenants.items()}

    def tenant_of(self, headers: Headers) -> str:
        """Return whose request this is; "" where there are no keys. Raises InvalidRequestError for a key that is
        missing or unknown."""
        if not self._tenants:
            return ""
        scheme, _, key = headers.get("authorization", "").partition(" ")
        tenant = self._tenants.get(self._digest(key.strip())) if scheme.lower() == "bearer" else None
        if tenant is None:
            raise InvalidRequestError("this API key is missing or unknown", None, "invalid_api_key", 401)
        return tenant

    def _digest(self, key: str) -> bytes:
        return hashlib.blake2b(key.encode(), key=self._secret).digest()


def check_json(headers: Headers) -> None:
    """Raises InvalidRequestError where a body is not declared as JSON: any page may have a browser send other types
    here, but for JSON the browser asks first whether the page may."""
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        message = f"the body must be sent as Content-Type: application/json, not {kind or 'without a type'}"
        raise InvalidRequestError(message, None, "unsupported_media_type", 415)


def asks_to_split(headers: Headers) -> bool:
    """Return whether a client wants its request to be served by two workers or to fail. Raises InvalidRequestError."""
    given = headers.get(SPLIT_HEADER, "auto").strip().lower()
    if given not in get_args(SplitMode):
        raise InvalidRequestError(f"the header {SPLIT_HEADER} says `auto` or `always`, not {given!r:.80}")
    return given == "always"


def _without_port(host: str) -> str:
    """Return a Host header's name, in lower case and without brackets."""
    name, _, port = host.strip().lower().rpartition(":")
    if not name or not port.isdecimal():  # there is no port: the colon is none, or is within an address
        name = host.strip().lower()
    return name.removeprefix("[").removesuffix("]").rstrip(".")


def _has_more(message: Mapping[str, Any]) -> bool:
    return message["type"] == "http.request" and bool(message.get("more_body"))
