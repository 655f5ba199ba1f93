"""The Responses API over HTTP, with OpenAI's own client."""

import json
from typing import Any

import pytest
from openai.types.responses import ResponseFunctionToolCall, ResponseOutputMessage

from services.gateway.api.constraints import understand
from services.gateway.api.invalid import InvalidRequestError
from services.gateway.api.prepare import GatewayModel, prepare
from services.gateway.api.responses import Responses
from tests.gateway.conftest import OpenRig, Rig
from tests.gateway.fake_mesh import Conduct
from tests.gateway.test_chats import CALL, CLOCK, PARAMETERS, WEATHER, saying

PATH = "/v1/responses"
TOOL = {"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": True}
FORMAT = {"format": {"type": "json_schema", "name": "n", "schema": {"enum": [1, 2]}, "strict": True}}


def asked(**fields: Any) -> Responses:
    return Responses(json.dumps({"model": "demo_model", "input": "Hi"} | fields).encode())


def refusal(model: GatewayModel, **fields: Any) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as raised:
        responses = asked(**fields)
        with responses.own_names():
            prepared = prepare(model, responses.chat)
            assert prepared.constraint is not None
            understand(prepared.constraint, lambda _: None)
    return raised.value


async def test_a_whole_answer(rig: Rig) -> None:
    answer = await rig.client.responses.create(
        model=rig.model.name, input="Hello", instructions="Be brief.", max_output_tokens=100, metadata={"a": "b"}
    )
    assert answer.id.startswith("resp_") and answer.object == "response" and answer.status == "completed"
    assert answer.output_text == rig.text and answer.metadata == {"a": "b"}
    assert (answer.instructions, answer.max_output_tokens, answer.error) == ("Be brief.", 100, None)
    usage = answer.usage
    assert usage is not None and usage.output_tokens == len(rig.answer)
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert usage.output_tokens_details.reasoning_tokens == 0 and usage.input_tokens_details.cached_tokens == 1
    assert usage.input_tokens_details.cache_write_tokens == 0
    message = answer.output[0]
    assert isinstance(message, ResponseOutputMessage) and message.status == "completed"
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    body = {"model": rig.model.name, "messages": chat, "max_tokens": 100}
    assert (await rig.http.post("/v1/chat/completions", json=body)).status_code == 200
    assert rig.mesh.runs[0].prompt == rig.mesh.runs[1].prompt


async def test_an_answer_that_is_cut(rig: Rig) -> None:
    answer = await rig.client.responses.create(model=rig.model.name, input="Hello", max_output_tokens=3)
    assert answer.status == "incomplete"
    assert answer.incomplete_details is not None and answer.incomplete_details.reason == "max_output_tokens"


KINDS = [
    "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
    "response.output_text.delta", "response.output_text.done", "response.content_part.done",
    "response.output_item.done", "response.completed",
]  # fmt: skip


async def test_a_streamed_answer(rig: Rig) -> None:
    events = [e async for e in await rig.client.responses.create(model=rig.model.name, input="Hello", stream=True)]
    kinds = [event.type for event in events]
    assert list(dict.fromkeys(kinds)) == KINDS
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == rig.text and len(deltas) > 3
    done = events[-1]
    assert done.type == "response.completed" and done.response.output_text == rig.text
    assert done.response.usage is not None and done.response.usage.output_tokens == len(rig.answer)


async def test_streamed_and_whole_answers_are_the_same(open_rig: OpenRig) -> None:
    async with saying(open_rig, f"I look.\n{CALL}\n{CALL}") as rig:
        body: dict[str, Any] = {"model": rig.model.name, "input": "Hi", "tools": [TOOL], "parallel_tool_calls": True}
        whole = await rig.client.responses.create(**body)
        events = [event async for event in await rig.client.responses.create(**body, stream=True)]
        last = events[-1]
        assert last.type == "response.completed"
        calls = [item for item in whole.output if isinstance(item, ResponseFunctionToolCall)]
        assert [item.type for item in whole.output] == ["message", "function_call", "function_call"]
        assert [(call.name, json.loads(call.arguments)) for call in calls] == [("weather", {"city": "Oslo"})] * 2
        assert len({call.call_id for call in calls}) == 2
        plain = [item.model_dump(exclude={"id", "call_id"}) for item in whole.output]
        assert [item.model_dump(exclude={"id", "call_id"}) for item in last.response.output] == plain
        told = [event.item for event in events if event.type == "response.output_item.done"]
        assert told == last.response.output
        deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
        assert "".join(deltas) == "".join(call.arguments for call in calls)

        back = [item.model_dump() for item in whole.output]
        outputs = [{"type": "function_call_output", "call_id": call.call_id, "output": "mild"} for call in calls]
        again = await rig.client.responses.create(
            model=rig.model.name, input=[{"role": "user", "content": "Hi"}, *back, *outputs], tools=[TOOL], store=False
        )  # type: ignore[call-overload]
        assert again.status == "completed"


