"""What clients may say that an answer must be: what is held, neutral, or refused by name and place."""

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from services.gateway import limits
from services.gateway.api import constraints
from services.gateway.api.constraints import (
    Calls,
    Constraint,
    Marker,
    ResponseFormat,
    StructuredOutputs,
    Thoughts,
    Written,
    check_together,
    joined,
    understand,
)
from services.gateway.api.invalid import InvalidRequestError
from services.gateway.api.json_schema import FORMATS, HELD, NEUTRAL, CheckGrammar
from services.gateway.api.openai import decode_body
from services.gateway.api.prepare import constraint_in
from tests.engine.grammar_rig import Checkpoint


@pytest.fixture(scope="module")
def demo() -> Checkpoint:
    return Checkpoint("demo", Path())


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Its `<think>` and `</think>` are added tokens, as Qwen3's are."""
    return Checkpoint("byte_level", tmp_path_factory.mktemp("thinker"))


def named(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **more}}


def asked_for(asked: dict[str, Any]) -> Constraint | None:
    """Return what a body with these fields asks of an answer, through JSON and its types."""
    body = decode_body(json.dumps({"model": "m", "prompt": "p"} | asked).encode(), is_chat=False)
    constraint = constraint_in(body)
    if constraint is not None:
        check_together(constraint, ignore_eos=bool(body.ignore_eos), allowed_token_ids=body.allowed_token_ids or ())
    return constraint


def constraint_of(asked: dict[str, Any], check: CheckGrammar) -> str:
    """Return the grammar of a body with these fields."""
    constraint = asked_for(asked)
    return "" if constraint is None else understand(constraint, check)


def refusal(demo: Checkpoint, **asked: object) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as raised:
        constraint_of(asked, demo.check)
    return raised.value


# Which constraint.


@pytest.mark.parametrize(
    ("asked", "good", "bad"),
    [
        ({"response_format": {"type": "json_object"}}, '{"a": [1]}', "[1]"),
        ({"response_format": named({"type": "integer"}, strict=True, description="a number")}, "12", '"a"'),
        ({"response_format": named({"type": "integer"}, strict=False)}, "12", '"a"'),
        ({"response_format": named(True)}, "[null]", "nul"),
        ({"structured_outputs": {"json": {"type": "integer"}}}, "12", "x"),
        ({"structured_outputs": {"json": '{"type": "integer"}'}}, "12", "x"),
        ({"structured_outputs": {"json": {}, "disable_any_whitespace": True}}, '{"a":1}', '{"a": 1}'),
        ({"structured_outputs": {"json_object": True, "disable_fallback": True}}, "{}", "[]"),
        ({"structured_outputs": {"regex": "a/b+"}}, "a/bb", "a/"),
        ({"structured_outputs": {"choice": ["yes", 'n"o/\n', "é😀"]}}, 'n"o/\n', "no"),
        ({"structured_outputs": {"choice": ["yes", "é😀", "yes"]}}, "é😀", "é"),
        ({"structured_outputs": {"grammar": 'start: "a" %json {"type": "null"}'}}, "anull", "a"),
        ({"structured_outputs": {"grammar": 'root ::= "a" [0-9]+'}}, "a12", "a"),
        ({"structured_outputs": {"grammar": 'start: "::=" /[0-9]+/'}}, "::=12", "12"),
        ({"guided_json": {"type": "null"}, "guided_decoding_backend": "outlines"}, "null", "1"),
        ({"guided_regex": "[0-9]{3}"}, "123", "12"),
        ({"guided_choice": ["a", "b"]}, "b", "c"),
        ({"guided_grammar": 'start: "x"'}, "x", "y"),
    ],
)
def test_what_is_asked_for_is_held(demo: Checkpoint, asked: dict[str, Any], good: str, bad: str) -> None:
    grammar = constraint_of(asked, demo.check)
    assert demo.takes(grammar, good) and not demo.takes(grammar, bad)


def test_what_asks_for_nothing(demo: Checkpoint) -> None:
    names = ("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")
    for asked in ({}, dict.fromkeys(names), {"response_format": {"type": "text"}}, {"guided_decoding_backend": "any"}):
        assert constraint_of(asked, demo.check) == ""
    asked = {"response_format": {"type": "text"}, "guided_regex": "a"}
    assert constraint_of(asked, demo.check) == "start: /a/"


