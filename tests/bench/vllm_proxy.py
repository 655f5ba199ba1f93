"""The proxy between vLLM's own prefill and decode server: `python -m tests.bench.vllm_proxy PORT PREFILL DECODE`.

A request goes to the prefill server for one token that nobody sees; the answer says where its KV lies and goes with the
request to the decode server, whose stream is passed on as it comes. Everything else is the decode server's to answer.
"""

import sys
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import httpx
import msgspec
import uvicorn

from services.bench.drive.http_client import open_http

Message = MutableMapping[str, Any]
COMPLETIONS = "/v1/completions"
ASK_FOR_KV: dict[str, object] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""What vLLM's connectors are told where another server is to go on."""


def prefill_body(body: dict[str, Any]) -> dict[str, Any]:
    """Return the request as the prefill server gets it: one token, in one piece, and its KV kept."""
    asked = {name: value for name, value in body.items() if name not in ("stream_options", "return_token_ids")}
    return asked | {"max_tokens": 1, "stream": False, "kv_transfer_params": ASK_FOR_KV}


def decode_body(body: dict[str, Any], prefilled: dict[str, Any]) -> dict[str, Any]:
    """Return the request as the decode server gets it: with where its KV lies. Raises KeyError where that was not
    said."""
    return body | {"kv_transfer_params": prefilled["kv_transfer_params"]}


class Proxy:
    """An ASGI application."""

    def __init__(self, http: httpx.AsyncClient, prefill: str, decode: str) -> None:
        self._http = http
        self._prefill = prefill
        self._decode = decode

    async def __call__(
        self,
        scope: Message,
        receive: Callable[[], Awaitable[Message]],
        send: Callable[[Message], Awaitable[None]],
    ) -> None:
        assert scope["type"] == "http"
        path, body = scope["path"], await _body(receive)
        if path == COMPLETIONS:
            asked = msgspec.json.decode(body)
            reply = await self._http.post(f"{self._prefill}{path}", content=msgspec.json.encode(prefill_body(asked)))
            if reply.status_code != 200:
                await _answer(send, reply.status_code, reply.content)
                return
            body = msgspec.json.encode(decode_body(asked, msgspec.json.decode(reply.content)))
        async with self._http.stream(scope["method"], f"{self._decode}{path}", content=body) as response:
            await send(_start(response.status_code, response.headers.get("content-type", "")))
            async for piece in response.aiter_bytes():
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b""})


async def _body(receive: Callable[[], Awaitable[Message]]) -> bytes:
    parts: list[bytes] = []
    while True:
        message = await receive()
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)


async def _answer(send: Callable[[Message], Awaitable[None]], status: int, body: bytes) -> None:
    await send(_start(status, "application/json"))
    await send({"type": "http.response.body", "body": body})


def _start(status: int, content_type: str) -> Message:
    return {"type": "http.response.start", "status": status, "headers": [(b"content-type", content_type.encode())]}


def main() -> None:
    port, prefill, decode = sys.argv[1:]
    http = open_http()
    http.headers["content-type"] = "application/json"
    application: Any = Proxy(http, prefill, decode)
    uvicorn.run(application, host="127.0.0.1", port=int(port), log_level="error", access_log=False, lifespan="off")


if __name__ == "__main__":
    main()
