"""What every service's process does alike: clock, logging, signals, shutdown."""

import asyncio
import logging
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextlib import contextmanager
from typing import Any, TypeVar

import uvloop

log = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")


def now_ms() -> int:
    """Return the time of deadlines and leases, in milliseconds: by this process's monotonic clock, which nobody sets.

    It means nothing to another process: what is left of it crosses the bus (`schemas.message`)."""
    return time.monotonic_ns() // 1_000_000


LOG_INTERVAL_S = 10.0
"""One line of a kind in so long a time."""
MAX_LOG_KINDS = 1_000
"""So many kinds are remembered."""


ASKED_FOR = {"asked_for": True}


class OneOfAKind(logging.Filter):
    """Lets one line of a kind through, and after `LOG_INTERVAL_S` the next, which says how many there were between
    them. Of a kind are those of one text, whatever is filled into it. What somebody has asked for is always logged:
    `extra=ASKED_FOR`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._kinds: dict[tuple[str, str], tuple[float, int]] = {}
        """When a line of this kind was let through, and how many were not since."""

    def filter(self, record: logging.LogRecord) -> bool:
        if hasattr(record, "asked_for"):
            return True
        kind, now_s = (record.name, str(record.msg)), self._clock()
        passed_s, num_held = self._kinds.pop(kind, (now_s - LOG_INTERVAL_S, 0))
        passes = now_s - passed_s >= LOG_INTERVAL_S
        self._kinds[kind] = (now_s, 0) if passes else (passed_s, num_held + 1)
        if len(self._kinds) > MAX_LOG_KINDS:
            del self._kinds[next(iter(self._kinds))]
        if passes and num_held:
            record.msg, record.args = f"{record.getMessage()} (and {num_held} more like it before)", ()
        return passes


def configure_logging(service: str) -> None:
    """Log warnings and above to standard error, one line each, named after the service, and not each of a kind."""
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(OneOfAKind())
    line = f"%(asctime)s {service} %(levelname)s %(message)s"
    logging.basicConfig(handlers=[handler], level=logging.WARNING, format=line, force=True)


@contextmanager
def logging_failures(what: str) -> Generator[None]:
    """Log what goes wrong inside: one request's failure must not end the process, and everybody's requests with it."""
    try:
        yield
    except Exception:
        log.exception("%s failed", what)


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
    finally:  # also where it cannot be watched any more
        stop.set()
        transport.close()