@pytest.mark.parametrize(
    ("asked", "param", "message"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type", "xml"),
        ({"response_format": "json_object"}, "response_format", "Expected `object"),
        ({"response_format": {"type": "json_object", "schema": {}}}, "response_format", "unknown field `schema`"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "missing required field `json_schema`"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format.json_schema",
         "missing required field `schema`"),
        ({"response_format": named({}, strickt=True)}, "response_format.json_schema", "unknown field `strickt`"),
        ({"response_format": named(3)}, "response_format.json_schema.schema", "got `int`"),
        ({"structured_outputs": {}}, "structured_outputs", "has none of json, regex, choice, grammar, json_object"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs", "has none of"),
        ({"structured_outputs": {"jsn": {}}}, "structured_outputs", "unknown field `jsn`"),
        ({"structured_outputs": {"json": {}, "whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern",
         "not supported"),
        ({"structured_outputs": {"structural_tag": {}, "json": {}}}, None, ""),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag", "not supported"),
        ({"structured_outputs": {"json": {}, "disable_additional_properties": True}},
         "structured_outputs.disable_additional_properties", "not supported"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "is no JSON Schema"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "must have choices"),
        ({"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs.choice", "none of them empty"),
        ({"structured_outputs": {"choice": ["a", 1]}}, "structured_outputs.choice[1]", "Expected `str`, got `int`"),
        ({"structured_outputs": {"regex": "a("}}, "structured_outputs.regex", "unclosed group"),
        ({"structured_outputs": {"regex": "(?=a)a"}}, "structured_outputs.regex", "look-around"),
        ({"structured_outputs": {"grammar": "start: nowhere"}}, "structured_outputs.grammar", 'name: "nowhere"'),
        ({"structured_outputs": {"grammar": 'root ::= "a'}}, "structured_outputs.grammar", "is no GBNF"),
        ({"structured_outputs": {"grammar": 'start: %json // {}\n {"not": {}}'}}, "structured_outputs.grammar",
         "at /not: `not` is not supported"),
        ({"structured_outputs": {"grammar": 'start: %json {"x-guidance": {"lenient": true}, "if": {}}'}},
         "structured_outputs.grammar", "at /if: `if` is not supported"),
        ({"structured_outputs": {"grammar": 'start: a\na[temperature=0.5]: "x"'}}, "structured_outputs.grammar",
         "temperature is not supported"),
        ({"guided_json": {}, "guided_regex": "a"}, "guided_regex", "`guided_json` and `guided_regex` cannot both"),
        ({"response_format": named({}), "structured_outputs": {"regex": "a"}}, "structured_outputs.regex",
         "`response_format.json_schema.schema` and `structured_outputs.regex` cannot both"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice", "cannot both"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "not supported"),
        ({"guided_grammar": ' {"grammars": [{"json_schema": {"not": {}}}]}'}, "guided_grammar", "neither Lark nor"),
    ],
)  # fmt: skip
def test_what_is_refused(demo: Checkpoint, asked: dict[str, Any], param: str | None, message: str) -> None:
    if param is None:  # an empty one asks for nothing
        assert constraint_of(asked, demo.check)
        return
    error = refusal(demo, **asked)
    assert error.param == param and message in error.message and error.status == 400
    assert f"{param}`" in error.message and "\n" not in error.message


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"guided_json": {"description": "x" * limits.MAX_SCHEMA_BYTES}}, "bytes"),
        ({"guided_json": {"enum": ["x" * (limits.MAX_LITERAL_CHARACTERS + 1)]}}, "at /enum: a text of"),
        ({"guided_json": {"const": [{"y" * (limits.MAX_LITERAL_CHARACTERS + 1): 1}]}}, "characters in a name"),
        ({"guided_json": {"properties": {"x" * (limits.MAX_LITERAL_CHARACTERS + 1): {}}}}, "characters in a name"),
        ({"guided_json": {"$defs": {"😀" + "/" * 31_000: {"anyOf": [{}] * 3_400}}}}, "characters in a name"),
        ({"guided_regex": "x" * (limits.MAX_REGEX_CHARACTERS + 1)}, "characters"),
        ({"guided_grammar": f'start: "{"x" * limits.MAX_CLIENT_GRAMMAR_CHARACTERS}"'}, "characters"),
        ({"guided_choice": ["x" * (limits.MAX_LITERAL_CHARACTERS + 1)]}, "characters in one"),
        ({"guided_choice": [f"{number:0999}" for number in range(34)]}, "characters"),
        ({"guided_json": {"multipleOf": limits.MAX_MULTIPLE_OF + 1}}, "at /multipleOf"),
        ({"guided_json": {"allOf": [{"multipleOf": 997}, {"items": {"multipleOf": 991}}]}},
         "at /allOf/1/items/multipleOf"),
        ({"guided_json": {"multipleOf": 10**400}}, "at /multipleOf"),
        ({"guided_grammar": 'start: %json {"multipleOf": 988027}'}, "at /multipleOf"),
    ],
)  # fmt: skip
def test_what_is_too_large(demo: Checkpoint, asked: dict[str, Any], message: str) -> None:
    assert message in refusal(demo, **asked).message


def test_what_contradicts_a_grammar(demo: Checkpoint) -> None:
    check_together(Constraint(Written("guided_regex", "regex", "a")), ignore_eos=False, allowed_token_ids=())
    for field, value in (("ignore_eos", True), ("allowed_token_ids", [1])):
        error = refusal(demo, guided_regex="a", **{field: value})
        assert error.param == field and f"`{field}` contradicts `guided_regex`" in error.message


def test_other_routes_ask_with_types() -> None:
    """What is no body's field: /v1/responses has a format, and tools have schemas."""
    asked = msgspec.convert({"type": "json_object"}, ResponseFormat)
    assert constraints.constraint_of(asked) is not None and constraints.constraint_of() is None
    assert constraints.constraint_of(guided=StructuredOutputs()) is None


# JSON Schema: each keyword of draft 2020-12 (and older ones that are still seen): a schema, what it takes, what it does
# not; or its refusal.

TEXT, WHOLE = {"type": "string"}, {"type": "integer"}
HELD_CASES: dict[str, list[tuple[Any, list[str], list[str]]]] = {
    "type": [({"type": ["string", "null"]}, ['"a"', "null"], ["1"]), (WHOLE, ["-3"], ["1.5", '"a"'])],
    "enum": [({"enum": [1, "a", None, {"b": [2]}]}, ['{"b":[2]}', "null"], ["2"]),
             ({"type": "string", "enum": ["a", 1]}, ['"a"'], ["1"])],
    "const": [({"const": {"a": [1, True]}}, ['{"a":[1,true]}'], ['{"a":[1]}']), 
              ({"const": "é\n"}, ['"é\\n"'], ['"e"'])],
    "anyOf": [({"anyOf": [TEXT, WHOLE], "maxLength": 1}, ['"a"', "1"], ["null", '"ab"'])],
    "oneOf": [({"oneOf": [TEXT, WHOLE]}, ['"a"', "1"], ["null"])],
    "allOf": [({"type": "string", "allOf": [{"pattern": "^a"}, {"pattern": "b$"}]}, ['"axb"'], ['"ax"', '"xb"'])],
    "$ref": [({"$ref": "#/$defs/a~1b%25", "$defs": {"a/b%": TEXT}, "minLength": 2}, ['"ab"'], ["1", '"a"']),
             ({"$ref": "#/definitions/a", "definitions": {"a": WHOLE}}, ["1"], ['"a"']),
             ({"$ref": "#name", "$defs": {"a": {"$anchor": "name", **WHOLE}}}, ["1"], ['"a"']),
             ({"properties": {"a": {"$ref": "#"}}, "type": "object"}, ['{"a":{"a":{}}}'], ['{"a":1}'])],
    "properties": [({"type": "object", "properties": {"a": WHOLE}}, ["{}", '{"a":1,"b":"x"}'],
                    ['{"a":"x"}', '{"\\u0061":"x"}', '{"a":1,"a":"x"}'])],
    "required": [({"required": ["a"]}, ['{"a":1}', "3"], ["{}"])],
    "additionalProperties": [({"type": "object", "additionalProperties": False}, ["{}"], ['{"a":1}']),
                             ({"type": "object", "properties": {"a": WHOLE}, "additionalProperties": TEXT},
                              ['{"a":1,"b":"x"}'], ['{"b":1}'])],
    "patternProperties": [({"type": "object", "patternProperties": {"^a": WHOLE}}, ['{"ab":1,"b":"x"}'],
                           ['{"ab":"x"}', '{"\\u0061":"x"}'])],
    "minProperties": [({"type": "object", "minProperties": 2, "required": ["a"]}, ['{"a":1,"b":1}'], ['{"a":1}'])],
    "maxProperties": [({"type": "object", "maxProperties": 1}, ['{"a":1}'], ['{"a":1,"b":1}'])],
    "items": [({"type": "array", "items": WHOLE}, ["[1,2]", "[]"], ['["a"]']),
              ({"type": "array", "items": [TEXT, WHOLE]}, ['["a",1]'], ["[1]"])],
    "prefixItems": [({"type": "array", "prefixItems": [TEXT], "items": WHOLE}, ['["a",1]'], ['["a","b"]', "[1]"])],
    "additionalItems": [({"type": "array", "items": [TEXT], "additionalItems": False}, ['["a"]'], ['["a",1]'])],
    "minItems": [({"minItems": 2}, ["[1,2]", "3"], ["[1]"])],
    "maxItems": [({"maxItems": 1}, ["[1]", "3"], ["[1,2]"])],
    "minLength": [({"type": "string", "minLength": 2}, ['"ab"', '"äö"'], ['"a"', '"\\n"'])],
    "maxLength": [({"type": "string", "maxLength": 2}, ['"ab"', '"😀😀"'], ['"abc"'])],
    "pattern": [({"type": "string", "pattern": "a+"}, ['"xax"'], ['"b"']),
                ({"type": "string", "pattern": "^a|b$"}, ['"ax"', '"xb"'], ['"xx"'])],
    "minimum": [({"type": "number", "minimum": 3}, ["3", "3.5"], ["2.9"])],
    "maximum": [({"type": "integer", "maximum": 3}, ["3", "-9"], ["4"])],
    "exclusiveMinimum": [({"type": "number", "exclusiveMinimum": 3}, ["3.01"], ["3"])],
    "exclusiveMaximum": [({"type": "integer", "exclusiveMaximum": 3}, ["2"], ["3"])],
    "multipleOf": [({"type": "integer", "multipleOf": 7}, ["14", "0", "-7"], ["8"]),
                   ({"type": "number", "multipleOf": 0.1}, ["0.3"], ["0.35"])],
    "format": [({"type": "string", "format": "date"}, ['"2024-02-29"'], ['"2024-13-01"', '"x"'])],
}  # fmt: skip
FORMAT_CASES = {
    "date": ("2020-01-31", "2020-02-30"), "time": ("10:00:00Z", "25:00:00Z"), "duration": ("P3DT4H", "3 days"),
    "date-time": ("2020-01-31T10:00:00+01:00", "2020-01-31"), "email": ("a@example.org", "a"),
    "uri": ("https://a/b", "a b"),
    "hostname": ("example.org", "-a.org"), "ipv4": ("127.0.0.1", "256.0.0.1"), "ipv6": ("2001:db8::1", "::1::"),
    "uuid": ("01234567-89ab-cdef-0123-456789abcdef", "0123"),
}  # fmt: skip
REFUSED = {
    "not": {}, "if": {}, "then": {}, "else": {}, "uniqueItems": True, "contains": {}, "minContains": 1,
    "maxContains": 1,
    "propertyNames": {}, "dependentRequired": {}, "dependentSchemas": {}, "dependencies": {}, "unevaluatedItems": False,
    "unevaluatedProperties": False, "$dynamicRef": "#", "$dynamicAnchor": "a", "$recursiveRef": "#",
    "$recursiveAnchor": True, "$vocabulary": {}, "nullable": True, "propertyOrdering": [], "minLenght": 1,
    "x-guidance": {"lenient": True}, "extends": {}, "disallow": "string", "divisibleBy": 2,
}  # fmt: skip
NEUTRAL_VALUES: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema", "$id": "https://a/b", "id": "x", "$anchor": "a",
    "$defs": {"a": {}}, "definitions": {"a": {}}, "examples": [1], "example": 1, "deprecated": True, "readOnly": True,
    "writeOnly": True, "externalDocs": {}, "xml": {}, "discriminator": {"propertyName": "kind"}, "contentSchema": {},
}  # fmt: skip


