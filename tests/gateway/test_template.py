"""Chat templates with tools: as transformers renders them, and never with a special token that a client spelled.

The templates are written for these tests, with the markers of the families that they are named after.
"""

import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import TemplateError
from msgspec import UNSET
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from services.gateway import limits
from services.gateway.api.invalid import InvalidRequestError
from services.gateway.api.messages import messages_of
from services.gateway.api.openai import ChatBody, decode_body
from services.gateway.api.template import (
    ChatMessage,
    ChatOptions,
    ChatTemplate,
    ChatTemplateError,
    Sent,
    ToolCall,
    texts_of,
)
from services.gateway.api.text import TextCodec
from tests.share import examples

HERMES = """
{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}

{% endif %}# Tools
<tools>
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}

</tools><|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}
<tool_response>
{{ message.content }}
</tool_response>
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>
{% endif %}
{%- elif not (tools and loop.first and message.role == 'system') %}<|im_start|>{{ message.role }}
{% if message.reasoning_content %}<think>
{{ message.reasoning_content.strip('\\n') }}
</think>

{% endif %}
{{- message.content if message.content is string else '' }}
{%- for call in message.tool_calls or [] %}
{%- if call.function %}{% set call = call.function %}{% endif %}

<tool_call>
{"name": "{{ call.name }}", "arguments": {{ call.arguments if call.arguments is string else call.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% endif %}
{%- endif %}"""

