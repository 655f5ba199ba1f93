"""Chooses the workers of one request, or says why there are none. Pure.

Policy `cost` prices whole placements (`cost.price`) and takes the cheapest; the simple policies pick worker by worker.
Whoever is suspect, or has failed this request before, is taken only where nobody else could serve.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from schemas.block import BLOCK_HASH_BYTES
from schemas.directory import HolderPrefix
from schemas.ids import WorkerId, is_tenant
from schemas.request import KVSource, Placement, PlacementTerms, PlaceRequest, RefusalReason, Refused, refuse
from services.config import SchedulerConfig
from services.scheduler.limits import FAILED_PENALTY, RETRY_AFTER_MS, SUSPECT_PENALTY
from services.scheduler.placement.admission import Admission, AdmissionLimits, Wait
from services.scheduler.placement.cost import CostLimits, choose, price, terms_of
from services.scheduler.placement.fleet_view import (
    Demand,
    FleetView,
    Pair,
    Queues,
    fits,
    needed_blocks,
    partners_of,
    queue_of,
    replica_of,
)
from services.scheduler.placement.known_rates import FleetRates
from services.scheduler.placement.known_worker import KnownWorker
from services.scheduler.placement.policy import Phase, Policy, policy_named

ChoiceT = TypeVar("ChoiceT")


@dataclass(frozen=True, slots=True)
class Case:
    """One request to place, and the fleet at this moment. `holders`: who is said to hold which of the prompt's blocks;
    a hint, used by policy `cost` only."""

    request: PlaceRequest
    now_ms: int
    fleet: FleetView
    suspects: Collection[WorkerId]
    holders: Sequence[HolderPrefix] = ()

    @property
    def demand(self) -> Demand:
        return Demand(max(1, self.request.num_prompt_tokens), self.request.max_tokens)

    def penalty_of(self, *workers: KnownWorker | None) -> int:
        """Return how much speaks against these workers."""
        ids = [worker.info.worker_id for worker in workers if worker is not None]
        num_failed = sum(worker_id in self.request.excluded_workers for worker_id in ids)
        num_suspect = sum(worker_id in self.suspects for worker_id in ids)
        return FAILED_PENALTY * num_failed + SUSPECT_PENALTY * num_suspect


class Placer:
    """Places requests as configured. Raises UserError for an unknown policy."""

    def __init__(self, settings: SchedulerConfig) -> None:
        self._policy_name = settings.policy
        self._policy: Policy | None = policy_named(settings.policy)
        self._limits = CostLimits(settings.pull_tokens_min, settings.unsplit_tokens_max)
        self._replicate = settings.replicate
        self._admission = Admission(AdmissionLimits(settings.max_queue_ms, settings.max_queued_requests))
        self._turns: dict[Phase, int] = {"prefill": 0, "decode": 0}
        self.asks_directory = self._policy is None
        """Whether `place` makes use of holders."""

    def place(self, case: Case) -> Placement | Refused:
        """Choose the workers of one attempt. Counts the choice as load until the workers report their own."""
        if case.request.deadline_ms <= case.now_ms:
            return refuse(case.request, RefusalReason.DEADLINE, "the deadline has passed")
        if not is_tenant(case.request.tenant):
            return refuse(case.request, RefusalReason.INVALID, "a tenant's name is a word of letters, digits, - and _")
        usable = case.fleet.usable()
        fitting = [worker for worker in usable if fits(worker.info, case.request)]
        rates = case.fleet.rates(case.now_ms)
        queues = {worker: queue_of(case.demand, worker, rates) for worker in fitting}
        if self._policy is None:
            decision = self._by_cost(case, queues, rates)
        else:
            decision = self._by_policy(self._policy, case, queues, rates)
        return decision or _refusal(case.request, usable, fitting)

    def _by_policy(self, policy: Policy, case: Case, queues: Queues, rates: FleetRates) -> Placement | Refused | None:
        """Pick worker by worker, among the pairs with the least penalty; None where there is no pair."""
        pairs: list[Pair] = [(worker, None) for worker in queues if worker.info.role == "aggregated"]
        pairs += [(worker, partner) for worker in queues for partner in partners_of(worker, queues)]
        if not pairs:
            return None
        pairs = _least_penalised(pairs, lambda pair: case.penalty_of(*pair))
        if refusal := self._overload(case, pairs, queues, rates):
            return refusal
        firsts = {first.info.worker_id: first for first, _ in pairs}
        first_block = case.request.block_hashes[:BLOCK_HASH_BYTES]
        prefill = self._pick(policy, "prefill", [firsts[worker_id] for worker_id in sorted(firsts)], first_block)
        prefill.place(num_tokens=case.request.num_prompt_tokens, num_blocks=0)
        partners = [partner for first, partner in pairs if first is prefill and partner is not None]
        decode = self._pick(policy, "decode", partners, first_block) if partners else None
        if decode is not None:
            decode.place(num_tokens=0, num_blocks=0)
        self._admission.placed(case.request.tenant, case.request.num_prompt_tokens, case.now_ms)
        return self._placement(case, prefill, decode)

    def _pick(self, policy: Policy, phase: Phase, workers: list[KnownWorker], first_block: bytes) -> KnownWorker:
        chosen = policy(phase, workers, self._turns[phase], first_block)
        self._turns[phase] += 1
        return chosen

    def _by_cost(self, case: Case, queues: Queues, rates: FleetRates) -> Placement | Refused | None:
        """Return the cheapest placement of those with the least penalty, or None where there is none."""
        demand, known = case.demand, case.fleet.workers
        # The directory may be behind: only living incarnations count.
        holding = [
            holder
            for holder in case.holders
            if holder.worker_id in known and known[holder.worker_id].info.incarnation == holder.incarnation
        ]
        not_asked = [worker_id for worker_id, worker in known.items() if case.penalty_of(worker)]
        options = price(demand, self._in_turn(queues), holding, rates, self._limits, not_asked)
        if not options:
            return None
        options = _least_penalised(options, lambda option: case.penalty_of(option.prefill, option.decode))
        if refusal := self._overload(case, [(option.prefill, option.decode) for option in options], queues, rates):
            return refusal
        self._turns["prefill"] += 1
        chosen = choose(options)
        prefill, decode, gathering = chosen.prefill, chosen.decode, chosen.gathering
        prefill.place(
            num_tokens=gathering.num_computed_tokens, num_blocks=needed_blocks(demand, prefill.info.block_size)
        )
        if decode is not None:
            decode.place(num_tokens=0, num_blocks=needed_blocks(demand, decode.info.block_size))
        self._admission.placed(case.request.tenant, gathering.num_computed_tokens, case.now_ms)
        return self._placement(case, prefill, decode, gathering.sources, terms_of(chosen, options))

    def _in_turn(self, queues: Queues) -> Queues:
        """Return the queues in another order: each role's begin with the worker whose turn it is."""
        turn, ordered = self._turns["prefill"], list[KnownWorker]()
        for role in ("aggregated", "prefill", "decode"):
            group = [worker for worker in queues if worker.info.role == role]
            start = turn % len(group) if group else 0
            ordered += group[start:] + group[:start]
        return {worker: queues[worker] for worker in ordered}

    def _overload(self, case: Case, pairs: Iterable[Pair], queues: Queues, rates: FleetRates) -> Refused | None:
        """Return the refusal of a new request that would wait too long. What was begun is never given up for load."""
        if case.request.attempt > 1:
            return None
        waits: list[Wait] = []
        for prefill, decode in pairs:
            first, last = queues[prefill], queues[decode or prefill]
            num_waiting = max(first.num_waiting, last.num_waiting)
            waits.append(Wait(first.prompts_ms + last.answers_ms, num_waiting, rates.is_measured))
        overload = self._admission.refusal(case.request.tenant, waits, case.now_ms)
        return refuse(case.request, RefusalReason.OVERLOADED, *overload) if overload else None

    def _placement(
        self,
        case: Case,
        prefill: KnownWorker,
        decode: KnownWorker | None,
        sources: tuple[KVSource, ...] = (),
        terms: PlacementTerms | None = None,
    ) -> Placement:
        replica: WorkerId | None = None
        if self._replicate:
            well = [w for w in case.fleet.workers.values() if not w.is_draining and not case.penalty_of(w)]
            replica = replica_of(decode or prefill, well)
        return Placement(
            request_id=case.request.request_id,
            attempt=case.request.attempt,
            deadline_ms=case.request.deadline_ms,
            prefill_worker=prefill.info.worker_id,
            decode_worker=decode.info.worker_id if decode else None,
            policy=self._policy_name,
            sources=sources,
            terms=terms,
            replica=replica,
        )


def _least_penalised(choices: Sequence[ChoiceT], penalty_of: Callable[[ChoiceT], int]) -> list[ChoiceT]:
    """Return the choices with the least penalty, in their order."""
    penalties = [penalty_of(choice) for choice in choices]
    least = min(penalties, default=0)
    return [choice for choice, penalty in zip(choices, penalties, strict=True) if penalty == least]


def _refusal(request: PlaceRequest, usable: list[KnownWorker], fitting: list[KnownWorker]) -> Refused:
    roles = {worker.info.role for worker in usable}
    if "aggregated" not in roles and not {"prefill", "decode"} <= roles:
        missing = [role for role in ("prefill", "decode") if role not in roles]
        return refuse(
            request, RefusalReason.NO_WORKER, f"no {' and no '.join(missing)} worker is ready", RETRY_AFTER_MS
        )
    if usable and not fitting:
        needed = request.num_prompt_tokens + request.max_tokens
        return refuse(request, RefusalReason.TOO_LONG, f"no worker has room for {needed} tokens")
    return refuse(request, RefusalReason.NO_WORKER, "no prefill and decode workers share one model", RETRY_AFTER_MS)
