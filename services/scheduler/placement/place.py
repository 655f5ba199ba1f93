"""Chooses the workers of one request, or says why there are none. Pure.

Policy `cost` prices whole placements (`cost.price`) and takes the cheapest; the simple policies pick worker by worker.
Whoever is suspect, or has failed this request before, is taken only where nobody else could serve.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from schemas.directory import HolderPrefix
from schemas.ids import WorkerId
from schemas.request import Placement, PlaceRequest, Refused, refuse
from services.config import SchedulerConfig
from services.scheduler.limits import FAILED_PENALTY, RETRY_AFTER_MS, SUSPECT_PENALTY
from services.scheduler.placement.admission import Admission, AdmissionLimits
from services.scheduler.placement.cost import (
    CostLimits,
    Demand,
    Option,
    choose,
    needed_blocks,
    price,
    terms_of,
)
from services.scheduler.placement.fleet_view import KnownWorker, Pair, fits, partners_of, replica_of, wait_of
from services.scheduler.placement.known_rates import RateBook
from services.scheduler.placement.policy import Phase, Policy, policy_named

ChoiceT = TypeVar("ChoiceT")


@dataclass(frozen=True, slots=True)
class Case:
    """One request to place, and the fleet at this moment. `holders`: who is said to hold which of the prompt's blocks;
    a hint, used by policy `cost` only."""

    request: PlaceRequest
    now_ms: int
    workers: Mapping[WorkerId, KnownWorker]
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
        self.rates = RateBook()
        """To be told what the workers have measured, and who has left."""
        self._policy_name = settings.policy
        self._policy: Policy | None = policy_named(settings.policy)
        self._limits = CostLimits(settings.pull_tokens_min, settings.unsplit_tokens_max)
        self._replicate = settings.replicate
        self._admission = Admission(AdmissionLimits(settings.max_queue_ms, settings.max_queued_requests))
        self._turns: dict[Phase, int] = {"prefill": 0, "decode": 0}

    @property
    def asks_directory(self) -> bool:
        """Whether `place` makes use of holders."""
        return self._policy is None

    def place(self, case: Case) -> Placement | Refused:
        """Choose the workers of one attempt. Counts the choice as load until the workers report their own."""
        if case.request.deadline_ms <= case.now_ms:
            return refuse(case.request, "deadline", "the deadline has passed")
        usable = usable_workers(case.workers)
        fitting = [worker for worker in usable if fits(worker.info, case.request)]
        if self._policy is None:
            decision = self._by_cost(case, fitting)
        else:
            decision = self._by_policy(self._policy, case, fitting)
        return decision or _refusal(case.request, usable, fitting)

    def _by_policy(self, policy: Policy, case: Case, workers: list[KnownWorker]) -> Placement | Refused | None:
        """Pick worker by worker, among the pairs with the least penalty; None where there is no pair."""
        pairs: list[Pair] = [(worker, None) for worker in workers if worker.info.role == "aggregated"]
        pairs += [(worker, partner) for worker in workers for partner in partners_of(worker, workers)]
        if not pairs:
            return None
        pairs = _least_penalised(pairs, lambda pair: case.penalty_of(*pair))
        if refusal := self._overload(case, pairs):
            return refusal
        firsts = {first.info.worker_id: first for first, _ in pairs}
        prefill = self._pick(policy, "prefill", [firsts[worker_id] for worker_id in sorted(firsts)])
        prefill.place(num_tokens=case.request.num_prompt_tokens, num_blocks=0)
        partners = [partner for first, partner in pairs if first is prefill and partner is not None]
        decode = self._pick(policy, "decode", partners) if partners else None
        if decode is not None:
            decode.place(num_tokens=0, num_blocks=0)
        self._admission.placed(case.request.tenant, case.request.num_prompt_tokens, case.now_ms)
        return self._placement(case, prefill, decode)

    def _pick(self, policy: Policy, phase: Phase, workers: list[KnownWorker]) -> KnownWorker:
        chosen = policy(phase, [worker.candidate() for worker in workers], self._turns[phase])
        self._turns[phase] += 1
        return next(worker for worker in workers if worker.info.worker_id == chosen.worker_id)

    def _by_cost(self, case: Case, workers: list[KnownWorker]) -> Placement | Refused | None:
        """Return the cheapest placement of those with the least penalty, or None where there is none."""
        contenders = [worker.contender() for worker in self._in_turn(workers)]
        # The directory may be behind: only living incarnations count.
        holding = [
            holder
            for holder in case.holders
            if (known := case.workers.get(holder.worker_id)) and known.info.incarnation == holder.incarnation
        ]
        not_asked = [worker_id for worker_id, known in case.workers.items() if case.penalty_of(known)]
        options = price(case.demand, contenders, holding, self.rates.fleet(case.now_ms), self._limits, not_asked)
        if not options:
            return None
        options = _least_penalised(options, lambda option: case.penalty_of(*_pair_of(option, case)))
        if refusal := self._overload(case, [_pair_of(option, case) for option in options]):
            return refusal
        self._turns["prefill"] += 1
        chosen = choose(options)
        prefill, decode = _pair_of(chosen, case)
        num_computed_tokens = chosen.gathering.num_computed_tokens
        prefill.place(num_tokens=num_computed_tokens, num_blocks=needed_blocks(case.demand, prefill.info.block_size))
        if decode is not None:
            decode.place(num_tokens=0, num_blocks=needed_blocks(case.demand, decode.info.block_size))
        self._admission.placed(case.request.tenant, num_computed_tokens, case.now_ms)
        return msgspec.structs.replace(
            self._placement(case, prefill, decode), sources=chosen.gathering.sources, terms=terms_of(chosen, options)
        )

    def _in_turn(self, workers: list[KnownWorker]) -> list[KnownWorker]:
        """Return the workers, each role's beginning with the one whose turn it is."""
        turn, ordered = self._turns["prefill"], list[KnownWorker]()
        for role in ("aggregated", "prefill", "decode"):
            group = [worker for worker in workers if worker.info.role == role]
            start = turn % len(group) if group else 0
            ordered += group[start:] + group[:start]
        return ordered

    def _overload(self, case: Case, pairs: Sequence[Pair]) -> Refused | None:
        """Return the refusal of a new request that would wait too long. What was begun is never given up for load."""
        if case.request.attempt > 1:
            return None
        demand, rates = case.demand, self.rates.fleet(case.now_ms)
        waits = [wait_of(demand, prefill, decode, rates) for prefill, decode in pairs]
        overload = self._admission.refusal(case.request.tenant, waits, case.now_ms)
        return refuse(case.request, "overloaded", *overload) if overload else None

    def _placement(self, case: Case, prefill: KnownWorker, decode: KnownWorker | None) -> Placement:
        replica: WorkerId | None = None
        if self._replicate:
            well = [worker for worker in case.workers.values() if not worker.draining and not case.penalty_of(worker)]
            replica = replica_of(decode or prefill, well)
        return Placement(
            request_id=case.request.request_id,
            attempt=case.request.attempt,
            deadline_ms=case.request.deadline_ms,
            prefill_worker=prefill.info.worker_id,
            decode_worker=decode.info.worker_id if decode else None,
            policy=self._policy_name,
            replica=replica,
        )


