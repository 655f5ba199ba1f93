"""What the workers have measured of themselves, and what is assumed until they have. Pure.

Workers send moving averages with their load. What one has not measured yet is taken from its like: a worker from the
fleet, a pair from the reader's other pairs, and nothing at all from the starting values here. A pair that once was slow
is not read from, and so not measured again: what was measured long ago counts less and less.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from schemas.directory import Tier
from schemas.ids import WorkerId
from schemas.worker import PrefillRate, TransferRate, WorkerRates
from services.scheduler.limits import (
    START_DECODE_STEP_MS,
    START_PREFILL_TOKENS_PER_S,
    START_TOKEN_BYTES,
    TRUST_HALF_LIFE_MS,
)


class Link(NamedTuple):
    """How one worker reads from another: a wait, then a stream."""

    latency_ms: float
    bytes_per_s: float

    def read_ms(self, num_bytes: float) -> float:
        return self.latency_ms + self.stream_ms(num_bytes)

    def stream_ms(self, num_bytes: float) -> float:
        return num_bytes / self.bytes_per_s * 1e3

    def towards(self, other: "Link", share: float) -> "Link":
        """Return the link this far on the way to another, in orders of magnitude."""
        latency_ms = (self.latency_ms + 0.001) * ((other.latency_ms + 0.001) / (self.latency_ms + 0.001)) ** share
        return Link(latency_ms, self.bytes_per_s * (other.bytes_per_s / self.bytes_per_s) ** share)


START_LINKS: dict[Tier, Link] = {
    "arena": Link(3.0, 1e9),
    "memory": Link(3.0, 1e9),
    "disk": Link(5.0, 500e6),
    "remote": Link(10.0, 200e6),
}
"""Loopback TCP, an ordinary solid-state disk, a server across a network."""


class Reads(NamedTuple):
    """What one reader has measured of its pairs: the quickest carrier of each, and since when that is unchanged."""

    by_source: dict[WorkerId, tuple[Link, int]]
    num_pairs: int = 0
    latency_ms: float = 0.0
    bytes_per_s: float = 0.0
    """Sums over the pairs, as means without one of them are asked for."""

    def without(self, source: WorkerId) -> "Reads":
        """Return the sums over the other pairs."""
        found = self.by_source.get(source)
        if found is None:
            return self
        link = found[0]
        return Reads({}, self.num_pairs - 1, self.latency_ms - link.latency_ms, self.bytes_per_s - link.bytes_per_s)

    @property
    def mean(self) -> Link | None:
        if not self.num_pairs:
            return None
        # Differences of sums: what rounding leaves of very unequal pairs is still a link.
        return Link(max(0.0, self.latency_ms) / self.num_pairs, max(1.0, self.bytes_per_s) / self.num_pairs)


class RateBook:
    """The rates that every worker sent last, and since when each of its pairs is unchanged."""

    def __init__(self) -> None:
        self._measured: dict[WorkerId, WorkerRates] = {}
        self._reads: dict[WorkerId, Reads] = {}
        self._fleet: FleetRates | None = None

    def learn(self, worker_id: WorkerId, rates: WorkerRates, now_ms: int) -> None:
        before = self._reads.get(worker_id, Reads({})).by_source
        self._measured[worker_id] = rates
        self._reads[worker_id] = _reads_of(rates.transfers, before, now_ms)
        self._fleet = None

    def forget(self, worker_id: WorkerId) -> None:
        self._measured.pop(worker_id, None)
        self._reads.pop(worker_id, None)
        self._fleet = None

    def fleet(self, now_ms: int) -> "FleetRates":
        """Return what is known now. Kept until somebody reports: ages need not be finer than that."""
        if self._fleet is None:
            self._fleet = FleetRates(dict(self._measured), dict(self._reads), now_ms)
        return self._fleet


class FleetRates:
    """Answers for one moment of the fleet. Rates that are not positive are ignored."""

    def __init__(self, measured: Mapping[WorkerId, WorkerRates], reads: Mapping[WorkerId, Reads], now_ms: int) -> None:
        self._measured = measured
        self._reads = reads
        self._now_ms = now_ms
        self._all_reads = Reads(
            {},
            sum(r.num_pairs for r in reads.values()),
            sum(r.latency_ms for r in reads.values()),
            sum(r.bytes_per_s for r in reads.values()),
        )
        self.is_measured = any(rate.tokens_per_s > 0 for rates in measured.values() for rate in rates.prefill)
        """Whether anybody has computed a prompt yet; else speeds are the starting values."""
        self._fleet_curve = _mean_curve(rates.prefill for rates in measured.values())
        self._curves: dict[WorkerId, tuple[PrefillRate, ...]] = {}
        self._links: dict[tuple[WorkerId, WorkerId, Tier], Link] = {}
        self._fleet_step_ms = _mean([r.decode_step_ms for r in measured.values()], START_DECODE_STEP_MS)
        self._fleet_token_bytes = _mean([float(r.kv_token_bytes) for r in measured.values()], START_TOKEN_BYTES)

    def compute_ms(self, worker_id: WorkerId, first_token: int, end_token: int) -> float:
        """Return how long this worker computes the prompt's tokens [first_token, end_token), undisturbed."""
        curve = self._curve(worker_id)
        spent_ms, at = 0.0, first_token
        for index, rate in enumerate(curve):
            until = curve[index + 1].context_tokens if index + 1 < len(curve) else end_token
            upto = min(end_token, until)
            if upto > at:
                spent_ms += (upto - at) / rate.tokens_per_s * 1e3
                at = upto
        return spent_ms

    def link(self, reader: WorkerId, source: WorkerId, tier: Tier = "arena") -> Link:
        """Return how `reader` reads from `source`, which keeps the blocks in `tier`."""
        key = (reader, source, tier)
        if key not in self._links:
            self._links[key] = self._find_link(reader, source, tier)
        return self._links[key]

    def step_ms(self, worker_id: WorkerId) -> float:
        """Return how long this worker's decode step takes."""
        rates = self._measured.get(worker_id)
        return rates.decode_step_ms if rates is not None and rates.decode_step_ms > 0 else self._fleet_step_ms

    def token_bytes(self, worker_id: WorkerId) -> float:
        """Return the bytes of one token's KV."""
        rates = self._measured.get(worker_id)
        return rates.kv_token_bytes if rates is not None and rates.kv_token_bytes > 0 else self._fleet_token_bytes

    def _find_link(self, reader: WorkerId, source: WorkerId, tier: Tier) -> Link:
        own = self._reads.get(reader, Reads({}))
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

    def _curve(self, worker_id: WorkerId) -> tuple[PrefillRate, ...]:
        if worker_id not in self._curves:
            rates = self._measured.get(worker_id)
            self._curves[worker_id] = _fill_curve(rates.prefill if rates else (), self._fleet_curve)
        return self._curves[worker_id]


