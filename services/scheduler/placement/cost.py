"""Here a placement is priced: every way to serve a request has a cost in milliseconds, and the cheapest is taken. Pure.

The cost is the predicted time to first token (queue, reads, computation), from measured rates (`known_rates`), what the
hand-over exposes, what computing costs those who decode on the same worker, and how full the batch is that it will
decode in. What the weights are is in `services.scheduler.limits`.

The choice is that of an exhaustive search (`tests/scheduler/exhaustive.py`). Few pairs are priced to find it: whoever
computes the prompt has a bound below which no partner brings its cost, and pairs are priced in the order of that.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from schemas.directory import Tier
from schemas.request import KVSource, PlacementTerms
from services.scheduler.limits import (
    EQUAL_MS,
    EQUAL_SHARE,
    LOAD_WEIGHT,
    MAX_ALTERNATIVES,
    MAX_SOURCES,
    NO_ROOM_MS,
    OVERLAPPED_SHARE,
    ROWS_AT_ONCE,
    STALL_WEIGHT,
)
from services.scheduler.placement.fleet_view import Queues, needed_blocks
from services.scheduler.placement.known_rates import Floats, Ints, Slots
from services.scheduler.placement.policy import NOBODY, Choice, Question

Key = tuple[int, ...]
"""What equals are ordered by: the less loaded, then who needs no hand-over, then who holds more, then whose turn it
is."""


class CostLimits(NamedTuple):
    """The operator's floor for reads, and how much a decode worker may compute by itself."""

    pull_tokens_min: int = 64
    unsplit_tokens_max: int = 512


DEFAULT_LIMITS = CostLimits()


class Way(NamedTuple):
    """One way to serve, by slots. Without `decode` the first does it alone."""

    cost_ms: float
    prefill: int
    decode: int | None


class Step(NamedTuple):
    """Some readers read on from one run each: from the block where they are, so many."""

    readers: Slots
    runs: Slots
    first_blocks: Ints
    num_blocks: Ints


class Gathering(NamedTuple):
    """Where the KV of a prompt comes from on each reader: its own blocks, others' in order, then computation. Each but
    `steps` is by slot; 0 where nobody reads."""

    num_cached_tokens: Ints
    num_pulled_tokens: Ints
    num_computed_tokens: Ints
    pull_ms: Floats
    compute_ms: Floats
    steps: tuple[Step, ...] = ()


class Runs(NamedTuple):
    """The blocks of the prompt that others lend, in arrays: a run's first block, and the slot and tier of who holds it.
    Many runs end at the same block: `ends` are the blocks behind their last ones, and a run's is `ends[at_end]`."""

    first_blocks: Ints
    slots: Slots
    tiers: Sequence[Tier]
    ends: Ints
    at_end: Slots


class Cost:
    """Policy `cost`."""

    def __init__(self, limits: CostLimits = DEFAULT_LIMITS) -> None:
        self._limits = limits

    def __call__(self, question: Question) -> Choice | None:
        return _Pricing(question, self._limits).choice()


