"""Chooses the workers of one request, or returns why there are none. Pure.

A policy chooses (`policy`), of those workers that have room and the lowest penalty: whoever is suspect, or has failed
this request before, is taken only where nobody else could serve. A policy that raises, takes too long or answers
nonsense costs nobody an answer: `least_loaded` chooses in its place.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from schemas.block import BLOCK_HASH_BYTES
from schemas.directory import HolderPrefix
from schemas.ids import WorkerId, is_tenant
from schemas.request import KVSource, Placement, PlacementTerms, PlaceRequest, RefusalReason, Refused, Reuse, refuse
from schemas.worker import WorkerRole, WorkerState
from services.config import SchedulerConfig
from services.scheduler.limits import (
    EQUAL_MS,
    EQUAL_SHARE,
    FAILED_PENALTY,
    MAX_SOURCES,
    POLICY_REST_MS,
    RETRY_AFTER_MS,
    SUSPECT_PENALTY,
)
from services.scheduler.placement.admission import Admission, AdmissionLimits, Wait
from services.scheduler.placement.fleet_view import Demand, FleetView, Group, needed_blocks
from services.scheduler.placement.inflight import InFlightPrompt, InFlightPrompts
from services.scheduler.placement.known_rates import Slots
from services.scheduler.placement.known_worker import KnownWorker
from services.scheduler.placement.named import COST
from services.scheduler.placement.policy import NOBODY, POLICIES, Choice, Policy, PolicyError, Question, least_loaded


@dataclass(frozen=True, slots=True)
class Case:
    """One request to place, and the fleet at this moment. `holders`: who is reported to hold which of the prompt's
    blocks; a hint. None: nobody has reported it."""

    request: PlaceRequest
    now_ms: int
    fleet: FleetView
    suspects: Collection[WorkerId]
    holders: Sequence[HolderPrefix] | None = ()

    @property
    def demand(self) -> Demand:
        return Demand(max(1, self.request.num_prompt_tokens), self.request.max_tokens, self.request.tenant)


class Chosen(NamedTuple):
    """A choice whose workers are known to go together."""

    prefill: KnownWorker
    decode: KnownWorker | None
    choice: Choice


class Placer:
    """Places requests by a policy, within what the operator has set."""

    def __init__(self, settings: SchedulerConfig, policy: Policy) -> None:
        self._policy_name = settings.policy
        self._pull_tokens_min = settings.pull_tokens_min
        self._policy = policy
        self._replicate = settings.replicate
        self._waits_for_duplicates = settings.wait_for_duplicates
        self._unsplit_tokens_max = settings.unsplit_tokens_max
        self._admission = Admission(AdmissionLimits(settings.max_queue_ms, settings.max_queued_requests))
        self._in_flight = InFlightPrompts()
        self._turn = 0
        self._rests_until_ms = 0
        self.policy_failure = ""
        """What was wrong with the policy's last choice; empty: nothing."""

    def place(self, case: Case) -> Placement | Refused:
        """Choose the workers of one attempt. Counts the choice as load until the workers report their own."""
        if case.request.deadline_ms <= case.now_ms:
            return refuse(case.request, RefusalReason.DEADLINE, "the deadline has passed")
        if not is_tenant(case.request.tenant):
            return refuse(case.request, RefusalReason.INVALID, "a tenant's name is a word of letters, digits, - and _")
        self._in_flight.failed(case.request.block_hashes, case.request.excluded_workers)
        hashes = case.request.block_hashes if self._waits_for_duplicates else b""
        maker = self._in_flight.find(hashes, case.fleet, case.now_ms)
        question = self._question(case, maker)
        moved = None if case.request.must_split else _taken_over(question, case.request, self._unsplit_tokens_max)
        policy_name, chosen = ("moved", moved) if moved else self._choose(question, case.now_ms)
        if chosen is None:
            return _refusal(case)
        if refusal := self._overload(case, question, chosen):
            return refusal
        placement = self._placement(case, question, chosen, policy_name, maker)
        self._turn += 1
        self._count(case, chosen)
        self._note(case, chosen)
        return placement

    def _question(self, case: Case, maker: InFlightPrompt | None) -> Question:
        """Return what to ask the policy."""
        fleet, demand = case.fleet, case.demand
        # Who may be chosen: workers with room for prompt and answer, and none alone where the request must be split.
        groups = [Group(*(fleet.fitting(slots, demand) for slots in group)) for group in fleet.groups]
        lone = [group.decode for group in groups]
        if case.request.must_split:
            groups, lone = [group._replace(aggregated=NOBODY) for group in groups], [NOBODY for _ in groups]
        # Leave out suspects, and workers that have failed this request, as long as others can serve.
        against, penalty = self._penalties(case), 0
        if against.any():
            groups, penalty = _least_penalised(groups, against)
        known = fleet.workers
        # The directory may be behind: only living incarnations count.
        moved = _moved_run(case)
        holders = [
            run
            for run in case.holders or ()
            if (run.worker_id, run.incarnation) in fleet and (moved is None or run.worker_id != moved.worker_id)
        ]
        # Only workers against which there is nothing are read from: a suspect may be stopped.
        lenders = [run for run in holders if not against[known[run.worker_id].slot]]
        if moved is not None:  # who migrates an attempt has not failed it: it is read from, and not chosen again
            holders.append(moved)
            lenders.append(moved)
        if maker is not None:  # it has them by the time that this prompt's turn comes there, and lends nothing yet
            holders.append(
                HolderPrefix(worker_id=maker.worker_id, incarnation=maker.incarnation, num_blocks=maker.num_blocks)
            )
        return Question(
            demand=demand,
            first_block=case.request.block_hashes[:BLOCK_HASH_BYTES],
            turn=self._turn,
            fleet=fleet,
            groups=tuple(groups),
            lone=tuple(lone),
            against=against,
            penalty=penalty,
            holders=holders,
            lenders=lenders,
        )

    def _penalties(self, case: Case) -> Slots:
        """Return how much speaks against each worker, by slot."""
        against = np.zeros(len(case.fleet.rows), np.intp)
        for workers, penalty in ((case.request.excluded_workers, FAILED_PENALTY), (case.suspects, SUSPECT_PENALTY)):
            if workers:
                against[case.fleet.slots(workers)] += penalty
        return against

    def _choose(self, question: Question, now_ms: int) -> tuple[str, Chosen | None]:
        """Ask the policy, or `least_loaded` where it is of no use. Returns who has chosen, and what: None where nobody
        can serve."""
        self.policy_failure = ""
        if now_ms >= self._rests_until_ms:
            try:
                return self._policy_name, _checked(question, self._policy(question))
            except TimeoutError as error:
                self._rests_until_ms = now_ms + POLICY_REST_MS
                self.policy_failure = str(error)
            except Exception as error:  # noqa: BLE001  (it may be anybody's)
                self.policy_failure = f"{type(error).__name__}: {error}"
        else:
            self.policy_failure = "it rests, as it took too long"
        return "least_loaded", _checked(question, least_loaded(question))

    def _overload(self, case: Case, question: Question, chosen: Chosen) -> Refused | None:
        """Return the refusal of a new request that would wait too long. What was begun is never given up for load."""
        if case.request.attempt > 1:
            return None
        fleet, demand = case.fleet, case.demand
        own = np.array([chosen.prefill.slot])
        alone = [own] if chosen.decode is None else []
        pairs = [(own, np.array([chosen.decode.slot]))] if chosen.decode is not None else []
        alone += [group.aggregated for group in question.groups if len(group.aggregated)]
        pairs += [(group.prefill, group.decode) for group in question.groups if group.has_pairs]
        ways: list[tuple[float, int]] = []
        for slots in alone:
            queue = fleet.queues(demand, slots)
            ways.append((float((queue.prompts_ms + queue.answers_ms).min()), int(queue.num_waiting.min())))
        for firsts, lasts in pairs:
            first, last = fleet.queues(demand, firsts), fleet.queues(demand, lasts)
            num_waiting = int(max(first.num_waiting.min(), last.num_waiting.min()))
            ways.append((float(first.prompts_ms.min() + last.answers_ms.min()), num_waiting))
        waits = [Wait(*way, fleet.is_measured) for way in ways]
        overload = self._admission.refusal(case.request.tenant, waits, case.now_ms)
        return refuse(case.request, RefusalReason.OVERLOADED, *overload) if overload else None

    def _count(self, case: Case, chosen: Chosen) -> None:
        """Count what was placed."""
        terms, prefill, decode = chosen.choice.terms, chosen.prefill, chosen.decode
        num_tokens = terms.computed_tokens if terms is not None else case.request.num_prompt_tokens
        # Who looks at no prices does not count room either: it is known when the worker reports.
        demand = case.demand if terms is not None else Demand(0, 0)
        tenant = case.request.tenant
        num_blocks = needed_blocks(demand, prefill.info.block_size)
        case.fleet.place(prefill, tenant=tenant, num_tokens=num_tokens, num_blocks=num_blocks)
        if decode is not None:
            num_blocks = needed_blocks(demand, decode.info.block_size)
            case.fleet.place(decode, tenant=tenant, num_tokens=0, num_blocks=num_blocks)
        self._admission.placed(tenant, num_tokens, case.now_ms)

    def _note(self, case: Case, chosen: Chosen) -> None:
        """Remember who computes this prompt, where that was priced."""
        if (terms := chosen.choice.terms) is not None and case.request.block_hashes:
            info, hashes = chosen.prefill.info, case.request.block_hashes
            num_blocks = len(hashes) // BLOCK_HASH_BYTES
            maker = InFlightPrompt(info.worker_id, info.incarnation, num_blocks, case.now_ms + terms.ttft_ms)
            self._in_flight.placed(hashes, maker, case.fleet, case.now_ms)

    def _in_flight_source(
        self, case: Case, question: Question, chosen: Chosen, maker: InFlightPrompt | None
    ) -> tuple[KVSource, ...]:
        """Return whom to read from what is still being computed there: if that is expected before it could be computed
        anew."""
        terms, info = chosen.choice.terms, chosen.prefill.info
        if maker is None or terms is None or maker.worker_id == info.worker_id:
            return ()
        first = (terms.cached_tokens + terms.pulled_tokens) // max(1, info.block_size)
        against = question.against[case.fleet.workers[maker.worker_id].slot]
        anew_ms = terms.compute_ms + EQUAL_MS + EQUAL_SHARE * terms.compute_ms
        if against or first >= maker.num_blocks or maker.ready_ms - case.now_ms > anew_ms:
            return ()
        # It is asked for all: few places of a prompt are noted, and it may have more in common with this one.
        num_blocks = len(case.request.block_hashes) // BLOCK_HASH_BYTES - first
        return (KVSource(worker_id=maker.worker_id, first_block=first, num_blocks=num_blocks),)

    def _placement(
        self, case: Case, question: Question, chosen: Chosen, policy_name: str, maker: InFlightPrompt | None
    ) -> Placement:
        replica: WorkerId | None = None
        if self._replicate:
            avoided = {*case.suspects, *case.request.excluded_workers}
            replica = case.fleet.replica_of(chosen.decode or chosen.prefill, avoided)
        sources = (*chosen.choice.sources, *self._in_flight_source(case, question, chosen, maker))
        return Placement(
            request_id=case.request.request_id,
            attempt=case.request.attempt,
            deadline_ms=case.request.deadline_ms,
            prefill_worker=chosen.prefill.info.worker_id,
            decode_worker=chosen.decode.info.worker_id if chosen.decode else None,
            policy=policy_name,
            sources=sources,
            terms=chosen.choice.terms,
            replica=replica,
            spare_blocks=_spare_blocks(question, chosen),
            reuse=Reuse.USED if sources or _has_some(question, chosen) else self._unused(case, question, policy_name),
        )

    def _unused(self, case: Case, question: Question, policy_name: str) -> Reuse:
        """Return why a placement counts on no KV that there is."""
        if not case.request.block_hashes:
            return Reuse.COMPUTED_WHOLE
        if policy_name in POLICIES:
            return Reuse.NOT_ASKED
        if case.holders is None:
            return Reuse.WITHOUT_DIRECTORY
        if not question.holders:
            return Reuse.NOTHING_HELD
        known = case.fleet.workers
        begun = [run for run in question.holders if not run.first_block]
        most = max((run.num_blocks * known[run.worker_id].info.block_size for run in begun), default=0)
        is_read = self._policy_name != COST or most >= self._pull_tokens_min
        return Reuse.NOT_QUICKER if is_read else Reuse.BELOW_THRESHOLD


