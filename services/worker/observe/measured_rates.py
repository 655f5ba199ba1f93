"""How quickly this worker computes and reads, learnt from what happens. Pure: moving averages over measured times."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

from dataplane.protocol.stream import TransferStats
from schemas.ids import WorkerId
from schemas.worker import PrefillRate, TransferRate, WorkerRates
from services.engine.messages import StepResult
from services.holder.limits import MAX_MEASURED_PAIRS, STALE_RATE_MS

CONTEXT_BORDERS = (0, 1_024, 2_048, 4_096, 8_192, 16_384, 32_768)
"""Attention makes a token dearer the more tokens stand before it: each range has a rate of its own."""
MIN_PREFILL_TOKENS = 32
"""Steps with fewer prompt tokens say more of a step's fixed cost than of a token's."""
MIN_TRANSFER_BYTES = 256 * 1024
"""Shorter transfers say something of the latency only."""
WEIGHT = 0.2


@dataclass(slots=True)
class _Transfer:
    bytes_per_s: float = 0.0
    latency_ms: float = 0.0
    measured_ms: int = 0


@dataclass(slots=True)
class _Link:
    bytes_per_s: float = 0.0
    measured_ms: int = 0


@dataclass
class MeasuredRates:
    """One worker's rates. `token_bytes`: of one token over all layers."""

    token_bytes: int
    _prefill_s: dict[int, float] = field(default_factory=dict[int, float])
    """Seconds a token, by the border that its context lies behind."""
    _transfers: dict[tuple[WorkerId, str], _Transfer] = field(default_factory=dict[tuple[WorkerId, str], _Transfer])
    _links: dict[WorkerId, _Link] = field(default_factory=dict[WorkerId, _Link])
    """What the wire itself carries, from each source."""
    _decode_step_ms: float = 0.0

    def stepped(self, result: StepResult) -> None:
        """Add an engine step. What decodes cost is taken off a step that did both."""
        duration_s = (result.ended_ns - result.started_ns) / 1e9
        if not result.num_prefill_tokens:
            if result.num_decode_tokens:
                self._decode_step_ms = _blend(self._decode_step_ms, duration_s * 1e3)
            return
        if result.num_prefill_tokens < MIN_PREFILL_TOKENS:
            return
        if result.num_decode_tokens:
            duration_s = max(duration_s / 2, duration_s - self._decode_step_ms / 1e3)
        longest = max(num_tokens for _, num_tokens in result.computed)
        border = _border(longest - result.num_prefill_tokens // 2)
        self._prefill_s[border] = _blend(self._prefill_s.get(border, 0.0), duration_s / result.num_prefill_tokens)

    def transferred(self, source: WorkerId, asked_ns: int, stats: TransferStats, now_ms: int) -> None:
        """Add a read that landed. `asked_ns`: when its lease was asked for."""
        key = (source, stats.carrier)
        pair = self._transfers.pop(key, None) or _Transfer()
        self._transfers[key] = pair  # the one measured last is at the end
        if len(self._transfers) > MAX_MEASURED_PAIRS:
            del self._transfers[next(iter(self._transfers))]
        first_byte_ns = stats.first_byte_ns or stats.landed_ns
        pair.measured_ms = now_ms
        pair.latency_ms = _blend(pair.latency_ms, max(0.0, (first_byte_ns - asked_ns) / 1e6))
        if stats.num_bytes >= MIN_TRANSFER_BYTES:
            seconds = max(1e-6, (stats.landed_ns - first_byte_ns) / 1e9)
            pair.bytes_per_s = _blend(pair.bytes_per_s, stats.num_bytes / seconds)

    def carried(self, source: WorkerId, stats: TransferStats, now_ms: int) -> None:
        """Add how quickly a wire carried KV as it is. A frame's bytes follow their header at once, so this holds
        for streams that wait for a computation as well."""
        if stats.carrier != "tcp" or stats.wire_dtype != "same" or stats.num_bytes < MIN_TRANSFER_BYTES:
            return
        link = self._links.setdefault(source, _Link())
        link.measured_ms = now_ms
        link.bytes_per_s = _blend(link.bytes_per_s, stats.num_bytes / max(1e-6, stats.copy_ns / 1e9))

    def link_bytes_per_s(self, source: WorkerId, now_ms: int) -> float:
        """Return what the wire from a source carries; 0: not measured, or so long ago that it must be measured anew."""
        link = self._links.get(source)
        return link.bytes_per_s if link and now_ms - link.measured_ms < STALE_RATE_MS else 0.0

    def rates(self, now_ms: int) -> WorkerRates:
        """Return what has been learnt and still counts."""
        self._transfers = {k: pair for k, pair in self._transfers.items() if now_ms - pair.measured_ms < STALE_RATE_MS}
        return WorkerRates(
            prefill=_prefill_rates(self._prefill_s),
            transfers=tuple(
                TransferRate(
                    source=source, carrier=carrier, bytes_per_s=pair.bytes_per_s, latency_ms=round(pair.latency_ms, 3)
                )
                for (source, carrier), pair in self._transfers.items()
            ),
            decode_step_ms=round(self._decode_step_ms, 3),
            kv_token_bytes=self.token_bytes,
        )


def _prefill_rates(seconds: dict[int, float]) -> tuple[PrefillRate, ...]:
    return tuple(
        PrefillRate(context_tokens=border, tokens_per_s=round(1 / seconds[border], 1))
        for border in sorted(seconds)
        if seconds[border] > 0
    )


def _border(context_tokens: int, borders: Sequence[int] = CONTEXT_BORDERS) -> int:
    return borders[bisect_right(borders, max(0, context_tokens)) - 1]


def _blend(average: float, value: float) -> float:
    """The first value counts whole."""
    return value if average == 0.0 else average + WEIGHT * (value - average)
