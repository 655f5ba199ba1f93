"""The decode role: brings the core its messages and carries out its reads."""

import asyncio
import logging
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from dataplane.blocks.layout import num_blocks_for
from dataplane.ends.reader import Landed
from dataplane.protocol.stream import TransferFailedError, TransferStats
from schemas import subjects
from schemas.handoff import BlocksReserved, FirstToken, HandoffAborted, KVOffered
from schemas.ids import HandoffId
from schemas.kv import ReadEnd
from schemas.request import Refused, ReservationQueued, ReserveBlocks, refuse
from services.bus.typed import Received
from services.decode.core import DecodeCore
from services.runtime import now_ms
from services.telemetry import AttributeValue, Key
from services.worker.core.actions import StartRead, StopRead
from services.worker.core.content import ReadOutcome
from services.worker.observe.transfers import TransferSpan
from services.worker.shell import Worker
from services.worker.survive import surviving

log = logging.getLogger(__name__)


class _Ended(NamedTuple):
    """How a read ended: all came, with the first token, or why not and how much did."""

    landed: Landed | None
    first: FirstToken | None
    num_landed_tokens: int
    end: ReadEnd
    detail: str
    """How it ended for people, where there is more to say."""


@dataclass
class Reads:
    """The reads under way, a task each. A read's task ends only when its thread writes no more."""

    worker: Worker
    core: DecodeCore
    tasks: asyncio.TaskGroup
    _running: dict[HandoffId, asyncio.Task[None]] = field(default_factory=dict[HandoffId, "asyncio.Task[None]"])

    def start(self, action: StartRead) -> None:
        handoff_id = action.offer.handoff_id
        task = self.tasks.create_task(self._read(action), name=f"read {handoff_id}")
        self._running[handoff_id] = task
        task.add_done_callback(lambda _: self._ended_before_it_began(handoff_id))

    def stop(self, action: StopRead) -> None:
        if task := self._running.get(action.handoff_id):
            task.cancel()

    def _ended_before_it_began(self, handoff_id: HandoffId) -> None:
        """A task that is cancelled before its first step runs none of its code."""
        if self._running.pop(handoff_id, None) is not None:
            self.worker.decide(lambda _now: self.core.read_failed(handoff_id, ReadOutcome(0), ReadEnd.STOPPED))

    async def close(self) -> None:
        """End every read and wait for its thread."""
        running = list(self._running.values())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def _read(self, action: StartRead) -> None:
        offer = action.offer
        traceparent = self.worker.spans.traceparent((offer.request_id, offer.attempt))
        span = TransferSpan(self.worker.telemetry, self.worker.parts.worker_id, traceparent)
        landed, first, end, detail, num_landed = None, None, ReadEnd.LANDED, "", 0
        try:
            landed = await self._stream(action, span.stats)
            first = msgspec.json.decode(landed.trailer, type=FirstToken)
        except TransferFailedError as error:
            end, detail, num_landed = ReadEnd(error.code), str(error), error.num_landed_tokens
        except msgspec.DecodeError as error:
            end, detail = ReadEnd.OTHER, f"the stream's end is unreadable: {error}"
            num_landed = offer.num_tokens
        except Exception as error:  # noqa: BLE001  (one bad offer must not take the other requests along)
            log.warning("a read of %s failed: %r", offer.handoff_id, error)
            end, detail = ReadEnd.OTHER, f"{type(error).__name__}: {error}"
        except asyncio.CancelledError:
            end = ReadEnd.STOPPED  # by `stop` or `close`; the thread has ended
        self._running.pop(offer.handoff_id, None)
        with surviving(f"the end of the read of {offer.handoff_id}"):
            self._tell(action, _Ended(landed, first, num_landed, end, detail), span)

    def _tell(self, action: StartRead, ended: _Ended, span: TransferSpan) -> None:
        """Record a read, and bring the core what came of it."""
        offer, landed, first, end = action.offer, ended.landed, ended.first, ended.end
        block_size = self.worker.parts.limits.block_size
        num_tokens = offer.num_tokens if landed is not None else ended.num_landed_tokens
        attributes: dict[str, AttributeValue] = {
            Key.REQUEST_ID: offer.request_id,
            Key.ATTEMPT: offer.attempt,
            Key.SOURCE: offer.source_worker,
            Key.LEASE: offer.lease_id,
            Key.NUM_BLOCKS: num_blocks_for(max(0, num_tokens - action.first_token), block_size),
            Key.NUM_CACHED_BLOCKS: action.first_token // block_size,
        }
        if landed is not None and first is not None and first.computed_ns:
            # Two machines' clocks may differ; on one host this is what the hand-over added.
            exposed_s = max(0.0, (landed.stats.landed_ns - first.computed_ns) / 1e9)
            attributes[Key.EXPOSED_MS] = exposed_s * 1e3
            self.worker.measured.exposed(exposed_s, span.traceparent)
        span.end(attributes, end, ended.detail)
        stats = landed.stats if landed else None
        self.worker.measured.read("handover", offer.source_worker, span.started_ns, stats, end, span.traceparent)
        if landed is not None and first is not None:
            self.worker.rates.carried(offer.source_worker, landed.stats, now_ms())
            outcome = ReadOutcome(landed.num_tokens, landed.stats.num_bytes, landed.stats.carrier, is_whole=True)
            self.worker.decide(lambda _now, first=first: self.core.read_landed(offer.handoff_id, outcome, first))
        else:
            outcome, reason = ReadOutcome(ended.num_landed_tokens), ended.detail or end.value
            self.worker.decide(lambda _now: self.core.read_failed(offer.handoff_id, outcome, reason))

    async def _stream(self, action: StartRead, stats: TransferStats) -> Landed:
        offer = action.offer
        return await self.worker.reader.read(
            offer.endpoint,
            offer.ticket,
            carrier=self.worker.config.worker.carrier,
            tables=action.tables,
            first_token=action.first_token,
            wire_dtype=self.worker.wire.dtype(offer.source_worker, now_ms()),
            num_tokens=offer.num_tokens,
            deadline_s=max(0.0, (offer.deadline_ms - now_ms()) / 1000),
            stats=stats,
            on_started=lambda carrier: self.worker.decide(
                lambda _now: self.core.read_started(offer.handoff_id, carrier)
            ),
        )


