"""What a prefill worker decides. Pure: messages, engine results and the time come in, actions go out.

A run is queued until there are blocks. What of its prompt is cached here is not computed; what others are said to hold
is read from them first, one after another, and whatever does not come is computed. With a hand-over its blocks outlive
it under a lease, which ends when the reader has landed, aborted, gone, or been silent too long.
"""

from dataplane.blocks.cache import BlockCache
from dataplane.protocol.progress import KVProgress
from schemas import subjects
from schemas.block import pack_tokens
from schemas.handoff import BlocksReserved, FirstToken, HandoffAborted, HandoffMessage, KVLanded, KVReleased
from schemas.ids import HandoffId, LeaseId
from schemas.kv import LeaseEnd
from schemas.request import AttemptEnd, PrefillAccepted, Refused, RequestTokens, RunPrefill, refuse
from schemas.worker import WorkerLeft
from services.engine.interface import SampledToken, StepResult
from services.prefill.runs import PrefillRun
from services.worker.core.actions import (
    Action,
    AttemptKey,
    CloseLease,
    Emit,
    FinishLease,
    Offer,
    Publish,
    StopFetch,
    Submit,
    Withdraw,
)
from services.worker.core.attempts import RoleCore
from services.worker.core.content import ReadOutcome
from services.worker.core.limits import WorkerLimits, check_request, read_prompt
from services.worker.core.messages import emit_failure, handoff_fields, next_fetch, publish_event
from services.worker.kv.leases import Grant, LeaseTable

UNOFFERED_HOLD_MS = 500
"""How long a computed prompt keeps its blocks from a queued run while its decode worker has no room: two workers whose
runs wait for each other's blocks would otherwise wait for ever. What it gives up stays cached, as long as it can."""
UNKNOWN_AFTER_MS = 1_500
"""How long a decode worker may say that it has room for a hand-over that nobody has asked for here. The two requests
are sent at once: what was not heard by then was taken by a predecessor of this process, or is lost."""
OFFER_AGAIN_MS = 250
"""The least time between two offers of one lease."""
LANDED_GRACE_MS = 2_000
"""How long a lease waits for the reader's word once its stream has ended, well or not: the word may be lost."""

_LEASE_ENDS = {
    AttemptEnd.COMPLETE: LeaseEnd.UNNEEDED,
    AttemptEnd.CANCELLED: LeaseEnd.CANCELLED,
    AttemptEnd.DEADLINE: LeaseEnd.DEADLINE,
    AttemptEnd.FAILED: LeaseEnd.CANCELLED,
}
"""What becomes of the lease of an attempt that ends early."""


