"""What may follow in an answer: against real kinds of tokenizers, wherever an answer goes on, within limits."""

import json
import subprocess
import sys
import threading
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
from tokenizers import Tokenizer, models

from schemas.request import MAX_GRAMMAR_CHARACTERS, SamplingParams
from services.engine import grammar as module
from services.engine import limits
from services.engine.grammar import Grammars, lark_of_gbnf, lark_of_regex
from services.engine.interface import GrammarError
from tests.engine.grammar_rig import KINDS, Checkpoint, byte_level

TREE: dict[str, Any] = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 5},
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
            },
            "required": ["name"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}
SCHEMAS: dict[str, Any] = {
    "any": {},
    "object": {"type": "object"},
    "tree": TREE,
    "person": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "pattern": "^[A-Z][a-z]{1,8}$"},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "height": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 3},
            "tags": {"type": "array", "items": {"enum": ["a", "b", 'c"d', "é\n"]}, "minItems": 1, "maxItems": 3},
            "pet": {"anyOf": [{"type": "null"}, {"const": {"kind": "cat", "lives": 9}}]},
        },
        "required": ["name", "age", "tags", "pet"],
        "additionalProperties": False,
    },
    "even": {"type": "array", "items": {"type": "integer", "multipleOf": 2}, "minItems": 2, "maxItems": 4},
    "pair": {"type": "array", "prefixItems": [{"type": "string", "maxLength": 3}, {"type": "boolean"}], "items": False},
    "map": {"type": "object", "patternProperties": {"^k[0-9]$": {"type": "null"}}, "additionalProperties": False},
    "either": {"oneOf": [{"type": "string", "maxLength": 4}, {"type": "integer"}]},
    "both": {"type": "object", "properties": {"a": {"type": "integer"}}, "allOf": [{"required": ["a"]}],
             "additionalProperties": False},
}  # fmt: skip
DOCUMENTS = (
    '{"a": [1, -2.5e10, true, false, null], "é": "\\"\\\\ \\n ü 😀"}',
    "[]",
    '"漢字\\t"',
    '{"nested": {"deeper": [[[{}]]]}}',
    "0",
)


def lark(schema: Any) -> str:
    return f"start: %json {json.dumps(schema)}"


