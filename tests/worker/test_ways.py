"""Before a holder joins, the ways to other machines' holders are tried, with real data planes. An address of the
loopback for each stands for a machine of its own."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager

import msgspec
import pytest

from dataplane.addresses import listen
from dataplane.blocks.ticket import TicketSecrets
from dataplane.ends.way import try_way
from dataplane.protocol.stream import TransferFailedError
from schemas import subjects
from schemas.handoff import Endpoint
from schemas.ids import WorkerId
from schemas.kv import ReadEnd
from schemas.worker import DescribeFleet, FleetDescribed
from services.bus.memory import MemoryBroker, MemoryBus
from services.bus.typed import Received, TypedBus
from services.holder.kv.ways import Ways
from services.times import Times
from tests.plane.harness import SECRETS, Holder
from tests.waiting import wait_until
from tests.wire.examples import LOAD

HERE, THERE = WorkerId("decode-0"), WorkerId("prefill-0")
AT_ONCE = Times(plane=msgspec.structs.replace(Times().plane, try_s=0.3))


@contextlib.contextmanager
def plane(address: str, **options: object) -> Iterator[Holder]:
    with contextlib.closing(Holder(("tcp",), host=address, **options)) as holder:
        yield holder


@contextlib.contextmanager
def answers_all_with(said: bytes) -> Iterator[Endpoint]:
    """An address at which somebody says this to whoever connects, and no more."""
    with listen("127.0.0.1", 0) as listener:
        held: list[socket.socket] = []

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    held.append(listener.accept()[0])
                    held[-1].sendall(said)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield Endpoint(host="127.0.0.1", port=listener.getsockname()[1], carriers=("tcp",), arena="a")
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        thread.join(30)
        for sock in held:
            sock.close()


def closed() -> Endpoint:
    with listen("127.0.0.1", 0) as sock:
        return Endpoint(host="127.0.0.1", port=sock.getsockname()[1], carriers=("tcp",), arena="a")


def failure(endpoint: Endpoint, secrets: TicketSecrets = SECRETS, within_s: float = 30) -> TransferFailedError:
    with pytest.raises(TransferFailedError) as failed:
        try_way(endpoint, HERE, secrets, within_s)
    return failed.value


def test_four_mebibytes_come_from_a_holder_of_ours() -> None:
    with plane("127.0.0.1") as holder:
        assert try_way(holder.endpoint, HERE, SECRETS, 30) > 0
        assert not holder.server.num_refused and not holder.server.num_junk


def test_no_way_leads_there() -> None:
    assert failure(closed()).code is ReadEnd.CONNECT
    with answers_all_with(b"") as silent:  # a way that loses all but the greeting is like this too
        assert failure(silent, within_s=0.2).code is ReadEnd.DEADLINE
    with answers_all_with(b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(100)) as other:
        assert failure(other).code is ReadEnd.PROTOCOL


def test_who_lacks_the_secret_is_told_so_and_gets_nothing() -> None:
    with plane("127.0.0.1") as holder:
        error = failure(holder.endpoint, TicketSecrets([b"another mesh's secret"]))
        assert error.code is ReadEnd.TICKET and "ticket_secrets" in error.detail
        wait_until(lambda: holder.server.num_refused == 1)


def test_two_machines_that_are_given_one_address_are_told_apart() -> None:
    with plane("127.0.0.1") as holder:
        error = failure(msgspec.structs.replace(holder.endpoint, arena="kvmesh-another"))
        assert error.code is ReadEnd.TICKET and "another holder" in error.detail


def test_ports_are_taken_from_a_range_until_none_is_left() -> None:
    with listen("127.0.0.1", 0) as sock:
        taken = sock.getsockname()[1]
        with pytest.raises(OSError, match="in use"), plane("127.0.0.1", ports=(taken,)):
            pass
        with plane("127.0.0.1") as first, plane("127.0.0.1", ports=(taken, first.endpoint.port, 0)) as second:
            assert second.endpoint.port not in (taken, first.endpoint.port)


@asynccontextmanager
async def asks(
    there: Endpoint, *, times: Times = AT_ONCE, ports: str = "", answers: bool = True
) -> AsyncGenerator[Ways]:
    """A holder that is about to join, and what another one serves at an address."""
    broker = MemoryBroker()
    theirs, ours = (TypedBus(MemoryBus(broker), name) for name in ("theirs", "ours"))

    async def describe(_: Received[DescribeFleet]) -> FleetDescribed:
        worker = msgspec.structs.replace(LOAD.worker, worker_id=THERE, endpoint=there)
        return FleetDescribed(policy="", ready=True, workers=(msgspec.structs.replace(LOAD, worker=worker),))

    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        await theirs.serve(tasks, subjects.FLEET, (), describe)
        if answers:
            answering = Ways(THERE, theirs, SECRETS, times, "")
            await theirs.serve(tasks, subjects.WAY, (THERE, "*"), answering.on_try)
        yield Ways(HERE, ours, SECRETS, times, ports)
        await ours.close()
        await theirs.close()


async def test_nothing_is_said_where_both_can_read() -> None:
    with plane("127.0.0.2") as ours, plane("127.0.0.1") as there:
        async with asks(there.endpoint, times=Times()) as ways:
            assert await ways.problems(ours.endpoint) == []


async def test_each_way_that_is_closed_is_named_with_the_port_to_open() -> None:
    with plane("127.0.0.2") as ours:
        mine = msgspec.structs.replace(ours.endpoint, port=closed().port)
        async with asks(there := closed(), ports="7000-7015") as ways:
            back, forth = await ways.problems(mine)
        assert "prefill-0 cannot read from decode-0" in back and "open TCP ports 7000-7015 of this machine" in back
        assert "decode-0 cannot read from prefill-0" in forth and f"open TCP port {there.port} of prefill-0's" in forth
        async with asks(there) as ways:
            assert f"open TCP port {mine.port} (--plane-ports sets which)" in (await ways.problems(mine))[0]


async def test_nobody_is_tried_who_is_on_this_machine_or_has_ended() -> None:
    with plane("127.0.0.1") as ours:
        async with asks(closed()) as ways:
            assert await ways.problems(ours.endpoint) == []
    with plane("127.0.0.2") as ours:
        async with asks(closed(), answers=False) as ways:
            assert await ways.problems(ours.endpoint) == []


async def test_without_a_scheduler_nobody_is_known() -> None:
    ways = Ways(HERE, TypedBus(MemoryBus(), "ours"), SECRETS, AT_ONCE, "")
    assert await ways.problems(closed()) == []
