"""What only the real bus does: discovery, a broker that goes away, comes back, denies, or was never there."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from services.bus.base import LOST, BusClosedError, BusError, Delivery, RequestTimedOutError, Subscription
from services.bus.embedded import EmbeddedNats
from services.bus.limits import BUFFER_BYTES
from services.bus.nats import BrokerTransport, NatsBus
from services.errors import BrokerRefusesError, BrokerUnreachableError, UserError
from services.times import BusTimes, Times
from services.trust.keys import BusAccess
from tests.waiting import until

SELDOM_PINGED = Times(bus=BusTimes(ping_interval_s=1_000.0))
"""By its pings the library would find out some time that it is partitioned."""
LONG_S = 30.0

PERMISSIONS = """
authorization {
  users = [{
    user: "worker", password: "pass"
    permissions: { publish: { deny: ["secret.>"] }, subscribe: { deny: ["secret.>"] } }
  }]
}
"""


@pytest.fixture
async def bus(nats_url: str) -> AsyncIterator[NatsBus]:
    bus = await NatsBus.connect(BusAccess(nats_url), "test")
    yield bus
    await bus.close()


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[Callable[[int | None], EmbeddedNats]]:
    """Starts servers of the test's own, which it may stop."""
    started: list[EmbeddedNats] = []

    def start(port: int | None = None) -> EmbeddedNats:
        started.append(EmbeddedNats.launch(port, tmp_path))
        return started[-1]

    yield start
    for server in started:
        server.stop()


StartServer = Callable[..., EmbeddedNats]


def port_of(server: EmbeddedNats) -> int:
    return int(server.url.rsplit(":", 1)[1])


async def test_a_service_can_be_found(bus: NatsBus, nats_url: str) -> None:
    """`nats micro ls`, `info` and `stats` show it."""
    server = await NatsBus.connect(BusAccess(nats_url), "server")
    name = f"service-{uuid4().hex[:8]}"
    subject = f"test.{name}.answer"
    served = await server.serve(name, "answer", subject, "group")
    gone = await server.serve(name, "gone", f"test.{name}.gone")
    await gone.close()
    await server.flush()

    async def answer() -> None:
        async for delivery in served:
            await delivery.respond(b"yes", {})

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(answer(), name="answer")
        for _ in range(3):
            await bus.request(subject, b"", {}, LONG_S)
        said = {
            verb: json.loads((await bus.request(f"$SRV.{verb}.{name}", b"", {}, LONG_S)).payload)
            for verb in ("PING", "INFO", "STATS")
        }
        everybody = await bus.request("$SRV.PING", b"", {}, LONG_S)
        await server.close()
    assert json.loads(everybody.payload)["type"] == "io.nats.micro.v1.ping_response"
    assert {answer["name"] for answer in said.values()} == {name}
    [endpoint] = said["INFO"]["endpoints"]
    assert (endpoint["name"], endpoint["subject"], endpoint["queue_group"]) == ("answer", subject, "group")
    [stats] = said["STATS"]["endpoints"]
    assert (stats["num_requests"], stats["num_errors"]) == (3, 0)


async def test_a_restarted_server_is_found_again(start_server: StartServer) -> None:
    """Subscriptions and endpoints live on, and what was said meanwhile arrives."""
    first = start_server()
    server, client = (
        await NatsBus.connect(BusAccess(first.url), "server"),
        await NatsBus.connect(BusAccess(first.url), "client"),
    )
    ear, served = await server.subscribe("news"), await server.serve("echo", "echo", "echo")
    await server.flush()
    heard: asyncio.Queue[bytes] = asyncio.Queue()

    async def listen() -> None:
        async for delivery in ear:
            heard.put_nowait(delivery.payload)

    async def answer() -> None:
        async for delivery in served:
            await delivery.respond(delivery.payload, {})

    async with asyncio.TaskGroup() as tasks, asyncio.timeout(2 * LONG_S):
        tasks.create_task(listen(), name="listen")
        tasks.create_task(answer(), name="answer")
        await client.publish("news", b"before", {})
        assert await heard.get() == b"before"
        first.stop()
        await until(lambda: not client.is_connected and not server.is_connected)
        with pytest.raises(BusError, match="away"):
            await client.flush()
        start_server(port_of(first))
        await until(lambda: client.is_connected and server.is_connected)
        await server.flush()
        await client.publish("news", b"after", {})
        assert await heard.get() == b"after"
        assert (await client.request("echo", b"again", {}, LONG_S)).payload == b"again"
        await server.close()
    await client.close()


