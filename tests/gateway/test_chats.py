"""Tools and reasoning over HTTP: what the model is shown, what its answer is held to, and how that is told."""

import contextlib
import dataclasses
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from openai.types.chat import ChatCompletionMessageFunctionToolCall
from tokenizers import Tokenizer

from schemas.block import unpack_tokens
from services.gateway.api.constraints import understand
from services.gateway.api.invalid import InvalidRequestError
from services.gateway.api.openai import decode_body
from services.gateway.api.prepare import GatewayModel, Prepared, prepare
from services.gateway.api.text import StopMatcher, TextCodec
from tests.engine.grammar_rig import Checkpoint
from tests.gateway.conftest import OpenRig, Rig

PATH = "/v1/chat/completions"
USER = [{"role": "user", "content": "How is it in Oslo?"}]
PARAMETERS = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "now", "parameters": PARAMETERS}}
CLOCK = {"type": "function", "function": {"name": "clock"}}
NAMED = {"type": "function", "function": {"name": "weather"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
BONN = CALL.replace("Oslo", "Bonn")
CLOCK_CALL = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
SCHEMA = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": [1, 2]}}}


@contextlib.asynccontextmanager
async def saying(open_rig: OpenRig, text: str) -> AsyncIterator[Rig]:
    """A gateway whose mesh gives this text."""
    async with open_rig() as rig:
        answer = [*rig.model.codec.encode(text), min(rig.model.eos_token_ids)]
        rig.mesh.answers = lambda prompt: answer
        yield rig


def prepared(model: GatewayModel, **fields: Any) -> Prepared:
    body = {"model": model.name, "messages": USER} | fields
    return prepare(model, decode_body(json.dumps(body).encode(), is_chat=True))


@pytest.fixture(scope="module")
def demo() -> Checkpoint:
    return Checkpoint("demo", Path())


def grammar_of(found: Prepared, demo: Checkpoint) -> str:
    assert found.constraint is not None
    return understand(found.constraint, demo.check)


async def test_a_call_is_told_as_openai_tells_it(open_rig: OpenRig) -> None:
    async with saying(open_rig, f"I look. \n{CALL}\n{CALL}") as rig:
        answer = await rig.client.chat.completions.create(model=rig.model.name, messages=USER, tools=[WEATHER])  # type: ignore[arg-type]
        choice = answer.choices[0]
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I look.")
        calls = choice.message.tool_calls
        assert calls is not None and [call.type for call in calls] == ["function", "function"]
        assert len({call.id for call in calls}) == 2 and all(call.id.startswith("call_") for call in calls)
        assert isinstance(calls[0], ChatCompletionMessageFunctionToolCall)
        assert (calls[0].function.name, json.loads(calls[0].function.arguments)) == ("weather", {"city": "Oslo"})
        prompt = rig.model.codec.decode_shown(prepared(rig.model, tools=[WEATHER]).prompts[0])
        assert '"name": "weather"' in prompt

        history = [*USER, choice.message.model_dump(), {"role": "tool", "tool_call_id": calls[0].id, "content": "mild"}]
        again = await rig.http.post(PATH, json={"model": rig.model.name, "messages": history, "tools": [WEATHER]})
        assert again.status_code == 200, again.text
        shown = rig.model.codec.decode_shown(prepared(rig.model, messages=history, tools=[WEATHER]).prompts[0])
        assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}' in shown and "mild" in shown


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}])
@pytest.mark.parametrize("arguments", ["", "{}", None])
async def test_a_call_without_arguments_in_a_history(
    rig: Rig, content: dict[str, str | None], arguments: str | None
) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "clock", "arguments": arguments}}
    history = [*USER, {"role": "assistant", **content, "tool_calls": [call]}]
    answer = await rig.http.post(PATH, json={"model": rig.model.name, "messages": history, "tools": [CLOCK]})
    assert answer.status_code == 200, answer.text
    shown = rig.model.codec.decode_shown(unpack_tokens(rig.mesh.runs[-1].prompt))
    assert '<|im_start|>assistant\n<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>' in shown
    if arguments is not None and not content:
        items = [{"role": "user", "content": "Hi"}, {"type": "function_call", "call_id": "c1", "name": "clock"}]
        items[1]["arguments"] = arguments
        answer = await rig.http.post("/v1/responses", json={"model": rig.model.name, "input": items})
        assert answer.status_code == 200, answer.text
        shown = rig.model.codec.decode_shown(unpack_tokens(rig.mesh.runs[-1].prompt))
        assert '{"name": "clock", "arguments": {}}' in shown


