"""What answers of all kinds share: usage, errors, models, and their encoding."""

import msgspec

from schemas.ids import RequestId
from schemas.request import Reuse
from services.gateway.api.invalid import InvalidRequestError
from services.gateway.request.answer_usage import AnswerUsage, PromptSources
from services.gateway.request.events import FailRequest

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
"""A comment: whoever reads events ignores it."""
JSON_TYPE = b"application/json"
EVENT_STREAM_TYPE = b"text/event-stream; charset=utf-8"

_LINE_ENDS = [(char.encode(), b"\\u%04x" % ord(char)) for char in "\u0085\u2028\u2029"]

CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"

encode_reply = msgspec.json.Encoder().encode


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorReply(msgspec.Struct, frozen=True):
    error: ErrorBody


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class MeshUsageReply(PromptSources, frozen=True, kw_only=True):
    """Our extension: what happened to the request. The sources are those of the worker that decoded; `prefill` has
    the same of the prefill worker of a split request. Both are of the first attempt that gave tokens. Workers are
    those of the last attempt of the last choice; of a prompt with several choices the first one's sources are given."""

    prefill: PromptSources | None
    request_id: str
    carrier: str
    prefill_worker: str
    decode_worker: str
    num_retries: int
    resumed_tokens: int
    """What the client had before the last attempt that went on with it."""
    reuse: Reuse | None
    """Of the first prompt: why nothing was cached; None: the scheduler did not report it."""


class CountsReply(msgspec.Struct, frozen=True, kw_only=True):
    """A streamed answer's tokens so far, over all its choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class UsageReply(CountsReply, frozen=True, kw_only=True):
    prompt_tokens_details: PromptTokensDetails
    kvmesh: MeshUsageReply


class ModelReply(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    created: int
    object: str = "model"
    owned_by: str = "kvmesh"
    context_length: int = 0


class ModelsReply(msgspec.Struct, frozen=True, kw_only=True):
    data: tuple[ModelReply, ...]
    object: str = "list"


class VersionReply(msgspec.Struct, frozen=True):
    version: str


class HealthReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    status: str
    reason: str = ""


def usage_of(request_id: RequestId, served: AnswerUsage) -> UsageReply:
    """Return the usage. OpenAI's cached tokens are those that nobody had to compute for this request."""
    sources = served.sources
    # An attempt that is not split has no decode worker: its prefill worker decoded too.
    mesh = MeshUsageReply(
        request_id=request_id,
        cached_tokens=sources.cached_tokens,
        transferred_tokens=sources.transferred_tokens,
        recomputed_tokens=sources.recomputed_tokens,
        transferred_from=sources.transferred_from,
        prefill=served.prefill,
        carrier=served.carrier,
        prefill_worker=served.prefill_worker or "",
        decode_worker=served.decode_worker or served.prefill_worker or "",
        num_retries=served.num_retries,
        resumed_tokens=served.resumed_tokens,
        reuse=served.reuse,
    )
    # Count reused tokens on the worker that computed the prompt. Where a split request lacks that worker's report, the
    # transferred tokens are those of the hand-over: the prefill worker computed them for this request.
    computing = served.prefill or sources
    is_split = mesh.decode_worker != mesh.prefill_worker
    reused = computing.cached_tokens + (0 if is_split and not served.prefill else computing.transferred_tokens)
    return UsageReply(
        prompt_tokens=served.num_prompt_tokens,
        completion_tokens=served.num_completion_tokens,
        total_tokens=served.num_prompt_tokens + served.num_completion_tokens,
        prompt_tokens_details=PromptTokensDetails(min(reused, served.num_prompt_tokens)),
        kvmesh=mesh,
    )


def event(reply: msgspec.Struct | dict[str, object], kind: str = "") -> bytes:
    """Return one server-sent event. Characters at which only some clients see a line's end (httpx, by Python's
    `splitlines`) are escaped."""
    data = encode_reply(reply)
    for character, escaped in _LINE_ENDS:
        data = data.replace(character, escaped)
    return (b"event: %b\ndata: %b\n\n" % (kind.encode(), data)) if kind else b"data: %b\n\n" % data


def error_of_fail(fail: FailRequest) -> ErrorReply:
    kind = {400: "invalid_request_error", 429: "rate_limit_error", 504: "timeout_error"}.get(
        fail.status, "server_error"
    )
    message = fail.message
    if fail.code == CONTEXT_LENGTH_EXCEEDED:
        message = too_long("what its workers have room for", message)
    return ErrorReply(ErrorBody(message=message, type=kind, code=fail.code))


def too_long(maximum: str, reason: str) -> str:
    """Return that a prompt is too long, in the words that client libraries look for: litellm for OpenAI's, langchain
    for the code."""
    return f"This model's maximum context length is {maximum}. However, {reason} ({CONTEXT_LENGTH_EXCEEDED})."


def error_of_invalid(error: InvalidRequestError) -> ErrorReply:
    body = ErrorBody(message=error.message, type="invalid_request_error", param=error.param, code=error.code)
    return ErrorReply(body)


def retry_after_of(fail: FailRequest) -> str:
    """Return the Retry-After header's value in whole seconds; empty where asking again will not help."""
    return str(-(-fail.retry_after_ms // 1000)) if fail.retry_after_ms > 0 else ""
