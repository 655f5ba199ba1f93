"""The view of the fleet, and placement on it. Pure: events and the time come in, decisions go out.

A worker is known from the first message that names it. Its restart (a new incarnation) replaces it at once; one that
has been silent too long is declared left.
"""

from dataclasses import dataclass

import msgspec

from schemas.directory import HolderPrefix
from schemas.ids import WorkerId
from schemas.request import Placement, PlaceRequest, Refused, refuse
from schemas.worker import (
    FleetDescribed,
    WorkerDraining,
    WorkerInfo,
    WorkerJoined,
    WorkerLeft,
    WorkerLoad,
)
from services.scheduler.cost import (
    DEFAULT_LIMITS,
    Contender,
    CostLimits,
    Demand,
    Option,
    choose,
    needed_blocks,
    price,
    terms_of,
)
from services.scheduler.policy import Candidate, Phase, Policy, policy_named
from services.scheduler.rates import RateBook

RETRY_AFTER_MS = 1_000

FleetEvent = WorkerJoined | WorkerLoad | WorkerDraining | WorkerLeft


@dataclass(slots=True)
class KnownWorker:
    """A worker as it last described itself, and what has been placed on it since."""

    info: WorkerInfo
    heard_ms: int
    load: WorkerLoad | None = None
    draining: bool = False
    num_placed_requests: int = 0
    num_placed_tokens: int = 0
    num_placed_blocks: int = 0

    def place(self, *, num_tokens: int, num_blocks: int) -> None:
        """Count a request as load until the worker reports its own."""
        self.num_placed_requests += 1
        self.num_placed_tokens += num_tokens
        self.num_placed_blocks += num_blocks

    def hear(self, load: WorkerLoad) -> None:
        self.load = load
        self.draining = self.draining or load.state == "draining"
        self.num_placed_requests = self.num_placed_tokens = self.num_placed_blocks = 0

    def candidate(self) -> Candidate:
        load = self.load
        return Candidate(
            worker_id=self.info.worker_id,
            num_uncomputed_tokens=self.num_placed_tokens + (load.num_uncomputed_tokens if load else 0),
            num_requests=self.num_requests,
            num_free_blocks=load.blocks.free + load.blocks.cached if load else self.info.num_blocks,
        )

    def contender(self) -> Contender:
        """What another worker computes for this one is no queue here."""
        load = self.load
        num_reported = load.num_uncomputed_tokens - load.num_unreceived_tokens if load else 0
        free = load.blocks.free if load else self.info.num_blocks
        return Contender(
            info=self.info,
            num_waiting_tokens=self.num_placed_tokens + num_reported,
            num_requests=self.num_requests,
            num_running=load.num_running if load else 0,
            num_free_blocks=free - self.num_placed_blocks,
            num_kept_blocks=load.blocks.cached if load else 0,
        )

    @property
    def num_requests(self) -> int:
        return self.num_placed_requests + (self.load.num_running + self.load.num_queued if self.load else 0)


