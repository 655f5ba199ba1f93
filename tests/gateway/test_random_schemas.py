"""Answers to random schemas are valid, or the schema is refused by name: another library is the judge."""

import json
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.api.grammars import GrammarProcess
from services.gateway.api.invalid import InvalidRequestError
from tests.engine.grammar_rig import Checkpoint
from tests.gateway.test_constraints import asked_for
from tests.share import examples

BOUNDS = st.sampled_from(
    (0, 0.5, 0.3, 1, 1.5, -1.5, -1, -0.5, 0.1, 7, 100, -100.25, 12.125, 1e-7, 2**53, 2**53 + 1, -(2**53) - 1, 2**60,
     2**63 - 1, -(2**63), 2**64 + 1, 10**25, 1e20)
) | st.integers(-30, 30) | st.decimals(-3, 3, places=2).map(float)  # fmt: skip
TEXTS = st.text(st.sampled_from('abé😀"\\/ \n\t\x00\x07\x0b\x1f\x7f\u2028'), max_size=4)
PATTERNS = st.sampled_from((
    "a", "^a+$", "^[a-c]{2}$", r"^\d{1,3}$", r"^a\x07b$", r"^[\x07]$", r"^[\x00-\x1fz]$", r"^[^\x00-\x1f]$", r"\\x07",
    r"^a\tb$", r"^(é|\x7f)b?$", r"^\s$", r"^\\$", r'^"$', r"^\u0007$", r"^.$",
    r'^[^"]$', r"^[^\\]+$", r"^\W$", r"^\S\D$", r"^[\x00-!]$", r"^[^ -~]$", r"^[[^&~]$", r"^[^\w\s]$", r"^(\x0b|a)$",
))  # fmt: skip
NAMES = st.sampled_from(("a", "ab", "b", "é", 'q"', "t\t", "c\x07", ""))


def keywords(**of: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=of)


NUMBERS = st.builds(
    lambda kind, more: {"type": kind, **more},
    st.sampled_from(("number", "integer", ["integer", "null"])),
    keywords(
        minimum=BOUNDS,
        maximum=BOUNDS,
        exclusiveMinimum=BOUNDS,
        exclusiveMaximum=BOUNDS,
        multipleOf=st.sampled_from((1, 2, 7, 0.5, 0.25)),
    ),
)
STRINGS = st.builds(
    lambda more: {"type": "string", **more},
    keywords(pattern=PATTERNS, minLength=st.integers(0, 3), maxLength=st.integers(0, 4)),
)
VALUES = st.one_of(
    BOUNDS, TEXTS, st.booleans(), st.none(), st.lists(BOUNDS | TEXTS, max_size=2), st.dictionaries(NAMES, BOUNDS)
)
LITERALS = st.one_of(
    VALUES.map(lambda value: {"const": value}), st.lists(VALUES, min_size=1, max_size=3).map(lambda all: {"enum": all})
)
LEAVES = st.one_of(NUMBERS, STRINGS, LITERALS, st.just({"type": "boolean"}))


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    few = st.integers(0, 3)
    objects = keywords(
        properties=st.dictionaries(NAMES, inner, max_size=3),
        required=st.lists(NAMES, max_size=3, unique=True),
        patternProperties=st.dictionaries(PATTERNS, inner, max_size=1),
        additionalProperties=st.booleans() | inner,
        minProperties=few,
        maxProperties=few,
    )
    arrays = keywords(
        items=inner | st.booleans(), prefixItems=st.lists(inner, min_size=1, max_size=2), minItems=few, maxItems=few
    )
    some = st.lists(inner, min_size=1, max_size=3)
    return st.one_of(
        objects.map(lambda more: {"type": "object", **more}),
        arrays.map(lambda more: {"type": "array", **more}),
        some.map(lambda all: {"anyOf": all}),
        some.map(lambda all: {"oneOf": all}),
        some.map(lambda all: {"allOf": all}),
        st.builds(lambda one, more: {"$defs": {"x": one}, "$ref": "#/$defs/x", **more}, LEAVES, NUMBERS),
    )


KINDS = {
    "numbers": NUMBERS,
    "numbers together": st.one_of(
        st.lists(NUMBERS, min_size=2, max_size=2).map(lambda all: {"allOf": all}),
        st.builds(lambda own, all: {**own, "anyOf": all}, NUMBERS, st.lists(NUMBERS, min_size=1, max_size=2)),
    ),
    "literals": LITERALS,
    "strings": STRINGS,
    "all": st.recursive(LEAVES, containers, max_leaves=6),
}


@pytest.fixture(scope="module")
def reader(demo: Checkpoint) -> GrammarProcess:
    """As a gateway has it: there are schemas at which the library ends its process, -2**63 with multipleOf say."""
    return GrammarProcess(demo.tokenizer, demo.vocab_size, demo.eos)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint("demo", tmp_path_factory.mktemp("unused"))


def near(schema: Any) -> list[str]:
    """Return documents that are made of what a schema says: its own literals, and numbers beside them."""
    found = set[str]()
    waiting: list[Any] = [schema]
    while waiting:
        each = waiting.pop()
        if isinstance(each, dict):
            waiting += each.values()
            names = list(each.get("properties", {})) + list(each.get("required", ()))
            found |= {f'{{"{name}":1,"{name}":2}}' for name in ("a", *names) if name.isalpha()}
        elif isinstance(each, list):
            waiting += each
        elif isinstance(each, str):
            printed = each.translate(dict.fromkeys((*range(32), 127)))
            found |= {json.dumps(each, ensure_ascii=False), json.dumps(printed, ensure_ascii=False)}
        elif isinstance(each, int | float) and not isinstance(each, bool):
            around = {each - 1, each, each + 1, float(each), int(float(each))}
            found |= {json.dumps(number) for number in around} | {f"{int(each)}.0", "-0", "0.0"}
    return sorted(found)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(1_000), deadline=None)
@given(data=st.data(), seed=st.integers(0, 2**31))
def test_an_answer_is_valid_or_its_schema_refused(
    demo: Checkpoint, reader: GrammarProcess, kind: str, data: st.DataObject, seed: int
) -> None:
    schema = data.draw(KINDS[kind], "schema")
    constraint = asked_for({"guided_json": schema})
    assert constraint is not None
    try:
        grammar = reader.read_grammar(constraint, 20)
    except InvalidRequestError as error:
        assert error.code == "invalid_schema"
        return
    judge = jsonschema_rs.validator_for(schema)
    for text in near(schema):
        if demo.takes(grammar, text):
            assert judge.is_valid(json.loads(text)), text
    answer = demo.walk(demo.grammar(grammar), seed, 80)
    if answer[-1] in demo.eos:
        # JSON has numbers of any size, Python's floats end.
        value = json.loads(demo.text(answer), parse_float=lambda text: min(max(float(text), -1e308), 1e308))
        assert judge.is_valid(value), demo.text(answer)
