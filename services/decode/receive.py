"""What is particular to an attempt whose prompt another worker computes: it waits for blocks, then for the offer; it
reads what it has not cached, and decodes. Pure.

A read that fails keeps its landed prefix; the rest is read from whoever else may hold it, or computed here as chunked
prefill in the running batch: bad KV costs time, never a token.
"""

from dataplane.blocks.layout import num_blocks_for
from schemas import subjects
from schemas.handoff import (
    BlocksReserved,
    HandoffAborted,
    HandoffState,
    KVLanded,
    KVOffered,
    KVStreaming,
    advance,
)
from schemas.observe import RunStage
from schemas.request import AttemptFailure, KVSource
from services.holder.core.actions import Action, Publish, StartRead, StopRead
from services.holder.core.attempt import Attempt, KVRead, Upstream
from services.holder.core.attempts import Attempts
from services.holder.core.events import ReadEnded, ReadStarted, TimePassed
from services.holder.core.messages import handoff_fields, publish_event


def upstream_of(attempt: Attempt) -> Upstream:
    """Return the hand-over from which an attempt awaits its KV, where it is known to have one."""
    assert attempt.upstream is not None
    return attempt.upstream


# Preemption by migration.


def begin_reservations(attempts: Attempts, now_ms: int) -> list[Action]:
    """Reserve blocks for those in line while there are some: tenants in turn, of each what came first."""
    actions, leases = list[Action](), attempts.leases
    for moved in [each for each in attempts.preempted if not leases.is_expected(each.request.request_id)]:
        attempts.preempted.remove(moved)
        actions += attempts.forget_attempt(moved, now_ms)
    while (attempt := attempts.next_of(attempts.to_receive, now_ms)) is not None:
        if not attempts.allocate(attempt):
            actions += _preempt(attempts, attempt, now_ms)
            break
        attempts.leave_line(attempt)
        upstream = upstream_of(attempt)
        upstream.state = advance(upstream.state, HandoffState.RESERVED)
        attempt.enter(RunStage.RESERVED)
        actions.append(_publish_reserved(attempts, attempt))
        if upstream.lost_reason:
            actions += _go_without(attempts, attempt, upstream.lost_reason, now_ms)
    return actions


def _preempt(attempts: Attempts, attempt: Attempt, now_ms: int) -> list[Action]:
    """Let the youngest answers go on elsewhere whose blocks this attempt lacks, where another worker has room for
    them: they have most before them, and the least to be read. An answer is moved once for this."""
    cache, records, upstream = attempts.cache, attempts.records.values(), upstream_of(attempt)
    if attempts.draining or cache.layout.is_windowed:
        return []
    lacking = attempts.blocks_needed(attempt) - cache.num_free - cache.num_cached
    lacking -= sum(attempts.blocks_needed(other) for other in records if other.moving)
    spare, chosen = attempt.request.spare_blocks - upstream.num_migrated, list[Attempt]()
    for other in reversed(records):
        num_blocks, is_decoded = attempts.blocks_needed(other), other.upstream is not None
        is_running = other.stage is RunStage.COMPUTING and not other.moving and not other.request.num_answered_tokens
        if lacking > 0 and is_decoded and is_running and other.answer.token_ids and num_blocks <= spare:
            chosen.append(other)
            lacking, spare = lacking - num_blocks, spare - num_blocks
    if lacking > 0:
        return []
    upstream.num_migrated += sum(map(attempts.blocks_needed, chosen))
    detail = f"it makes room for {attempt.request.request_id}"
    return [action for other in chosen for action in attempts.move(other, detail, now_ms)]


def _publish_reserved(attempts: Attempts, attempt: Attempt) -> Publish:
    fields = handoff_fields(attempt.request, attempts.limits.worker_id)
    reserved = BlocksReserved(**fields, num_blocks=attempts.blocks_needed(attempt))
    return publish_event(subjects.RESERVED, reserved, attempt.traceparent)


def report_reserved_again(attempts: Attempts, attempt: Attempt, _: TimePassed, now_ms: int) -> list[Action]:
    """Report once more that there is room where no offer has come."""
    upstream, again_ms = upstream_of(attempt), attempts.limits.times.decode.reserved_again_ms
    if upstream.reserved_ms is None:
        upstream.reserved_ms = now_ms
    if now_ms - upstream.reserved_ms < again_ms:
        return []
    upstream.reserved_ms = now_ms
    return [_publish_reserved(attempts, attempt)]


# Reading.


def offered(attempts: Attempts, attempt: Attempt, offer: KVOffered, now_ms: int) -> list[Action]:
    """The source has begun: open the stream."""
    upstream, limits = upstream_of(attempt), attempts.limits
    num_tokens = attempts.cache.layout.padded(attempt.num_prompt_tokens)
    if offer.fingerprint != limits.fingerprint or offer.num_tokens != num_tokens:
        return _go_without(attempts, attempt, "the offered KV is of another model or prompt", now_ms)
    assert attempt.kv is not None
    upstream.state = advance(upstream.state, HandoffState.OFFERED)
    attempt.enter(RunStage.RECEIVING)
    holder, first_token = offer.source_worker, attempt.kv.num_present_tokens
    attempt.read = KVRead(attempt.key, holder, offer, attempt.tables, first_token, attempt.traceparent)
    return [StartRead(attempt.read)]


