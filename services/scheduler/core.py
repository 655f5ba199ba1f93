"""The view of the fleet, and placement on it. Pure: events and the time come in, decisions go out.

A worker is known from the first message that names it. Its restart (a new incarnation) replaces it at once; one that
has died or been silent too long is declared left. What has left is fenced: it never comes back as the same incarnation.
"""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from schemas.directory import HolderPrefix
from schemas.ids import WorkerId
from schemas.request import Placement, PlaceRequest, Refused, refuse
from schemas.worker import (
    FleetDescribed,
    WorkerAlive,
    WorkerDraining,
    WorkerInfo,
    WorkerJoined,
    WorkerLeft,
    WorkerLoad,
    WorkerRole,
)
from services.scheduler.fences import Fences
from services.scheduler.liveness import Liveness, LivenessLimits, Ping
from services.scheduler.placement.admission import Admission, AdmissionLimits
from services.scheduler.placement.cost import (
    DEFAULT_LIMITS,
    CostLimits,
    Demand,
    Option,
    choose,
    needed_blocks,
    price,
    terms_of,
)
from services.scheduler.placement.fleet_view import KnownWorker, fits, least_doubted, partners_of, replica_of, wait_of
from services.scheduler.placement.known_rates import RateBook
from services.scheduler.placement.policy import Phase, Policy, policy_named

RETRY_AFTER_MS = 1_000

FleetEvent = WorkerJoined | WorkerLoad | WorkerDraining | WorkerLeft
Way = tuple[KnownWorker, KnownWorker | None]
"""Who computes the prompt and who decodes; None: the first does both."""


class Standing(NamedTuple):
    """A worker's role, and whether it is `ready`, `suspect` or `draining`."""

    role: WorkerRole
    state: str


class SchedulerLimits(NamedTuple):
    """How patient with workers, how full their queues, and whether answers' blocks are offered to others."""

    ping_interval_ms: int = 200
    suspect_after_ms: int = 600
    admission: AdmissionLimits = AdmissionLimits()
    replicate: bool = False


DEFAULT_FLEET_LIMITS = SchedulerLimits()