def test_each_keyword_stands_in_a_table() -> None:
    assert HELD_CASES.keys() == HELD and FORMAT_CASES.keys() == FORMATS
    assert not HELD & NEUTRAL and not REFUSED.keys() & (HELD | NEUTRAL) and NEUTRAL_VALUES.keys() <= NEUTRAL


@pytest.mark.parametrize("keyword", HELD_CASES)
def test_a_keyword_that_is_held(demo: Checkpoint, keyword: str) -> None:
    for schema, good, bad in HELD_CASES[keyword]:
        grammar = constraint_of({"guided_json": schema}, demo.check)
        for text in good:
            assert demo.takes(grammar, text), (schema, text)
        for text in bad:
            assert not demo.takes(grammar, text), (schema, text)


@pytest.mark.parametrize("name", FORMAT_CASES)
def test_a_format_that_is_held(demo: Checkpoint, name: str) -> None:
    grammar = constraint_of({"guided_json": {"type": "string", "format": name}}, demo.check)
    good, bad = FORMAT_CASES[name]
    assert demo.takes(grammar, json.dumps(good)) and not demo.takes(grammar, json.dumps(bad))


@pytest.mark.parametrize("keyword", REFUSED)
def test_a_keyword_that_is_refused(demo: Checkpoint, keyword: str) -> None:
    """Wherever it stands, a definition that nobody refers to included."""
    for schema, place in (
        ({"type": "string", keyword: REFUSED[keyword]}, ""),
        ({"type": "object", "properties": {"a/b": {"items": {keyword: REFUSED[keyword]}}}}, "/properties/a~1b/items"),
        ({"$defs": {"unused": {keyword: REFUSED[keyword]}}}, "/$defs/unused"),
        ({"anyOf": [{}, {"additionalProperties": {"prefixItems": [{keyword: REFUSED[keyword]}]}}]},
         "/anyOf/1/additionalProperties/prefixItems/0"),
    ):  # fmt: skip
        error = refusal(demo, response_format=named(schema))
        assert f" at {place}/{keyword}: `{keyword}` is not supported" in error.message
        assert error.param == "response_format.json_schema.schema" and error.code == "invalid_schema"


