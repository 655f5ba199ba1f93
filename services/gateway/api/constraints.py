"""What clients require an answer to be (OpenAI's `response_format`, vLLM's `structured_outputs` and `guided_*`), as one
grammar for the workers.

What was written is bounded here, before anything looks into it (`constraint_of`). It is understood (`understand`) in a
process that may die of it: `services/gateway/api/grammar_child.py`.
"""

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, Literal, cast

import msgspec

from services.engine.grammar import lark_of_gbnf, lark_of_regex
from services.engine.interface import GrammarError
from services.gateway import limits
from services.gateway.api.invalid import InvalidRequestError
from services.gateway.api.json_bounds import check_bounds
from services.gateway.api.json_schema import (
    CheckGrammar,
    Schema,
    blame,
    bounded_json,
    check_schema,
    json_of_schema,
    problem_of,
    too_large,
    with_patterns_in_rust,
)
from services.gateway.api.nesting import doubled_name

_SPACE_IN_LARK = re.compile(r"(?:\s|//[^\n]*\n|#[^\n]*\n)*+")
_TEMPERATURE_IN_LARK = re.compile(r"^[ \t]*\w+[ \t]*\[[^\]\n]*\btemperature\b", re.MULTILINE)
_LARK_START = re.compile(r"^[ \t]*(?:%llguidance\b|start[ \t]*(?:\[[^\]\n]*\][ \t]*)?:(?!:=))", re.MULTILINE)


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


class Written(msgspec.Struct, frozen=True, array_like=True):
    """What a client, or the gateway for it (`lark`), wrote of an answer's text, and the field that has it. A schema is
    in JSON, a `grammar` in Lark or GBNF. `compact`: JSON without any white space."""

    param: str
    kind: Literal["schema", "regex", "grammar", "lark"]
    text: str
    compact: bool = False


class Calls(msgspec.Struct, frozen=True, array_like=True):
    """Calls of tools as an answer: their grammar in Lark, and the schemas that it is made of, each in JSON, by the
    fields that have them."""

    grammar: str
    schemas: tuple[tuple[str, str], ...]


class Marker(msgspec.Struct, frozen=True, array_like=True):
    """What opens or closes a model's thoughts, as text; and its id, where it is a special or an added token."""

    text: str
    token_id: int | None = None


class Thoughts(msgspec.Struct, frozen=True, array_like=True):
    """What a model may write before its answer proper. Without `begin` the prompt has opened them, and they must be
    closed; with it the model may also write none."""

    end: Marker
    begin: Marker | None = None


class Constraint(msgspec.Struct, frozen=True, array_like=True):
    """What an answer must be, bounded and not yet understood: a document, calls, or either; before it thoughts.
    `behind_space`: the answer begins with a space more, which its text has not."""

    document: Written | None = None
    calls: Calls | None = None
    thoughts: Thoughts | None = None
    behind_space: bool = False

    @property
    def param(self) -> str:
        """The field that asks for it."""
        return "tools" if self.document is None else self.document.param

    @property
    def code(self) -> str:
        """The error's, where it cannot be held."""
        has_schemas = self.calls is not None or (self.document is not None and self.document.kind == "schema")
        return "invalid_schema" if has_schemas else "invalid_grammar"


def constraint_of(
    response_format: ResponseFormat | None = None,
    structured_outputs: StructuredOutputs | None = None,
    guided: StructuredOutputs | None = None,
) -> Constraint | None:
    """Return what a body's fields ask for. `guided` has the values of vLLM's older `guided_json` and its like. Raises
    InvalidRequestError for what is too large, or more than one."""
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
    return Constraint(found[0]) if found else None


def understand(constraint: Constraint, check: CheckGrammar) -> str:
    """Return the grammar of such an answer, in Lark. Raises InvalidRequestError for what would not be held, or that no
    answer satisfies. Blocks, and may take whatever time and memory there is: only `grammar_child` calls it."""
    document, calls = constraint.document, constraint.calls
    grammars, schemas = list[str](), dict[str, Schema]()
    # Collect the grammar of each form that the answer may have, and the client's schemas by the fields that have them.
    # `_lark_of` checks the document's schema; schemas of tools are checked here.
    if document is not None:
        if document.kind == "schema":
            schemas[document.param] = msgspec.json.decode(document.text)
        grammars.append(_lark_of(document))
    if calls is not None:
        grammars.append(calls.grammar)
        for name, schema in calls.schemas:
            schemas[name] = msgspec.json.decode(schema)
            check_schema(schemas[name], name)
    # Check the whole. Its error does not name the schema at fault: try each schema alone to name field and place.
    grammar = joined(list(map(_in_rust, grammars)), constraint.thoughts, behind_space=constraint.behind_space)
    try:
        check(grammar)
    except GrammarError as error:
        param, place, reason = constraint.param, "", str(error)
        for name, asked in schemas.items():
            schema = with_patterns_in_rust(asked)
            problem = reason if len(schemas) == 1 else problem_of(schema, check)
            if problem:
                param, (place, reason) = name, blame(schema, problem, check)
                break
        where = f" at {place}" if place else ""
        raise InvalidRequestError(f"`{param}`{where} cannot be held: {reason}", param, constraint.code) from error
    # Check the bounds of numbers last: a client's own grammar in Lark may have schemas too.
    tried = list(schemas.items())
    if document is not None and document.kind == "grammar":
        tried += [(document.param, schema) for schema, _, _ in _schemas_in_lark(grammars[0])]
    for name, schema in tried:
        check_bounds(schema, name, check)
    return grammar