class SchedulerCore:
    """Places requests. `policy` is a name of `policy.POLICIES` (UserError otherwise)."""

    def __init__(
        self,
        policy: str,
        silent_after_ms: int,
        limits: CostLimits = DEFAULT_LIMITS,
        fleet_limits: SchedulerLimits = DEFAULT_FLEET_LIMITS,
    ) -> None:
        self.policy_name = policy
        self.liveness = Liveness(
            LivenessLimits(fleet_limits.ping_interval_ms, fleet_limits.suspect_after_ms, silent_after_ms)
        )
        self._policy: Policy | None = policy_named(policy)
        self._limits = limits
        self._replicate = fleet_limits.replicate
        self._admission = Admission(fleet_limits.admission)
        self._fences = Fences()
        self._workers: dict[WorkerId, KnownWorker] = {}
        self._turns: dict[Phase, int] = {"prefill": 0, "decode": 0}
        self._rates = RateBook()

    @property
    def asks_directory(self) -> bool:
        """Whether `place` makes use of holders."""
        return self._policy is None

    def incarnations(self) -> dict[WorkerId, str]:
        """Return who is known to live."""
        return {worker_id: worker.info.incarnation for worker_id, worker in self._workers.items()}

    def handle(self, event: FleetEvent, now_ms: int) -> list[WorkerLeft]:
        """Take in what a worker says of itself, or what is said on its behalf. Returns what is to be said: of an
        incarnation that is replaced, or again to one that has left and still speaks."""
        self.liveness.proved(now_ms)
        match event:
            case WorkerJoined(worker=info) | WorkerLoad(worker=info):
                if self._fences.holds(info.worker_id, info.incarnation):
                    return self._fences.repeat(info.worker_id, info.incarnation, now_ms)
                return self._hear(event, info, now_ms)
            case WorkerDraining():
                if worker := self._known(event.worker_id, event.incarnation):
                    worker.draining = True
            case WorkerLeft():
                self._leave(event, now_ms)
        return []

    def answered(self, ping: Ping, alive: WorkerAlive, now_ms: int) -> None:
        """A worker has answered a ping."""
        if alive.worker_id == ping.worker_id:
            self.liveness.answered(ping, alive.incarnation, now_ms)
        else:
            self.liveness.unanswered(ping)

    def unserved(self, ping: Ping, now_ms: int) -> list[WorkerLeft]:
        """Nobody serves a worker's pings: its process has ended. Returns what to say on its behalf."""
        if not self.liveness.unserved(ping, now_ms):
            return []
        return [self._declare(ping.worker_id, "died", now_ms)]

    def expire(self, now_ms: int) -> list[WorkerLeft]:
        """Forget the workers that have been silent too long, and say so on their behalf."""
        return [self._declare(worker_id, "silent", now_ms) for worker_id in self.liveness.silent(now_ms)]

    def place(self, request: PlaceRequest, now_ms: int, holders: tuple[HolderPrefix, ...] = ()) -> Placement | Refused:
        """Choose the workers of one attempt. Counts the choice as load until the workers report their own.

        `holders`: who is said to hold which of the prompt's blocks; a hint, used by policy `cost` only.
        """
        if request.deadline_ms <= now_ms:
            return refuse(request, "deadline", "the deadline has passed")
        usable = self._usable()
        fitting = [w for w in usable if fits(w.info, request)]
        if self._policy is None:
            decision = self._place_by_cost(request, now_ms, fitting, holders)
        else:
            decision = self._place_by_policy(self._policy, request, now_ms, fitting)
        return decision or self._refusal(request, usable, fitting)

    def describe(self, now_ms: int) -> FleetDescribed:
        """Return what is known, and whether a request could be placed now on workers that are well."""
        well = [w for w in self._usable() if not self.liveness.is_suspect(w.info.worker_id, now_ms)]
        ready = any(w.info.role == "aggregated" or partners_of(w, well) for w in well)
        loads = tuple(w.load for w in self._workers.values() if w.load is not None)
        return FleetDescribed(policy=self.policy_name, ready=ready, workers=loads)

    def standing(self, now_ms: int) -> list[Standing]:
        """Return how each known worker stands."""
        suspects = {worker_id for worker_id in self._workers if self.liveness.is_suspect(worker_id, now_ms)}
        return [
            Standing(worker.info.role, "draining" if worker.draining else "suspect" if key in suspects else "ready")
            for key, worker in self._workers.items()
        ]

    def _hear(self, event: WorkerJoined | WorkerLoad, info: WorkerInfo, now_ms: int) -> list[WorkerLeft]:
        replaced: list[WorkerLeft] = []
        known = self._workers.get(info.worker_id)
        if known is not None and known.info.incarnation != info.incarnation:
            replaced.append(self._declare(info.worker_id, "restarted", now_ms))
            known = None
        if known is None:
            known = self._workers[info.worker_id] = KnownWorker(info)
        self.liveness.heard(info.worker_id, info.incarnation, now_ms)
        if isinstance(event, WorkerLoad):
            known.hear(event)
            self._rates.learn(info.worker_id, event.rates, now_ms)
        return replaced

    def _declare(self, worker_id: WorkerId, reason: str, now_ms: int) -> WorkerLeft:
        """Say of a known worker that it has left."""
        incarnation = self._workers[worker_id].info.incarnation
        left = WorkerLeft(worker_id=worker_id, incarnation=incarnation, reason=reason)
        self._leave(left, now_ms)
        return left

    def _leave(self, left: WorkerLeft, now_ms: int) -> None:
        self._fences.add(left, now_ms)
        if self._known(left.worker_id, left.incarnation):
            del self._workers[left.worker_id]
            self._rates.forget(left.worker_id)
            self.liveness.forget(left.worker_id)

    def _known(self, worker_id: WorkerId, incarnation: str) -> KnownWorker | None:
        known = self._workers.get(worker_id)
        return known if known is not None and known.info.incarnation == incarnation else None

    def _usable(self) -> list[KnownWorker]:
        ordered = sorted(self._workers.values(), key=lambda w: w.info.worker_id)
        return [w for w in ordered if not w.draining and w.info.role != "store"]

    def _doubt(self, way: Way, request: PlaceRequest, now_ms: int) -> int:
        """Return how much speaks against these workers: one that is suspect may be stopped, which is worse than to
        have failed this request once."""
        doubt = 0
        for worker in way:
            if worker is not None:
                worker_id = worker.info.worker_id
                doubt += (worker_id in request.excluded_workers) + 3 * self.liveness.is_suspect(worker_id, now_ms)
        return doubt

    def _place_by_policy(
        self, policy: Policy, request: PlaceRequest, now_ms: int, workers: list[KnownWorker]
    ) -> Placement | Refused | None:
        """Pick worker by worker, among the pairs that there is least doubt of; None where there is no pair."""
        ways: list[Way] = [(w, None) for w in workers if w.info.role == "aggregated"]
        ways += [(w, partner) for w in workers for partner in partners_of(w, workers)]
        if not ways:
            return None
        ways = least_doubted(ways, lambda way: self._doubt(way, request, now_ms))
        if refusal := self._overload(request, ways, now_ms):
            return refusal
        firsts = {first.info.worker_id: first for first, _ in ways}
        prefill = self._pick(policy, "prefill", [firsts[worker_id] for worker_id in sorted(firsts)])
        prefill.place(num_tokens=request.num_prompt_tokens, num_blocks=0)
        partners = [partner for first, partner in ways if first is prefill and partner is not None]
        decode = self._pick(policy, "decode", partners) if partners else None
        if decode is not None:
            decode.place(num_tokens=0, num_blocks=0)
        self._admission.placed(request.tenant, request.num_prompt_tokens, now_ms)
        return self._placement(request, prefill, decode, now_ms)

    def _pick(self, policy: Policy, phase: Phase, workers: list[KnownWorker]) -> KnownWorker:
        chosen = policy(phase, [w.candidate() for w in workers], self._turns[phase])
        self._turns[phase] += 1
        return self._workers[chosen.worker_id]

    def _place_by_cost(
        self, request: PlaceRequest, now_ms: int, workers: list[KnownWorker], holders: tuple[HolderPrefix, ...]
    ) -> Placement | Refused | None:
        """Return the cheapest placement of those that there is least doubt of, or None where there is none."""
        demand = _demand(request)
        contenders = [w.contender() for w in self._in_turn(workers)]
        # The directory may be behind: only living incarnations count. A draining worker still lends.
        holding = [h for h in holders if self._known(h.worker_id, h.incarnation)]
        not_asked = [w for w, known in self._workers.items() if self._doubt((known, None), request, now_ms)]
        options = price(demand, contenders, holding, self._rates.fleet(now_ms), self._limits, not_asked)
        if not options:
            return None
        options = least_doubted(options, lambda option: self._doubt(self._way(option), request, now_ms))
        if refusal := self._overload(request, [self._way(option) for option in options], now_ms):
            return refusal
        self._turns["prefill"] += 1
        chosen = choose(options)
        prefill, decode = self._way(chosen)
        self._count(chosen, demand, prefill, decode)
        self._admission.placed(request.tenant, chosen.gathering.num_computed_tokens, now_ms)
        return msgspec.structs.replace(
            self._placement(request, prefill, decode, now_ms),
            sources=chosen.gathering.sources,
            terms=terms_of(chosen, options),
        )

    def _way(self, option: Option) -> Way:
        return self._workers[option.prefill.worker_id], self._workers[
            option.decode.worker_id
        ] if option.decode else None

    def _in_turn(self, workers: list[KnownWorker]) -> list[KnownWorker]:
        """Return the workers, each role's beginning with the one whose turn it is."""
        turn, ordered = self._turns["prefill"], list[KnownWorker]()
        for role in ("aggregated", "prefill", "decode"):
            group = [w for w in workers if w.info.role == role]
            start = turn % len(group) if group else 0
            ordered += group[start:] + group[:start]
        return ordered

    def _count(self, chosen: Option, demand: Demand, prefill: KnownWorker, decode: KnownWorker | None) -> None:
        prefill.place(
            num_tokens=chosen.gathering.num_computed_tokens, num_blocks=needed_blocks(demand, prefill.info.block_size)
        )
        if decode is not None:
            decode.place(num_tokens=0, num_blocks=needed_blocks(demand, decode.info.block_size))

    def _overload(self, request: PlaceRequest, ways: Sequence[Way], now_ms: int) -> Refused | None:
        """Return the refusal of a new request that would wait too long. What was begun is never given up for load."""
        if request.attempt > 1:
            return None
        demand, rates = _demand(request), self._rates.fleet(now_ms)
        waits = [wait_of(demand, prefill, decode, rates) for prefill, decode in ways]
        overload = self._admission.refusal(request.tenant, waits, now_ms)
        return refuse(request, "overloaded", *overload) if overload else None

    def _placement(
        self, request: PlaceRequest, prefill: KnownWorker, decode: KnownWorker | None, now_ms: int
    ) -> Placement:
        replica: WorkerId | None = None
        if self._replicate:
            well = [w for w in self._workers.values() if not w.draining and not self._doubt((w, None), request, now_ms)]
            replica = replica_of(decode or prefill, well)
        return Placement(
            request_id=request.request_id,
            attempt=request.attempt,
            deadline_ms=request.deadline_ms,
            prefill_worker=prefill.info.worker_id,
            decode_worker=decode.info.worker_id if decode else None,
            policy=self.policy_name,
            replica=replica,
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


def _demand(request: PlaceRequest) -> Demand:
    return Demand(max(1, request.num_prompt_tokens), request.max_tokens)
