"""Bounds of numbers in a JSON Schema, behind the library that holds them: llguidance reads them as floats, which
cannot tell numbers beyond 2**53 apart, and takes some numbers that are excluded. So what must not be taken is tried.
"""

import json
import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, cast

import msgspec

from services.engine.interface import GrammarError
from services.gateway import limits
from services.gateway.api.invalid import InvalidRequestError
from services.gateway.api.json_schema import CheckGrammar, Place, Schema, pointer, subschemas, target_of

_EXACT = 2**53
"""Beyond it not every whole number is a float."""


class Bounds(NamedTuple):
    """What one way to satisfy a schema requires of a number, named as JSON Schema does."""

    minimum: float | None = None
    exclusiveMinimum: float | None = None
    maximum: float | None = None
    exclusiveMaximum: float | None = None
    is_integer: bool = False

    def both(self, other: "Bounds") -> "Bounds":
        """Return what a number must be that is within both."""
        return Bounds(
            _of(max, self.minimum, other.minimum),
            _of(max, self.exclusiveMinimum, other.exclusiveMinimum),
            _of(min, self.maximum, other.maximum),
            _of(min, self.exclusiveMaximum, other.exclusiveMaximum),
            self.is_integer or other.is_integer,
        )

    @property
    def keywords(self) -> dict[str, float]:
        return {name: value for name, value in zip(self._fields[:4], self[:4], strict=True) if value is not None}

    @property
    def are_in_doubt(self) -> bool:
        are_excluded = self.exclusiveMinimum is not None or self.exclusiveMaximum is not None
        return (are_excluded and not self.is_integer) or any(abs(value) > _EXACT for value in self.keywords.values())

    def has(self, number: float) -> bool:
        """Python compares whole numbers and floats exactly."""
        return (
            (self.minimum is None or number >= self.minimum)
            and (self.exclusiveMinimum is None or number > self.exclusiveMinimum)
            and (self.maximum is None or number <= self.maximum)
            and (self.exclusiveMaximum is None or number < self.exclusiveMaximum)
        )


def check_bounds(schema: Schema, param: str, check: CheckGrammar) -> None:
    """Raise InvalidRequestError where llguidance would take a number that a schema's bounds exclude, or would not take
    one of its own bounds."""
    known = dict(subschemas(schema))
    ways = dict[Place, frozenset[Bounds]]()
    tried = set[Bounds]()
    for place in reversed(known):  # those within another first: they are nearer to what is wrong
        for bounds in sorted(_ways(place, known, ways), key=repr):
            if bounds in tried or not bounds.are_in_doubt:
                continue
            tried.add(bounds)
            reason = _problem(bounds, check) if len(tried) <= limits.MAX_BOUNDS else "there are too many bounds to try"
            if reason:
                where = pointer(place) or "/"
                raise InvalidRequestError(f"`{param}` at {where} cannot be held: {reason}", param, "invalid_schema")


def _ways(place: Place, known: dict[Place, dict[str, Any]], found: dict[Place, frozenset[Bounds]]) -> frozenset[Bounds]:
    """Return what the ways to satisfy the schema at a place require of a number. `found`: of those that are known."""
    if place in found:
        return found[place]
    found[place] = frozenset((Bounds(),))  # whoever refers to itself requires nothing more by it
    schema = known.get(place, {})
    ways = {_own(schema)}
    if (target := target_of(schema.get("$ref"), known)) is not None:
        ways = _both(ways, _ways(target, known, found))
    for keyword in ("allOf", "anyOf", "oneOf"):
        children: Any = schema.get(keyword)
        count = len(cast("list[Any]", children)) if isinstance(children, list) else 0
        each = [_ways((*place, keyword, str(number)), known, found) for number in range(count)]
        if keyword == "allOf":
            for one in each:
                ways = _both(ways, one)
        elif each:
            ways = _both(ways, frozenset[Bounds]().union(*each))
    found[place] = frozenset(ways)
    return found[place]


def _own(schema: dict[str, Any]) -> Bounds:
    kind: Any = schema.get("type")
    kinds: list[Any] = cast("list[Any]", kind) if isinstance(kind, list) else [kind]
    if kind is not None and not {"number", "integer"} & {each for each in kinds if isinstance(each, str)}:
        return Bounds()
    values = (schema.get(name) for name in Bounds._fields[:4])
    numbers = (value if isinstance(value, int | float) and not isinstance(value, bool) else None for value in values)
    return Bounds(*numbers, is_integer="integer" in kinds and "number" not in kinds)


def _both(ways: set[Bounds], others: Iterable[Bounds]) -> set[Bounds]:
    # More than are tried of all are not needed: they are refused.
    found = {one.both(other) for one in ways for other in others}
    return set(sorted(found, key=repr)[: limits.MAX_BOUNDS + 1])


def _problem(bounds: Bounds, check: CheckGrammar) -> str:
    """Return why bounds cannot be held; "": they are, or nothing satisfies them, as llguidance has reported already."""
    kind = "integer" if bounds.is_integer else "number"
    schema = json.dumps({"type": kind, **bounds.keywords})
    try:
        takes = check(f"start: %json {schema}")
    except GrammarError:
        return ""
    for text in dict.fromkeys(_tried(bounds)):
        number = msgspec.json.decode(text)
        if takes(text) and not bounds.has(number):
            return f"of {schema} {text} would be taken"
        if isinstance(number, int) and abs(number) > _EXACT and bounds.has(number) and not takes(text):
            return f"of {schema} {text} could not be written"
    return ""


def _tried(bounds: Bounds) -> Iterator[str]:
    """Yield numbers at each bound and beside it, as they may be written."""
    for bound in bounds.keywords.values():
        beside = {math.floor(bound), math.ceil(bound)}
        for neighbour in (math.nextafter(bound, -math.inf), float(bound), math.nextafter(bound, math.inf)):
            beside |= {math.floor(neighbour), math.ceil(neighbour)}
        for number in sorted({each + step for each in beside for step in (-1, 0, 1)}):
            yield from (str(number), "-0") if number == 0 else (str(number),)
            if not bounds.is_integer:
                yield from (f"{number}.0", "-0.0") if number == 0 else (f"{number}.0",)
        if not bounds.is_integer and abs(bound) <= _EXACT:
            exact = f"{bound:.17f}".rstrip("0").rstrip(".")
            yield from (exact, f"{exact}0" if "." in exact else f"{exact}.00")
            yield from (repr(neighbour) for neighbour in (bound - 1e-6, bound + 1e-6) if "e" not in repr(neighbour))


def _of(choose: Any, one: float | None, other: float | None) -> float | None:
    return other if one is None else one if other is None else choose(one, other)