LLAMA = """{{ bos_token }}
{%- if not date_string is defined %}{% set date_string = 'today' %}{% endif %}
{%- if messages[0]['role'] == 'system' %}
{%- set system_message = messages[0]['content'] | trim %}{% set messages = messages[1:] %}
{%- else %}{% set system_message = '' %}{% endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' + date_string + '\\n' }}
{%- if tools is not none %}
{{- 'Respond as {"name": function name, "parameters": dictionary}.\\n\\n' }}
{%- for t in tools %}{{ t | tojson(indent=4) }}{{ '\\n\\n' }}{% endfor %}
{%- endif %}
{{- system_message + '<|eot_id|>' }}
{%- for message in messages %}
{%- if 'tool_calls' in message %}
{%- if message.tool_calls | length != 1 %}{{ raise_exception('only one call at once') }}{% endif %}
{%- set call = message.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
{{- call.arguments | tojson + '}<|eot_id|>' }}
{%- elif message.role == 'tool' %}
{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + message.content | tojson + '<|eot_id|>' }}
{%- else %}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""

MISTRAL = """{{ bos_token }}
{%- for message in messages %}
{%- if message.role == 'user' %}
{%- if loop.last and tools %}{{ '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{% endif %}
{{- '[INST]' + message.content + '[/INST]' }}
{%- elif message.tool_calls is defined %}{{ '[TOOL_CALLS][' }}
{%- for call in message.tool_calls %}
{%- if call.id is not defined or call.id | length != 9 %}
{{- raise_exception('ids of calls have nine characters') }}
{%- endif %}
{{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' + (']' + eos_token if loop.last else ', ') }}
{%- endfor %}
{%- elif message.role == 'tool' %}
{{- '[TOOL_RESULTS]{"content": ' + message.content | tojson + ', "call_id": "' + message.tool_call_id + '"}' }}
{%- else %}{{ message.content + eos_token }}{% endif %}
{%- endfor %}"""

MISTRAL_ARGS = """{{ bos_token }}
{%- for message in messages %}
{%- if message.role == 'user' %}{{ '[INST]' + message.content + '[/INST]' }}
{%- elif message.tool_calls is defined %}
{%- for call in message.tool_calls %}{{ '[TOOL_CALLS]' + call.function.name + '[ARGS]' }}
{{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
{%- endfor %}{{ eos_token }}
{%- elif message.role == 'tool' %}{{ '[TOOL_RESULTS]' + message.name ~ message.content }}
{%- else %}{{ message.content + eos_token }}{% endif %}
{%- endfor %}
{%- if tools is defined and tools %}{{ tools | tojson(separators=(',', ':')) }}{% endif %}"""

DEEPSEEK = """{{ bos_token }}
{%- set ns = namespace(open=false) %}
{%- for message in messages %}
{%- if message['role'] == 'user' %}{{ '<｜User｜>' + message['content'] }}
{%- elif message['role'] == 'assistant' and message['tool_calls'] %}
{{- '<｜Assistant｜>' + (message['content'] or '') + '<｜tool▁calls▁begin｜>' }}
{%- for call in message['tool_calls'] %}
{{- '<｜tool▁call▁begin｜>' + call['type'] + '<｜tool▁sep｜>' + call['function']['name'] + '\\n```json\\n' }}
{{- call['function']['arguments'] + '\\n```<｜tool▁call▁end｜>' }}
{%- endfor %}{{ '<｜tool▁calls▁end｜>' + eos_token }}
{%- elif message['role'] == 'assistant' %}
{%- set content = message['content'] %}
{%- if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}
{{- '<｜Assistant｜>' + content + eos_token }}
{%- elif message['role'] == 'tool' %}{{ '<｜tool▁output▁begin｜>' + message['content'] + '<｜tool▁output▁end｜>' }}
{%- endif %}
{%- endfor %}
{%- if tools %}{{ tools | tojson }}{% endif %}
{%- if add_generation_prompt %}{{ '<｜Assistant｜><think>\\n' }}{% endif %}"""

THINKERS = """{% for m in messages %}{% generation %}<|im_start|>{{ m.role }}
{% if m.thinking is defined %}{{ m.thinking }}|{{ m.reasoning_content }}|{% endif %}
{{- m.name }}{{ m.content }}<|im_end|>
{% endgeneration %}{% endfor %}
{%- if documents %}{{ documents | tojson(ensure_ascii=True, sort_keys=True) }}{% endif %}
{%- if reasoning_effort == 'high' %}Think hard.{% endif %}{{ tools is none }}{{ documents is none }}"""

PHI = """{% for m in messages %}{{ '<|' + m['role'] + '|>' }}
{{ m['content'] }}<|im_end|>
{% endfor %}"""

TEMPLATES = {
    "hermes": HERMES, "llama": LLAMA, "mistral": MISTRAL, "mistral args": MISTRAL_ARGS, "deepseek": DEEPSEEK,
    "thinkers": THINKERS,
}  # fmt: skip

LOOKING = """{%- for message in messages %}
{%- set content = message.content %}
{%- if message.role == 'assistant' %}
{%- if message.reasoning_content is defined and message.reasoning_content is not none %}
{{- 'T' + message.reasoning_content }}
{%- elif '</think>' in message.content %}{% set content = message.content.split('</think>')[-1] | trim %}{% endif %}
{%- endif %}
{{- '<|im_start|>' + message.role + '\n' ~ (content or '') }}
{%- if message.tool_calls %}{% for call in message.tool_calls %}
{{- '<tool_call>' + call.function.name + (call.function.arguments | tojson) + '</tool_call>' }}{% endfor %}{% endif %}
{%- endfor %}"""
"""As Qwen3's first one: it cannot bear a content that is null."""

WRITING = """{%- for message in messages %}
{%- if message.role == 'assistant' %}{{ '<|assistant|>' }}{{ message.content }}
{%- for call in message.tool_calls or [] %}{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}
{%- else %}{{ '<|' ~ message.role ~ '|>' ~ message.content }}{% endif %}
{%- endfor %}"""
"""As GLM's: it would write a null out."""

ASKING = """{%- for message in messages %}{{ message['role'] }}:
{%- if message['content'] is not defined %}missing{% elif message['content'] is none %}null
{%- elif message['content'] is string and not message['content'] %}empty{% else %}{{ message['content'] }}{% endif %}
{%- if message['tool_calls'] is defined %}|calls {{ message['tool_calls'] is none }}
{%- for call in message['tool_calls'] or [] %}
{{- ' ' + call['function']['name'] }} {{ call.function.arguments is string }} {{ call.function.arguments | tojson }}
{%- endfor %}{% endif %}
{%- for name in ('name', 'reasoning_content', 'tool_call_id') if name in message %}|{{ name }} {{ message.get(name) }}
{%- endfor %};{% endfor %}"""

SETTING = """{%- for message in messages %}{% set said = message.get('content', 'missing') %}
{{- message.role }}{% if said != None %}:{{ said }}{% else %}:null{% endif %}
{%- if message.tool_calls %}{{ message.tool_calls | length }}{% endif %}{% endfor %}"""

JOINING = """{%- for message in messages %}
{%- if message['role'] == 'assistant' and message['content'] is none %}<｜Assistant｜>
{%- for call in message['tool_calls'] %}{{ call['function']['name'] + ':' + call['function']['arguments'] }}{% endfor %}
{%- elif message['role'] == 'assistant' and message['content'] is not none %}<｜Assistant｜>{{ message['content'] }}
{%- else %}{{ message['role'] + message['content'] }}{% endif %}
{%- if message['tool_calls'] is defined and message['tool_calls'] is not none %}!{% endif %}
{%- endfor %}"""
"""As DeepSeek R1's: a call has no content."""

COMMAND = """{%- for message in messages %}
{%- if message.role == 'assistant' and message.tool_calls is defined and message.tool_calls | length > 0 %}
{{- '<|CALLS|>' }}{% if message.content is defined and message.content %}{{ message.content | trim }}{% endif %}
{%- for call in message.tool_calls %}{"tool_name": {{ call['function']['name'] | tojson }}, "parameters":
{%- if call['function']['arguments'] is mapping %} {{ call['function']['arguments'] | tojson }}
{%- else %} {{ call['function']['arguments'] }}{% endif %}}{% endfor %}
{%- else %}{{ '<|' + message.role + '|>' ~ message.content }}{% endif %}
{%- endfor %}"""

TRIMMING = """{%- for message in messages %}
{%- if message.role not in ('user', 'assistant', 'tool') %}{{ raise_exception('no such role') }}{% endif %}
{{- '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) }}
{%- if message['content'] is string %}{{ message['content'] | trim }}
{%- elif message['content'] is iterable %}{% for part in message['content'] %}{{ part['text'] }}{% endfor %}
{%- elif not message.get('tool_calls') %}{{ raise_exception('nothing is said') }}{% endif %}
{%- for call in message.get('tool_calls') or () %}{{ call.function }}{% endfor %}
{%- endfor %}"""

HISTORIES = {
    **{name: template for name, template in TEMPLATES.items() if name != "thinkers"},
    "looking": LOOKING, "writing": WRITING, "asking": ASKING, "setting": SETTING, "joining": JOINING,
    "command": COMMAND, "trimming": TRIMMING,
}  # fmt: skip
ASKED = {"asking": ("content", "tool_calls"), "setting": ("content",), "joining": ("content", "tool_calls")}
"""Of these fields a template wants to know whether they are null."""

SPECIAL = (
    "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
    "[INST]", "[/INST]", "[TOOL_CALLS]", "[ARGS]", "[TOOL_RESULTS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
)  # fmt: skip
OWN_MARKS = (
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>",
)  # fmt: skip
"""What models write around their thoughts and calls: tokens that are not special, as published."""
ADDED = (
    *OWN_MARKS, "<tool_response>", "</tool_response>", "<｜User｜>", "<｜Assistant｜>", "<｜tool▁output▁begin｜>",
    "<｜tool▁output▁end｜>", "<|system|>", "<|user|>", "unwritten", "<unwritten>", "\n\n", "user",
)  # fmt: skip
"""What is a token, and not special."""


def byte_tokenizer() -> Tokenizer:
    """One token for each byte, and the markers."""
    vocab = {char: index for index, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, special=False) for token in ADDED])
    return tokenizer


def codec_of(template: str) -> TextCodec:
    return TextCodec(byte_tokenizer(), template, {"bos_token": "<s>", "eos_token": "</s>"})


CODECS = {name: codec_of(template) for name, template in (TEMPLATES | {"phi": PHI}).items()}
HISTORIANS = {name: codec_of(template) for name, template in HISTORIES.items()}
TRANSFORMERS = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer(), bos_token="<s>", eos_token="</s>")


def tool(name: str, description: str = "What it is like", **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TOOLS = (tool("get_weather", city={"type": "string", "description": "Łódź & <b>"}), tool("now"))


def said(role: str, content: Sent[str] = UNSET, **fields: Any) -> ChatMessage:
    return ChatMessage(role=role, content=content, **fields)


def call(arguments: str, name: str = "get_weather", call_id: str = "abcdefghi") -> ToolCall:
    return ToolCall(id=call_id, name=name, arguments=arguments)


TURNS = [
    said("user", "Hi <b> é"),
    said("assistant", tool_calls=(call('{"city": "Łódź", "n": [1, 2.5, null, true], "o": {"a": "\\n"}}'),)),
    said("tool", "sunny", tool_call_id="abcdefghi", name="get_weather"),
    said("assistant", "It is sunny.", reasoning_content="\nHm.\n"),
    said("user", "And now?"),
]


def as_given(message: ChatMessage, *, as_text: bool = False) -> dict[str, Any]:
    """Return a message as somebody gives it to transformers."""
    names = ("role", "content", "name", "reasoning_content", "tool_call_id")
    given: dict[str, Any] = {name: getattr(message, name) for name in names if getattr(message, name) is not UNSET}
    if message.tool_calls:
        given["tool_calls"] = [
            {
                "id": each.id,
                "type": "function",
                "function": {"name": each.name, "arguments": each.arguments if as_text else json.loads(each.arguments)},
            }
            for each in message.tool_calls
        ]
    return given


def by_transformers(name: str, messages: list[ChatMessage], options: ChatOptions) -> list[int]:
    given: dict[str, Any] = {
        "conversation": [as_given(message, as_text=name == "deepseek") for message in messages],
        "tools": list(options.tools) or None,
        "documents": list(options.documents) or None,
        "add_generation_prompt": options.add_generation_prompt,
        "continue_final_message": options.continue_final_message,
        **options.template_kwargs,
    }
    token_ids: Any = TRANSFORMERS.apply_chat_template(chat_template=TEMPLATES[name], return_dict=False, **given)
    return token_ids


CONVERSATIONS = {
    "a question": TURNS[:1],
    "a system": [said("system", "  Be brief. "), TURNS[0]],
    "a call": TURNS[:2],
    "a result": TURNS[:3],
    "all": TURNS,
}


def template_of(name: str) -> ChatTemplate:
    template = CODECS[name]._template
    assert template is not None
    return template


TALKS = [
    (name, conversation, tools, generates)
    for name in TEMPLATES
    for conversation in CONVERSATIONS
    for tools in ((), TOOLS)
    for generates in (True, False)
    if generates or template_of(name).knows("add_generation_prompt")
    if name != "thinkers" or (conversation in ("a question", "a system") and not tools)
]


@pytest.mark.parametrize(("name", "conversation", "tools", "generates"), TALKS)
def test_it_is_as_by_transformers(name: str, conversation: str, tools: tuple[Any, ...], generates: bool) -> None:
    messages = CONVERSATIONS[conversation]
    options = ChatOptions(tools=tools, add_generation_prompt=generates)
    assert CODECS[name].encode_chat(messages, options) == by_transformers(name, messages, options)


def test_reasoning_is_as_by_transformers() -> None:
    messages = [TURNS[0], *TURNS[3:]]
    assert CODECS["thinkers"].encode_chat(messages) == by_transformers("thinkers", messages, ChatOptions())


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("hermes", ChatOptions(template_kwargs={"enable_thinking": False})),
        ("hermes", ChatOptions(template_kwargs={"enable_thinking": True})),
        ("llama", ChatOptions(template_kwargs={"date_string": "1 May <é>"})),
        ("thinkers", ChatOptions(template_kwargs={"reasoning_effort": "high"})),
        ("thinkers", ChatOptions(documents=({"title": "b", "text": "é"}, {"text": "c", "a": 1}))),
    ],
)
def test_variables_are_as_by_transformers(name: str, options: ChatOptions) -> None:
    messages = [said("user", "Hi", name="ada")]
    token_ids = CODECS[name].encode_chat(messages, options)
    assert token_ids == by_transformers(name, messages, options)
    assert token_ids != CODECS[name].encode_chat(messages) or options.template_kwargs == {"enable_thinking": True}


SCALARS = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False)
)
PLAIN = st.text(st.characters(exclude_characters="<[", codec="utf-8"), max_size=12)
VALUES = st.recursive(
    SCALARS | PLAIN, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(PLAIN, inner, max_size=3), max_leaves=6
)


