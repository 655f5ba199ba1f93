"""A chat's turns as OpenAI's clients send them, and as they send our own answers back."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from services.gateway import limits
from services.gateway.api.invalid import InvalidRequestError
from services.gateway.api.template import ROLES, ChatMessage, Sent, ToolCall

_TEXT_FIELDS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Kinds of part that are understood, and the field that has each one's text."""
_NEUTRAL_PART_FIELDS = frozenset(("cache_control", "prompt_cache_breakpoint", "annotations", "logprobs"))


class FunctionBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    arguments: str | None = None
    """JSON, as the model wrote it; of a function without any parameters some write nothing."""


class CallBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`index` is what deltas are joined by: clients send it back with the rest."""

    function: FunctionBody
    id: str | None = None
    type: str | None = None
    index: int | None = None


class MessageBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`annotations` and `provider_specific_fields` are of an answer, and mean nothing to the model; so are those that
    must be null: clients send whole answers back."""

    role: str
    content: Sent[str | list[dict[str, Any]]] = msgspec.UNSET
    name: Sent[str] = msgspec.UNSET
    refusal: str | None = None
    reasoning_content: Sent[str] = msgspec.UNSET
    reasoning: str | None = None
    """As `reasoning_content`."""
    tool_calls: Sent[list[CallBody]] = msgspec.UNSET
    """An empty list is no call."""
    tool_call_id: Sent[str] = msgspec.UNSET
    annotations: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    provider_specific_fields: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    audio: None = None
    function_call: None = None


def messages_of(bodies: Sequence[MessageBody]) -> list[ChatMessage]:
    """Return the conversation. Raises InvalidRequestError."""
    if not bodies:
        raise InvalidRequestError("`messages` is empty", "messages")
    if len(bodies) > limits.MAX_MESSAGES:
        raise InvalidRequestError(f"`messages` holds more than {limits.MAX_MESSAGES}", "messages")
    return [_message(body, f"messages[{index}]") for index, body in enumerate(bodies)]


def _message(body: MessageBody, where: str) -> ChatMessage:
    role = body.role
    if role not in ROLES:
        message = f"`{where}.role` must be one of {', '.join(ROLES)}, not {role!r}"
        raise InvalidRequestError(message, f"{where}.role")
    # Fields have second names: an answer that was refused has its text in `refusal`, and reasoning has two spellings.
    content, reasoning = body.content, body.reasoning_content
    if content is None or content is msgspec.UNSET:
        content = content if body.refusal is None else body.refusal
    else:
        content = _text(content, f"{where}.content")
    if not isinstance(reasoning, str):
        reasoning = reasoning if body.reasoning is None else body.reasoning
    # Refuse fields that only another role has, instead of passing over them.
    for name, value in (("tool_calls", body.tool_calls), ("reasoning_content", reasoning), ("refusal", body.refusal)):
        if value and role != "assistant":
            raise InvalidRequestError(f"`{where}.{name}`: only an assistant's message has it", f"{where}.{name}")
    if body.tool_call_id and role != "tool":
        raise InvalidRequestError(f"`{where}.tool_call_id`: only a tool's message has it", f"{where}.tool_call_id")
    # Only calls, or an assistant's reasoning, can replace the content.
    if not isinstance(content, str) and not body.tool_calls and not (role == "assistant" and reasoning):
        raise InvalidRequestError(f"`{where}.content` is missing", f"{where}.content")
    return ChatMessage(
        role=role,
        content=content,
        name=body.name,
        reasoning_content=reasoning,
        tool_calls=_calls(body.tool_calls, f"{where}.tool_calls"),
        tool_call_id=body.tool_call_id,
    )


def _text(content: str | Sequence[Mapping[str, Any]], where: str) -> str:
    if isinstance(content, str):
        return content
    return "".join(_text_of_part(part, f"{where}[{index}]") for index, part in enumerate(content))


def _text_of_part(part: Mapping[str, Any], where: str) -> str:
    kind = part.get("type")
    field = _TEXT_FIELDS.get(kind) if isinstance(kind, str) else None
    text = part.get(field) if field is not None else None
    if not isinstance(text, str):
        raise InvalidRequestError(f"`{where}` is a part of type {kind!r}: only text is supported", where)
    if unknown := sorted(part.keys() - {"type", field} - _NEUTRAL_PART_FIELDS):
        name = f"{where}.{unknown[0]}"
        raise InvalidRequestError(f"there is no field `{name}` in a part of type {kind!r}", name, "unknown_parameter")
    return text


def _calls(bodies: Sent[list[CallBody]], where: str) -> Sent[tuple[ToolCall, ...]]:
    if not bodies:
        return None if bodies is None else msgspec.UNSET
    return tuple(_call(body, f"{where}[{at}]") for at, body in enumerate(bodies))


def _call(body: CallBody, where: str) -> ToolCall:
    if body.type not in (None, "function"):
        raise InvalidRequestError(f"`{where}.type` is {body.type!r}: only functions are supported", f"{where}.type")
    arguments = body.function.arguments or ""
    return ToolCall(id=body.id or "", name=body.function.name, arguments=arguments if arguments.strip() else "{}")
