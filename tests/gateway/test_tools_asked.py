"""What a request says of tools: taken, or refused by the name of the field."""

from typing import Any

import pytest

from services.gateway import limits
from services.gateway.api.invalid import InvalidRequestError
from services.gateway.api.tools.asked import ToolChoice, tool_choice_of, tools_of

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}


def tool(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "get_weather", **function}}


def test_a_tool() -> None:
    given = tool(description="What it is like", parameters=SCHEMA, strict=True)
    (found,) = tools_of([given])
    assert (found.name, found.parameters, found.strict) == ("get_weather", SCHEMA, True)
    assert found.shown == tool(description="What it is like", parameters=SCHEMA), "strict is said to us"


def test_a_tool_that_says_little() -> None:
    (found,) = tools_of([tool(description=None, parameters=None, strict=None)])
    assert (found.parameters, found.strict) == ({"type": "object", "properties": {}}, False)
    assert found.shown == tool()
    assert tools_of(None) == tools_of([]) == ()


def test_the_fields_stay_in_their_order() -> None:
    given = {"function": {"parameters": SCHEMA, "name": "b"}, "type": "function"}
    assert str(tools_of([given])[0].shown) == str(given)


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"type": "function"}, "tools[0]"),
        ({"function": {"name": "a"}}, "tools[0]"),
        ({"type": "code_interpreter", "function": {"name": "a"}}, "tools[0].type"),
        ({"type": "function", "function": {}}, "tools[0].function"),
        ({"type": "function", "function": "a"}, "tools[0].function"),
        ({"type": "function", "function": {"name": "a"}, "cache_control": {}}, "tools[0]"),
        (tool(name=1), "tools[0].function.name"),
        (tool(name=""), "tools[0].function.name"),
        (tool(name="get weather"), "tools[0].function.name"),
        (tool(name="a\n"), "tools[0].function.name"),
        (tool(name="gêt"), "tools[0].function.name"),
        (tool(name="a" * (limits.MAX_TOOL_NAME_CHARACTERS + 1)), "tools[0].function.name"),
        (tool(description=["a"]), "tools[0].function.description"),
        (tool(parameters="{}"), "tools[0].function.parameters"),
        (tool(parameters={"type": "string"}), "tools[0].function.parameters"),
        (tool(parameters={"type": ["object", "null"]}), "tools[0].function.parameters"),
        (tool(strict="yes"), "tools[0].function.strict"),
        (tool(parametres=SCHEMA), "tools[0].function"),
    ],
)
def test_what_is_no_tool(given: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        tools_of([given])
    assert caught.value.param == param and caught.value.status == 400


def test_too_much_of_it() -> None:
    assert len(tools_of([tool(name=f"t{number}") for number in range(limits.MAX_TOOLS)])) == limits.MAX_TOOLS
    deep: dict[str, Any] = {}
    for _ in range(limits.MAX_JSON_DEPTH):
        deep = {"items": deep}
    for given, text in (
        ([tool(name=f"t{number}") for number in range(limits.MAX_TOOLS + 1)], "more than"),
        ([tool(description="x" * limits.MAX_TOOLS_BYTES)], "bytes"),
        ([tool(parameters=deep)], "deeper"),
        ([tool(), tool()], "two `tools`"),
    ):
        with pytest.raises(InvalidRequestError, match=text):
            tools_of(given)


TOOLS = tools_of([tool(), tool(name="now")])
NOW = {"type": "function", "function": {"name": "now"}}


@pytest.mark.parametrize(
    ("given", "choice"),
    [
        (None, ToolChoice(mode="auto")),
        ("auto", ToolChoice(mode="auto")),
        ("none", ToolChoice(mode="none")),
        ("required", ToolChoice(mode="required")),
        (NOW, ToolChoice(mode="required", name="now")),
    ],
)
def test_choices(given: object, choice: ToolChoice) -> None:
    assert tool_choice_of(given, TOOLS) == choice


@pytest.mark.parametrize("given", [None, "auto", "none"])
def test_without_tools_none_is_chosen(given: object) -> None:
    assert tool_choice_of(given, ()) == ToolChoice(mode="none")


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ("any", "tool_choice"),
        ("", "tool_choice"),
        (7, "tool_choice"),
        ([], "tool_choice"),
        ({}, "tool_choice"),
        ({"type": "function"}, "tool_choice"),
        ({"type": "function", "name": "now"}, "tool_choice"),
        ({"type": "function", "function": {"name": 1}}, "tool_choice.function.name"),
        ({"type": "function", "function": {"name": "later"}}, "tool_choice"),
        ({"type": "custom", "function": {"name": "now"}}, "tool_choice.type"),
    ],
)
def test_what_is_no_choice(given: object, param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        tool_choice_of(given, TOOLS)
    assert caught.value.param == param


@pytest.mark.parametrize("given", ["required", NOW])
def test_nothing_can_be_required_of_no_tools(given: object) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        tool_choice_of(given, ())
    assert caught.value.param == "tool_choice"
