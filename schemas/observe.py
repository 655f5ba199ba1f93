"""What is reported to people and their tools; no decision hangs on it. Ages are in milliseconds.

A request's events are published by its gateway: `nats sub 'mesh.v1.request.>'`. A request has one `accepted` and one
end: `finished`, `failed` or `cancelled`; their ages count from `accepted`. Anybody may ask what a worker does, and
where a request is, with an empty message. `KeepTrace` asks everybody for the spans of one trace.
"""

import msgspec

from schemas.ids import GatewayId, LeaseId, RequestId, WorkerId
from schemas.message import Message, OpenEnum, RequestMessage
from schemas.numbers import Number
from schemas.request import FinishReason
from schemas.worker import WorkerLoad


class RunStage(OpenEnum):
    """How far an attempt is on a worker."""

    QUEUED = "queued"
    """It waits for room."""
    WAITING = "waiting_for_duplicate"
    """It waits for blocks that another request of the same prompt fills."""
    RESERVED = "reserved"
    """It has its blocks, and waits for the offer of its KV."""
    RECEIVING = "receiving"
    """It reads what its prefill worker computes."""
    FETCHING = "fetching"
    """It reads what others hold."""
    COMPUTING = "computing"
    """The engine has it."""
    HANDING_OVER = "handing_over"
    """Computed, and kept for its reader."""
    ENDING = "ending"
    """Over; its blocks wait for whoever may still write them."""
    OTHER = "other"


class RequestPhase(OpenEnum):
    """How far a request is."""

    PLACING = "placing"
    WAITING = "waiting"
    """To ask for a placement again."""
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"
    UNKNOWN = "unknown"
    """No gateway knows it; it may have ended a while ago."""
    OTHER = "other"


class Part(OpenEnum):
    """What a worker does for a request."""

    PREFILL = "prefill"
    DECODE = "decode"
    REPLICA = "replica"
    """No attempt of its own: it copies blocks of another's."""
    OTHER = "other"


class DescribeWorker(Message, frozen=True, kw_only=True):
    """What does this worker do?"""


class HeldRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt on a worker, `age_ms` after the worker has taken it. `reading_from`: whose KV is coming in.
    `waiting_for`: the request whose blocks it waits for.
    """

    request_id: RequestId
    attempt: Number
    part: Part
    stage: RunStage
    age_ms: Number
    num_prompt_tokens: Number = 0
    reading_from: str = ""
    waiting_for: str = ""


class HeldLease(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks that `reader` may read. `left_ms`: until it expires, unless it is renewed."""

    lease_id: LeaseId
    reader: WorkerId
    num_blocks: Number
    age_ms: Number
    left_ms: Number


class AttachedServer(msgspec.Struct, frozen=True, kw_only=True):
    """A server that is attached to a holder (`docs/attach.md`). `sharing`: proving, on or off, and `why`. `not_saved`:
    why blocks or requests were not shared, each with their number, for people. `num_brought_blocks`: that were brought
    for it from elsewhere. `num_pinned`: blocks that it is to load. `num_empty`: blocks that it may write KV
    into. `canary`: how its last one went."""

    server: str
    model: str
    url: str
    sharing: str
    why: str = ""
    num_asked_tokens: Number = 0
    num_loaded_tokens: Number = 0
    num_brought_blocks: Number = 0
    num_saved_blocks: Number = 0
    num_compared: Number = 0
    num_refused: Number = 0
    num_pinned: Number = 0
    num_empty: Number = 0
    canary: str = ""
    not_saved: tuple[str, ...] = ()


class WorkerDescribed(Message, frozen=True, kw_only=True):
    """The oldest first; of many requests or leases only so many are listed. What is read how quickly from whom stands
    in `load.rates.transfers`. `servers`: that are attached to it. `last_steps`: what came, where from, and what was
    decided on it, for people; the latest last."""

    load: WorkerLoad
    requests: tuple[HeldRequest, ...] = ()
    leases: tuple[HeldLease, ...] = ()
    num_requests: Number = 0
    num_leases: Number = 0
    servers: tuple[AttachedServer, ...] = ()
    last_steps: tuple[str, ...] = ()


class DescribeRequest(Message, frozen=True, kw_only=True):
    """Where is this request now, and since when?"""


class RequestDescribed(Message, frozen=True, kw_only=True):
    """Where a request is. `phase_age_ms`: for how long it has been there; `left_ms`: until its deadline."""

    request_id: RequestId
    phase: RequestPhase
    phase_age_ms: Number = 0
    age_ms: Number = 0
    left_ms: Number = 0
    gateway_id: GatewayId = GatewayId("")
    attempt: Number = 0
    prefill_worker: str = ""
    decode_worker: str = ""
    num_prompt_tokens: Number = 0
    num_tokens: Number = 0
    max_tokens: Number = 0
    detail: str = ""
    """Why it ended, or why this is not its first attempt."""


class StoryMessage(RequestMessage, frozen=True, kw_only=True):
    """What happened, `age_ms` after the gateway had accepted the request."""

    gateway_id: GatewayId
    age_ms: Number = 0


class RequestAccepted(StoryMessage, frozen=True, kw_only=True):
    """The body is read, checked and tokenized: a placement is asked for."""

    num_prompt_tokens: Number
    max_tokens: Number
    tenant: str = ""


class RequestPlaced(StoryMessage, frozen=True, kw_only=True):
    """The attempt goes to these workers. Without a `decode_worker` the first serves it alone."""

    prefill_worker: WorkerId
    decode_worker: WorkerId | None = None


class FirstTokenReceived(StoryMessage, frozen=True, kw_only=True):
    """The answer's first token is on its way to the client."""


class RequestResumed(StoryMessage, frozen=True, kw_only=True):
    """The attempt before this one has failed, `reason` says why; this one goes on after what the client has had."""

    num_answered_tokens: Number
    reason: str
    moved_by: WorkerId | None = None
    """Who has migrated it; None: the attempt has failed."""


class RequestFinished(StoryMessage, frozen=True, kw_only=True):
    """The answer is complete."""

    finish_reason: FinishReason
    num_tokens: Number


class RequestFailed(StoryMessage, frozen=True, kw_only=True):
    """The request has ended with an error. `status` is HTTP's, for an answer that had not begun."""

    code: str
    detail: str
    status: Number
    num_tokens: Number


class RequestCancelled(StoryMessage, frozen=True, kw_only=True):
    """Nobody wants the answer any more."""

    reason: str
    num_tokens: Number


class KeepTrace(Message, frozen=True, kw_only=True):
    """Export what there is of this trace, though it was not sampled. `trace_id`: 32 hexadecimal digits."""

    trace_id: str
    reason: str