def test_a_misspelt_keyword_is_told_what_it_may_be(demo: Checkpoint) -> None:
    assert "is `minLength` meant?" in refusal(demo, guided_json={"minLenght": 1}).message
    assert "meant" not in refusal(demo, guided_json={"uniqueItems": True}).message


@pytest.mark.parametrize("name", ["idn-email", "regex", "uri-reference", "int32", "unknown", "Date", 3, None, ["date"]])
def test_a_format_that_is_refused(demo: Checkpoint, name: Any) -> None:
    for kind in ("string", "integer"):
        message = refusal(demo, guided_json={"items": {"type": kind, "format": name}}).message
        assert f"at /items/format: the format {name!r} is not supported" in message


@pytest.mark.parametrize("keyword", [*sorted(NEUTRAL), "x-anything"])
def test_a_keyword_that_is_neutral(demo: Checkpoint, keyword: str) -> None:
    schema = {"type": "integer", keyword: NEUTRAL_VALUES.get(keyword, "text")}
    grammar = constraint_of({"guided_json": schema}, demo.check)
    assert demo.takes(grammar, "1") and not demo.takes(grammar, '"1"')


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"properties": {"a": {"items": {"type": "strin"}}}}, "at /properties/a/items cannot be held: Invalid"),
        ({"properties": {"a": {"minLength": "x", "type": "string"}}}, "at /properties/a cannot be held"),
        ({"anyOf": [TEXT, {"properties": [1], "type": "object"}]}, "at /anyOf/1 cannot be held: properties must"),
        ({"$defs": {"a": {"pattern": "(?=a)", **TEXT}}, "items": {"$ref": "#/$defs/a"}}, "look-around"),
        ({"properties": {"a": {"type": "string", "minLength": 3, "maxLength": 2}}, "required": ["a"], "type": "object"},
         "at /properties/a cannot be held: Unsatisfiable schema: minLength (3) is greater than maxLength (2)"),
        ({"type": "object", "properties": {"a": False}, "required": ["a"]}, "required property 'a' is unsatisfiable"),
        ({"type": "object", "additionalProperties": False, "required": ["a"]}, "required property 'a'"),
        (False, "is false: no answer satisfies it"),
        ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "oneOf"),
        ({"$ref": "https://example.org/a.json"}, "at /$ref: 'https://example.org/a.json' refers to no schema within"),
        ({"$ref": "#/$defs/missing"}, "at /$ref: '#/$defs/missing' refers to no schema within"),
        ({"x-a": {"multipleOf": 10**7}, "$ref": "#/x-a"}, "at /$ref: '#/x-a' refers to no schema within"),
        ({"default": {"not": {}}, "$ref": "#/default"}, "at /$ref: '#/default' refers to no schema within"),
        ({"$ref": 3}, "at /$ref: 3 refers to no schema within"),
        ({"$ref": "#"}, "never ends"),
        ({"items": {"$ref": "#/$defs/a"}, "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}}, "never ends"),
        ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "never ends"),
        ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "never ends"),
        ({"required": "a"}, ""),
        ({"enum": "a"}, ""),
        ({"items": 3}, ""),
        ({"multipleOf": True}, ""),
        ({"multipleOf": 0}, ""),
        ({"anyOf": {}}, ""),
    ],
)  # fmt: skip
def test_a_bad_schema_is_refused_with_its_place(demo: Checkpoint, schema: Any, message: str) -> None:
    error = refusal(demo, response_format=named(schema))
    assert message in error.message and error.code == "invalid_schema" and "$defs/whole" not in error.message