@settings(max_examples=examples(150), deadline=None)
@given(
    name=st.sampled_from(["hermes", "llama", "mistral", "mistral args", "deepseek"]),
    arguments=st.dictionaries(PLAIN, VALUES, max_size=3),
    properties=st.dictionaries(PLAIN, VALUES, max_size=3),
    texts=st.lists(PLAIN, min_size=3, max_size=3),
)
def test_any_plain_conversation_is_as_by_transformers(
    name: str, arguments: dict[str, Any], properties: dict[str, Any], texts: list[str]
) -> None:
    messages = [
        said("user", texts[0]),
        said("assistant", tool_calls=(call(json.dumps(arguments)),)),
        said("tool", texts[1], tool_call_id="abcdefghi", name="x"),
    ]
    options = ChatOptions(tools=(tool("now", texts[2], **{f"p{key}": value for key, value in properties.items()}),))
    assert CODECS[name].encode_chat(messages, options) == by_transformers(name, messages, options)


# A call's arguments.


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ('{"a": 1, "b": "\\u00e9"}', '{"a": 1, "b": "é"}'),
        ("{}", "{}"),
        ("no json", "no json"),
        ("[1]", "[1]"),
        ('"text"', '"text"'),
        ('{"a": NaN}', '{"a": NaN}'),
        ('{"a": "\\ud800"}', '{"a": "\\ud800"}'),
        ('{"a": 1e999}', '{"a": 1e999}'),
        (f'{{"a": {"1" * 5000}}}', f'{{"a": {"1" * 5000}}}'),
        (f'{{"a": {"[" * 5000}{"]" * 5000}}}', f'{{"a": {"[" * 5000}{"]" * 5000}}}'),
        ("[" * 100_000, "[" * 100_000),
    ],
)
def test_arguments_are_an_object_or_the_text_that_is_none(arguments: str, shown: str) -> None:
    text = CODECS["hermes"].render_chat([said("assistant", tool_calls=(call(arguments),))])
    assert f'"arguments": {shown}}}\n</tool_call>' in text


