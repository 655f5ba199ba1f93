"""Waiting for what is no event to a test."""

import asyncio
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
