"""langchain-openai."""

from typing import Any

from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from question import CODES, QUESTION, QUESTION_JSON, Entry, Name
from tried import MODEL, run, tries

chat = ChatOpenAI(model=MODEL, temperature=0, max_completion_tokens=256)
messages = [SystemMessage("You know codes."), HumanMessage(QUESTION)]


@tool
def find_code(name: Name) -> int:
    """Find a person's code."""
    return CODES[name]


def _holds(turn: AIMessage) -> None:
    [call] = turn.tool_calls
    assert (
        not turn.invalid_tool_calls and call["name"] == "find_code" and find_code.invoke(call["args"]) in CODES.values()
    )


@tries("invoke")
def _() -> None:
    answer = chat.invoke(messages)
    assert answer.text and answer.usage_metadata and answer.usage_metadata["output_tokens"] > 0


@tries("stream")
def _() -> None:
    assert "".join(chunk.text for chunk in chat.stream(messages, stream_usage=True))


@tries("batch, asynchronous")
async def _() -> None:
    answers = await chat.abatch([messages] * 3)
    assert len({answer.text for answer in answers}) == 1


@tries("logprobs")
def _() -> None:
    answer = chat.bind(logprobs=True, top_logprobs=2).invoke(messages)
    assert all(token["logprob"] <= 0 for token in answer.response_metadata["logprobs"]["content"])


@tries("bind_tools: named")
def _() -> None:
    _holds(chat.bind_tools([find_code], tool_choice="find_code").invoke(messages))


@tries("bind_tools: any, strict, and the answer after the tool's result")
def _() -> None:
    turn = chat.bind_tools([find_code], tool_choice="any", strict=True, parallel_tool_calls=False).invoke(messages)
    _holds(turn)
    result = find_code.invoke(turn.tool_calls[0])
    assert isinstance(result, ToolMessage)
    last = chat.bind_tools([find_code]).invoke([*messages, turn, result])
    assert last.text or last.tool_calls


@tries("bind_tools, streamed")
def _() -> None:
    whole: Any = None
    for chunk in chat.bind_tools([find_code], tool_choice="any", parallel_tool_calls=False).stream(messages):
        whole = chunk if whole is None else whole + chunk
    _holds(whole)


@tries("with_structured_output: function_calling")
def _() -> None:
    assert isinstance(chat.with_structured_output(Entry, method="function_calling").invoke(messages), Entry)


@tries("with_structured_output: json_mode")
def _() -> None:
    found = chat.with_structured_output(None, method="json_mode").invoke(QUESTION_JSON)
    assert isinstance(found, dict)


@tries("with_structured_output: json_schema")
def _() -> None:
    assert isinstance(chat.with_structured_output(Entry, method="json_schema").invoke(messages), Entry)


@tries("with_structured_output: json_schema, strict, streamed")
def _() -> None:
    *_, last = chat.with_structured_output(Entry, method="json_schema", strict=True).stream(messages)
    assert isinstance(last, Entry)


@tries("completions")
def _() -> None:
    assert OpenAI(model=MODEL, temperature=0, max_tokens=16).invoke(f"{QUESTION} A:")


@tries("completions, streamed")
def _() -> None:
    assert "".join(OpenAI(model=MODEL, temperature=0, max_tokens=16).stream(f"{QUESTION} A:"))


responses = ChatOpenAI(model=MODEL, temperature=0, max_completion_tokens=256, use_responses_api=True, store=False)


@tries("responses: invoke")
def _() -> None:
    assert responses.invoke(messages).text


@tries("responses: stream")
def _() -> None:
    assert "".join(chunk.text for chunk in responses.stream(messages))


@tries("responses: bind_tools, and the answer after the tool's result")
def _() -> None:
    turn = responses.bind_tools([find_code], tool_choice="find_code").invoke(messages)
    _holds(turn)
    last = responses.bind_tools([find_code]).invoke([*messages, turn, find_code.invoke(turn.tool_calls[0])])
    assert last.text or last.tool_calls


@tries("responses: with_structured_output")
def _() -> None:
    assert isinstance(responses.with_structured_output(Entry).invoke(messages), Entry)


@tries("a prompt that is too long is langchain's ContextOverflowError")
def _() -> None:
    try:
        chat.invoke("word " * 200_000)
    except ContextOverflowError:
        return
    raise AssertionError("it was taken")


run()
