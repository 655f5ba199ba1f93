"""What a request asks of tools: checked, and bounded."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar

import msgspec

from services.gateway import limits
from services.gateway.api.invalid import InvalidRequestError
from services.gateway.api.json_schema import bounded_json
from services.gateway.api.template import ChatTemplateError, check_size
from services.gateway.api.tools.parser import NAME_CHARACTERS

BodyT = TypeVar("BodyT")
ToolMode = Literal["none", "auto", "required"]

_NAME = re.compile(f"{NAME_CHARACTERS}{{1,{limits.MAX_TOOL_NAME_CHARACTERS}}}")


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """A function that the model may call. `parameters` is a JSON schema of an object.

    `shown` is what a chat template sees: the client's own JSON object without fields that are null, and without
    `strict`, which is meant for us.
    """

    name: str
    parameters: Mapping[str, Any]
    strict: bool
    shown: Mapping[str, Any]


class ToolChoice(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the model may, must or must not call. `name` is the tool that it must call, where only one will do."""

    mode: ToolMode
    name: str = ""


class _FunctionBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _ToolBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: str
    function: _FunctionBody


class _NamedFunction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str


class _NamedBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: str
    function: _NamedFunction


def tools_of(given: Sequence[Mapping[str, Any]] | None) -> tuple[Tool, ...]:
    """Return the tools of a request's `tools`. Raises InvalidRequestError."""
    if not given:
        return ()
    if len(given) > limits.MAX_TOOLS:
        raise InvalidRequestError(f"`tools` holds {len(given)}, more than {limits.MAX_TOOLS}", "tools")
    try:
        check_size(given, limits.MAX_TOOLS_BYTES, "tools")
    except ChatTemplateError as error:
        raise InvalidRequestError(str(error), error.param) from error
    tools = tuple(_tool(each, f"tools[{index}]") for index, each in enumerate(given))
    names = [tool.name for tool in tools]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise InvalidRequestError(f"two `tools` have the name {name!r}", f"tools[{index}].function.name")
    return tools


def tool_choice_of(given: object, tools: Sequence[Tool]) -> ToolChoice:
    """Return what a request's `tool_choice` asks for. Raises InvalidRequestError."""
    if given is None:
        return ToolChoice(mode="auto" if tools else "none")
    if given in ("none", "auto", "required"):
        if given == "required" and not tools:
            raise InvalidRequestError("`tool_choice` is required, and there are no `tools`", "tool_choice")
        return ToolChoice(mode=given if tools else "none")
    if isinstance(given, str):
        raise InvalidRequestError(f"`tool_choice` must be none, auto, required or a tool, not {given!r}", "tool_choice")
    body = _converted(given, _NamedBody, "tool_choice")
    _check_function(body.type, "tool_choice")
    name = body.function.name
    if name not in {tool.name for tool in tools}:
        raise InvalidRequestError(f"`tool_choice` names {name!r}, which is not among `tools`", "tool_choice")
    return ToolChoice(mode="required", name=name)


def _tool(given: Mapping[str, Any], where: str) -> Tool:
    body = _converted(given, _ToolBody, where)
    _check_function(body.type, where)
    function = body.function
    if not _NAME.fullmatch(function.name):
        message = f"must have 1 to {limits.MAX_TOOL_NAME_CHARACTERS} of a-z, A-Z, 0-9, _, . and -"
        raise InvalidRequestError(f"`{where}.function.name` {message}, not {function.name!r}", f"{where}.function.name")
    name, parameters = f"{where}.function.parameters", function.parameters or {"properties": {}}
    bounded_json(parameters, name)
    if parameters.get("type", "object") != "object":
        raise InvalidRequestError(f"`{name}` must be a schema of type 'object': arguments are one", name)
    return Tool(
        name=function.name,
        parameters={"type": "object", **parameters},
        strict=bool(function.strict),
        shown={**given, "function": _shown(given["function"])},
    )


def _shown(function: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in function.items() if value is not None and name != "strict"}


def _check_function(kind: str, where: str) -> None:
    if kind != "function":
        message = f"`{where}.type` is {kind!r}: only functions are supported"
        raise InvalidRequestError(message, f"{where}.type", "unsupported_parameter")


def _converted(given: object, kind: type[BodyT], where: str) -> BodyT:
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        path = re.search(r"at `\$([^`]*)`", str(error))
        raise InvalidRequestError(f"`{where}`: {error}", where + (path[1] if path else ""), "invalid_type") from error
