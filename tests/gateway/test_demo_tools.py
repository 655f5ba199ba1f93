"""The demo model's template and vocabulary know tools, and prompts without tools are what they were."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from transformers import PreTrainedTokenizerFast

from services.engine.demo_model import DEMO_MODEL_DIR
from services.engine.tokenizer import read_tokenizer
from services.gateway.api.messages import ROLES
from services.gateway.api.template import ChatMessage, ChatOptions, ToolCall
from services.gateway.api.text import codec_of
from services.gateway.api.tools.asked import ToolChoice, tools_of
from services.gateway.api.tools.formats import PARSERS, format_of
from services.gateway.api.tools.grammar import tool_grammar
from tests.gateway.splitting import counting, split
from tests.share import examples

DEMO = codec_of(read_tokenizer(DEMO_MODEL_DIR))
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "What it is like in a city, <now>",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
TOOLS = tools_of([WEATHER])
OPTIONS = ChatOptions(tools=(TOOLS[0].shown,))
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Łódź"}}\n</tool_call>'


def user(text: str) -> ChatMessage:
    return ChatMessage(role="user", content=text)


@settings(max_examples=examples(200), deadline=None)
@given(turns=st.lists(st.tuples(st.sampled_from(ROLES), st.text(max_size=20))), generates=st.booleans())
def test_without_tools_a_prompt_is_its_turns(turns: list[tuple[str, str]], generates: bool) -> None:
    messages = [ChatMessage(role=role, content=content) for role, content in turns]
    shown = ["system" if role == "developer" else role for role, _ in turns]
    expected = "".join(
        f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, (_, content) in zip(shown, turns, strict=True)
    )
    text = DEMO.render_chat(messages, ChatOptions(add_generation_prompt=generates))
    assert text == expected + ("<|im_start|>assistant\n" if generates else "")


def test_tools_and_calls_in_the_prompt() -> None:
    called = ToolCall(id="call_1", name="get_weather", arguments='{"city": "Łódź"}')
    messages = [
        ChatMessage(role="system", content="Be brief."),
        user("Hi"),
        ChatMessage(role="assistant", tool_calls=(called, called)),
        ChatMessage(role="tool", content="sunny", tool_call_id="call_1"),
        ChatMessage(role="assistant", content="I look again.", tool_calls=(called,)),
    ]
    text = DEMO.render_chat(messages, OPTIONS)
    assert text.startswith("<|im_start|>system\nBe brief.\n\nThese are your tools:\n{")
    assert text.count("Be brief.") == 1
    assert '"description": "What it is like in a city, <now>"' in text
    assert text.endswith(
        f"<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n{CALL}\n{CALL}<|im_end|>\n"
        "<|im_start|>tool\nsunny<|im_end|>\n"
        f"<|im_start|>assistant\nI look again.\n{CALL}<|im_end|>\n<|im_start|>assistant\n"
    )
    assert DEMO.render_chat([user("Hi")], OPTIONS).startswith("<|im_start|>system\nThese are your tools:\n")


def test_it_is_as_by_transformers() -> None:
    transformers = PreTrainedTokenizerFast.from_pretrained(DEMO_MODEL_DIR)
    arguments: dict[str, Any] = {"city": "Łódź"}
    function = {"name": "get_weather", "arguments": arguments}
    given_messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]},
    ]
    expected = transformers.apply_chat_template(
        given_messages, tools=[WEATHER], add_generation_prompt=True, return_dict=False
    )
    called = ToolCall(name="get_weather", arguments='{"city": "Łódź"}')
    assert DEMO.encode_chat([user("Hi"), ChatMessage(role="assistant", tool_calls=(called,))], OPTIONS) == expected


def test_an_answer_of_its_own_is_the_next_prompts_beginning() -> None:
    """What the parser takes of a call, and the template writes of it again, is the same text: its KV is found."""
    asked = [user("Hi")]
    for answer in (CALL, f"I look.\n{CALL}\n{CALL}"):
        found = split(PARSERS["hermes"]({"get_weather"}, counting()), answer)
        calls = tuple(ToolCall(id=call.id, name=call.name, arguments=call.arguments) for call in found.calls)
        told = ChatMessage(role="assistant", content=found.content or None, tool_calls=calls)
        again = DEMO.render_chat([*asked, told], OPTIONS)
        assert again.startswith(DEMO.render_chat(asked, OPTIONS) + answer + "<|im_end|>\n")


@pytest.mark.parametrize("mode", ["required", "auto"])
def test_its_vocabulary_can_write_every_call(mode: Any) -> None:
    assert format_of(DEMO.template) == "hermes"
    tokenizer = LLTokenizer((DEMO_MODEL_DIR / "tokenizer.json").read_text(), eos_token=DEMO.added_ids["<|endoftext|>"])
    strict = tools_of([{**WEATHER, "function": {**WEATHER["function"], "strict": True}}])
    lark = tool_grammar("hermes", DEMO.template, strict, ToolChoice(mode=mode), DEMO.added_ids)
    matcher = LLMatcher(tokenizer, lark, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    token_ids = DEMO.encode(CALL)
    assert DEMO.decode(token_ids) == CALL
    assert matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()