BEYOND = 2**53
NUMBER = {"type": "number"}


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"enum": [BEYOND + 1]}, f"at /enum: {BEYOND + 1} is beyond 2**53"),
        ({"items": {"const": {"a": [-BEYOND - 1]}}}, f"at /items/const: {-BEYOND - 1} is beyond 2**53"),
        ({"enum": ["a", 10**40]}, "is beyond 2**53"),
        ({**WHOLE, "minimum": BEYOND + 1}, "would be taken"),
        ({**WHOLE, "maximum": BEYOND + 1}, "could not be written"),
        ({"anyOf": [TEXT, {**WHOLE, "exclusiveMaximum": -BEYOND - 1}]}, "at /anyOf/1 cannot be held"),
        ({**WHOLE, "minimum": 2**63}, "cannot be held"),
        ({**NUMBER, "exclusiveMinimum": 0, "maximum": 0.5}, "0 would be taken"),
        ({**NUMBER, "exclusiveMinimum": 0, "maximum": 0.3}, "0 would be taken"),
        ({**NUMBER, "exclusiveMinimum": 1, "maximum": 1.5}, "1 would be taken"),
        ({**NUMBER, "minimum": -1.5, "exclusiveMaximum": -1}, "-1 would be taken"),
        ({"allOf": [{**NUMBER, "exclusiveMinimum": 0}, {"maximum": 0.5}]}, "at / cannot be held"),
        ({"$defs": {"a": {"$anchor": "b", "maximum": 0.5}},
          "properties": {"p": {"$ref": "#b", **NUMBER, "exclusiveMinimum": 0}}}, "at /properties/p cannot be held"),
        ({**NUMBER, "exclusiveMinimum": 0, "anyOf": [{"maximum": 7}, {"oneOf": [{"maximum": 0.5}]}]},
         "at / cannot be held"),
        ({"enum": ["a\u0007b"]}, "at /enum: the character U+0007 would be dropped"),
        ({"const": {"x": ["\u007f"]}}, "the character U+007F"),
        ({"const": "\u0000"}, "the character U+0000"),
        *(({**TEXT, "pattern": pattern}, "no text that can be written matches its pattern") for pattern in (
            r"^a\x07b$", r"a\x7Fb", r"\u0007", r"\u{7}", r"\x{0007}", r"\a", r"\v", "a\u0001", r"[\x07]",
            r"x[\x00-\x07]y", r"[\x0e\x0f]", r"\x7f(a|b)?",
        )),
        ({**TEXT, "pattern": "[[:alpha:]]"}, "at /pattern: '[:' in brackets is not supported"),
        ({"patternProperties": {"[+--]": {}}}, "at /patternProperties: '--' in brackets is not supported"),
        ({**TEXT, "pattern": "[]a]"}, "at /pattern: ']a' in brackets is not supported"),
        ({**TEXT, "pattern": "[a"}, "at /pattern: a bracket is not closed"),
        ({"type": "object", "minProperties": 2}, "at most 1 can be held here"),
        ({"type": "object", "required": ["a", "a"], "minProperties": 3}, "at most 2 can be held here"),
        ({"type": "object", "patternProperties": {"^a": WHOLE}, "additionalProperties": False, "minProperties": 2},
         "at most 1 can be held here"),
    ],
)  # fmt: skip
def test_what_the_library_would_round_drop_or_repeat_is_refused(demo: Checkpoint, schema: Any, message: str) -> None:
    error = refusal(demo, response_format=named(schema))
    assert message in error.message and error.code == "invalid_schema"
    if schema.get("type") == "number" or "pattern" in schema:
        inside = refusal(demo, guided_grammar=f'start: "a" %json {json.dumps(schema)}')
        assert message in inside.message and inside.param == "guided_grammar"
        calls = Calls(f'start: "f" %json {json.dumps(schema)}', (("tools[0]", json.dumps(schema)),))
        with pytest.raises(InvalidRequestError, match=re.escape(message)) as raised:
            understand(Constraint(None, calls), demo.check)
        assert raised.value.param == "tools[0]"


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"enum": [BEYOND, -BEYOND]}, [str(BEYOND), str(-BEYOND)], [str(BEYOND + 1)]),
        ({**WHOLE, "minimum": BEYOND, "maximum": BEYOND}, [str(BEYOND)], [str(BEYOND - 1)]),
        ({**WHOLE, "maximum": 2**63 - 1}, [str(2**63 - 1)], [str(2**63)]),
        ({**NUMBER, "exclusiveMinimum": 0, "maximum": 1}, ["0.5", "1"], ["0", "0.0", "-0"]),
        ({**NUMBER, "exclusiveMinimum": 0, "exclusiveMaximum": 1}, ["0.4"], ["0", "1", "1.0"]),
        ({**TEXT, "pattern": r"^.\s[.\s]$"}, ['"a ."', '"a\\n "'], ['"\\r  "', '"a\u0085."', '"\u2028 ."']),
        ({"anyOf": [{**NUMBER, "exclusiveMinimum": 0}, {**NUMBER, "maximum": -0.5}]}, ["1", "-0.5"], ["0"]),
        ({"const": "a\b\f\n\r\t"}, ['"a\\b\\f\\n\\r\\t"'], ['"a"']),
        ({"const": {"a\u0007": 1}}, ['{"a\\u0007":1}'], ['{"a":1}']),
        ({**TEXT, "pattern": r"^[^\x00-\x1f\x7f]{2}$"}, ['"ab"'], ['"a"']),
        ({**TEXT, "pattern": r"^[^\"]+$"}, ['"a\\n"'], ['"\\""']),
        ({**TEXT, "pattern": r"^([^\"\\]|\\[\"\\])*$"}, ['"a\\\\\\""'], ['"\\""', '"\\\\"']),
        ({**TEXT, "pattern": r"^[\x00-\x1fz]+$"}, ['"z\\t"'], ['"\\""', '"\\\\"']),
        ({**TEXT, "pattern": r"^\p{Cc}$"}, ['"\\n"'], ['"\\""']),
        ({**TEXT, "pattern": r"^a(\x07|[\x07x])?b$"}, ['"axb"', '"ab"'], ['"a\u0007b"']),
        ({**TEXT, "pattern": r"^[[&~^]\&?$"}, ['"["', '"&&"', '"~"', '"^"'], ['"a"', '"\\""']),
        ({**TEXT, "pattern": r"^[\\s]$"}, ['"s"', '"\\\\"'], ['" "']),
        ({**TEXT, "pattern": r"^\d\w[\d\w]$"}, ['"3a4"'], ['"٣aa"', '"3é3"', '"3a٣"', '"3aé"']),
        ({**TEXT, "pattern": r"(?s)^.$"}, ['"\\r"'], ['"aa"']),
        ({"type": "object", "patternProperties": {r"^[^\"]$": WHOLE}, "additionalProperties": False}, ['{"a":1}'],
         ['{"\\"":1}']),
        ({"type": "object", "minProperties": 2, "required": ["a", "b"]}, ['{"a":1,"b":1}'], ['{"a":1,"a":1}']),
    ],
)  # fmt: skip
def test_what_is_near_to_that_is_held(demo: Checkpoint, schema: Any, good: list[str], bad: list[str]) -> None:
    grammar = constraint_of({"guided_json": schema}, demo.check)
    assert [text for text in good if not demo.takes(grammar, text)] == []
    assert [text for text in bad if demo.takes(grammar, text)] == []


