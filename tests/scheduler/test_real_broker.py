"""The scheduler beside a real broker: what it says of connections, and an outage of its own."""

import asyncio
from pathlib import Path

import pytest

from schemas import permissions
from schemas.request import Placement
from schemas.subjects import Role
from services.bus.embedded import EmbeddedNats
from services.bus.nats import NatsBus
from services.config import GatewayConfig, MeshConfig, SchedulerConfig
from services.scheduler import core as scheduler_core
from services.scheduler.service import run_scheduler
from services.telemetry import Telemetry
from services.trust.keys import BusAccess, MeshKeys
from tests.scheduler.test_scheduler_service import Client, FakeWorker, keep_saying, pinged
from tests.waiting import PATIENCE_S, until


@pytest.mark.slow
async def test_a_broker_that_is_away_for_longer_than_a_silence_takes_nobody_for_dead(tmp_path: Path) -> None:
    """Over a real one. Whoever dies afterwards is still found dead."""
    server = EmbeddedNats.launch(None, tmp_path)
    stop, ready = asyncio.Event(), asyncio.Event()
    async with asyncio.timeout(4 * PATIENCE_S), asyncio.TaskGroup() as tasks:
        buses = [await NatsBus.connect(BusAccess(server.url), name) for name in ("scheduler", "p0", "d0", "client")]
        tasks.create_task(run_scheduler(MeshConfig(), buses[0], Telemetry("scheduler"), stop, ready.set))
        await ready.wait()
        client = Client(buses[3])
        await client.start(tasks)
        workers = [FakeWorker(buses[1], "p0", "prefill"), FakeWorker(buses[2], "d0", "decode")]
        for worker in workers:
            await worker.start(tasks)
        # So rarely that they are asked in between.
        saying = tasks.create_task(keep_saying(*workers, every_s=0.5))
        await pinged(*workers)
        server.stop()
        await asyncio.sleep(1.5 * MeshConfig().scheduler.silent_after_ms / 1e3)  # longer than any silence
        server = EmbeddedNats.launch(int(server.url.rsplit(":", 1)[1]), tmp_path)
        await until(lambda: all(connection.is_connected for connection in buses))
        await pinged(*workers)
        assert await client.workers() == {"p0", "d0"} and client.left.empty()
        assert isinstance(await client.place(), Placement)
        saying.cancel()
        await workers[0].kill()
        assert await client.next_left() == ("p0", "1", "died")
        await workers[1].kill()
        stop.set()
        await client.bus.close()
    server.stop()


PATIENT = MeshConfig(
    scheduler=SchedulerConfig(ping_interval_ms=4_000_000, suspect_after_ms=9_000_000, silent_after_ms=10_000_000),
    gateway=GatewayConfig(worker_silent_ms=10_000_000),
)
"""Nobody is overdue as long as a test may take."""


async def test_who_dies_is_known_dead_by_the_broker_s_word_on_its_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over a real broker, with the permissions of each role. Of strangers' connections, and of one that has two, nobody
    dies."""
    monkeypatch.setattr(scheduler_core, "SECOND_PING_SHARE", 40 * PATIENCE_S)
    keys = MeshKeys.fresh()
    server = EmbeddedNats.launch(None, tmp_path, keys.broker_config)

    async def connect(role: Role, name: str) -> NatsBus:
        return await NatsBus.connect(BusAccess(server.url, keys.roles[role].identity(name)), name)

    async with asyncio.timeout(4 * PATIENCE_S), asyncio.TaskGroup() as tasks:
        stop, ready = asyncio.Event(), asyncio.Event()
        tasks.create_task(
            run_scheduler(PATIENT, await connect(Role.SCHEDULER, "scheduler"), Telemetry("scheduler"), stop, ready.set)
        )
        await ready.wait()
        client = Client(await connect(Role.GATEWAY, "client"))
        await client.start(tasks)
        workers = [FakeWorker(await connect(Role.HOLDER, name), name, "decode") for name in ("d0", "d1")]
        for worker in workers:
            await worker.start(tasks)

        async def are_known() -> bool:
            return await client.workers() == {"d0", "d1"} and all(worker.num_pings for worker in workers)

        await until(are_known)
        await (await connect(Role.DIRECTORY, "stranger")).close()
        num_before = workers[1].num_pings
        await (await connect(Role.HOLDER, "d1")).close()
        await until(lambda: workers[1].num_pings > num_before)
        await workers[0].kill()
        assert await client.next_left() == ("d0", "1", "died")
        assert await client.workers() == {"d1"} and client.left.empty()
        await workers[1].kill()
        stop.set()
        await client.bus.close()
    server.stop()


async def test_a_broker_that_denies_its_word_on_connections_is_good_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever is quiet is asked."""
    with monkeypatch.context() as patch:
        patch.setattr(permissions, "DISCONNECTED", "_BROKER.other")
        keys = MeshKeys.fresh()
    server = EmbeddedNats.launch(None, tmp_path, keys.broker_config)

    async def connect(role: Role, name: str) -> NatsBus:
        return await NatsBus.connect(BusAccess(server.url, keys.roles[role].identity(name)), name)

    async with asyncio.timeout(4 * PATIENCE_S), asyncio.TaskGroup() as tasks:
        stop, ready = asyncio.Event(), asyncio.Event()
        bus = await connect(Role.SCHEDULER, "scheduler")
        tasks.create_task(run_scheduler(MeshConfig(), bus, Telemetry("scheduler"), stop, ready.set))
        await ready.wait()
        client = Client(await connect(Role.GATEWAY, "client"))
        await client.start(tasks)
        worker = FakeWorker(await connect(Role.HOLDER, "d0"), "d0", "decode")
        await worker.start(tasks)
        await pinged(worker)
        await bus.flush()
        await worker.kill()
        assert await client.next_left() == ("d0", "1", "died")
        stop.set()
        await client.bus.close()
    server.stop()
