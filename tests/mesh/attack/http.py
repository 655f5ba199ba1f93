"""Attacks on the gateway's HTTP, with a key and without one, and what they cost it meanwhile."""

import asyncio
import contextlib
import itertools
import json
import resource
import socket
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Iterable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import httpx

from tests.gateway.endless import GENERATE, endless, head
from tests.mesh.attack.mesh import Found, Target

BODY_BYTES, FIELD_BYTES, WIRE_BYTES = 20 << 20, 23 << 20, 60 << 20
NUM_OPEN = 1_024
GROWTH_BYTES = 200 << 20
"""Four bodies of 20 MB took 15 GB once."""
HEALTH_S = 1.0
"""On a machine that does nothing else."""
TIMEOUT_S = 60.0
MEASURED_S = 0.05
BLOCK_BYTES = 1 << 20

SLOWER = 2.0
"""What another tenant's requests may take while a grammar is being understood, beside what they take alone."""
NUM_ALONE = 60

_WATCHER = """
import http.client, sys, threading, time
slowest, is_over = 0.0, threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), is_over.set()), daemon=True).start()
while not is_over.is_set():
    started = time.monotonic()
    connection = http.client.HTTPConnection("127.0.0.1", {port}, timeout=60)
    connection.request("GET", "/health")
    answer = connection.getresponse()
    assert answer.status == 200, answer.read()
    connection.close()
    slowest = max(slowest, time.monotonic() - started)
    time.sleep(0.02)
print(slowest)
"""
"""A process of its own: the attacker's is busy."""


@asynccontextmanager
async def watched(target: Target, found: Found, health_s: float) -> AsyncIterator[None]:
    """Complain where the first gateway grows by too much while the block runs, or lets `/health` wait for longer than
    `health_s`."""
    pid, port = target.pids("gateway")[0], httpx.URL(target.supervisor.urls[0]).port
    before = _reset_peak(pid)
    children, measuring = 0, True

    async def measure() -> None:
        nonlocal children
        while measuring:
            children = max(children, _bytes_of_children(pid))
            await asyncio.sleep(MEASURED_S)

    at_rest = _bytes_of_children(pid)
    measured = asyncio.create_task(measure(), name="memory of the gateway's children")
    watcher = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _WATCHER.format(port=port), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        yield
    finally:
        told, _ = await watcher.communicate(b"")
        measuring = False
        await measured
    grown, slowest_s = _bytes(pid, "VmHWM") - before + children - at_rest, float(told or "inf")
    if grown > GROWTH_BYTES:
        found.got.append(f"the gateway grew by {grown >> 20} MiB")
    if slowest_s > health_s:
        found.got.append(f"/health took {slowest_s:.2f} s")
    found.note = f"memory +{grown >> 20} MiB, /health {slowest_s * 1e3:.0f} ms at most"


def _reset_peak(pid: int) -> int:
    """Have the kernel count a process's peak from here on; return what it has now."""
    Path(f"/proc/{pid}/clear_refs").write_text("5", "utf-8")
    return _bytes(pid, "VmRSS")


def _bytes_of_children(pid: int) -> int:
    """Return the memory of all processes below one, of their own: copies share what they do not touch."""
    num_bytes, waiting = 0, [pid]
    while waiting:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            below = [
                int(each) for each in Path(f"/proc/{waiting[-1]}/task/{waiting.pop()}/children").read_text().split()
            ]
            waiting += below
            for child in below:
                rollup = Path(f"/proc/{child}/smaps_rollup").read_text("utf-8")
                num_bytes += int(rollup.partition("Private_Dirty:")[2].split()[0]) * 1024
    return num_bytes


def _bytes(pid: int, name: str) -> int:
    status = Path(f"/proc/{pid}/status").read_text("utf-8")
    return int(status.partition(f"{name}:")[2].split()[0]) * 1024


