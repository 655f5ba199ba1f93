"""What every bus does. The memory bus and NATS pass the same tests."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from uuid import uuid4

import pytest

from services.bus.base import (
    Bus,
    BusClosedError,
    Delivery,
    MessageTooLargeError,
    NoRespondersError,
    RequestTimedOutError,
    Subscription,
)
from services.bus.limits import MAX_PAYLOAD_BYTES
from services.sim.platform.bus import SimBus
from tests.bus.conftest import Connect

LONG_S = 30.0
"""Far more than anything here takes: a test that reaches it has failed."""


@pytest.fixture
def root() -> str:
    """A subject prefix of this test's own: the server is shared."""
    return f"test.{uuid4().hex}"


async def take(subscription: Subscription, count: int) -> list[Delivery]:
    """Return the next `count` messages."""
    taken: list[Delivery] = []
    async with asyncio.timeout(LONG_S):
        async for delivery in subscription:
            taken.append(delivery)
            if len(taken) == count:
                break
    return taken


async def take_rest(subscription: Subscription) -> list[Delivery]:
    """Close the subscription, and return what had come before."""
    await subscription.close()
    async with asyncio.timeout(LONG_S):
        return [delivery async for delivery in subscription]


@asynccontextmanager
async def echo(bus: Bus, subject: str) -> AsyncIterator[Subscription]:
    """Serve a subject: each payload comes back in capitals, under the header of the request."""
    served = await bus.serve("echo", "echo", subject)
    await bus.flush()

    async def answer() -> None:
        async for delivery in served:
            assert delivery.expects_reply
            await delivery.respond(delivery.payload.upper(), {"Echo": delivery.headers.get("Say", "")})

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(answer(), name="echo")
        yield served
        await served.close()


async def test_a_message_reaches_every_listener_with_its_headers(connect: Connect, root: str) -> None:
    one, two, speaker = await connect(), await connect(), await connect()
    ears = [await one.subscribe(f"{root}.news"), await two.subscribe(f"{root}.news")]
    for bus in (one, two):
        await bus.flush()
    await speaker.publish(f"{root}.news", b"hello", {"Kvmesh-Schema": "KVLanded", "traceparent": "00-ab-cd-01"})
    for ear in ears:
        [heard] = await take(ear, 1)
        assert (heard.subject, heard.payload, heard.expects_reply) == (f"{root}.news", b"hello", False)
        assert heard.headers["Kvmesh-Schema"] == "KVLanded"
        assert heard.headers["traceparent"] == "00-ab-cd-01"
        await heard.respond(b"nobody asked", {})


async def test_publishing_to_nobody_is_fine(bus: Bus, root: str) -> None:
    await bus.publish(f"{root}.nobody", b"", {})
    await bus.flush()


@pytest.mark.parametrize(
    ("pattern", "heard"),
    [
        ("a.b", ["a.b"]),
        ("a.*", ["a.b", "a.c"]),
        ("*.b", ["a.b", "b.b"]),
        ("a.>", ["a.b", "a.c", "a.b.c"]),
        (">", ["a", "a.b", "a.c", "b.b", "a.b.c"]),
    ],
)
async def test_wildcards(bus: Bus, root: str, pattern: str, heard: list[str]) -> None:
    ear = await bus.subscribe(f"{root}.{pattern}")
    for subject in ("a", "a.b", "a.c", "b.b", "a.b.c"):
        await bus.publish(f"{root}.{subject}", b"", {})
    await bus.publish(f"{root}x.a", b"", {})
    await bus.flush()
    taken = [delivery.subject.removeprefix(f"{root}.") for delivery in await take(ear, len(heard))]
    assert taken == heard
    assert await take_rest(ear) == []


async def test_each_message_reaches_one_member_of_each_queue_group(connect: Connect, root: str) -> None:
    buses = [await connect() for _ in range(6)]
    members = [await bus.subscribe(f"{root}.*", "group") for bus in buses[:3]]
    other_group = await buses[3].subscribe(f"{root}.work", "others")
    loner = await buses[4].subscribe(f"{root}.work")
    for bus in buses:
        await bus.flush()
    speaker = buses[5]
    for number in range(90):
        await speaker.publish(f"{root}.work", str(number).encode(), {})
    expected = [str(number).encode() for number in range(90)]
    assert [d.payload for d in await take(loner, 90)] == expected
    assert [d.payload for d in await take(other_group, 90)] == expected
    for bus in buses:
        await bus.flush()
    shares = [[d.payload for d in await take_rest(member)] for member in members]
    assert Counter(payload for share in shares for payload in share) == Counter(expected)
    assert all(shares), "a member of the group got nothing of 90 messages"


async def test_order_per_publisher(connect: Connect, root: str) -> None:
    listener, *speakers = [await connect() for _ in range(4)]
    ear = await listener.subscribe(f"{root}.*")
    await listener.flush()

    async def speak(name: int, bus: Bus) -> None:
        for number in range(200):
            await bus.publish(f"{root}.{name}", str(number).encode(), {})

    await asyncio.gather(*(speak(name, bus) for name, bus in enumerate(speakers)))
    taken = await take(ear, 600)
    for name in range(3):
        numbers = [int(d.payload) for d in taken if d.subject.endswith(f".{name}")]
        assert numbers == list(range(200))