def test_too_many_bounds_to_try(demo: Checkpoint) -> None:
    many = {f"p{number}": {**NUMBER, "exclusiveMinimum": number} for number in range(limits.MAX_BOUNDS + 1)}
    assert "too many bounds" in refusal(demo, guided_json={"type": "object", "properties": many}).message
    ways = [{"anyOf": [{"exclusiveMinimum": 10 * i + j} for j in range(10)]} for i in range(10)]
    assert refusal(demo, guided_json={**NUMBER, "allOf": ways}).code == "invalid_schema"


@pytest.mark.parametrize("is_within", [False, True])
def test_names_that_may_be_left_out_are_bounded(demo: Checkpoint, *, is_within: bool) -> None:
    """Beyond it the library gives an answer up in its midst."""

    def schema(num_names: int) -> dict[str, Any]:
        names = {f"n{number}": WHOLE for number in range(num_names)}
        found = {"type": "object", "properties": names, "required": ["n1"]}
        return {"type": "array", "items": found} if is_within else found

    most = limits.MAX_OPTIONAL_NAMES + 1
    text = "[%s]" if is_within else "%s"
    assert demo.takes(constraint_of({"guided_json": schema(most)}, demo.check), text % '{"n1":5,"n7":3,"n9":0}')
    message = refusal(demo, guided_json=schema(most + 1)).message
    assert f"properties: {most} may be left out, and at most {most - 1} can be held" in message


