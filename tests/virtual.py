"""Tests in virtual time. A test marked `virtual_time`, or all of a file with `pytestmark = pytest.mark.virtual_time`,
runs on the simulator's loop: threads take turns, waiting takes no time, and the clock moves only when nothing can run.

`pytest --real-time` runs the same tests on asyncio's loop, with threads, sockets and the machine's clock.
"""

import asyncio
import contextlib
import random
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import pytest

from services.holder.platform import THREADS, Platform
from services.sim.platform.clock import VirtualTime, installed
from services.sim.platform.connection import StreamFault
from services.sim.platform.loop import SimLoop
from services.sim.platform.plane import SimNetwork, sim_platform
from services.sim.platform.threads import abandon_all, living

ResultT = TypeVar("ResultT")
MARK = "virtual_time"


class OneFault:
    """Befalls the first stream only, unless it is None."""

    def __init__(self, fault: StreamFault | None = None, *, refused: bool = False) -> None:
        self.fault = fault
        self.refused = refused

    def refuses(self, reader_host: str, holder_host: str) -> bool:
        return self.refused

    def on_stream(self, reader_host: str, holder_host: str) -> StreamFault | None:
        fault, self.fault = self.fault, None
        return fault


class VirtualLoop(SimLoop):
    """A loop that has replaced the process's clock until it is closed, and a network without faults on it."""

    def __init__(self, seed: int = 0) -> None:
        clock = VirtualTime()
        self._clock_installed = contextlib.ExitStack()
        self._clock_installed.enter_context(installed(clock, random.Random(seed)))
        super().__init__(clock, random.Random(seed))
        self.network = SimNetwork(random.Random(1), faults=OneFault())

    def close(self) -> None:
        abandon_all(self)
        super().close()
        self._clock_installed.close()


def network() -> SimNetwork | None:
    """Return the network of the virtual loop that runs; None: time is real."""
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return None
    return loop.network if isinstance(loop, VirtualLoop) else None


def platform_of(name: str) -> Platform:
    """Return what makes the parts of a worker or a store of this name."""
    on = network()
    return THREADS if on is None else sim_platform(on, name)


def thread_names() -> list[str]:
    """Return the names of all threads, real or cooperative, that have not ended."""
    loop = asyncio.get_running_loop()
    return [thread.name for thread in (living(loop) if isinstance(loop, VirtualLoop) else threading.enumerate())]


def virtually(live: Callable[[], Coroutine[Any, Any, ResultT]], seed: int = 0) -> ResultT:
    """Run on a loop whose time is virtual."""
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(seed)) as runner:
        return runner.run(live())


def loop_factory(item: pytest.Item) -> Callable[[], asyncio.AbstractEventLoop]:
    """Return what makes the loop of a test."""
    is_virtual = item.get_closest_marker(MARK) and not item.config.getoption("--real-time")
    return VirtualLoop if is_virtual else asyncio.new_event_loop
