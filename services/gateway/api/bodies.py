"""The bodies of requests: all that are here are bounded together, and of the long ones one is understood at a time."""

import asyncio
import contextlib
import zlib
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from litestar import Request
from litestar.datastructures import State
from litestar.exceptions import HTTPException

from services.gateway import limits
from services.gateway.api.guard import NotNowError
from services.gateway.api.invalid import InvalidRequestError
from services.gateway.api.turn import Turn
from services.times import GatewayTimes

ResultT = TypeVar("ResultT")

ENCODINGS = "gzip, deflate, identity"
_WINDOWS = {"gzip": 16 + zlib.MAX_WBITS, "x-gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
"""As zlib has it: what is around the packed data."""


@dataclass(slots=True)
class _Share:
    """What one body of this owner counts for."""

    owner: str
    max_bytes: int
    num_bytes: int = 0


@dataclass(slots=True)
class Bodies:
    """The bodies that one gateway is reading or understanding."""

    times: GatewayTimes
    num_bytes: Counter[str] = field(default_factory=lambda: Counter[str]())
    """What of them counts for the bound, by owner."""
    _turn: Turn = field(init=False)

    def __post_init__(self) -> None:
        self._turn = Turn("other long prompts are being read", self.times.turn_s)

    @contextlib.asynccontextmanager
    async def read_body(
        self, request: Request[object, object, State], timeout_s: float, tenant: str, max_bytes: int
    ) -> AsyncGenerator[bytes]:
        """Read a body of `max_bytes` at most, which counts until the block ends.

        Raises InvalidRequestError for one that is too long or too slow, and NotNowError.
        """
        share = _Share(owner_of(request, tenant), max_bytes)
        try:
            yield await self._read(request, min(timeout_s, self.times.body_s), share)
        finally:
            self.num_bytes[share.owner] -= share.num_bytes
            if not self.num_bytes[share.owner]:
                del self.num_bytes[share.owner]

    async def understand(self, owner: str, num_bytes: int, work: Callable[[], ResultT]) -> ResultT:
        """Return the result of `work`, which understands a body of so many bytes. Raises NotNowError.

        What a short one takes is over at once. Longer ones are left to threads: several of some length, one of those
        that may take much memory.
        """
        if num_bytes <= limits.MAX_INLINE_BODY_BYTES:
            return work()
        if num_bytes <= limits.MAX_SHORT_BODY_BYTES:
            return await asyncio.to_thread(work)
        return await self._turn.work(owner, work)

    async def _read(self, request: Request[object, object, State], timeout_s: float, share: _Share) -> bytes:
        chunks: list[bytes] = []
        num_read = 0
        unpacked = _unpacked(_arriving(request, self.times.body_silence_s), request.headers.get("content-encoding", ""))
        try:
            async with asyncio.timeout(timeout_s):
                async for chunk in unpacked:
                    num_read += len(chunk)
                    if num_read > share.max_bytes:
                        raise _too_large(share.max_bytes)
                    self._take(share, num_read)
                    chunks.append(chunk)
        except TimeoutError as error:
            message = f"the body did not come within {timeout_s:g} s"
            raise InvalidRequestError(message, None, "request_timeout", 408) from error
        except HTTPException as error:
            if error.status_code != 413:
                raise
            raise _too_large(limits.MAX_BODY_BYTES) from error
        return b"".join(chunks)

    def _take(self, share: _Share, num_read: int) -> None:
        """Let a body of which so much has come count: its owner may have half of the bound. Raises NotNowError."""
        more = max(0, num_read - limits.FREE_BODY_BYTES) - share.num_bytes
        own, all_bytes = self.num_bytes[share.owner] + more, self.num_bytes.total() + more
        if more > 0 and (all_bytes > limits.MAX_BODIES_BYTES or own > limits.MAX_BODIES_BYTES // 2):
            raise NotNowError("overloaded", f"the bodies of other requests already have {all_bytes - more} bytes")
        self.num_bytes[share.owner] = own
        share.num_bytes += more


def owner_of(request: Request[object, object, State], tenant: str) -> str:
    """Return whose share a request takes: its tenant's, and where there are none that of the address it is from."""
    return tenant or (request.client.host if request.client else "")


async def _arriving(request: Request[object, object, State], silence_s: float) -> AsyncGenerator[bytes]:
    """Yield a body's parts as they come. Raises InvalidRequestError for one that stops coming."""
    stream = aiter(request.stream())
    while True:
        try:
            async with asyncio.timeout(silence_s):
                chunk = await anext(stream, None)
        except TimeoutError as error:
            message = f"nothing more of the body came for {silence_s:g} s"
            raise InvalidRequestError(message, None, "request_timeout", 408) from error
        if chunk is None:
            return
        yield chunk


async def _unpacked(chunks: AsyncGenerator[bytes], encoding: str) -> AsyncGenerator[bytes]:
    """Yield what packed parts come to, a little at a time: a few bytes may come to very many."""
    name = encoding.strip().lower()
    if name in ("", "identity"):
        async for chunk in chunks:
            yield chunk
        return
    if name not in _WINDOWS:
        message = f"a body may be sent as {ENCODINGS}, not with Content-Encoding: {encoding[:40]}"
        raise InvalidRequestError(message, None, "unsupported_encoding", 415)
    unpacker = zlib.decompressobj(_WINDOWS[name])
    try:
        async for chunk in chunks:
            rest = chunk
            while rest and not unpacker.eof:
                yield unpacker.decompress(rest, limits.UNPACKED_BYTES)
                rest = unpacker.unconsumed_tail
                await asyncio.sleep(0)
    except zlib.error as error:
        raise _broken(name) from error
    if not unpacker.eof or unpacker.unused_data:
        raise _broken(name)


def _broken(encoding: str) -> InvalidRequestError:
    return InvalidRequestError(f"the body is not one whole {encoding} stream", None, "invalid_encoding")


def _too_large(max_bytes: int) -> InvalidRequestError:
    return InvalidRequestError(f"the body is over {max_bytes} bytes", None, "request_too_large", 413)
