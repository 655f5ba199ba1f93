"""Policy `cost` as an exhaustive search: every way to serve is priced by itself, in plain numbers, and the first of the
cheapest is taken. What `services.scheduler.placement.cost` must choose."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from schemas.directory import HolderPrefix
from schemas.ids import WorkerId
from services.scheduler.limits import (
    EQUAL_MS,
    EQUAL_SHARE,
    LOAD_WEIGHT,
    MAX_SOURCES,
    NO_ROOM_MS,
    OVERLAPPED_SHARE,
    STALL_WEIGHT,
)
from services.scheduler.placement.cost import CostLimits
from services.scheduler.placement.known_rates import Slots
from services.scheduler.placement.known_worker import KnownWorker
from services.scheduler.placement.policy import Question


@dataclass(frozen=True)
class Gathered:
    num_cached_tokens: int
    num_computed_tokens: int
    pull_ms: float
    compute_ms: float
    sources: tuple[tuple[WorkerId, int, int], ...]


@dataclass(frozen=True)
class Option:
    prefill: KnownWorker
    decode: KnownWorker | None
    gathered: Gathered
    cost_ms: float
    penalty: int
    num_cached_tokens: int

    @property
    def load_order(self) -> tuple[float, ...]:
        decoding = self.decode or self.prefill
        return (
            self.prefill.num_waiting_tokens, self.prefill.num_requests, decoding.num_requests, self.decode is not None,
            -self.num_cached_tokens, -decoding.num_free_blocks,
        )  # fmt: skip


class Exhaustive:
    """Prices one question, for all workers that have room: what is to be said against them is looked at here."""

    def __init__(self, question: Question, limits: CostLimits) -> None:
        self.question = question
        self.limits = limits
        self.fleet = question.fleet
        self.held: dict[WorkerId, int] = {}
        for run in question.holders:
            if run.first_block == 0:
                self.held[run.worker_id] = max(run.num_blocks, self.held.get(run.worker_id, 0))

    def options(self) -> list[Option]:
        """Return every way, of which the least is to be said, in the order in which equals take turns."""
        found: list[Option] = []
        for whole, kept in zip(self.fleet.groups, self.question.groups, strict=True):
            fitting = [self.fleet.fitting(slots, self.question.demand) for slots in whole]
            prefill, decode, aggregated = (self._in_turn(*slots) for slots in zip(fitting, kept, strict=True))
            found += [self._alone(worker) for worker in aggregated]
            found += [self._split(first, partner) for first in prefill for partner in decode]
            lone = self._in_turn(fitting[1], fitting[1])
            found += [option for worker in lone if self._may(option := self._alone(worker))]
        least = min((option.penalty for option in found), default=0)
        return [option for option in found if option.penalty == least]

    def choose(self, options: list[Option], slack: float = 0.0) -> Option:
        """Return the first of the cheapest. `slack`: this part more or less counts as equal."""
        least_ms = min(option.cost_ms for option in options)
        limit_ms = (least_ms + EQUAL_MS + EQUAL_SHARE * least_ms) * (1 + slack)
        return min((option for option in options if option.cost_ms <= limit_ms), key=lambda option: option.load_order)

    def _in_turn(self, slots: Slots, kept: Slots) -> list[KnownWorker]:
        """Those take turns that are kept; the others come behind."""
        start = self.question.turn % len(kept) if len(kept) else 0
        order = [*kept[start:].tolist(), *kept[:start].tolist()]
        return [self.fleet.worker(slot) for slot in [*order, *(slot for slot in slots.tolist() if slot not in order)]]

    def _may(self, option: Option) -> bool:
        holds_most = 2 * option.gathered.num_cached_tokens >= self.question.demand.num_prompt_tokens
        return holds_most and option.gathered.num_computed_tokens <= self.limits.unsplit_tokens_max

    def _alone(self, worker: KnownWorker) -> Option:
        gathered = self.gather(worker)
        cost_ms = self._queue_ms(worker) + self._room_ms(worker, gathered.num_cached_tokens)
        cost_ms += gathered.pull_ms + gathered.compute_ms + self._load_ms(worker)
        cost_ms += gathered.compute_ms * worker.load.num_running * STALL_WEIGHT
        return Option(worker, None, gathered, cost_ms, self._against(worker), gathered.num_cached_tokens)

    def _split(self, prefill: KnownWorker, decode: KnownWorker) -> Option:
        num_tokens, gathered = self.question.demand.num_prompt_tokens, self.gather(prefill)
        held = min(self.held.get(decode.info.worker_id, 0) * decode.info.block_size, num_tokens - 1)
        num_bytes = (num_tokens - held) * float(self.fleet.token_bytes(np.array([decode.slot]))[0])
        stream_ms = num_bytes / self._link(decode, prefill.info.worker_id)[1] * 1e3
        cost_ms = self._queue_ms(prefill) + gathered.pull_ms + gathered.compute_ms
        cost_ms += max(stream_ms - gathered.compute_ms, stream_ms * OVERLAPPED_SHARE)
        cost_ms += self._room_ms(decode, held) + self._load_ms(decode)
        against = self._against(prefill) + self._against(decode)
        return Option(prefill, decode, gathered, cost_ms, against, gathered.num_cached_tokens + held)

    def gather(self, reader: KnownWorker) -> Gathered:
        size, num_tokens = reader.info.block_size, self.question.demand.num_prompt_tokens
        end_block = (num_tokens - 1) // size
        at = cached = min(self.held.get(reader.info.worker_id, 0), end_block)
        pull_ms, sources = 0.0, list[tuple[WorkerId, int, int]]()
        while len(sources) < MAX_SOURCES:
            pieces = list(self._pieces(reader, at, end_block))
            if not pieces:
                break
            token_ms, _, run = min(pieces, key=lambda piece: piece[:2])
            sources.append((run.worker_id, at, number_of := min(run.first_block + run.num_blocks, end_block) - at))
            at += number_of
            pull_ms += token_ms * number_of * size
        compute_ms = self._compute_ms(reader, at * size, num_tokens)
        return Gathered(cached * size, num_tokens - at * size, pull_ms, compute_ms, tuple(sources))

    def _pieces(self, reader: KnownWorker, at: int, end_block: int) -> Iterator[tuple[float, int, HolderPrefix]]:
        size = reader.info.block_size
        for number, run in enumerate(self.question.lenders):
            upto = min(run.first_block + run.num_blocks, end_block)
            if run.worker_id == reader.info.worker_id or not run.first_block <= at < upto:
                continue
            tokens = (upto - at) * size
            latency_ms, bytes_per_s = self._link(reader, run.worker_id, run.tier)
            token_ms = (
                latency_ms / tokens + float(self.fleet.token_bytes(np.array([reader.slot]))[0]) * 1e3 / bytes_per_s
            )
            is_worth = self._compute_ms(reader, at * size, at * size + tokens) > token_ms * tokens
            if is_worth and tokens >= self.limits.pull_tokens_min:
                yield token_ms, number, run

    def _link(self, reader: KnownWorker, source: WorkerId, tier: str = "arena") -> tuple[float, float]:
        links = self.fleet.links(
            np.array([self.fleet.workers[source].slot]),
            np.array([reader.slot]),
            [tier],  # type: ignore[list-item]
        )
        return float(links.latency_ms[0, 0]), float(links.bytes_per_s[0, 0])

    def _compute_ms(self, worker: KnownWorker, first_token: int, end_token: int) -> float:
        return float(self.fleet.compute_ms(np.array([worker.slot]), first_token, end_token)[0])

    def _queue_ms(self, worker: KnownWorker) -> float:
        demand = self.question.demand
        num_tokens = demand.num_prompt_tokens
        before = worker.before(demand.tenant, num_tokens)
        return before.num_tokens * self._compute_ms(worker, 0, num_tokens) / num_tokens

    def _load_ms(self, worker: KnownWorker) -> float:
        return worker.num_requests * float(self.fleet.step_ms(np.array([worker.slot]))[0]) * LOAD_WEIGHT

    def _room_ms(self, worker: KnownWorker, num_held_tokens: int) -> float:
        size = worker.info.block_size
        lacking = -(-self.question.demand.num_tokens // size) - num_held_tokens // size
        return NO_ROOM_MS if lacking > worker.num_usable_blocks else 0.0

    def _against(self, worker: KnownWorker) -> int:
        return int(self.question.against[worker.slot])