def test_a_template_that_joins_arguments_gets_their_text() -> None:
    text = CODECS["deepseek"].render_chat([said("assistant", tool_calls=(call('{"a" :1}'),))])
    assert '```json\n{"a" :1}\n```' in text


# What a history leaves out.


ABSENT = object()
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "now", "arguments": "{}"}}
ASSISTANT = {"role": "assistant", "content": "It is.", "tool_calls": [CALL]}
TOOL = {"role": "tool", "content": "mild", "name": "now", "tool_call_id": "abcdefghi"}
EMPTY = {"no key": ABSENT, "null": None, "empty": ""}
PLACES = {
    "content beside calls": (ASSISTANT, "content", EMPTY),
    "content": ({"role": "assistant"}, "content", {"empty": ""}),
    "calls": ({"role": "assistant", "content": "It is."}, "tool_calls", {"no key": ABSENT, "null": None}),
    "thoughts": ({"role": "assistant", "content": "It is."}, "reasoning_content", EMPTY),
    "thoughts beside calls": ({**ASSISTANT, "content": None}, "reasoning_content", EMPTY),
    "name": ({"role": "assistant", "content": "It is."}, "name", EMPTY),
    "a tool's content": (TOOL, "content", {"empty": ""}),
    "a tool's name": (TOOL, "name", EMPTY),
    "a call's id": (TOOL, "tool_call_id", EMPTY),
}
LEFT_OUT = [
    (
        place,
        kind,
        {**message, field: value} if value is not ABSENT else {k: v for k, v in message.items() if k != field},
    )
    for place, (message, field, values) in PLACES.items()
    for kind, value in values.items()
]


