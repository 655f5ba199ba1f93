"""Calls as models write them, right and wrong, in all families; and that it never matters how their text comes."""

import json
import re
from collections.abc import Sequence
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.api.pieces import CallArguments, CallBegin, Content
from services.gateway.api.tools.formats import PARSERS, ToolFormat, format_of
from services.gateway.api.tools.parser import HermesParser, ToolParser
from tests.gateway.splitting import counting, divided, split
from tests.share import examples

NAMES = {"get_weather", "now", "add-2"}
PARIS = '{"city": "Paris"}'
W, N, A = "get_weather", "now", "add-2"
CB, B, S, E, CE = PARSERS["deepseek"].markers
HEAD = f"{B}function{S}get_weather\n```json\n"
TAIL = f"\n```{E}"


class Case(NamedTuple):
    """An answer, what of it is content, and its calls: names and arguments."""

    text: str
    content: str
    calls: Sequence[tuple[str, str]] = ()


def content(text: str) -> Case:
    """What is no call comes out as it is."""
    return Case(text, text)


def hermes(inner: str) -> str:
    return f"<tool_call>{inner}</tool_call>"


WEATHER = f'{{"name": "get_weather", "arguments": {PARIS}}}'
LLAMA_WEATHER = f'{{"name": "get_weather", "parameters": {PARIS}}}'
NOW = '{"name": "now", "arguments": {}}'

HERMES = [
    Case(f"<tool_call>\n{WEATHER}\n</tool_call>", "", [(W, PARIS)]),
    Case(hermes(WEATHER), "", [(W, PARIS)]),
    Case(f"{hermes(WEATHER)}\n{hermes(NOW)}", "", [(W, PARIS), (N, "{}")]),
    Case(hermes(NOW) * 3, "", [(N, "{}")] * 3),
    Case(f"I will look.\n{hermes(WEATHER)}", "I will look.", [(W, PARIS)]),
    Case(f"\n\n{hermes(WEATHER)}\n", "", [(W, PARIS)]),
    Case(f"One {hermes(NOW)} two {hermes(NOW)} three", "One" + "two" + "three", [(N, "{}")] * 2),
    Case(hermes('{"arguments": {"a": [1, 2.50, -3e5]}, "name": "add-2"}'), "", [(A, '{"a": [1, 2.50, -3e5]}')]),
    Case(hermes('{"name": "now"}'), "", [(N, "{}")]),
    Case(hermes('{"name": "now", "arguments": null}'), "", [(N, "{}")]),
    Case(hermes('{"name":"get_weather","parameters":{"city":"Paris"}}'), "", [(W, '{"city":"Paris"}')]),
    Case(
        hermes('{"id": 7, "type": "function", "name": "now", "arguments": { "a" : "\\u00e9\\"}" }, "id": "x"}'),
        "",
        [(N, '{ "a" : "\\u00e9\\"}" }')],
    ),
    Case(
        hermes('{"name": "now", "arguments": {"a": "</tool_call><tool_call>"}}'),
        "",
        [(N, '{"a": "</tool_call><tool_call>"}')],
    ),
    Case(hermes('{"name": "now", "arguments": {"a": "two\nlines"}}'), "", [(N, '{"a": "two\nlines"}')]),
    Case(
        hermes('{"name": "now", "arguments": {"a": {"b": [{}, [], null, true]}}}'),
        "",
        [(N, '{"a": {"b": [{}, [], null, true]}}')],
    ),
    Case('<tool_call>{"name": "now", "arguments": {"a": 1}</tool_call>', "", [(N, '{"a": 1}')]),
    Case('<tool_call>{"name": "now", "arguments": {}}', "", [(N, "{}")]),
    Case('<tool_call>{"name": "now", "arguments": {}}\n</tool_', "", [(N, "{}")]),
    Case('<tool_call>{"name": "now", "arguments": {"a": "cut o', "", [(N, '{"a": "cut o')]),
    Case(hermes('{"name": "now", "arguments": {"a": oops}}') + "!", "!", [(N, '{"a": oops}}')]),
    Case(hermes(f'{NOW[:-1]}, "x": y}}'), ', "x": y}</tool_call>', [(N, "{}")]),
    Case(hermes(f"{NOW}}}"), "}</tool_call>", [(N, "{}")]),
    content("No call at all."),
    content("a < b, <tool, <tool_ call>, </tool_call> "),
    content(hermes("now()")),
    content(hermes('{"name": "launch_missiles", "arguments": {}}')),
    content(hermes('{"arguments": {"a": 1}}')),
    content(hermes("{}")),
    content(hermes('{"name": "now", "arguments": "{}"}')),
    content(hermes('{"name": "now", "arguments": [1]}')),
    content(hermes("{'name': 'now', 'arguments': {}}")),
    content(hermes('{"name": "now", "arguments": {\'a\': 1}}')),
    content(hermes('{"city": "Paris", "name": "now", "arguments": {}}')),
    content('Wait. <tool_call>\n{"name": "no'),
    content("<tool_call>"),
    content("<tool_call> <tool_call"),
    Case(f"<tool_call>oops {hermes(NOW)}", "<tool_call>oops", [(N, "{}")]),
    Case(f"<tool_call>{hermes(NOW)}", "<tool_call>", [(N, "{}")]),
    Case(f"{hermes(NOW)}{hermes('[1]')}{hermes(NOW)}", hermes("[1]"), [(N, "{}")] * 2),
    content(hermes('{"name": now, "arguments": {}}')),
]

