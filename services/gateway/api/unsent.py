"""Replies that their clients have yet to take: bounded together, and by owner."""

import asyncio
from collections import Counter
from dataclasses import dataclass, field

from litestar.types import Message, Send

from services.gateway import limits
from services.gateway.api.guard import NotNowError
from services.gateway.api.replies import JSON_TYPE, encode_reply, error_of_fail, retry_after_of


@dataclass(slots=True)
class Unsent:
    """What of one gateway's replies the connections have not taken. Each takes a little more than its client has."""

    num_bytes: Counter[str] = field(default_factory=lambda: Counter[str]())
    """By owner: of the replies that are longer than a part."""

    def has_room(self, owner: str, num_bytes: int) -> bool:
        """Return whether a reply of this owner may wait too: one always may."""
        own, all_bytes = self.num_bytes[owner] + num_bytes, self.num_bytes.total() + num_bytes
        return own == num_bytes or (own <= limits.MAX_REPLIES_BYTES // 2 and all_bytes <= limits.MAX_REPLIES_BYTES)

    def count(self, owner: str, num_bytes: int) -> None:
        self.num_bytes[owner] += num_bytes
        if self.num_bytes[owner] <= 0:
            del self.num_bytes[owner]


class BoundedReply:
    """Sends one reply in parts, as its client takes it. A whole one for which there is no room becomes a 503; a
    stream's parts wait as they are."""

    def __init__(self, unsent: Unsent, owner: str, send: Send) -> None:
        self._unsent = unsent
        self._owner = owner
        self._send = send
        self._start: Message | None = None
        """What a reply of known length begins with, until its body comes."""
        self._is_refused = False

    async def pass_on(self, message: Message) -> None:
        """As an ASGI server's."""
        if message["type"] == "http.response.start" and b"content-length" in dict(message["headers"]):
            self._start = message
        elif message["type"] == "http.response.body" and not self._is_refused:
            await self._send_body(message.get("body", b""), more=message.get("more_body", False))
        elif not self._is_refused:
            await self._send(message)

    async def _send_body(self, body: bytes, *, more: bool) -> None:
        is_long, start = len(body) > limits.REPLY_PART_BYTES, self._start
        if start is not None and is_long and not self._unsent.has_room(self._owner, len(body)):
            await self._refuse()
            return
        self._start = None
        if start is not None:
            await self._send(start)
        if not is_long:
            await self._send({"type": "http.response.body", "body": body, "more_body": more})
            return
        left = len(body)
        self._unsent.count(self._owner, left)
        try:
            for at in range(0, len(body), limits.REPLY_PART_BYTES):
                part = body[at : at + limits.REPLY_PART_BYTES]
                is_last = at + len(part) == len(body)
                await self._send({"type": "http.response.body", "body": part, "more_body": more or not is_last})
                self._unsent.count(self._owner, -len(part))
                left -= len(part)
                await asyncio.sleep(0)
        finally:
            self._unsent.count(self._owner, -left)

    async def _refuse(self) -> None:
        self._is_refused = True
        fail = NotNowError("overloaded", "other replies to you wait to be read, and this one is long").fail
        body = encode_reply(error_of_fail(fail))
        headers = [
            (b"content-type", JSON_TYPE),
            (b"content-length", str(len(body)).encode()),
            (b"retry-after", retry_after_of(fail).encode()),
        ]
        await self._send({"type": "http.response.start", "status": fail.status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body, "more_body": False})