async def test_a_broker_that_is_killed_costs_what_it_carried_and_nothing_more(start_server: StartServer) -> None:
    """What is published while it is away arrives, in order; a request asked meanwhile ends; both find their ears."""
    first = start_server()
    server, client = (
        await NatsBus.connect(BusAccess(first.url), "server"),
        await NatsBus.connect(BusAccess(first.url), "client"),
    )
    ear, served = await server.subscribe("news"), await server.serve("echo", "echo", "echo")
    await server.subscribe("mute")
    await server.flush()
    heard: asyncio.Queue[bytes] = asyncio.Queue()

    async def listen() -> None:
        async for delivery in ear:
            heard.put_nowait(delivery.payload)

    async def answer() -> None:
        async for delivery in served:
            await delivery.respond(delivery.payload, {})

    async with asyncio.TaskGroup() as tasks, asyncio.timeout(2 * LONG_S):
        tasks.create_task(listen(), name="listen")
        tasks.create_task(answer(), name="answer")
        asked = asyncio.ensure_future(client.request("mute", b"", {}, LONG_S))
        await client.flush()
        os.kill(first.pid, signal.SIGKILL)
        with pytest.raises(BusError, match=LOST):
            await asked
        await until(lambda: not client.is_connected and not server.is_connected)
        for number in range(3):
            await client.publish("news", b"%d" % number, {})
        with pytest.raises(RequestTimedOutError):
            await client.request("echo", b"lost", {}, 0.5)
        late = tasks.create_task(client.request("echo", b"late", {}, LONG_S), name="late")
        start_server(port_of(first))
        await until(lambda: (client.num_connects, server.num_connects) == (2, 2))
        assert (await late).payload == b"late"
        assert (await client.request("echo", b"again", {}, LONG_S)).payload == b"again"
        await client.publish("news", b"after", {})
        said: list[bytes] = []
        while b"after" not in said:
            said.append(await heard.get())
        assert said in ([b"0", b"1", b"2", b"after"], [b"after"])
        await server.close()
    await client.close()


@contextlib.contextmanager
def stopped(broker: EmbeddedNats) -> Generator[None]:
    """Let the broker stand still meanwhile: nothing is lost, and nothing comes."""
    os.kill(broker.pid, signal.SIGSTOP)
    try:
        threads = Path(f"/proc/{broker.pid}/task")
        while {(task / "stat").read_text().rpartition(")")[2].split()[0] for task in threads.iterdir()} != {"T"}:
            time.sleep(0.001)  # each thread stops in its own time
        yield
    finally:
        os.kill(broker.pid, signal.SIGCONT)


async def test_a_flush_does_not_return_before_the_broker_does(start_server: StartServer) -> None:
    broker = start_server()
    bus = await NatsBus.connect(BusAccess(broker.url), "test")
    with stopped(broker):
        for _ in range(3):
            with pytest.raises(RequestTimedOutError):
                await bus.flush(0.1)
        flushing = asyncio.create_task(bus.flush(LONG_S))
        await asyncio.sleep(0)
        assert not flushing.done()
    await flushing
    await bus.close()


@pytest.mark.parametrize("whose", ["ours", "the library's"])
async def test_who_gave_up_on_a_paused_broker_hears_it_again(start_server: StartServer, whose: str) -> None:
    """What is answered late found a cancelled future, and ended the library's reading task: it received nothing, and
    was connected."""
    broker = start_server()
    server, client = (
        await NatsBus.connect(BusAccess(broker.url), "server"),
        await NatsBus.connect(BusAccess(broker.url), "client"),
    )
    ear = await client.subscribe("news")
    await client.flush()
    flush = client.flush if whose == "ours" else client._client.flush  # pyright: ignore[reportPrivateUsage]
    with stopped(broker):
        given_up = [asyncio.create_task(flush()) for _ in range(3)]
        for _ in range(20):  # until they are sent
            await asyncio.sleep(0)
        for task in given_up:
            task.cancel()
        await asyncio.gather(*given_up, return_exceptions=True)
    await server.publish("news", b"still here", {})
    async with asyncio.timeout(LONG_S):
        assert [delivery.payload async for delivery in _first(ear)] == [b"still here"]
        await client.flush()
    assert client.num_connects == 1
    for bus in (server, client):
        await bus.close()


async def _first(ear: Subscription) -> AsyncIterator[Delivery]:
    async for delivery in ear:
        yield delivery
        return


