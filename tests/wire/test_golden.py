"""The wire is what it was: golden files, and services of different ages that understand each other."""

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.message import Message, OpenEnum, UndecodableMessageError, decode, encode
from schemas.request import RefusalReason, Refused
from schemas.subjects import SUBJECTS
from tests.wire.examples import EXAMPLES, MESSAGE_TYPES
from tests.wire.make_golden import GOLDEN

EXAMPLE_OF = {type(example): example for example in EXAMPLES}
UNIONS = sorted({(s.carries,) for s in SUBJECTS} | {s.reply for s in SUBJECTS if s.reply}, key=str)

each_type = pytest.mark.parametrize("kind", MESSAGE_TYPES, ids=lambda kind: kind.__name__)


def golden(kind: type[Message]) -> bytes:
    return (GOLDEN / f"{kind.__name__}.json").read_bytes()


def test_every_message_has_a_golden_file_and_no_file_is_left_over() -> None:
    assert {path.stem for path in GOLDEN.iterdir()} == {kind.__name__ for kind in MESSAGE_TYPES}


@each_type
def test_the_bytes_are_the_golden_ones_both_ways(kind: type[Message]) -> None:
    assert encode(EXAMPLE_OF[kind]) == golden(kind)
    assert decode(golden(kind), kind) == EXAMPLE_OF[kind]


@each_type
def test_an_example_fills_every_field(kind: type[Message]) -> None:
    for field in msgspec.structs.fields(kind):
        assert field.required or getattr(EXAMPLE_OF[kind], field.name) != field.default, field.name


@each_type
def test_an_old_service_reads_new_messages(kind: type[Message]) -> None:
    """Fields that it does not know, at every depth, are ignored."""
    newer = json.dumps(with_new_fields(json.loads(golden(kind)))).encode()
    assert decode(newer, kind) == EXAMPLE_OF[kind]


@each_type
def test_a_new_service_reads_old_messages(kind: type[Message]) -> None:
    """Fields that came with a default may be missing."""
    older = json.loads(golden(kind))
    for field in msgspec.structs.fields(kind):
        if not field.required:
            del older[field.encode_name]
    read = decode(json.dumps(older).encode(), kind)
    for field in msgspec.structs.fields(kind):
        expected = getattr(EXAMPLE_OF[kind], field.name) if field.required else field.default
        assert getattr(read, field.name) == expected


@each_type
def test_a_word_of_a_later_release_drops_no_message(kind: type[Message]) -> None:
    """At every depth: it is read as `OTHER`, and all else as it is."""
    for (*path, last), _ in each_word(decode(golden(kind), kind)):
        newer, known = json.loads(golden(kind)), json.loads(golden(kind))
        for document, word in ((newer, "of_a_later_release"), (known, "other")):
            inner = document
            for key in path:
                inner = inner[key]
            inner[last] = word
        assert decode(json.dumps(newer).encode(), kind) == decode(json.dumps(known).encode(), kind)


def test_all_words_of_the_wire_are_open() -> None:
    """None is missing above for want of an example, or because it is of a kind that is refused."""
    _, shapes = msgspec.json.schema_components(MESSAGE_TYPES)
    kinds = {kind.__name__: kind for kind in OpenEnum.__subclasses__()}
    found = {type(word).__name__ for kind in MESSAGE_TYPES for _, word in each_word(decode(golden(kind), kind))}
    named = {name for name, shape in shapes.items() if "enum" in shape}
    assert named == found and named <= kinds.keys()
    fields = [
        field for shape in shapes.values() for name, field in shape.get("properties", {}).items() if name != "type"
    ]
    assert not any("enum" in json.dumps(field) for field in fields), "a Literal is closed"
    assert all("OTHER" in kinds[name].__members__ for name in named)


