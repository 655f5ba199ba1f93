"""What both ends of a hand-over send and ask the same way. Pure."""

from typing import TypedDict, TypeVar

from schemas.handoff import HandoffMessage
from schemas.ids import HandoffId, RequestId, WorkerId
from schemas.request import OtherEnd, RunAttempt
from schemas.subjects import Subject
from services.holder.core.actions import Publish

EventT = TypeVar("EventT", bound=HandoffMessage)


class HandoffFields(TypedDict):
    """The fields that every event of a hand-over has."""

    request_id: RequestId
    attempt: int
    deadline_ms: int
    handoff_id: HandoffId
    source_worker: WorkerId
    target_worker: WorkerId


def handoff_fields(request: RunAttempt | HandoffMessage, worker_id: WorkerId) -> HandoffFields:
    """Return the common fields; `worker_id` is this worker, at its end of the hand-over."""
    match request:
        case RunAttempt(upstream=OtherEnd(worker_id=source, handoff_id=handoff_id)):
            target = worker_id
        case RunAttempt(downstream=other):
            assert other is not None, "a request that is not split has no hand-over"
            source, target, handoff_id = worker_id, other.worker_id, other.handoff_id
        case HandoffMessage(source_worker=source, target_worker=target, handoff_id=handoff_id):
            pass
    return {
        "request_id": request.request_id,
        "attempt": request.attempt,
        "deadline_ms": request.deadline_ms,
        "handoff_id": handoff_id,
        "source_worker": source,
        "target_worker": target,
    }


def publish_event(subject: Subject[EventT, None], message: EventT, traceparent: str = "") -> Publish:
    """Return the action that publishes an event of a hand-over."""
    ids = (message.source_worker, message.target_worker, message.handoff_id)
    return Publish(subject, ids, message, traceparent)
