"""Grammars of calls, walked with the library that workers use: what they let through is what the parsers read."""

import json
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from services.gateway.api.text import TextCodec
from services.gateway.api.tools.asked import Tool, ToolChoice, tools_of
from services.gateway.api.tools.formats import PARSERS, ToolFormat
from services.gateway.api.tools.grammar import needs_grammar, tool_grammar
from tests.gateway.splitting import counting, split

MARKERS = [marker for parser in PARSERS.values() for marker in parser.markers]
CB, B, S, E, CE = PARSERS["deepseek"].markers
END = "<|end|>"


class Words:
    """One token for each byte, and the markers: as tokens of their own, or not."""

    def __init__(self, *, has_tokens: bool) -> None:
        self.alphabet = {char: index for index, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
        tokenizer = Tokenizer(models.BPE(vocab=self.alphabet, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        # Qwen's markers are no special tokens, the others' are.
        added = [AddedToken(END, special=True)]
        added += [AddedToken(marker, special="tool_call>" not in marker) for marker in MARKERS if has_tokens]
        tokenizer.add_special_tokens([token for token in added if token.special])
        tokenizer.add_tokens([token for token in added if not token.special])
        self.tokenizer = tokenizer
        self.codec = TextCodec(tokenizer)
        self.end = self.codec.added_ids[END]
        self.ll = LLTokenizer(tokenizer.to_str(), eos_token=self.end)
        self.token_ids = self.codec.added_ids

    def plain_ids(self, text: str) -> list[int]:
        """Return a text's tokens with all markers spelled."""
        words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
        return [self.alphabet[char] for word, _ in words for char in word]

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids


WORDS = {"tokens": Words(has_tokens=True), "text": Words(has_tokens=False)}

WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Łódź"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city"],
    "additionalProperties": False,
}


def tool(name: str, parameters: Mapping[str, Any] | None = None, *, strict: bool = False) -> Tool:
    function = {"name": name, "parameters": parameters, "strict": strict}
    return tools_of([{"type": "function", "function": function}])[0]


TOOLS = [tool("get_weather", WEATHER), tool("get", WEATHER)]
STRICT = [tool("get_weather", WEATHER, strict=True), tool("get")]

TEMPLATES: dict[str, tuple[ToolFormat, str]] = {
    "hermes": ("hermes", "<tool_call>"),
    "llama3": ("llama3", "<|python_tag|>"),
    "mistral": ("mistral", "[TOOL_CALLS]"),
    "mistral args": ("mistral", "[TOOL_CALLS][ARGS]"),
    "mistral ids": ("mistral", "[TOOL_CALLS][CALL_ID][ARGS]"),
    "deepseek": ("deepseek", f"{CB}```json"),
    "deepseek 3.1": ("deepseek", CB),
}


def written(template: str, *calls: tuple[str, str]) -> str:
    """Return an answer of such calls as a model of this family writes it."""
    match template:
        case "hermes":
            texts = [f'<tool_call>\n{{"name": "{n}", "arguments": {a}}}\n</tool_call>' for n, a in calls]
            return "\n".join(texts)
        case "llama3":
            return "; ".join(f'{{"name": "{n}", "parameters": {a}}}' for n, a in calls)
        case "mistral":
            texts = [f'{{"name": "{n}", "arguments": {a}}}' for n, a in calls]
            return f"[TOOL_CALLS][{', '.join(texts)}]"
        case "mistral args":
            return "".join(f"[TOOL_CALLS]{n}[ARGS]{a}" for n, a in calls)
        case "mistral ids":
            return "".join(f"[TOOL_CALLS]{n}[CALL_ID]abcDEF123[ARGS]{a}" for n, a in calls)
        case "deepseek":
            return CB + "\n".join(f"{B}function{S}{n}\n```json\n{a}\n```{E}" for n, a in calls) + CE
        case _:
            return CB + "".join(f"{B}{n}{S}{a}{E}" for n, a in calls) + CE


PARIS, PARIS_2 = '{"city": "Paris"}', '{"city": "Paris", "days": 2}'
AUTO, REQUIRED = ToolChoice(mode="auto"), ToolChoice(mode="required")
NAMED = ToolChoice(mode="required", name="get")


class Walk:
    """A matcher of one grammar."""

    def __init__(self, words: Words, lark: str) -> None:
        self.words = words
        self.matcher = LLMatcher(words.ll, lark, log_level=0)
        assert not self.matcher.is_error(), f"{self.matcher.get_error()}\n{lark}"

    def rest(self, ids: list[int]) -> str | None:
        """Return what of these tokens the grammar does not take, or None where it takes all and may end there."""
        self.matcher.reset()
        num_taken = self.matcher.try_consume_tokens(ids)
        if num_taken == len(ids) and self.matcher.is_accepting():
            return None
        return self.words.codec.decode_shown(ids[num_taken:])


def walk(template: str, words: Words, tools: list[Tool], choice: ToolChoice, *, parallel: bool = True) -> Walk:
    form, source = TEMPLATES[template]
    return Walk(words, tool_grammar(form, source, tools, choice, words.token_ids, parallel=parallel))


@pytest.mark.parametrize("words", WORDS.values(), ids=WORDS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_required_calls(template: str, words: Words) -> None:
    required = walk(template, words, TOOLS, REQUIRED)
    for calls in ([("get_weather", PARIS)], [("get", PARIS_2), ("get_weather", PARIS)], [("get", PARIS)] * 5):
        assert required.rest(words.ids(written(template, *calls))) is None
    one = words.ids(written(template, ("get", PARIS)))
    assert required.rest([]) == "", "no call is none"
    assert (required.rest(words.ids("Hello")) or "").startswith("Hello")
    assert (required.rest([*words.ids("a"), *one]) or "").startswith("a"), "nothing before it"
    assert required.rest([*one, *words.ids("!")]) == "!", "nothing behind it"
    for calls in (
        [("git", PARIS)],
        [("get", "{}")],
        [("get", '{"city": "Rome"}')],
        [("get", '{"city": "Paris", "x": 1}')],
    ):
        assert required.rest(words.ids(written(template, *calls)))
    if words is WORDS["text"]:
        return
    spelled = words.plain_ids(written(template, ("get", PARIS)))
    assert (required.rest(spelled) is None) == (template == "llama3"), "markers are the tokens that they are"


@pytest.mark.parametrize("words", WORDS.values(), ids=WORDS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_one_call_and_the_named_one(template: str, words: Words) -> None:
    single = walk(template, words, TOOLS, REQUIRED, parallel=False)
    named = walk(template, words, TOOLS, NAMED)
    for either in (single, named):
        assert either.rest(words.ids(written(template, ("get", PARIS)))) is None
        assert either.rest(words.ids(written(template, ("get", PARIS), ("get", PARIS)))) is not None
    other = words.ids(written(template, ("get_weather", PARIS)))
    assert (single.rest(other), named.rest(other) is None) == (None, False)


@pytest.mark.parametrize("words", WORDS.values(), ids=WORDS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_strict_tools_where_calls_are_free(template: str, words: Words) -> None:
    """Text is free up to a marker; behind it a strict tool's schema holds, and any object for one that is not."""
    free = walk(template, words, STRICT, AUTO)
    for text in ("", "Hello.", "Été < 東 [TOOL <tool_call and\n\n", "<｜tool no"):
        assert free.rest(words.ids(text)) is None
    good = written(template, ("get_weather", PARIS), ("get", '{"x": [1, null]}'))
    bad = [written(template, ("get_weather", '{"city": "Rome"}')), written(template, ("git", "{}"))]
    before = "" if template == "llama3" else "I look.\n"
    assert free.rest(words.ids(before + good)) is None
    for text in bad:
        assert free.rest(words.ids(before + text)) is not None
        assert free.rest(words.plain_ids(before + text)) is not None, "a spelled marker is no way around it"
    one = walk(template, words, STRICT, AUTO, parallel=False)
    assert one.rest(words.ids(before + written(template, ("get_weather", PARIS)))) is None
    assert one.rest(words.ids(good)) is not None


@pytest.mark.parametrize("template", ["hermes", "mistral args"])
def test_text_may_stand_between_free_calls(template: str) -> None:
    call = written(template, ("get_weather", PARIS))
    for words in WORDS.values():
        assert walk(template, words, STRICT, AUTO).rest(words.ids(f"One {call} two {call} three")) is None


def test_a_llama_may_write_its_tag_before_a_free_call_and_no_other_object() -> None:
    words = WORDS["tokens"]
    free = walk("llama3", words, STRICT, AUTO)
    call = written("llama3", ("get_weather", PARIS))
    assert free.rest(words.ids(f"<|python_tag|>{call}")) is None
    assert free.rest(words.ids("\n Hello {}")) is None
    assert free.rest(words.ids('{"answer": 42}')) == 'answer": 42}'


@pytest.mark.parametrize("words", WORDS.values(), ids=WORDS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_whatever_is_drawn_is_calls(template: str, words: Words) -> None:
    """Random answers under the mask, read by the family's parser: valid calls, and nothing else."""
    form, _ = TEMPLATES[template]
    required = walk(template, words, TOOLS, REQUIRED)
    for seed in range(25):
        ids = draw(required.matcher, random.Random(seed), words.end)
        parser = PARSERS[form]({"get", "get_weather"}, counting())
        shown_ids = words.codec.ids_shown(PARSERS[form].markers)
        detokenizer = words.codec.detokenizer(words.codec.prompt_end((), shown_ids))
        found = split(parser, [*(detokenizer.add_tokens([token_id]) for token_id in ids), detokenizer.rest()])
        assert found.content == "" and found.calls
        for call in found.calls:
            arguments = json.loads(call.arguments)
            assert arguments["city"] in ("Paris", "Łódź") and arguments.get("days", 1) in range(1, 10)


def draw(matcher: LLMatcher, rng: random.Random, end: int) -> list[int]:
    """Return a random answer under a grammar's mask."""
    matcher.reset()
    ids: list[int] = []
    while True:
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        token_id = rng.choice(np.flatnonzero(bits).tolist())
        if token_id == end:
            return ids
        assert matcher.consume_token(token_id), matcher.get_error()
        ids.append(token_id)


X: dict[str, Any] = {"properties": {"x": {"type": "integer"}}, "required": ["x"]}
SCHEMAS: list[dict[str, Any]] = [
    {"$ref": "#/$defs/a", "$defs": {"a": {"type": "object", **X}}},
    {"anyOf": [X, {"properties": {"y": {}}, "required": ["y"]}]},
    X,
    {"type": "object", **X, "x-guidance": {"whitespace_flexible": True}},
]


@pytest.mark.parametrize("schema", SCHEMAS)
def test_schemas_of_all_shapes_are_those_of_objects(schema: dict[str, Any]) -> None:
    words = WORDS["text"]
    named = walk("hermes", words, [tool("get", schema)], NAMED)
    assert named.rest(words.ids(written("hermes", ("get", '{"x": 1}')))) is None
    for arguments in ("1", '{"x": "1"}', "[]", '{ "x": 1}'):
        assert named.rest(words.ids(written("hermes", ("get", arguments)))) is not None


def test_a_tool_without_parameters_takes_an_object() -> None:
    words = WORDS["text"]
    named = walk("hermes", words, [tool("get")], NAMED)
    assert named.rest(words.ids(written("hermes", ("get", "{}")))) is None


def test_a_schema_that_is_not_supported_does_no_harm_where_it_is_not_strict() -> None:
    odd = tool("get", {"type": "object", "properties": {"x": {"not": {"type": "integer"}}}})
    assert not needs_grammar([odd], AUTO)
    assert not needs_grammar([odd], ToolChoice(mode="none"))
    assert needs_grammar([odd], REQUIRED) and needs_grammar([odd], NAMED) and needs_grammar([odd, *STRICT], AUTO)
    words = WORDS["text"]
    free = walk("hermes", words, [odd, tool("get_weather", WEATHER, strict=True)], AUTO)
    assert free.rest(words.ids(written("hermes", ("get", '{"x": 1}')))) is None


def test_names_that_read_like_the_grammar_are_names() -> None:
    words = WORDS["text"]
    for template in TEMPLATES:
        for name in ("ARGUMENTS", "NAME", "SOME_ID", "call_0", "start"):
            required = walk(template, words, [tool(name)], REQUIRED)
            assert required.rest(words.ids(written(template, (name, "{}")))) is None
