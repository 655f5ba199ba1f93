"""Workers that an operator has leave, on real processes: answers go on, token for token, and the refusals are said."""

import asyncio
from collections.abc import Iterator

import pytest

from schemas.subjects import Role
from services.cli.drain import run_drain, run_restart
from services.cli.running import BusOptions
from services.errors import UserError
from services.launch.limits import EXIT_DRAINED
from services.settings import changed
from tests.mesh.faults.client import Stream
from tests.mesh.faults.harness import OPTIONS, FaultMesh, fault_mesh, make_truth
from tests.mesh.forked import ForkingLoop

MOST_OPEN = 4


@pytest.fixture
def mesh(forking: ForkingLoop, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultMesh]:
    folder = tmp_path_factory.mktemp("drains")
    around = fault_mesh(folder, make_truth(6), forking.zygote, changed(OPTIONS, {"config.worker.drain_s": 60.0}))
    mesh = forking.run(around.__aenter__())
    yield mesh
    forking.run(around.__aexit__(None, None, None))


def options(mesh: FaultMesh) -> BusOptions:
    supervisor = mesh.supervisor
    return BusOptions(supervisor.nats_url, str(supervisor.keys_dir / "operator.creds"), operator=True)


async def answers(mesh: FaultMesh, num: int) -> list[Stream]:
    """Return requests whose answers have begun."""
    streams = [mesh.new_stream(number) for number in mesh.longest_cases(num)]
    for stream in streams:
        mesh.start(stream)
    for stream in streams:
        await stream.until_tokens(3)
    return streams


async def ended(mesh: FaultMesh, streams: list[Stream]) -> None:
    """All of them are answered rightly."""
    async with asyncio.timeout(120):
        while any(not stream.ending for stream in streams):
            await asyncio.sleep(0.02)
    for stream in streams:
        assert stream.ending == "finished", (stream.ending, stream.error)
        problem = mesh.truth.problem(stream, mesh.truth.answers[stream.number])
        assert not problem, problem
        assert not stream.problem


def test_an_operator_drains_a_worker_and_the_last_one_stays(forking: ForkingLoop, mesh: FaultMesh) -> None:
    async def drained() -> None:
        streams = await answers(mesh, 4)
        await asyncio.to_thread(run_drain, options(mesh), "decode-0", forced=False)
        await ended(mesh, streams)
        child = next(child for child in mesh.supervisor.children if child.name == "decode-0")
        await child.wait_ended()
        assert child.process.returncode == EXIT_DRAINED
        mesh.supervisor.children.remove(child)  # it has ended well, and will not come back
        for name, said in (
            ("decode-1", "decode-1 is the last decode worker"),
            ("decode-0", "no worker called 'decode-0'"),
            ("nobody", "no worker called 'nobody'"),
        ):
            with pytest.raises(UserError, match=said):
                await asyncio.to_thread(run_drain, options(mesh), name, forced=False)
        with pytest.raises(UserError, match="one decode worker alone"):
            await asyncio.to_thread(run_restart, options(mesh), forced=False)
        streams = await answers(mesh, 2)
        await ended(mesh, streams)

    forking.run(drained())


def test_all_workers_are_started_again_one_after_another_under_load(forking: ForkingLoop, mesh: FaultMesh) -> None:
    async def restarted() -> None:
        before = {child.name: child.process.pid for child in mesh.supervisor.children}
        restarting = asyncio.create_task(asyncio.to_thread(run_restart, options(mesh), forced=False))
        streams: list[Stream] = []
        while not restarting.done():
            if sum(not stream.ending for stream in streams) < MOST_OPEN:  # a slow machine would end none of ever more
                streams += await answers(mesh, 2)
            await asyncio.sleep(0.3)
        await restarting
        await ended(mesh, streams)
        after = {child.name: child.process.pid for child in mesh.supervisor.children}
        workers = {name for name in before if name.split("-")[0] in ("prefill", "decode")}
        assert {name for name in before if before[name] != after[name]} == workers
        assert all(not child.restarts.num_restarts for child in mesh.supervisor.children), "no end was a crash"
        await mesh.settle()

    forking.run(restarted())


def test_an_observer_may_drain_nobody(forking: ForkingLoop, mesh: FaultMesh) -> None:
    observer = BusOptions(mesh.supervisor.nats_url, str(mesh.supervisor.keys_dir / "observer.creds"), operator=False)
    assert mesh.supervisor.access(Role.OBSERVER)
    with pytest.raises(UserError, match="decode-0 does not answer"):
        forking.run(asyncio.to_thread(run_drain, observer, "decode-0", forced=False))
