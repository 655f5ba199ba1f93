"""What is done the same way with every attempt, handed over or not: rules of `core.TABLE`. Pure."""

from schemas.handoff import HandoffAborted
from schemas.kv import LeaseEnd
from schemas.observe import RunStage
from schemas.request import AttemptEnd, AttemptFailure, CancelRequest
from schemas.worker import WorkerLeft
from services.decode.receive import lose_source
from services.engine.messages import SampledToken
from services.holder.core.actions import Action, StopRead
from services.holder.core.attempt import Attempt, SentAnswer
from services.holder.core.attempts import Attempts
from services.holder.core.events import (
    AttemptUnwanted,
    DeadlinePassed,
    DrainBegun,
    DrainOver,
    EngineDied,
    Fenced,
    ReadEnded,
    SequenceFailed,
    SequenceRemoved,
)
from services.prefill.hand_over import prompt_computed, soon_ends

# The engine.


def token_sampled(attempts: Attempts, attempt: Attempt, sampled: SampledToken, now_ms: int) -> list[Action]:
    """Send the token on. With the last one here the attempt ends, or is kept for its reader."""
    copies = attempts.offer_copies(attempt, now_ms, ended=True) if sampled.local_end else []
    actions = [*copies, attempts.emit_token(attempt, sampled)]
    if not sampled.local_end:
        return actions
    is_prompt = attempt.downstream is not None
    return actions + (prompt_computed if is_prompt else _answered)(attempts, attempt, sampled, now_ms)


def _answered(attempts: Attempts, attempt: Attempt, _: SampledToken, now_ms: int) -> list[Action]:
    return attempts.forget_attempt(attempt, now_ms)


def ended_token_sampled(attempts: Attempts, attempt: Attempt, sampled: SampledToken, now_ms: int) -> list[Action]:
    """The engine has come to an attempt's end before it could be withdrawn."""
    if not sampled.local_end:
        return []
    return attempts.offer_copies(attempt, now_ms, ended=True) + attempts.forget_attempt(attempt, now_ms)


def moving_removed(attempts: Attempts, attempt: Attempt, _: SequenceRemoved, now_ms: int) -> list[Action]:
    """The engine has dropped an attempt that migrates: publish so, and what of it can be read here. Where a reader is
    expected, its blocks are given back only when that one has read them: until then others could take them. A worker
    that drains begins nothing new, so what is cached there stays until it is read."""
    attempt.outcome = attempt.moving
    actions = attempts.offer_copies(attempt, now_ms, ended=True)
    actions.append(attempts.migrate(attempt, attempt.moving, now_ms))
    actions += _dropped_by_engine(attempts, attempt)
    if attempts.draining or not attempts.leases.is_expected(attempt.request.request_id):
        return actions + attempts.forget_attempt(attempt, now_ms)
    attempt.enter(RunStage.ENDING)
    attempts.preempted.append(attempt)
    return actions


def ended_removed(attempts: Attempts, attempt: Attempt, _: SequenceRemoved, now_ms: int) -> list[Action]:
    """The engine has let go of an attempt that had ended."""
    return attempts.offer_copies(attempt, now_ms, ended=True) + attempts.forget_attempt(attempt, now_ms)


def sequence_failed(attempts: Attempts, attempt: Attempt, event: SequenceFailed, now_ms: int) -> list[Action]:
    """The engine cannot compute an attempt."""
    attempt.outcome = attempt.outcome or event.reason
    actions = [] if attempt.has_ended else [attempts.emit_failure(attempt, event.code, event.reason)]
    return actions + _dropped_by_engine(attempts, attempt) + attempts.forget_attempt(attempt, now_ms)


def engine_died(attempts: Attempts, attempt: Attempt, event: EngineDied, now_ms: int) -> list[Action]:
    """Let an attempt that owes tokens go on elsewhere. What was stored before stays, and is lent."""
    had, actions = attempt.key in event.had, list[Action]()
    if not attempt.has_ended:
        in_step = attempt.key in event.in_step
        actions.append(attempts.report_held(attempt, AttemptFailure.ENGINE_DIED, event.reason, now_ms, in_step=in_step))
    if not had:  # a read may still write its blocks
        return actions + attempts.end_attempt(attempt, event.reason, now_ms)
    attempt.outcome = attempt.outcome or event.reason
    actions += attempts.offer_copies(attempt, now_ms, ended=True)
    return actions + _dropped_by_engine(attempts, attempt) + attempts.forget_attempt(attempt, now_ms)


def _dropped_by_engine(attempts: Attempts, attempt: Attempt) -> list[Action]:
    """End what others hold of an attempt that the engine has dropped."""
    tells = not attempt.has_ended
    return attempts.close_lease(attempt, LeaseEnd.CANCELLED, attempt.outcome, notifies_other_end=tells)


