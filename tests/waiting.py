"""Waiting for what is no event to a test."""

import asyncio
import time
from collections.abc import Awaitable, Callable

PATIENCE_S = 150.0
"""Nothing takes so long; a machine under load may take some of it."""


async def until(holds: Callable[[], bool | Awaitable[bool]]) -> None:
    """Wait, generously, for something that others bring about. Raises TimeoutError."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            held = holds()
            if held if isinstance(held, bool) else await held:
                return
            await asyncio.sleep(0.005)


def wait_until(holds: Callable[[], bool]) -> None:
    """The same where there is no loop. Raises TimeoutError."""
    until_s = time.monotonic() + PATIENCE_S
    while not holds():
        if time.monotonic() > until_s:
            raise TimeoutError
        time.sleep(0.002)
