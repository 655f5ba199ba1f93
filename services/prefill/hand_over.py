"""What is particular to an attempt whose prompt is computed here: it waits for blocks, and until its decode worker has
room or is likely to have it soon; what it computes is offered under a lease, which outlives its own blocks. Pure.

A lease ends when its reader has landed, aborted, gone, or been silent too long.
"""

from dataplane.protocol.progress import KVProgress
from schemas import subjects
from schemas.handoff import BlocksReserved, FirstToken, HandoffAborted, HandoffMessage, KVLanded, KVReleased
from schemas.ids import LeaseId
from schemas.kv import LeaseEnd
from schemas.observe import RunStage
from services.engine.messages import SampledToken
from services.holder.core.actions import Action, FinishLease, Offer, Publish
from services.holder.core.attempt import Attempt
from services.holder.core.attempts import Attempts
from services.holder.core.events import DrainOver, StreamEnded, TimePassed
from services.holder.core.messages import handoff_fields, publish_event
from services.holder.limits import AHEAD_SHARE

FINISHED_TOKENS = 256
"""A worker that drains finishes the prompts of which it has so few tokens to compute: less than a step's worth."""

# Beginning.


def begin_prompts(attempts: Attempts, now_ms: int) -> list[Action]:
    """Begin the prompts in line while there are blocks: tenants in turn, of each what came first."""
    actions: list[Action] = []
    while (attempt := _next(attempts, now_ms)) is not None:
        # What is cached or read has no logprobs: a prompt whose own are wanted is computed whole.
        whole = attempt.owes_prompt_logprobs
        if not attempts.allocate(attempt, max_cached_tokens=0 if whole else None):
            if attempt.runs_ahead or (stuck := _stuck(attempts)) is None:
                break
            reason = "the decode worker has no room and the blocks are needed"
            actions += attempts.close_lease(stuck, LeaseEnd.CANCELLED, reason, notifies_other_end=True)
            actions += attempts.forget_attempt(stuck, now_ms)
            continue
        attempts.leave_line(attempt)
        assert attempt.kv is not None
        attempt.kv.sources.extend(() if whole else attempt.request.sources)
        actions += _grant(attempts, attempt, now_ms) + attempts.assemble(attempt)
    return actions


def _next(attempts: Attempts, now_ms: int) -> Attempt | None:
    """Return what begins next: the prompt whose turn it is of those whose decode workers have room. With none, of all,
    so that it is computed once there is room, unless those that have run ahead so hold too many blocks."""
    ready = attempts.next_of(attempts.to_compute, now_ms, lambda attempt: not attempt.runs_ahead)
    if ready is not None:
        return ready
    first = attempts.next_of(attempts.to_compute, now_ms)
    if first is None:
        return None
    ahead = [attempt for attempt in attempts.records.values() if attempt.runs_ahead and attempt.lease is not None]
    num_blocks = sum(map(attempts.blocks_needed, [*ahead, first]))
    return first if num_blocks * AHEAD_SHARE <= attempts.limits.num_blocks else None


def _stuck(attempts: Attempts) -> Attempt | None:
    """Deadlock rule: if a prompt whose decode worker is ready cannot get blocks, and every block that prompts hold
    here belongs to one that still waits for its decode worker, the newest of those makes way. The room that they wait
    for may be what the other one's decode worker keeps for it. What makes way stays cached as long as it can."""
    prompts = [attempt for attempt in attempts.records.values() if attempt.upstream is None]
    holding = [attempt for attempt in prompts if attempt.tables or attempt.lease is not None]
    wait = all(attempt.runs_ahead and attempt.stage is RunStage.HANDING_OVER for attempt in holding)
    return holding[-1] if holding and wait and not attempts.leases.num_lent else None


# Offering.


def _grant(attempts: Attempts, attempt: Attempt, now_ms: int) -> list[Action]:
    """Grant the lease of a hand-over, and offer it where the decode worker has room already."""
    request, to, limits = attempt.request, attempt.downstream, attempts.limits
    if to is None:
        return []
    attempts.cache.share(attempt.tables)
    layout = attempts.cache.layout
    num_tokens = layout.padded(attempt.num_prompt_tokens)  # what is in the last block behind the prompt is nobody's
    to.lease = attempts.leases.grant(
        lease_id=LeaseId(f"lease-{to.handoff_id}"),
        holder=limits.worker_id,
        reader=to.worker_id,
        tenant=request.tenant,
        request_id=request.request_id,
        attempt=request.attempt,
        tables=attempt.tables,
        num_tokens=num_tokens,
        progress=KVProgress(layout.num_layers, num_tokens),
        expires_at_ms=now_ms + limits.lease_ms,
        granted_ms=now_ms,
        ends_by_ms=request.deadline_ms,
    )
    return _offer(attempt) if to.has_room else []


def _offer(attempt: Attempt) -> list[Action]:
    lease = attempt.lease
    assert lease is not None
    if lease.is_offered:
        return []
    lease.is_offered = True
    return [Offer(lease, attempt)]


def reader_has_room(attempts: Attempts, attempt: Attempt, _: BlocksReserved, now_ms: int) -> list[Action]:
    """Offer as soon as there is a lease. The decode worker repeats that it has room until it receives the offer,
    or that there will be none."""
    to = attempt.downstream
    assert to is not None
    to.has_room = True
    if to.lease is None:
        return []
    to.offer_again = to.lease.is_offered and to.lease.closes_ms is None
    return _offer(attempt)


