"""OpenAI's Responses API as it is asked: a body is understood as that of a chat."""

import contextlib
import re
from collections.abc import Generator, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from schemas.logprobs import NumTop
from services.gateway.api.constraints import (
    JsonObjectFormat,
    JsonSchemaFormat,
    NamedSchema,
    ResponseFormat,
    TextFormat,
)
from services.gateway.api.invalid import InvalidRequestError
from services.gateway.api.json_schema import Schema
from services.gateway.api.messages import CallBody, FunctionBody, MessageBody
from services.gateway.api.openai import ChatBody, SharedBody, Tokens, about, decode_as
from services.gateway.api.parameters import Route

ItemT = TypeVar("ItemT")

LOGPROBS = "message.output_text.logprobs"
_NEUTRAL_INCLUDES = frozenset(("reasoning.encrypted_content",))
"""What is thought here is sent in clear text, and taken back so."""


class SchemaFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="json_schema"):
    name: str
    schema: Schema
    strict: bool | None = None
    description: str | None = None


class TextOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: TextFormat | JsonObjectFormat | SchemaFormat | None = None
    verbosity: Literal["medium"] | None = None


class ReasoningOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is thought is returned whole (`PARTS` in `parameters.py`)."""

    effort: str | None = None
    summary: Literal["auto"] | None = None
    generate_summary: Literal["auto"] | None = None


class PaddingOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_obfuscation: bool | None = None
    """As in `StreamOptions`."""


class ResponsesBody(SharedBody, frozen=True, kw_only=True):
    input: Annotated[str | list[dict[str, Any]], about("A text, or the items of the conversation so far.")]
    instructions: Annotated[str | None, about("What a system's message would say, before the input.")] = None
    max_output_tokens: Annotated[Tokens | None, about("Tokens of the answer at most.")] = None
    text: Annotated[TextOptions | None, about("`format`: any text, any JSON object, or a JSON Schema's.")] = None
    tools: Annotated[list[dict[str, Any]] | None, about("Functions that the model may call.")] = None
    tool_choice: Annotated[str | dict[str, Any] | None, about("none, auto, required, or one function.")] = None
    parallel_tool_calls: Annotated[bool | None, about("False: an answer has one call at most.")] = None
    reasoning: Annotated[ReasoningOptions | None, about("`effort`, where the template knows it.")] = None
    include: Annotated[list[str] | None, about(f"`{LOGPROBS}`: logprobs of the answer's tokens.")] = None
    top_logprobs: Annotated[NumTop | None, about("With those of so many likeliest tokens.")] = None
    metadata: Annotated[dict[str, str] | None, about("Returned as given.")] = None
    stream_options: Annotated[PaddingOptions | None, about("Padding, of which there is none.")] = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, about("Variables of the model's template.", "vLLM")] = None


class Responses:
    """A request of /v1/responses, and the chat that it comes to. Raises InvalidRequestError."""

    def __init__(self, payload: bytes) -> None:
        self.body = decode_as(payload, ResponsesBody, Route.RESPONSES)
        self._fields: list[str] = []
        """Of each of the chat's messages: the field that it comes from."""
        with self.own_names():
            self.chat = self._chat()

    @contextlib.contextmanager
    def own_names(self) -> Generator[None]:
        """What is refused of the chat is refused under the names that its fields have here."""
        try:
            yield
        except InvalidRequestError as error:
            param = error.param
            own = None if param is None else self._own_name(param)
            message = error.message if param is None or own is None else error.message.replace(param, own)
            raise InvalidRequestError(message, own, error.code, error.status) from error

    def _own_name(self, param: str) -> str:
        if found := re.match(r"messages\[(\d+)\]", param):
            return self._fields[int(found[1])] + param[found.end() :]
        for chats, own in _OWN_NAMES:
            param = re.sub(chats, own, param)
        return param

    def _chat(self) -> ChatBody:
        body = self.body
        if body.stream_options not in (None, PaddingOptions()) and not body.stream:
            raise InvalidRequestError("`stream_options` goes with `stream: true`", "stream_options")
        shared = {name: getattr(body, name) for name in SharedBody.__struct_fields__}
        text, reasoning = body.text or TextOptions(), body.reasoning or ReasoningOptions()
        return ChatBody(
            **shared,
            messages=self._messages(),
            max_completion_tokens=body.max_output_tokens,
            response_format=_format(text.format),
            tools=None if body.tools is None else [_tool(tool) for tool in body.tools],
            tool_choice=_tool_choice(body.tool_choice),
            parallel_tool_calls=body.parallel_tool_calls,
            reasoning_effort=reasoning.effort,
            chat_template_kwargs=body.chat_template_kwargs,
            logprobs=_wants_logprobs(body),
            top_logprobs=body.top_logprobs,
        )

    def _messages(self) -> list[MessageBody]:
        """Return the conversation: what an assistant thought, wrote and called one after another is one message."""
        body = self.body
        messages: list[MessageBody] = []
        if body.instructions is not None:
            messages.append(MessageBody(role="system", content=body.instructions))
            self._fields.append("instructions")
        if isinstance(body.input, str):
            self._fields.append("input")
            return [*messages, MessageBody(role="user", content=body.input)]
        is_open = False
        """The last message is an assistant's that another item may add to."""
        for index, given in enumerate(body.input):
            where = f"input[{index}]"
            message = _message(given, where)
            joined = _joined(messages[-1], message) if is_open else None
            if joined is not None:
                messages[-1] = joined
                continue
            messages.append(message)
            self._fields.append(where)
            is_open = message.role == "assistant"
        return messages


