"""Replies that their clients do not read: cut off in time, bounded by owner, and nobody else's trouble."""

import asyncio
import contextlib
import json
import select
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest

from services.gateway import limits
from services.gateway.server import HttpConnection
from tests.gateway.conftest import OpenRig, Rig
from tests.waiting import until

TENANTS = {"tenants": {"key-a": "a", "key-b": "b"}}
TEXT = "one two three " * 6_000
"""Its tokens as texts, one by one, are some 400 kB."""


@contextlib.asynccontextmanager
async def partitioned(
    rig: Rig, key: str, path: str, connection: str = "keep-alive", **body: Any
) -> AsyncIterator[socket.socket]:
    """A client that asks and does not read."""
    loop, peer, payload = asyncio.get_running_loop(), socket.socket(), json.dumps(body)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
    peer.setblocking(False)
    try:
        await loop.sock_connect(peer, ("127.0.0.1", int(rig.url.rsplit(":", 1)[1])))
        head = f"host: localhost\r\nauthorization: Bearer {key}\r\ncontent-type: application/json\r\n"
        head += f"connection: {connection}\r\ncontent-length: {len(payload)}\r\n\r\n"
        await loop.sock_sendall(peer, f"POST {path} HTTP/1.1\r\n{head}{payload}".encode())
        yield peer
    finally:
        peer.close()


async def tokenize(rig: Rig, key: str, text: str = TEXT) -> tuple[int, dict[str, Any]]:
    headers = {"authorization": f"Bearer {key}"}
    answer = await rig.http.post("/tokenize", headers=headers, json={"prompt": text, "return_token_strs": True})
    return answer.status_code, answer.json()


async def is_answering(peer: socket.socket) -> None:
    """Wait until the reply has begun: it is counted then."""
    poll = select.poll()
    poll.register(peer, select.POLLIN)
    await until(lambda: bool(poll.poll(0)))


async def test_a_long_reply_comes_whole(rig: Rig) -> None:
    status, found = await tokenize(rig, "any")
    assert status == 200 and "".join(found["token_strs"]) == TEXT
    assert len(json.dumps(found)) > 4 * limits.REPLY_PART_BYTES


async def test_no_more_tokens_than_a_context_has_are_spelled(rig: Rig) -> None:
    tokens = [5] * rig.model.context_length
    assert (await rig.http.post("/detokenize", json={"tokens": tokens})).status_code == 200
    answer = await rig.http.post("/detokenize", json={"tokens": [*tokens, 5]})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", "tokens")
    assert str(len(tokens)) in error["message"] and str(len(tokens) + 1) in error["message"]


async def test_unread_replies_are_bounded_by_tenant(open_rig: OpenRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_REPLIES_BYTES", 1 << 20)
    async with open_rig(gateway=TENANTS, send_buffer=4_096) as rig:
        async with partitioned(rig, "key-a", "/tokenize", prompt=TEXT, return_token_strs=True) as first:
            await is_answering(first)
            status, refused = await tokenize(rig, "key-a")
            assert (status, refused["error"]["code"]) == (503, "overloaded"), "half of it has one tenant"
            assert (await tokenize(rig, "key-a", "short"))[0] == 200, "what is short is sent at once"
            assert (await tokenize(rig, "key-b"))[0] == 200
        async with asyncio.timeout(60):
            while (await tokenize(rig, "key-a"))[0] != 200:
                pass  # until the gateway has seen that the client has gone


async def test_what_answers_must_be_is_bounded_by_tenant(open_rig: OpenRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for many answers counts once."""
    monkeypatch.setattr(limits, "MAX_LIVE_GRAMMAR_CHARACTERS", 5_000)
    async with open_rig(gateway=TENANTS) as rig:

        async def ask(key: str, letter: str, **fields: Any) -> tuple[int, dict[str, Any]]:
            headers, choices = {"authorization": f"Bearer {key}"}, [letter * 1_000, letter * 1_001]
            body = {"model": rig.model.name, "prompt": ["Q", "R"], "n": 4, "max_tokens": 2, "guided_choice": choices}
            answer = await rig.http.post("/v1/completions", headers=headers, json=body | fields)
            return answer.status_code, answer.json()

        rig.mesh.gate.clear()
        asked = [asyncio.create_task(ask(*who)) for who in (("key-a", "x"), ("key-a", "x"), ("key-a", "y"))]
        await rig.mesh.until(lambda: len(rig.mesh.runs) == 24)
        status, refused = await ask("key-a", "z")
        assert (status, refused["error"]["code"]) == (429, "rate_limit_exceeded")
        assert "guided_choice" in refused["error"]["message"]
        asked.append(asyncio.create_task(ask("key-b", "z")))
        await rig.mesh.until(lambda: len(rig.mesh.runs) == 32)
        rig.mesh.gate.set()
        assert [status for status, _ in await asyncio.gather(*asked)] == [200] * 4
        assert (await ask("key-a", "z"))[0] == 200, "there is room again"


@pytest.mark.parametrize("connection", ["keep-alive", "close"])
async def test_a_client_that_does_not_read_is_cut_off(
    open_rig: OpenRig, monkeypatch: pytest.MonkeyPatch, connection: str
) -> None:
    dropped, drop = asyncio.Event(), HttpConnection.drop

    def seen(self: HttpConnection) -> None:
        dropped.set()
        drop(self)

    monkeypatch.setattr(HttpConnection, "drop", seen)
    async with open_rig(gateway=TENANTS, send_buffer=4_096, times={"unread_s": 0.2}) as rig:
        fields = {"prompt": TEXT, "return_token_strs": True}
        async with partitioned(rig, "key-a", "/tokenize", connection=connection, **fields) as peer:
            await dropped.wait()
            loop, found = asyncio.get_running_loop(), b""
            while part := await loop.sock_recv(peer, 1 << 16):
                found += part
        head, _, body = found.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200") and 0 < len(body) < 2 * limits.REPLY_PART_BYTES
        assert (await tokenize(rig, "key-a"))[0] == 200