def usable_workers(workers: Mapping[WorkerId, KnownWorker]) -> list[KnownWorker]:
    """Return the workers that may be given requests, ordered by id."""
    ordered = sorted(workers.values(), key=lambda worker: worker.info.worker_id)
    return [worker for worker in ordered if not worker.draining and worker.info.role != "store"]


def _pair_of(option: Option, case: Case) -> Pair:
    decode = case.workers[option.decode.worker_id] if option.decode else None
    return case.workers[option.prefill.worker_id], decode


def _least_penalised(choices: Sequence[ChoiceT], penalty_of: Callable[[ChoiceT], int]) -> list[ChoiceT]:
    """Return the choices with the least penalty, in their order."""
    penalties = [penalty_of(choice) for choice in choices]
    least = min(penalties, default=0)
    return [choice for choice, penalty in zip(choices, penalties, strict=True) if penalty == least]


def _refusal(request: PlaceRequest, usable: list[KnownWorker], fitting: list[KnownWorker]) -> Refused:
    roles = {worker.info.role for worker in usable}
    if "aggregated" not in roles and not {"prefill", "decode"} <= roles:
        missing = [role for role in ("prefill", "decode") if role not in roles]
        return refuse(request, "no_worker", f"no {' and no '.join(missing)} worker is ready", RETRY_AFTER_MS)
    if usable and not fitting:
        needed = request.num_prompt_tokens + request.max_tokens
        return refuse(request, "too_long", f"no worker has room for {needed} tokens")
    return refuse(request, "no_worker", "no prefill and decode workers share one model", RETRY_AFTER_MS)