def test_choices_are_no_ways_each(demo: Checkpoint) -> None:
    choices = [f"choice {number:04d}" for number in range(2_000)]
    assert demo.takes(constraint_of({"guided_choice": choices}, demo.check), choices[1_234])


def test_what_has_too_many_ways_at_its_beginning(demo: Checkpoint) -> None:
    ways = " | ".join(f'"{number:04d}"' for number in range(2_000))
    assert "over 1000 ways" in refusal(demo, guided_grammar=f"start: {ways}").message


def test_a_schema_that_is_nested_without_end(demo: Checkpoint) -> None:
    schema: Any = {}
    for depth in range(700):
        schema = {"items": schema}
        if depth in (limits.MAX_JSON_DEPTH, 699):
            assert f"nested deeper than {limits.MAX_JSON_DEPTH}" in refusal(demo, guided_json=schema).message
    assert refusal(demo, guided_json='{"items":' * 20_000 + "{}" + "}" * 20_000).param == "guided_json"


def test_white_space_has_an_end(demo: Checkpoint) -> None:
    grammar = constraint_of({"guided_json": {"type": "array"}}, demo.check)
    for good in ("[1, 2]", f"[\n{' ' * limits.MAX_INDENT}1\r\n\t]", "[ 1 ,\n2\n]"):
        assert demo.takes(grammar, good), good
    for bad in ("[  1]", f"[\n{' ' * (limits.MAX_INDENT + 1)}1]", "[\n\n1]", " []", "[] "):
        assert not demo.takes(grammar, bad), bad


