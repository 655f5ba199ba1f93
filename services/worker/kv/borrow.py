"""Leases for reads, asked for and given back: a lease that nobody reads under is not left to its time."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Coroutine
from contextlib import asynccontextmanager
from typing import TypeVar

from schemas import subjects
from schemas.ids import WorkerId
from schemas.kv import LeaseGranted, ReadEnd, RequestLease, ReturnLease, is_as_asked
from schemas.request import RefusalReason, Refused
from services.bus.base import BusError
from services.bus.typed import TypedBus

ResultT = TypeVar("ResultT")


class NotGrantedError(Exception):
    """The holder does not lend these blocks, or does not answer. `reason`: as it refused; None: it did not refuse, but
    say nothing or something else. `end`: what that makes of the read."""

    def __init__(self, text: str, reason: RefusalReason | None = None, end: ReadEnd = ReadEnd.REFUSED) -> None:
        super().__init__(text)
        self.reason = reason
        self.end = end


class Borrower:
    """One reader's: a worker, or a store."""

    def __init__(self, bus: TypedBus, block_size: int) -> None:
        self._bus = bus
        self._block_size = block_size
        self._tasks: set[asyncio.Task[object]] = set()

    @asynccontextmanager
    async def lease(
        self, holder: WorkerId, request: RequestLease, timeout_s: float, traceparent: str = ""
    ) -> AsyncGenerator[LeaseGranted]:
        """Hold a lease for the time of one read, which ends it; one that is left by an error or by a cancellation is
        given back. Raises NotGrantedError."""
        asking = self._spawn(self._bus.ask(subjects.LEASE, (holder,), request, timeout_s, traceparent))
        try:
            reply = await asyncio.shield(asking)
        except asyncio.CancelledError:
            asking.add_done_callback(lambda _: self._granted_to_nobody(holder, request, asking))
            raise
        except BusError as error:
            raise NotGrantedError(f"{holder} did not answer: {error.reason}") from error
        if isinstance(reply, Refused):
            raise NotGrantedError(f"{reply.reason}: {reply.detail}", reply.reason)
        try:
            if not is_as_asked(request, reply, self._block_size):
                detail = f"{holder} granted tokens {reply.first_token} to {reply.num_tokens}, unasked"
                raise NotGrantedError(detail, end=ReadEnd.OTHER)
            yield reply
        except BaseException:
            self._give_back(holder, request, reply)
            raise

    def _granted_to_nobody(
        self, holder: WorkerId, request: RequestLease, asking: "asyncio.Task[LeaseGranted | Refused]"
    ) -> None:
        if not asking.cancelled() and asking.exception() is None and isinstance(reply := asking.result(), LeaseGranted):
            self._give_back(holder, request, reply)

    def _give_back(self, holder: WorkerId, request: RequestLease, granted: LeaseGranted) -> None:
        returned = ReturnLease(
            request_id=request.request_id,
            attempt=request.attempt,
            deadline_ms=request.deadline_ms,
            reader=request.reader,
            lease_id=granted.lease_id,
        )

        async def say() -> None:
            with contextlib.suppress(BusError):  # then its time ends it
                await self._bus.publish(subjects.RETURNED, (holder,), returned)

        self._spawn(say())

    def _spawn(self, coroutine: Coroutine[None, None, ResultT]) -> "asyncio.Task[ResultT]":
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
