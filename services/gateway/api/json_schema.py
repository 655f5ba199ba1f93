"""JSON Schemas as clients send them: what an answer is held to, and what is refused, by name and place.

llguidance holds a schema exactly as far as it knows its keywords. What it would pass over is refused here. A place is a
tuple of the names and numbers that lead to it, and is spelled as a JSON pointer only where somebody reads it: each of
thousands may have long names in it.
"""

import difflib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from graphlib import CycleError, TopologicalSorter
from typing import Any, cast
from urllib.parse import quote, unquote

import msgspec

from services.engine.interface import GrammarError
from services.gateway import limits
from services.gateway.api.invalid import InvalidRequestError
from services.gateway.api.json_patterns import in_rust
from services.gateway.api.nesting import levels

Schema = dict[str, Any] | bool
Place = tuple[str, ...]
CheckGrammar = Callable[[str], Callable[[str], bool]]
"""Returns whether a grammar takes a text as a whole answer. Raises GrammarError where the grammar cannot be held."""

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
_UNWRITTEN = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
"""What has no short escape, and does not stand in a string as it is."""
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
    known = dict(subschemas(schema))
    targets = {place for each in known for place, _ in _children(each, known[each])} | {()}  # booleans too
    # Check each keyword. For `multipleOf` the least common multiple of the whole schema counts: remainders are counted
    # in a machine that has a state for each.
    steps = Fraction(1)
    for place, each in known.items():
        for keyword, value in each.items():
            reason = _refusal(keyword, value)
            if keyword == "$ref" and target_of(value, known) not in targets:
                reason = f"{value!r} refers to no schema within this one"
            if keyword == "multipleOf" and (step := _step(value)) is not None:
                steps = _common_multiple(steps, step)
                if steps.numerator > limits.MAX_MULTIPLE_OF:
                    reason = f"with the others its least multiple is over {limits.MAX_MULTIPLE_OF}"
            if reason:
                where = pointer((*place, keyword))
                raise InvalidRequestError(f"`{param}` at {where}: {reason}", param, "invalid_schema")
        # Check what several keywords of one schema say together.
        for keyword, reason in (("minProperties", _free_names(each)), ("properties", _optional_names(each))):
            if reason:
                where = pointer((*place, keyword))
                raise InvalidRequestError(f"`{param}` at {where}: {reason}", param, "invalid_schema")
    # Sort the schemas by which of them a value must contain: in a cycle no finite value satisfies them.
    try:
        TopologicalSorter({place: list(_needed(place, each, known)) for place, each in known.items()}).prepare()
    except CycleError as error:
        message = f"`{param}` at {pointer(error.args[1][0]) or '/'}: it needs itself within it, so that it never ends"
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
                return pointer(place), reason
            if isinstance(child, dict) and (found := _problem(_part(cast("dict[str, Any]", schema), at), check)):
                bad.setdefault(found, (at, cast("dict[str, Any]", child)))
        if not bad:
            break
        reason = reason if reason in bad else next(iter(bad))
        place, each = bad[reason]
    return pointer(place), reason


def problem_of(schema: Schema, check: CheckGrammar) -> str:
    """Return why a schema cannot be held; "": it can, or is nested too deeply to try."""
    return _problem(_with_options(schema, compact=False), check)


def _problem(schema: str, check: CheckGrammar) -> str:
    try:
        check(f"start: %json {schema}")
    except GrammarError as error:
        return str(error).replace(_MOVED, "#")
    except RecursionError:  # it is nested more deeply than can be reported
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


def with_patterns_in_rust(schema: Schema) -> Schema:
    """Return a schema with its regular expressions as llguidance reads them. Raises GrammarError where `check_schema`
    would refuse one."""
    found: Schema = msgspec.json.decode(msgspec.json.encode(schema))
    for _, each in subschemas(found):
        if isinstance(pattern := each.get("pattern"), str):
            each["pattern"] = in_rust(pattern)
        if isinstance(named := each.get("patternProperties"), dict):
            each["patternProperties"] = {in_rust(name): of for name, of in cast("dict[str, Any]", named).items()}
    return found


def subschemas(schema: Schema) -> Iterator[tuple[Place, dict[str, Any]]]:
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


def _needed(place: Place, schema: dict[str, Any], known: Mapping[Place, dict[str, Any]]) -> Iterator[Place]:
    """Yield the places of schemas of which a value of this one has, or is, one."""
    if (target := target_of(schema.get("$ref"), known)) is not None:
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


