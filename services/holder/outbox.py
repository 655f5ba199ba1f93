"""Sends a worker's messages in the order in which they were decided, from one task."""

import asyncio
import logging
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from schemas import subjects
from schemas.block import TOKEN_BYTES
from schemas.directory import BlocksEvicted, BlocksStored
from schemas.ids import GatewayId, WorkerId
from schemas.logprobs import logprob_bytes
from schemas.message import Message
from schemas.request import RequestTokens, TokensEmitted
from schemas.subjects import CarriesT, Subject
from services.bus.typed import TypedBus
from services.holder.limits import MAX_UNSENT, MAX_UNSENT_BYTES

log = logging.getLogger(__name__)

REPAIRED = frozenset(
    {
        subjects.LOAD, subjects.BEAT, subjects.STORED, subjects.EVICTED, subjects.EVICTION_CANDIDATES,
        subjects.REPLICATE, subjects.RETURNED, subjects.TOKENS,
    }
)  # fmt: skip
"""What may be lost: sent again soon, asked for by whoever misses it, or useful and not necessary."""

_MESSAGE_BYTES = 512
_TOKENS_BYTES = 256


class Unsent(NamedTuple):
    """A message that waits to be sent, and about how much memory it takes."""

    subject: Subject[Any, None]
    ids: tuple[str, ...]
    message: Message
    traceparent: str
    num_bytes: int


class Outbox:
    """`put` never blocks; `run` sends. What the bus does not take is counted and logged, not raised: the receiver's
    own timeouts end what waits for it. While the bus takes nothing the oldest of what may be lost goes first."""

    def __init__(self, bus: TypedBus, worker_id: WorkerId) -> None:
        self._bus = bus
        self._worker_id = worker_id
        self._waiting: dict[int, Unsent] = {}
        """In the order in which they go out."""
        self._repaired: deque[int] = deque()
        """Those of them that may be lost, and some that are sent already."""
        self._num_put = 0
        self._num_bytes = 0
        self._changed = asyncio.Event()
        self._closed = False
        self.num_tokens = 0
        """Tokens of answers that were put here."""
        self.num_unsent = 0
        self.sent = asyncio.Event()
        """Set once `close` was called and all is sent."""

    def __len__(self) -> int:
        return len(self._waiting)

    def put(
        self, subject: Subject[CarriesT, None], ids: tuple[str, ...], message: CarriesT, traceparent: str = ""
    ) -> None:
        entry = Unsent(subject, ids, message, traceparent, _size_of(message))
        self._num_put += 1
        self._waiting[self._num_put] = entry
        self._num_bytes += entry.num_bytes
        if subject in REPAIRED:
            self._repaired.append(self._num_put)
        while len(self._waiting) > MAX_UNSENT or self._num_bytes > MAX_UNSENT_BYTES > entry.num_bytes:
            self._drop_one()
        self._changed.set()

    def put_tokens(self, emitted: list[tuple[GatewayId, RequestTokens]]) -> None:
        """Send tokens, one message a gateway, or as many as the broker's bound makes necessary."""
        by_gateway: defaultdict[GatewayId, list[RequestTokens]] = defaultdict(list)
        for gateway_id, tokens in emitted:
            self.num_tokens += len(tokens.tokens) // TOKEN_BYTES
            by_gateway[gateway_id].append(tokens)
        for gateway_id, all_requests in by_gateway.items():
            for requests in _parts(all_requests, self._bus.connection.max_bytes // 2):  # in base64 they are longer
                message = TokensEmitted(worker_id=self._worker_id, requests=requests)
                self.put(subjects.TOKENS, (self._worker_id, gateway_id), message)

    def put_block_events(self, events: Iterable[BlocksStored | BlocksEvicted]) -> None:
        """Send what was stored and evicted here, in this order."""
        for event in events:
            if isinstance(event, BlocksStored):
                self.put(subjects.STORED, (self._worker_id,), event)
            else:
                self.put(subjects.EVICTED, (self._worker_id,), event)

    async def run(self) -> None:
        """Send until `close`."""
        while True:
            while not self._waiting and not self._closed:
                self._changed.clear()
                await self._changed.wait()
            if not self._waiting:
                break
            subject, ids, message, traceparent, _ = self._take(next(iter(self._waiting)))
            try:
                await self._bus.publish(subject, ids, message, traceparent)
            except Exception as error:  # noqa: BLE001  (one message that cannot be sent must not keep the others)
                self.num_unsent += 1
                log.warning("could not send %s: %s", type(message).__name__, error)
        self.sent.set()

    def close(self) -> None:
        """End `run` once what was put before is sent."""
        self._closed = True
        self._changed.set()

    def _take(self, number: int) -> Unsent:
        entry = self._waiting.pop(number)
        self._num_bytes -= entry.num_bytes
        if len(self._repaired) > 2 * MAX_UNSENT:
            self._repaired = deque(number for number in self._repaired if number in self._waiting)
        return entry

    def _drop_one(self) -> None:
        while self._repaired and self._repaired[0] not in self._waiting:
            self._repaired.popleft()
        number = self._repaired.popleft() if self._repaired else next(iter(self._waiting))
        entry = self._take(number)
        self.num_unsent += 1
        log.warning("a message could not wait: %s", type(entry.message).__name__)


def _parts(requests: list[RequestTokens], num_bytes: int) -> Iterator[tuple[RequestTokens, ...]]:
    """Return them in parts of so many bytes, in their order; one that is longer goes alone."""
    start = size = 0
    for at, tokens in enumerate(requests):
        if size and size + _size_of_tokens(tokens) > num_bytes:
            yield tuple(requests[start:at])
            start, size = at, 0
        size += _size_of_tokens(tokens)
    yield tuple(requests[start:])


def _size_of(message: Message) -> int:
    """Return about how many bytes a message takes here."""
    if isinstance(message, TokensEmitted):
        return _MESSAGE_BYTES + sum(map(_size_of_tokens, message.requests))
    return _MESSAGE_BYTES + len(getattr(message, "block_hashes", b""))


def _size_of_tokens(tokens: RequestTokens) -> int:
    logprobs = [found for found in (tokens.logprobs, tokens.prompt_logprobs) if found is not None]
    return _TOKENS_BYTES + len(tokens.tokens) + sum(logprob_bytes(found) for found in logprobs)
