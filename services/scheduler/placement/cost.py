"""Here a placement is priced: `price` returns every way to serve a request with its cost in milliseconds, `choose`
takes the cheapest. Pure.

The cost is the predicted time to first token (queue, reads, computation), from measured rates (`known_rates`), what the
hand-over exposes, what computing costs those who decode on the same worker, and how full the batch is that it will
decode in. What the weights are is in `services.scheduler.limits`.
"""

import heapq
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from schemas.directory import HolderPrefix
from schemas.ids import WorkerId
from schemas.request import KVSource, PlacementTerms
from services.scheduler.limits import (
    EQUAL_MS,
    EQUAL_SHARE,
    LOAD_WEIGHT,
    MAX_ALTERNATIVES,
    MAX_SOURCES,
    NO_ROOM_MS,
    OVERLAPPED_SHARE,
    STALL_WEIGHT,
)
from services.scheduler.placement.fleet_view import Demand, PredictedQueue, Queues, needed_blocks
from services.scheduler.placement.known_rates import FleetRates
from services.scheduler.placement.known_worker import KnownWorker


class CostLimits(NamedTuple):
    """The operator's floor for reads, and how much a decode worker may compute by itself."""

    pull_tokens_min: int = 64
    unsplit_tokens_max: int = 512


DEFAULT_LIMITS = CostLimits()


class Gathering(NamedTuple):
    """Where the KV of a prompt comes from on one worker: its own blocks, others' in order, then computation."""

    num_cached_tokens: int
    num_pulled_tokens: int
    num_computed_tokens: int
    pull_ms: float
    compute_ms: float
    sources: tuple[KVSource, ...] = ()


class Piece(NamedTuple):
    """What one holder could lend from a block on. `saved_ms`: the time that the reader would compute it in, less the
    read's."""

    source: WorkerId
    num_tokens: int
    read_ms: float
    saved_ms: float


class Target(NamedTuple):
    """A decode worker, as the one that a prompt's KV would be handed over to."""

    worker: KnownWorker
    num_held_tokens: int
    """The prompt's tokens whose KV it has."""
    num_lacking_bytes: float
    """The KV that it would have to read."""
    room_ms: float
    load_ms: float


class Option(NamedTuple):
    """One way to serve. Without `decode` the first worker does it alone."""

    prefill: KnownWorker
    decode: KnownWorker | None
    gathering: Gathering
    num_cached_tokens: int
    """The prompt's tokens that either worker has, added up."""
    queue_ms: float
    handover_ms: float
    stall_ms: float
    load_ms: float

    def __str__(self) -> str:
        first = self.prefill.info.worker_id
        way = f"{first}→{self.decode.info.worker_id}" if self.decode else f"{first} alone"
        return f"{way} {self.cost_ms:.1f} ms"

    @property
    def ttft_ms(self) -> float:
        return self.queue_ms + self.gathering.pull_ms + self.gathering.compute_ms

    @property
    def cost_ms(self) -> float:
        return self.ttft_ms + self.handover_ms + self.stall_ms + self.load_ms


def choose(options: Sequence[Option]) -> Option:
    """Return the cheapest. Among equals the least loaded, then the one that holds more, then the first."""
    least_ms = min(option.cost_ms for option in options)
    limit_ms = least_ms + EQUAL_MS + EQUAL_SHARE * least_ms
    return min((option for option in options if option.cost_ms <= limit_ms), key=_load_order)


