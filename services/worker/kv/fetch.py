"""Carries out fetches: ask a holder for a lease, read under it, say what came of it. A task each."""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field

from dataplane.ends.reader import Landed, PlaneReader
from dataplane.protocol.stream import TransferFailedError, TransferStats
from schemas.block import join_hashes
from schemas.ids import WorkerId
from schemas.kv import LeaseGranted, RequestLease
from services.bus.typed import TypedBus
from services.config import LEASE_ANSWER_MS, WorkerConfig
from services.runtime import now_ms
from services.telemetry import AttributeValue, Key
from services.worker.core.actions import AttemptKey, Fetch
from services.worker.core.content import ReadOutcome
from services.worker.kv.borrow import Borrower, NotGrantedError
from services.worker.kv.wire_dtype import WireChoice
from services.worker.observe.measured_rates import RateBook
from services.worker.observe.metrics import WorkerMetrics
from services.worker.observe.spans import WorkerSpans
from services.worker.observe.transfers import TransferSpan
from services.worker.survive import surviving

log = logging.getLogger(__name__)

READ_BASE_S = 2.0
READ_BYTES_PER_S_MIN = 20e6
"""A read slower than this is given up: computing would be quicker."""

FetchedCallback = Callable[[AttemptKey, ReadOutcome], None]


@dataclass
class Fetches:
    """The fetches under way. A fetch's task ends only when its thread writes no more."""

    worker_id: WorkerId
    fingerprint: str
    block_size: int
    token_bytes: int
    """Of one token over all layers."""
    config: WorkerConfig
    bus: TypedBus
    reader: PlaneReader
    rates: RateBook
    wire: WireChoice
    spans: WorkerSpans
    measured: WorkerMetrics
    on_fetched: FetchedCallback
    _closed: bool = False
    _running: dict[AttemptKey, asyncio.Task[None]] = field(default_factory=dict[AttemptKey, "asyncio.Task[None]"])

    def __post_init__(self) -> None:
        self._borrower = Borrower(self.bus, self.block_size)

    def start(self, action: Fetch, tasks: asyncio.TaskGroup) -> None:
        if self._closed:
            asyncio.get_running_loop().call_soon(self.on_fetched, action.key, ReadOutcome(0))
            return
        task = tasks.create_task(self._fetch(action), name=f"fetch {action.key[0]}")
        self._running[action.key] = task
        task.add_done_callback(lambda _: self._ended_before_it_began(action.key, task))

    def stop(self, key: AttemptKey) -> None:
        if task := self._running.get(key):
            task.cancel()

    async def close(self) -> None:
        """End every fetch and wait for its thread. What is asked for from now on brings nothing."""
        self._closed = True
        running = list(self._running.values())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def _ended_before_it_began(self, key: AttemptKey, task: "asyncio.Task[None]") -> None:
        """A task that is cancelled before its first step runs none of its code."""
        if self._running.get(key) is task:
            del self._running[key]
            self.on_fetched(key, ReadOutcome(0))

    async def _fetch(self, action: Fetch) -> None:
        traceparent = action.traceparent or self.spans.traceparent(action.key)
        span = TransferSpan(self.spans.telemetry, self.worker_id, traceparent)
        outcome, landed, failure = ReadOutcome(0), None, ""
        try:
            async with self._lease(action, span.story) as granted:
                landed = await self._read(action, granted, span.stats)
            outcome = ReadOutcome(landed.num_tokens, landed.stats.num_bytes, landed.stats.carrier, is_whole=True)
        except NotGrantedError as error:
            failure = str(error)
        except TransferFailedError as error:
            failure, outcome = str(error), ReadOutcome(error.num_landed_tokens)
        except Exception as error:  # noqa: BLE001  (one bad holder must not take the other requests along)
            log.warning("a fetch of %s from %s failed: %r", action.key[0], action.source, error)
            failure = f"{type(error).__name__}: {error}"
        except asyncio.CancelledError:
            failure = "stopped"  # by `stop` or `close`; the thread has ended
        self._running.pop(action.key, None)
        with surviving(f"the end of the fetch of {action.key[0]}"):
            self._record(action, span, landed, outcome, failure)
        with surviving(f"what follows the fetch of {action.key[0]}"):
            self.on_fetched(action.key, outcome)

    def _lease(self, action: Fetch, traceparent: str) -> AbstractAsyncContextManager[LeaseGranted]:
        request_id, attempt = action.key
        asked_ms = now_ms()
        answer_by_ms = min(action.deadline_ms, asked_ms + LEASE_ANSWER_MS)
        request = RequestLease(
            request_id=request_id,
            attempt=attempt,
            deadline_ms=action.deadline_ms,
            answer_by_ms=answer_by_ms,
            reader=self.worker_id,
            fingerprint=self.fingerprint,
            first_block=action.first_block,
            block_hashes=join_hashes(action.block_hashes),
            tenant=action.tenant,
        )
        timeout_s = max(0.001, (answer_by_ms - asked_ms) / 1000)
        return self._borrower.lease(action.source, request, timeout_s, traceparent)

    async def _read(self, action: Fetch, granted: LeaseGranted, stats: TransferStats) -> Landed:
        num_bytes = max(0, granted.num_tokens - granted.first_token) * self.token_bytes
        limit_s = READ_BASE_S + num_bytes / READ_BYTES_PER_S_MIN
        return await self.reader.read(
            granted.endpoint,
            granted.ticket,
            carrier=self.config.carrier,
            tables=action.tables,
            first_token=granted.first_token,
            num_tokens=granted.num_tokens,
            wire_dtype=self.wire.dtype(action.source, now_ms()),
            deadline_s=max(0.0, min(limit_s, (action.deadline_ms - now_ms()) / 1000)),
            stats=stats,
        )

    def _record(
        self, action: Fetch, span: TransferSpan, landed: Landed | None, outcome: ReadOutcome, failure: str
    ) -> None:
        num_tokens = max(0, outcome.num_landed_tokens - action.first_block * self.block_size)
        attributes: dict[str, AttributeValue] = {
            Key.REQUEST_ID: action.key[0],
            Key.ATTEMPT: action.key[1],
            Key.SOURCE: action.source,
            Key.NUM_BLOCKS: num_tokens // self.block_size,
            Key.NUM_CACHED_BLOCKS: action.first_block,
            Key.EXPOSED_MS: (time.time_ns() - span.started_ns) / 1e6,  # nothing is computed meanwhile
        }
        stats = landed.stats if landed else None
        if stats is not None:
            self.rates.transferred(action.source, span.started_ns, stats, now_ms())
            self.rates.carried(action.source, stats, now_ms())
        elif failure:
            log.info("%s: nothing (more) of %s from %s: %s", self.worker_id, action.key[0], action.source, failure)
        span.end(attributes, failure or "landed")
        self.measured.read("fetch", action.source, span.started_ns, stats, failure, span.traceparent)