class _Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`id`, `status` and `phase` are of an answer, and mean nothing to the model."""

    role: str
    content: str | list[dict[str, Any]]
    type: str = "message"
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class _Call(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    type: str
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: str | None = None


class _CallOutput(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    type: str
    call_id: str
    output: str | list[dict[str, Any]]
    id: str | None = None
    status: str | None = None


class _Thought(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["reasoning_text"]
    text: str


class _Reasoning(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Its summary repeats its content."""

    type: str
    summary: list[Any] = []
    content: list[_Thought] | None = None
    encrypted_content: None = None
    id: str | None = None
    status: str | None = None


class _Function(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    type: Literal["function"]
    name: str


_OWN_NAMES = (
    (r"^messages$", "input"),
    (r"^response_format\.json_schema\b", "text.format"),
    (r"^response_format\b", "text.format"),
    (r"^max_completion_tokens$", "max_output_tokens"),
    (r"^reasoning_effort$", "reasoning.effort"),
    (r"^(tools\[\d+\])\.function\b", r"\1"),
)


def _message(given: Mapping[str, Any], where: str) -> MessageBody:
    """Return one item of the input as a message."""
    kind = given.get("type", "message")
    if kind == "message":
        item = _item(given, _Message, where)
        return MessageBody(role=item.role, content=item.content)
    if kind == "function_call":
        call = _item(given, _Call, where)
        function = FunctionBody(name=call.name, arguments=call.arguments)
        return MessageBody(role="assistant", tool_calls=[CallBody(id=call.call_id, function=function)])
    if kind == "function_call_output":
        output = _item(given, _CallOutput, where)
        return MessageBody(role="tool", content=output.output, tool_call_id=output.call_id)
    if kind == "reasoning":
        thoughts = _item(given, _Reasoning, where).content or ()
        return MessageBody(
            role="assistant", reasoning_content="".join(thought.text for thought in thoughts), content=""
        )
    why = "no answer is stored" if kind == "item_reference" else "only messages, calls of functions and reasoning are"
    raise InvalidRequestError(
        f"`{where}` is of type {kind!r}, which is not supported: {why}", where, "unsupported_parameter"
    )


def _joined(before: MessageBody, message: MessageBody) -> MessageBody | None:
    """Return one assistant's message that has what these two have; None: they are two turns."""
    if message.role != "assistant" or message.reasoning_content is not msgspec.UNSET:
        return None
    calls = [*(before.tool_calls or ()), *(message.tool_calls or ())]
    if message.tool_calls:
        return msgspec.structs.replace(before, tool_calls=calls)
    return None if before.content or calls else msgspec.structs.replace(before, content=message.content)


def _item(given: Mapping[str, Any], kind: type[ItemT], where: str) -> ItemT:
    try:
        # Clients send answers back with fields that OpenAI has, and we have not: null.
        return msgspec.convert({name: value for name, value in given.items() if value is not None}, kind)
    except msgspec.ValidationError as error:
        path = re.search(r"at `\$([^`]*)`", str(error))
        raise InvalidRequestError(f"`{where}`: {error}", where + (path[1] if path else ""), "invalid_type") from error


def _format(asked: TextFormat | JsonObjectFormat | SchemaFormat | None) -> ResponseFormat | None:
    if not isinstance(asked, SchemaFormat):
        return asked
    named = NamedSchema(name=asked.name, schema=asked.schema, strict=asked.strict, description=asked.description)
    return JsonSchemaFormat(json_schema=named)


def _tool(given: Mapping[str, Any]) -> dict[str, Any]:
    """A tool as chats have it. What is no function has nothing but its type: it is refused for that."""
    kind = given.get("type")
    if kind != "function":
        return {"type": kind, "function": {"name": "unknown"}}
    return {"type": kind, "function": {name: value for name, value in given.items() if name != "type"}}


def _tool_choice(given: str | Mapping[str, Any] | None) -> str | dict[str, Any] | None:
    if given is None or isinstance(given, str):
        return given
    return {"type": "function", "function": {"name": _item(given, _Function, "tool_choice").name}}


def _wants_logprobs(body: ResponsesBody) -> bool:
    asked: Sequence[str] = body.include or ()
    for name in asked:
        if name != LOGPROBS and name not in _NEUTRAL_INCLUDES:
            raise InvalidRequestError(f"`include`: {name!r} is not supported", "include", "unsupported_parameter")
    if body.top_logprobs and LOGPROBS not in asked:
        raise InvalidRequestError(f"`top_logprobs` needs `include: [{LOGPROBS}]`", "top_logprobs")
    return LOGPROBS in asked
