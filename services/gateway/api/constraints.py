"""What clients say an answer must be (OpenAI's `response_format`, vLLM's `structured_outputs` and `guided_*`), as one
grammar for the workers.

A grammar is understood by the gateway (`check_in_turn`) before any worker sees it.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import msgspec

from services.engine.grammar import lark_of_gbnf, lark_of_regex
from services.engine.interface import GrammarError, KeptGrammars, StartGrammar
from services.gateway import limits
from services.gateway.api.invalid import InvalidRequestError
from services.gateway.api.json_schema import (
    Schema,
    blame,
    check_schema,
    json_of_schema,
    problem_of,
    too_large,
)
from services.gateway.api.turn import Turn

_JSON_IN_LARK = re.compile(r"%json(?:\s|//[^\n]*\n|#[^\n]*\n)*(?=\{)")
_TEMPERATURE_IN_LARK = re.compile(r"^\s*\w+\s*\[[^\]\n]*\btemperature\b", re.MULTILINE)
_LARK_START = re.compile(r"^\s*(?:%llguidance\b|start\s*(?:\[[^\]\n]*\]\s*)?:(?!:=))", re.MULTILINE)


class TextFormat(msgspec.Struct, frozen=True, tag_field="type", tag="text", forbid_unknown_fields=True):
    """Any text."""


class JsonObjectFormat(msgspec.Struct, frozen=True, tag_field="type", tag="json_object", forbid_unknown_fields=True):
    """Any JSON object."""


class NamedSchema(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    schema: Schema
    strict: bool | None = None
    """Schemas are held exactly, whatever it says."""
    description: str | None = None


class JsonSchemaFormat(msgspec.Struct, frozen=True, tag_field="type", tag="json_schema", forbid_unknown_fields=True):
    json_schema: NamedSchema


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat
"""OpenAI's."""


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """vLLM's. `disable_fallback` is neutral: there is no other library to fall back to."""

    json: Schema | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    """Lark, or llama.cpp's GBNF."""
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None
    disable_fallback: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None
    structural_tag: Any = None


class Constraint(NamedTuple):
    """What an answer must be: the field that asks for it, and a grammar in Lark. `schemas`: those that it is made of,
    by the field that has each."""

    param: str
    grammar: str
    schemas: Mapping[str, Schema] = {}

    @property
    def code(self) -> str:
        """The error's, where it cannot be held."""
        return "invalid_schema" if self.schemas else "invalid_grammar"


def constraint_of(
    response_format: ResponseFormat | None = None,
    structured_outputs: StructuredOutputs | None = None,
    guided: StructuredOutputs | None = None,
) -> Constraint | None:
    """Return what a body's fields ask for. `guided` has the values of vLLM's older `guided_json` and its like. Raises
    InvalidRequestError for what cannot be held, is too large, or more than one. `check_in_turn` has to follow."""
    found = _response_format(response_format)
    if structured_outputs is not None:
        more = list(_structured_outputs(structured_outputs, "structured_outputs."))
        if not more:
            message = "`structured_outputs` has none of json, regex, choice, grammar, json_object"
            raise InvalidRequestError(message, "structured_outputs")
        found += more
    if guided is not None:
        found += _structured_outputs(guided, "guided_")
    if len(found) > 1:
        names = f"`{found[0].param}` and `{found[1].param}`"
        raise InvalidRequestError(f"{names} cannot both say what the answer must be", found[1].param)
    return found[0] if found else None


async def check_in_turn(constraint: Constraint, grammars: KeptGrammars, turn: Turn, timeout_s: float) -> None:
    """As `check_constraint`, once it is this one's turn, and within `timeout_s`. Raises NotNowError too: others'
    grammars are no fault of this one."""
    if grammars.knows(constraint.grammar):
        return
    try:
        await turn.work(lambda: check_constraint(constraint, grammars.compile), timeout_s)
    except TimeoutError as error:
        message = f"`{constraint.param}` takes over {timeout_s:g} s to understand: simplify it"
        raise InvalidRequestError(message, constraint.param, constraint.code) from error


def check_constraint(constraint: Constraint, start: StartGrammar) -> None:
    """Raise InvalidRequestError unless this can be understood, and some answer satisfies it. Blocks."""
    param, grammar, schemas = constraint
    try:
        start(grammar).result()
    except GrammarError as error:
        place, reason = "", str(error)
        for name, schema in schemas.items():
            problem = reason if len(schemas) == 1 else problem_of(schema, start)
            if problem:
                param, (place, reason) = name, blame(schema, problem, start)
                break
        where = f" at {place}" if place else ""
        raise InvalidRequestError(f"`{param}`{where} cannot be held: {reason}", param, constraint.code) from error


def check_together(constraint: Constraint, *, ignore_eos: bool, allowed_token_ids: Sequence[int]) -> None:
    """Raise InvalidRequestError for what contradicts a constraint: it needs its own tokens, and ends the answer."""
    name = "ignore_eos" if ignore_eos else "allowed_token_ids" if allowed_token_ids else ""
    if name:
        raise InvalidRequestError(f"`{name}` contradicts `{constraint.param}`, which says where the answer ends", name)


class Marker(NamedTuple):
    """What opens or closes a model's thoughts, as text; and its id, where it is a special or an added token."""

    text: str
    token_id: int | None = None


class Thoughts(NamedTuple):
    """What a model may write before its answer proper. Without `begin` the prompt has opened them, and they must be
    closed; with it the model may also write none."""

    end: Marker
    begin: Marker | None = None


