"""The view of the fleet, and placement on it. Pure: events and the time come in, decisions go out.

A worker is known from the first message that names it. Its restart (a new incarnation) replaces it at once; one that
has been silent too long is declared left.
"""

from dataclasses import dataclass

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
from services.scheduler.policy import Candidate, Phase, Policy, policy_named

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

    def candidate(self) -> Candidate:
        load = self.load
        return Candidate(
            worker_id=self.info.worker_id,
            num_uncomputed_tokens=self.num_placed_tokens + (load.num_uncomputed_tokens if load else 0),
            num_requests=self.num_placed_requests + (load.num_running + load.num_queued if load else 0),
            num_free_blocks=load.blocks.free if load else self.info.num_blocks,
        )


class SchedulerCore:
    """Places requests. `policy` is a name of `policy.POLICIES` (UserError otherwise)."""

    def __init__(self, policy: str, silent_after_ms: int) -> None:
        self.policy_name = policy
        self._policy: Policy = policy_named(policy)
        self._silent_after_ms = silent_after_ms
        self._workers: dict[WorkerId, KnownWorker] = {}
        self._turns: dict[Phase, int] = {"prefill": 0, "decode": 0}

    def handle(self, event: FleetEvent, now_ms: int) -> list[WorkerLeft]:
        """Take in what a worker says of itself. Returns what to say on behalf of an incarnation that it replaces."""
        replaced: list[WorkerLeft] = []
        match event:
            case WorkerJoined(worker=info):
                self._hear(info, now_ms, replaced)
            case WorkerLoad(worker=info):
                worker = self._hear(info, now_ms, replaced)
                worker.load = event
                worker.draining = worker.draining or event.state == "draining"
                worker.num_placed_requests = worker.num_placed_tokens = 0
            case WorkerDraining():
                if worker := self._known(event.worker_id, event.incarnation):
                    worker.draining = True
            case WorkerLeft():
                if self._known(event.worker_id, event.incarnation):
                    del self._workers[event.worker_id]
        return replaced

    def expire(self, now_ms: int) -> list[WorkerLeft]:
        """Forget the workers that have been silent too long, and say so on their behalf."""
        silent = [w.info for w in self._workers.values() if now_ms - w.heard_ms > self._silent_after_ms]
        for info in silent:
            del self._workers[info.worker_id]
        return [_left(info, "silent") for info in silent]

    def place(self, request: PlaceRequest, now_ms: int) -> Placement | Refused:
        """Choose the workers of one attempt. Counts the choice as load until the workers report their own."""
        if request.deadline_ms <= now_ms:
            return refuse(request, "deadline", "the deadline has passed")
        usable = [w for w in self._usable() if w.info.worker_id not in request.excluded_workers]
        fitting = [w for w in usable if _fits(w.info, request)]
        first = [w for w in fitting if w.info.role == "aggregated" or _partners(w, fitting)]
        if not first:
            return self._refusal(request, usable, fitting)
        prefill = self._pick("prefill", first)
        prefill.num_placed_tokens += request.num_prompt_tokens
        prefill.num_placed_requests += 1
        decode: KnownWorker | None = None
        if prefill.info.role == "prefill":
            decode = self._pick("decode", _partners(prefill, fitting))
            decode.num_placed_requests += 1
        return Placement(
            request_id=request.request_id,
            attempt=request.attempt,
            deadline_ms=request.deadline_ms,
            prefill_worker=prefill.info.worker_id,
            decode_worker=decode.info.worker_id if decode else None,
            policy=self.policy_name,
        )

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
            known = self._workers[info.worker_id] = KnownWorker(info, now_ms)
        known.heard_ms = now_ms
        return known

    def _known(self, worker_id: WorkerId, incarnation: str) -> KnownWorker | None:
        known = self._workers.get(worker_id)
        return known if known is not None and known.info.incarnation == incarnation else None

    def _usable(self) -> list[KnownWorker]:
        ordered = sorted(self._workers.values(), key=lambda w: w.info.worker_id)
        return [w for w in ordered if not w.draining]

    def _pick(self, phase: Phase, workers: list[KnownWorker]) -> KnownWorker:
        chosen = self._policy(phase, [w.candidate() for w in workers], self._turns[phase])
        self._turns[phase] += 1
        return self._workers[chosen.worker_id]

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