# Thoughts before the document.


@pytest.mark.parametrize("is_token", [True, False])
def test_thoughts_come_before_the_document(thinker: Checkpoint, demo: Checkpoint, is_token: bool) -> None:
    model = thinker if is_token else demo

    def marker(text: str) -> Marker:
        return Marker(text, model.tokenizer.token_to_id(text))

    assert (marker("</think>").token_id is not None) == is_token
    document = constraint_of({"guided_json": {"type": "integer"}}, model.check)
    written = Written("guided_json", "schema", '{"type": "integer"}')
    inside = understand(Constraint(written, None, Thoughts(marker("</think>"))), model.check)
    assert inside == joined([document], Thoughts(marker("</think>")))
    for good in ("</think>12", "so: {\n\n<b> é</think>3", "a</think>\n\n3"):
        assert model.takes(inside, good), good
    for bad in ("12", "a</think>b", "a</think>\n\n\n3", "a</think>1</think>2", "</think>"):
        assert not model.takes(inside, bad), bad
    before = joined([document], Thoughts(marker("</think>"), marker("<think>")))
    for good in ("12", "<think>a\n</think>12", "<think></think>12"):
        assert model.takes(before, good), good
    for bad in ("a</think>12", "<think>12", "<think>a</think>b", "a"):
        assert not model.takes(before, bad), bad


def test_an_end_that_is_spelled_out_is_no_thought(thinker: Checkpoint) -> None:
    """Who reads the text would take it for the end, and the document has not begun."""
    end = Marker("</think>", thinker.tokenizer.token_to_id("</think>"))
    grammar = thinker.grammar(joined(["start: /[0-9]/"], Thoughts(end)))
    spelled = [token for char in "</think" for token in thinker.ids(char)]
    assert not grammar.allowed(spelled)[thinker.ids(">")[0]] and grammar.allowed(spelled)[thinker.ids("x")[0]]


def test_a_grammar_of_any_kind_may_follow_thoughts(demo: Checkpoint) -> None:
    for asked, good in (
        ({"guided_regex": "a/b"}, "a/b"),
        ({"guided_choice": ['x"', "y"]}, 'x"'),
        ({"guided_grammar": 'root ::= "a" b\nb ::= "c"'}, "ac"),
        ({"guided_grammar": "start: A\nA: /x+/"}, "xx"),
    ):
        grammar = joined([constraint_of(asked, demo.check)], Thoughts(Marker("</think>")))
        assert demo.takes(grammar, f"hm</think>{good}") and not demo.takes(grammar, f"hm</think>{good}?")