async def test_a_streamed_call(open_rig: OpenRig) -> None:
    async with saying(open_rig, CALL) as rig:
        body = {"model": rig.model.name, "messages": USER, "tools": [WEATHER, CLOCK], "stream": True}
        stream = await rig.client.chat.completions.create(**body)  # type: ignore[arg-type]
        chunks = [chunk.choices[0] async for chunk in stream]
    deltas = [delta for chunk in chunks for delta in chunk.delta.tool_calls or ()]
    assert {delta.index for delta in deltas} == {0}
    assert [delta.id is not None for delta in deltas] == [True] + [False] * (len(deltas) - 1)
    assert (deltas[0].function.name, deltas[0].type) == ("weather", "function")  # type: ignore[union-attr]
    assert json.loads("".join(d.function.arguments or "" for d in deltas)) == {"city": "Oslo"}  # type: ignore[union-attr]
    assert chunks[-1].finish_reason == "tool_calls" and not any(chunk.delta.content for chunk in chunks)


@pytest.mark.parametrize(
    ("fields", "reason", "num_calls"),
    [
        ({"tool_choice": "required"}, "tool_calls", 2),
        ({"tool_choice": NAMED}, "stop", 2),
        ({"parallel_tool_calls": False}, "tool_calls", 1),
        ({"tool_choice": "none"}, "stop", 0),
    ],
)
async def test_what_the_choice_of_tools_changes(
    open_rig: OpenRig, fields: dict[str, Any], reason: str, num_calls: int
) -> None:
    async with saying(open_rig, f"{CALL}\n{CALL}") as rig:
        body = {"model": rig.model.name, "messages": USER, "tools": [WEATHER, CLOCK]} | fields
        choice = (await rig.http.post(PATH, json=body)).json()["choices"][0]
    assert choice["finish_reason"] == reason
    assert len(choice["message"].get("tool_calls", ())) == num_calls
    assert (choice["message"]["content"] is None) == bool(num_calls)


@pytest.mark.parametrize(
    ("fields", "good", "bad"),
    [
        (
            {"tool_choice": "required"},
            [CALL, CLOCK_CALL, f"{CALL}\n{CLOCK_CALL}"],
            ["Hi", CALL.replace("Oslo", "Bonn")],
        ),
        ({"tool_choice": "required", "parallel_tool_calls": False}, [CALL], [f"{CALL}\n{CLOCK_CALL}"]),
        ({"tool_choice": NAMED}, [CALL], [CLOCK_CALL, "Hi", f"{CALL}\n{CALL}", CALL.replace('"}}', '", "more": 1}}')]),
        ({"tool_choice": NAMED, "response_format": SCHEMA}, [CALL], ["1"]),
        ({"response_format": SCHEMA}, [CALL, "1"], ["Hi", "3", BONN]),
        ({"response_format": SCHEMA, "tool_choice": "none"}, ["1"], [CALL]),
    ],
)
def test_what_an_answer_is_held_to(
    model: GatewayModel, demo: Checkpoint, fields: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    grammar = grammar_of(prepared(model, tools=[WEATHER, CLOCK], **fields), demo)
    for text in good:
        assert demo.takes(grammar, text), text
    for text in bad:
        assert not demo.takes(grammar, text), text


def test_strict_tools_are_held_where_the_model_may_call(model: GatewayModel, demo: Checkpoint) -> None:
    assert prepared(model, tools=[WEATHER]).constraint is None
    strict = {"type": "function", "function": WEATHER["function"] | {"strict": True}}  # type: ignore[operator]
    grammar = grammar_of(prepared(model, tools=[strict]), demo)
    assert demo.takes(grammar, "Hello {") and demo.takes(grammar, f"So: {CALL}")
    assert not demo.takes(grammar, f"So: {BONN}")


@pytest.mark.parametrize(
    ("parameters", "param"),
    [
        ({"type": "object", "properties": {"a": {"not": {}}}}, "tools[1].function.parameters"),
        ({"type": "object", "properties": {"a": {"pattern": "(?=x)"}}}, "tools[1].function.parameters"),
    ],
)
async def test_a_tool_that_cannot_be_held_is_named(rig: Rig, parameters: dict[str, Any], param: str) -> None:
    bad = {"type": "function", "function": {"name": "bad", "parameters": parameters}}
    body = {"model": rig.model.name, "messages": USER, "tools": [WEATHER, bad]}
    refused = await rig.http.post(PATH, json=body | {"tool_choice": "required"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param), refused.text
    assert refused.json()["error"]["code"] == "invalid_schema" and "/properties/a" in refused.json()["error"]["message"]
    assert (await rig.http.post(PATH, json=body)).status_code == 200, "a free call takes any object"


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user", "content": "x", "tool_calls": [{"function": {"name": "a", "arguments": ""}}]}, "tool_calls"),
        ({"role": "user", "content": "x", "tool_call_id": "y"}, "tool_call_id"),
        ({"role": "user", "content": "x", "refusal": "y"}, "refusal"),
        ({"role": "user", "content": None}, "content"),
        ({"role": "assistant"}, "content"),
        ({"role": "user", "content": [{"type": "text", "text": "x", "more": 1}]}, "content[0].more"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "content[0]"),
        ({"role": "user", "content": [{"type": 5}]}, "content[0]"),
        (
            {"role": "assistant", "tool_calls": [{"type": "custom", "function": {"name": "a", "arguments": ""}}]},
            "tool_calls[0].type",
        ),
    ],
)
def test_a_turn_that_cannot_be_taken(model: GatewayModel, message: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        prepared(model, messages=[message])
    assert refused.value.param == f"messages[0].{param}"


@pytest.mark.parametrize("field", ["weight", "functions"])
def test_no_field_of_a_turn_is_passed_over(model: GatewayModel, field: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"unknown field `{field}`"):
        prepared(model, messages=[{"role": "user", "content": "x", field: 1}])


def test_what_clients_send_back_is_taken(model: GatewayModel) -> None:
    plain = [*USER, {"role": "assistant", "content": "Mild."}, *USER]
    back = {
        "role": "assistant", "content": [{"type": "text", "text": "Mild.", "annotations": []}], "refusal": None,
        "annotations": [], "audio": None, "function_call": None, "tool_calls": None, "reasoning_content": None,
        "provider_specific_fields": {"a": 1}, "name": None,
    }  # fmt: skip
    assert prepared(model, messages=[*USER, back, *USER]).prompts == prepared(model, messages=plain).prompts


# Reasoning, with a template of our own: the demo model does not reason.

_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is defined and not enable_thinking %}"
    "<think>\n\n</think>\n\n{% elif opens is defined %}<think>\n{% endif %}{% endif %}"
)