@pytest.mark.parametrize("task", ["_reading_task", "_flusher_task", "_ping_interval_task"])
async def test_a_client_whose_task_has_ended_connects_anew(start_server: StartServer, task: str) -> None:
    """The library starts none of them again. Subscriptions and endpoints come back."""
    broker = start_server()
    server, client = (
        await NatsBus.connect(BusAccess(broker.url), "server", times=SELDOM_PINGED),
        await NatsBus.connect(BusAccess(broker.url), "client", times=SELDOM_PINGED),
    )
    ear, served = await server.subscribe("news"), await server.serve("echo", "echo", "echo")
    await server.flush()
    getattr(server._client, task).cancel()  # pyright: ignore[reportPrivateUsage]
    await until(lambda: server.num_connects == 2)
    await server.flush()
    await client.publish("news", b"hello", {})
    asked = asyncio.create_task(client.request("echo", b"a", {}, LONG_S))
    async with asyncio.timeout(LONG_S):
        assert [delivery.payload async for delivery in _first(ear)] == [b"hello"]
        async for delivery in _first(served):
            await delivery.respond(delivery.payload, {})
        assert (await asked).payload == b"a"
    for bus in (server, client):
        await bus.close()


async def test_a_reconnection_that_has_ended_is_begun_again(start_server: StartServer) -> None:
    first = start_server()
    bus = await NatsBus.connect(BusAccess(first.url), "test")
    first.stop()
    await until(lambda: bus._client.is_reconnecting)  # pyright: ignore[reportPrivateUsage]
    reconnecting = bus._client._reconnection_task  # pyright: ignore
    assert reconnecting is not None
    reconnecting.cancel()
    start_server(port_of(first))
    await until(lambda: bus.num_connects == 2)
    await bus.flush()
    await bus.close()


@pytest.mark.parametrize(
    "line", [b"INFO {\r\n", b"-ERR \r\n", b"MSG \xff 1 0\r\n\r\n", b"gibberish\r\n"], ids=["info", "err", "msg", "word"]
)
async def test_what_the_library_cannot_read_deafens_nobody(line: bytes) -> None:
    """Whatever it raises over what comes from the broker, the connection is made anew."""
    connections: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A broker that sends each client's messages back to it, and says something odd to the first one."""
        connections.append(writer)
        is_first = len(connections) == 1
        writer.write(b'INFO {"max_payload":8388608,"headers":true}\r\n')
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while words := (await reader.readline()).split():
                match words:
                    case [b"PING"]:
                        writer.write(b"PONG\r\n")
                    case [b"PUB", subject, size]:
                        payload = await reader.readexactly(int(size) + 2)
                        writer.write(b"MSG %b 1 %b\r\n%b" % (subject, size, payload))
                        if is_first:
                            writer.write(line)
                    case _:
                        pass

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        bus = await NatsBus.connect(
            BusAccess(f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}"), "test", times=SELDOM_PINGED
        )
        await bus.flush()
        await until(lambda: bus.num_connects == 2)
        await bus.flush()
        await bus.close()
        for writer in connections:
            writer.close()


