"""A broker of three real servers: what a member does when one of them ends, stands still, or is cut off."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from schemas import subjects
from schemas.subjects import Role
from services.bus.base import LOST, BusError, NoRespondersError
from services.bus.embedded import EmbeddedNats
from services.bus.nats import NatsBus
from services.bus.servers import in_order
from services.errors import BrokerRefusesError
from services.trust.certificates import CA_FILE
from services.trust.keys import BROKER_FILE, BusAccess, MeshKeys
from tests.bus.cluster import LONELY, Cluster, cluster
from tests.waiting import until

LONG_S = 30.0
ASKED = subjects.PLACE.pattern
Join = Callable[[Role, int], contextlib.AbstractAsyncContextManager[NatsBus]]
Two = Callable[[int, int], contextlib.AbstractAsyncContextManager[tuple[NatsBus, NatsBus]]]


@pytest.fixture(scope="module")
def keys() -> MeshKeys:
    return MeshKeys.fresh(["127.0.0.1"])


@pytest.fixture(params=["open", "encrypted"])
async def three(request: pytest.FixtureRequest, keys: MeshKeys, tmp_path: Path) -> AsyncIterator[Cluster]:
    """Three servers that see each other, with keys and TLS or without."""
    access = ""
    if request.param == "encrypted":
        keys.save(tmp_path / "keys")
        access = (tmp_path / "keys" / BROKER_FILE).read_text()
    async with cluster(tmp_path / "servers", access) as servers:
        yield servers


@pytest.fixture
def join(request: pytest.FixtureRequest, three: Cluster, keys: MeshKeys, tmp_path: Path) -> Join:
    """Connects a member of a role that begins with this server, and closes it."""
    is_encrypted = "encrypted" in request.node.callspec.id

    @asynccontextmanager
    async def connected(role: Role, index: int) -> AsyncGenerator[NatsBus]:
        names = (f"{role}-{number}" for number in range(99))
        name = next(name for name in names if in_order(three.urls, name)[0] == three.urls[index])
        access = BusAccess(three.url)
        if is_encrypted:
            access = BusAccess(three.url, keys.roles[role].identity(name), tmp_path / "keys" / CA_FILE)
        bus = await NatsBus.connect(access, name)
        try:
            assert at(three, bus) == index
            await until(lambda: bus.num_seen == 3)
            yield bus
        finally:
            await bus.close()

    return connected


@pytest.fixture
def two(join: Join) -> Two:
    """Connects one who answers and one who asks, each to its own server."""

    @asynccontextmanager
    async def connected(first_at: int, second_at: int) -> AsyncGenerator[tuple[NatsBus, NatsBus]]:
        async with join(Role.SCHEDULER, first_at) as first, join(Role.GATEWAY, second_at) as second, echo(first):
            await until(lambda: answered(second))
            yield first, second

    return connected


def at(three: Cluster, bus: NatsBus) -> int:
    """Return at which of the servers a member is."""
    return three.urls.index(bus.server)


@asynccontextmanager
async def echo(bus: NatsBus) -> AsyncIterator[None]:
    """Answer everything that is asked."""
    served = await bus.serve("scheduler", "place", ASKED)

    async def answer() -> None:
        async for delivery in served:
            await delivery.respond(delivery.payload, {})

    task = asyncio.create_task(answer())
    yield
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def answered(bus: NatsBus) -> bool:
    """Return whether somebody answers."""
    try:
        return (await bus.request(ASKED, b"x", {}, LONG_S)).payload == b"x"
    except (NoRespondersError, BusError):
        return False


async def test_who_loses_its_server_is_at_the_next_one_and_is_found_there(three: Cluster, two: Two) -> None:
    async with two(0, 1) as (first, second):
        three.kill(0)
        await until(lambda: first.is_connected and at(three, first) == 1)
        await until(lambda: answered(second))
        assert second.num_connects == 1 and (first.num_connects, first.num_reroutes) == (2, 0)
        await until(lambda: second.num_reroutes == 1)
        three.start(0)
        await until(lambda: second.num_seen == 3)
        assert at(three, first) == 1, "nobody goes back by itself"


async def test_what_was_asked_over_a_lost_server_ends_at_once(three: Cluster, join: Join) -> None:
    async with join(Role.GATEWAY, 0) as first, join(Role.SCHEDULER, 1) as second:
        await second.subscribe(ASKED)
        await second.flush()
        await until(lambda: asks(first))
        asked = asyncio.ensure_future(first.request(ASKED, b"", {}, LONG_S))
        await first.flush()
        three.kill(0)
        with pytest.raises(BusError, match=LOST):
            await asked
        await until(lambda: at(three, first) == 1)


async def asks(bus: NatsBus) -> bool:
    """Return whether somebody would get what is asked; nobody answers."""
    try:
        await bus.request(ASKED, b"", {}, 0.05)
    except NoRespondersError:
        return False
    except BusError:
        return True
    return True


async def test_a_server_that_stands_still_is_left(three: Cluster, two: Two) -> None:
    async with two(1, 2) as (first, second):
        three.stand_still(1)
        await until(lambda: first.is_connected and at(three, first) == 2)
        await until(lambda: answered(second))
        assert second.num_connects == 1


async def test_who_is_at_a_lonely_server_goes_to_another_one(three: Cluster, two: Two) -> None:
    async with two(LONELY, 0) as (first, second):
        three.split()
        await until(lambda: first.is_connected and at(three, first) != LONELY)
        await until(lambda: answered(second))
        assert second.num_connects == 1 and second.num_reroutes >= 1
        three.heal()
        await until(lambda: first.num_seen == 3)


async def test_two_servers_that_do_not_see_each_other_are_left_for_one_that_sees_both(three: Cluster, two: Two) -> None:
    async with two(LONELY, 0) as (first, second):
        three.part(0)
        await until(lambda: at(three, first) == at(three, second) == 1 and first.is_connected and second.is_connected)
        await until(lambda: answered(second))
        three.heal()


async def test_a_lonely_server_is_kept_while_no_other_one_answers(
    three: Cluster, join: Join, caplog: pytest.LogCaptureFixture
) -> None:
    async with join(Role.SCHEDULER, LONELY) as bus:
        three.stand_still(0)
        three.kill(1)
        await until(lambda: "no other one sees more" in caplog.text)
        assert bus.num_connects == 1 and at(three, bus) == LONELY and bus.is_connected


async def test_a_server_that_is_about_to_end_is_left_before_it_does(three: Cluster, two: Two) -> None:
    async with two(0, 1) as (first, second):
        three.send_away(0)
        await until(lambda: first.is_connected and at(three, first) == 1)
        await until(lambda: answered(second))


async def test_one_server_that_does_not_know_us_is_passed_over(tmp_path: Path) -> None:
    mine, other = MeshKeys.fresh(), MeshKeys.fresh()
    servers = [EmbeddedNats.launch(None, tmp_path / each.mesh.account, each.broker_config) for each in (other, mine)]
    try:
        for name in ("scheduler-0", "scheduler-1", "scheduler-2"):
            access = BusAccess(f"{servers[0].url},{servers[1].url}", mine.roles[Role.SCHEDULER].identity(name))
            bus = await NatsBus.connect(access, name, LONG_S)
            assert bus.server == servers[1].url
            await bus.close()
        access = BusAccess(f"{servers[0].url},{servers[0].url}", mine.roles[Role.SCHEDULER].identity("scheduler-0"))
        with pytest.raises(BrokerRefusesError, match="does not know the key"):
            await NatsBus.connect(access, "scheduler-0", LONG_S)
    finally:
        for server in servers:
            server.stop()


async def test_servers_that_do_not_name_each_other_are_warned_of(
    nats_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Then nobody can be told that it is on the smaller side of a cut."""
    bus = await NatsBus.connect(BusAccess(f"{nats_url},nats://127.0.0.1:1,nats://127.0.0.1:2"), "test", LONG_S)
    assert "no_advertise" in caplog.text
    await bus.close()
