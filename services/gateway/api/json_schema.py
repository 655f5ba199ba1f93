"""JSON Schemas as clients send them: what an answer is held to, and what is refused, by name and place.

llguidance holds a schema exactly as far as it knows its keywords. What it would pass over is refused here. A place is a
tuple of the names and numbers that lead to it, and is spelled as a JSON pointer only where somebody reads it: each of
thousands may have long names in it.
"""

import difflib
import json
import math
from collections.abc import Callable, Iterator
from fractions import Fraction
from graphlib import CycleError, TopologicalSorter
from typing import Any, cast
from urllib.parse import quote, unquote

import msgspec

from services.engine.interface import GrammarError
from services.gateway import limits
from services.gateway.api.invalid import InvalidRequestError
from services.gateway.api.nesting import levels

Schema = dict[str, Any] | bool
Place = tuple[str, ...]
CheckGrammar = Callable[[str], None]
"""Raises GrammarError where a grammar cannot be held."""

FORMATS = frozenset(("date", "date-time", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"))
"""Values of `format` that are held."""

HELD = frozenset((
    "$ref", "type", "enum", "const", "anyOf", "oneOf", "allOf", "format",
    "properties", "required", "additionalProperties", "patternProperties", "minProperties", "maxProperties",
    "items", "prefixItems", "additionalItems", "minItems", "maxItems", "minLength", "maxLength", "pattern",
    "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf",
))  # fmt: skip
"""Keywords that an answer is held to."""
NEUTRAL = frozenset((
    "$schema", "$id", "id", "$anchor", "$defs", "definitions", "$comment", "title", "description", "default",
    "examples", "example", "deprecated", "readOnly", "writeOnly", "externalDocs", "xml", "discriminator",
    "contentEncoding", "contentMediaType", "contentSchema",
))  # fmt: skip
"""Keywords that do not say what is valid, by JSON Schema 2020-12 and OpenAPI. Names that begin with `x-` do not
either."""
_SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
_SCHEMA_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SCHEMAS = ("additionalProperties", "items", "additionalItems")
ESCAPES = 'nrtbf\\"'
"""What may stand behind a backslash in a string."""
_MOVED = "#/$defs/whole"
"""Where a schema is that is looked at in parts."""


def bounded_json(schema: Schema, param: str) -> str:
    """Return a schema in JSON, once its depth, its names and its bytes are seen to be few. Raises
    InvalidRequestError."""
    for depth, level in enumerate(levels(schema)):
        if depth > limits.MAX_JSON_DEPTH:
            message = f"`{param}` is nested deeper than {limits.MAX_JSON_DEPTH} levels"
            raise InvalidRequestError(message, param, "invalid_schema")
        longest = max((len(name) for each in level if isinstance(each, dict) for name in cast(Any, each)), default=0)
        if longest > limits.MAX_LITERAL_CHARACTERS:
            raise too_large(param, "characters in a name", longest, limits.MAX_LITERAL_CHARACTERS, "invalid_schema")
    encoded = msgspec.json.encode(schema)
    if len(encoded) > limits.MAX_SCHEMA_BYTES:
        raise too_large(param, "bytes", len(encoded), limits.MAX_SCHEMA_BYTES, "invalid_schema")
    return encoded.decode()


def json_of_schema(schema: Schema, param: str, *, compact: bool = False) -> str:
    """Return what follows `%json` in a grammar, after checking that nothing in it would be passed over.
    `compact`: without any white space. Raises InvalidRequestError."""
    if schema is False:
        raise InvalidRequestError(f"`{param}` is false: no answer satisfies it", param, "invalid_schema")
    check_schema(schema, param)
    return _with_options(schema, compact=compact)


def check_schema(schema: Schema, param: str) -> None:
    """Raise InvalidRequestError for what llguidance would pass over in a schema, or take too long for."""
    known = dict(_subschemas(schema))
    targets = {place for each in known for place, _ in _children(each, known[each])} | {()}  # booleans too
    anchors = {f"#{each.get('$anchor')}" for each in known.values()}
    steps = Fraction(1)
    for place, each in known.items():
        for keyword, value in each.items():
            reason = _refusal(keyword, value)
            if keyword == "$ref" and not (isinstance(value, str) and (value in anchors or _target(value) in targets)):
                reason = f"{value!r} refers to no schema within this one"
            if keyword == "multipleOf" and (step := _step(value)) is not None:
                steps = _common_multiple(steps, step)
                if steps.numerator > limits.MAX_MULTIPLE_OF:
                    reason = f"with the others its least multiple is over {limits.MAX_MULTIPLE_OF}"
            if reason:
                where = _pointer((*place, keyword))
                raise InvalidRequestError(f"`{param}` at {where}: {reason}", param, "invalid_schema")
    try:
        TopologicalSorter({place: list(_needed(place, each)) for place, each in known.items()}).prepare()
    except CycleError as error:
        message = f"`{param}` at {_pointer(error.args[1][0]) or '/'}: it needs itself within it, so that it never ends"
        raise InvalidRequestError(message, param, "invalid_schema") from error


def blame(schema: Schema, reason: str, check: CheckGrammar) -> tuple[str, str]:
    """Return the place of the innermost schema that cannot be held by itself either, as a JSON pointer, and why."""
    place: Place = ()
    each, num_tried = schema, 0
    while isinstance(each, dict):
        bad: dict[str, tuple[Place, dict[str, Any]]] = {}
        """By what is wrong with them: those within it."""
        for at, child in _children(place, each):
            num_tried += isinstance(child, dict)
            if num_tried > limits.MAX_BLAMED:
                return _pointer(place), reason
            if isinstance(child, dict) and (found := _problem(_part(cast("dict[str, Any]", schema), at), check)):
                bad.setdefault(found, (at, cast("dict[str, Any]", child)))
        if not bad:
            break
        reason = reason if reason in bad else next(iter(bad))
        place, each = bad[reason]
    return _pointer(place), reason


def problem_of(schema: Schema, check: CheckGrammar) -> str:
    """Return why a schema cannot be held; "": it can, or is nested too deeply to try."""
    return _problem(_with_options(schema, compact=False), check)


def _problem(schema: str, check: CheckGrammar) -> str:
    try:
        check(f"start: %json {schema}")
    except GrammarError as error:
        return str(error).replace(_MOVED, "#")
    except RecursionError:  # it is nested more deeply than can be told
        return ""
    return ""


def _with_options(schema: Schema, *, compact: bool) -> str:
    """Return the schema as JSON, with what llguidance is to do otherwise than by default.

    Escapes are the short ones: a property's name could else be spelled another way, and its value be anything. White
    space is one blank, or a new line and its indent: small models would write nothing else.
    """
    options: dict[str, object] = {"json_allowed_escapes": ESCAPES}
    if compact:
        options["whitespace_flexible"] = False
    else:
        options["whitespace_pattern"] = rf" |\r?\n[ \t]{{0,{limits.MAX_INDENT}}}"
    return msgspec.json.encode({"x-guidance": options, **({} if isinstance(schema, bool) else schema)}).decode()


def _subschemas(schema: Schema) -> Iterator[tuple[Place, dict[str, Any]]]:
    """Yield each schema within a schema, itself first, with its place; no booleans."""
    waiting: list[tuple[Place, Any]] = [((), schema)]
    while waiting:
        place, each = waiting.pop()
        if isinstance(each, dict):
            found = cast("dict[str, Any]", each)
            yield place, found
            waiting += reversed(list(_children(place, found)))


def _children(place: Place, schema: dict[str, Any]) -> Iterator[tuple[Place, Any]]:
    """Yield the schemas right within a schema, with their places."""
    for keyword, value in schema.items():
        if keyword in _SCHEMAS_BY_NAME and isinstance(value, dict):
            yield from (((*place, keyword, name), each) for name, each in cast("dict[str, Any]", value).items())
        elif isinstance(value, list) and keyword in (*_SCHEMA_LISTS, "items"):
            children = enumerate(cast("list[Any]", value))
            yield from (((*place, keyword, str(number)), each) for number, each in children)
        elif keyword in _SCHEMAS:
            yield (*place, keyword), value


def _needed(place: Place, schema: dict[str, Any]) -> Iterator[Place]:
    """Yield the places of schemas of which a value of this one has, or is, one."""
    if (target := _target(schema.get("$ref"))) is not None:
        yield target
    for keyword in _SCHEMA_LISTS[:3]:
        children: Any = schema.get(keyword)
        if isinstance(children, list) and (keyword == "allOf" or len(cast("list[Any]", children)) == 1):
            yield from ((*place, keyword, str(number)) for number in range(len(cast("list[Any]", children))))
    required: Any = schema.get("required")
    if schema.get("type") == "object" and isinstance(required, list):
        yield from ((*place, "properties", str(name)) for name in cast("list[Any]", required))
    at_least: Any = schema.get("minItems")
    if schema.get("type") == "array" and isinstance(at_least, int) and at_least > 0 and "prefixItems" not in schema:
        yield (*place, "items")


def _target(reference: Any) -> Place | None:
    """Return the place that a `$ref` names by a JSON pointer (RFC 6901); None: it names none so."""
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        return None
    return tuple(name.replace("~1", "/").replace("~0", "~") for name in unquote(reference).split("/")[1:])


def _pointer(place: Place) -> str:
    """Spell a place as a JSON pointer."""
    return "".join(f"/{name.replace('~', '~0').replace('/', '~1')}" for name in place)


def _refusal(keyword: str, value: Any) -> str:
    """Return why a keyword is not taken; "": it is."""
    if keyword == "format" and not (isinstance(value, str) and value in FORMATS):
        return f"the format {value!r} is not supported; {', '.join(sorted(FORMATS))} are"
    if keyword in HELD:
        long = [text for text in _strings(keyword, value) if len(text) > limits.MAX_LITERAL_CHARACTERS]
        return f"a text of {len(long[0])} characters, over {limits.MAX_LITERAL_CHARACTERS}" if long else ""
    if keyword in NEUTRAL or (keyword.startswith("x-") and keyword != "x-guidance"):
        return ""
    near = difflib.get_close_matches(keyword, HELD | NEUTRAL, 1, 0.8)
    return f"`{keyword}` is not supported" + (f"; is `{near[0]}` meant?" if near else "")


def _strings(keyword: str, value: Any) -> Iterator[str]:
    """Yield the texts that an answer may have to spell for a keyword."""
    waiting: list[Any] = []
    if keyword in ("enum", "const", "required", "pattern"):
        waiting.append(value)
    elif keyword in ("properties", "patternProperties") and isinstance(value, dict):
        waiting += cast("dict[str, Any]", value)
    while waiting:
        each = waiting.pop()
        if isinstance(each, str):
            yield each
        elif isinstance(each, dict):
            waiting += [part for pair in cast("dict[str, Any]", each).items() for part in pair]
        elif isinstance(each, list):
            waiting += cast("list[Any]", each)


def _step(value: Any) -> Fraction | None:
    """Return what `multipleOf` says; None where it is nothing that it could say."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        return None
    return Fraction(value) if isinstance(value, int) else Fraction(repr(value))


def _common_multiple(one: Fraction, other: Fraction) -> Fraction:
    return Fraction(math.lcm(one.numerator, other.numerator), math.gcd(one.denominator, other.denominator))


def _part(schema: dict[str, Any], place: Place) -> str:
    """Return a schema that is only the one at `place` of another."""
    whole = {name: value for name, value in schema.items() if name != "$id"}
    return json.dumps({"$defs": {"whole": _moved(whole)}, "$ref": _MOVED + quote(_pointer(place))})


def _moved(value: Any) -> Any:
    """Return a part of a schema whose references are right where the schema is a definition of another."""
    if isinstance(value, list):
        return [_moved(each) for each in cast("list[Any]", value)]
    if not isinstance(value, dict):
        return value
    moved = {name: _moved(each) for name, each in cast("dict[str, Any]", value).items()}
    reference = moved.get("$ref")
    if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
        moved["$ref"] = _MOVED + reference[1:]
    return moved


def too_large(param: str, what: str, num: int, most: int, code: str) -> InvalidRequestError:
    return InvalidRequestError(f"`{param}` has {num} {what}, and at most {most} are taken", param, code)
