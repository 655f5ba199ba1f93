"""The bodies of requests: all that are here are bounded together, and of the long ones one is understood at a time."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from litestar import Request
from litestar.datastructures import State
from litestar.exceptions import HTTPException

from services.gateway import limits
from services.gateway.api.guard import NotNowError
from services.gateway.api.openai import InvalidRequestError

ResultT = TypeVar("ResultT")


@dataclass(slots=True)
class _Share:
    """What one body counts for."""

    num_bytes: int = 0


@dataclass(slots=True)
class Bodies:
    """The bodies that one gateway is reading or understanding."""

    num_bytes: int = 0
    """What of them counts for the bound."""
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    @contextlib.asynccontextmanager
    async def read(self, request: Request[object, object, State], timeout_s: float) -> AsyncGenerator[bytes]:
        """Read a body, which counts until the block ends.

        Raises InvalidRequestError for one that is too long or too slow, and NotNowError.
        """
        share = _Share()
        try:
            yield await self._read(request, min(timeout_s, limits.BODY_S), share)
        finally:
            self.num_bytes -= share.num_bytes

    async def understand(self, num_bytes: int, work: Callable[[], ResultT]) -> ResultT:
        """Return the result of `work`, which understands a body of so many bytes. Raises NotNowError.

        What a short one takes is over at once. Longer ones are left to threads: several of some length, one of those
        that may take much memory.
        """
        if num_bytes <= limits.MAX_INLINE_BODY_BYTES:
            return work()
        if num_bytes <= limits.MAX_SHORT_BODY_BYTES:
            return await asyncio.to_thread(work)
        try:
            async with asyncio.timeout(limits.TURN_S):
                await self._turn.acquire()
        except TimeoutError as error:
            raise NotNowError("overloaded", "other long prompts are being read") from error
        working = asyncio.get_running_loop().run_in_executor(None, work)
        # A thread cannot be stopped: its turn ends with it, whether or not somebody still waits.
        working.add_done_callback(lambda _: self._turn.release())
        return await asyncio.shield(working)

    async def _read(self, request: Request[object, object, State], timeout_s: float, share: _Share) -> bytes:
        chunks: list[bytes] = []
        num_read = 0
        try:
            async with asyncio.timeout(timeout_s):
                async for chunk in request.stream():
                    num_read += len(chunk)
                    self._take(share, num_read)
                    chunks.append(chunk)
        except TimeoutError as error:
            message = f"the body did not come within {timeout_s:g} s"
            raise InvalidRequestError(message, None, "request_timeout", 408) from error
        except HTTPException as error:
            if error.status_code != 413:
                raise
            message = f"the body is over {limits.MAX_BODY_BYTES} bytes"
            raise InvalidRequestError(message, None, "request_too_large", 413) from error
        return b"".join(chunks)

    def _take(self, share: _Share, num_read: int) -> None:
        """Let a body of which so much has come count. Raises NotNowError."""
        more = max(0, num_read - limits.FREE_BODY_BYTES) - share.num_bytes
        if more > 0 and self.num_bytes + more > limits.MAX_BODIES_BYTES:
            raise NotNowError("overloaded", f"the bodies of other requests already have {self.num_bytes} bytes")
        self.num_bytes += more
        share.num_bytes += more
