"""Where one request ends and the next one begins: one request has one answer, whatever its headers say and however its
bytes are divided."""

import asyncio
import contextlib
import json
from urllib.parse import urlsplit

import pytest

from tests.gateway.conftest import Rig

BODY = b'{"prompt": "Hi"}'
NEXT = b"GET /version HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
WHOLE, CHUNKED = (
    b"Content-Length: 16\r\n\r\n" + BODY,
    b"Transfer-Encoding: chunked\r\n\r\n9\r\n%b\r\n7;x=y\r\n%b\r\n0\r\n",
)
IGNORED = [
    b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAAAAAMAAAAA\r\n",
    b"Connection: keep-alive, Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n",
    b"Upgrade: TLS/1.0, x\r\nUpgrade: h2c\r\nConnection: upgrade\r\nconnection: keep-alive\r\n",
    b"Proxy-Connection: upgrade\r\nUPGRADE: h2c\r\nX-Empty:\r\n",
    b"Connection: Upgrade\r\nUpgrade:\r\n",
    b"Upgrade: h2c\r\n",
    b"Connection: Upgrade\r\n",
    b"Expect: 100-continue\r\n",
    b"Expect: 100-Continue\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n",
    b"Expect: another-thing\r\n",
    b"TE: trailers, gzip\r\nTrailer: x-sum\r\nKeep-Alive: timeout=5\r\n",
]  # fmt: skip
REFUSED = [
    b"Transfer-Encoding: gzip, chunked",
    b"Transfer-Encoding: chunked, identity",
    b"Transfer-Encoding: chunked, chunked",
    b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked",
    b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity",
    b"Transfer-Encoding: identity",
    b"Transfer-Encoding: gzip",
    b"Transfer-Encoding: xchunked",
    b"Transfer-Encoding: \"chunked\"",
    b"Transfer-Encoding:",
    b"Transfer-Encoding : chunked",
    b"Transfer-Encoding: chunked\r\nContent-Length: 16",
    b"Content-Length: 16\r\nTransfer-Encoding: chunked",
    b"Content-Length: 16\r\nContent-Length: 16",
    b"Content-Length: 16, 16",
    b"Content-Length: +16",
    b"Content-Length: 0x10",
    b"Content-Length: 1 6",
    b"Content-Length: -1",
    b"Content-Length: 16\r\n folded",
    b"Content-Length: 99999999999999999999",
]  # fmt: skip


def post(headers: bytes, rest: bytes = WHOLE, version: bytes = b"1.1") -> bytes:
    top = b"POST /tokenize HTTP/%b\r\nHost: localhost\r\nContent-Type: application/json\r\n" % version
    return top + headers + rest


def chunked(trailers: bytes = b"") -> bytes:
    return CHUNKED % (BODY[:9], BODY[9:]) + trailers + b"\r\n"


async def answers_to(rig: Rig, *parts: bytes) -> list[tuple[int, bytes]]:
    """Send these bytes, each part in a segment of its own, and return status and body of all answers until the
    connection ends."""
    url = urlsplit(rig.url)
    reader, writer = await asyncio.open_connection(url.hostname, url.port)

    async def read_all() -> bytes:
        read = bytearray()
        with contextlib.suppress(ConnectionError):  # what is sent behind the end
            while data := await reader.read(65_536):
                read += data
        return bytes(read)

    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        reading = tasks.create_task(read_all())
        for part in parts:
            writer.write(part)
            for _ in range(3):  # the gateway, of the same event loop, reads it
                await asyncio.sleep(0)
        left = await reading
        writer.close()
    found: list[tuple[int, bytes]] = []
    while left:
        head, _, left = left.partition(b"\r\n\r\n")
        top, *lines = head.split(b"\r\n")
        status = int(top.split()[1])
        if status != 100:
            headers = {name.lower(): value for name, _, value in (line.partition(b": ") for line in lines)}
            num_bytes = int(headers[b"content-length"])
            found.append((status, left[:num_bytes]))
            left = left[num_bytes:]
    return found


def statuses(answers: list[tuple[int, bytes]]) -> list[int]:
    return [status for status, _ in answers]


