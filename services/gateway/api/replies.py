"""OpenAI's API as it is answered: structs for whole answers, streamed chunks and errors, and their encoding."""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from schemas.ids import RequestId
from schemas.request import FinishReason
from services.gateway.api.openai import InvalidRequestError
from services.gateway.request.answer_usage import AnswerUsage, PromptSources
from services.gateway.request.events import FailRequest

DONE = b"data: [DONE]\n\n"
JSON_TYPE = b"application/json"
EVENT_STREAM_TYPE = b"text/event-stream; charset=utf-8"

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
    """Our extension: what happened to the request. The sources are those of the worker that decoded; `prefill` says
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


class UsageReply(msgspec.Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    kvmesh: MeshUsageReply


class TextChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    text: str
    logprobs: None = None
    finish_reason: FinishReason | None = None
    token_ids: tuple[int, ...] | msgspec.UnsetType = msgspec.UNSET
    """Our extension: where the request says `return_token_ids`."""


class Delta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    role: str = ""
    content: str | msgspec.UnsetType = msgspec.UNSET


class DeltaChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    delta: Delta
    logprobs: None = None
    finish_reason: FinishReason | None = None
    token_ids: tuple[int, ...] | msgspec.UnsetType = msgspec.UNSET


class AssistantMessage(msgspec.Struct, frozen=True, kw_only=True):
    content: str
    role: str = "assistant"
    refusal: None = None


class MessageChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    message: AssistantMessage
    logprobs: None = None
    finish_reason: FinishReason | None = None
    token_ids: tuple[int, ...] | msgspec.UnsetType = msgspec.UNSET


class FinishedChoice(NamedTuple):
    """A choice of a whole answer. `token_ids` None: not asked for."""

    text: str
    finish_reason: FinishReason | None
    token_ids: tuple[int, ...] | None


Choice = TextChoice | DeltaChoice | MessageChoice


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """A whole answer, or one chunk of a streamed one."""

    id: str
    object: str
    created: int
    model: str
    choices: tuple[Choice, ...]
    usage: UsageReply | msgspec.UnsetType | None = msgspec.UNSET


class ModelReply(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    created: int
    object: str = "model"
    owned_by: str = "kvmesh"
    context_length: int = 0


class ModelsReply(msgspec.Struct, frozen=True, kw_only=True):
    data: tuple[ModelReply, ...]
    object: str = "list"


class HealthReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    status: str
    reason: str = ""


class Style:
    """How one HTTP request is answered: the fields that all its chunks share."""

    def __init__(self, *, chat: bool, hex_id: str, created: int, model: str, include_usage: bool) -> None:
        self._chat = chat
        self._id = f"{'chatcmpl' if chat else 'cmpl'}-{hex_id}"
        self._created = created
        self._model = model
        self._chunk_object = "chat.completion.chunk" if chat else "text_completion"
        self._chunk_usage = None if include_usage else msgspec.UNSET

    def chunk(
        self,
        index: int,
        text: str,
        *,
        first: bool,
        finish_reason: FinishReason | None = None,
        token_ids: tuple[int, ...] | None = None,
    ) -> bytes:
        """Return one event of a stream. `first`: this choice's first, which names the role in a chat."""
        choice: Choice
        ids = msgspec.UNSET if token_ids is None else token_ids
        if self._chat:
            # OpenAI's last delta is empty.
            content = text if text or finish_reason is None else msgspec.UNSET
            delta = Delta(role="assistant" if first else "", content=content)
            choice = DeltaChoice(index=index, delta=delta, finish_reason=finish_reason, token_ids=ids)
        else:
            choice = TextChoice(index=index, text=text, finish_reason=finish_reason, token_ids=ids)
        return event(self._reply((choice,), self._chunk_object, self._chunk_usage))

    def usage_chunk(self, usage: UsageReply) -> bytes:
        return event(self._reply((), self._chunk_object, usage))

    def whole(self, answers: Sequence[FinishedChoice], usage: UsageReply) -> bytes:
        """Return the whole answer's JSON."""
        choices: list[Choice] = []
        for index, (text, reason, token_ids) in enumerate(answers):
            ids = msgspec.UNSET if token_ids is None else token_ids
            if self._chat:
                message = AssistantMessage(content=text)
                choices.append(MessageChoice(index=index, message=message, finish_reason=reason, token_ids=ids))
            else:
                choices.append(TextChoice(index=index, text=text, finish_reason=reason, token_ids=ids))
        kind = "chat.completion" if self._chat else "text_completion"
        return encode_reply(self._reply(tuple(choices), kind, usage))

    def _reply(self, choices: tuple[Choice, ...], kind: str, usage: UsageReply | msgspec.UnsetType | None) -> Reply:
        return Reply(id=self._id, object=kind, created=self._created, model=self._model, choices=choices, usage=usage)


def usage_of(request_id: RequestId, served: AnswerUsage) -> UsageReply:
    """Return the usage. OpenAI's cached tokens are those that nobody had to compute for this request."""
    sources = served.sources
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
    )
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


def event(reply: msgspec.Struct) -> bytes:
    """Return one server-sent event."""
    return b"data: " + encode_reply(reply) + b"\n\n"


def error_of_fail(fail: FailRequest) -> ErrorReply:
    kind = {400: "invalid_request_error", 429: "rate_limit_error", 504: "timeout_error"}.get(
        fail.status, "server_error"
    )
    return ErrorReply(ErrorBody(message=fail.message, type=kind, code=fail.code))


def error_of_invalid(error: InvalidRequestError) -> ErrorReply:
    body = ErrorBody(message=error.message, type="invalid_request_error", param=error.param, code=error.code)
    return ErrorReply(body)


def retry_after_of(fail: FailRequest) -> str:
    """Return the Retry-After header's value in whole seconds; empty where asking again will not help."""
    return str(-(-fail.retry_after_ms // 1000)) if fail.retry_after_ms > 0 else ""