def joined(grammars: Sequence[str], thoughts: Thoughts | None) -> str:
    """Return a grammar of an answer that is as any one of these, in Lark, says; before it the model's thoughts."""
    if thoughts is None and len(grammars) == 1:
        return grammars[0]
    before, rule = ("", "") if thoughts is None else _before(thoughts)
    names = [f"part_{number}" for number in range(len(grammars))]
    start = f"start: {before} ({' | '.join(f'@{name}' for name in names)})\n{rule}"
    parts = [{"name": name, "lark_grammar": grammar} for name, grammar in zip(names, grammars, strict=True)]
    return json.dumps({"grammars": [{"name": "answer", "lark_grammar": start}, *parts]})


def _before(thoughts: Thoughts) -> tuple[str, str]:
    """Return thoughts as a part of a rule in Lark, and the rules that it needs."""
    begin, end = thoughts.begin, thoughts.end
    closing = re.escape(end.text).replace("/", "\\/")
    if end.token_id is None:
        part, rule = "thoughts", f"thoughts[lazy]: /(?s:.*){closing}/\n"
    else:  # spelled out, it would be taken for the end
        part, rule = f"THOUGHTS <[{end.token_id}]>", f"THOUGHTS: /(?s:.*)/ & ~/(?s:.*){closing}(?s:.*)/\n"
    part = f"{part} SPACE_BEHIND?"
    if begin is not None:
        opening = json.dumps(begin.text) if begin.token_id is None else f"<[{begin.token_id}]>"
        part = f"({opening} {part})?"
    return part, f"{rule}SPACE_BEHIND: /[ \\n]{{1,2}}/\n"


# The fields.


def _response_format(asked: ResponseFormat | None) -> list[Constraint]:
    match asked:
        case JsonObjectFormat():
            return [_schema({"type": "object"}, "response_format")]
        case JsonSchemaFormat(json_schema=named):
            return [_schema(named.schema, "response_format.json_schema.schema")]
        case _:
            return []


def _structured_outputs(asked: StructuredOutputs, prefix: str) -> Iterator[Constraint]:
    for name in ("disable_additional_properties", "whitespace_pattern", "structural_tag"):
        if getattr(asked, name):
            raise InvalidRequestError(f"`{prefix}{name}` is not supported", f"{prefix}{name}", "unsupported_parameter")
    compact = bool(asked.disable_any_whitespace)
    if asked.json is not None:
        yield _schema(asked.json, f"{prefix}json", compact=compact)
    if asked.json_object:
        yield _schema({"type": "object"}, f"{prefix}json_object", compact=compact)
    if asked.regex is not None:
        yield _regex(asked.regex, f"{prefix}regex")
    if asked.choice is not None:
        yield _choice(asked.choice, f"{prefix}choice")
    if asked.grammar is not None:
        yield _grammar(asked.grammar, f"{prefix}grammar")


def _schema(schema: Schema | str, param: str, *, compact: bool = False) -> Constraint:
    if isinstance(schema, str):
        try:
            schema = cast(Schema, msgspec.json.decode(schema, type=Schema))
        except (msgspec.DecodeError, RecursionError) as error:
            raise InvalidRequestError(f"`{param}` is no JSON Schema: {error}", param, "invalid_schema") from error
    return Constraint(param, f"start: %json {json_of_schema(schema, param, compact=compact)}", {param: schema})


def _regex(regex: str, param: str) -> Constraint:
    if len(regex) > limits.MAX_REGEX_CHARACTERS:
        raise too_large(param, "characters", len(regex), limits.MAX_REGEX_CHARACTERS, "invalid_grammar")
    return Constraint(param, lark_of_regex(regex))


def _choice(choices: list[str], param: str) -> Constraint:
    if not choices or not all(choices):
        raise InvalidRequestError(f"`{param}` must have choices, and none of them empty", param, "invalid_grammar")
    num_characters, longest = sum(map(len, choices)), max(map(len, choices))
    if num_characters > limits.MAX_CLIENT_GRAMMAR_CHARACTERS:
        raise too_large(param, "characters", num_characters, limits.MAX_CLIENT_GRAMMAR_CHARACTERS, "invalid_grammar")
    if longest > limits.MAX_LITERAL_CHARACTERS:
        raise too_large(param, "characters in one", longest, limits.MAX_LITERAL_CHARACTERS, "invalid_grammar")
    return Constraint(param, f"start: {' | '.join(map(json.dumps, dict.fromkeys(choices)))}")


def _grammar(text: str, param: str) -> Constraint:
    """A grammar in Lark, or in llama.cpp's GBNF."""
    if len(text) > limits.MAX_CLIENT_GRAMMAR_CHARACTERS:
        raise too_large(param, "characters", len(text), limits.MAX_CLIENT_GRAMMAR_CHARACTERS, "invalid_grammar")
    if "::=" in text and _LARK_START.search(text) is None:
        try:
            return Constraint(param, lark_of_gbnf(text))
        except GrammarError as error:
            raise InvalidRequestError(f"`{param}` is no GBNF: {error}", param, "invalid_grammar") from error
    if text.lstrip().startswith("{"):  # llguidance would take it for a list of grammars, in JSON
        raise InvalidRequestError(f"`{param}` is neither Lark nor GBNF", param, "invalid_grammar")
    if _TEMPERATURE_IN_LARK.search(text) is not None:
        raise InvalidRequestError(f"`{param}`: a rule's temperature is not supported", param, "invalid_grammar")
    for found in _JSON_IN_LARK.finditer(text):
        try:
            schema, _ = json.JSONDecoder().raw_decode(text, found.end())
        except (ValueError, RecursionError):  # llguidance says what is wrong with it
            continue
        check_schema({name: value for name, value in schema.items() if name != "x-guidance"}, param)
    return Constraint(param, text)
