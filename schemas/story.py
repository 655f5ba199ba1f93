"""The story of a request, told by its gateway for people: `nats sub 'mesh.v1.request.>'`. No service listens.

A request has one `accepted` and one end: `finished`, `failed` or `cancelled`. Ages are milliseconds since `accepted`.
"""

from schemas.ids import GatewayId, WorkerId
from schemas.message import RequestMessage
from schemas.request import FinishReason


class StoryMessage(RequestMessage, frozen=True, kw_only=True):
    """What happened, `age_ms` after the gateway had accepted the request."""

    gateway_id: GatewayId
    age_ms: int = 0


class RequestAccepted(StoryMessage, frozen=True, kw_only=True):
    """The body is read, checked and tokenized: a placement is asked for."""

    num_prompt_tokens: int
    max_tokens: int
    tenant: str = ""


class RequestPlaced(StoryMessage, frozen=True, kw_only=True):
    """The attempt goes to these workers. Without a `decode_worker` the first serves it alone."""

    prefill_worker: WorkerId
    decode_worker: WorkerId | None = None


class FirstTokenHeard(StoryMessage, frozen=True, kw_only=True):
    """The answer's first token is on its way to the client."""


class RequestResumed(StoryMessage, frozen=True, kw_only=True):
    """The attempt before this one came to nothing more, `reason` says why: what the client has had goes along."""

    num_answered_tokens: int
    reason: str


class RequestFinished(StoryMessage, frozen=True, kw_only=True):
    finish_reason: FinishReason
    num_tokens: int


class RequestFailed(StoryMessage, frozen=True, kw_only=True):
    """`status` is HTTP's, for an answer that had not begun."""

    code: str
    detail: str
    status: int
    num_tokens: int


class RequestCancelled(StoryMessage, frozen=True, kw_only=True):
    """Nobody wants the answer any more."""

    reason: str
    num_tokens: int