async def test_a_request_gets_its_reply(connect: Connect, root: str) -> None:
    server, client = await connect(), await connect()
    async with echo(server, f"{root}.echo"):
        reply = await client.request(f"{root}.echo", b"hello", {"Say": "hi"}, LONG_S)
        assert (reply.payload, reply.headers["Echo"], reply.expects_reply) == (b"HELLO", "hi", False)


async def test_many_requests_at_once_get_each_its_own_reply(connect: Connect, root: str) -> None:
    server, client = await connect(), await connect()
    async with echo(server, f"{root}.echo"):
        asked = [client.request(f"{root}.echo", f"q{number}".encode(), {}, LONG_S) for number in range(300)]
        replies = await asyncio.gather(*asked)
    assert [reply.payload for reply in replies] == [f"Q{number}".encode() for number in range(300)]


async def test_a_subject_nobody_serves_is_refused_at_once(bus: Bus, root: str) -> None:
    with pytest.raises(NoRespondersError, match=root):
        await bus.request(f"{root}.nobody", b"", {}, LONG_S)


async def test_an_endpoint_that_was_closed_is_served_no_more(connect: Connect, root: str) -> None:
    server, client = await connect(), await connect()
    async with echo(server, f"{root}.echo"):
        assert (await client.request(f"{root}.echo", b"a", {}, LONG_S)).payload == b"A"
    await server.flush()
    with pytest.raises(NoRespondersError):
        await client.request(f"{root}.echo", b"a", {}, LONG_S)


async def test_a_server_that_never_answers_is_a_timeout(connect: Connect, root: str) -> None:
    server, client = await connect(), await connect()
    ear = await server.subscribe(f"{root}.silent")
    await server.flush()
    with pytest.raises(RequestTimedOutError, match=f"{root}.silent"):
        await client.request(f"{root}.silent", b"", {}, 0.05)
    [asked] = await take(ear, 1)
    await asked.respond(b"too late", {})


async def test_a_published_message_on_a_served_subject_expects_no_reply(bus: Bus, root: str) -> None:
    served = await bus.serve("echo", "echo", f"{root}.echo")
    await bus.flush()
    await bus.publish(f"{root}.echo", b"no reply, please", {})
    [delivery] = await take(served, 1)
    assert not delivery.expects_reply
    await delivery.respond(b"", {})


async def test_too_large_a_message_is_refused_before_it_is_sent(bus: Bus, root: str) -> None:
    ear = await bus.subscribe(f"{root}.>")
    await bus.flush()
    headers = {"Kvmesh-Schema": "x" * 100}
    fits, over = bytes(MAX_PAYLOAD_BYTES - 200), bytes(MAX_PAYLOAD_BYTES - 50)
    assert bus.max_bytes == MAX_PAYLOAD_BYTES
    with pytest.raises(MessageTooLargeError, match=rf" {MAX_PAYLOAD_BYTES + 13} bytes.* {MAX_PAYLOAD_BYTES} "):
        await bus.publish(f"{root}.big", bytes(MAX_PAYLOAD_BYTES + 1), {})
    with pytest.raises(MessageTooLargeError):
        await bus.request(f"{root}.big", over, headers, LONG_S)
    await bus.publish(f"{root}.big", fits, headers)
    await bus.flush()
    [heard] = await take(ear, 1)
    assert len(heard.payload) == len(fits)


async def test_too_large_a_reply_is_an_error_of_the_server(connect: Connect, root: str) -> None:
    server, client = await connect(), await connect()
    served = await server.serve("big", "big", f"{root}.big")
    await server.flush()
    request = asyncio.create_task(client.request(f"{root}.big", b"", {}, LONG_S))
    [asked] = await take(served, 1)
    with pytest.raises(MessageTooLargeError):
        await asked.respond(bytes(MAX_PAYLOAD_BYTES + 1), {})
    await asked.respond(b"ok", {})
    assert (await request).payload == b"ok"


async def test_closing_a_subscription_ends_its_iteration_after_what_had_come(bus: Bus, root: str) -> None:
    ear = await bus.subscribe(f"{root}.a")
    await bus.publish(f"{root}.a", b"1", {})
    await bus.flush()
    assert [d.payload for d in await take_rest(ear)] == [b"1"]
    assert await take_rest(ear) == [], "closing and iterating once more is harmless"


@pytest.mark.parametrize("kind", ["subscribe", "serve"])
async def test_closing_the_bus_ends_every_iteration(bus: Bus, root: str, kind: str) -> None:
    ear = await (bus.subscribe(f"{root}.a") if kind == "subscribe" else bus.serve("s", "a", f"{root}.a"))

    async def listen() -> int:
        return len([delivery async for delivery in ear])

    listening = [asyncio.create_task(listen()) for _ in range(2)]
    await bus.flush()
    await bus.close()
    async with asyncio.timeout(LONG_S):
        assert await asyncio.gather(*listening) == [0, 0]
        assert await listen() == 0


