"""Sends a worker's messages in the order in which they were decided, from one task."""

import asyncio
import logging
from collections import defaultdict

from schemas import subjects
from schemas.ids import GatewayId, WorkerId
from schemas.message import Message
from schemas.request import RequestTokens, TokensEmitted
from schemas.subjects import Subject
from services.bus.base import BusError
from services.bus.typed import TypedBus

log = logging.getLogger(__name__)


class Outbox:
    """`put` never blocks; `run` sends. What the bus does not take is counted and logged, not raised: the receiver's
    own timeouts end what waits for it."""

    def __init__(self, door: TypedBus, worker_id: WorkerId) -> None:
        self._door = door
        self._worker_id = worker_id
        self._queue: asyncio.Queue[tuple[Subject, tuple[str, ...], Message, str] | None] = asyncio.Queue()
        self.num_unsent = 0
        self.sent = asyncio.Event()
        """Set once `close` was called and all is sent."""

    def put(self, subject: Subject, ids: tuple[str, ...], message: Message, traceparent: str = "") -> None:
        self._queue.put_nowait((subject, ids, message, traceparent))

    def put_tokens(self, emitted: list[tuple[GatewayId, RequestTokens]]) -> None:
        """Send tokens, one message a gateway."""
        by_gateway: defaultdict[GatewayId, list[RequestTokens]] = defaultdict(list)
        for gateway_id, tokens in emitted:
            by_gateway[gateway_id].append(tokens)
        for gateway_id, requests in by_gateway.items():
            message = TokensEmitted(worker_id=self._worker_id, requests=tuple(requests))
            self.put(subjects.TOKENS, (gateway_id,), message)

    async def run(self) -> None:
        """Send until `close`."""
        while (entry := await self._queue.get()) is not None:
            subject, ids, message, traceparent = entry
            try:
                await self._door.publish(subject, ids, message, traceparent)
            except BusError as error:
                self.num_unsent += 1
                log.warning("could not send %s: %s", type(message).__name__, error)
        self.sent.set()

    def close(self) -> None:
        """End `run` once what was put before is sent."""
        self._queue.put_nowait(None)