def offered_unasked(attempts: Attempts, offer: KVOffered) -> list[Action]:
    """Refuse an offer that nobody here waits for."""
    fields = handoff_fields(offer, attempts.limits.worker_id)
    return [publish_event(subjects.ABORTED, HandoffAborted(**fields, reason="no such reservation"))]


def read_started(attempts: Attempts, attempt: Attempt, event: ReadStarted, _: int) -> list[Action]:
    """The first byte of a hand-over is here."""
    is_first = upstream_of(attempt).state is HandoffState.OFFERED
    return [_streaming(attempts, attempt, event.carrier)] if is_first else []


def _streaming(attempts: Attempts, attempt: Attempt, carrier: str) -> Publish:
    upstream = upstream_of(attempt)
    upstream.state = advance(upstream.state, HandoffState.STREAMING)
    streaming = KVStreaming(**handoff_fields(attempt.request, attempts.limits.worker_id), carrier=carrier)
    return publish_event(subjects.STREAMING, streaming, attempt.traceparent)


def hand_over_ended(attempts: Attempts, attempt: Attempt, event: ReadEnded, now_ms: int) -> list[Action]:
    """Decode from token 1 on where all has landed; else do with what has."""
    assert attempt.kv is not None
    first = event.first_token
    if first is None:
        attempt.kv.landed(event.read.holder, event.outcome)
        return _go_without(attempts, attempt, event.reason, now_ms)
    actions = _landed(attempts, attempt, event)
    if first.finish_reason is not None:
        return actions + attempts.forget_attempt(attempt, now_ms)
    attempt.kv.landed(upstream_of(attempt).worker_id, event.outcome)
    attempt.token_ids.append(first.token_id)
    return [*actions, attempts.submit(attempt)]


def ended_read_ended(attempts: Attempts, attempt: Attempt, event: ReadEnded, now_ms: int) -> list[Action]:
    """Nothing writes the blocks of an attempt any more that has ended. The source is sent the hand-over's outcome."""
    actions: list[Action] = []
    if event.first_token is not None:
        actions = _landed(attempts, attempt, event)
    elif event.read.is_hand_over:
        actions = [attempts.abort(attempt, event.reason)]
    return actions + attempts.forget_attempt(attempt, now_ms)


def _landed(attempts: Attempts, attempt: Attempt, event: ReadEnded) -> list[Action]:
    """All is here and verified: report it."""
    upstream, outcome, offer, actions = upstream_of(attempt), event.outcome, event.read.lease, list[Action]()
    assert isinstance(offer, KVOffered)
    if upstream.state is HandoffState.OFFERED:  # so short that nothing was reported of its start
        actions.append(_streaming(attempts, attempt, outcome.carrier))
    if upstream.state is HandoffState.STREAMING:
        upstream.state = advance(upstream.state, HandoffState.LANDED)
        landed = KVLanded(
            **handoff_fields(attempt.request, attempts.limits.worker_id),
            lease_id=offer.lease_id,
            carrier=outcome.carrier,
            num_tokens=min(outcome.num_landed_tokens, attempt.num_prompt_tokens),
            num_bytes=outcome.num_bytes,
        )
        actions.append(publish_event(subjects.LANDED, landed, attempt.traceparent))
    return actions


# Doing without.


def lose_source(attempts: Attempts, attempt: Attempt, reason: str, now_ms: int) -> list[Action]:
    """The prefill worker will send no (more) KV."""
    match attempt.stage:
        case RunStage.QUEUED | RunStage.WAITING:
            upstream_of(attempt).lost_reason = reason
        case RunStage.RESERVED:
            return _go_without(attempts, attempt, reason, now_ms)
        case RunStage.RECEIVING if attempt.read is not None:
            return [StopRead(attempt.read)]
        case _:  # it does without already
            pass
    return []


def _go_without(attempts: Attempts, attempt: Attempt, reason: str, now_ms: int) -> list[Action]:
    """The hand-over brings no more. Whoever is reported to hold a part of the prompt is asked, the prefill worker
    among them: what it has computed may be cached there. Where the prompt's logprobs are wanted another attempt must
    begin: if its first token has come, they have, and it goes on from there."""
    upstream = upstream_of(attempt)
    assert attempt.kv is not None
    if attempt.owes_prompt_logprobs:
        detail = f"{reason}, and the prompt's logprobs are wanted, which only who computes it all has"
        return attempts.fail(attempt, AttemptFailure.TRANSFER_FAILED, detail, now_ms)
    upstream.state = advance(upstream.state, HandoffState.ABORTED)
    if not upstream.has_left:
        num_blocks = num_blocks_for(attempt.num_prompt_tokens, attempts.limits.block_size)
        attempt.kv.sources.append(KVSource(worker_id=upstream.worker_id, first_block=0, num_blocks=num_blocks))
    attempt.kv.sources.extend(attempt.request.sources)
    return [attempts.abort(attempt, reason), *attempts.assemble(attempt)]