async def start_decode(worker: Worker, tasks: asyncio.TaskGroup) -> Reads:
    """Give the worker the decode role: reserve, read, decode. Close the returned reads before the holder."""
    worker_id = worker.parts.worker_id
    core = DecodeCore(worker.parts.limits, worker.holder.cache)
    reads = Reads(worker, core, tasks)
    worker.add_core(core, reads=reads)

    async def reserve(received: Received[ReserveBlocks]) -> BlocksReserved | ReservationQueued | Refused:
        request = received.message
        key = (request.request_id, request.attempt)
        if worker.is_elsewhere(core, key):
            return refuse(request, "invalid", "this worker serves this attempt alone already")
        worker.spans.accepted(key, received.traceparent, "decode")
        reply = worker.answer(lambda now: core.reserve(request, now))
        worker.measured.refused("reserve", reply)
        if isinstance(reply, Refused):
            worker.forget(key)
        return reply

    def offered(received: Received[KVOffered]) -> None:
        worker.decide(lambda _now: core.offered(received.message))

    def aborted(received: Received[HandoffAborted]) -> None:
        worker.decide(lambda _now: core.aborted(received.message))

    await worker.bus.serve(tasks, subjects.RESERVE, (worker_id,), reserve)
    await worker.bus.listen(tasks, subjects.OFFERED, ("*", worker_id, "*"), offered)
    await worker.bus.listen(tasks, subjects.ABORTED, ("*", worker_id, "*"), aborted)
    return reads