@pytest.mark.parametrize("rest", [WHOLE, chunked(), chunked(b"x-sum: 1\r\nUpgrade: h2c\r\n")])
@pytest.mark.parametrize("headers", IGNORED)
async def test_a_header_that_the_parser_gives_a_meaning(rig: Rig, headers: bytes, rest: bytes) -> None:
    asked = post(headers, rest)
    for parts in ([asked + NEXT], [asked, NEXT], [asked + asked + NEXT]):
        found = await answers_to(rig, *parts)
        assert statuses(found) == [200] * (b"".join(parts).count(b"HTTP/1.1\r\n"))
        assert all(json.loads(body)["count"] > 0 for _, body in found[:-1]) and b"version" in found[-1][1]


@pytest.mark.parametrize("rest", [WHOLE, chunked()])
@pytest.mark.parametrize("headers", [IGNORED[0], IGNORED[8]])
async def test_it_may_be_divided_anywhere(rig: Rig, headers: bytes, rest: bytes) -> None:
    asked = post(headers, rest)
    for at in range(1, len(asked)):
        found = await answers_to(rig, asked[:at], asked[at:] + NEXT)
        assert statuses(found) == [200, 200], (asked[:at], found)
    found = await answers_to(rig, *(bytes([byte]) for byte in asked + NEXT))
    assert statuses(found) == [200, 200]


@pytest.mark.parametrize("method", [b"GET", b"HEAD", b"OPTIONS", b"DELETE"])
async def test_a_request_without_a_body_may_ask_for_another_protocol(rig: Rig, method: bytes) -> None:
    asked = method + b" /version HTTP/1.1\r\nHost: localhost\r\n" + IGNORED[0] + b"\r\n"
    url = urlsplit(rig.url)
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    writer.write(asked + NEXT)
    async with asyncio.timeout(20):
        assert (await reader.read()).count(b"HTTP/1.1 ") == 2
    writer.close()
    await writer.wait_closed()


@pytest.mark.parametrize("upgrade", [b"", IGNORED[0]])
@pytest.mark.parametrize("framing", REFUSED)
async def test_a_body_that_may_be_read_in_two_ways_is_refused(rig: Rig, framing: bytes, upgrade: bytes) -> None:
    for rest in (BODY, b"10\r\n" + BODY + b"\r\n0\r\n\r\n", b"0\r\n\r\n"):
        asked = post(upgrade + framing + b"\r\n\r\n", rest)
        for parts in ([asked + NEXT], [asked, NEXT], [asked[: -len(rest)], rest, NEXT]):
            assert statuses(await answers_to(rig, *parts)) == [400], parts


@pytest.mark.parametrize(
    "asked",
    [
        b"CONNECT localhost:443 HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"CONNECT localhost:443 HTTP/1.1\r\nHost: localhost\r\n" + IGNORED[0] + WHOLE,
        b"CONNECT localhost:443 HTTP/1.1\r\nHost: localhost\r\n" + chunked(),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        post(b"", b"Transfer-Encoding: chunked\r\n\r\nten\r\n"),
        post(b"", chunked(), version=b"1.0"),
    ],
)
async def test_what_is_refused_ends_the_connection(rig: Rig, asked: bytes) -> None:
    first = post(IGNORED[0])
    assert statuses(await answers_to(rig, asked + NEXT)) == [400]
    assert statuses(await answers_to(rig, asked, NEXT)) == [400]
    # What came before it is answered first.
    assert statuses(await answers_to(rig, first + asked + NEXT)) == [200, 400]
    assert statuses(await answers_to(rig, first + first, asked, NEXT)) == [200, 200, 400]


async def test_a_trailer_is_no_header(rig: Rig) -> None:
    asked = post(b"", chunked(b"Content-Type: text/plain\r\nHost: evil.example\r\nExpect: 100-continue\r\n"))
    assert statuses(await answers_to(rig, asked + NEXT)) == [200, 200]
    unsaid = post(b"", chunked(b"Content-Type: application/json\r\n")).replace(b"application/json", b"text/plain", 1)
    assert statuses(await answers_to(rig, unsaid + NEXT)) == [415]
    # It ends the connection for the parser, so it does for the client.
    assert statuses(await answers_to(rig, post(b"", chunked(b"Connection: close\r\n")) + NEXT)) == [200]


async def test_an_answer_without_the_body_that_was_held_back_ends_the_connection(rig: Rig) -> None:
    asked = post(b"Expect: 100-continue\r\n", b"Content-Length: 16\r\n\r\n").replace(b"/tokenize", b"/nowhere")
    assert statuses(await answers_to(rig, asked, NEXT)) == [404]