def sent(*messages: dict[str, Any]) -> list[ChatMessage]:
    """Return what a client has sent over HTTP."""
    body = decode_body(json.dumps({"model": "m", "messages": messages}).encode(), is_chat=True)
    assert isinstance(body, ChatBody)
    return messages_of(body.messages)


def shown_by_transformers(name: str, messages: list[dict[str, Any]]) -> str:
    """Return the text. `apply_chat_template` leaves out all nulls, also those for which a template asks."""
    as_text = name in ("deepseek", "joining")

    def call_of(call: dict[str, Any]) -> dict[str, Any]:
        text = call["function"]["arguments"]
        return {**call, "function": {**call["function"], "arguments": text if as_text else json.loads(text)}}

    history: list[dict[str, Any]] = []
    for message in messages:
        calls = message.get("tool_calls")
        history.append({**message, "tool_calls": [call_of(call) for call in calls]} if calls else message)
    given: dict[str, Any] = {"chat_template": HISTORIES[name], "add_generation_prompt": True}
    if name not in ASKED:
        text: Any = TRANSFORMERS.apply_chat_template(history, tokenize=False, **given)
        return text
    asked = [{field: v for field, v in each.items() if v is not None or field in ASKED[name]} for each in history]
    return render_jinja_template([asked], **given, **TRANSFORMERS.special_tokens_map)[0][0]


@pytest.mark.parametrize("name", HISTORIES)
@pytest.mark.parametrize(("place", "kind", "message"), LEFT_OUT)
def test_missing_null_and_empty_are_three_things(name: str, place: str, kind: str, message: dict[str, Any]) -> None:
    """As by transformers with the very history; what it cannot render is a bad request."""
    question = {"role": "user", "content": "Hi"}
    history = [question, message] if message["role"] == "assistant" else [question, ASSISTANT, message]
    try:
        expected = shown_by_transformers(name, history)
    except (TypeError, TemplateError):
        with pytest.raises(ChatTemplateError, match="refuses these messages"):
            HISTORIANS[name].encode_chat(sent(*history))
    else:
        assert HISTORIANS[name].render_chat(sent(*history)) == expected