def check_together(constraint: Constraint, *, ignore_eos: bool, allowed_token_ids: Sequence[int]) -> None:
    """Raise InvalidRequestError for what contradicts a constraint: it needs its own tokens, and ends the answer."""
    name = "ignore_eos" if ignore_eos else "allowed_token_ids" if allowed_token_ids else ""
    if name:
        raise InvalidRequestError(f"`{name}` contradicts `{constraint.param}`, which says where the answer ends", name)


def joined(grammars: Sequence[str], thoughts: Thoughts | None, *, behind_space: bool = False) -> str:
    """Return a grammar of an answer that fits any one of these, in Lark; before it the model's thoughts, and
    before all a space where the answer's text has it not."""
    if thoughts is None and len(grammars) == 1 and not behind_space:
        return grammars[0]
    before, rule = ("", "") if thoughts is None else _before(thoughts)
    before = f'" " {before}' if behind_space else before
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


def _response_format(asked: ResponseFormat | None) -> list[Written]:
    match asked:
        case JsonObjectFormat():
            return [_schema({"type": "object"}, "response_format")]
        case JsonSchemaFormat(json_schema=named):
            return [_schema(named.schema, "response_format.json_schema.schema")]
        case _:
            return []


def _structured_outputs(asked: StructuredOutputs, prefix: str) -> Iterator[Written]:
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


def _schema(schema: Schema | str, param: str, *, compact: bool = False) -> Written:
    if isinstance(schema, str):
        try:
            doubled = doubled_name(schema.encode())
            schema = cast(Schema, msgspec.json.decode(schema, type=Schema))
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise InvalidRequestError(f"`{param}` is no JSON Schema: {error}", param, "invalid_schema") from error
        if doubled is not None:
            message = f"`{param}` has the name {doubled!r:.80} twice in one object"
            raise InvalidRequestError(message, param, "invalid_schema")
    return Written(param, "schema", bounded_json(schema, param), compact)


def _regex(regex: str, param: str) -> Written:
    if len(regex) > limits.MAX_REGEX_CHARACTERS:
        raise too_large(param, "characters", len(regex), limits.MAX_REGEX_CHARACTERS, "invalid_grammar")
    return Written(param, "regex", regex)


def _choice(choices: list[str], param: str) -> Written:
    if not choices or not all(choices):
        raise InvalidRequestError(f"`{param}` must have choices, and none of them empty", param, "invalid_grammar")
    num_characters, longest = sum(map(len, choices)), max(map(len, choices))
    if num_characters > limits.MAX_CLIENT_GRAMMAR_CHARACTERS:
        raise too_large(param, "characters", num_characters, limits.MAX_CLIENT_GRAMMAR_CHARACTERS, "invalid_grammar")
    if longest > limits.MAX_LITERAL_CHARACTERS:
        raise too_large(param, "characters in one", longest, limits.MAX_LITERAL_CHARACTERS, "invalid_grammar")
    # In a terminal: of rules each choice would be one more way to go on, at every place.
    return Written(param, "lark", f"start: CHOICE\nCHOICE: {' | '.join(map(json.dumps, dict.fromkeys(choices)))}")


def _grammar(text: str, param: str) -> Written:
    if len(text) > limits.MAX_CLIENT_GRAMMAR_CHARACTERS:
        raise too_large(param, "characters", len(text), limits.MAX_CLIENT_GRAMMAR_CHARACTERS, "invalid_grammar")
    return Written(param, "grammar", text)


# Understanding.


def _lark_of(written: Written) -> str:
    """Return what was written as a grammar in Lark. Raises InvalidRequestError for what would not be held."""
    param, text = written.param, written.text
    match written.kind:
        case "schema":
            return f"start: %json {json_of_schema(msgspec.json.decode(text), param, compact=written.compact)}"
        case "regex":
            return lark_of_regex(text)
        case "grammar":
            return _lark_of_grammar(text, param)
        case "lark":
            return text


def _lark_of_grammar(text: str, param: str) -> str:
    """The same, of a grammar in Lark or in llama.cpp's GBNF."""
    if "::=" in text and _LARK_START.search(text) is None:
        try:
            return lark_of_gbnf(text)
        except GrammarError as error:
            raise InvalidRequestError(f"`{param}` is no GBNF: {error}", param, "invalid_grammar") from error
    if text.lstrip().startswith("{"):  # llguidance would take it for a list of grammars, in JSON
        raise InvalidRequestError(f"`{param}` is neither Lark nor GBNF", param, "invalid_grammar")
    if _TEMPERATURE_IN_LARK.search(text) is not None:
        raise InvalidRequestError(f"`{param}`: a rule's temperature is not supported", param, "invalid_grammar")
    for schema, _, _ in _schemas_in_lark(text):
        check_schema({name: value for name, value in schema.items() if name != "x-guidance"}, param)
    return text


def _in_rust(grammar: str) -> str:
    """Return a grammar whose schemas, which were checked, have their regular expressions as llguidance reads them."""
    said, done = list[str](), 0
    for schema, begin, end in _schemas_in_lark(grammar):
        said += [grammar[done:begin], msgspec.json.encode(with_patterns_in_rust(schema)).decode()]
        done = end
    return "".join(said) + grammar[done:]


def _schemas_in_lark(text: str) -> Iterator[tuple[dict[str, Any], int, int]]:
    """Yield the JSON Schemas that a grammar in Lark has, and where each begins and ends."""
    at = 0
    while (found := text.find("%json", at)) >= 0:
        space = _SPACE_IN_LARK.match(text, found + len("%json"))
        assert space is not None, "it may be empty"
        at = space.end()
        if not text.startswith("{", at):
            continue
        try:
            schema, end = json.JSONDecoder().raw_decode(text, at)
        except (ValueError, RecursionError):  # llguidance says what is wrong with it
            continue
        yield schema, at, end
        at = end
