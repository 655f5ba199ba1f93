"""What every service's process does alike: clock, logging, signals, shutdown."""

import asyncio
import logging
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import uvloop

log = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")


def now_ms() -> int:
    """Return the time of deadlines and leases, in milliseconds: by this process's monotonic clock, which nobody sets.

    It means nothing to another process: what is left of it crosses the bus (`schemas.message`)."""
    return time.monotonic_ns() // 1_000_000


def configure_logging(service: str) -> None:
    """Log warnings and above to standard error, one line each, named after the service."""
    logging.basicConfig(
        stream=sys.stderr, level=logging.WARNING, format=f"%(asctime)s {service} %(levelname)s %(message)s", force=True
    )


def run_until_signal(main: Callable[[asyncio.Event], Awaitable[ResultT]]) -> ResultT:
    """Run `main(stop)` on uvloop and return its result; `stop` is set by SIGTERM, SIGINT, or the end of the parent that
    started us.

    A service ends by returning from `main` once it has stopped intake, handed back its leases, and closed plane and
    bus, in that order. Exceptions of a task group come out unwrapped where there is only one.
    """

    async def run() -> ResultT:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        return await main(stop)

    try:
        return uvloop.run(run())
    except BaseExceptionGroup as group:
        if len(group.exceptions) == 1:
            raise group.exceptions[0] from None
        raise


async def ended_before(stop: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Run `work` until it ends (True) or `stop` is set (False), then cancel it. Raises what `work` raises."""
    working = asyncio.create_task(work, name="work until a stop")
    stopping = asyncio.create_task(stop.wait(), name="wait for the stop")
    try:
        await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
            return True
        return False
    finally:
        for task in (working, stopping):
            task.cancel()
        await asyncio.gather(working, stopping, return_exceptions=True)


async def watch_parent(stop: asyncio.Event) -> None:
    """Set `stop` when standard input ends. `kvmesh up` holds the other end, so that no service outlives it, however it
    dies."""
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    try:
        while await reader.read(1024):
            pass
        stop.set()
    finally:
        transport.close()