def target_of(reference: Any, known: Mapping[Place, dict[str, Any]]) -> Place | None:
    """Return the place that a `$ref` names, by a JSON pointer (RFC 6901) or by the anchor of one of the schemas that
    are `known`; None: it names none so."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    if reference != "#" and not reference.startswith("#/"):
        return next((place for place, each in known.items() if each.get("$anchor") == reference[1:]), None)
    return tuple(name.replace("~1", "/").replace("~0", "~") for name in unquote(reference).split("/")[1:])


def pointer(place: Place) -> str:
    """Spell a place as a JSON pointer."""
    return "".join(f"/{name.replace('~', '~0').replace('/', '~1')}" for name in place)


def _refusal(keyword: str, value: Any) -> str:
    """Return why a keyword is not taken; "": it is."""
    if keyword == "format" and not (isinstance(value, str) and value in FORMATS):
        return f"the format {value!r} is not supported; {', '.join(sorted(FORMATS))} are"
    if keyword in HELD:
        long = [text for text in _strings(keyword, value) if len(text) > limits.MAX_LITERAL_CHARACTERS]
        if long:
            return f"a text of {len(long[0])} characters, over {limits.MAX_LITERAL_CHARACTERS}"
        return _unheld(keyword, value)
    if keyword in NEUTRAL or (keyword.startswith("x-") and keyword != "x-guidance"):
        return ""
    near = difflib.get_close_matches(keyword, HELD | NEUTRAL, 1, 0.8)
    return f"`{keyword}` is not supported" + (f"; is `{near[0]}` meant?" if near else "")


def _unheld(keyword: str, value: Any) -> str:
    """Return what of a keyword llguidance would round, drop or read otherwise, and not report; "": nothing."""
    if keyword in ("enum", "const"):
        for each in _values(value):
            if isinstance(each, int) and abs(each) > 2**53:
                return f"{each} is beyond 2**53, and would be rounded"
            if isinstance(each, str) and (found := _UNWRITTEN.search(each)):
                return f"the character U+{ord(found[0]):04X} would be dropped"
    patterns: list[Any] = [value] if keyword == "pattern" else []
    if keyword == "patternProperties" and isinstance(value, dict):
        patterns += cast("dict[str, Any]", value)
    try:
        for each in patterns:
            if isinstance(each, str):
                in_rust(each)
    except GrammarError as error:
        return str(error)
    return ""


def _values(value: Any) -> Iterator[Any]:
    """Yield a value, and all values in it; no names."""
    waiting: list[Any] = [value]
    while waiting:
        each = waiting.pop()
        yield each
        if isinstance(each, dict | list):
            waiting += cast("dict[str, Any]", each).values() if isinstance(each, dict) else cast("list[Any]", each)


def _free_names(schema: dict[str, Any]) -> str:
    """Return why the least number of names is not held; "": it is. A name that is no property's may come twice."""
    least: Any = schema.get("minProperties")
    names = _required_names(schema)
    are_free = schema.get("additionalProperties") is not False or bool(schema.get("patternProperties"))
    if not are_free or not isinstance(least, int | float) or least <= len(names) + 1:
        return ""
    return f"at most {len(names) + 1} can be held here, as one name may come twice: name what is `required`"


def _optional_names(schema: dict[str, Any]) -> str:
    """Return why there are too many properties that may be left out: each may come next where one has ended."""
    properties: Any = schema.get("properties")
    names = set(cast("dict[str, Any]", properties)) if isinstance(properties, dict) else set[str]()
    num_optional = len(names - _required_names(schema))
    if num_optional <= limits.MAX_OPTIONAL_NAMES:
        return ""
    return f"{num_optional} may be left out, and at most {limits.MAX_OPTIONAL_NAMES} can be held: name some `required`"


def _required_names(schema: dict[str, Any]) -> set[str]:
    required: Any = schema.get("required")
    names = cast("list[Any]", required) if isinstance(required, list) else []
    return {each for each in names if isinstance(each, str)}


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
    """Return the value of `multipleOf`; None where it is not a valid one."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        return None
    return Fraction(value) if isinstance(value, int) else Fraction(repr(value))


def _common_multiple(one: Fraction, other: Fraction) -> Fraction:
    return Fraction(math.lcm(one.numerator, other.numerator), math.gcd(one.denominator, other.denominator))


def _part(schema: dict[str, Any], place: Place) -> str:
    """Return a schema that is only the one at `place` of another."""
    whole = {name: value for name, value in schema.items() if name != "$id"}
    return json.dumps({"$defs": {"whole": _moved(whole)}, "$ref": _MOVED + quote(pointer(place))})


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
