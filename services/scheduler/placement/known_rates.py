"""What the workers have measured of themselves, and what is assumed until they have. Pure.

Workers send moving averages with their load. What one has not measured yet is taken from its like: a worker from the
fleet, a pair from the reader's other pairs, and nothing at all from the starting values here. A pair that once was slow
is not read from, and so not measured again: what was measured long ago counts less and less.

Everything is in arrays, a row for each worker's slot: a placement asks for hundreds of workers at once.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from schemas.directory import Tier
from schemas.ids import WorkerId
from schemas.worker import PrefillRate, TransferRate
from services.scheduler.limits import (
    MAX_BORDERS,
    MIN_RATE,
    REWEIGH_MS,
    START_PREFILL_TOKENS_PER_S,
    TRUST_HALF_LIFE_MS,
)

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Slots = npt.NDArray[np.intp]
"""Rows of workers in the fleet's arrays."""


class Link(NamedTuple):
    """How one worker reads from another: a wait, then a stream."""

    latency_ms: float
    bytes_per_s: float


class Links(NamedTuple):
    """How readers read from sources, both `[sources, readers]`."""

    latency_ms: Floats
    bytes_per_s: Floats


START_LINKS: dict[Tier, Link] = {
    Tier.ARENA: Link(3.0, 1e9),
    Tier.MEMORY: Link(3.0, 1e9),
    Tier.DISK: Link(5.0, 500e6),
    Tier.REMOTE: Link(10.0, 200e6),
    Tier.OTHER: Link(10.0, 200e6),
}
"""Loopback TCP, an ordinary solid-state disk, a server across a network."""
SLOW_TIERS: frozenset[Tier] = frozenset({Tier.DISK, Tier.REMOTE, Tier.OTHER})


class Speeds:
    """How quickly each worker computes prompts, by context position. Rates below `MIN_RATE` are ignored."""

    def __init__(self) -> None:
        self._borders: list[int] = []
        self._measured = np.zeros((0, 0))
        """`[workers, borders]`, tokens a second; 0: not measured."""
        self._starts = np.zeros(1)
        self._ends = np.full(1, np.inf)
        self._token_ms = np.zeros((1, 0))
        """`[borders, workers]`."""
        self._is_stale = True
        self._is_measured = False

    def grow(self, capacity: int) -> None:
        self._measured = grown(self._measured, (capacity, len(self._borders)))
        self._is_stale = True

    def observe(self, slot: int, rates: Sequence[PrefillRate]) -> None:
        """Replace what one worker has measured."""
        for rate in rates:
            if rate.context_tokens not in self._borders and len(self._borders) < MAX_BORDERS:
                self._add_border(rate.context_tokens)
        row = np.zeros(len(self._borders))
        for rate in rates:
            if rate.tokens_per_s >= MIN_RATE and rate.context_tokens in self._borders:
                row[self._borders.index(rate.context_tokens)] = rate.tokens_per_s
        if not np.array_equal(row, self._measured[slot]):
            self._measured[slot] = row
            self._is_stale = True

    def compute_ms(self, slots: Slots, first_token: int | Ints, end_token: int | Ints | Floats) -> Floats:
        """Return how long each worker computes the prompt's tokens [first_token, end_token), undisturbed. The tokens
        are one number, `[slots]`, or `[any, slots]`."""
        if self._is_stale:
            self._renew()
        token_ms = self._token_ms[:, slots]
        whole_ms = self._until_ms(token_ms, end_token)
        is_whole = not isinstance(first_token, np.ndarray) and not first_token
        return whole_ms if is_whole else whole_ms - self._until_ms(token_ms, first_token)

    def _until_ms(self, token_ms: Floats, end_token: int | Ints | Floats) -> Floats:
        """Return how long the tokens before `end_token` take. Sums are added up in one order, whatever the shape: who
        compares prices finds the same ones."""
        spent = np.zeros(np.broadcast_shapes(np.shape(end_token), token_ms.shape[1:]))
        last = end_token.max(initial=0) if isinstance(end_token, np.ndarray) else end_token
        for start, stop, each_ms in zip(self._starts.tolist(), self._ends.tolist(), token_ms, strict=True):
            if start >= last:
                break
            if isinstance(end_token, np.ndarray):
                spent = spent + np.maximum(np.minimum(end_token, stop) - start, 0.0) * each_ms
            else:
                spent = spent + (min(end_token, stop) - start) * each_ms
        return spent

    def has_measured(self) -> bool:
        """Return whether anybody has computed a prompt yet; else speeds are the starting values."""
        if self._is_stale:
            self._renew()
        return self._is_measured

    def _add_border(self, context_tokens: int) -> None:
        at = int(np.searchsorted(self._borders, context_tokens))
        self._borders.insert(at, context_tokens)
        self._measured = np.insert(self._measured, at, 0.0, axis=1)
        self._is_stale = True

    def _renew(self) -> None:
        """Fill what is not measured: the fleet's mean, scaled by how a worker compares where it has measured."""
        known = self._measured > 0
        kept = known.any(axis=0)
        self._is_measured = bool(kept.any())
        self._is_stale = False
        if not self._is_measured:
            self._starts, self._ends = np.zeros(1), np.full(1, np.inf)
            self._token_ms = np.full((1, len(self._measured)), 1e3 / START_PREFILL_TOKENS_PER_S)
            return
        measured, known = self._measured[:, kept], known[:, kept]
        means = measured.sum(axis=0) / known.sum(axis=0)
        num_known = known.sum(axis=1)
        ratios = np.where(num_known > 0, (measured / means).sum(axis=1) / np.maximum(num_known, 1), 1.0)
        self._token_ms = (1e3 / np.where(known, measured, means * ratios[:, None])).T.copy()
        borders = np.array(self._borders, np.float64)[kept]
        self._starts = borders.copy()
        self._starts[0] = 0.0  # what is nearer than anybody has measured is like the nearest
        self._ends = np.append(borders[1:], np.inf)


