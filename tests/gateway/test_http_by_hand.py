"""What proxies and plain clients send: packed bodies, bodies that stop, HEAD, wrong methods, HTTP/1.0."""

import asyncio
import gzip
import json
import zlib
from urllib.parse import urlsplit

import pytest

from services.gateway import limits
from services.gateway.api.bodies import Bodies
from tests.gateway.conftest import OpenRig, Rig

C, H = "/v1/completions", "/v1/chat/completions"
PACKERS = {"gzip": gzip.compress, "x-gzip": gzip.compress, "deflate": zlib.compress, "identity": bytes}
JSON = {"content-type": "application/json"}


def body(rig: Rig, **more: object) -> bytes:
    return json.dumps({"model": rig.model.name, "prompt": "Hi", "max_tokens": 3} | more).encode()


def head_of(version: str, num_bytes: int, more: str = "") -> bytes:
    head = f"POST {C} HTTP/{version}\r\nHost: localhost\r\nContent-Type: application/json\r\n{more}"
    return f"{head}Content-Length: {num_bytes}\r\n\r\n".encode()


async def by_hand(rig: Rig, *parts: bytes | float) -> bytes:
    """Send bytes, wait where there is a number, and return all that comes until the connection ends."""
    url = urlsplit(rig.url)
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    for part in parts:
        if isinstance(part, float):
            await asyncio.sleep(part)
        else:
            writer.write(part)
            await writer.drain()
    async with asyncio.timeout(20):
        answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    return answer


@pytest.mark.parametrize("encoding", PACKERS)
@pytest.mark.parametrize("path", [C, "/tokenize"])
async def test_a_packed_body(rig: Rig, encoding: str, path: str) -> None:
    pack = PACKERS[encoding]
    asked = body(rig) if path == C else b'{"prompt": "Hi"}'
    answer = await rig.http.post(path, content=pack(asked), headers=JSON | {"content-encoding": encoding})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("encoding", ["br", "zstd", "gzip, gzip", "x" * 1000])
async def test_an_encoding_that_is_not_known(rig: Rig, encoding: str) -> None:
    answer = await rig.http.post(C, content=body(rig), headers=JSON | {"content-encoding": encoding})
    assert (answer.status_code, answer.headers["accept-encoding"]) == (415, "gzip, deflate, identity")
    assert "gzip, deflate" in answer.json()["error"]["message"]


async def test_a_packed_body_that_is_broken(rig: Rig) -> None:
    packed = gzip.compress(body(rig))
    for broken in (packed[:-5], packed + b"more", packed + packed, b"no gzip", b""):
        answer = await rig.http.post(C, content=broken, headers=JSON | {"content-encoding": "gzip"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_encoding")


async def test_a_bomb_is_never_held(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_BODY_BYTES", 2 * 1024 * 1024)
    taken: list[int] = []
    packed = gzip.compress(b'{"prompt": "' + b"x" * 200_000_000)
    assert len(packed) < 250_000
    take = Bodies._take
    monkeypatch.setattr(Bodies, "_take", lambda self, share, n: (taken.append(n), take(self, share, n)))
    answer = await rig.http.post(C, content=packed, headers=JSON | {"content-encoding": "gzip"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")
    assert max(taken) <= limits.MAX_BODY_BYTES


@pytest.mark.times(body_silence_s=0.3, linger_s=0.2)
async def test_a_body_that_stops_coming(rig: Rig) -> None:
    head = head_of("1.1", 900)
    answer = await by_hand(rig, head, b'{"model"')
    assert answer.startswith(b"HTTP/1.1 408 ") and b'"request_timeout"' in answer and b"connection: close" in answer


@pytest.mark.times(body_silence_s=1.0)
async def test_a_slow_body_is_taken(rig: Rig) -> None:
    asked = body(rig)
    head = head_of("1.1", len(asked), "Connection: close\r\n")
    parts = [part for at in range(0, len(asked), 5) for part in (asked[at : at + 5], 0.1)]
    assert (await by_hand(rig, head, *parts)).startswith(b"HTTP/1.1 200 ")


GETS = [
    "/v1/models",
    "/v1/models/demo_model",
    "/v1/capabilities",
    "/health",
    "/version",
    "/schema/openapi.json",
    "/docs",
]


@pytest.mark.parametrize("path", GETS)
async def test_head_is_get_without_the_body(rig: Rig, path: str) -> None:
    url = urlsplit(rig.url)
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    heads: list[bytes] = []
    for method in ("HEAD", "HEAD", "GET"):  # on one connection
        writer.write(f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        head = await reader.readuntil(b"\r\n\r\n")
        heads.append(b"\r\n".join(line for line in head.split(b"\r\n") if not line.startswith(b"date:")))
    assert heads[0] == heads[1] == heads[2] and b"content-length" in heads[0]
    writer.close()
    await writer.wait_closed()


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [("GET", C, "POST"), ("HEAD", H, "POST"), ("PUT", C, "POST"), ("DELETE", "/v1/responses", "POST"),
     ("POST", "/v1/models", "GET"), ("POST", "/health", "GET"), ("PATCH", "/tokenize", "POST")],
)  # fmt: skip
async def test_a_wrong_method_is_told_the_right_ones(rig: Rig, method: str, path: str, allow: str) -> None:
    answer = await rig.http.request(method, path)
    assert answer.status_code == 405
    assert allow in answer.headers["allow"].replace(" ", "").split(",")


@pytest.mark.parametrize("stream", [False, True])
async def test_http_1_0(rig: Rig, stream: bool) -> None:
    asked = body(rig, stream=stream)
    answer = await by_hand(rig, head_of("1.0", len(asked)) + asked)
    top, _, rest = answer.partition(b"\r\n\r\n")
    assert b" 200 " in top.splitlines()[0] and b"transfer-encoding" not in top.lower()
    if stream:
        assert rest.endswith(b"data: [DONE]\n\n") and rest.startswith(b"data: {")
    else:
        assert json.loads(rest)["choices"][0]["text"]


async def test_http_1_0_gets_early_refusals_too(rig: Rig) -> None:
    answer = await by_hand(rig, b"POST /v1/completions HTTP/1.0\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}")
    assert b" 415 " in answer.splitlines()[0] and answer.endswith(b"}")


async def test_streams_of_http_1_0_come_as_they_are_made(open_rig: OpenRig) -> None:
    async with open_rig() as rig:
        rig.mesh.gate.clear()
        url, asked = urlsplit(rig.url), body(rig, stream=True)
        reader, writer = await asyncio.open_connection(url.hostname, url.port)
        writer.write(head_of("1.0", len(asked)) + asked)
        async with asyncio.timeout(20):
            await reader.readuntil(b"data: {")
            rig.mesh.gate.set()
            assert (await reader.read()).endswith(b"data: [DONE]\n\n")
        writer.close()
        await writer.wait_closed()