def test_items_are_the_turns_of_a_chat(model: GatewayModel) -> None:
    thought = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm"}]}
    call = {"type": "function_call", "call_id": "c1", "name": "clock", "arguments": "{}", "status": "completed"}
    chat = asked(
        instructions="Be brief.",
        input=[
            {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
            thought,
            {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
             "content": [{"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}]},
            call,
            call | {"call_id": "c2"},
            {"type": "function_call_output", "call_id": "c1", "output": "noon"},
            {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "noon"}]},
            call,
            {"role": "assistant", "content": "Noon."},
            {"role": "assistant", "content": "Really."},
        ],
    ).chat  # fmt: skip
    turns = [
        (m.role, m.content[0]["text"] if isinstance(m.content, list) else m.content or None, len(m.tool_calls or ()))
        for m in chat.messages
    ]
    assert turns == [
        ("system", "Be brief.", 0), ("user", "Hi", 0), ("assistant", "I look.", 2), ("tool", "noon", 0),
        ("tool", "noon", 0), ("assistant", None, 1), ("assistant", "Noon.", 0), ("assistant", "Really.", 0),
    ]  # fmt: skip
    assert chat.messages[2].reasoning_content == "Hm" and chat.messages[3].tool_call_id == "c1"


def test_what_is_asked_is_what_a_chat_asks(model: GatewayModel) -> None:
    tool_choice = {"type": "function", "name": "weather"}
    responses = asked(tools=[TOOL], tool_choice=tool_choice, text=FORMAT, temperature=0.5, seed=3, max_output_tokens=9)
    named = prepare(model, responses.chat)
    assert named.options.sampling.temperature == 0.5 and named.options.seed == 3 and named.max_tokens == (9,)
    assert named.constraint is not None and named.constraint.param == "tools", "the call goes before the document"
    assert prepare(model, asked(text=FORMAT).chat).constraint is not None
    assert prepare(model, asked(text={"format": {"type": "json_object"}}).chat).constraint is not None
    assert prepare(model, asked(text={"format": {"type": "text"}}).chat).constraint is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"role": "nobody", "content": "x"}]}, "input[0].role"),
        ({"instructions": "x", "input": [{"role": "user", "content": [{"type": "x"}]}]}, "input[0].content[0]"),
        ({"input": [{"role": "user", "content": "x", "more": 1}]}, "input[0]"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": [{"type": "computer_call"}]}, "input[0]"),
        ({"input": [{"type": "function_call", "name": "x"}]}, "input[0]"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"tools": [{"type": "function", "name": "a", "parameters": {"type": "string"}}]}, "tools[0].parameters"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "b"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "hosted"}}, "tool_choice.type"),
        ({"max_output_tokens": 10**9}, "max_output_tokens"),
        ({"text": {"format": {"type": "json_schema", "name": "n", "schema": {"not": {}}}}}, "text.format.schema"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"store": True}, "store"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"n": 2}, "n"),
        ({"messages": []}, "messages"),
    ],
)  # fmt: skip
def test_what_is_refused_is_named_as_it_was_sent(model: GatewayModel, fields: dict[str, Any], param: str) -> None:
    error = refusal(model, **fields)
    assert error.param == param and "messages[" not in error.message, error.message


@pytest.mark.parametrize("fields", [{"store": False}, {"store": None}, {"include": []}, {"truncation": "disabled"}])
def test_what_asks_for_nothing_is_taken(model: GatewayModel, fields: dict[str, Any]) -> None:
    assert prepare(model, asked(**fields).chat).constraint is None


async def test_logprobs(rig: Rig) -> None:
    body = {"model": rig.model.name, "input": "Hi", "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    whole = (await rig.http.post(PATH, json=body)).json()
    told = whole["output"][0]["content"][0]["logprobs"]
    assert len(told) == len(rig.answer) and all(len(each["top_logprobs"]) == 2 for each in told)
    stream = await rig.client.responses.create(**body, stream=True)  # type: ignore[call-overload]
    events = [event async for event in stream]
    assert events[-1].response.output[0].to_dict()["content"][0]["logprobs"] == told
    text = b"".join(bytes(each["bytes"]) for each in told[:-1]).decode()
    assert text == rig.text


async def test_a_failure_in_mid_stream(open_rig: OpenRig) -> None:
    conduct = {worker: Conduct(fails_at=3, retryable=False) for worker in ("p1", "p2", "d1", "d2")}
    async with open_rig(conduct=conduct) as rig:
        body = {"model": rig.model.name, "input": "Hi", "stream": True}
        lines = (await rig.http.post(PATH, json=body)).text
        kinds = [line.removeprefix("event: ") for line in lines.splitlines() if line.startswith("event: ")]
        assert kinds[-2:] == ["error", "response.failed"]
        events = [event async for event in await rig.client.responses.create(**body)]  # type: ignore[call-overload]
        failed = events[-1]
        assert failed.type == "response.failed" and failed.response.status == "failed"
        assert failed.response.error is not None and failed.response.error.message


async def test_a_bad_schema_is_named_as_it_was_sent(rig: Rig) -> None:
    schema = {"type": "object", "properties": {"a": {"pattern": "(?=x)"}}}
    body = {"model": rig.model.name, "input": "Hi", "text": {"format": {"type": "json_schema", "name": "n"}}}
    body["text"]["format"]["schema"] = schema  # type: ignore[index]
    refused = (await rig.http.post(PATH, json=body)).json()["error"]
    assert refused["param"] == "text.format.schema" and "/properties/a" in refused["message"]
    assert "response_format" not in refused["message"]


def test_tools_are_those_of_a_chat() -> None:
    flat = {"type": "function", **CLOCK["function"]}  # type: ignore[dict-item]
    assert asked(tools=[flat]).chat.tools == [CLOCK]
    assert WEATHER["function"]["name"] == TOOL["name"]  # type: ignore[index]