@pytest.fixture(scope="module")
def thinker(model: GatewayModel) -> GatewayModel:

    from services.engine.demo_model import DEMO_MODEL_DIR

    tokenizer = Tokenizer.from_file(str(Path(DEMO_MODEL_DIR) / "tokenizer.json"))
    return dataclasses.replace(model, codec=TextCodec(tokenizer, _TEMPLATE))


def pieces(thinker: GatewayModel, text: str, **fields: Any) -> tuple[str, str]:
    reader = prepared(thinker, **fields).parser.reader(StopMatcher(()))
    found = [*reader.feed(text), *reader.finish()]
    told = {"Reasoning": "", "Content": ""}
    for piece in found:
        told[type(piece).__name__] += piece.text  # type: ignore[union-attr]
    return told["Reasoning"], told["Content"]


def test_reasoning_is_split_off(thinker: GatewayModel) -> None:
    assert pieces(thinker, "<think>\nHm.\n</think>\n\nMild.") == ("Hm.", "Mild.")
    assert pieces(thinker, "Hm.</think>Mild.", chat_template_kwargs={"opens": True}) == ("Hm.", "Mild.")
    assert pieces(thinker, "Mild.", chat_template_kwargs={"enable_thinking": False}) == ("", "Mild.")
    whole = "<think>\nHm.\n</think>\n\nMild."
    assert pieces(thinker, whole, separate_reasoning=False) == ("", whole)
    with pytest.raises(InvalidRequestError, match="include_reasoning"):
        prepared(thinker, separate_reasoning=False, include_reasoning=False)


@pytest.mark.parametrize(
    ("fields", "good", "bad"),
    [
        ({}, ["1", "<think>a</think>1", "<think>a\n</think>\n\n2"], ["<think>1", "<think>a</think>3"]),
        ({"chat_template_kwargs": {"opens": True}}, ["a</think>1"], ["1", "a</think>x"]),
        ({"chat_template_kwargs": {"enable_thinking": False}}, ["1"], ["<think>a</think>1"]),
        ({"separate_reasoning": False}, ["1"], ["<think>a</think>1"]),
    ],
)
def test_thoughts_come_before_what_is_held(
    thinker: GatewayModel, demo: Checkpoint, fields: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    grammar = grammar_of(prepared(thinker, response_format=SCHEMA, **fields), demo)
    for text in good:
        assert demo.takes(grammar, text), text
    for text in bad:
        assert not demo.takes(grammar, text), text


async def test_a_form_of_calls_that_is_not_known(model: GatewayModel) -> None:
    silent = dataclasses.replace(model, tool_format=None)
    with pytest.raises(InvalidRequestError, match=r"gateway\.tool_format") as refused:
        prepared(silent, tools=[CLOCK])
    assert refused.value.param == "tools"
    assert prepared(silent, tools=[CLOCK], tool_choice="none").constraint is None


async def test_special_tokens_are_shown_on_request(open_rig: OpenRig) -> None:
    async with open_rig() as rig:
        special = rig.model.codec.encode("<|im_start|>")
        assert len(special) == 1
        rig.mesh.answers = lambda prompt: [*special, *rig.model.codec.encode("a"), min(rig.model.eos_token_ids)]
        for field, text in (({}, "a"), ({"skip_special_tokens": False}, "<|im_start|>a")):
            body = {"model": rig.model.name, "messages": USER} | field
            assert (await rig.http.post(PATH, json=body)).json()["choices"][0]["message"]["content"] == text
