"""openai-python."""

import json
from typing import Any

from openai import AsyncOpenAI, BadRequestError, NotFoundError, OpenAI, pydantic_function_tool
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam
from openai.types.responses import FunctionToolParam, ResponseInputParam
from question import CODES, FIND_CODE, QUESTION, QUESTION_JSON, Entry
from tried import MODEL, run, tries

client = OpenAI()
messages: list[ChatCompletionMessageParam] = [
    {"role": "developer", "content": "You know codes."},
    {"role": "user", "content": QUESTION},
]
tool: ChatCompletionToolParam = {"type": "function", "function": {**FIND_CODE, "strict": True}}  # type: ignore
response_tool: FunctionToolParam = {"type": "function", **FIND_CODE, "strict": True}  # type: ignore


def name_of(arguments: str) -> str:
    name = json.loads(arguments)["name"]
    assert name in CODES, name
    return name


@tries("models")
def _() -> None:
    assert MODEL in [model.id for model in client.models.list()]
    assert client.models.retrieve(MODEL).id == MODEL


@tries("chat")
def _() -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=messages,
        temperature=0,
        top_p=0.9,
        max_completion_tokens=16,
        seed=1,
        stop=["\n"],
        presence_penalty=0.1,
        frequency_penalty=0.1,
        user="somebody",
        store=False,
    )
    assert answer.choices[0].message.content and answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage and answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


@tries("chat, two answers")
def _() -> None:
    answer = client.chat.completions.create(model=MODEL, messages=messages, n=2, max_completion_tokens=8)
    assert [choice.index for choice in answer.choices] == [0, 1]


@tries("chat, streamed")
def _() -> None:
    text, finish_reason, usage = "", None, None
    with client.chat.completions.create(
        model=MODEL,
        messages=messages,
        max_completion_tokens=16,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    ) as stream:
        for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                text += choice.delta.content or ""
                finish_reason = choice.finish_reason or finish_reason
    assert text and finish_reason in ("stop", "length") and usage and usage.completion_tokens > 0


@tries("chat, asynchronous")
async def _() -> None:
    async with AsyncOpenAI() as asynchronous:
        answer = await asynchronous.chat.completions.create(model=MODEL, messages=messages, max_completion_tokens=8)
    assert answer.choices[0].message.content is not None


@tries("chat, logprobs")
def _() -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=messages, temperature=0, max_completion_tokens=4, logprobs=True, top_logprobs=3
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs and logprobs.content
    for token in logprobs.content:
        assert token.logprob <= 0 and len(token.top_logprobs) == 3
        assert token.logprob == max(other.logprob for other in token.top_logprobs), "temperature 0 takes the likeliest"


@tries("logit_bias")
def _() -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=messages, temperature=0, max_completion_tokens=4, logit_bias={"300": 100}, logprobs=True
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs and logprobs.content and len(logprobs.content) == 4
    assert len({token.token for token in logprobs.content}) == 1, "one token is above all others"


@tries("tools: named")
def _() -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=messages,
        tools=[tool],
        tool_choice={"type": "function", "function": {"name": "find_code"}},
        max_completion_tokens=128,
    )
    [call] = answer.choices[0].message.tool_calls or []
    assert call.type == "function" and call.function.name == "find_code" and name_of(call.function.arguments)


@tries("tools: required, and the answer after the tool's result")
def _() -> None:
    turn = client.chat.completions.create(
        model=MODEL,
        messages=messages,
        tools=[tool],
        tool_choice="required",
        parallel_tool_calls=False,
        max_completion_tokens=128,
    ).choices[0]
    [call] = turn.message.tool_calls or []
    assert call.type == "function" and turn.finish_reason == "tool_calls"
    result: ChatCompletionMessageParam = {
        "role": "tool",
        "tool_call_id": call.id,
        "content": str(CODES[name_of(call.function.arguments)]),
    }
    last = client.chat.completions.create(
        model=MODEL,
        messages=[*messages, turn.message, result],
        tools=[tool],
        max_completion_tokens=16,  # type: ignore
    ).choices[0]
    assert last.message.content or last.message.tool_calls


@tries("tools: auto")
def _() -> None:
    turn = client.chat.completions.create(
        model=MODEL, messages=messages, tools=[tool], max_completion_tokens=64
    ).choices[0]
    for call in turn.message.tool_calls or []:
        assert call.type == "function" and name_of(call.function.arguments)
    assert turn.message.content or turn.message.tool_calls


@tries("tools, streamed")
def _() -> None:
    names, arguments, ids = list[str](), "", list[str]()
    for chunk in client.chat.completions.create(
        model=MODEL, messages=messages, tools=[tool], tool_choice="required", parallel_tool_calls=False, stream=True,
        max_completion_tokens=128,
    ):  # fmt: skip
        for choice in chunk.choices:
            for call in choice.delta.tool_calls or []:
                assert call.index == 0 and call.function
                names += [call.function.name] if call.function.name else []
                ids += [call.id] if call.id else []
                arguments += call.function.arguments or ""
    assert names == ["find_code"] and len(ids) == 1 and name_of(arguments)


@tries("tools from pydantic, parsed")
def _() -> None:
    answer = client.chat.completions.parse(
        model=MODEL,
        messages=messages,
        tools=[pydantic_function_tool(Entry)],
        tool_choice="required",
        parallel_tool_calls=False,
        max_completion_tokens=128,
    )
    [call] = answer.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Entry)


