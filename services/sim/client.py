"""A simulated HTTP client. It speaks ASGI to a gateway's application, without a socket.

It may close its connection, read slowly, or lose its connection because the gateway has died.
"""

import asyncio
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from services.gateway.api.routes import GatewayApp
from services.sim.platform.loop import Process, SimLoop

Message = MutableMapping[str, Any]


@dataclass
class ChoiceSeen:
    """What a client has received of one choice of the answer."""

    token_ids: list[int] = field(default_factory=list[int])
    text: str = ""
    finish_reason: str = ""


@dataclass
class Exchange:
    """One request and the client's view of its answer.

    `error`: the code of an error body or event. `done`: `[DONE]` or a whole answer was received. `is_reset`: the
    gateway's process died, or it ended the connection without an end of the answer.
    """

    choices: dict[int, ChoiceSeen] = field(default_factory=dict[int, ChoiceSeen])
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict[str, str])
    error: str = ""
    message: str = ""
    done: bool = False
    is_reset: bool = False
    hung_up: bool = False
    num_after_end: int = 0
    """Events and pieces received after the answer's end: must stay 0."""
    usage: dict[str, Any] = field(default_factory=dict[str, Any])
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    is_over: bool = False
    """The gateway is done with it too, or has died."""
    delay_s: float = 0.0
    """How long the client takes for each piece it reads."""
    _gone: asyncio.Event = field(default_factory=asyncio.Event)
    _is_stream: bool = False
    _body: bytes = b""

    def hang_up(self) -> None:
        """The client closes the connection."""
        self.hung_up = True
        self._gone.set()
        self.ended.set()

    def reset(self) -> None:
        """The gateway's process has died, or is done with the request: the connection breaks if it had no end."""
        self.is_over = True
        if not self.ended.is_set():
            self.is_reset = True
            self.ended.set()

    async def receive_more(self) -> Message:
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def next_chunk(self, message: Message) -> None:
        """Receive one ASGI message of the gateway."""
        if self.delay_s:
            await asyncio.sleep(self.delay_s)
        if self.hung_up or self.is_reset:
            return
        if self.ended.is_set():
            self.num_after_end += 1
            return
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
            self._is_stream = "event-stream" in self.headers.get("content-type", "")
            return
        self._body += message.get("body", b"")
        if self._is_stream:
            *events, self._body = self._body.split(b"\n\n")
            for event in events:
                if not event.startswith(b":"):  # a comment
                    self._read_event(event.removeprefix(b"data: "))
        if not message.get("more_body"):
            if not self._is_stream:
                self._read_whole(self._body)
            self.ended.set()

    def _read_event(self, data: bytes) -> None:
        if self.done or self.error:
            self.num_after_end += 1
        elif data == b"[DONE]":
            self.done = True
        else:
            self._read(msgspec.json.decode(data), streamed=True)

    def _read_whole(self, data: bytes) -> None:
        self._read(msgspec.json.decode(data), streamed=False)
        self.done = not self.error

    def _read(self, reply: dict[str, Any], *, streamed: bool) -> None:
        if "error" in reply:
            self.error, self.message = reply["error"].get("code") or "error", reply["error"]["message"]
            return
        for choice in reply["choices"]:
            seen = self.choices.setdefault(choice["index"], ChoiceSeen())
            if seen.finish_reason and streamed:
                self.num_after_end += 1
            seen.token_ids += choice.get("token_ids") or ()
            seen.text += choice["text"]
            seen.finish_reason = choice["finish_reason"] or ""
        self.usage = reply.get("usage") or self.usage


def post(
    loop: SimLoop, gateway: Process, app: GatewayApp, path: str, body: Mapping[str, Any], *, delay_s: float = 0.0
) -> Exchange:
    """Send a request. The returned exchange is filled while the gateway answers."""
    exchange = Exchange(delay_s=delay_s)
    payload = msgspec.json.encode(body)
    # What an ASGI server would pass to the application for this request.
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
        "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "",
        "headers": [(b"content-type", b"application/json"), (b"content-length", str(len(payload)).encode())],
        "client": ("client", 1), "server": ("gateway", 80), "state": {},
    }  # fmt: skip
    # The body comes in one message; the next `receive` waits until the client closes the connection.
    unread = [payload]

    async def receive() -> Message:
        if unread:
            return {"type": "http.request", "body": unread.pop(), "more_body": False}
        return await exchange.receive_more()

    async def answer() -> None:
        try:
            await app(scope, receive, exchange.next_chunk)  # type: ignore[arg-type]
        finally:
            exchange.reset()  # an answer that ends without its end

    # A dead gateway accepts no connection. One killed later runs no `finally`: `on_kill` ends the exchange then.
    if gateway.is_dead:
        exchange.reset()
        return exchange
    gateway.on_kill.append(exchange.reset)
    loop.spawn(gateway, answer(), "http")
    return exchange