class _Pricing:
    """Prices one question."""

    def __init__(self, question: Question, limits: CostLimits) -> None:
        self.question = question
        self.fleet = question.fleet
        self.demand = question.demand
        self.limits = limits
        self.held: Ints = np.zeros(len(self.fleet.rows), np.int64)
        """By slot: how many blocks of the prompt's beginning the worker holds."""
        workers = self.fleet.workers
        for run in question.holders:
            if run.first_block == 0:
                slot = workers[run.worker_id].slot
                self.held[slot] = max(run.num_blocks, self.held[slot])
        lent = question.lenders
        first_blocks = np.array([run.first_block for run in lent], np.int64)
        self.runs = Runs(
            first_blocks,
            np.array([workers[run.worker_id].slot for run in lent], np.intp),
            [run.tier for run in lent],
            *np.unique(first_blocks + np.array([run.num_blocks for run in lent], np.int64), return_inverse=True),
        )
        self.lone = [self._hold_most(slots) for slots in question.lone]
        readers = [slots for group in question.groups for slots in (group.prefill, group.aggregated)]
        self.gathering = self._gather(np.concatenate([NOBODY, *readers, *self.lone]))

    def choice(self) -> Choice | None:
        question, turn = self.question, self.question.turn
        ways: list[_Alone | _Splits] = []
        lone = [self._may_serve_alone(in_turn(slots, turn)) for slots in self.lone]
        penalties = [int(question.against[slots].min()) for slots in lone if len(slots)]
        penalty = min([question.penalty, *penalties]) if question.has_ways else min(penalties, default=0)
        for group, slots in zip(question.groups, lone, strict=True):
            if penalty == question.penalty and len(group.aggregated):
                ways.append(_Alone(self, in_turn(group.aggregated, turn)))
            if penalty == question.penalty and group.has_pairs:
                ways.append(_Splits(self, in_turn(group.prefill, turn), in_turn(group.decode, turn)))
            if len(slots := slots[question.against[slots] == penalty]):
                ways.append(_Alone(self, slots))
        best: list[Way] = []
        for each in ways:
            best = each.cheapest(best)
        if not best:
            return None
        limit_ms = best[0].cost_ms + EQUAL_MS + EQUAL_SHARE * best[0].cost_ms
        candidates = [(*found, each) for each in ways if (found := each.first_of_equals(limit_ms)) is not None]
        _, chosen, of = min(candidates, key=lambda found: found[0])
        return self._explain(chosen, of, [way for way in best if way[1:] != chosen[1:]])

    def room_ms(self, slots: Slots, num_held_tokens: Ints) -> Floats:
        rows = self.fleet.rows
        sizes = rows["block_size"][slots]
        lacking = needed_blocks(self.demand, sizes) - num_held_tokens // sizes
        return np.where(lacking > rows["usable_blocks"][slots], NO_ROOM_MS, 0.0)

    def load_ms(self, slots: Slots) -> Floats:
        return self.fleet.rows["requests"][slots] * self.fleet.step_ms(slots) * LOAD_WEIGHT

    def _gather(self, readers: Slots) -> Gathering:
        """Plan a prompt's KV on each reader: extend what it holds by whoever lends the next block quickest, as long as
        reading beats computing. The last token is always computed."""
        # Start from each reader's own blocks, up to the block of the last token, which is left to compute.
        fleet, num_tokens = self.fleet, self.demand.num_prompt_tokens
        sizes = fleet.rows["block_size"][readers]
        end_blocks = (num_tokens - 1) // sizes
        cached = np.minimum(self.held[readers], end_blocks)
        at, pull_ms, steps = cached, np.zeros(len(readers)), list[Step]()
        # Add what others lend. `_read` changes `at` and `pull_ms` in place, so `at` must not be `cached` itself.
        if len(self.runs.slots) and len(readers):
            at = cached.copy()
            steps = list(self._read(readers, sizes, end_blocks, at, pull_ms))
        # The rest is computed. Where nobody has a block, a plain 0 spares the subtraction of the first tokens' time.
        compute_ms = fleet.compute_ms(readers, at * sizes if at.any() else 0, num_tokens)

        def by_slot(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
            found = np.zeros(len(fleet.rows), values.dtype)
            found[readers] = values
            return found

        return Gathering(
            num_cached_tokens=by_slot(cached * sizes),
            num_pulled_tokens=by_slot((at - cached) * sizes),
            num_computed_tokens=by_slot(num_tokens - at * sizes),
            pull_ms=by_slot(pull_ms),
            compute_ms=by_slot(compute_ms),
            steps=tuple(steps),
        )

    def _read(self, readers: Slots, sizes: Ints, end_blocks: Ints, at: Ints, pull_ms: Floats) -> Iterator[Step]:
        """Let readers read on from the blocks where they are: `at` moves on, and `pull_ms` grows. Matrices are
        `[runs, readers]`, in tokens and milliseconds."""
        fleet, runs = self.fleet, self.runs
        # Many runs share an end: compute the time up to each distinct end once, then spread it over the runs.
        upto = (np.minimum(runs.ends[:, None], end_blocks) * sizes).astype(np.float64)
        upto_ms = fleet.compute_ms(readers, 0, upto)
        links = fleet.links(runs.slots, readers, runs.tiers)
        token_ms = fleet.token_bytes(readers) * 1e3 / links.bytes_per_s
        upto, upto_ms = upto[runs.at_end], upto_ms[runs.at_end]
        upto[runs.slots[:, None] == readers] = 0.0  # nobody reads from itself
        columns = upto, upto_ms, links.latency_ms, token_ms
        first_blocks, going = runs.first_blocks[:, None], np.arange(len(readers))
        for _ in range(MAX_SOURCES):
            # Each round adds one source to each reader that some run can take further.
            ahead = np.flatnonzero(at[going] * sizes[going] < columns[0].max(axis=0))
            if not len(ahead):
                return
            if 2 * len(ahead) <= len(going):  # the others cost less than leaving them out
                going, columns = going[ahead], tuple(each[:, ahead] for each in columns)
            upto, upto_ms, wait_ms, token_ms = columns
            # Price each reader's next read from each run, in time for a token: its part of the wait, and its transfer.
            from_block, from_token = at[going], at[going] * sizes[going]
            tokens = upto - from_token
            per_token_ms = wait_ms / np.maximum(tokens, 1.0) + token_ms
            # A run must have the reader's next block and enough tokens, and be quicker than computing them.
            lends = (first_blocks <= from_block) & (tokens >= max(1, self.limits.pull_tokens_min))
            lends &= upto_ms - fleet.compute_ms(readers[going], 0, from_token) > per_token_ms * tokens
            # Each reader takes its cheapest run; with no reader that has one, the plan is done.
            per_token_ms = np.where(lends, per_token_ms, np.inf)
            chosen = per_token_ms.argmin(axis=0)
            each_ms = per_token_ms[chosen, np.arange(len(going))]
            places = np.flatnonzero(np.isfinite(each_ms))
            if not len(places):
                return
            chosen, reading = chosen[places], going[places]
            # Note the step before the readers move on: it names the block where each of them begins.
            num_tokens = tokens[chosen, places]
            pull_ms[reading] += each_ms[places] * num_tokens
            num_blocks = num_tokens.astype(np.int64) // sizes[reading]
            yield Step(readers[reading], chosen, at[reading], num_blocks)
            at[reading] += num_blocks

    def _hold_most(self, slots: Slots) -> Slots:
        """Return those decode workers that would otherwise lend most of the prompt away."""
        return slots[2 * self.held[slots] * self.fleet.rows["block_size"][slots] >= self.demand.num_prompt_tokens]

    def _may_serve_alone(self, slots: Slots) -> Slots:
        """Return those of them that compute little."""
        holds_most = 2 * self.gathering.num_cached_tokens[slots] >= self.demand.num_prompt_tokens
        return slots[holds_most & (self.gathering.num_computed_tokens[slots] <= self.limits.unsplit_tokens_max)]

    def _explain(self, chosen: Way, of: "_Alone | _Splits", others: list[Way]) -> Choice:
        """Return a choice with its sources and what it was made of."""
        gathering, slot = self.gathering, chosen.prefill
        queue_ms, handover_ms, stall_ms = of.terms_of(chosen)
        pull_ms, compute_ms = float(gathering.pull_ms[slot]), float(gathering.compute_ms[slot])
        terms = PlacementTerms(
            ttft_ms=round(queue_ms + pull_ms + compute_ms, 3),
            queue_ms=round(queue_ms, 3),
            pull_ms=round(pull_ms, 3),
            compute_ms=round(compute_ms, 3),
            handover_ms=round(handover_ms, 3),
            stall_ms=round(stall_ms, 3),
            cached_tokens=int(gathering.num_cached_tokens[slot]),
            pulled_tokens=int(gathering.num_pulled_tokens[slot]),
            computed_tokens=int(gathering.num_computed_tokens[slot]),
            alternatives="; ".join(self._name(other) for other in others[:MAX_ALTERNATIVES]),
        )
        worker = self.fleet.worker
        decode = worker(chosen.decode).info.worker_id if chosen.decode is not None else None
        return Choice(worker(chosen.prefill).info.worker_id, decode, tuple(self._sources(slot)), terms)

    def _sources(self, reader: int) -> Iterator[KVSource]:
        """Return what one reader reads from whom, in order."""
        for step in self.gathering.steps:
            for at in np.flatnonzero(step.readers == reader).tolist():
                yield KVSource(
                    worker_id=self.fleet.worker(int(self.runs.slots[step.runs[at]])).info.worker_id,
                    first_block=int(step.first_blocks[at]),
                    num_blocks=int(step.num_blocks[at]),
                )

    def _name(self, way: Way) -> str:
        first = self.fleet.worker(way.prefill).info.worker_id
        served = "alone" if way.decode is None else f"→{self.fleet.worker(way.decode).info.worker_id}"
        return f"{first}{' ' if way.decode is None else ''}{served} {way.cost_ms:.1f} ms"


@dataclass
class _Alone:
    """Workers of which each would serve by itself."""

    pricing: _Pricing
    slots: Slots

    @cached_property
    def queue_ms(self) -> Floats:
        queues = self.pricing.fleet.queues(self.pricing.demand, self.slots)
        num_cached_tokens = self.pricing.gathering.num_cached_tokens[self.slots]
        return queues.prompts_ms + self.pricing.room_ms(self.slots, num_cached_tokens)

    @cached_property
    def stall_ms(self) -> Floats:
        compute_ms = self.pricing.gathering.compute_ms[self.slots]
        return compute_ms * self.pricing.fleet.rows["running"][self.slots] * STALL_WEIGHT

    @cached_property
    def costs_ms(self) -> Floats:
        gathering, slots = self.pricing.gathering, self.slots
        own_ms = self.queue_ms + gathering.pull_ms[slots] + gathering.compute_ms[slots]
        return own_ms + self.stall_ms + self.pricing.load_ms(slots)

    def terms_of(self, way: Way) -> tuple[float, float, float]:
        """Return the milliseconds of queue, hand-over and stall."""
        place = int(np.flatnonzero(self.slots == way.prefill)[0])
        return float(self.queue_ms[place]), 0.0, float(self.stall_ms[place])

    def cheapest(self, best: list[Way]) -> list[Way]:
        """Return the cheapest of these and of `best`, in order."""
        found = _least(self.costs_ms)
        ways = zip(self.costs_ms[found].tolist(), self.slots[found].tolist(), strict=True)
        return _cheapest(best, [Way(*way, None) for way in ways])

    def first_of_equals(self, limit_ms: float) -> tuple[Key, Way] | None:
        """Return the first of those that cost no more."""
        at = np.flatnonzero(self.costs_ms <= limit_ms)
        if not len(at):
            return None
        rows = self.pricing.fleet.rows[self.slots[at]]
        held = self.pricing.gathering.num_cached_tokens[self.slots[at]]
        first = np.lexsort((-rows["free_blocks"], -held, rows["requests"], rows["waiting_tokens"]))[0]
        row, one = rows[first], at[first]
        key = (*_load(row), int(row["requests"]), 0, -int(held[first]), -int(row["free_blocks"]))
        return key, Way(float(self.costs_ms[one]), int(self.slots[one]), None)


@dataclass
class _Splits:
    """Pairs of a prefill and a decode worker. The decode worker reads what it lacks while the prompt is computed: what
    takes longer than the computation shows, and what does not is not free either."""

    pricing: _Pricing
    prefill: Slots
    decode: Slots
    compute_ms: Floats = field(init=False)
    queues: Queues = field(init=False)
    own_ms: Floats = field(init=False)
    """What a pair costs for its prefill worker."""
    held_tokens: Ints = field(init=False)
    lacking_bytes: Floats = field(init=False)
    room_ms: Floats = field(init=False)
    rest_ms: Floats = field(init=False)
    """What it costs for its decode worker, less the hand-over."""

    def __post_init__(self) -> None:
        fleet, demand = self.pricing.fleet, self.pricing.demand
        gathering = self.pricing.gathering
        self.compute_ms = gathering.compute_ms[self.prefill]
        self.queues = fleet.queues(demand, self.prefill)
        self.own_ms = self.queues.prompts_ms + gathering.pull_ms[self.prefill] + self.compute_ms
        held = self.pricing.held[self.decode] * fleet.rows["block_size"][self.decode]
        self.held_tokens = np.minimum(held, demand.num_prompt_tokens - 1)
        self.lacking_bytes = (demand.num_prompt_tokens - self.held_tokens) * fleet.token_bytes(self.decode)
        self.room_ms = self.pricing.room_ms(self.decode, self.held_tokens)
        self.rest_ms = self.room_ms + self.pricing.load_ms(self.decode)

    def handover_ms(self, firsts: Slots) -> Floats:
        """Return what the hand-over exposes, `[firsts, decode]`; `firsts` are places in `prefill`."""
        stream_ms = self.lacking_bytes / self.pricing.fleet.link_rates(self.prefill[firsts], self.decode) * 1e3
        return np.maximum(stream_ms - self.compute_ms[firsts, None], stream_ms * OVERLAPPED_SHARE)

    def costs_ms(self, firsts: Slots) -> Floats:
        """Return `[firsts, decode]`."""
        if self.is_small:
            return self._all_ms[firsts]
        return self.handover_ms(firsts) + self.own_ms[firsts, None] + self.rest_ms

    @cached_property
    def _all_ms(self) -> Floats:
        return self.handover_ms(np.arange(len(self.prefill))) + self.own_ms[:, None] + self.rest_ms

    @property
    def is_small(self) -> bool:
        """All pairs are priced at once: bounds would take longer."""
        return len(self.prefill) <= ROWS_AT_ONCE

    @cached_property
    def quickest_ms(self) -> Floats:
        """What each decode worker's hand-over takes at least, from whomever."""
        return self.lacking_bytes / self.pricing.fleet.quickest(self.decode) * 1e3

    @cached_property
    def bounds_ms(self) -> Floats:
        """No pair of a prefill worker costs less than this."""
        if self.is_small:
            return self.own_ms
        hidden = (self.rest_ms + self.quickest_ms * OVERLAPPED_SHARE).min()
        shown = (self.rest_ms + self.quickest_ms).min() - self.compute_ms
        # A little less, for the rounding of sums in another order.
        return (self.own_ms + np.maximum(hidden, shown)) * (1 - 1e-12)

    def terms_of(self, way: Way) -> tuple[float, float, float]:
        """Return the milliseconds of queue, hand-over and stall."""
        first = int(np.flatnonzero(self.prefill == way.prefill)[0])
        decode = int(np.flatnonzero(self.decode == way.decode)[0])
        handover_ms = float(self.handover_ms(np.array([first]))[0, decode] + self.room_ms[decode])
        return float(self.queues.prompts_ms[first]), handover_ms, 0.0

    def cheapest(self, best: list[Way]) -> list[Way]:
        """Return the cheapest of these and of `best`, in order."""
        for firsts in _parts(np.argsort(self.bounds_ms, kind="stable")):
            if len(best) > MAX_ALTERNATIVES and self.bounds_ms[firsts[0]] > best[-1].cost_ms:
                break
            costs = self.costs_ms(firsts)
            flat = costs.ravel()
            found = _least(flat)
            places, decodes = np.divmod(found, len(self.decode))
            ways = zip(
                flat[found].tolist(), self.prefill[firsts[places]].tolist(), self.decode[decodes].tolist(), strict=True
            )
            best = _cheapest(best, [Way(*way) for way in ways])
        return best

    def first_of_equals(self, limit_ms: float) -> tuple[Key, Way] | None:
        """Return the first of those that cost no more."""
        rows = self.pricing.fleet.rows
        firsts = np.flatnonzero(self.bounds_ms <= limit_ms)
        slots = self.prefill[firsts]
        waiting_tokens, requests = rows["waiting_tokens"][slots], rows["requests"][slots]
        firsts = firsts[np.lexsort((requests, waiting_tokens))]
        ideal = self._ideal(limit_ms) if len(firsts) > ROWS_AT_ONCE else ()
        found: tuple[Key, Way] | None = None
        for part in _parts(firsts):
            least = _load(rows[self.prefill[part[0]]])
            if found is not None and (found[0][:2] < least or found[0][2:] <= ideal):
                break
            candidate = self._first_within(limit_ms, part)
            if candidate is not None and (found is None or candidate[0] < found[0]):
                found = candidate
        return found

    def _ideal(self, limit_ms: float) -> Key:
        """Return a key, without the prefill worker's load, that no pair within the limit comes before."""
        rows = self.pricing.fleet.rows
        least_ms = self.own_ms.min(initial=np.inf) + self.rest_ms + self.quickest_ms * OVERLAPPED_SHARE
        possible = np.flatnonzero(least_ms * (1 - 1e-12) <= limit_ms)
        if not len(possible):
            return ()
        num_requests = rows["requests"][self.decode[possible]]
        least_busy = possible[num_requests == num_requests.min()]
        most_held = int(self.held_tokens[possible].max() + self.pricing.gathering.num_cached_tokens[self.prefill].max())
        return int(num_requests.min()), 1, -most_held, -int(rows["free_blocks"][self.decode[least_busy]].max())

    def _first_within(self, limit_ms: float, firsts: Slots) -> tuple[Key, Way] | None:
        """Return the first pair of some prefill workers, in the order of their load, that costs no more."""
        costs = self.costs_ms(firsts)
        places, decodes = np.nonzero(costs <= limit_ms)
        if not len(places):
            return None
        rows = self.pricing.fleet.rows
        waiting_tokens, requests = (rows[name][self.prefill[firsts[places]]] for name in ("waiting_tokens", "requests"))
        num_alike = int(np.argmin((waiting_tokens == waiting_tokens[0]) & (requests == requests[0])))
        if num_alike:  # the others have more to do
            places, decodes = places[:num_alike], decodes[:num_alike]
        slots, partners = self.prefill[firsts[places]], self.decode[decodes]
        busy, free = rows["requests"][partners], rows["free_blocks"][partners]
        held = self.held_tokens[decodes] + self.pricing.gathering.num_cached_tokens[slots]
        first = np.lexsort((-free, -held, busy))[0]
        way = Way(float(costs[places[first], decodes[first]]), int(slots[first]), int(partners[first]))
        return (*_load(rows[slots[first]]), int(busy[first]), 1, -int(held[first]), -int(free[first])), way


def in_turn(slots: Slots, turn: int) -> Slots:
    """Return slots that begin with the worker whose turn it is."""
    start = turn % max(1, len(slots))
    return np.concatenate((slots[start:], slots[:start])) if start else slots


def _load(row: Any) -> tuple[int, int]:
    return int(row["waiting_tokens"]), int(row["requests"])


def _least(costs_ms: Floats) -> Slots:
    """Return the places of the least costs, as many as are named."""
    count = min(1 + MAX_ALTERNATIVES, len(costs_ms))
    return np.argpartition(costs_ms, count - 1)[:count]


def _cheapest(best: list[Way], found: list[Way]) -> list[Way]:
    return sorted([*best, *found], key=lambda way: way.cost_ms)[: 1 + MAX_ALTERNATIVES]


def _parts(places: Slots) -> Iterator[Slots]:
    for start in range(0, len(places), ROWS_AT_ONCE):
        yield places[start : start + ROWS_AT_ONCE]
