import gc
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.plane.harness import CARRIERS, Holder, Target


@pytest.fixture(params=CARRIERS)
def carrier(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """No test leaves a thread, a descriptor or a file in shared memory behind."""
    before = set(threading.enumerate()), _descriptors(), _arenas()
    yield
    gc.collect()  # an error that was raised keeps its frames, and those their views of the arena
    threads = [t for t in threading.enumerate() if t not in before[0]]
    assert not threads, f"left behind: {threads}"
    assert _arenas() <= before[2], "left behind in /dev/shm"
    assert _descriptors() <= before[1], "descriptors left open"


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


def _arenas() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob(f"kvmesh-{os.getpid()}-*")}