class PrefillCore(RoleCore[PrefillRun]):
    """Owns the runs of one worker; shares its blocks and leases with the worker's other cores."""

    def __init__(self, limits: WorkerLimits, cache: BlockCache, leases: LeaseTable) -> None:
        super().__init__(limits, cache)
        self._leases = leases
        self._early_reservations: dict[HandoffId, int] = {}
        """When each was first heard of."""

    @property
    def num_queued_tokens(self) -> int:
        fetching = sum(len(r.prompt) - r.kv.num_present_tokens for r in self._runs.values() if r.kv and r.fetching_from)
        return fetching + sum(len(run.prompt) for run in self._queue)

    @property
    def num_unreceived_tokens(self) -> int:
        """What others compute for this worker: nothing."""
        return 0

    def run(self, request: RunPrefill, now_ms: int) -> tuple[PrefillAccepted | Refused, list[Action]]:
        """Take a prompt, or say why not."""
        if (refused := self._past.refuse(request)) is not None:
            return refused, []
        if self._repeated(request) is None:
            prompt = read_prompt(request.prompt)
            full = len(self._queue) >= self._limits.max_queued
            refused = check_request(request, prompt, self._limits, now_ms, draining=self.draining, full=full)
            if refused is not None:
                return refused, []
            run = PrefillRun(request, prompt, self._limits.content_of(request, prompt), taken_ms=now_ms)
            if run.key in self._runs or request.handoff_id in self._by_handoff:
                return refuse(request, "invalid", "this hand-over is another request's"), []
            self._runs[run.key] = run
            self._queue.append(run)
            if request.handoff_id is not None:
                self._by_handoff[request.handoff_id] = run
                run.reserved = request.handoff_id in self._early_reservations
                self._early_reservations.pop(request.handoff_id, None)
        accepted = PrefillAccepted(
            request_id=request.request_id,
            attempt=request.attempt,
            deadline_ms=request.deadline_ms,
            worker_id=self._limits.worker_id,
        )
        return accepted, self._admit(now_ms)

    def reserved(self, event: BlocksReserved, now_ms: int) -> list[Action]:
        """The decode worker has room: offer as soon as there is a lease. It says so again until it hears the offer, or
        that there will be none."""
        run = self._by_handoff.get(event.handoff_id)
        if run is None and (event.request_id, event.attempt) in self._past:
            return [self._tell_target(event, "the prefill worker has ended this attempt")]
        if run is None:
            if now_ms - self._early_reservations.setdefault(event.handoff_id, now_ms) >= UNKNOWN_AFTER_MS:
                del self._early_reservations[event.handoff_id]
                return [self._tell_target(event, "the prefill worker knows nothing of it")]
            while len(self._early_reservations) > self._limits.max_queued:
                del self._early_reservations[next(iter(self._early_reservations))]
            return []
        run.reserved = True
        if run.lease is None:
            return []
        run.offer_again = run.lease.is_offered and run.lease.closes_ms is None
        return self._offer(run)

    def fetched(self, key: AttemptKey, outcome: ReadOutcome, now_ms: int) -> list[Action]:
        """A fetch has ended and writes no more: go on with the next source, or compute the rest."""
        run = self._runs.get(key)
        if run is None or run.fetching_from is None:
            return []
        assert run.kv is not None
        source, run.fetching_from = run.fetching_from, None
        if run.phase == "withdrawing":
            return self._forget(run) + self._admit(now_ms)
        run.kv.landed(source, outcome)
        return self._assemble(run)

    def landed(self, event: KVLanded, now_ms: int) -> list[Action]:
        """The reader has all: end the lease."""
        run = self._by_handoff.get(event.handoff_id)
        if run is None or run.lease is None or run.lease.lease_id != event.lease_id:
            return []
        return self._release(run, now_ms)

    def aborted(self, event: HandoffAborted, now_ms: int) -> list[Action]:
        """The reader has given up. It computes by itself what it lacks, so what is still to come is not needed."""
        run = self._by_handoff.get(event.handoff_id)
        if run is None or run.has_ended:
            return []
        run.end = event.end
        return self._end(run, event.reason, now_ms, tell_target=False)

    def served(self, lease: Grant, now_ms: int) -> list[Action]:
        """The stream of a lease has ended, well or not. The reader says what came of it; if it says nothing, it may be
        dead, or its word was lost."""
        if not lease.is_lent:
            lease.closes_ms = now_ms + LANDED_GRACE_MS
        return []

    def fence(self, now_ms: int, reason: str) -> list[Action]:
        self._early_reservations.clear()
        return super().fence(now_ms, reason)

    def left(self, event: WorkerLeft, now_ms: int) -> list[Action]:
        """A reader is gone: nobody will land what it was reading. A source is gone: its read ends."""
        actions: list[Action] = []
        for run in list(self._runs.values()):
            if self._runs.get(run.key) is not run:
                continue  # it made way for a queued one that an ended one before it let in
            if run.request.decode_worker == event.worker_id:
                actions += self._end(run, "the reader left", now_ms, lease_end=LeaseEnd.READER_LEFT)
            elif run.fetching_from == event.worker_id:
                actions.append(StopFetch(run.key))
        return actions

    def stepped(self, result: StepResult, now_ms: int) -> list[Action]:
        """Send on what an engine step gave. Sequences of other cores are passed over."""
        actions: list[Action] = []
        for sampled in result.sampled:
            run = self._runs.get((sampled.sequence.request_id, sampled.sequence.attempt))
            if run is None:
                continue
            if run.phase == "computing":
                actions += self._sampled(run, sampled, now_ms)
            elif run.phase == "withdrawing" and sampled.local_end:  # it ended before it could be withdrawn
                actions += self._forget(run)
        return actions + self._admit(now_ms)

    def removed(self, key: AttemptKey, now_ms: int) -> list[Action]:
        """The engine has let go of a sequence that was withdrawn."""
        run = self._runs.get(key)
        return [] if run is None else self._forget(run) + self._admit(now_ms)

    def engine_failed(self, key: AttemptKey, reason: str, now_ms: int) -> list[Action]:
        """A step raised; the engine has dropped the sequence."""
        run = self._runs.get(key)
        if run is None:
            return []
        run.outcome = run.outcome or reason
        actions: list[Action] = [] if run.has_ended else [emit_failure(run.request, "engine_failed", reason)]
        actions += self._close_lease(run, LeaseEnd.CANCELLED, "the engine failed", tell_target=not run.has_ended)
        return actions + self._forget(run) + self._admit(now_ms)

    def tick(self, now_ms: int) -> list[Action]:
        """Enforce deadlines, keep the leases of what is still computed, end those whose reader is silent."""
        actions: list[Action] = []
        for run in list(self._runs.values()):
            if self._runs.get(run.key) is not run:
                continue  # it made way for a queued one that an ended one before it let in
            if run.request.deadline_ms <= now_ms and not run.has_ended:
                if run.owes_tokens:
                    actions.append(emit_failure(run.request, "deadline", "the deadline passed during prefill"))
                actions += self._end(run, "deadline", now_ms, lease_end=LeaseEnd.DEADLINE)
                continue
            lease = run.lease
            if lease is not None and lease.closes_ms is not None and lease.closes_ms <= now_ms:
                detail = "the stream has ended, and its reader said nothing more"
                actions += self._end(run, detail, now_ms, lease_end=LeaseEnd.SILENT)
                continue
            if lease is not None and (run.phase in ("fetching", "computing") or not lease.is_offered):
                # Nobody can be reading yet: the reader's silence is no reason to end the lease.
                self._leases.renew(lease, now_ms, self._limits.lease_ms)
        run_of = {run.lease.lease_id: run for run in self._runs.values() if run.lease is not None}
        for lease in self._leases.expire(now_ms, lambda lease: lease.lease_id in run_of, "the lease expired"):
            run = run_of[lease.lease_id]
            actions += self._lease_gone(run, lease, tell_target=True)
            if self._runs.get(run.key) is run:
                actions += self._end(run, lease.outcome, now_ms, tell_target=False)
        return actions + self._offer_again(now_ms) + self._admit(now_ms)

    def _admit(self, now_ms: int) -> list[Action]:
        """Start queued runs, first come first served, while there are blocks."""
        actions: list[Action] = []
        while self._queue:
            run = self._queue[0]
            if not self._allocate(run):
                if (stuck := self._unoffered(now_ms)) is None:
                    break
                reason = "the decode worker has no room and the blocks are needed"
                actions += self._close_lease(stuck, LeaseEnd.CANCELLED, reason, tell_target=True)
                actions += self._forget(stuck)
                continue
            self._queue.popleft()
            assert run.kv is not None
            run.kv.sources.extend(run.request.sources)
            actions += self._lease(run, now_ms) + self._assemble(run)
        return actions

    def _unoffered(self, now_ms: int) -> PrefillRun | None:
        """Return the run that has waited longest for its decode worker to have room, if that is too long."""
        computed = [run for run in self._runs.values() if run.phase == "handing_over"]
        waiting = [run for run in computed if run.lease is not None and not run.lease.is_offered]
        oldest = min(waiting, key=lambda run: run.computed_ms, default=None)
        return oldest if oldest is not None and now_ms - oldest.computed_ms >= UNOFFERED_HOLD_MS else None

    def _lease(self, run: PrefillRun, now_ms: int) -> list[Action]:
        """Grant the lease of a hand-over, and offer it where the decode worker has room already."""
        request = run.request
        if request.handoff_id is None or request.decode_worker is None:
            return []
        self._cache.share(run.tables)
        run.lease = self._leases.grant(
            lease_id=LeaseId(f"lease-{request.handoff_id}"),
            holder=self._limits.worker_id,
            reader=request.decode_worker,
            tenant=request.tenant,
            request_id=request.request_id,
            attempt=request.attempt,
            tables=run.tables,
            num_tokens=len(run.prompt),
            progress=KVProgress(self._cache.layout.num_layers, len(run.prompt)),
            expires_at_ms=now_ms + self._limits.lease_ms,
            granted_ms=now_ms,
            ends_by_ms=request.deadline_ms,
        )
        return self._offer(run) if run.reserved else []

    def _assemble(self, run: PrefillRun) -> list[Action]:
        """Read the next piece that somebody is said to hold; with none left, compute."""
        request, kv = run.request, run.kv
        assert kv is not None
        if self.draining:
            kv.sources.clear()
        if (fetch := next_fetch(request, kv, run.content, run.tables, self._limits.worker_id)) is not None:
            run.phase, run.fetching_from = "fetching", fetch.source
            return [fetch]
        run.phase = "computing"
        sequence = self._sequence(run, list(run.prompt), kv.num_present_tokens, 1 if run.is_split else None)
        return [Submit(sequence, run.content, run.lease)]

    def _offer(self, run: PrefillRun) -> list[Action]:
        assert run.lease is not None
        if run.lease.is_offered:
            return []
        run.lease.is_offered = True
        return [Offer(run.lease, run.request)]

    def _offer_again(self, now_ms: int) -> list[Action]:
        """Repeat the offers that may not have been heard."""
        actions: list[Action] = []
        for run in self._runs.values():
            if run.offer_again and run.lease is not None and now_ms - run.offered_again_ms >= OFFER_AGAIN_MS:
                run.offer_again, run.offered_again_ms = False, now_ms
                actions.append(Offer(run.lease, run.request))
        return actions

    def _sampled(self, run: PrefillRun, sampled: SampledToken, now_ms: int) -> list[Action]:
        request = run.request
        is_first = sampled.index == request.num_answered_tokens
        tokens = RequestTokens(
            request_id=request.request_id,
            attempt=request.attempt,
            index=sampled.index,
            tokens=pack_tokens([sampled.token_id]),
            finish_reason=sampled.finish_reason,
            report=run.kv.report(is_prefill=run.is_split) if run.kv and is_first else None,
        )
        actions: list[Action] = [Emit(request.gateway_id, tokens)]
        if not sampled.local_end:
            return actions
        if run.lease is None:
            return actions + self._forget(run)
        self._leases.renew(run.lease, now_ms, self._limits.lease_ms)
        self._give_back(run)
        run.phase, run.computed_ms = "handing_over", now_ms
        first = FirstToken(token_id=sampled.token_id, finish_reason=sampled.finish_reason)
        return [*actions, FinishLease(run.lease, first)]

    def _release(self, run: PrefillRun, now_ms: int) -> list[Action]:
        lease = run.lease
        assert lease is not None
        actions = self._close_lease(run, LeaseEnd.LANDED)
        released = KVReleased(
            **handoff_fields(run.request, self._limits.worker_id),
            lease_id=lease.lease_id,
            num_blocks=lease.num_blocks,
        )
        actions.append(publish_event(subjects.RELEASED, released))
        if run.phase == "handing_over":
            actions += self._forget(run)
        return actions + self._admit(now_ms)

    def _end(
        self,
        run: PrefillRun,
        reason: str,
        now_ms: int,
        *,
        lease_end: LeaseEnd | None = None,
        tell_target: bool = True,
    ) -> list[Action]:
        if run.has_ended:
            return []
        run.outcome = reason
        actions = self._close_lease(run, lease_end or _LEASE_ENDS[run.end], reason, tell_target=tell_target)
        if run.phase in ("fetching", "computing"):
            actions.append(Withdraw(run.key) if run.phase == "computing" else StopFetch(run.key))
            run.phase = "withdrawing"
        else:
            actions += self._forget(run)
        return actions + self._admit(now_ms)

    def _close_lease(
        self, run: PrefillRun, end: LeaseEnd, detail: str = "", *, tell_target: bool = False
    ) -> list[Action]:
        if run.lease is None:
            return [self._tell_target(run.request, detail)] if tell_target and run.is_split else []
        lease = self._leases.end(run.lease.lease_id, end, detail)
        return [] if lease is None else self._lease_gone(run, lease, tell_target=tell_target)

    def _lease_gone(self, run: PrefillRun, lease: Grant, *, tell_target: bool) -> list[Action]:
        self._cache.free(lease.tables)
        run.lease = None
        actions: list[Action] = [CloseLease(lease)]
        return [*actions, self._tell_target(run.request, lease.outcome)] if tell_target else actions

    def _tell_target(self, request: RunPrefill | HandoffMessage, reason: str) -> Publish:
        aborted = HandoffAborted(**handoff_fields(request, self._limits.worker_id), reason=reason)
        return publish_event(subjects.ABORTED, aborted)