@pytest.fixture(scope="module", params=KINDS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint("demo", tmp_path_factory.mktemp("unused"))


# What may follow.


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_document_can_be_written(checkpoint: Checkpoint, document: str) -> None:
    assert checkpoint.text(checkpoint.ids(document)) == document
    assert checkpoint.takes(lark({}), document)
    assert not checkpoint.takes(lark({}), document[:-1] + "?")


@pytest.mark.parametrize("name", SCHEMAS)
def test_random_answers_are_valid(checkpoint: Checkpoint, name: str) -> None:
    schema, num_whole = SCHEMAS[name], 0
    for seed in range(20):
        answer = checkpoint.walk(checkpoint.grammar(lark(schema)), seed)
        if answer[-1] in checkpoint.eos:
            num_whole += 1
            value = json.loads(checkpoint.text(answer))
            assert jsonschema_rs.is_valid(schema, value), value
    assert num_whole >= 10, "most come to an end"


def test_the_end_is_every_eos_and_only_where_the_document_is_complete(checkpoint: Checkpoint) -> None:
    grammar = checkpoint.grammar('start: "ab" | "abc"')
    ab, abc = checkpoint.ids("a") + checkpoint.ids("b"), checkpoint.ids("a") + checkpoint.ids("b") + checkpoint.ids("c")
    assert not grammar.allowed([])[checkpoint.eos].any()
    assert grammar.allowed(ab)[checkpoint.eos].all() and grammar.allowed(ab)[abc[-1]]
    assert np.flatnonzero(grammar.allowed(abc)).tolist() == sorted(checkpoint.eos), "nothing else can follow"
    assert np.flatnonzero(grammar.allowed([*abc, checkpoint.eos[0]])).tolist() == sorted(checkpoint.eos)


def test_a_request_s_own_stop_token_is_no_matter_of_the_grammar(demo: Checkpoint) -> None:
    """It ends the answer where the grammar lets it be written, and is not let in elsewhere."""
    stop = demo.ids("x")[0]
    assert SamplingParams(max_tokens=1, stop_token_ids=(stop,)).stop_token_ids
    assert demo.grammar('start: "x" "y"').allowed([])[stop]
    assert not demo.grammar('start: "y"').allowed([])[stop]


def test_a_tokenizer_that_has_more_than_the_model() -> None:
    tokenizer = byte_level()
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.add_tokens([f"tok{number}" for number in range(50)])
    eos = tokenizer.token_to_id("<eos>")
    mask = Grammars(tokenizer, eos + 1, [eos]).compile("start: /(?s:.*)/").result(60).allowed([])
    assert mask.shape == (eos + 1,) and mask[eos]


# Wherever it goes on.


@pytest.mark.parametrize("name", ["person", "tree", "any"])
def test_an_answer_goes_on_at_every_index_as_it_would_have(checkpoint: Checkpoint, name: str) -> None:
    text = lark(SCHEMAS[name])
    answer = checkpoint.walk(checkpoint.grammar(text), seed=3, max_tokens=60)
    steady = checkpoint.grammar(text)
    for at in range(len(answer)):
        expected = steady.allowed(answer[:at])

        fresh = checkpoint.grammar(text)
        assert np.array_equal(fresh.allowed(answer[:at]), expected), at


def test_another_answer_begins_again(demo: Checkpoint) -> None:
    grammar, fresh = demo.grammar(lark(TREE)), demo.grammar(lark(TREE))
    first, second = demo.walk(grammar, 1), demo.walk(grammar, 2)
    assert first != second
    for answer in (first[:5], second[:9], second[:4], [], first[:7]):
        assert np.array_equal(grammar.allowed(answer), demo.grammar(lark(TREE)).allowed(answer))
    assert np.array_equal(grammar.allowed([]), fresh.allowed([]))


def test_a_mask_is_the_caller_s(demo: Checkpoint) -> None:
    grammar = demo.grammar(lark({}))
    first = grammar.allowed([])
    kept = first.copy()
    grammar.allowed(demo.ids('{"a'))
    assert np.array_equal(first, kept)


def test_tokens_that_do_not_begin_an_answer(demo: Checkpoint) -> None:
    grammar = demo.grammar(lark({"type": "object"}))
    with pytest.raises(GrammarError):
        grammar.allowed(demo.ids("[1]"))
    with pytest.raises(GrammarError):
        grammar.allowed([demo.vocab_size + 5])
    assert grammar.allowed(demo.ids("{")).any(), "and it can still be used"


def test_answers_that_use_up_what_all_share_cost_the_others_nothing(
    demo: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = module.LLParserLimits(max_lexer_states=300, verbose_errors=False)
    monkeypatch.setattr(module, "_LIMITS", few)
    text = "start: /([a-z]{2,40}[0-9]{2,40}){1,9}z/"
    met: list[bool] = []
    for seed in range(8):
        grammar = demo.grammar(text)
        try:
            demo.walk(grammar, seed, max_tokens=100)
        except GrammarError as error:
            met.append(error.is_spent)
        assert demo.grammar(text).allowed([]).any(), "a new answer"
    assert True in met, "it shared the grammar, and goes on with another one"


def test_an_answer_that_uses_up_a_grammar_alone_has_ended(demo: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LIMITS", module.LLParserLimits(max_lexer_states=60, verbose_errors=False))
    with pytest.raises(GrammarError, match="too many states") as raised:
        demo.walk(demo.grammar("start: /([a-z]{2,40}[0-9]{2,40}){1,9}y/"), 1, max_tokens=100)
    assert not raised.value.is_spent


# Grammars.


def test_regular_expressions_and_gbnf(demo: Checkpoint) -> None:
    assert demo.takes(lark_of_regex("a/b[0-9]{2}"), "a/b12") and not demo.takes(lark_of_regex("a/b[0-9]{2}"), "a/b1")
    found = lark_of_gbnf('root ::= item ("," item)*\nitem ::= [a-c]+ | "x y"')
    assert demo.takes(found, "abc,x y") and not demo.takes(found, "abd")
    with pytest.raises(GrammarError, match="at line 1"):
        lark_of_gbnf('root ::= "a')
    for bad in ("root ::= missing", f"root ::= {'(' * 30_000}"):
        with pytest.raises(GrammarError):
            lark_of_gbnf(bad)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("start: nowhere", "nowhere"),
        ("begin: /a/", "start"),
        ("start: /(/", "unclosed group"),
        ("start: /(?=a)b/", "look-around"),
        ("start: <nosuch>", "nosuch"),
        ("start: %json {", "json"),
        (lark({"not": {}}), "not"),
        (lark({"x-guidance": {"lenient": True}, "not": {}}), "not"),
        (lark({"$ref": "#"}), "no answer"),
        (lark({"type": "string", "minLength": 3, "maxLength": 2}), "minLength"),
        ("x" * (MAX_GRAMMAR_CHARACTERS + 1), "characters"),
        ("start: \ud800", "serializable"),
        ("", "mpty"),
    ],
)
def test_what_is_no_grammar(demo: Checkpoint, text: str, message: str) -> None:
    with pytest.raises(GrammarError, match=message) as raised:
        demo.grammar(text)
    assert str(raised.value) and "\n" not in str(raised.value) and "verbose" not in str(raised.value)


@pytest.mark.parametrize(
    ("tokenizer", "eos", "message"),
    [
        (Tokenizer(models.WordLevel({"a": 0}, unk_token="a")), [0], "does not know this model's tokenizer"),
        (byte_level(), [], "no token that ends a text"),
    ],
)
def test_a_checkpoint_without_what_it_needs(tokenizer: Tokenizer, eos: list[int], message: str) -> None:
    grammars = Grammars(tokenizer, 300, eos)
    for text in ('start: "a"', 'start: "b"', 'start: "a"'):
        with pytest.raises(GrammarError, match=message):
            grammars.compile(text).result(60)


# The cache.


def test_the_same_grammar_is_understood_once(demo: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    gate = threading.Event()
    real = module.LLMatcher

    def slow(tokenizer: Any, text: str, **options: Any) -> Any:
        made.append(text)
        gate.wait(60)
        return real(tokenizer, text, **options)

    monkeypatch.setattr(module, "LLMatcher", slow)
    futures = [demo.grammars.compile('start: "once"') for _ in range(5)]
    assert not any(future.done() for future in futures)
    gate.set()
    answers = {id(future.result(60)) for future in futures}
    assert len(answers) == 5 and len(made) == 1
    demo.grammars.compile('start: "once"').result(60)
    assert len(made) == 1


def test_what_is_kept_is_bounded_and_the_last_asked_for(demo: Checkpoint) -> None:
    kept = demo.grammars._kept  # pyright: ignore[reportPrivateUsage]
    for number in range(limits.MAX_KEPT_GRAMMARS + 20):
        demo.grammar(f'start: "number {number}"')
        demo.grammar('start: "number 0"')
    assert len(kept) == limits.MAX_KEPT_GRAMMARS and 'start: "number 0"' in kept and 'start: "number 1"' not in kept
    for number in range(12):
        with pytest.raises(GrammarError):
            demo.grammar(f"{number} {'x' * 100_000}")
    assert sum(map(len, kept)) <= limits.MAX_KEPT_GRAMMAR_CHARACTERS


# Hostile ones: refused, or understood and then walked, in a process whose processor time is bounded.

_DEEP = {f"d{i}": {"type": "array", "items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(3_000)}
_DOUBLING = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(30)}


def _wide(width: int, depth: int) -> Any:
    if depth == 0:
        return {"type": "string"}
    return {"type": "object", "properties": {f"p{i}": _wide(width, depth - 1) for i in range(width)}}


HOSTILE = {
    "a schema of 128 KiB": lark(_wide(8, 4)),
    "2,000 optional properties": lark(
        {"type": "object", "properties": {f"k{i}": {"type": "string"} for i in range(2000)}}
    ),
    "anyOf within anyOf": lark({"anyOf": [{"type": "array", "items": {"anyOf": [
        {"type": "array", "items": {"type": "integer"}, "minItems": j} for j in range(30)]}, "minItems": i}
        for i in range(30)]}),
    "allOf of anyOf": lark({"allOf": [{"anyOf": [{"properties": {f"a{i}": {"const": 1}}},
                                                 {"properties": {f"b{i}": {"const": 1}}}]} for i in range(20)]}),
    "references that double": lark({"$defs": {**_DOUBLING, "d30": {"type": "string"}}, "$ref": "#/$defs/d0"}),
    "3,000 references in a row": lark({"$defs": {**_DEEP, "d3000": {"type": "string"}}, "$ref": "#/$defs/d0"}),
    "itself": lark({"$ref": "#"}),
    "itself in both of two": lark({"anyOf": [{"$ref": "#"}, {"$ref": "#"}]}),
    "nested deeply": "start: %json " + '{"items":' * 5000 + "{}" + "}" * 5000,
    "5,000 of an enum": lark({"enum": [f"value {i}" for i in range(5000)]}),
    "a long string of a million": lark({"type": "string", "minLength": 10**6}),
    "a list of a million": lark({"type": "array", "items": {"type": "integer"}, "minItems": 10**6}),
    "numbers of 300 digits": lark({"type": "integer", "minimum": 10**300, "maximum": 10**301}),
    "repeats of repeats": lark_of_regex("((a{1,100}){1,100}){1,100}b"),
    "(a+)+": lark_of_regex("(a+)+$"),
    "two million states": lark_of_regex("(a|b)*a(a|b){20}"),
    "optional and then not": lark_of_regex("(a?){300}a{300}"),
    "any character, 100,000 times": lark_of_regex(".{100000}"),
    "letters of all languages": lark_of_regex("(\\p{L}{1,200}\\p{N}{1,200}){1,50}"),
    "intersections": "start: A\nA: /(ab|ba|[abc]{2,9})*/ & /(.*abc.*){5}/ & ~/(.*cab.*){5}/",
    "the most ambiguous": 'start: s\ns: s s s | s s | "a" | ',
    "left and right": 'start: start "a" | start start | ""',
    "20,000 rules in a row": "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(14_000)) + 'r14000: "c"',
    "counts in counts": 'start: ((("a"{0,100} "b"){0,100} "c"){0,100} "d"){0,100}',
    "parentheses": f"start: {'(' * 10_000}{')' * 10_000}",
}  # fmt: skip
MAX_CPU_S = 20.0
"""Of understanding one and 60 tokens of an answer, the imports included: seconds of processor time, of which the
process is deprived of more. The slowest takes two."""


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile(name: str) -> None:
    code = f"""
import resource, sys
resource.setrlimit(resource.RLIMIT_CPU, ({MAX_CPU_S:.0f}, {MAX_CPU_S:.0f}))
resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
from pathlib import Path
from services.engine.interface import GrammarError
from tests.engine.grammar_rig import Checkpoint
try:
    demo = Checkpoint("demo", Path("."))
    demo.walk(demo.grammar(sys.stdin.read()), 1, max_tokens=60)
    print("understood")
except GrammarError as error:
    print("refused:", error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], input=HOSTILE[name], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-500:]
    assert done.stdout.startswith(("understood", "refused: ")) and done.stdout.count("\n") == 1
    print(name, done.stdout)
