"""What a worker records and measures of the reads that have ended."""

import logging
import time
from dataclasses import dataclass

from dataplane.blocks.layout import num_blocks_for
from dataplane.ends.reader import Landed
from schemas.handoff import KVOffered
from schemas.kv import ReadEnd
from services.holder.core.events import ReadEnded
from services.holder.observe.transfers import TransferSpan
from services.runtime import now_ms
from services.telemetry import AttributeValue, Key
from services.worker.observe.measured_rates import MeasuredRates
from services.worker.observe.metrics import WorkerMetrics

log = logging.getLogger(__name__)


@dataclass
class ReadRecords:
    """One worker's. `block_size`: in tokens."""

    block_size: int
    rates: MeasuredRates
    measured: WorkerMetrics

    def record(self, ended: ReadEnded, span: TransferSpan, landed: Landed | None) -> None:
        """Record a read that has ended. `landed`: None: not all came."""
        # Landed tokens count from the sequence's start: take off what was there before the read began.
        read = ended.read
        num_tokens = max(0, ended.outcome.num_landed_tokens - read.first_token)
        is_hand_over = isinstance(read.lease, KVOffered)
        attributes: dict[str, AttributeValue] = {
            Key.REQUEST_ID: read.key[0],
            Key.ATTEMPT: read.key[1],
            Key.SOURCE: read.holder,
            Key.NUM_BLOCKS: num_blocks_for(num_tokens, self.block_size),
            Key.NUM_CACHED_BLOCKS: read.first_token // self.block_size,
        }
        # A hand-over runs beside the computation: only what it takes beyond the prompt's computation is exposed.
        if isinstance(read.lease, KVOffered):
            attributes[Key.LEASE] = read.lease.lease_id
            if landed is not None and ended.first_token is not None and ended.first_token.computed_ns:
                # Two machines' clocks may differ; on one host this is what the hand-over added.
                exposed_s = max(0.0, (landed.stats.landed_ns - ended.first_token.computed_ns) / 1e9)
                attributes[Key.EXPOSED_MS] = exposed_s * 1e3
                self.measured.exposed(exposed_s, span.traceparent)
        else:
            attributes[Key.NUM_BLOCKS] = num_tokens // self.block_size  # a broken read may end inside a block
            attributes[Key.EXPOSED_MS] = (time.monotonic_ns() - span.started_ns) / 1e6  # nothing is computed meanwhile
        # Only whole reads are measured. A hand-over's stream waits for the computation, so only its wire is.
        stats = landed.stats if landed is not None else None
        if stats is not None and ended.end is ReadEnd.LANDED:
            if not is_hand_over:
                self.rates.transferred(read.holder, span.started_ns, stats, now_ms())
            self.rates.carried(read.holder, stats, now_ms())
        elif not is_hand_over:
            log.info("nothing (more) of %s from %s: %s", read.key[0], read.holder, ended.reason)
        span.finished(attributes, ended.end, ended.detail)
        kind = "handover" if is_hand_over else "fetch"
        self.measured.count_read(kind, read.holder, span.started_ns, stats, ended.end, span.traceparent)