def test_content_that_is_missing_null_or_empty() -> None:
    told = [HISTORIANS["asking"].render_chat(sent(message)) for place, _, message in LEFT_OUT if "beside" in place][:3]
    calls = "calls False now False {}"
    assert told == [f"assistant:{content}|{calls};" for content in ("missing", "null", "empty")]


@pytest.mark.parametrize("arguments", [{"arguments": ""}, {"arguments": " \n"}, {"arguments": None}, {}])
@pytest.mark.parametrize("name", HISTORIES)
def test_no_arguments_are_an_empty_object(name: str, arguments: dict[str, Any]) -> None:
    call = {**CALL, "function": {"name": "now", **arguments}}
    question = {"role": "user", "content": "Hi"}
    for message in ({**ASSISTANT, "content": None}, {**ASSISTANT, "content": ""}):
        expected, outcomes = sent(question, message), list[Any]()
        for history in (expected, sent(question, {**message, "tool_calls": [call]})):
            try:
                outcomes.append(HISTORIANS[name].render_chat(history))
            except ChatTemplateError as error:
                outcomes.append(str(error))
        assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": None},
        {"role": "user"},
        {"role": "tool", "content": None, "tool_call_id": "a"},
        {"role": "assistant", "content": None},
        {"role": "assistant", "tool_calls": []},
        {"role": "assistant", "content": None, "tool_calls": None},
    ],
)
def test_a_message_that_says_nothing_is_refused(message: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match=r"`messages\[0\]\.content` is missing"):
        sent(message)


def test_an_empty_list_of_calls_is_none() -> None:
    """Servers' answers have it, and clients send them back."""
    message = {"role": "assistant", "content": "It is."}
    for codec in HISTORIANS.values():
        question = {"role": "user", "content": "Hi"}
        assert codec.render_chat(sent(question, message)) == codec.render_chat(
            sent(question, {**message, "tool_calls": []})
        )


# Continuing the last message.


@pytest.mark.parametrize("content", ["It is", "It is ", " It", "é <b", "a\n", "<think>\nHm"])
@pytest.mark.parametrize("name", ["hermes", "llama", "mistral", "deepseek", "thinkers"])
def test_a_continued_message_is_as_by_transformers(name: str, content: str) -> None:
    messages = [said("user", "Hi It is"), said("assistant", content)]
    options = ChatOptions(add_generation_prompt=False, continue_final_message=True)
    token_ids = CODECS[name].encode_chat(messages, options)
    assert token_ids == by_transformers(name, messages, options)
    assert CODECS[name].decode_shown(token_ids).rstrip().endswith(content.strip())


@pytest.mark.parametrize(
    ("messages", "options", "text"),
    [
        ([said("user", "Hi")], ChatOptions(add_generation_prompt=False, continue_final_message=True), "assistant"),
        ([said("assistant")], ChatOptions(add_generation_prompt=False, continue_final_message=True), "content"),
        ([], ChatOptions(add_generation_prompt=False, continue_final_message=True), "assistant"),
        ([said("assistant", "Hi")], ChatOptions(continue_final_message=True), "exclude each other"),
        (
            [said("assistant", "<think>Hm</think>Hi")],
            ChatOptions(add_generation_prompt=False, continue_final_message=True),
            "cannot be continued",
        ),
    ],
)
def test_what_cannot_be_continued(messages: list[ChatMessage], options: ChatOptions, text: str) -> None:
    with pytest.raises(ChatTemplateError, match=text) as caught:
        CODECS["deepseek"].encode_chat(messages, options)
    assert caught.value.param == "continue_final_message"


# What a template does not know is refused, and so is too much.


def refused(name: str, options: ChatOptions, *messages: ChatMessage) -> ChatTemplateError:
    with pytest.raises(ChatTemplateError) as caught:
        CODECS[name].encode_chat(list(messages) or [said("user", "Hi")], options)
    return caught.value


@pytest.mark.parametrize(
    "name",
    [
        "messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "bos_token", "eos_token",
        "raise_exception", "namespace", "strftime_now", "range", "message", "enable_thinkin", "",
    ],
)  # fmt: skip
def test_variables_that_nobody_may_set(name: str) -> None:
    error = refused("deepseek", ChatOptions(template_kwargs={name: []}))
    assert error.param == "chat_template_kwargs" and f"`{name}`" in str(error)