def _keys(target: Target) -> tuple[dict[str, str], ...]:
    """A client's, a stranger's, and none."""
    return {"authorization": f"Bearer {target.supervisor.tenants[0]}"}, {"authorization": "Bearer none"}, {}


async def strangers(target: Target) -> Found:
    """Ask the gateway without a key, from another site's page, for another host, and for absurd numbers."""
    found, key = Found(), {"Authorization": f"Bearer {target.supervisor.tenants[0]}"}
    body = {"model": target.mesh.model, "prompt": "Q", "max_tokens": 1}
    huge = json.dumps(body)[:-1]
    no_key: Iterable[dict[str, str]] = (
        {}, {"Authorization": "Bearer"}, {"Authorization": "Bearer tenant"}, {"Authorization": "Bearer tenant-00"},
        {"Authorization": "Basic dGVuYW50LTA="}, {"Authorization": "Bearer tenant-0 x"},
    )  # fmt: skip
    asked: list[tuple[str, dict[str, str], str, set[int]]] = [
        *((f"key {headers}", headers, json.dumps(body), {401}) for headers in no_key),
        ("text/plain", key | {"Content-Type": "text/plain"}, json.dumps(body), {415}),
        ("another Host", key | {"Host": "evil.example.org"}, json.dumps(body), {421}),
        *((f"{name} of 10^400", key, f'{huge}, "{name}": {10**400}}}', {400}) for name in ("n", "top_k", "seed")),
        ("depth", key, '{"model":' + "[" * 50_000, {400}),
        ("no JSON", key, "\x00", {400}),
    ]
    for url in target.supervisor.urls:
        for name, headers, content, allowed in asked:
            sent = {"Content-Type": "application/json"} | headers
            answer = await target.mesh.http.post(f"{url}{GENERATE}", content=content, headers=sent)
            found.num_tries += 1
            if answer.status_code not in allowed:
                found.got.append(f"{answer.status_code} for {name}")
        for path in ("/metrics", "/../mesh.toml", "/v1/models/../../mesh.toml"):
            answer = await target.mesh.http.get(url + path)
            found.num_tries += 1
            if answer.status_code == 200:
                found.got.append(f"200 for {path}")
    return found


async def large_bodies(target: Target, health_s: float) -> Found:
    """Four prompts of 20 MB at once with a key, thirty without one."""
    found = Found()
    key, stranger, _ = _keys(target)
    text = json.dumps({"model": target.mesh.model, "prompt": "x" * BODY_BYTES, "max_tokens": 1}).encode()
    async with watched(target, found, health_s):
        codes = await asyncio.gather(*(_post(target, found, text, by) for by in [key] * 4 + [stranger] * 30))
    found.got += [f"a body of 20 MB: {code}" for code in codes if code in (200, 500)]
    return found


