import random
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from services.bus.base import Bus
from services.bus.memory import MemoryBus
from services.bus.nats import NatsBus
from services.sim.platform.bus import SimBroker
from services.trust.keys import BusAccess

Connect = Callable[[], Awaitable[Bus]]


@pytest.fixture(params=["memory", "nats", "sim"])
async def connect(request: pytest.FixtureRequest) -> AsyncIterator[Connect]:
    """Opens one more connection to the same bus. A memory bus is its own and only connection."""
    opened: list[Bus] = []
    memory = MemoryBus()
    simulated = SimBroker(random.Random(0))
    url = request.getfixturevalue("nats_url") if request.param == "nats" else ""

    async def open_one() -> Bus:
        bus: Bus
        match request.param:
            case "nats":
                bus = await NatsBus.connect(BusAccess(url), "test")
            case "sim":
                bus = simulated.connect(f"test-{len(opened)}")
            case _:
                bus = memory
        opened.append(bus)
        return bus

    yield open_one
    for bus in opened:
        await bus.close()


@pytest.fixture
async def bus(connect: Connect) -> Bus:
    return await connect()
