"""litellm."""

import json
from typing import Any

import litellm
from question import CODES, FIND_CODE, QUESTION, QUESTION_JSON, Entry
from tried import MODEL, run, tries

model = f"openai/{MODEL}"
messages = [{"role": "system", "content": "You know codes."}, {"role": "user", "content": QUESTION}]
tools = [{"type": "function", "function": FIND_CODE}]


def name_of(call: Any) -> str:
    name = json.loads(call.function.arguments)["name"]
    assert call.function.name == "find_code" and name in CODES, call
    return name


@tries("completion")
def _() -> None:
    answer: Any = litellm.completion(
        model, messages, temperature=0, max_tokens=16, presence_penalty=0.1, user="somebody"
    )
    assert answer.choices[0].message.content and answer.usage.completion_tokens > 0


@tries("completion, streamed")
def _() -> None:
    chunks = list(
        litellm.completion(model, messages, max_tokens=16, stream=True, stream_options={"include_usage": True})
    )
    whole: Any = litellm.stream_chunk_builder(chunks)
    assert whole.choices[0].message.content and whole.usage.completion_tokens > 0


@tries("completion, asynchronous")
async def _() -> None:
    answer: Any = await litellm.acompletion(model, messages, max_tokens=16)
    assert answer.choices[0].message.content


@tries("completion, logprobs")
def _() -> None:
    answer: Any = litellm.completion(model, messages, max_tokens=4, logprobs=True, top_logprobs=2)
    assert all(token.logprob <= 0 for token in answer.choices[0].logprobs.content)


@tries("tools: required, and the answer after the tool's result")
def _() -> None:
    turn: Any = litellm.completion(
        model, messages, tools=tools, tool_choice="required", parallel_tool_calls=False, max_tokens=128
    )
    [call] = turn.choices[0].message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": str(CODES[name_of(call)])}
    last: Any = litellm.completion(
        model, [*messages, turn.choices[0].message, result], tools=tools, tool_choice="auto", max_tokens=16
    )
    assert last.choices[0].message.content or last.choices[0].message.tool_calls


@tries("tools, streamed")
def _() -> None:
    choice = {"type": "function", "function": {"name": "find_code"}}
    whole: Any = litellm.stream_chunk_builder(
        list(litellm.completion(model, messages, tools=tools, tool_choice=choice, max_tokens=128, stream=True))
    )
    [call] = whole.choices[0].message.tool_calls
    assert name_of(call)


@tries("JSON mode")
def _() -> None:
    answer: Any = litellm.completion(
        model,
        [{"role": "user", "content": QUESTION_JSON}],
        response_format={"type": "json_object"},
        temperature=0,
        max_tokens=256,
    )
    assert isinstance(json.loads(answer.choices[0].message.content), dict)


@tries("JSON schema from pydantic")
def _() -> None:
    answer: Any = litellm.completion(model, messages, response_format=Entry, max_tokens=128)
    Entry.model_validate_json(answer.choices[0].message.content)


@tries("text_completion")
def _() -> None:
    answer: Any = litellm.text_completion(
        f"{QUESTION} A:", f"text-completion-openai/{MODEL}", max_tokens=8, temperature=0, logprobs=1
    )
    assert answer.choices[0].text and answer.choices[0].logprobs.tokens


@tries("responses")
def _() -> None:
    answer: Any = litellm.responses(QUESTION, model, max_output_tokens=16, store=False)
    assert answer.output_text


@tries("responses, streamed")
def _() -> None:
    kinds: list[Any] = [
        event.type for event in litellm.responses(QUESTION, model, max_output_tokens=16, stream=True, store=False)
    ]
    assert "response.output_text.delta" in kinds


@tries("a prompt that is too long is litellm's ContextWindowExceededError")
def _() -> None:
    try:
        litellm.completion(model, [{"role": "user", "content": "word " * 200_000}])
    except litellm.ContextWindowExceededError:
        return
    raise AssertionError("it was taken")


@tries("a model that there is not is litellm's NotFoundError")
def _() -> None:
    try:
        litellm.completion("openai/no-such-model", messages)
    except litellm.NotFoundError:
        return
    raise AssertionError("it was taken")


run()