async def large_fields(target: Target, health_s: float) -> Found:
    """Fields of 23 MB, known ones and others, neutral, refused and used, one after another."""
    found = Found()
    key, stranger, _ = _keys(target)
    numbers = b"{" + b",".join(b'"%d":1' % n for n in range(FIELD_BYTES // 12)) + b"}"
    texts = b"[" + b",".join([b'"abcdefgh"'] * (FIELD_BYTES // 11)) + b"]"
    deep = b"[" * FIELD_BYTES
    fields = {
        "logit_bias": numbers, "metadata": numbers, "stop": texts, "user": b'"%b"' % (b"x" * FIELD_BYTES),
        "nobody_knows": numbers, "guided_json": deep, "response_format": deep, "stream_options": numbers,
        "prompt_logprobs": b"1" * FIELD_BYTES,
    }  # fmt: skip
    async with watched(target, found, health_s):
        for (name, value), by in ((field, by) for field in fields.items() for by in (key, stranger)):
            for size in (len(value), len(value) // 40):
                cut = value[:size] if value is deep or name == "prompt_logprobs" else value
                body = b'{"model": "%b", "prompt": "Q", "%b": %b}' % (target.mesh.model.encode(), name.encode(), cut)
                code = await _post(target, found, body, by)
                if code in (200, 500):
                    found.got.append(f"{name} of {size} bytes: {code}")
    return found


async def _post(target: Target, found: Found, content: bytes, headers: dict[str, str]) -> int:
    found.num_tries += 1
    url, sent = target.supervisor.urls[0] + GENERATE, {"content-type": "application/json", **headers}
    try:
        return (await target.mesh.http.post(url, content=content, headers=sent)).status_code
    except httpx.TransportError:  # it was answered and cut before all was sent
        return 0


async def endless_parts(target: Target, health_s: float) -> Found:
    """Send up to 60 MB of what a parser takes beside a body: trailers, extensions and sizes of chunks, heads."""
    found, port = Found(), httpx.URL(target.supervisor.urls[0]).port
    assert port is not None
    async with watched(target, found, health_s):
        for headers in _keys(target):
            for name, (begin, more) in endless(**headers).items():
                found.num_tries += 1
                num_sent, answer = await asyncio.to_thread(_flood, port, begin, more)
                if num_sent >= WIRE_BYTES or b" 200 " in answer.partition(b"\r\n")[0]:
                    found.got.append(f"{name}: {num_sent} bytes were taken, {answer[:40]!r}")
    return found


def _flood(port: int, begin: bytes, more: bytes) -> tuple[int, bytes]:
    """Return how many bytes a gateway took of what never ends, and what it said."""
    block, num_sent, answer = more * (BLOCK_BYTES // len(more)), 0, b""
    with socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S) as sock, contextlib.suppress(OSError):
        try:
            sock.sendall(begin)
            while num_sent < WIRE_BYTES:
                sock.sendall(block)
                num_sent += len(block)
        finally:
            answer = sock.recv(65_536)
    return num_sent, answer


async def open_bodies(target: Target, health_s: float) -> Found:
    """Hold 1,024 bodies open that never end, of one key and of none, while others ask."""
    found, port = Found(), httpx.URL(target.supervisor.urls[0]).port
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    other = {"authorization": f"Bearer {target.supervisor.tenants[1]}"}
    body = json.dumps({"model": target.mesh.model, "prompt": "Q", "max_tokens": 1}).encode()
    try:
        async with watched(target, found, health_s):
            for headers in _keys(target):
                begin = head(content_length="1000", **headers) + b"{"
                writers = [(await asyncio.open_connection("127.0.0.1", port))[1] for _ in range(NUM_OPEN)]
                for writer in writers:
                    writer.write(begin)
                found.num_tries += NUM_OPEN
                code = await _post(target, found, body, other)
                if code != 200:
                    found.got.append(f"{code} for whoever came while 1,024 bodies were open")
                for writer in writers:
                    writer.transport.abort()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return found


def hostile_grammars(model: str) -> Iterator[tuple[str, dict[str, object]]]:
    """Yield bodies that say of an answer what takes all time or memory to understand, each with its name."""
    words = [f"w{number}" for number in range(60)]
    for count in (18, 22, 26, 60):
        lark = "start: A\nA: " + " & ".join(f"/(?s:.*){word}(?s:.*)/" for word in words[:count])
        yield f"{count} words", {"guided_grammar": lark}
        patterns = [{"pattern": word} for word in words[:count]]
        yield f"{count} patterns", {"guided_json": {"type": "string", "allOf": patterns}}
    named = {"type": "object", "properties": {"😀" + "/" * 31_000: {"anyOf": [{"type": "null"}] * 3_400}}}
    yield "a long name", {"guided_json": named}
    yield (
        "a tool with a long name",
        {
            "messages": [{"role": "user", "content": "Q"}],
            "tools": [{"type": "function", "function": {"name": "f", "parameters": named}}],
            "tool_choice": "required",
        },
    )
    yield "newlines", {"guided_grammar": "\n" * 32_000}
    yield "comments", {"guided_grammar": "%json//" * 4_000}
    yield "a chain", {"guided_grammar": "root ::= r0\n" + "\n".join(f"r{n} ::= r{n + 1}" for n in range(1_700))}
    deep: object = {}
    for _ in range(700):
        deep = {"items": deep}
    yield "depth", {"guided_json": deep}
    for number in range(40):
        names = {f"{number} {name}": {"type": "string", "pattern": "^[a-z]{3,9}$"} for name in range(500)}
        yield f"schema {number}", {"guided_json": {"type": "object", "properties": names}}


async def grammars(target: Target, slower: float) -> Found:
    """One tenant asks for what cannot be understood, six at a time; another one asks meanwhile, and waits for at most
    `slower` times what it waits alone."""
    found, (key, *_) = Found(), _keys(target)
    other = {"authorization": f"Bearer {target.supervisor.tenants[1]}"}
    hostile = iter(list(hostile_grammars(target.mesh.model)))
    begin = {"model": target.mesh.model, "prompt": "Q", "max_tokens": 4}
    codes: dict[str, int] = {}

    async def attack() -> None:
        for name, asked in hostile:
            body = begin | asked
            path = "/v1/completions"
            if "messages" in body:
                del body["prompt"]
                path = "/v1/chat/completions"
            url = target.supervisor.urls[0] + path
            post = partial(target.mesh.http.post, url, json=body, headers=key, timeout=TIMEOUT_S)
            # Who has six such at a time may wait for too long for a turn, and is told when to come again.
            while (answer := await post()).status_code == 503 and "retry-after" in answer.headers:
                await asyncio.sleep(float(answer.headers["retry-after"]))
            codes[name] = answer.status_code
            found.num_tries += 1

    fresh = itertools.count()

    async def ask() -> float:
        """What another tenant's request takes: every third has a schema that is not known, every third a known one."""
        number = next(fresh)
        schema = {"enum": [number if number % 3 == 0 else 1, 2]}
        body = begin if number % 3 == 2 else begin | {"guided_json": schema}
        started = time.monotonic()
        answer = await target.mesh.http.post(target.supervisor.urls[0] + GENERATE, json=body, headers=other)
        if answer.status_code != 200:
            found.got.append(f"{answer.status_code} for another tenant: {answer.text[:200]}")
        return time.monotonic() - started

    async with watched(target, found, slower * HEALTH_S):
        alone = [await ask() for _ in range(NUM_ALONE)]
        attacking = asyncio.gather(*(attack() for _ in range(6)))
        beside = [await ask()]
        while not attacking.done():
            beside.append(await ask())
        await attacking
    found.got += [f"{name}: {code}" for name, code in codes.items() if code not in (200, 400, 413)]
    ratio = statistics.median(beside) / statistics.median(alone)
    if ratio > slower:
        found.got.append(f"another tenant waits {ratio:.1f} times as long")
    milliseconds = [1e3 * value for of in (alone, beside) for value in (statistics.median(of), max(of))]
    shown = "alone p50 {:.0f}, max {:.0f} ms; beside {:.0f}, {:.0f} ms".format(*milliseconds)
    found.note += f"; another tenant {shown}"
    return found


def _tenants(target: Target) -> tuple[dict[str, str], dict[str, str]]:
    """The key of one who attacks, and of another one who asks meanwhile."""
    first, second, *_ = [{"authorization": f"Bearer {key}"} for key in target.supervisor.tenants]
    return first, second


async def _beside(target: Target, found: Found, attack: Awaitable[object], key: dict[str, str]) -> list[float]:
    """Return how long another tenant's small requests take while an attack goes on."""
    attacking, taken = asyncio.ensure_future(attack), list[float]()
    body = {"model": target.mesh.model, "prompt": "Q", "max_tokens": 4}
    while not attacking.done() or not taken:
        started = time.monotonic()
        url = target.supervisor.urls[0] + GENERATE
        answer = await target.mesh.http.post(url, json=body, headers=key, timeout=TIMEOUT_S)
        taken.append(time.monotonic() - started)
        if answer.status_code != 200:
            found.got.append(f"{answer.status_code} for another tenant: {answer.text[:200]}")
    await attacking
    return taken


async def backlog(target: Target, num_streams: int, num_tokens: int) -> Found:
    """One tenant has far more answers under way than there is room for; another one's wait is not theirs."""
    found, (key, other) = Found(), _tenants(target)
    body = {"model": target.mesh.model, "prompt": "Q", "max_tokens": num_tokens, "ignore_eos": True}
    codes, began = Counter[int](), time.monotonic()

    async def ask(number: int) -> None:
        url = target.supervisor.urls[0] + GENERATE
        answer = await target.mesh.http.post(url, json=body | {"seed": number}, headers=key, timeout=10 * TIMEOUT_S)
        codes[answer.status_code] += 1
        found.num_tries += 1

    taken = await _beside(target, found, asyncio.gather(*map(ask, range(num_streams))), other)
    all_s = time.monotonic() - began
    if max(taken) > all_s / 2:
        found.got.append(f"another tenant waits {max(taken):.1f} s beside a backlog of {all_s:.1f} s")
    found.note = f"a backlog of {all_s:.1f} s, {dict(codes)}; another tenant {max(taken):.2f} s at most"
    return found


async def unread_replies(target: Target, num_clients: int, health_s: float) -> Found:
    """Ask for long replies, and read none."""
    found, (key, other) = Found(), _tenants(target)
    port = httpx.URL(target.supervisor.urls[0]).port
    asked = (
        ("/tokenize", json.dumps({"prompt": "a b c d " * 30_000, "return_token_strs": True}).encode()),
        ("/detokenize", json.dumps({"tokens": [5] * 10**6}).encode()),
    )

    async def ask(number: int, closed: contextlib.AsyncExitStack) -> None:
        path, body = asked[number % 2]
        peer = closed.enter_context(socket.socket())
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        peer.setblocking(False)
        loop = asyncio.get_running_loop()
        said = f"POST {path} HTTP/1.1\r\nhost: localhost\r\nauthorization: {key['authorization']}\r\n"
        said += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        await loop.sock_connect(peer, ("127.0.0.1", port))
        with contextlib.suppress(ConnectionError, TimeoutError):
            async with asyncio.timeout(TIMEOUT_S):
                await loop.sock_sendall(peer, said.encode() + body)
                while not await loop.sock_recv(peer, 1):
                    pass
        found.num_tries += 1

    async with watched(target, found, health_s), contextlib.AsyncExitStack() as closed:
        taken = await _beside(target, found, asyncio.gather(*(ask(n, closed) for n in range(num_clients))), other)
    found.note += f"; another tenant {max(taken):.2f} s at most"
    return found


async def many_answers_of_one_grammar(target: Target, num_bodies: int, health_s: float) -> Found:
    """A long grammar for many answers at once: each takes it to its workers."""
    found, (key, other) = Found(), _tenants(target)
    choices = [f"{number:05d} {'x' * 20}" for number in range(1_000)]
    body = {"model": target.mesh.model, "prompt": ["Q"] * 4, "n": 16, "max_tokens": 4, "guided_choice": choices}
    codes = Counter[int]()

    async def ask() -> None:
        url = target.supervisor.urls[0] + GENERATE
        answer = await target.mesh.http.post(url, json=body, headers=key, timeout=10 * TIMEOUT_S)
        codes[answer.status_code] += 1
        found.num_tries += 1
        if answer.status_code not in (200, 429):
            found.got.append(f"{answer.status_code}: {answer.text[:200]}")

    async with watched(target, found, health_s):
        taken = await _beside(target, found, asyncio.gather(*(ask() for _ in range(num_bodies))), other)
    found.note += f"; {dict(codes)}; another tenant {max(taken):.2f} s at most"
    return found