def reserved_too_early(attempts: Attempts, event: BlocksReserved, now_ms: int) -> list[Action]:
    """A decode worker has room for a hand-over that is not known here: its request may be on its way. It is notified
    where that is over, or has not come for too long."""
    if (event.request_id, event.attempt) in attempts.past:
        return [abort(attempts, event, "the prefill worker has ended this attempt")]
    early, unknown_after_ms = attempts.early_reservations, attempts.limits.times.prefill.unknown_after_ms
    if now_ms - early.setdefault(event.handoff_id, now_ms) >= unknown_after_ms:
        del early[event.handoff_id]
        return [abort(attempts, event, "the prefill worker knows nothing of it")]
    while len(early) > attempts.limits.max_queued:
        del early[next(iter(early))]
    return []


def abort(attempts: Attempts, event: HandoffMessage, reason: str) -> Publish:
    """Return the action that notifies the decode worker that no (more) KV of this comes."""
    aborted = HandoffAborted(**handoff_fields(event, attempts.limits.worker_id), reason=reason)
    return publish_event(subjects.ABORTED, aborted)


# Being computed, and being read.


def prompt_computed(attempts: Attempts, attempt: Attempt, sampled: SampledToken, now_ms: int) -> list[Action]:
    """The stream may end, with the first token. The prompt stays for its reader, whatever becomes of the attempt's own
    blocks."""
    lease = attempt.lease
    if lease is None:
        return attempts.forget_attempt(attempt, now_ms)
    attempts.leases.renew(lease, now_ms, attempts.limits.lease_ms)
    attempts.give_back(attempt)
    attempt.enter(RunStage.HANDING_OVER)
    computed_ns = attempt.times.last_step_ns
    first = FirstToken(token_id=sampled.token_id, finish_reason=sampled.finish_reason, computed_ns=computed_ns)
    return [FinishLease(lease, first)]


def soon_ends(attempts: Attempts, attempt: Attempt) -> bool:
    """Return whether a prompt is so near its end here that it is finished even by a worker that drains."""
    num_stored = attempt.num_stored_blocks * attempts.limits.block_size
    return attempt.downstream is not None and attempt.num_prompt_tokens - num_stored <= FINISHED_TOKENS


def landed(attempts: Attempts, attempt: Attempt, event: KVLanded, now_ms: int) -> list[Action]:
    """The reader has all: end the lease."""
    lease = attempt.lease
    if lease is None or lease.lease_id != event.lease_id:
        return []
    actions = attempts.close_lease(attempt, LeaseEnd.LANDED)
    fields = handoff_fields(attempt.request, attempts.limits.worker_id)
    released = KVReleased(**fields, lease_id=lease.lease_id, num_blocks=lease.num_blocks)
    actions.append(publish_event(subjects.RELEASED, released, attempt.traceparent))
    return actions + attempts.forget_attempt(attempt, now_ms) if attempt.stage is RunStage.HANDING_OVER else actions


def stream_ended(attempts: Attempts, attempt: Attempt, event: StreamEnded, now_ms: int) -> list[Action]:
    """Wait for the reader to report how its read ended. If it sends nothing, it may be dead, or its message is lost."""
    event.lease.closes_ms = now_ms + attempts.limits.times.prefill.landed_grace_ms
    return []


def leaves_unread(attempts: Attempts, attempt: Attempt, _: DrainOver, now_ms: int) -> list[Action]:
    """A worker that leaves gives up a prompt whose reader has no room for it yet: when it will is not known."""
    if attempt.lease is None or attempt.lease.is_offered:
        return []
    return attempts.end_attempt(attempt, "the worker leaves before the decode worker has room", now_ms)


# By the clock.


def watch_lease(attempts: Attempts, attempt: Attempt, _: TimePassed, now_ms: int) -> list[Action]:
    """End a lease whose stream is over and whose reader sends nothing; keep one that nobody can be reading yet: the
    reader's silence is no reason to end it."""
    lease = attempt.lease
    if lease is None:
        return []
    if lease.closes_ms is not None and lease.closes_ms <= now_ms:
        detail = "the stream has ended, and its reader sent nothing more"
        return attempts.end_attempt(attempt, detail, now_ms, lease_end=LeaseEnd.SILENT)
    if attempt.stage is not RunStage.HANDING_OVER or not lease.is_offered:
        attempts.leases.renew(lease, now_ms, attempts.limits.lease_ms)
    return []


def end_expired(attempts: Attempts, now_ms: int) -> list[Action]:
    """End the hand-overs whose lease's time is over."""
    actions: list[Action] = []
    attempt_of = {a.lease.lease_id: a for a in attempts.records.values() if a.lease is not None}
    for lease in attempts.leases.expire(now_ms, lambda lease: lease.lease_id in attempt_of, "the lease expired"):
        attempt = attempt_of[lease.lease_id]
        actions += attempts.lease_gone(attempt, lease, notifies_other_end=True)
        actions += attempts.end_attempt(attempt, "the lease expired", now_ms, notifies_other_end=False)
    return actions


def offer_again(attempts: Attempts, now_ms: int) -> list[Action]:
    """Repeat the offers that may have been lost."""
    actions: list[Action] = []
    for attempt in attempts.records.values():
        to = attempt.downstream
        if to is None or to.lease is None or not to.offer_again:
            continue
        if now_ms - to.offered_again_ms >= attempts.limits.times.prefill.offer_again_ms:
            to.offer_again, to.offered_again_ms = False, now_ms
            actions.append(Offer(to.lease, attempt))
    return actions