def test_what_a_template_does_not_know_is_refused_by_name() -> None:
    with pytest.raises(ChatTemplateError, match="does not know `tools`") as caught:
        codec_of("{{ messages[0].content }}").encode_chat(TURNS[:1], ChatOptions(tools=TOOLS))
    assert caught.value.param == "tools"
    assert refused("hermes", ChatOptions(documents=({"text": "a"},))).param == "documents"
    assert refused("mistral", ChatOptions(add_generation_prompt=False)).param == "add_generation_prompt"
    error = refused("thinkers", ChatOptions(), said("user", "Hi"), said("assistant", tool_calls=(call("{}"),)))
    assert error.param == "messages[1].tool_calls"
    assert (
        refused("mistral", ChatOptions(), said("assistant", tool_calls=(call("{}", call_id="x"),))).param == "messages"
    )


def test_which_variables_a_template_knows() -> None:
    hermes, llama = template_of("hermes"), template_of("llama")
    assert hermes.knows("enable_thinking") and hermes.knows("tools")
    assert not hermes.knows("reasoning_effort") and not hermes.knows("message")
    assert llama.knows("date_string"), "it may set what nobody gave it"
    assert template_of("thinkers").knows("reasoning_effort")


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {"a": [value]}
    return value


def test_what_is_too_deep_or_too_long() -> None:
    deep, long = nested(5_000), "x" * limits.MAX_TEMPLATE_KWARGS_BYTES
    assert "deeper" in str(refused("hermes", ChatOptions(template_kwargs={"enable_thinking": deep})))
    assert "bytes" in str(refused("hermes", ChatOptions(template_kwargs={"enable_thinking": long})))
    assert "deeper" in str(refused("hermes", ChatOptions(tools=(deep,))))
    assert "deeper" in str(refused("thinkers", ChatOptions(documents=(deep,))))
    CODECS["hermes"].encode_chat([said("user", "Hi")], ChatOptions(tools=(nested(limits.MAX_JSON_DEPTH // 2 - 1),)))


def test_all_texts_of_a_prompt_count() -> None:
    options = ChatOptions(tools=TOOLS, documents=({"text": "document"},), template_kwargs={"a": "switch"})
    texts = "|".join(texts_of(TURNS, options))
    for text in ("Hi <b> é", "get_weather", "Łódź & <b>", "abcdefghi", "sunny", "Hm.", "document", "switch", '"n": [1'):
        assert text in texts


# No client writes a token of the template's.


def guarded_of(name: str) -> dict[int, str]:
    """Return the tokens that only this template may write."""
    written = {"<|system|>", "<|user|>"} if name == "phi" else {text for text in ADDED if text in TEMPLATES[name]}
    plain = {"\n\n", "user"}
    added = CODECS[name].added_ids.items()
    return {token_id: text for text, token_id in added if text in SPECIAL or text in written - plain}


@settings(max_examples=examples(400), deadline=None)
@given(data=st.data(), name=st.sampled_from([*CODECS]))
def test_no_string_of_a_client_adds_a_token_of_the_template_s(name: str, data: st.DataObject) -> None:
    """Each place where a client writes: with what it drew there, guarded tokens are those with plain words there. An
    assistant's content may have what the model has written there itself."""
    words = [*SPECIAL, *ADDED, "<|", "|>", "<", "im_end", "/s>", "<s", "\\", '"', " ", "é"]
    hostile = [data.draw(st.lists(st.sampled_from(words), max_size=4).map("".join)) for _ in range(12)]
    said_words = [word for word in words if word not in OWN_MARKS]
    hostile += [data.draw(st.lists(st.sampled_from(said_words), max_size=4).map("".join)) for _ in range(2)]

    def made(texts: list[str]) -> list[int]:
        a, b, c, d, e, f, g, h, i, j, k, m, said_1, said_2 = (f"x{text}" for text in texts)
        if name == "thinkers":
            messages = [said("user", a, name=b), said("assistant", said_1, reasoning_content=d)]
            return CODECS[name].encode_chat(messages, ChatOptions(documents=({e: f, "t": [g, {h: i}]},)))
        if name == "phi":
            return CODECS[name].encode_chat([said("user", a), said("system", b), said("assistant", said_1)])
        identity = "123456789" if name == "mistral" else k
        arguments = json.dumps({d: e, "n": [f, {g: h}]})
        messages = [
            said("user", a),
            said("assistant", said_1, reasoning_content=c, tool_calls=(call(arguments, i, identity),)),
            said("assistant", tool_calls=(call(f"no object {d}", i, identity),)),
            said("assistant", said_2),
            said("tool", j, tool_call_id=k, name=m),
            said("user", f"{a}{b}"),
        ]
        kwargs: Mapping[str, Any] = {"date_string": c} if name == "llama" else {}
        tools = (tool(a, b, **{c: {"enum": [d, e], f: g}}),)
        return CODECS[name].encode_chat(messages, ChatOptions(tools=tools, template_kwargs=kwargs))

    guarded = guarded_of(name)

    def written(token_ids: list[int]) -> list[str]:
        return [guarded[token_id] for token_id in token_ids if token_id in guarded]

    assert written(made(hostile)) == written(made([""] * 14))


def test_an_answer_that_comes_back_keeps_its_own_marks() -> None:
    """Templates cut thoughts of before off by them: else the model would be shown what transformers does not show it.
    A user's own stay text."""
    codec = CODECS["deepseek"]
    thought = [said("user", "Hi"), said("assistant", "<think>\nHm.\n</think>\n\nYes."), said("user", "More.")]
    assert codec.encode_chat(thought) == by_transformers("deepseek", thought, ChatOptions())
    assert "Hm." not in codec.decode_shown(codec.encode_chat(thought))
    asked = codec.encode_chat([said("user", "<think>\nHm.\n</think>\n\nYes.")])
    assert "<think>\nHm.\n</think>" in codec.decode_shown(asked)
    assert asked.count(codec.added_ids["</think>"]) == 0


@pytest.mark.parametrize("name", CODECS)
def test_what_no_template_writes_is_the_token_that_it_is(name: str) -> None:
    """As for transformers; so are white space and words, with which nothing begins or ends."""
    text = "a<unwritten>b unwritten\n\nuser"
    ids = CODECS[name].encode_chat([said("user", text)])
    for token in ("<unwritten>", "unwritten", "\n\n", "user"):
        assert CODECS[name].added_ids[token] in ids, token


def test_what_is_spelled_is_still_said() -> None:
    """In a schema, in arguments, by JSON's own escapes: it is all there, as text."""
    messages = [said("user", "Hi"), said("assistant", tool_calls=(call('{"a": "<|im\\u005fend|>"}', "f<|im_end|>"),))]
    options = ChatOptions(tools=(tool("<|im_end|>", "Ends <|im_end|>", **{"<|im_start|>": {"const": "</s>"}}),))
    codec = CODECS["hermes"]
    token_ids = codec.encode_chat(messages, options)
    text = codec.decode_shown(token_ids)
    assert text == codec.render_chat(messages, options)
    assert text.count("<|im_end|>") == 3 + 4
    ends = token_ids.count(codec.added_ids["<|im_end|>"])
    assert ends == 3


# Special tokens that are shown.


def test_a_detokenizer_shows_the_special_tokens_that_it_is_told_to() -> None:
    codec = CODECS["mistral"]
    token_ids = codec.encode('<s>é[TOOL_CALLS]now[ARGS]{"é": 1}</s><tool_call>')
    for shown, expected in (
        ((), 'énow{"é": 1}<tool_call>'),
        (("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"), 'é[TOOL_CALLS]now[ARGS]{"é": 1}<tool_call>'),
        (("<tool_call>", "</s>"), 'énow{"é": 1}</s><tool_call>'),
    ):
        detokenizer = codec.detokenizer(codec.prompt_end((), codec.ids_shown(shown)))
        assert "".join([*(detokenizer.add_tokens([each]) for each in token_ids), detokenizer.rest()]) == expected


def test_a_shown_token_ends_a_run_of_bytes() -> None:
    """A tokenizer like Llama's: words with ▁, bytes for the rest."""
    vocab = {"<unk>": 0, **{f"<0x{byte:02X}>": byte + 1 for byte in range(256)}}
    vocab |= {piece: len(vocab) + index for index, piece in enumerate(("▁", "▁a", "a"))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken("[T]", special=True), AddedToken("[H]", special=True)])
    codec = TextCodec(tokenizer)
    shown, hidden = codec.added_ids["[T]"], codec.added_ids["[H]"]
    first, second = (byte + 1 for byte in "é".encode())
    for ids in ([vocab["▁a"], first, hidden, second, shown, vocab["▁a"]], [first, shown, second, vocab["a"], shown]):
        detokenizer = codec.detokenizer(codec.prompt_end((), codec.ids_shown(["[T]"])))
        text = "".join([*(detokenizer.add_tokens([each]) for each in ids), detokenizer.rest()])
        assert text == codec.decode_shown([each for each in ids if each != hidden])
        assert text.count("[T]") == ids.count(shown)
