"""What a prefill worker decides. Pure: events and the time come in, actions go out.

An attempt is queued until its decode worker has room, or is likely to have it soon; until there are blocks; and while
another one fills those that its prompt begins with. What of its prompt is cached here is not computed; what others are
said to hold is read from them first, one after another, and whatever does not come is computed. With a hand-over its
blocks outlive it under a lease, which ends when the reader has landed, aborted, gone, or been silent too long.
"""

from dataclasses import dataclass

from dataplane.blocks.cache import BlockCache
from dataplane.protocol.progress import KVProgress
from schemas import subjects
from schemas.handoff import BlocksReserved, FirstToken, HandoffAborted, HandoffMessage, KVLanded, KVReleased
from schemas.ids import HandoffId, LeaseId
from schemas.kv import LeaseEnd
from schemas.request import AttemptEnd, AttemptFailure, RunAttempt
from schemas.worker import WorkerLeft
from services.engine.interface import SampledToken
from services.worker.core.actions import (
    Action,
    CloseLease,
    FinishLease,
    Offer,
    Publish,
    SendReply,
    StopRead,
)
from services.worker.core.attempts import Attempt
from services.worker.core.checks import WorkerLimits
from services.worker.core.events import AttemptAsked, DrainOver, Fenced, ReadEnded, StreamEnded
from services.worker.core.leases import Grant, LeaseTable
from services.worker.core.messages import handoff_fields, publish_event
from services.worker.core.role import HeardSubject, RoleCore
from services.worker.core.rules import RuleTable
from services.worker.core.twins import Twins
from services.worker.limits import AHEAD_SHARE

_LEASE_ENDS = {
    AttemptEnd.COMPLETE: LeaseEnd.UNNEEDED,
    AttemptEnd.CANCELLED: LeaseEnd.CANCELLED,
    AttemptEnd.DEADLINE: LeaseEnd.DEADLINE,
    AttemptEnd.FAILED: LeaseEnd.CANCELLED,
}
"""What becomes of the lease of an attempt that ends early."""
FINISHED_TOKENS = 256
"""A worker that drains finishes the prompts of which it has so few tokens to compute: less than a step's worth."""


@dataclass(slots=True, eq=False)
class PrefillAttempt(Attempt):
    """One attempt at computing a prompt."""

    part = "prefill"
    lease: Grant | None = None
    reserved: bool = False
    """The decode worker has said that it has room."""
    offer_again: bool = False
    """The decode worker has said so again: the offer may have been lost."""
    offered_again_ms: int = 0

    @property
    def runs_ahead(self) -> bool:
        """Nobody has room for what is computed yet."""
        return self.hands_over and not self.reserved


