"""What all tests share."""

import asyncio
import atexit
import gc
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from hypothesis import settings

from services.bus.embedded import EmbeddedNats
from tests import nightly, share, virtual
from tests.mesh import processes
from tests.mesh.forked import ForkingLoop

pytest_plugins = ("tests.again",)

IS_ONE_OF_MANY = "PYTEST_XDIST_WORKER" in os.environ
if IS_ONE_OF_MANY:
    # Behind all that others do at the end: Python would look for garbage in everything that it has, for five seconds.
    atexit.register(os._exit, 0)

# No test is judged by the clock: CI's machines are slow at times. Nor by chance: new examples are drawn at night.
settings.register_profile("night", deadline=None, print_blob=True)
settings.register_profile("gate", deadline=None, derandomize=True, max_examples=20)
settings.load_profile("gate")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="the files of `make nightly` as well")
    parser.addoption("--real-time", action="store_true", help="no virtual time: asyncio's loop, threads, sockets")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out the files of `make nightly` where nobody has named them, nor a folder of tests that has them."""
    root = config.rootpath
    is_named = any(Path(argument).resolve() != root / "tests" for argument in config.args)
    is_nightly = collection_path.relative_to(root).as_posix() in nightly.FILES
    return True if is_nightly and not is_named and not config.getoption("--all") else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Before those are left out that `make test` leaves out. Who is named by its id runs, whatever its share."""
    share.mark_rest(items, config.rootpath, is_whole=not any("::" in argument for argument in config.args))


def pytest_collection_finish() -> None:
    """What is there before the first test stays: no garbage is looked for in it."""
    if IS_ONE_OF_MANY:
        gc.freeze()


def pytest_asyncio_loop_factories(item: pytest.Item) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"loop": virtual.loop_factory(item)}


@pytest.fixture(scope="session")
def nats_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real nats-server on a free port, for the whole session."""
    server = EmbeddedNats.launch(None, tmp_path_factory.mktemp("nats"))
    yield server.url
    server.stop()


@pytest.fixture(scope="session")
def forking() -> Iterator[ForkingLoop]:
    """Where the services of real meshes are forked, for the whole session."""
    loop = ForkingLoop()
    yield loop
    loop.close()


@pytest.fixture(scope="session")
def running_mesh(forking: ForkingLoop) -> processes.RunningMesh:
    """Starts real meshes: `with running_mesh(run_dir, options) as mesh`."""
    return partial(processes.running_mesh, forking)
