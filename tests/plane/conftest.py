import asyncio
import contextlib
import gc
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from services.sim.platform import threads
from tests.gpu import card, why_no_card
from tests.plane.harness import (
    CARRIERS,
    DEADLINE_S,
    SIMULATED,
    Holder,
    Target,
    fast_network,
    name_of,
    use_cards,
    use_ends,
    use_network,
)
from tests.waiting import wait_until


@pytest.fixture(params=CARRIERS)
def carrier(request: pytest.FixtureRequest) -> str:
    return name_of(request.param)


@pytest.fixture(autouse=True)
def simulated(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Say whether the test is over a simulated carrier; then holders and targets are made on a simulated network.

    Where its name says so they are made on cards.
    """
    is_simulated = _is_simulated(request.node)
    use_network(fast_network() if is_simulated else None)
    use_ends(_carrier_of(request.node))
    yield is_simulated
    use_cards(holder=False, target=False)
    use_network(None)
    threads.abandon_closed()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test over a simulated carrier in a cooperative thread: it blocks as it would on a real one."""
    if not _is_simulated(pyfuncitem) or pyfuncitem.get_closest_marker("asyncio"):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    arguments = {name: pyfuncitem.funcargs[name] for name in names}
    asyncio.run(_in_thread(lambda: pyfuncitem.obj(**arguments)))
    return True


async def _in_thread(test: Callable[[], object]) -> None:
    ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def run() -> None:
        try:
            test()
        except BaseException as error:  # noqa: BLE001 - it is raised where the test is awaited
            ended.set_exception(error)
        else:
            ended.set_result(None)

    threads.spawn(run, "test")
    try:
        async with asyncio.timeout(DEADLINE_S):
            await ended
    finally:
        threads.abandon_all(asyncio.get_running_loop())


def _carrier_of(item: pytest.Item) -> str:
    callspec = getattr(item, "callspec", None)
    return "" if callspec is None else str(callspec.params.get("carrier", ""))


def _is_simulated(item: pytest.Item) -> bool:
    return _carrier_of(item).startswith(SIMULATED)


@pytest.fixture(scope="session")
def card_in_use() -> None:
    """What the driver opens once in a process, and PyTorch and NCCL again, stays open."""
    if not why_no_card():
        import torch

        one = card()
        torch.zeros(1, device="cuda")
        if one.no_communicators() is None:
            one.join(one.new_id(), 0, 1).abort()


@pytest.fixture(autouse=True)
def nothing_is_left(card_in_use: None) -> Iterator[None]:
    """No test leaves a thread, a descriptor or a file in shared memory behind."""
    before = set(threading.enumerate()), _descriptors(), _arenas()
    yield
    threads = [t for t in threading.enumerate() if t not in before[0]]
    for thread in threads:  # some that nobody need wait for are at their last line
        thread.join(DEADLINE_S)
    gc.collect()  # an error that was raised keeps its frames, and those their views of the arena
    gc.freeze()  # what outlives a test are modules and the like: not to be looked through after each of the next
    threads = [t for t in threads if t.is_alive()]
    assert not threads, f"left behind: {threads}"
    assert _arenas() <= before[2], "left behind in /dev/shm"
    # A thread that was there before, of another room's test in this process, may have a socket open for a moment.
    with contextlib.suppress(TimeoutError):
        wait_until(lambda: _descriptors() <= before[1])
    left = _descriptors() - before[1]
    running = sorted(thread.name for thread in threading.enumerate())
    assert not left, f"left open: {[_described(each) for each in sorted(left)]}, beside the threads {running}"


@pytest.fixture
def make_holder() -> Iterator[Callable[..., Holder]]:
    made: list[Holder] = []

    def make(*args, **kwargs) -> Holder:
        made.append(Holder(*args, **kwargs))
        return made[-1]

    yield make
    for holder in made:
        holder.close()


@pytest.fixture
def holder(carrier: str, make_holder: Callable[..., Holder]) -> Holder:
    return make_holder((carrier,))


@pytest.fixture
def target() -> Iterator[Target]:
    made = Target()
    yield made
    made.close()


def _descriptors() -> set[str]:
    names: set[str] = set()
    for fd in Path("/proc/self/fd").iterdir():
        try:
            name = str(fd.readlink())
        except OSError:  # the descriptor of this very listing
            continue
        if name.startswith(("socket:", "/dev/shm/kvmesh-")) or "eventfd" in name:
            names.add(f"{fd.name} {name}")
    return names


def _described(descriptor: str) -> str:
    """Return what a descriptor is, with a socket's addresses: so it is known whose it is."""
    number, _, kind = descriptor.partition(" ")
    if not kind.startswith("socket:"):
        return descriptor
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(number))) as sock:
        return f"{descriptor} {sock!r}"
    return descriptor


def _arenas() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob(f"kvmesh-{os.getpid()}-*")}