LLAMA = [
    Case(LLAMA_WEATHER, "", [(W, PARIS)]),
    Case(f"<|python_tag|>{LLAMA_WEATHER}", "", [(W, PARIS)]),
    Case(f"{LLAMA_WEATHER}; {LLAMA_WEATHER}", "", [(W, PARIS)] * 2),
    Case(f"<|python_tag|>{LLAMA_WEATHER};{NOW}", "", [(W, PARIS), (N, "{}")]),
    Case(f"\n {NOW}\n", "", [(N, "{}")]),
    Case('{"type": "function", "name": "now", "parameters": {"a": 1}}', "", [(N, '{"a": 1}')]),
    Case('{"parameters": {"a": 1}, "name": "now"}', "", [(N, '{"a": 1}')]),
    Case('{"name": "now"}', "", [(N, "{}")]),
    Case('{"name":"now","parameters":null}', "", [(N, "{}")]),
    Case('{"name": "now", "parameters": {"a": "; {"}}', "", [(N, '{"a": "; {"}')]),
    Case(f"I look.<|python_tag|>{NOW}", "I look.", [(N, "{}")]),
    Case(f"I look. <|python_tag|> {NOW}", "I look.", [(N, "{}")]),
    Case(f"{NOW}<|python_tag|>{NOW}", "", [(N, "{}")] * 2),
    Case(f"{NOW};", ";", [(N, "{}")]),
    Case('{"name": "now", "parameters": {"a": [1', "", [(N, '{"a": [1')]),
    Case('{"name": "now", "parameters": {"a": 1}', "", [(N, '{"a": 1}')]),
    Case('{"name": "now", "parameters": {"a": 1,}}', "", [(N, '{"a": 1,}}')]),
    Case('{"name": "now", "parameters": {"a": x}}<|python_tag|>' + NOW, "", [(N, '{"a": x}}'), (N, "{}")]),
    Case(f"{NOW} and more", "and more", [(N, "{}")]),
    Case(f"{NOW}; and more", "; and more", [(N, "{}")]),
    Case(f'{NOW}; {{"name": "nobody", "parameters": {{}}}}', '; {"name": "nobody", "parameters": {}}', [(N, "{}")]),
    content("It is sunny."),
    content('{"answer": 42}'),
    content('{"answer": {"name": "now", "parameters": {}}}'),
    content('{"name": "nobody", "parameters": {}}'),
    content('{"name": "now", "parameters": "{}"}'),
    content('{"parameters": {}}'),
    content("{}"),
    content("{ this is no JSON"),
    content(f"Here: {LLAMA_WEATHER}"),
    content('<|python_tag|>brave_search.call(query="x")'),
    content("<|python_tag|>"),
    content("<|python"),
    content('{"name": "no'),
    content(f"[{LLAMA_WEATHER}]"),
]