def price(
    demand: Demand,
    queues: Queues,
    holders: Sequence[HolderPrefix],
    rates: FleetRates,
    limits: CostLimits = DEFAULT_LIMITS,
    not_asked: Collection[WorkerId] = (),
) -> list[Option]:
    """Return every way to serve, in the order of `queues`, which has each worker that may: alone on an aggregated
    worker, alone on a decode worker that holds most of the prompt, or split over two. Whoever else holds something of
    the prompt only lends, and those `not_asked` do not."""
    held = held_blocks(holders)
    lending = [run for run in holders if run.worker_id not in not_asked]
    targets: dict[str, list[Target]] = {}  # by the fingerprint of the KV that they can read
    for worker in queues:
        if worker.info.role == "decode":
            target = _target(demand, worker, held.get(worker.info.worker_id, 0), rates)
            targets.setdefault(worker.info.fingerprint, []).append(target)
    options: list[Option] = []
    for worker, queue in queues.items():
        partners = targets.get(worker.info.fingerprint, []) if worker.info.role == "prefill" else []
        if worker.info.role == "prefill" and not partners:
            continue
        gathering = gather(demand, worker, held.get(worker.info.worker_id, 0), lending, rates, limits)
        if partners:
            options += [_split(worker, queue, gathering, target, rates) for target in partners]
        elif worker.info.role == "aggregated" or _may_serve_alone(demand, gathering, limits):
            options.append(_alone(demand, worker, queue, gathering, rates))
    return options


def held_blocks(holders: Iterable[HolderPrefix]) -> dict[WorkerId, int]:
    """Return how many blocks of the prompt's beginning each worker holds."""
    held: dict[WorkerId, int] = {}
    for run in holders:
        if run.first_block == 0:
            held[run.worker_id] = max(run.num_blocks, held.get(run.worker_id, 0))
    return held