async def test_a_closed_bus_says_so(bus: Bus, root: str) -> None:
    await bus.close()
    await bus.close()
    with pytest.raises(BusClosedError):
        await bus.publish(root, b"", {})
    with pytest.raises(BusClosedError):
        await bus.request(root, b"", {}, LONG_S)
    with pytest.raises(BusClosedError):
        await bus.subscribe(root)
    with pytest.raises(BusClosedError):
        await bus.serve("s", "e", root)
    with pytest.raises(BusClosedError):
        await bus.flush()


async def test_closing_the_bus_ends_a_waiting_request(connect: Connect, root: str) -> None:
    server, client = await connect(), await connect()
    ear = await server.subscribe(f"{root}.silent")
    await server.flush()
    request = asyncio.create_task(client.request(f"{root}.silent", b"", {}, 10 * LONG_S))
    await take(ear, 1)
    await client.close()
    async with asyncio.timeout(LONG_S):
        with pytest.raises(BusClosedError):
            await request


async def test_a_cancelled_request_is_cancelled_and_others_go_on(connect: Connect, root: str) -> None:
    server, client = await connect(), await connect()
    ear = await server.subscribe(f"{root}.slow")
    await server.flush()
    doomed = asyncio.create_task(client.request(f"{root}.slow", b"1", {}, LONG_S))
    [first] = await take(ear, 1)
    other = asyncio.create_task(client.request(f"{root}.slow", b"2", {}, LONG_S))
    [second] = await take(ear, 1)
    doomed.cancel()
    with pytest.raises(asyncio.CancelledError):
        await doomed
    await first.respond(b"for nobody", {})
    await second.respond(b"two", {})
    assert (await other).payload == b"two"


async def test_a_cancelled_listener_leaves_the_subscription_open(bus: Bus, root: str) -> None:
    ear = await bus.subscribe(f"{root}.a")
    await bus.flush()
    listening = asyncio.create_task(take(ear, 1))
    await asyncio.sleep(0)
    listening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await listening
    await bus.publish(f"{root}.a", b"still here", {})
    assert [d.payload for d in await take(ear, 1)] == [b"still here"]


async def test_a_reader_that_is_too_slow_loses_messages_and_that_is_counted(
    bus: Bus, root: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if isinstance(bus, SimBus):
        pytest.skip("its readers are never that slow")
    monkeypatch.setattr("services.bus.limits.MAX_WAITING", 4)
    ear = await bus.subscribe(f"{root}.news")
    await bus.flush()
    for number in range(10):
        await bus.publish(f"{root}.news", b"%d" % number, {})
    await bus.flush()
    assert bus.num_dropped == 6
    assert [delivery.payload for delivery in await take(ear, 4)] == [b"0", b"1", b"2", b"3"]
    await bus.publish(f"{root}.news", b"later", {})
    assert [delivery.payload for delivery in await take(ear, 1)] == [b"later"]
    assert any("too slow" in record.message for record in caplog.records)


async def test_a_flush_comes_after_what_was_sent_before(connect: Connect, root: str) -> None:
    one, other = await connect(), await connect()
    ear = await other.subscribe(f"{root}.news")
    await other.flush()
    for number in range(500):
        await one.publish(f"{root}.news", b"%d" % number, {})
    await one.flush()
    await other.flush()
    assert [delivery.payload for delivery in await take_rest(ear)] == [b"%d" % number for number in range(500)]


async def test_many_flushes_at_once_return(bus: Bus) -> None:
    async with asyncio.timeout(LONG_S):
        await asyncio.gather(*(bus.flush() for _ in range(100)))


@pytest.mark.parametrize("num_turns", [1, 2, 3, 10])
async def test_a_flush_that_is_given_up_harms_nothing(connect: Connect, root: str, num_turns: int) -> None:
    """Cancelled, or out of time: what comes back late finds nobody, and the bus goes on detector."""
    server, client = await connect(), await connect()
    flushes: list[asyncio.Task[None]] = []
    for number in range(20):
        flushes.append(asyncio.create_task(client.flush(LONG_S if number % 2 else 1e-6)))
        for _ in range(num_turns):
            await asyncio.sleep(0)
        if number % 2:
            flushes[-1].cancel()
    ends = await asyncio.gather(*flushes, return_exceptions=True)
    assert all(isinstance(end, asyncio.CancelledError | RequestTimedOutError | None) for end in ends)
    async with echo(server, f"{root}.echo"):
        assert (await client.request(f"{root}.echo", b"a", {}, LONG_S)).payload == b"A"
    await client.flush()
    assert client.num_connects == 1


async def test_closing_the_bus_ends_a_flush(bus: Bus) -> None:
    flushing = asyncio.create_task(bus.flush(10 * LONG_S))
    await asyncio.sleep(0)
    await bus.close()
    async with asyncio.timeout(LONG_S):
        assert isinstance((await asyncio.gather(flushing, return_exceptions=True))[0], BusClosedError | None)


async def test_a_bus_says_how_often_it_has_connected(bus: Bus) -> None:
    assert bus.num_connects == 1