MISTRAL = [
    Case(f"[TOOL_CALLS][{WEATHER}]", "", [(W, PARIS)]),
    Case(f"[TOOL_CALLS] [{WEATHER}]", "", [(W, PARIS)]),
    Case(f"[TOOL_CALLS][{WEATHER}, {NOW}]", "", [(W, PARIS), (N, "{}")]),
    Case(f"[TOOL_CALLS] [ {NOW} , {NOW} ] ", "", [(N, "{}")] * 2),
    Case(f"I look.[TOOL_CALLS][{NOW}]", "I look.", [(N, "{}")]),
    Case('[TOOL_CALLS][{"name": "now", "arguments": {}, "id": "abcdefghi"}]', "", [(N, "{}")]),
    Case('[TOOL_CALLS][{"arguments": {"a": 1}, "name": "now"}]', "", [(N, '{"a": 1}')]),
    Case('[TOOL_CALLS][{"name": "now", "arguments": {"a": "]}"}}]', "", [(N, '{"a": "]}"}')]),
    Case('[TOOL_CALLS][{"name": "now", "arguments": {"a": "[TOOL_CALLS]"}}]', "", [(N, '{"a": "[TOOL_CALLS]"}')]),
    Case(f"[TOOL_CALLS][{NOW}", "", [(N, "{}")]),
    Case('[TOOL_CALLS][{"name": "now", "arguments": {"a": "cut', "", [(N, '{"a": "cut')]),
    Case('[TOOL_CALLS][{"name": "now", "arguments": {"a": .5}}]', "", [(N, '{"a": .5}}]')]),
    Case(f"[TOOL_CALLS][{NOW}] ok", "ok", [(N, "{}")]),
    Case(f"[TOOL_CALLS][{NOW}, oops]", ", oops]", [(N, "{}")]),
    Case(f"[TOOL_CALLS]get_weather[ARGS]{PARIS}", "", [(W, PARIS)]),
    Case(f"[TOOL_CALLS]get_weather[ARGS]{PARIS}[TOOL_CALLS]now[ARGS]{{}}", "", [(W, PARIS), (N, "{}")]),
    Case("[TOOL_CALLS]now[CALL_ID]abcdefghi[ARGS]{}", "", [(N, "{}")]),
    Case("[TOOL_CALLS]now{}", "", [(N, "{}")]),
    Case("Sure. [TOOL_CALLS]add-2[ARGS] {} \n", "Sure.", [(A, "{}")]),
    Case('[TOOL_CALLS]now[ARGS]{"a": [1, 2', "", [(N, '{"a": [1, 2')]),
    Case('[TOOL_CALLS]now[ARGS]{"a": ?}[TOOL_CALLS]now[ARGS]{}', "", [(N, '{"a": ?}'), (N, "{}")]),
    Case("[TOOL_CALLS]now[ARGS]{} done", "done", [(N, "{}")]),
    Case("[TOOL_CALLS]nobody[ARGS]{}[TOOL_CALLS]now[ARGS]{}", "[TOOL_CALLS]nobody[ARGS]{}", [(N, "{}")]),
    content("It is [TOOL_CALL] sunny. [TOOL_"),
    content("[TOOL_CALLS]"),
    content("[TOOL_CALLS][]"),
    content("[TOOL_CALLS][1, 2]"),
    content('[TOOL_CALLS][{"name": "nobody", "arguments": {}}]'),
    content('[TOOL_CALLS][{"name": "now", "arguments": "{}"}]'),
    content("[TOOL_CALLS][{'name': 'now'}]"),
    content("[TOOL_CALLS]now"),
    content("[TOOL_CALLS]now[ARGS]"),
    content("[TOOL_CALLS]now[ARGS]now"),
    content("[TOOL_CALLS]now[ARGS][1]"),
    content("[TOOL_CALLS]nobody[ARGS]{}"),
]