# Reads.


def read_ended(attempts: Attempts, attempt: Attempt, event: ReadEnded, _: int) -> list[Action]:
    """A read of what others hold writes no more: go on with the next, or compute."""
    assert attempt.kv is not None
    attempt.kv.landed(event.read.holder, event.outcome)
    return attempts.assemble(attempt)


# Ends.


def cancelled(attempts: Attempts, attempt: Attempt, event: CancelRequest, now_ms: int) -> list[Action]:
    """The gateway has ended an attempt."""
    attempt.end = event.end
    return attempts.end_attempt(attempt, event.reason, now_ms)


def unwanted(attempts: Attempts, attempt: Attempt, event: AttemptUnwanted, now_ms: int) -> list[Action]:
    """The gateway does not know an attempt any more, or seems to be dead: if it was only cut off, it is to find an end
    in what was sent, and not to wait for more."""
    attempt.end = AttemptEnd.CANCELLED
    if event.is_orphaned:
        return attempts.fail(attempt, AttemptFailure.ORPHANED, "its gateway was gone", now_ms)
    return attempts.end_attempt(attempt, "nobody wants it any more", now_ms)


def deadline_passed(attempts: Attempts, attempt: Attempt, _: DeadlinePassed, now_ms: int) -> list[Action]:
    """The request's time is over, and the gateway waits for tokens."""
    attempt.end = AttemptEnd.DEADLINE
    if attempt.upstream is not None:
        awaited = "decode" if attempt.stage is RunStage.COMPUTING else "its KV"
        detail = f"the deadline passed while waiting for {awaited}"
        return attempts.fail(attempt, AttemptFailure.DEADLINE, detail, now_ms)
    actions = attempts.emit_failure(attempt, AttemptFailure.DEADLINE, "the deadline passed during prefill")
    return [actions, *attempts.end_attempt(attempt, "deadline", now_ms)]


def unread_in_time(attempts: Attempts, attempt: Attempt, _: DeadlinePassed, now_ms: int) -> list[Action]:
    """The request's time is over, and nobody has read its prompt."""
    attempt.end = AttemptEnd.DEADLINE
    return attempts.end_attempt(attempt, "deadline", now_ms)


def other_end_gave_up(attempts: Attempts, attempt: Attempt, event: HandoffAborted, now_ms: int) -> list[Action]:
    """A source will send no (more) KV. A reader computes by itself what it lacks: what is still to come is not
    needed."""
    if attempt.upstream is not None:
        return lose_source(attempts, attempt, event.reason, now_ms)
    attempt.end = event.end
    return attempts.end_attempt(attempt, event.reason, now_ms, notifies_other_end=False)


def worker_left(attempts: Attempts, attempt: Attempt, event: WorkerLeft, now_ms: int) -> list[Action]:
    """A reader is gone: nobody will land what it was reading. A source is gone: its read ends."""
    to, read = attempt.downstream, attempt.read
    if to is not None and to.worker_id == event.worker_id:
        return attempts.end_attempt(attempt, "the reader left", now_ms, lease_end=LeaseEnd.READER_LEFT)
    if read is not None and not read.is_hand_over and read.holder == event.worker_id:
        return [StopRead(read)]
    if attempt.upstream is not None and attempt.upstream.worker_id == event.worker_id:
        attempt.upstream.has_left = True
        return lose_source(attempts, attempt, "the prefill worker left", now_ms)
    return []


# This worker's own end.


def moves(attempts: Attempts, attempt: Attempt, _: DrainBegun, now_ms: int) -> list[Action]:
    """What waits for room goes on elsewhere, in any case."""
    return attempts.move(attempt, "the worker is draining", now_ms)


def moves_unless_finished(attempts: Attempts, attempt: Attempt, event: DrainBegun, now_ms: int) -> list[Action]:
    """What has blocks goes on elsewhere, unless nobody could go on with it or it is all but done."""
    if event.finishes or (attempt.stage is RunStage.COMPUTING and soon_ends(attempts, attempt)):
        return []
    return attempts.move(attempt, "the worker is draining", now_ms)


def may_wait_no_longer(attempts: Attempts, attempt: Attempt, _: DrainOver, now_ms: int) -> list[Action]:
    """What still owes tokens fails here, and goes on elsewhere."""
    detail = "the worker is draining and may wait no longer"
    return [attempts.migrate(attempt, detail, now_ms), *attempts.end_attempt(attempt, detail, now_ms)]


def fenced(attempts: Attempts, attempt: Attempt, event: Fenced, now_ms: int) -> list[Action]:
    """Others take this worker for dead: end all, and notify no gateway."""
    attempt.answer, attempt.replica_offer = SentAnswer(), None
    return attempts.end_attempt(attempt, event.reason, now_ms)