@tries("JSON mode")
def _() -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": QUESTION_JSON}],
        response_format={"type": "json_object"},
        temperature=0,
        max_completion_tokens=256,
    )
    assert isinstance(json.loads(answer.choices[0].message.content or ""), dict)


@tries("JSON schema")
def _() -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=messages,
        response_format={
            "type": "json_schema",
            "json_schema": {
                "name": "entry",
                "description": "A code.",
                "schema": {**Entry.model_json_schema(), "additionalProperties": False},
                "strict": True,
            },
        },
        max_completion_tokens=128,
    )
    Entry.model_validate_json(answer.choices[0].message.content or "")


@tries("JSON schema from pydantic, parsed")
def _() -> None:
    answer = client.chat.completions.parse(
        model=MODEL, messages=messages, response_format=Entry, max_completion_tokens=128
    )
    assert isinstance(answer.choices[0].message.parsed, Entry)


@tries("JSON schema, streamed and parsed")
def _() -> None:
    with client.chat.completions.stream(
        model=MODEL, messages=messages, response_format=Entry, max_completion_tokens=128
    ) as stream:
        kinds = {event.type for event in stream}
        parsed = stream.get_final_completion().choices[0].message.parsed
    assert {"chunk", "content.delta", "content.done"} <= kinds and isinstance(parsed, Entry)


@tries("completions")
def _() -> None:
    answer = client.completions.create(model=MODEL, prompt=[f"{QUESTION} A:", "Hello"], max_tokens=8, temperature=0)
    assert [choice.index for choice in answer.choices] == [0, 1] and answer.choices[0].text


@tries("completions, streamed")
def _() -> None:
    stream = client.completions.create(model=MODEL, prompt=f"{QUESTION} A:", max_tokens=8, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream)


@tries("completions, logprobs of prompt and answer")
def _() -> None:
    prompt = f"{QUESTION} A:"
    choice = client.completions.create(
        model=MODEL, prompt=prompt, max_tokens=2, temperature=0, logprobs=2, echo=True
    ).choices[0]
    found = choice.logprobs
    assert choice.text.startswith(prompt) and found and found.tokens and found.token_logprobs and found.text_offset
    assert "".join(found.tokens) == choice.text and len(found.tokens) == len(found.token_logprobs)
    logprobs: list[Any] = list(found.token_logprobs)
    assert logprobs[0] is None and all(logprob <= 0 for logprob in logprobs[1:]), "nothing comes before the first token"
    for token, offset in zip(found.tokens, found.text_offset, strict=True):
        assert choice.text[offset : offset + len(token)] == token


@tries("responses")
def _() -> None:
    answer = client.responses.create(
        model=MODEL, instructions="You know codes.", input=QUESTION, max_output_tokens=16, temperature=0, store=False
    )
    assert answer.output_text and answer.usage and answer.usage.output_tokens > 0


@tries("responses, streamed")
def _() -> None:
    text, kinds, last = "", list[str](), None
    for event in client.responses.create(model=MODEL, input=QUESTION, max_output_tokens=16, stream=True, store=False):
        kinds.append(event.type)
        if event.type == "response.output_text.delta":
            text += event.delta
        if event.type in ("response.completed", "response.incomplete"):
            last = event.response
    assert kinds[0] == "response.created" and last and last.output_text == text != ""


@tries("responses, parsed")
def _() -> None:
    answer = client.responses.parse(model=MODEL, input=QUESTION, text_format=Entry, max_output_tokens=128, store=False)
    assert isinstance(answer.output_parsed, Entry)


@tries("responses, tools, and the answer after the tool's result")
def _() -> None:
    conversation: ResponseInputParam = [{"role": "user", "content": QUESTION}]
    turn = client.responses.create(
        model=MODEL,
        input=conversation,
        tools=[response_tool],
        tool_choice="required",
        parallel_tool_calls=False,
        max_output_tokens=128,
        store=False,
    )
    [call] = turn.output
    assert call.type == "function_call" and call.name == "find_code"
    code = CODES[name_of(call.arguments)]
    last = client.responses.create(
        model=MODEL,
        input=[
            *conversation,
            *turn.output,
            {"type": "function_call_output", "call_id": call.call_id, "output": str(code)},
        ],  # type: ignore
        tools=[response_tool],
        max_output_tokens=16,
        store=False,
    )
    assert last.output


@tries("responses, tools, streamed")
def _() -> None:
    with client.responses.stream(
        model=MODEL,
        input=QUESTION,
        tools=[response_tool],
        tool_choice={"type": "function", "name": "find_code"},
        max_output_tokens=128,
        store=False,
    ) as stream:
        kinds = {event.type for event in stream}
        [call] = stream.get_final_response().output
    assert {"response.function_call_arguments.delta", "response.function_call_arguments.done"} <= kinds
    assert call.type == "function_call" and name_of(call.arguments)


@tries("errors: no such model, a prompt that is too long, a name that nobody knows")
def _() -> None:
    for error, code, fields in (
        (NotFoundError, "model_not_found", {"model": "no-such-model"}),
        (BadRequestError, "context_length_exceeded", {"messages": [{"role": "user", "content": "word " * 200_000}]}),
        (BadRequestError, None, {"extra_body": {"temprature": 1}}),
    ):
        try:
            client.chat.completions.create(**{"model": MODEL, "messages": messages, **fields})  # type: ignore
        except error as found:
            assert code in (None, found.code), found
        else:
            raise AssertionError(f"{fields} was taken")


run()