async def test_a_full_buffer_is_an_error_and_keeps_nothing(start_server: StartServer) -> None:
    broker = start_server()
    bus = await NatsBus.connect(BusAccess(broker.url), "test")
    ear = await bus.subscribe("silent")
    broker.stop()
    await until(lambda: not bus.is_connected)
    size = 4_000_000
    with pytest.raises(BusError, match="full"):
        for _ in range(BUFFER_BYTES // size + 1):
            await bus.publish("news", bytes(size), {})
    with pytest.raises(BusError, match="full"):
        await bus.request("silent", bytes(size), {}, LONG_S)
    async with asyncio.timeout(LONG_S):
        await bus.close()
        assert bus.closed.is_set() and [d async for d in ear] == []


async def test_an_endpoint_takes_in_so_many_requests(bus: NatsBus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.bus.limits.MAX_WAITING", 2)
    subject = f"test.{uuid4().hex}"
    served = await bus.serve("slow", "slow", subject)
    await bus.flush()
    asked = [asyncio.create_task(bus.request(subject, b"%d" % n, {}, LONG_S if n < 2 else 0.5)) for n in range(5)]
    await until(lambda: bus.num_dropped == 3)
    taken = 0
    async for delivery in served:
        await delivery.respond(delivery.payload, {})
        if (taken := taken + 1) == 2:
            break
    answers = await asyncio.gather(*asked, return_exceptions=True)
    assert [isinstance(answer, RequestTimedOutError) for answer in answers] == [False, False, True, True, True]


async def test_the_end_of_the_connection_is_heard(bus: NatsBus) -> None:
    assert not bus.closed.is_set()
    await bus.close()
    assert bus.closed.is_set()


async def test_closing_while_the_broker_is_away_ends_everything_soon(start_server: StartServer) -> None:
    broker = start_server()
    bus = await NatsBus.connect(BusAccess(broker.url), "test")
    ear, served = await bus.subscribe("news"), await bus.serve("echo", "echo", "echo")
    broker.stop()
    await until(lambda: not bus.is_connected)
    request = asyncio.create_task(bus.request("echo", b"", {}, 10 * LONG_S))
    async with asyncio.timeout(LONG_S):
        await asyncio.sleep(0)
        await bus.close()
        assert [d async for d in ear] == [] and [d async for d in served] == []
        with pytest.raises(BusClosedError):
            await request


@pytest.mark.parametrize("num_passes", range(8))
@pytest.mark.parametrize("silent_from", ["INFO", "PONG", "nowhere"])
async def test_who_closes_while_it_connects_anew_stays_closed(silent_from: str, num_passes: int) -> None:
    """The answer that it waits for, or the end of the connection, may come together with the cancellation."""
    is_back = asyncio.Event()
    writers: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A broker that ends its first connection, and falls silent in the second."""
        writers.append(writer)
        is_first = len(writers) == 1
        if silent_from == "INFO" and not is_first:
            is_back.set()
            return
        writer.write(b'INFO {"max_payload":8388608,"headers":true}\r\n')
        with contextlib.suppress(ConnectionError):
            while words := (await reader.readline()).split():
                if words[0] == b"PING" and (is_first or silent_from == "nowhere"):
                    writer.write(b"PONG\r\n")
                if words[0] == b"PING" and not is_first:
                    is_back.set()
                if words[0] == b"SUB" and is_first:
                    writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        bus = await NatsBus.connect(BusAccess(f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}"), "test")
        await is_back.wait()
        for _ in range(num_passes):
            await asyncio.sleep(0)
        async with asyncio.timeout(LONG_S):
            await bus.close()
        assert bus._client.is_closed and bus.closed.is_set()  # pyright: ignore[reportPrivateUsage]
        task = bus._client._reconnection_task  # pyright: ignore
        assert task is not None and task.done()
        for writer in writers:
            writer.close()


@pytest.mark.slow
async def test_a_cancelled_publish_is_cancelled(start_server: StartServer) -> None:
    """The library swallows a cancellation while it waits for a full buffer to drain."""
    broker = start_server()
    bus = await NatsBus.connect(BusAccess(broker.url), "test")
    os.kill(broker.pid, signal.SIGSTOP)
    try:
        returned = 0

        async def publish_for_ever() -> None:
            nonlocal returned
            while True:
                await bus.publish("flood", bytes(4_000_000), {})
                returned += 1

        flood = asyncio.create_task(publish_for_ever())
        seen = -1
        while seen != returned:  # until the buffers between us and the stopped server are full
            seen = returned
            await asyncio.sleep(0.5)
        flood.cancel()
        async with asyncio.timeout(LONG_S):
            with pytest.raises(asyncio.CancelledError):
                await flood
        async with asyncio.timeout(LONG_S):
            await bus.close()  # of what is unsent, nothing holds it up for long
        assert bus.closed.is_set()
    finally:
        os.kill(broker.pid, signal.SIGCONT)


async def test_an_unreachable_broker_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, and nobody listens
        port = taken.getsockname()[1]
        with pytest.raises(BrokerUnreachableError) as caught:
            await NatsBus.connect(BusAccess(f"nats://127.0.0.1:{port}"), "test", timeout_s=1.0)
    assert f"127.0.0.1:{port}" in str(caught.value) and "\n" not in str(caught.value)
    assert "ConnectionRefused" in str(caught.value)
    assert not caplog.records


async def test_who_gives_up_connecting_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library takes a cancellation for one more failure where it comes together with one, and would go on."""
    swallowed: list[asyncio.CancelledError] = []

    async def connect(self: BrokerTransport, *args: object, **kwargs: object) -> None:
        try:
            await asyncio.sleep(LONG_S)
        except asyncio.CancelledError as error:
            swallowed.append(error)
            raise ConnectionRefusedError from error

    monkeypatch.setattr(BrokerTransport, "connect", connect)
    async with asyncio.timeout(LONG_S):
        with pytest.raises(BrokerUnreachableError, match="ConnectionRefused"):
            await NatsBus.connect(BusAccess("nats://127.0.0.1:4222"), "test", timeout_s=1.0)
    assert len(swallowed) == 1


async def test_something_that_is_no_broker_is_one_line() -> None:
    writers: list[asyncio.StreamWriter] = []
    server = await asyncio.start_server(lambda reader, writer: writers.append(writer), "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(BrokerUnreachableError, match=f"127.0.0.1:{port}"):
            await NatsBus.connect(BusAccess(f"nats://127.0.0.1:{port}"), "test", timeout_s=0.3)
        for writer in writers:
            writer.close()


@pytest.mark.parametrize(
    "url",
    [
        "nats://host:port", "nats://", "gibberish://x y", "nats://[::1:4222", "ws://10.0.0.5", "http://127.0.0.1",
        "NATS://127.0.0.1:4222", "TLS://me:secret@10.0.0.5",
    ],
)  # fmt: skip
async def test_a_bad_address_is_one_line(url: str) -> None:
    """The library would take some of these for the name of a host."""
    with pytest.raises(UserError, match="no broker's address") as caught:
        await NatsBus.connect(BusAccess(url), "test")
    assert "\n" not in str(caught.value) and "secret" not in str(caught.value)


@pytest.fixture
async def restricted_url(tmp_path: Path) -> AsyncIterator[str]:
    """A server that denies the user `worker` what lies under `secret`."""
    from services.bus.embedded import find_server

    (tmp_path / "nats.conf").write_text(
        f'host: "127.0.0.1"\nport: -1\nports_file_dir: "{tmp_path}"\nmax_payload: 8388608\n{PERMISSIONS}'
    )
    process = await asyncio.create_subprocess_exec(
        find_server(), "-c", str(tmp_path / "nats.conf"), stderr=asyncio.subprocess.DEVNULL
    )
    ports = tmp_path / f"nats-server_{process.pid}.ports"
    await until(lambda: ports.exists() and ports.read_text().endswith("}"))
    yield json.loads(ports.read_text())["nats"][0]
    process.terminate()
    await process.wait()


async def test_a_denied_subscription_is_fatal_at_flush(restricted_url: str) -> None:
    bus = await NatsBus.connect(BusAccess(restricted_url.replace("://", "://worker:pass@")), "test")
    await bus.subscribe("public.>")
    await bus.flush()
    await bus.subscribe("secret.plans")
    with pytest.raises(BrokerUnreachableError, match=r"denies us a subject.*secret\.plans"):
        await bus.flush()
    await bus.close()


async def test_a_denied_publication_is_fatal_at_flush(restricted_url: str) -> None:
    bus = await NatsBus.connect(BusAccess(restricted_url.replace("://", "://worker:pass@")), "test")
    await bus.publish("secret.plans", b"", {})
    with pytest.raises(BrokerUnreachableError, match=r"secret\.plans"):
        await bus.flush()
    await bus.close()


async def test_one_subscription_too_many_is_fatal_at_flush_in_the_brokers_words(tmp_path: Path) -> None:
    """It costs no connection: what was subscribed to before is heard."""
    server = EmbeddedNats.launch(None, tmp_path, "max_subscriptions: 3\n")
    bus = await NatsBus.connect(BusAccess(server.url), "test")
    heard = await bus.subscribe("first")
    await bus.flush()
    for number in range(3):
        await bus.subscribe(f"more.{number}")
    with pytest.raises(BrokerUnreachableError, match="maximum subscriptions exceeded"):
        await bus.flush()
    assert bus.is_connected
    await bus.publish("first", b"yes", {})
    async for delivery in heard:
        assert delivery.payload == b"yes"
        break
    await bus.close()
    server.stop()


async def test_a_wrong_password_is_one_line_without_the_password(restricted_url: str) -> None:
    with pytest.raises(BrokerRefusesError, match="password") as caught:
        await NatsBus.connect(BusAccess(restricted_url.replace("://", "://worker:hunter2@")), "test")
    assert "hunter2" not in str(caught.value)


async def test_a_service_says_who_it_is_now(bus: NatsBus, nats_url: str) -> None:
    """A worker that joins anew is another incarnation; who has no name is called what its connection is."""
    server = await NatsBus.connect(BusAccess(nats_url), "its-connection")
    name, identity = f"service-{uuid4().hex[:8]}", {"incarnation": "one"}
    await server.announce(name, "does this and that", identity)
    await server.serve(name, "answer", f"test.{name}.answer", metadata={"carries": "Question"})
    await server.flush()

    async def info() -> dict[str, Any]:
        return json.loads((await bus.request(f"$SRV.INFO.{name}", b"", {}, LONG_S)).payload)

    first = await info()
    assert (first["description"], first["metadata"]) == (
        "does this and that", {"id": "its-connection", "incarnation": "one"},
    )  # fmt: skip
    assert first["endpoints"][0]["metadata"] == {"carries": "Question"}
    identity["incarnation"] = "two"
    assert (await info())["metadata"]["incarnation"] == "two"
    await server.close()