def gather(
    demand: Demand,
    reader: KnownWorker,
    num_held_blocks: int,
    holders: Sequence[HolderPrefix],
    rates: FleetRates,
    limits: CostLimits = DEFAULT_LIMITS,
) -> Gathering:
    """Plan a prompt's KV on `reader`: extend what it holds by whoever lends the next block quickest, as long as reading
    beats computing. The last token is always computed."""
    block_size, num_prompt_tokens = reader.info.block_size, demand.num_prompt_tokens
    end_block = (num_prompt_tokens - 1) // block_size
    cached = at = min(num_held_blocks, end_block)
    sources: list[KVSource] = []
    pull_ms = 0.0
    while at < end_block and len(sources) < MAX_SOURCES:
        pieces = [
            _piece(reader, run, at, end_block, rates)
            for run in holders
            if run.first_block <= at < run.first_block + run.num_blocks and run.worker_id != reader.info.worker_id
        ]
        worth = [piece for piece in pieces if piece.num_tokens >= limits.pull_tokens_min and piece.saved_ms > 0]
        if not worth:
            break
        best = min(worth, key=lambda piece: piece.read_ms / piece.num_tokens)
        sources.append(KVSource(worker_id=best.source, first_block=at, num_blocks=best.num_tokens // block_size))
        at += best.num_tokens // block_size
        pull_ms += best.read_ms
    return Gathering(
        num_cached_tokens=cached * block_size,
        num_pulled_tokens=(at - cached) * block_size,
        num_computed_tokens=num_prompt_tokens - at * block_size,
        pull_ms=pull_ms,
        compute_ms=rates.compute_ms(reader, at * block_size, num_prompt_tokens),
        sources=tuple(sources),
    )


def terms_of(chosen: Option, options: Iterable[Option]) -> PlacementTerms:
    """Return what the decision was made of, and the best of what it was made against."""
    others = heapq.nsmallest(MAX_ALTERNATIVES, (o for o in options if o is not chosen), key=lambda o: o.cost_ms)
    gathering = chosen.gathering
    return PlacementTerms(
        ttft_ms=round(chosen.ttft_ms, 3),
        queue_ms=round(chosen.queue_ms, 3),
        pull_ms=round(gathering.pull_ms, 3),
        compute_ms=round(gathering.compute_ms, 3),
        handover_ms=round(chosen.handover_ms, 3),
        stall_ms=round(chosen.stall_ms, 3),
        cached_tokens=gathering.num_cached_tokens,
        pulled_tokens=gathering.num_pulled_tokens,
        computed_tokens=gathering.num_computed_tokens,
        alternatives="; ".join(str(other) for other in others),
    )


def _piece(reader: KnownWorker, run: HolderPrefix, at: int, end_block: int, rates: FleetRates) -> Piece:
    num_tokens = (min(run.first_block + run.num_blocks, end_block) - at) * reader.info.block_size
    first_token = at * reader.info.block_size
    link = rates.link(reader, run.worker_id, run.tier)
    read_ms = link.read_ms(num_tokens * rates.token_bytes(reader))
    compute_ms = rates.compute_ms(reader, first_token, first_token + num_tokens)
    return Piece(run.worker_id, num_tokens, read_ms, compute_ms - read_ms)


def _may_serve_alone(demand: Demand, gathering: Gathering, limits: CostLimits) -> bool:
    """Say whether a decode worker may: it computes little, and only where it would otherwise lend most of the prompt
    away."""
    holds_most = 2 * gathering.num_cached_tokens >= demand.num_prompt_tokens
    return holds_most and gathering.num_computed_tokens <= limits.unsplit_tokens_max


def _alone(
    demand: Demand, worker: KnownWorker, queue: PredictedQueue, gathering: Gathering, rates: FleetRates
) -> Option:
    return Option(
        prefill=worker,
        decode=None,
        gathering=gathering,
        num_cached_tokens=gathering.num_cached_tokens,
        queue_ms=queue.prompts_ms + _room_ms(demand, worker, gathering.num_cached_tokens),
        handover_ms=0.0,
        stall_ms=gathering.compute_ms * worker.load.num_running * STALL_WEIGHT,
        load_ms=_load_ms(worker, rates),
    )


def _target(demand: Demand, worker: KnownWorker, num_held_blocks: int, rates: FleetRates) -> Target:
    num_held_tokens = min(num_held_blocks * worker.info.block_size, demand.num_prompt_tokens - 1)
    return Target(
        worker=worker,
        num_held_tokens=num_held_tokens,
        num_lacking_bytes=(demand.num_prompt_tokens - num_held_tokens) * rates.token_bytes(worker),
        room_ms=_room_ms(demand, worker, num_held_tokens),
        load_ms=_load_ms(worker, rates),
    )


def _split(
    prefill: KnownWorker, queue: PredictedQueue, gathering: Gathering, target: Target, rates: FleetRates
) -> Option:
    """Price a split. The decode worker reads what it lacks while the prompt is computed: what takes longer than the
    computation shows, and what does not is not free either."""
    stream_ms = rates.link(target.worker, prefill.info.worker_id).stream_ms(target.num_lacking_bytes)
    exposed_ms = max(stream_ms - gathering.compute_ms, stream_ms * OVERLAPPED_SHARE)
    return Option(
        prefill=prefill,
        decode=target.worker,
        gathering=gathering,
        num_cached_tokens=gathering.num_cached_tokens + target.num_held_tokens,
        queue_ms=queue.prompts_ms,
        handover_ms=exposed_ms + target.room_ms,
        stall_ms=0.0,
        load_ms=target.load_ms,
    )


def _load_ms(worker: KnownWorker, rates: FleetRates) -> float:
    return worker.num_requests * rates.step_ms(worker) * LOAD_WEIGHT


def _room_ms(demand: Demand, worker: KnownWorker, num_held_tokens: int) -> float:
    block_size = worker.info.block_size
    lacking = needed_blocks(demand, block_size) - num_held_tokens // block_size
    return NO_ROOM_MS if lacking > worker.num_usable_blocks else 0.0


def _load_order(option: Option) -> tuple[int, int, int, bool, int, int]:
    """Return what to order equals by: the less loaded, then who needs no hand-over, then who holds more."""
    decoding = option.decode or option.prefill
    return (
        option.prefill.num_waiting_tokens,
        option.prefill.num_requests,
        decoding.num_requests,
        option.decode is not None,
        -option.num_cached_tokens,
        -decoding.num_free_blocks,
    )
