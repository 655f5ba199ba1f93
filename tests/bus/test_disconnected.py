"""What the brokers that are made up say of the end of a connection, as NATS does
(tests/scheduler/test_scheduler_service.py)."""

import asyncio
import random

import pytest

from schemas.broker import DISCONNECTED, disconnected, name_of
from services.bus.base import Bus, Subscription
from services.bus.memory import MemoryBroker, MemoryBus
from services.sim.platform.bus import SimBroker

PATIENCE_S = 30


async def next_name(ends: Subscription) -> str:
    async with asyncio.timeout(PATIENCE_S):
        async for end in ends:
            return name_of(end.payload)
    raise AssertionError("the subscription has ended")


@pytest.mark.parametrize("kind", ["memory", "sim"])
async def test_the_end_of_a_connection_is_said_once_by_the_name_of_its_client(kind: str) -> None:
    memory, simulated = MemoryBroker(), SimBroker(random.Random(0))

    def connect(name: str) -> Bus:
        return MemoryBus(memory, name) if kind == "memory" else simulated.connect(name)

    detector, one, two = connect("scheduler"), connect("w0"), connect("w1")
    ends = await detector.subscribe(DISCONNECTED)
    await one.close()
    await one.close()
    await two.close()
    assert [await next_name(ends), await next_name(ends)] == ["w0", "w1"]
    await detector.close()


async def test_a_client_that_is_killed_while_the_simulated_broker_stands_still_is_told_once_it_goes_on() -> None:
    broker = SimBroker(random.Random(0))
    detector, killed = broker.connect("scheduler"), broker.connect("w0")
    ends = await detector.subscribe(DISCONNECTED)
    broker.stand_still()
    broker.drop(killed)
    broker.go_on()
    assert await next_name(ends) == "w0"
    await detector.close()


@pytest.mark.parametrize("payload", [b"", b"{}", b"[]", b'{"client":{}}', b'{"client":{"name":3}}', b"\xff"])
def test_what_says_nobody_s_name_is_nobody(payload: bytes) -> None:
    assert name_of(payload) == ""
    assert name_of(disconnected("w0")) == "w0"
