"""llama-index, as a server that is like OpenAI's."""

import os

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from question import CODES, QUESTION, Entry, Name
from tried import MODEL, run, tries


def model(*, is_chat: bool = True, structured: bool = False) -> OpenAILike:
    return OpenAILike(
        model=MODEL,
        api_base=os.environ["OPENAI_BASE_URL"],
        api_key=os.environ["OPENAI_API_KEY"],
        context_window=8192,
        is_chat_model=is_chat,
        is_function_calling_model=is_chat,
        should_use_structured_outputs=structured,
        max_tokens=256,
        temperature=0.0,
    )


chat, messages = (
    model(),
    [ChatMessage(role="system", content="You know codes."), ChatMessage(role="user", content=QUESTION)],
)


def find_code(name: Name) -> int:
    """Find a person's code."""
    return CODES[name]


tool = FunctionTool.from_defaults(find_code)


@tries("chat")
def _() -> None:
    assert chat.chat(messages).message.content


@tries("chat, streamed")
def _() -> None:
    assert "".join(part.delta or "" for part in chat.stream_chat(messages))


@tries("chat, asynchronous")
async def _() -> None:
    assert (await model().achat(messages)).message.content


@tries("completions")
def _() -> None:
    assert model(is_chat=False).complete(f"{QUESTION} A:").text


@tries("completions, streamed")
def _() -> None:
    assert "".join(part.delta or "" for part in model(is_chat=False).stream_complete(f"{QUESTION} A:"))


@tries("chat_with_tools")
def _() -> None:
    answer = chat.chat_with_tools([tool], user_msg=QUESTION, tool_required=True)
    [call] = chat.get_tool_calls_from_response(answer)
    assert call.tool_name == "find_code" and call.tool_kwargs["name"] in CODES


@tries("chat_with_tools, streamed")
def _() -> None:
    *_, last = chat.stream_chat_with_tools([tool], user_msg=QUESTION, tool_required=True)
    [call] = chat.get_tool_calls_from_response(last)
    assert call.tool_kwargs["name"] in CODES


@tries("predict_and_call")
def _() -> None:
    answer = chat.predict_and_call([tool], user_msg=QUESTION, tool_required=True)
    assert int(str(answer)) in CODES.values()


@tries("structured_predict, by a tool")
def _() -> None:
    assert isinstance(chat.structured_predict(Entry, PromptTemplate("{question}"), question=QUESTION), Entry)


@tries("structured_predict, by response_format")
def _() -> None:
    by_format = model(structured=True)
    assert isinstance(by_format.structured_predict(Entry, PromptTemplate("{question}"), question=QUESTION), Entry)


@tries("as_structured_llm")
def _() -> None:
    assert isinstance(chat.as_structured_llm(Entry).chat(messages).raw, Entry)


@tries("FunctionAgent")
async def _() -> None:
    agent = FunctionAgent(tools=[tool], llm=model(), system_prompt="You know codes.", initial_tool_choice="find_code")
    assert str(await agent.run(QUESTION)) is not None


run()