DEEPSEEK = [
    Case(f"{CB}{HEAD}{PARIS}{TAIL}{CE}", "", [(W, PARIS)]),
    Case(f"{CB}{HEAD}{PARIS}{TAIL}\n{HEAD}{{}}{TAIL}{CE}", "", [(W, PARIS), (W, "{}")]),
    Case(f"I look.\n{CB}{HEAD}{PARIS}{TAIL}{CE}", "I look.", [(W, PARIS)]),
    Case(f"{CB}{B}function{S}now\n```json\n{{}}\n```{E}{CE}", "", [(N, "{}")]),
    Case(f"{CB}{B}function{S}now\n{{}}{E}{CE}", "", [(N, "{}")]),
    Case(f'{CB}{HEAD}{{\n  "city": "```"\n}}{TAIL}{CE}', "", [(W, '{\n  "city": "```"\n}')]),
    Case(f"{CB}{HEAD}{PARIS}{TAIL}", "", [(W, PARIS)]),
    Case(f"{CB}{HEAD}{PARIS}\n``", "", [(W, PARIS)]),
    Case(f"{CB}{HEAD}{PARIS}{E}{CE}", "", [(W, PARIS)]),
    Case(f'{CB}{HEAD}{{"city": "cut', "", [(W, '{"city": "cut')]),
    Case(f'{CB}{HEAD}{{"city": Paris}}{TAIL}{CE} so', "so", [(W, '{"city": Paris}')]),
    Case(f"{CB}{HEAD}{PARIS}{TAIL}{CE}\nDone.", "Done.", [(W, PARIS)]),
    Case(f"{CB}{HEAD}{PARIS}{TAIL}oops{CE}", f"oops{CE}", [(W, PARIS)]),
    Case(f"{CB}{B}now{S}{{}}{E}{CE}", "", [(N, "{}")]),
    Case(f"{CB}{B}now{S}{{}}{E}{B}get_weather{S}{PARIS}{E}{CE}", "", [(N, "{}"), (W, PARIS)]),
    Case(f'Sure. {CB}{B}add-2{S}{{"a": 1}}{E}{CE}', "Sure.", [(A, '{"a": 1}')]),
    Case(f"{CB}{B}now{S} {{}} {E} {CE} ", "", [(N, "{}")]),
    Case(f"{CB}{B}now{S}{{}}", "", [(N, "{}")]),
    Case(f'{CB}{B}now{S}{{"a": [tru}}{E}{CE}', "", [(N, '{"a": [tru}')]),
    Case(f"{CB}{B}now{S}{{}}{E}{CE}{CB}{B}now{S}{{}}{E}{CE}", "", [(N, "{}")] * 2),
    Case(f"{CB}{B}nobody{S}{{}}{E}{CE}{CB}{B}now{S}{{}}{E}{CE}", f"{CB}{B}nobody{S}{{}}{E}{CE}", [(N, "{}")]),
    Case(f"{CB}{B}now{S}{{}}{E}{B}nobody{S}{{}}{E}{CE}", f"{B}nobody{S}{{}}{E}{CE}", [(N, "{}")]),
    content("It is sunny."),
    content("<｜tool▁calls▁ and <｜"),
    content(CB),
    content(f"{CB}{CE}"),
    content(f"{CB}nothing{CE}"),
    content(f"{CB}{B}function{S}nobody\n```json\n{{}}\n```{E}{CE}"),
    content(f"{CB}{HEAD}[1]{TAIL}{CE}"),
    content(f"{CB}{HEAD}oops{TAIL}{CE}"),
    content(f"{CB}{B}now{E}{CE}"),
    content(f"{CB}{B}now{S}now{E}{CE}"),
    content(f"{CB}{B}{S}{{}}{E}{CE}"),
    content(f"{CB}{B}function{S}"),
]