def _has_some(question: Question, chosen: Chosen) -> bool:
    """Return whether a worker that was chosen has some of the prompt, as the policy has counted it."""
    terms, workers = chosen.choice.terms, [chosen.decode]
    if terms is None:
        workers.append(chosen.prefill)
    elif terms.cached_tokens or terms.pulled_tokens:
        return True
    holding = {run.worker_id for run in question.holders if not run.first_block}
    return any(worker is not None and worker.info.worker_id in holding for worker in workers)


def _moved_run(case: Case) -> HolderPrefix | None:
    """Return what whoever has given the attempt away lends of its prompt: it need not be in the directory yet."""
    moved = case.request.moved_from
    if moved is None or moved.worker_id in case.suspects or moved.worker_id not in case.fleet.workers:
        return None
    num_blocks = min(moved.num_blocks, len(case.request.block_hashes) // BLOCK_HASH_BYTES)
    if moved.first_block or num_blocks <= 0:
        return None
    incarnation = case.fleet.workers[moved.worker_id].info.incarnation
    return HolderPrefix(worker_id=moved.worker_id, incarnation=incarnation, num_blocks=num_blocks)


def _taken_over(question: Question, request: PlaceRequest, computed_tokens_max: int) -> Chosen | None:
    """Return who goes on alone with an attempt that was migrated: it reads what there is of the prompt, once, and
    decodes on. None: so much would have to be computed that a policy is to choose where, or nobody can."""
    moved = request.moved_from
    fleet = question.fleet
    run = next((run for run in question.lenders if moved and run.worker_id == moved.worker_id), None)
    if run is None:
        return None
    lender = fleet.workers[run.worker_id]
    slots = _decoding(question, lender)
    num_read = min(run.num_blocks * lender.info.block_size, question.demand.num_prompt_tokens - 1)
    num_computed = question.demand.num_prompt_tokens - num_read
    if num_computed > computed_tokens_max or not len(slots):
        return None
    rows = fleet.rows[slots]
    has_room = rows["usable_blocks"] >= needed_blocks(question.demand, rows["block_size"])
    first = slots[np.lexsort((-rows["usable_blocks"], rows["requests"], ~has_room))[0]]
    others = sorted((r for r in question.lenders if r is not run), key=lambda r: -r.first_block - r.num_blocks)
    sources = tuple(
        KVSource(worker_id=r.worker_id, first_block=r.first_block, num_blocks=r.num_blocks)
        for r in (run, *others[: MAX_SOURCES - 1])
    )
    terms = PlacementTerms(pulled_tokens=num_read, computed_tokens=num_computed)
    chosen = fleet.worker(int(first))
    return Chosen(chosen, None, Choice(chosen.info.worker_id, None, sources, terms))


def _decoding(question: Question, other: KnownWorker) -> Slots:
    """Return who could go on with an answer of another worker: those without a penalty."""
    fleet = question.fleet
    alike = [
        slots
        for group, lone in zip(question.groups, question.lone, strict=True)
        for slots in (group.aggregated, lone)
        if len(slots) and fleet.worker(int(slots[0])).info.fingerprint == other.info.fingerprint
    ]
    slots = np.concatenate([np.zeros(0, np.intp), *alike])
    return slots[(question.against[slots] == 0) & (slots != other.slot)]


def _spare_blocks(question: Question, chosen: Chosen) -> int:
    """Return `Placement.spare_blocks`."""
    decode = chosen.decode
    if decode is None or needed_blocks(question.demand, decode.info.block_size) <= decode.num_usable_blocks:
        return 0
    return int(question.fleet.rows["usable_blocks"][_decoding(question, decode)].max(initial=0))


def _least_penalised(groups: Sequence[Group], against: Slots) -> tuple[list[Group], int]:
    """Keep the pairs and aggregated workers with the lowest penalty, and return how much that is."""
    penalties = [int(against[group.prefill].min() + against[group.decode].min()) for group in groups if group.has_pairs]
    penalties += [int(against[group.aggregated].min()) for group in groups if len(group.aggregated)]
    penalty = min(penalties, default=0)
    kept: list[Group] = []
    for group in groups:
        prefill, decode, aggregated = group
        least, least_decode = against[prefill].min(initial=penalty), against[decode].min(initial=penalty)
        pairs = group.has_pairs and least + least_decode == penalty
        kept.append(
            Group(
                prefill[against[prefill] == least] if pairs else prefill[:0],
                decode[against[decode] == least_decode] if pairs else decode[:0],
                aggregated[against[aggregated] == penalty],
            )
        )
    return kept, penalty


def _checked(question: Question, choice: object) -> Chosen | None:
    """Return the workers of a choice. Raises PolicyError where it is invalid: a policy may be anybody's."""
    # None is valid only where the groups offer nobody; anything else must be a choice of known workers.
    if choice is None and not question.has_ways:
        return None
    if not isinstance(choice, Choice):
        raise PolicyError(f"it answered {choice!r:.80}, which is no Choice")
    workers = question.fleet.workers
    found: list[KnownWorker] = []
    for worker_id in (choice.prefill, choice.decode):
        if worker_id is None:
            continue
        if worker_id not in workers:
            raise PolicyError(f"it chose {worker_id!r:.80}, which nobody is called")
        found.append(workers[worker_id])
    prefill, decode = found[0], found[1] if len(found) > 1 else None
    # They must go together: one worker that may serve alone, or a prefill and a decode worker of one group.
    for group, lone in zip(question.groups, question.lone, strict=True):
        if decode is None and (prefill.slot in group.aggregated or prefill.slot in lone):
            break
        if decode is not None and prefill.slot in group.prefill and decode.slot in group.decode:
            break
    else:
        raise PolicyError(f"{choice.prefill} and {choice.decode} are not among those it may choose")
    for source in choice.sources:
        if source.worker_id not in workers:
            raise PolicyError(f"it reads from {source.worker_id!r:.80}, which nobody is called")
    return Chosen(prefill, decode, choice)


def _refusal(case: Case) -> Refused:
    request, usable = case.request, case.fleet.usable
    roles, halves = {worker.info.role for worker in usable}, (WorkerRole.PREFILL, WorkerRole.DECODE)
    if (request.must_split or WorkerRole.AGGREGATED not in roles) and not set(halves) <= roles:
        missing = [role for role in halves if role not in roles]
        why = ", and it must be split" if request.must_split else ""
        starting = [
            known.info.worker_id for known in case.fleet.workers.values() if known.state == WorkerState.STARTING
        ]
        again = f" (the engine of {', '.join(sorted(starting))} is starting again)" if starting else ""
        detail = f"no {' and no '.join(missing)} worker is ready{why}{again}"
        return refuse(request, RefusalReason.NO_WORKER, detail, RETRY_AFTER_MS)
    slots = np.array([worker.slot for worker in usable], np.intp)
    if usable and not len(case.fleet.fitting(slots, case.demand)):
        needed = request.num_prompt_tokens + request.max_tokens
        return refuse(request, RefusalReason.TOO_LONG, f"no worker has room for {needed} tokens")
    return refuse(request, RefusalReason.NO_WORKER, "no prefill and decode workers share one model", RETRY_AFTER_MS)