class PrefillCore(RoleCore[PrefillAttempt]):
    """Owns the attempts at computing prompts; shares its blocks and leases with the worker's other cores."""

    record = PrefillAttempt

    def __init__(self, limits: WorkerLimits, cache: BlockCache, leases: LeaseTable, twins: Twins | None = None) -> None:
        super().__init__(limits, cache, leases, twins)
        self._times = limits.times.prefill
        self.twin_wait_ms = self._times.twin_computes_within_ms
        self._early_reservations: dict[HandoffId, int] = {}
        """When each was first heard of."""

    def hears(self) -> tuple[HeardSubject, ...]:
        as_source = (self._limits.worker_id, "*", "*")
        return (
            HeardSubject(subjects.RESERVED, as_source),
            HeardSubject(subjects.LANDED, as_source),
            HeardSubject(subjects.ABORTED, as_source),
        )

    def rules(self) -> RuleTable:
        return {
            **super().rules(),
            AttemptAsked: self._asked,
            BlocksReserved: self._agreeing(self._reserved),
            KVLanded: self._agreeing(self._landed),
            HandoffAborted: self._agreeing(self._aborted),
            StreamEnded: self._stream_ended,
        }

    def _asked(self, event: AttemptAsked, now_ms: int) -> list[Action]:
        """Take a prompt, or say why not."""
        if event.request.upstream is not None:
            return []
        attempt = self._take(event, now_ms)
        if isinstance(attempt, SendReply):
            return [attempt]
        request = attempt.request
        if (to := request.downstream) and self._early_reservations.pop(to.handoff_id, None) is not None:
            attempt.reserved = True
        return [self._accepted(attempt)]

    def _reserved(self, event: BlocksReserved, now_ms: int) -> list[Action]:
        """The decode worker has room: offer as soon as there is a lease. It says so again until it hears the offer, or
        that there will be none."""
        attempt = self._by_handoff.get(event.handoff_id)
        if attempt is None and (event.request_id, event.attempt) in self.past:
            return [self._notify_target(event, "the prefill worker has ended this attempt")]
        if attempt is None:
            if now_ms - self._early_reservations.setdefault(event.handoff_id, now_ms) >= self._times.unknown_after_ms:
                del self._early_reservations[event.handoff_id]
                return [self._notify_target(event, "the prefill worker knows nothing of it")]
            while len(self._early_reservations) > self._limits.max_queued:
                del self._early_reservations[next(iter(self._early_reservations))]
            return []
        attempt.reserved = True
        if attempt.lease is None:
            return []
        attempt.offer_again = attempt.lease.is_offered and attempt.lease.closes_ms is None
        return self._offer(attempt)

    def _landed(self, event: KVLanded, now_ms: int) -> list[Action]:
        """The reader has all: end the lease."""
        attempt = self._by_handoff.get(event.handoff_id)
        if attempt is None or attempt.lease is None or attempt.lease.lease_id != event.lease_id:
            return []
        return self._release(attempt, now_ms)

    def _aborted(self, event: HandoffAborted, now_ms: int) -> list[Action]:
        """The reader has given up. It computes by itself what it lacks, so what is still to come is not needed."""
        attempt = self._by_handoff.get(event.handoff_id)
        if attempt is None or attempt.has_ended:
            return []
        attempt.end = event.end
        return self._end(attempt, event.reason, now_ms, tell_target=False)

    def _stream_ended(self, event: StreamEnded, now_ms: int) -> list[Action]:
        """Wait for the reader to say how its read ended. If it says nothing, it may be dead, or its message is lost."""
        if not event.lease.is_lent:
            event.lease.closes_ms = now_ms + self._times.landed_grace_ms
        return []

    def _read_on(self, attempt: PrefillAttempt, event: ReadEnded, now_ms: int) -> list[Action]:
        if attempt.has_ended:
            return self._forget(attempt, now_ms)
        assert attempt.kv is not None
        attempt.kv.landed(event.read.holder, event.outcome)
        return self._assemble(attempt)

    def _fenced(self, event: Fenced, now_ms: int) -> list[Action]:
        self._early_reservations.clear()
        return super()._fenced(event, now_ms)

    def _worker_left(self, event: WorkerLeft, now_ms: int) -> list[Action]:
        """A reader is gone: nobody will land what it was reading. A source is gone: its read ends."""
        actions: list[Action] = []
        for attempt in list(self.attempts.values()):
            if (to := attempt.request.downstream) and to.worker_id == event.worker_id:
                actions += self._end(attempt, "the reader left", now_ms, lease_end=LeaseEnd.READER_LEFT)
            elif attempt.read is not None and attempt.read.holder == event.worker_id:
                actions.append(StopRead(attempt.read))
        return actions

    def _soon_ends(self, attempt: PrefillAttempt) -> bool:
        num_stored = attempt.num_stored_blocks * self._limits.block_size
        is_prompt = attempt.stage == "computing" and attempt.hands_over
        return is_prompt and len(attempt.prompt) - num_stored <= FINISHED_TOKENS

    def _drain_over(self, event: DrainOver, now_ms: int) -> list[Action]:
        """Also give up prefixes whose readers have no room for them yet: when they will is not known."""
        actions = super()._drain_over(event, now_ms)
        computed = [a for a in self.attempts.values() if a.stage == "handing_over"]
        for attempt in [a for a in computed if a.lease is not None and not a.lease.is_offered]:
            actions += self._end(attempt, "the worker leaves before the decode worker has room", now_ms)
        return actions

    def _engine_lost(self, attempt: PrefillAttempt) -> list[Action]:
        return self._close_lease(attempt, LeaseEnd.CANCELLED, attempt.outcome, tell_target=not attempt.has_ended)

    def _on_time(self, now_ms: int) -> list[Action]:
        """Enforce deadlines, keep the leases of what is still computed, end those whose reader is silent."""
        actions: list[Action] = []
        for attempt in list(self.attempts.values()):
            if attempt.request.deadline_ms <= now_ms and not attempt.has_ended:
                if attempt.owes_tokens:
                    actions.append(
                        self._emit_failure(attempt, AttemptFailure.DEADLINE, "the deadline passed during prefill")
                    )
                attempt.end = AttemptEnd.DEADLINE
                actions += self._end(attempt, "deadline", now_ms)
                continue
            lease = attempt.lease
            if lease is not None and lease.closes_ms is not None and lease.closes_ms <= now_ms:
                detail = "the stream has ended, and its reader said nothing more"
                actions += self._end(attempt, detail, now_ms, lease_end=LeaseEnd.SILENT)
                continue
            if lease is not None and (attempt.stage in ("fetching", "computing") or not lease.is_offered):
                # Nobody can be reading yet: the reader's silence is no reason to end the lease.
                self._leases.renew(lease, now_ms, self._limits.lease_ms)
        attempt_of = {a.lease.lease_id: a for a in self.attempts.values() if a.lease is not None}
        for lease in self._leases.expire(now_ms, lambda lease: lease.lease_id in attempt_of, "the lease expired"):
            attempt = attempt_of[lease.lease_id]
            actions += self._lease_gone(attempt, lease, tell_target=True)
            actions += self._end(attempt, "the lease expired", now_ms, tell_target=False)
        return actions + self._offer_again(now_ms)

    def admit(self, now_ms: int) -> list[Action]:
        actions: list[Action] = []
        while (attempt := self._next(now_ms)) is not None:
            # What is cached or read has no logarithms: a prompt whose own are wanted is computed whole.
            whole = attempt.owes_prompt_logprobs
            if not self._allocate(attempt, max_cached_tokens=0 if whole else None):
                if attempt.runs_ahead or (stuck := self._stuck()) is None:
                    break
                reason = "the decode worker has no room and the blocks are needed"
                actions += self._close_lease(stuck, LeaseEnd.CANCELLED, reason, tell_target=True)
                actions += self._forget(stuck, now_ms)
                continue
            self._begun(attempt)
            assert attempt.kv is not None
            attempt.kv.sources.extend(() if whole else attempt.request.sources)
            actions += self._lease(attempt, now_ms) + self._assemble(attempt)
        return actions

    def _next(self, now_ms: int) -> PrefillAttempt | None:
        """Return what begins next: the prompt whose turn it is of those whose decode workers have room. With none, of
        all, so that it is computed once there is room, unless those that have run ahead so hold too many blocks."""
        ready = self._next_queued(now_ms, lambda attempt: not attempt.runs_ahead)
        if ready is not None:
            return ready
        first = self._next_queued(now_ms)
        if first is None:
            return None
        ahead = [attempt for attempt in self.attempts.values() if attempt.runs_ahead and attempt.lease is not None]
        num_blocks = sum(map(self._num_blocks, [*ahead, first]))
        return first if num_blocks * AHEAD_SHARE <= self._limits.num_blocks else None

    def _stuck(self) -> PrefillAttempt | None:
        """Return the computed prompt that makes way for one whose decode worker has room: the one that came last, where
        all blocks that are held here wait for room elsewhere. That room may be what the other one's decode worker keeps
        for it, and both would wait for ever. What makes way stays cached as long as it can."""
        holding = [attempt for attempt in self.attempts.values() if attempt.tables or attempt.lease is not None]
        wait = all(attempt.runs_ahead and attempt.stage == "handing_over" for attempt in holding)
        return holding[-1] if holding and wait and not self._leases.num_lent else None

    def _lease(self, attempt: PrefillAttempt, now_ms: int) -> list[Action]:
        """Grant the lease of a hand-over, and offer it where the decode worker has room already."""
        request = attempt.request
        if (to := request.downstream) is None:
            return []
        self._cache.share(attempt.tables)
        layout = self._cache.layout
        num_tokens = layout.padded(len(attempt.prompt))  # what is in the last block behind the prompt is nobody's
        attempt.lease = self._leases.grant(
            lease_id=LeaseId(f"lease-{to.handoff_id}"),
            holder=self._limits.worker_id,
            reader=to.worker_id,
            tenant=request.tenant,
            request_id=request.request_id,
            attempt=request.attempt,
            tables=attempt.tables,
            num_tokens=num_tokens,
            progress=KVProgress(layout.num_layers, num_tokens),
            expires_at_ms=now_ms + self._limits.lease_ms,
            granted_ms=now_ms,
            ends_by_ms=request.deadline_ms,
        )
        return self._offer(attempt) if attempt.reserved else []

    def _assemble(self, attempt: PrefillAttempt) -> list[Action]:
        """Read the next piece that somebody is said to hold; with none left, compute."""
        if (start := self._read_next(attempt)) is not None:
            return [start]
        return [self._submit(attempt, list(attempt.prompt), attempt.lease)]

    def _offer(self, attempt: PrefillAttempt) -> list[Action]:
        assert attempt.lease is not None
        if attempt.lease.is_offered:
            return []
        attempt.lease.is_offered = True
        return [Offer(attempt.lease, attempt)]

    def _offer_again(self, now_ms: int) -> list[Action]:
        """Repeat the offers that may have been lost."""
        actions: list[Action] = []
        for attempt in self.attempts.values():
            is_due = now_ms - attempt.offered_again_ms >= self._times.offer_again_ms
            if attempt.offer_again and attempt.lease is not None and is_due:
                attempt.offer_again, attempt.offered_again_ms = False, now_ms
                actions.append(Offer(attempt.lease, attempt))
        return actions

    def _computed(self, attempt: PrefillAttempt, sampled: SampledToken, ended_ns: int, now_ms: int) -> list[Action]:
        if attempt.lease is None:
            return self._forget(attempt, now_ms)
        self._leases.renew(attempt.lease, now_ms, self._limits.lease_ms)
        self._give_back(attempt)
        attempt.stage = "handing_over"
        first = FirstToken(token_id=sampled.token_id, finish_reason=sampled.finish_reason, computed_ns=ended_ns)
        return [FinishLease(attempt.lease, first)]

    def _release(self, attempt: PrefillAttempt, now_ms: int) -> list[Action]:
        lease = attempt.lease
        assert lease is not None
        actions = self._close_lease(attempt, LeaseEnd.LANDED)
        released = KVReleased(
            **handoff_fields(attempt.request, self._limits.worker_id),
            lease_id=lease.lease_id,
            num_blocks=lease.num_blocks,
        )
        actions.append(publish_event(subjects.RELEASED, released, attempt.traceparent))
        if attempt.stage == "handing_over":
            actions += self._forget(attempt, now_ms)
        return actions

    def _end(
        self,
        attempt: PrefillAttempt,
        reason: str,
        now_ms: int,
        *,
        lease_end: LeaseEnd | None = None,
        tell_target: bool = True,
    ) -> list[Action]:
        if attempt.has_ended:
            return []
        attempt.outcome = reason
        actions = self._close_lease(attempt, lease_end or _LEASE_ENDS[attempt.end], reason, tell_target=tell_target)
        stop = self._stop(attempt)
        return [*actions, stop] if stop is not None else actions + self._forget(attempt, now_ms)

    def _close_lease(
        self, attempt: PrefillAttempt, end: LeaseEnd, detail: str = "", *, tell_target: bool = False
    ) -> list[Action]:
        if attempt.lease is None:
            return [self._notify_target_of(attempt, detail)] if tell_target and attempt.hands_over else []
        lease = self._leases.end(attempt.lease.lease_id, end, detail)
        return [] if lease is None else self._lease_gone(attempt, lease, tell_target=tell_target)

    def _lease_gone(self, attempt: PrefillAttempt, lease: Grant, *, tell_target: bool) -> list[Action]:
        self._cache.free(lease.tables)
        attempt.lease = None
        actions: list[Action] = [CloseLease(lease)]
        return [*actions, self._notify_target_of(attempt, lease.outcome)] if tell_target else actions

    def _notify_target_of(self, attempt: PrefillAttempt, reason: str) -> Publish:
        return self._notify_target(attempt.request, reason, attempt.traceparent)

    def _notify_target(self, request: RunAttempt | HandoffMessage, reason: str, traceparent: str = "") -> Publish:
        """Tell the decode worker that no (more) KV of this comes."""
        aborted = HandoffAborted(**handoff_fields(request, self._limits.worker_id), reason=reason)
        return publish_event(subjects.ABORTED, aborted, traceparent)
