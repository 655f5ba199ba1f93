"""What both ends of a hand-over do the same way. Pure."""

from typing import TypedDict, TypeVar

from dataplane.blocks.layout import BlockTables
from schemas.handoff import HandoffMessage
from schemas.ids import HandoffId, RequestId, WorkerId
from schemas.request import FailureCode, RequestFailure, RequestTokens, ReserveBlocks, RunPrefill
from schemas.subjects import Subject
from services.worker.core.actions import AttemptKey, Emit, Fetch, Publish
from services.worker.core.content import PromptKV, SequenceContent

EventT = TypeVar("EventT", bound=HandoffMessage)


class HandoffFields(TypedDict):
    """The fields that every event of a hand-over has."""

    request_id: RequestId
    attempt: int
    deadline_ms: int
    handoff_id: HandoffId
    source_worker: WorkerId
    target_worker: WorkerId


def handoff_fields(request: RunPrefill | ReserveBlocks | HandoffMessage, worker_id: WorkerId) -> HandoffFields:
    """Return the common fields; `worker_id` is this worker, at its end of the hand-over."""
    match request:
        case RunPrefill(decode_worker=target, handoff_id=handoff_id):
            assert target is not None and handoff_id is not None, "a request that is not split has no hand-over"
            source = worker_id
        case ReserveBlocks(prefill_worker=source, handoff_id=handoff_id):
            target = worker_id
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


def publish_event(subject: Subject[EventT, None], message: EventT) -> Publish:
    """Return the action that publishes an event of a hand-over."""
    ids = (message.source_worker, message.target_worker, message.handoff_id)
    return Publish(subject, ids, message, (message.request_id, message.attempt))


def emit_failure(request: RunPrefill | ReserveBlocks, code: FailureCode, detail: str) -> Emit:
    """Return the action that tells the gateway that this attempt has failed here."""
    failure = RequestFailure(code=code, detail=detail, retryable=code != "deadline")
    tokens = RequestTokens(request_id=request.request_id, attempt=request.attempt, index=0, failure=failure)
    return Emit(request.gateway_id, tokens)


def next_fetch(
    request: RunPrefill | ReserveBlocks, kv: PromptKV, content: SequenceContent, tables: BlockTables, reader: WorkerId
) -> Fetch | None:
    """Return the read of the next piece that somebody is said to hold; None: the rest is to be computed."""
    piece = kv.next_piece(reader)
    if piece is None:
        return None
    key: AttemptKey = (request.request_id, request.attempt)
    hashes = tuple(content.hashes[piece.first_block : piece.first_block + piece.num_blocks])
    return Fetch(key, piece.source, piece.first_block, hashes, tables, request.deadline_ms, request.tenant)
