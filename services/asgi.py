"""What small servers beside the gateway have in common (ASGI): a question in a body, an answer as JSON."""

from http import HTTPStatus
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from litestar.types import Receive, Send


class RefusedError(Exception):
    """What was asked is no question."""

    def __init__(self, status: HTTPStatus, text: str) -> None:
        super().__init__(text)
        self.status = status


class Refusal(msgspec.Struct, frozen=True):
    """Why a question is not answered."""

    error: str


async def body_of(receive: "Receive", max_bytes: int) -> bytes:
    """Return the body. Raises RefusedError for one that is too long, and where it does not come."""
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise RefusedError(HTTPStatus.BAD_REQUEST, "the body has not come")
        parts.append(message.get("body", b""))
        if sum(map(len, parts)) > max_bytes:
            raise RefusedError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a body has at most {max_bytes} bytes")
        if not message.get("more_body", False):
            return b"".join(parts)


async def reply(send: "Send", status: HTTPStatus, answer: msgspec.Struct | bytes) -> None:
    """Send an answer: JSON, or a text as it is."""
    body = answer if isinstance(answer, bytes) else msgspec.json.encode(answer)
    kind = b"text/plain" if isinstance(answer, bytes) else b"application/json"
    headers = [(b"content-type", kind), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})