class SchedulerCore:
    """Places requests. `policy` is a name of `policy.POLICIES` (UserError otherwise)."""

    def __init__(self, policy: str, silent_after_ms: int, limits: CostLimits = DEFAULT_LIMITS) -> None:
        self.policy_name = policy
        self._policy: Policy | None = policy_named(policy)
        self._limits = limits
        self._silent_after_ms = silent_after_ms
        self._workers: dict[WorkerId, KnownWorker] = {}
        self._turns: dict[Phase, int] = {"prefill": 0, "decode": 0}
        self._rates = RateBook()

    @property
    def asks_directory(self) -> bool:
        """Whether `place` makes use of holders."""
        return self._policy is None

    def handle(self, event: FleetEvent, now_ms: int) -> list[WorkerLeft]:
        """Take in what a worker says of itself. Returns what to say on behalf of an incarnation that it replaces."""
        replaced: list[WorkerLeft] = []
        match event:
            case WorkerJoined(worker=info):
                self._hear(info, now_ms, replaced)
            case WorkerLoad(worker=info):
                self._hear(info, now_ms, replaced).hear(event)
                self._rates.learn(info.worker_id, event.rates, now_ms)
            case WorkerDraining():
                if worker := self._known(event.worker_id, event.incarnation):
                    worker.draining = True
            case WorkerLeft():
                if self._known(event.worker_id, event.incarnation):
                    self._forget(event.worker_id)
        return replaced

    def expire(self, now_ms: int) -> list[WorkerLeft]:
        """Forget the workers that have been silent too long, and say so on their behalf."""
        silent = [w.info for w in self._workers.values() if now_ms - w.heard_ms > self._silent_after_ms]
        for info in silent:
            self._forget(info.worker_id)
        return [_left(info, "silent") for info in silent]

    def place(self, request: PlaceRequest, now_ms: int, holders: tuple[HolderPrefix, ...] = ()) -> Placement | Refused:
        """Choose the workers of one attempt. Counts the choice as load until the workers report their own.

        `holders`: who is said to hold which of the prompt's blocks; a hint, used by policy `cost` only.
        """
        if request.deadline_ms <= now_ms:
            return refuse(request, "deadline", "the deadline has passed")
        usable = [w for w in self._usable() if w.info.worker_id not in request.excluded_workers]
        fitting = [w for w in usable if _fits(w.info, request)]
        if self._policy is None:
            return self._place_by_cost(request, now_ms, fitting, holders) or self._refusal(request, usable, fitting)
        first = [w for w in fitting if w.info.role == "aggregated" or _partners(w, fitting)]
        if not first:
            return self._refusal(request, usable, fitting)
        prefill = self._pick(self._policy, "prefill", first)
        prefill.place(num_tokens=request.num_prompt_tokens, num_blocks=0)
        decode: KnownWorker | None = None
        if prefill.info.role == "prefill":
            decode = self._pick(self._policy, "decode", _partners(prefill, fitting))
            decode.place(num_tokens=0, num_blocks=0)
        return self._placement(request, prefill, decode)

    def describe(self) -> FleetDescribed:
        """Return what is known, and whether a request could be placed now."""
        usable = self._usable()
        ready = any(w.info.role == "aggregated" or _partners(w, usable) for w in usable)
        loads = tuple(w.load for w in self._workers.values() if w.load is not None)
        return FleetDescribed(policy=self.policy_name, ready=ready, workers=loads)

    def _hear(self, info: WorkerInfo, now_ms: int, replaced: list[WorkerLeft]) -> KnownWorker:
        known = self._workers.get(info.worker_id)
        if known is None or known.info.incarnation != info.incarnation:
            if known is not None:
                replaced.append(_left(known.info, "restarted"))
                self._forget(info.worker_id)
            known = self._workers[info.worker_id] = KnownWorker(info, now_ms)
        known.heard_ms = now_ms
        return known

    def _forget(self, worker_id: WorkerId) -> None:
        del self._workers[worker_id]
        self._rates.forget(worker_id)

    def _known(self, worker_id: WorkerId, incarnation: str) -> KnownWorker | None:
        known = self._workers.get(worker_id)
        return known if known is not None and known.info.incarnation == incarnation else None

    def _usable(self) -> list[KnownWorker]:
        ordered = sorted(self._workers.values(), key=lambda w: w.info.worker_id)
        return [w for w in ordered if not w.draining and w.info.role != "store"]

    def _pick(self, policy: Policy, phase: Phase, workers: list[KnownWorker]) -> KnownWorker:
        chosen = policy(phase, [w.candidate() for w in workers], self._turns[phase])
        self._turns[phase] += 1
        return self._workers[chosen.worker_id]

    def _place_by_cost(
        self, request: PlaceRequest, now_ms: int, workers: list[KnownWorker], holders: tuple[HolderPrefix, ...]
    ) -> Placement | None:
        """Return the cheapest placement, or None where there is none."""
        demand = Demand(max(1, request.num_prompt_tokens), request.max_tokens)
        contenders = [w.contender() for w in self._in_turn(workers)]
        lending = [h for h in holders if self._may_lend(h, request)]
        options = price(demand, contenders, lending, self._rates.fleet(now_ms), self._limits)
        if not options:
            return None
        self._turns["prefill"] += 1
        chosen = choose(options)
        prefill = self._workers[chosen.prefill.worker_id]
        decode = self._workers[chosen.decode.worker_id] if chosen.decode else None
        self._count(chosen, demand, prefill, decode)
        return msgspec.structs.replace(
            self._placement(request, prefill, decode),
            sources=chosen.gathering.sources,
            terms=terms_of(chosen, options),
        )

    def _in_turn(self, workers: list[KnownWorker]) -> list[KnownWorker]:
        """Return the workers, each role's beginning with the one whose turn it is."""
        turn, ordered = self._turns["prefill"], list[KnownWorker]()
        for role in ("aggregated", "prefill", "decode"):
            group = [w for w in workers if w.info.role == role]
            start = turn % len(group) if group else 0
            ordered += group[start:] + group[:start]
        return ordered

    def _may_lend(self, holder: HolderPrefix, request: PlaceRequest) -> bool:
        """The directory may be behind: only living incarnations count, and none that has just failed this request. A
        draining worker still lends."""
        known = self._known(holder.worker_id, holder.incarnation)
        return known is not None and holder.worker_id not in request.excluded_workers

    def _count(self, chosen: Option, demand: Demand, prefill: KnownWorker, decode: KnownWorker | None) -> None:
        prefill.place(
            num_tokens=chosen.gathering.num_computed_tokens, num_blocks=needed_blocks(demand, prefill.info.block_size)
        )
        if decode is not None:
            decode.place(num_tokens=0, num_blocks=needed_blocks(demand, decode.info.block_size))

    def _placement(self, request: PlaceRequest, prefill: KnownWorker, decode: KnownWorker | None) -> Placement:
        return Placement(
            request_id=request.request_id,
            attempt=request.attempt,
            deadline_ms=request.deadline_ms,
            prefill_worker=prefill.info.worker_id,
            decode_worker=decode.info.worker_id if decode else None,
            policy=self.policy_name,
        )

    def _refusal(self, request: PlaceRequest, usable: list[KnownWorker], fitting: list[KnownWorker]) -> Refused:
        roles = {w.info.role for w in usable}
        if "aggregated" not in roles and not {"prefill", "decode"} <= roles:
            missing = [role for role in ("prefill", "decode") if role not in roles]
            return refuse(request, "no_worker", f"no {' and no '.join(missing)} worker is ready", RETRY_AFTER_MS)
        if usable and not fitting:
            needed = request.num_prompt_tokens + request.max_tokens
            return refuse(request, "too_long", f"no worker has room for {needed} tokens")
        return refuse(request, "no_worker", "no prefill and decode workers share one model", RETRY_AFTER_MS)


def _left(info: WorkerInfo, reason: str) -> WorkerLeft:
    return WorkerLeft(worker_id=info.worker_id, incarnation=info.incarnation, reason=reason)


def _fits(info: WorkerInfo, request: PlaceRequest) -> bool:
    num_tokens = request.num_prompt_tokens + request.max_tokens
    return num_tokens <= info.context_length and num_tokens <= info.num_blocks * info.block_size


def _partners(prefill: KnownWorker, workers: list[KnownWorker]) -> list[KnownWorker]:
    """Return the decode workers that can read this prefill worker's KV (none for another role)."""
    if prefill.info.role != "prefill":
        return []
    return [w for w in workers if w.info.role == "decode" and w.info.fingerprint == prefill.info.fingerprint]
