"""The HTTP side withstands who has no key, sends too much, never ends, or asks from another site's page."""

import asyncio
import contextlib
import gc
import hashlib
import json
import socket
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from services.errors import UserError
from services.gateway import limits
from services.gateway.api.bodies import Bodies, _Share
from services.gateway.api.guard import ApiKeys, HostGuard, NotNowError
from services.gateway.api.invalid import InvalidRequestError
from services.gateway.api.openai import ChatBody, CompletionBody, decode_body, options_of
from services.gateway.api.prepare import GatewayModel, prepare
from services.gateway.limits import BEGUN_A_TURN
from services.gateway.server import Beginnings, HttpConnection, connections_for
from services.times import GatewayTimes
from tests.gateway.conftest import OpenRig, Rig
from tests.gateway.endless import GENERATE, chunked, endless, head, prompt_of
from tests.share import examples
from tests.waiting import until

C, H = GENERATE, "/v1/chat/completions"
JSON = {"content-type": "application/json"}
ONE_KEY = {"tenants": {"key-a": "a"}}


class Peer:
    """A client that sends bytes as it likes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self) -> tuple[int, dict[str, str], dict[str, Any]]:
        """Status, headers and body of an answer that has a length."""
        lines = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines[1:] if line)
        body = await self.reader.readexactly(int(headers["content-length"]))
        return int(lines[0].split()[1]), headers, json.loads(body)

    async def is_closed(self) -> bool:
        """Wait for the end of the connection; what is still sent is an answer."""
        try:
            return await self.reader.read() == b""
        except ConnectionResetError:
            return True


@contextlib.asynccontextmanager
async def peer(rig: Rig) -> AsyncIterator[Peer]:
    reader, writer = await asyncio.open_connection("127.0.0.1", rig.http.base_url.port)
    try:
        yield Peer(reader, writer)
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


# The size of what is sent.


@pytest.mark.parametrize("path", [C, H])
async def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    def tokenize(*args: object, **kwargs: object) -> None:
        raise AssertionError("it was tokenized")

    monkeypatch.setattr(type(rig.model.codec), "encode", tokenize)
    text = "x" * (rig.model.context_length * rig.model.codec.longest_token_bytes + 1)
    fields = {"prompt": text} if path == C else {"messages": [{"role": "user", "content": text}]}
    answer = await rig.http.post(path, json={"model": rig.model.name, **fields})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
    assert error["param"] == ("prompt" if path == C else "messages")
    for number in (len(text), rig.model.max_text_bytes, rig.model.context_length):
        assert str(number) in error["message"]


def test_no_context_is_so_large_that_a_text_may_take_all_memory(model: GatewayModel) -> None:
    fields = {f: getattr(model, f) for f in model.__slots__} | {"context_length": 10**7}
    large = GatewayModel(**fields)
    body = decode_body(prompt_of(limits.MAX_TEXT_BYTES + 1), is_chat=False)
    with pytest.raises(InvalidRequestError, match=str(limits.MAX_TEXT_BYTES)):
        prepare(large, body)


async def test_bodies_in_flight_are_bounded_and_short_ones_are_served(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_BODIES_BYTES", 400_000)
    async with peer(rig) as slow:
        await slow.send(head(content_length="260000") + b" " * 259_999)
        answers: list[httpx.Response] = []

        async def is_full() -> bool:
            answers.append(await rig.http.post(C, content=b" " * 100_000 + prompt_of(4), headers=JSON))
            return answers[-1].status_code == 503

        await until(is_full)  # it is read as it comes
        assert {answer.status_code for answer in answers[:-1]} <= {200}
        assert answers[-1].headers["retry-after"] == "1"
        assert answers[-1].json()["error"]["code"] == "overloaded"
        assert (await rig.http.post(C, content=prompt_of(4), headers=JSON)).status_code == 200
        await slow.send(b"x")
        assert (await slow.answer())[0] == 400
    answer = await rig.http.post(C, content=b" " * 100_000 + prompt_of(4), headers=JSON)
    assert answer.status_code == 200, "what it had held is free again"


async def test_one_long_body_is_understood_at_a_time_and_short_ones_do_not_wait() -> None:
    bodies, go = Bodies(GatewayTimes()), threading.Event()
    running: list[str] = []

    def work(name: str) -> str:
        running.append(name)
        go.wait(60)
        return name

    long = limits.MAX_SHORT_BODY_BYTES + 1
    async with asyncio.TaskGroup() as tasks:
        first = tasks.create_task(bodies.understand("a", long, lambda: work("first")))
        await until(lambda: running == ["first"])
        second = tasks.create_task(bodies.understand("a", long, lambda: work("second")))
        middle = tasks.create_task(bodies.understand("a", limits.MAX_SHORT_BODY_BYTES, lambda: work("middle")))
        await until(lambda: running == ["first", "middle"])
        assert await bodies.understand("a", 10, lambda: "short") == "short"
        assert not second.done()
        go.set()
    assert [first.result(), second.result(), middle.result()] == ["first", "second", "middle"]
    assert running == ["first", "middle", "second"]


async def test_who_would_wait_long_for_a_turn_is_told_so() -> None:
    bodies, go = Bodies(GatewayTimes(turn_s=0.01)), threading.Event()
    long = limits.MAX_SHORT_BODY_BYTES + 1
    first = asyncio.create_task(bodies.understand("a", long, lambda: go.wait(60)))
    await asyncio.sleep(0)
    with pytest.raises(NotNowError):
        await bodies.understand("a", long, lambda: None)
    first.cancel()  # a thread goes on all the same, and so does its turn
    with pytest.raises(asyncio.CancelledError):
        await first
    with pytest.raises(NotNowError):
        await bodies.understand("a", long, lambda: None)
    go.set()

    async def has_its_turn() -> bool:
        try:
            return await bodies.understand("a", long, lambda: True)
        except NotNowError:
            return False

    await until(has_its_turn)


async def test_what_an_error_quotes_is_cut(rig: Rig) -> None:
    for fields in ({"model": "m" * 100_000}, {"messages": [{"role": "r" * 100_000, "content": "Hi"}]}):
        body = {"model": rig.model.name, "messages": [{"role": "user", "content": "Hi"}], **fields}
        answer = await rig.http.post(H, json=body)
        assert answer.status_code in (400, 404)
        assert len(answer.json()["error"]["message"]) <= limits.MAX_ERROR_CHARACTERS


# Absurd bodies. `limits` of each are in the answers.


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (H, {"messages": [{"role": "user", "content": ""}] * (limits.MAX_MESSAGES + 1)}, "messages"),
        (H, {"messages": [{"role": "user", "content": [{"type": "text"}] * 50_000}]}, "messages[0].content[0]"),
        (C, {"prompt": [[1]] * 300_000}, "prompt"),
        (C, {"prompt": [""] * 300_000}, "prompt"),
        (C, {"prompt": [1] * 1_000_000}, "prompt"),
        (C, {"prompt": "Hi", "stop": ["x"] * 100_000}, "stop"),
        (C, {"prompt": "Hi", "stop_token_ids": [1] * 100_000}, "stop_token_ids"),
        (C, {"prompt": "Hi", "logit_bias": {str(n): 1 for n in range(50_000)}}, "logit_bias"),
    ],
)
async def test_many_of_anything_is_a_bad_request(rig: Rig, path: str, fields: dict[str, Any], param: str) -> None:
    answer = await rig.http.post(path, json={"model": rig.model.name, **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("field", ["no_such_field", "logit_bias", "tools", "prompt", "messages", "stop", "model"])
@pytest.mark.parametrize("opening", [b"[", b'{"a":'])
async def test_depth_is_a_bad_request(rig: Rig, field: str, opening: bytes) -> None:
    closing = b"]" if opening == b"[" else b"}"
    deep = opening * 50_000 + b"1" + closing * 50_000
    body = b'{"model": "demo_model", "max_tokens": 1, "' + field.encode() + b'": ' + deep + b"}"
    for path in (C, H):
        answer = await rig.http.post(path, content=body, headers=JSON)
        assert answer.status_code == 400
        assert answer.json()["error"]["type"] == "invalid_request_error"


NUMBERS = {
    C: ("temperature", "top_p", "top_k", "n", "max_tokens", "seed", "stop_token_ids", "prompt", "best_of", "logprobs",
        "presence_penalty", "frequency_penalty"),
    H: ("temperature", "top_p", "top_k", "n", "max_tokens", "max_completion_tokens", "seed", "stop_token_ids",
        "top_logprobs", "presence_penalty", "frequency_penalty"),
}  # fmt: skip
OUT_OF_RANGE = st.one_of(
    st.integers(2, 6_000).map(lambda digits: "9" * digits).filter(lambda text: int(text[:30]) > 2**64),
    st.integers(30, 6_000).map(lambda digits: "-" + "9" * digits),
    st.sampled_from(["1e400", "-1e400", "1e308", "-1e308", "9" * 400, "1" + "0" * 400, "-1.5e300", str(2**63)]),
)


@pytest.mark.parametrize("path", [C, H])
@settings(max_examples=examples(200), deadline=None)
@given(data=st.data(), number=OUT_OF_RANGE)
def test_a_number_out_of_range_names_its_field(path: str, data: st.DataObject, number: str) -> None:
    name = data.draw(st.sampled_from(NUMBERS[path]))
    value = f"[{number}]" if name in ("stop_token_ids", "prompt") else number
    fields = {"model": '"demo_model"', **({"messages": "[]"} if path == H else {"prompt": '"x"'}), name: value}
    body = "{" + ", ".join(f'"{key}": {text}' for key, text in fields.items()) + "}"
    with pytest.raises(InvalidRequestError) as caught:
        understood(body.encode(), is_chat=path == H)
    assert (caught.value.status, (caught.value.param or "").split("[")[0]) == (400, name)
    assert len(caught.value.message) <= limits.MAX_ERROR_CHARACTERS


def understood(payload: bytes, *, is_chat: bool) -> CompletionBody | ChatBody:
    from services.gateway.api.openai import prompts_of

    body = decode_body(payload, is_chat=is_chat)
    options_of(body, 1_000)
    if isinstance(body, CompletionBody):
        prompts_of(body, 1_000)
    return body


async def test_a_number_of_400_digits_is_a_400(rig: Rig) -> None:
    for name in ("n", "top_k", "max_tokens", "seed"):
        body = f'{{"model": "{rig.model.name}", "prompt": "Hi", "{name}": 1{"0" * 400}}}'
        answer = await rig.http.post(C, content=body.encode(), headers=JSON)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)


# Who asks.


async def test_without_a_key_no_body_is_read(open_rig: OpenRig) -> None:
    async with open_rig(gateway=ONE_KEY, times={"linger_s": 0.1}) as rig, peer(rig) as stranger:
        await stranger.send(head(content_length="10000000"))
        status, headers, body = await stranger.answer()
        assert (status, headers["connection"], body["error"]["code"]) == (401, "close", "invalid_api_key")
        assert await stranger.is_closed()


@pytest.mark.parametrize(
    ("headers", "status"),
    [({"content_type": "text/plain"}, 415), ({"content_length": "99999999"}, 413), ({"host": "evil.example"}, 421)],
)
@pytest.mark.times(linger_s=0.1)
async def test_what_the_headers_refuse_is_answered_at_once(rig: Rig, headers: dict[str, str], status: int) -> None:
    async with peer(rig) as stranger:
        await stranger.send(head(**{"content_length": "1000", **headers}))
        found, sent, body = await stranger.answer()
        assert (found, sent["connection"], body["error"]["type"]) == (status, "close", "invalid_request_error")
        assert await stranger.is_closed()


async def test_a_refused_client_that_sends_on_has_its_answer(open_rig: OpenRig) -> None:
    """A connection that was closed under it would be reset, and the answer with it."""
    async with open_rig(gateway=ONE_KEY) as rig:
        answer = await rig.http.post(C, content=prompt_of(5_000_000), headers=JSON)
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")


@pytest.mark.times(body_s=0.2, linger_s=0.1)
async def test_a_body_has_a_time_limit(rig: Rig) -> None:
    async with peer(rig) as slow:
        await slow.send(head(content_length="99") + b"{")
        status, headers, body = await slow.answer()
        assert (status, headers["connection"], body["error"]["code"]) == (408, "close", "request_timeout")
        assert await slow.is_closed()


def test_a_key_is_found_by_a_digest_that_is_of_this_process_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[bytes, bytes]] = []
    blake2b = hashlib.blake2b

    def seen(data: bytes, *, key: bytes) -> Any:
        made.append((data, key))
        return blake2b(data, key=key)

    seen.MAX_KEY_SIZE = blake2b.MAX_KEY_SIZE  # type: ignore[attr-defined]
    monkeypatch.setattr(hashlib, "blake2b", seen)
    for _ in range(2):
        keys = ApiKeys({"key-a": "a", "key-b": "b"})
        assert keys.tenant_of({"authorization": "bearer key-b"}) == "b"
        for said in ("bearer key-c", "bearer ", "bearer", "key-b", "basic key-b", ""):
            with pytest.raises(InvalidRequestError):
                keys.tenant_of({"authorization": said})
    assert len({secret for data, secret in made if data == b"key-a"}) == 2
    assert all(len(secret) == blake2b.MAX_KEY_SIZE for _, secret in made)


# Pages of other sites.


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""]
)
async def test_what_any_page_may_send_is_refused(rig: Rig, kind: str) -> None:
    for path in (C, H):
        headers = {"content-type": kind} if kind else {}
        answer = await rig.http.post(path, content=prompt_of(4), headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_media_type")
        assert "application/json" in answer.json()["error"]["message"]
    assert rig.mesh.places == []


async def test_json_with_parameters_is_json(rig: Rig) -> None:
    headers = {"content-type": "Application/JSON; charset=utf-8"}
    assert (await rig.http.post(C, content=prompt_of(4), headers=headers)).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil", "x", ""]
)
async def test_another_sites_name_is_refused(rig: Rig, host: str) -> None:
    for path in ("/health", "/v1/models", "/", "/no/such/path"):
        answer = await rig.http.get(path, headers={"host": host})
        assert (answer.status_code, answer.json()["error"]["code"]) == (421, "unknown_host")
        assert "gateway.hosts" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:80", "127.0.0.1", "127.9.9.9:1", "[::1]:8000", "[::1]", "chat.example.org:443",
             "chat.example.org."]
)  # fmt: skip
async def test_own_names_are_known(open_rig: OpenRig, host: str) -> None:
    async with open_rig(gateway={"hosts": ("chat.example.org",)}) as rig:
        assert (await rig.http.get("/health", headers={"host": host})).status_code == 200


@pytest.mark.parametrize(
    ("connected_to", "host", "is_ours"),
    [
        ("::ffff:10.0.0.2", "10.0.0.2:8000", True),  # a socket for both kinds of addresses has IPv4's like this
        ("fd00::2", "[fd00:0::2]:8000", True),
        ("fd00::2", "[fd00::3]:8000", False),
        ("::ffff:10.0.0.2", "10.0.0.3", False),
        ("10.0.0.2", "10.0.0.2", True),
    ],
)
async def test_the_address_that_a_client_has_connected_to_is_ours(connected_to: str, host: str, is_ours: bool) -> None:
    served, said = list[Any](), list[Any]()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        served.append(scope)

    async def hear() -> Any:
        return {"type": "http.request"}

    async def say(message: Any) -> None:
        said.append(message.get("status"))

    scope = {"headers": [(b"host", host.encode())], "server": (connected_to, 8000), "method": "GET"}
    await HostGuard(app, (), 0.0)(scope, hear, say)  # type: ignore[arg-type]
    assert (bool(served), 421 in said) == (is_ours, not is_ours)


async def test_two_hosts_are_none(rig: Rig) -> None:
    async with peer(rig) as stranger:
        await stranger.send(b"GET /health HTTP/1.1\r\nhost: localhost\r\nhost: evil.example\r\n\r\n")
        assert (await stranger.answer())[0] == 421


PREFLIGHT = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}


async def test_pages_of_other_origins_are_not_let_in_unless_named(open_rig: OpenRig) -> None:
    site = {"origin": "https://chat.example.org"}
    async with open_rig() as rig:
        answer = await rig.http.options(C, headers=site | PREFLIGHT)
        assert "access-control-allow-origin" not in answer.headers
    async with open_rig(gateway={"cors_origins": ("https://chat.example.org",)}) as rig:
        answer = await rig.http.options(C, headers=site | PREFLIGHT)
        assert answer.status_code == 204
        assert answer.headers["access-control-allow-origin"] == "https://chat.example.org"
        allowed = answer.headers["access-control-allow-headers"].lower()
        assert "authorization" in allowed and "content-type" in allowed
        assert "POST" in answer.headers["access-control-allow-methods"]
        body = {"model": rig.model.name, "prompt": "Hi", "max_tokens": 2}
        for fields, status in (({}, 200), ({"stream": True}, 200), ({"n": 0}, 400)):
            answer = await rig.http.post(C, json=body | fields, headers=site)
            assert (answer.status_code, answer.headers.get("access-control-allow-origin")) == (status, site["origin"])
        other = await rig.http.options(C, headers={"origin": "https://evil.example"} | PREFLIGHT)
        assert "access-control-allow-origin" not in other.headers


# Connections.


@pytest.mark.times(head_s=0.2)
async def test_a_connection_that_says_nothing_is_closed(rig: Rig) -> None:
    async with peer(rig) as silent, peer(rig) as slow:
        await slow.send(b"GET /health HTTP/1.1\r\nhost: local")
        assert await silent.is_closed()
        assert await slow.is_closed()


@pytest.mark.times(head_s=0.2)
async def test_a_connection_that_only_trickles_is_closed(rig: Rig) -> None:
    async with peer(rig) as trickling:
        closed = asyncio.create_task(trickling.is_closed())
        while not closed.done():
            with contextlib.suppress(ConnectionError):
                await trickling.send(b"\r\n")  # what may stand before a request: no timer may begin anew with it
            await asyncio.sleep(0.01)
        assert closed.result()


def test_what_has_come_while_the_process_stood_still_is_read(
    open_rig: OpenRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On uvloop, as services run: it fires timers before it reads on."""
    head_s = 0.5

    async def run() -> bytes:
        accepted, made = asyncio.Event(), HttpConnection.connection_made
        monkeypatch.setattr(
            HttpConnection, "connection_made", lambda self, transport: (made(self, transport), accepted.set())
        )
        loop, (bell, ringer) = asyncio.get_running_loop(), socket.socketpair()

        def stand_still() -> None:
            client.send(b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
            time.sleep(1.5 * head_s)
            loop.remove_reader(bell)

        with bell, ringer, socket.socket() as client:
            async with open_rig(times={"head_s": head_s}) as rig:
                client.connect(("127.0.0.1", rig.http.base_url.port))
                await accepted.wait()  # else its time would begin after the standstill
                loop.add_reader(bell, stand_still)
                ringer.send(b"x")
                client.setblocking(False)
                with contextlib.suppress(ConnectionResetError):  # it was dropped
                    return await loop.sock_recv(client, 12)
        return b""

    assert uvloop.run(run()) == b"HTTP/1.1 200"


@pytest.mark.times(keep_alive_s=1.0, head_s=0.1)
async def test_an_idle_connection_is_closed_after_its_answer(rig: Rig) -> None:
    async with peer(rig) as idle:
        for _ in range(2):
            await idle.send(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert (await idle.answer())[0] == 200
        assert await idle.is_closed()


@pytest.mark.parametrize("part", endless())
async def test_what_a_parser_takes_beside_the_body_is_bounded(rig: Rig, part: str) -> None:
    """In one write, so that it comes in reads as long as a read may be."""
    begin, more = endless()[part]
    async with peer(rig) as stranger:
        with contextlib.suppress(ConnectionError):
            await stranger.send(begin + more * (2_000_000 // len(more)))
        with contextlib.suppress(ConnectionResetError):
            assert (await stranger.reader.read())[:12] in (b"", b"HTTP/1.1 400")
    assert not rig.mesh.places


async def test_a_body_in_short_chunks_with_trailers_is_served(rig: Rig) -> None:
    body = prompt_of(4)
    parts = [body[at : at + 7] for at in range(0, len(body), 7)]
    chunks = [b"%x;a=b\r\n%b\r\n" % (len(part), part) for part in parts]
    async with peer(rig) as client:
        await client.send(chunked(*chunks, b"0\r\nx-checked: yes\r\n\r\n"))
        assert (await client.answer())[0] == 200


async def test_a_flood_of_pipelined_requests_is_cut_off(rig: Rig) -> None:
    rig.mesh.gate.clear()
    async with peer(rig) as hasty:
        body = prompt_of(4)
        one = head(content_length=str(len(body))) + body
        with contextlib.suppress(ConnectionError):
            await hasty.send(one * (limits.MAX_PIPELINED + 10))
        await until(lambda: "kvmesh_gateway_running_requests 0.0" in rig.metrics_text())
    assert len(rig.mesh.places) <= 1


async def test_idle_connections_lock_nobody_out(open_rig: OpenRig) -> None:
    most = limits.MIN_CONNECTIONS
    async with open_rig(gateway={"max_connections": most}) as rig, contextlib.AsyncExitStack() as held:
        idle = [await held.enter_async_context(peer(rig)) for _ in range(3 * most)]
        for _ in range(3):
            body = {"model": rig.model.name, "prompt": "Hi", "max_tokens": 2}
            assert (await rig.http.post(C, json=body)).status_code == 200
        for first in idle[: 2 * most]:
            assert await first.is_closed()
        await idle[-1].send(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert (await idle[-1].answer())[0] == 200, "the last ones are kept"


async def test_bodies_that_never_end_lock_nobody_out(open_rig: OpenRig) -> None:
    most = limits.MIN_CONNECTIONS
    async with open_rig(gateway={"max_connections": most}) as rig, contextlib.AsyncExitStack() as held:
        endless = []
        for _ in range(3 * most):
            endless.append(await held.enter_async_context(peer(rig)))
            await endless[-1].send(head(content_length="1000") + b" ")
            assert (await rig.http.post(C, content=prompt_of(4), headers=JSON)).status_code == 200
        for first in endless[: 2 * most]:
            assert await first.is_closed()
        await endless[-1].send(b" " * 999)
        assert (await endless[-1].answer())[0] == 400, "the last ones are kept"


async def test_of_two_keys_the_one_with_most_open_bodies_loses_them(open_rig: OpenRig) -> None:
    most, keys = limits.MIN_CONNECTIONS, {"key-a": "a", "key-b": "b"}
    async with open_rig(gateway={"max_connections": most, "tenants": keys}) as rig, contextlib.AsyncExitStack() as held:
        body = prompt_of(4)
        modest = await held.enter_async_context(peer(rig))
        await modest.send(head(authorization="Bearer key-b", content_length=str(len(body))) + body[:-1])
        greedy = [await held.enter_async_context(peer(rig)) for _ in range(2 * most)]
        for each in greedy:
            with contextlib.suppress(ConnectionError):
                await each.send(head(authorization="Bearer key-a", content_length="1000") + b" ")
            assert (await rig.http.get("/health")).status_code == 200
        for first in greedy[:most]:
            assert await first.is_closed()
        await modest.send(body[-1:])
        assert (await modest.answer())[0] == 200


async def test_an_owner_s_bodies_have_half_of_the_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_BODIES_BYTES", 4 * limits.FREE_BODY_BYTES)
    bodies = Bodies(GatewayTimes())
    a, b = _Share(("a", "1.2.3.4"), 10**9), _Share(("b", "1.2.3.4"), 10**9)
    for share in (a, b):
        bodies._take(share, 3 * limits.FREE_BODY_BYTES)
        with pytest.raises(NotNowError):
            bodies._take(share, 3 * limits.FREE_BODY_BYTES + 1)
    assert bodies.num_bytes.total() == limits.MAX_BODIES_BYTES


async def test_a_burst_of_one_owner_holds_up_no_other() -> None:
    beginnings, begun = Beginnings(), list[str]()

    async def begin(address: str) -> None:
        await beginnings.turn((address, "key"))
        begun.append(address)

    async with asyncio.TaskGroup() as tasks:
        burst = [tasks.create_task(begin("many")) for _ in range(10 * BEGUN_A_TURN)]
        await asyncio.sleep(0)
        one = tasks.create_task(begin("one"))
        burst[5].cancel()
        await one
        assert len(begun) <= 3 * BEGUN_A_TURN
    assert len(begun) == len(burst), "all but the one that was given up, and the other one's"


async def test_who_comes_while_all_are_busy_is_told_so(open_rig: OpenRig) -> None:
    most = limits.MIN_CONNECTIONS
    async with open_rig(gateway={"max_connections": most}) as rig, contextlib.AsyncExitStack() as held:
        rig.mesh.gate.clear()
        body = prompt_of(4).replace(b'"max_tokens": 1', b'"max_tokens": 5')
        for _ in range(most - limits.SPARE_CONNECTIONS):
            busy = await held.enter_async_context(peer(rig))
            await busy.send(head(content_length=str(len(body))) + body)
        await rig.mesh.until(lambda: len(rig.mesh.runs) == most - limits.SPARE_CONNECTIONS)
        answer = await rig.http.post(C, content=prompt_of(4), headers=JSON)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert answer.json()["error"]["code"] == "overloaded"
        rig.mesh.gate.set()

        async def is_served() -> bool:
            return (await rig.http.post(C, content=prompt_of(4), headers=JSON)).status_code == 200

        await until(is_served)


def test_a_process_with_too_few_descriptors_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    import resource

    monkeypatch.setattr(resource, "getrlimit", lambda which: (70, 70))
    with pytest.raises(UserError, match=r"needs 80 open files, and may have 70: raise `ulimit -n`"):
        connections_for(1_024, GatewayTimes())
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, 256))
    assert connections_for(1_024, GatewayTimes()).max_connections == 256 - limits.RESERVED_DESCRIPTORS
    assert connections_for(50, GatewayTimes()).max_connections == 50
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY,) * 2)
    assert connections_for(1_024, GatewayTimes()).max_connections == 1_024


async def test_the_public_port_has_no_metrics(rig: Rig) -> None:
    assert (await rig.http.get("/metrics")).status_code == 404


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/tokenize", {"prompt": ["x"]}),
        ("/detokenize", {"tokens": 5}),
        *(("/detokenize", {"tokens": [5] * count}) for count in (10_000, 100_000, 1_000_000)),
        *((C, {"prompt": [5] * count, "max_tokens": 1}) for count in (10_000, 100_000, 1_000_000)),
        *((C, {"prompt": "Q" * 100_000, "max_tokens": 1, "n": n}) for n in (1, -1)),
        (H, {"messages": [{"role": "user", "content": "Q" * 1_000_000}]}),
        (C, {"prompt": "Q", "max_tokens": 1, "guided_regex": "("}),
        (C, {"prompt": "Q", "max_tokens": 1, "guided_json": {"type": 1}}),
    ],
)  # fmt: skip
async def test_of_what_is_refused_nothing_stays(rig: Rig, path: str, asked: dict[str, Any]) -> None:
    gc.collect()
    gc.disable()  # an error that is kept keeps its frames, and these the body: sixty of 3 MB were 200 MB
    try:
        answer = await rig.http.post(path, json={"model": rig.model.name} | asked)
        assert answer.status_code == 400
        await until(lambda: not [kept for kept in gc.get_objects() if type(kept) in (InvalidRequestError, NotNowError)])
    finally:
        gc.enable()
