"""What the workers have measured of themselves, and what is assumed until they have. Pure.

Workers send moving averages with their load. What one has not measured yet is taken from its like: a worker from the
fleet, a pair from the reader's other pairs, and nothing at all from the starting values here. A pair that once was slow
is not read from, and so not measured again: what was measured long ago counts less and less.
"""

from collections.abc import Iterable, Sequence

from schemas.directory import Tier
from schemas.ids import WorkerId
from schemas.worker import PrefillRate
from services.scheduler.limits import (
    MIN_RATE,
    START_DECODE_STEP_MS,
    START_PREFILL_TOKENS_PER_S,
    START_TOKEN_BYTES,
    TRUST_HALF_LIFE_MS,
)
from services.scheduler.placement.known_worker import KnownWorker, Link, Reads

START_LINKS: dict[Tier, Link] = {
    "arena": Link(3.0, 1e9),
    "memory": Link(3.0, 1e9),
    "disk": Link(5.0, 500e6),
    "remote": Link(10.0, 200e6),
}
"""Loopback TCP, an ordinary solid-state disk, a server across a network."""


class FleetRates:
    """What the workers' rates say at one moment. Rates below `MIN_RATE` are ignored."""

    def __init__(self, workers: Iterable[KnownWorker], now_ms: int) -> None:
        workers = list(workers)
        rates = [worker.load.rates for worker in workers]
        reads = [worker.reads for worker in workers]
        self._now_ms = now_ms
        self._all_reads = Reads(
            {},
            sum(r.num_pairs for r in reads),
            sum(r.latency_ms for r in reads),
            sum(r.bytes_per_s for r in reads),
        )
        self.is_measured = any(rate.tokens_per_s >= MIN_RATE for known in rates for rate in known.prefill)
        """Whether anybody has computed a prompt yet; else speeds are the starting values."""
        self._fleet_curve = _mean_curve(known.prefill for known in rates)
        self._curves: dict[WorkerId, tuple[PrefillRate, ...]] = {}
        self._links: dict[tuple[WorkerId, WorkerId, Tier], Link] = {}
        self._fleet_step_ms = _mean([known.decode_step_ms for known in rates], START_DECODE_STEP_MS)
        self._fleet_token_bytes = _mean([float(known.kv_token_bytes) for known in rates], START_TOKEN_BYTES)

    def compute_ms(self, worker: KnownWorker, first_token: int, end_token: int) -> float:
        """Return how long this worker computes the prompt's tokens [first_token, end_token), undisturbed."""
        curve = self._curve(worker)
        spent_ms, at = 0.0, first_token
        for index, rate in enumerate(curve):
            until = curve[index + 1].context_tokens if index + 1 < len(curve) else end_token
            upto = min(end_token, until)
            if upto > at:
                spent_ms += (upto - at) / rate.tokens_per_s * 1e3
                at = upto
        return spent_ms

    def link(self, reader: KnownWorker, source: WorkerId, tier: Tier = "arena") -> Link:
        """Return how `reader` reads from `source`, which keeps the blocks in `tier`."""
        key = (reader.info.worker_id, source, tier)
        if key not in self._links:
            self._links[key] = self._find_link(reader.reads, source, tier)
        return self._links[key]

    def step_ms(self, worker: KnownWorker) -> float:
        """Return how long this worker's decode step takes."""
        own_ms = worker.load.rates.decode_step_ms
        return own_ms if own_ms > 0 else self._fleet_step_ms

    def token_bytes(self, worker: KnownWorker) -> float:
        """Return the bytes of one token's KV."""
        own = worker.load.rates.kv_token_bytes
        return own if own > 0 else self._fleet_token_bytes

    def _find_link(self, own: Reads, source: WorkerId, tier: Tier) -> Link:
        like = self._like(own, source, tier)
        if source not in own.by_source:
            return like
        link, since_ms = own.by_source[source]
        return link.towards(like, 1 - 0.5 ** ((self._now_ms - since_ms) / TRUST_HALF_LIFE_MS))

    def _like(self, own: Reads, source: WorkerId, tier: Tier) -> Link:
        """Return what to assume of a pair: the reader's other pairs, else the other readers', else the start."""
        start = START_LINKS[tier]
        others = Reads(
            {},
            self._all_reads.num_pairs - own.num_pairs,
            self._all_reads.latency_ms - own.latency_ms,
            self._all_reads.bytes_per_s - own.bytes_per_s,
        )
        like = own.without(source).mean or others.mean or start
        if tier in ("arena", "memory"):
            return like
        return Link(max(like.latency_ms, start.latency_ms), min(like.bytes_per_s, start.bytes_per_s))

    def _curve(self, worker: KnownWorker) -> tuple[PrefillRate, ...]:
        worker_id = worker.info.worker_id
        if worker_id not in self._curves:
            self._curves[worker_id] = _fill_curve(worker.load.rates.prefill, self._fleet_curve)
        return self._curves[worker_id]


def _mean_curve(curves: Iterable[Sequence[PrefillRate]]) -> tuple[PrefillRate, ...]:
    """Return the mean speed by context position over the workers that measured it; never empty."""
    speeds: dict[int, list[float]] = {}
    for curve in curves:
        for rate in curve:
            if rate.tokens_per_s >= MIN_RATE:
                speeds.setdefault(rate.context_tokens, []).append(rate.tokens_per_s)
    if not speeds:
        return (PrefillRate(context_tokens=0, tokens_per_s=START_PREFILL_TOKENS_PER_S),)
    return tuple(
        PrefillRate(context_tokens=start, tokens_per_s=sum(found) / len(found))
        for start, found in sorted(speeds.items())
    )


def _fill_curve(own: Sequence[PrefillRate], fleet: tuple[PrefillRate, ...]) -> tuple[PrefillRate, ...]:
    """Return the fleet's curve with this worker's own speeds in it; positions that it has not measured are scaled by
    how it compares where it has."""
    mine = {rate.context_tokens: rate.tokens_per_s for rate in own if rate.tokens_per_s >= MIN_RATE}
    ratios = [mine[rate.context_tokens] / rate.tokens_per_s for rate in fleet if rate.context_tokens in mine]
    ratio = sum(ratios) / len(ratios) if ratios else 1.0
    return tuple(
        PrefillRate(
            context_tokens=rate.context_tokens,
            tokens_per_s=mine.get(rate.context_tokens, rate.tokens_per_s * ratio),
        )
        for rate in fleet
    )


def _mean(values: Iterable[float], otherwise: float) -> float:
    """Return the mean of those that are known (positive)."""
    known = [value for value in values if value > 0]
    return sum(known) / len(known) if known else otherwise