class Pairs:
    """How the workers have read from each other: the quickest carrier of each pair, older measurements the nearer to
    their like."""

    def __init__(self) -> None:
        self._links = Links(np.zeros((0, 0)), np.zeros((0, 0)))
        """NaN: not measured."""
        self._sums = np.zeros((0, 3))
        """Of each reader: the number of its pairs, their latencies and rates added up."""
        self._measured: dict[int, dict[WorkerId, tuple[Link, int]]] = {}
        """By reader: what it has measured of whom, and since when that is unchanged."""
        self._changed_ms: dict[int, int] = {}
        """Readers whose rows are not written yet, and when they spoke."""
        self._weighed: dict[int, int] = {}
        """When the readers whose rows are written had spoken."""
        self._written: dict[int, Slots] = {}
        """The sources in each reader's column."""
        self._assumed: Links | None = None
        self._quickest = np.zeros(0)
        """The highest rate that each reader has measured, as it counts now."""

    def grow(self, capacity: int) -> None:
        self._links = Links(*(grown(each, (capacity, capacity), np.nan) for each in self._links))
        self._sums = grown(self._sums, (capacity, 3))
        self._quickest = grown(self._quickest, (capacity,))
        self._assumed = None

    def observe(self, slot: int, transfers: Sequence[TransferRate], now_ms: int) -> None:
        """Replace what a reader has measured. Rates below `MIN_RATE` are ignored."""
        usable = [t for t in transfers if t.bytes_per_s >= MIN_RATE and t.latency_ms >= 0]
        before = self._measured.get(slot, {})
        if not usable and not before:
            return
        usable.sort(key=lambda t: t.bytes_per_s)
        now: dict[WorkerId, tuple[Link, int]] = {}
        for transfer in usable:  # the quickest comes last, and stays
            link, known = Link(transfer.latency_ms, transfer.bytes_per_s), before.get(transfer.source)
            now[transfer.source] = known if known is not None and known[0] == link else (link, now_ms)
        self._measured[slot] = now
        sums = [len(now), sum(link.latency_ms for link, _ in now.values()), sum(x.bytes_per_s for x, _ in now.values())]
        self._sums[slot] = sums
        self._changed_ms[slot] = now_ms
        self._assumed = None

    def renew(self, slot: int, now_ms: int) -> None:
        """Note that a reader has measured nothing new: what it had grows older, which counts in steps."""
        weighed_ms = self._weighed.get(slot)
        if weighed_ms is not None and now_ms - weighed_ms >= REWEIGH_MS:
            self._changed_ms[slot] = now_ms

    def remove_worker(self, slot: int) -> None:
        """Forget a worker, as a reader and as a source."""
        self._measured.pop(slot, None)
        self._changed_ms.pop(slot, None)
        self._weighed.pop(slot, None)
        self._sums[slot] = self._quickest[slot] = 0.0
        for each in self._links:
            each[slot] = each[:, slot] = np.nan
        self._written.pop(slot, None)
        self._assumed = None

    def add_source(self, slot: int, worker_id: WorkerId) -> None:
        """Note a source that others may have measured before it was known."""
        for reader, measured in self._measured.items():
            if worker_id in measured:
                self._changed_ms.setdefault(reader, measured[worker_id][1])

    def between(
        self, sources: Slots, readers: Slots, slots_of: Mapping[WorkerId, int], tiers: Sequence[Tier] = ()
    ) -> Links:
        """Return how each reader reads from each source. `tiers`: where each source keeps the blocks, if it is not an
        arena; a pair that nobody has measured is then no quicker than the tier's start."""
        latency_ms, bytes_per_s = (each[readers] for each in self._renewed(slots_of))
        if not SLOW_TIERS.isdisjoint(tiers):
            starts = np.array([START_LINKS[tier] if tier in SLOW_TIERS else (0.0, np.inf) for tier in tiers])
            latency_ms, bytes_per_s = np.maximum(latency_ms, starts[:, :1]), np.minimum(bytes_per_s, starts[:, 1:])
        return Links(
            _known(self._links.latency_ms, sources, readers, latency_ms),
            _known(self._links.bytes_per_s, sources, readers, bytes_per_s),
        )

    def rates(self, sources: Slots, readers: Slots, slots_of: Mapping[WorkerId, int]) -> Floats:
        """Return the bytes per second of each reader from each source, `[sources, readers]`, out of an arena."""
        return _known(self._links.bytes_per_s, sources, readers, self._renewed(slots_of).bytes_per_s[readers])

    def quickest(self, readers: Slots, slots_of: Mapping[WorkerId, int]) -> Floats:
        """Return what each reader's quickest read of all comes to, in bytes per second."""
        return np.maximum(self._renewed(slots_of).bytes_per_s, self._quickest)[readers]

    def _renewed(self, slots_of: Mapping[WorkerId, int]) -> Links:
        """Bring all up to date, and return what is to be assumed of pairs that nobody has measured."""
        self._write(slots_of)
        if self._assumed is None:
            self._assumed = self._assume()
        return self._assumed

    def _assume(self) -> Links:
        """Return what to assume of each reader's other pairs, `[workers]`: the mean of those that it has measured, else
        of all readers', else the start."""
        num, latency_ms, bytes_per_s = self._sums.T
        every = _mean(self._sums.sum(axis=0)) or START_LINKS[Tier.ARENA]
        has = num > 0
        return Links(
            np.where(has, np.maximum(latency_ms, 0.0) / np.maximum(num, 1), every.latency_ms),
            np.where(has, np.maximum(bytes_per_s, 1.0) / np.maximum(num, 1), every.bytes_per_s),
        )

    def _write(self, slots_of: Mapping[WorkerId, int]) -> None:
        """Bring the rows of those who have spoken up to date."""
        for reader, seen_ms in self._changed_ms.items():
            # Clear the reader's column: a source that it reports no more counts as not measured.
            self._quickest[reader] = 0.0
            self._weighed[reader] = seen_ms
            before = self._written.pop(reader, None)
            for links in self._links:
                if before is not None:
                    links[before, reader] = np.nan
            # Leave out sources that have not joined yet: `add_source` has this reader written again once they do.
            known = [
                (slots_of[source], link, since)
                for source, (link, since) in self._measured[reader].items()
                if source in slots_of
            ]
            if not known:
                continue
            # The older a measurement, the nearer it comes to its like: on a log scale, half way in each half-life.
            sources = np.array([slot for slot, _, _ in known], np.intp)
            own = np.array([link for _, link, _ in known], np.float64)
            ages = seen_ms - np.array([since for _, _, since in known], np.float64)
            like = self._like(reader, own)
            shares = 1 - 0.5 ** (ages / TRUST_HALF_LIFE_MS)
            aged = ages > 0
            own[:, 0] += 0.001 * aged  # a latency may be 0, which has no order of magnitude
            like[:, 0] += 0.001
            for column, links in enumerate(self._links):
                values = own[:, column]
                values[aged] *= (like[aged, column] / values[aged]) ** shares[aged]
                links[sources, reader] = values
            self._quickest[reader] = own[:, 1].max()
            self._written[reader] = sources
        self._changed_ms.clear()

    def _like(self, reader: int, own: Floats) -> Floats:
        """Return the like of each measured pair, `[pairs, 2]`: the reader's other pairs, else the other readers'."""
        num, *sums = self._sums[reader].tolist()
        if num > 1:
            others = (np.array(sums) - own) / (num - 1)
            return np.maximum(others, (0.0, 1.0 / (num - 1)))
        others = _mean(self._sums.sum(axis=0) - self._sums[reader]) or START_LINKS[Tier.ARENA]
        return np.tile(np.array(others, np.float64), (len(own), 1))


def grown(array: npt.NDArray[Any], shape: tuple[int, ...], value: float = 0.0) -> npt.NDArray[Any]:
    """Return a copy with more rows (and columns)."""
    found = np.full(shape, value, array.dtype)
    found[tuple(slice(length) for length in array.shape)] = array
    return found


def filled(values: Floats, otherwise: float) -> Floats:
    """Return the values that are known (positive); in place of the others the mean of these, or `otherwise`."""
    known = values > 0
    num_known = np.count_nonzero(known)
    return np.where(known, values, values.sum(where=known) / num_known if num_known else otherwise)


def _known(links: Floats, sources: Slots, readers: Slots, assumed: Floats) -> Floats:
    """Return what is known of pairs, `[sources, readers]`, and of the others what is assumed."""
    measured = links[sources].take(readers, axis=1)
    return np.where(np.isnan(measured), assumed, measured)


def _mean(sums: Floats) -> Link | None:
    num, latency_ms, bytes_per_s = sums.tolist()
    # Differences of sums: what rounding leaves of very unequal pairs is still a link.
    return Link(max(0.0, latency_ms) / num, max(1.0, bytes_per_s) / num) if num > 0 else None
