"""`/v1/kv/prefix`: what routers learn of a holder."""

import http.client
import json
from collections.abc import Generator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from services.attach.limits import MAX_PREFIX_BYTES
from tests.attach.core_rig import IDENTITY
from tests.attach.fake_server import FakeServer, fake_server
from tests.attach.live_holders import LiveHolders, live_holders
from tests.attach.test_halves import prompt
from tests.waiting import wait_until

SIZE = IDENTITY.block_size


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "attach.sock"


@pytest.fixture
def holder(path: Path) -> Generator[LiveHolders]:
    with live_holders(path, with_prefixes=True) as running:
        yield running


@pytest.fixture
def server(holder: LiveHolders, path: Path) -> Generator[FakeServer]:
    with fake_server(path, "a") as one:
        one.await_proven()
        yield one


def ask(holder: LiveHolders, method: str = "GET", query: str = "", body: bytes | None = None, **headers: str) -> Any:
    """Return (status, JSON)."""
    url = urlsplit(holder.prefix_url())
    connection = http.client.HTTPConnection(str(url.hostname), url.port)
    try:
        connection.request(method, url.path + query, body, headers)
        reply = connection.getresponse()
        return reply.status, json.loads(reply.read())
    finally:
        connection.close()


def held(holder: LiveHolders, tokens: list[int], salt: str = "") -> int:
    status, found = ask(holder, query=f"?tokens={','.join(map(str, tokens))}&cache_salt={salt}")
    assert status == 200
    return found["tokens"]


def test_a_router_learns_what_is_held_of_a_prompt_and_who_can_load_it(
    holder: LiveHolders, server: FakeServer, path: Path
) -> None:
    assert held(holder, prompt(1)) == 0
    server.run(prompt(1))
    server.run(prompt(1, 2 * SIZE), cache_salt="acme")
    wait_until(lambda: held(holder, prompt(1)) == 5 * SIZE)
    assert held(holder, prompt(1)[: 3 * SIZE + 1]) == 3 * SIZE and held(holder, prompt(2)) == 0
    wait_until(lambda: held(holder, prompt(1, 2 * SIZE), "acme") == 2 * SIZE)
    assert held(holder, prompt(1, 2 * SIZE), "other") == 0
    with fake_server(path, "b", wrong=1) as wrong:
        wrong.await_off()
        _, found = ask(holder, query=f"?tokens={','.join(map(str, prompt(2)))}")
    assert found["block_size"] == SIZE
    shown = {each["server"]: (each["sharing"], each["tokens"]) for each in found["servers"]}
    assert shown == {"a": ("off", 0), "b": ("off", 0)}, "who is off loads nothing"


def test_before_the_first_server_nothing_is_held(holder: LiveHolders) -> None:
    assert ask(holder, query="?tokens=1") == (200, {"block_size": 0, "tokens": 0, "servers": []})


def test_what_a_server_can_load_is_said_of_it(holder: LiveHolders, server: FakeServer) -> None:
    server.run(prompt(1))
    wait_until(lambda: held(holder, prompt(1)) == 5 * SIZE)
    _, found = ask(holder, query=f"?tokens={','.join(map(str, prompt(1)))}")
    (one,) = found["servers"]
    assert (one["server"], one["sharing"], one["tokens"]) == ("a", "on", 5 * SIZE)
    assert one["url"].startswith("http://127.0.0.1:")
    assert ask(holder, "POST", body=json.dumps({"tokens": prompt(1)}).encode()) == (200, found)


@pytest.mark.parametrize(
    ("method", "query", "body", "status"),
    [
        ("GET", "", None, 400),
        ("GET", "?tokens=", None, 400),
        ("GET", "?tokens=1,x", None, 400),
        ("GET", "?tokens=-1", None, 400),
        ("GET", "?tokens=4294967296", None, 400),
        ("GET", "?tokens=%ff", None, 400),
        ("POST", "", b"", 400),
        ("POST", "", b"[1]", 400),
        ("POST", "", b'{"tokens": "1"}', 400),
        ("POST", "", b'{"tokens": [1.5]}', 400),
        ("POST", "", b'{"tokens": [1], "cache_salt": 3}', 400),
        ("POST", "", b" " * (MAX_PREFIX_BYTES + 1), 413),
        ("DELETE", "", None, 405),
        ("GET", "/more?tokens=1", None, 404),
    ],
)
def test_what_is_no_question_is_refused(
    holder: LiveHolders, method: str, query: str, body: bytes | None, status: int
) -> None:
    found, reply = ask(holder, method, query, body)
    assert found == status and reply["error"]
    assert ask(holder, query="?tokens=1")[0] == 200, "it goes on"


def test_another_site_s_page_is_not_answered(holder: LiveHolders) -> None:
    assert ask(holder, query="?tokens=1", Host="elsewhere.example")[0] == 421