@each_type
def test_a_message_of_another_type_or_with_a_field_missing_is_undecodable(kind: type[Message]) -> None:
    other = next(t for t in MESSAGE_TYPES if t is not kind)
    with pytest.raises(UndecodableMessageError):
        decode(golden(kind), other)
    for field in msgspec.structs.fields(kind):
        if field.required:
            document = json.loads(golden(kind))
            del document[field.encode_name]
            with pytest.raises(UndecodableMessageError):
                decode(json.dumps(document).encode(), kind)


REASONS_ON_THE_WIRE = [
    "no_worker", "draining", "starting", "overloaded", "too_long", "deadline", "fingerprint", "invalid", "unsigned",
    "gone", "in_flight", "other",
]  # fmt: skip


def test_the_reason_of_a_refusal_is_the_word_that_it_always_was() -> None:
    """Both ways, and for every reason: services that knew them as plain text read and write the same bytes."""
    assert list(RefusalReason) == REASONS_ON_THE_WIRE
    document = json.loads(golden(Refused))
    for word in REASONS_ON_THE_WIRE:
        refused = decode(json.dumps(document | {"reason": word}).encode(), Refused)
        assert refused.reason is RefusalReason(word)
        assert json.loads(encode(refused)) == document | {"reason": word}


@given(st.binary())
def test_no_bytes_raise_anything_else(junk: bytes) -> None:
    must_be_undecodable_or_fine(junk)


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
DOCUMENTS = st.recursive(SCALARS, lambda deeper: st.lists(deeper) | st.dictionaries(st.text(), deeper), max_leaves=20)


@given(DOCUMENTS, st.sampled_from(MESSAGE_TYPES))
def test_no_document_raises_anything_else(document: object, kind: type[Message]) -> None:
    must_be_undecodable_or_fine(json.dumps(document).encode())
    if isinstance(document, dict):
        must_be_undecodable_or_fine(json.dumps({"type": kind.__name__, **document}).encode())


@given(st.data(), st.sampled_from(MESSAGE_TYPES))
def test_no_damaged_message_raises_anything_else(data: st.DataObject, kind: type[Message]) -> None:
    """A byte flipped, cut or put in; or a value replaced by one of another type."""
    payload = bytearray(golden(kind))
    at = data.draw(st.integers(0, len(payload) - 1))
    payload[at : at + data.draw(st.integers(0, 4))] = data.draw(st.binary(max_size=4))
    must_be_undecodable_or_fine(bytes(payload))
    document = json.loads(golden(kind))
    key = data.draw(st.sampled_from(sorted(document)))
    document[key] = data.draw(st.none() | st.integers() | st.text() | st.lists(st.none()) | st.floats())
    must_be_undecodable_or_fine(json.dumps(document).encode())


HOSTILE = [b"[" * 1_000_000, b'{"type":' * 500_000, b"1" * 100_000, b'"\\ud800"', b"1e999", b"\x00"]


@pytest.mark.parametrize("junk", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_documents(junk: bytes) -> None:
    must_be_undecodable_or_fine(junk)


def must_be_undecodable_or_fine(payload: bytes) -> None:
    for union in UNIONS:
        try:
            message = decode(payload, *union)
        except UndecodableMessageError:
            continue
        assert isinstance(message, union)
        assert decode(encode(message), *union) == message


def each_word(value: object, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], OpenEnum]]:
    """Yield the words in a message, at every depth, and where they are in its document."""
    if isinstance(value, OpenEnum):
        yield path, value
    elif isinstance(value, msgspec.Struct):
        for field in msgspec.structs.fields(value):
            yield from each_word(getattr(value, field.name), (*path, field.encode_name))
    elif isinstance(value, tuple):
        for at, item in enumerate(value):
            yield from each_word(item, (*path, at))


def with_new_fields(value: object) -> object:
    if isinstance(value, list):
        return [with_new_fields(item) for item in value]
    if isinstance(value, dict):
        return {key: with_new_fields(item) for key, item in value.items()} | {"from_the_future": {"a": [1, None]}}
    return value