def _mean_curve(curves: Iterable[Sequence[PrefillRate]]) -> tuple[PrefillRate, ...]:
    """Return the mean speed by context position over the workers that measured it; never empty."""
    speeds: dict[int, list[float]] = {}
    for curve in curves:
        for rate in curve:
            if rate.tokens_per_s > 0:
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
    mine = {rate.context_tokens: rate.tokens_per_s for rate in own if rate.tokens_per_s > 0}
    ratios = [mine[rate.context_tokens] / rate.tokens_per_s for rate in fleet if rate.context_tokens in mine]
    ratio = sum(ratios) / len(ratios) if ratios else 1.0
    return tuple(
        PrefillRate(
            context_tokens=rate.context_tokens,
            tokens_per_s=mine.get(rate.context_tokens, rate.tokens_per_s * ratio),
        )
        for rate in fleet
    )


def _reads_of(transfers: Sequence[TransferRate], before: Mapping[WorkerId, tuple[Link, int]], now_ms: int) -> Reads:
    usable = sorted((t for t in transfers if t.bytes_per_s > 0 and t.latency_ms >= 0), key=lambda t: t.bytes_per_s)
    links = {t.source: Link(t.latency_ms, t.bytes_per_s) for t in usable}  # the quickest comes last, and stays
    by_source: dict[WorkerId, tuple[Link, int]] = {}
    for source, link in links.items():
        known = before.get(source)
        by_source[source] = known if known is not None and known[0] == link else (link, now_ms)
    return Reads(
        by_source,
        len(links),
        sum(link.latency_ms for link in links.values()),
        sum(link.bytes_per_s for link in links.values()),
    )


def _mean(values: Iterable[float], otherwise: float) -> float:
    """Return the mean of those that are known (positive)."""
    known = [value for value in values if value > 0]
    return sum(known) / len(known) if known else otherwise