CASES: dict[ToolFormat, list[Case]] = {"hermes": HERMES, "llama3": LLAMA, "mistral": MISTRAL, "deepseek": DEEPSEEK}
ALL = [pytest.param(form, case, id=f"{form}-{index}") for form in CASES for index, case in enumerate(CASES[form])]


def parser(form: ToolFormat) -> ToolParser:
    return PARSERS[form](NAMES, counting())


@pytest.mark.parametrize("form", CASES)
def test_there_are_cases_enough(form: ToolFormat) -> None:
    assert len(CASES[form]) == len({case.text for case in CASES[form]}) > 30


@pytest.mark.parametrize(("form", "case"), ALL)
def test_what_models_write(form: ToolFormat, case: Case) -> None:
    found = split(parser(form), [case.text])
    assert (found.content, found.named) == (case.content, list(case.calls))
    assert split(parser(form), case.text) == found, "character by character"


@pytest.mark.parametrize(("form", "case"), ALL)
def test_it_can_be_cut_in_two_anywhere(form: ToolFormat, case: Case) -> None:
    whole = split(parser(form), [case.text])
    for at in range(len(case.text)):
        assert split(parser(form), [case.text[:at], case.text[at:]]) == whole


def fragments(form: ToolFormat) -> list[str]:
    """What texts that nearly are calls are made of."""
    markers = PARSERS[form].markers
    return [
        *markers, *(marker[: len(marker) // 2] for marker in markers), *NAMES, "function", "nobody", WEATHER, NOW,
        '{"name": "now", ', '"arguments": ', '"parameters": ', '"id": 1, ', '"now"', PARIS, "{", "}", "[", "]", ",",
        ";", ":", '"', "\\", "\\u12", "null", "1", "-", "\n", " ", "```", "```json", "é", "a",
    ]  # fmt: skip


@pytest.mark.parametrize("form", CASES)
@settings(max_examples=examples(400), deadline=None)
@given(data=st.data())
def test_the_sum_does_not_depend_on_how_text_comes(form: ToolFormat, data: st.DataObject) -> None:
    text = "".join(data.draw(st.lists(st.sampled_from(fragments(form)), max_size=14)))
    if data.draw(st.booleans()):
        text = data.draw(st.sampled_from(CASES[form])).text + text
    sizes = data.draw(st.lists(st.integers(0, 9), max_size=40))
    whole = split(parser(form), [text])
    assert split(parser(form), divided(text, sizes)) == whole
    if not whole.calls:
        assert whole.content == text, "nothing is lost, and nothing is half"
    assert all(call.name in NAMES and call.arguments.startswith("{") for call in whole.calls)


SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8)


@settings(max_examples=examples(200), deadline=None)
@given(
    arguments=st.dictionaries(st.text(max_size=8), VALUES, max_size=4),
    indent=st.sampled_from([None, 2]),
    ascii_only=st.booleans(),
    sizes=st.lists(st.integers(0, 6), max_size=60),
)
def test_any_arguments_come_out_character_for_character(
    arguments: dict[str, object], indent: int | None, ascii_only: bool, sizes: list[int]
) -> None:
    text = json.dumps(arguments, indent=indent, ensure_ascii=ascii_only)
    written: dict[ToolFormat, str] = {
        "hermes": hermes(f'{{"name": "now", "arguments": {text}}}'),
        "llama3": f'{{"name": "now", "parameters": {text}}}',
        "mistral": f"[TOOL_CALLS]now[ARGS]{text}",
        "deepseek": f"{CB}{B}function{S}now\n```json\n{text}\n```{E}{CE}",
    }
    for form, answer in written.items():
        found = split(parser(form), divided(answer, sizes))
        assert (found.content, found.named) == ("", [("now", text)])


def test_a_call_is_told_of_at_once_and_its_arguments_as_they_come() -> None:
    hermes_parser = parser("hermes")
    deltas = [
        "Look",
        ".\n<tool",
        '_call>{"na',
        'me": "get_weather", "arg',
        'uments": {',
        '"ci',
        'ty": "Par',
        'is"}',
        "}<",
    ]
    told = [hermes_parser.feed(delta) for delta in deltas]
    assert told == [
        [Content("Look")], [Content(".")], [], [], [],
        [CallBegin(0, "call_" + "0" * 24, "get_weather"), CallArguments(0, '{"ci')],
        [CallArguments(0, 'ty": "Par')], [CallArguments(0, 'is"}')], [],
    ]  # fmt: skip
    assert hermes_parser.feed("/tool_call>") == hermes_parser.finish() == []


def test_content_does_not_wait() -> None:
    """Only what may be a marker's beginning is held back."""
    for form in CASES:
        one = parser(form)
        assert one.feed("Hello, ") == [Content("Hello,")]
        assert one.feed("world") == [Content(" world")]


def test_ids() -> None:
    """A Mistral's templates take nine characters, and no others."""
    patterns: dict[ToolFormat, str] = {"hermes": "call_[0-9a-f]{24}", "mistral": "[0-9a-f]{9}"}
    for form, pattern in patterns.items():
        text = CASES[form][2].text
        calls = split(PARSERS[form](NAMES, iter(["a1" * 16, "b2" * 16]).__next__), [text]).calls
        assert len(calls) == 2 and calls[0].id != calls[1].id
        assert all(re.fullmatch(pattern, call.id) for call in calls)


@pytest.mark.parametrize("form", CASES)
def test_where_one_call_is_wanted_the_answer_is_over_with_it(form: ToolFormat) -> None:
    several = next(case for case in CASES[form] if len(case.calls) > 1)
    for sizes in ([], [1] * len(several.text)):
        one = PARSERS[form](NAMES, counting(), only_one=True)
        found = split(one, divided(several.text, sizes))
        assert (found.named, one.is_over) == ([several.calls[0]], True)
    one = PARSERS[form](NAMES, counting(), only_one=True)
    assert split(one, ["No call."]).content == "No call." and not one.is_over


def test_long_arguments_take_no_square_of_their_length() -> None:
    """Were they read from their beginning for each delta, these would be 10^10 characters."""
    text = json.dumps({"text": "x" * 200_000, "numbers": list(range(20_000))})
    answer = f'<tool_call>{{"name": "now", "arguments": {text}}}</tool_call>'
    found = split(parser("hermes"), [answer[at : at + 3] for at in range(0, len(answer), 3)])
    assert found.named == [("now", text)]


def test_deep_arguments_take_no_stack() -> None:
    text = '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}"
    assert split(parser("mistral"), [f"[TOOL_CALLS]now[ARGS]{text}"]).named == [("now", text)]


# Which family a template is of.

TEMPLATES: dict[str, ToolFormat | None] = {
    "{% if tools %}<tool_call>\n{\"name\": <function-name>}\n</tool_call>{% endif %}": "hermes",
    "{% if tools %}<tool_call>\n<function=example>\n</tool_call>{% endif %}": None,
    "<tool_call>{name}\n<arg_key>{key}</arg_key>": None,
    "{{ '[TOOL_CALLS]' + name + '[ARGS]' }}": "mistral",
    f"{{{{ '{CB}{B}' + name }}}}": "deepseek",
    "<|start_header_id|>{{ '\"parameters\": ' }}": "llama3",
    "<|start_header_id|>{{ '<|python_tag|>' }}": "llama3",
    "<|start_header_id|>{{ content }}": None,
    "<|im_start|>{{ content }}": None,
    "": None,
}  # fmt: skip


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_family_is_found_by_its_markers(template: str) -> None:
    assert format_of(template) == TEMPLATES[template]


def test_a_parser_keeps_no_name_that_is_no_tools() -> None:
    assert split(HermesParser(set(), counting()), [hermes(NOW)]).content == hermes(NOW)
