"""`kvmesh tail`: which messages are a request's story, and how they read."""

from typing import Any

import pytest

from schemas import observe as story
from schemas import subjects
from schemas.ids import RequestId
from schemas.message import Message, RequestMessage, encode
from schemas.subjects import SUBJECTS, Subject
from services.cli.tail import Tail, TailEvent, event_of
from tests.wire.examples import EXAMPLES, GATEWAY, REQUEST

TOLD = [s for s in SUBJECTS if issubclass(s.carries, RequestMessage) and s is not subjects.PROGRESS]


def example(kind: type[Message]) -> Message:
    return next(message for message in EXAMPLES if type(message) is kind)


def concrete(subject: Subject[Any, Any]) -> str:
    return subject.pattern.replace("{}", "some-id")


@pytest.mark.parametrize("subject", TOLD, ids=lambda subject: subject.pattern)
def test_everything_said_of_a_request_is_a_line(subject: Subject[Any, Any]) -> None:
    told = event_of(concrete(subject), encode(example(subject.carries)))
    assert told is not None and told.request_id == REQUEST["request_id"]
    assert told.name == subject.pattern.rsplit(".", 1)[-1] and told.who and told.what
    assert told.is_end == (subject in (subjects.FINISHED, subjects.FAILED, subjects.CANCELLED))


@pytest.mark.parametrize("subject", [s for s in SUBJECTS if s not in TOLD], ids=lambda subject: subject.pattern)
def test_what_is_said_of_nobody_is_none(subject: Subject[Any, Any]) -> None:
    assert event_of(concrete(subject), encode(example(subject.carries))) is None


@pytest.mark.parametrize("payload", [b"", b"{}", b"junk", b'{"type":"WorkerLoad"}'])
def test_junk_is_no_line(payload: bytes) -> None:
    assert event_of("mesh.v1.request.req-1.accepted", payload) is None
    assert event_of("elsewhere.request.req-1.accepted", payload) is None


def said(request_id: str, event: str = "accepted", *, is_end: bool = False) -> TailEvent:
    return TailEvent(RequestId(request_id), event, GATEWAY, "what", is_end)


def test_only_the_wanted_request_is_told_until_its_end() -> None:
    heard = Tail("aa")
    assert heard.line_of(said("req-bb"), 1.0) is None
    line = heard.line_of(said("req-aa"), 1.0)
    assert line is not None and "accepted" in line.plain and "req-aa" not in line.plain
    assert heard.line_of(said("req-aab", "finished", is_end=True), 1.1) is None
    assert not heard.has_ended
    last = heard.line_of(said("req-aa", "finished", is_end=True), 1.25)
    assert last is not None and "+250.0 ms" in last.plain
    assert heard.has_ended
    assert heard.line_of(said("req-aa", "released"), 1.3) is not None and heard.has_ended


def test_a_request_of_several_choices_ends_with_the_last_of_them() -> None:
    heard = Tail("aa")
    for number in (0, 1):
        line = heard.line_of(said(f"req-aa_c{number}"), 1.0)
        assert line is not None and f"req-aa_c{number}" in line.plain
    heard.line_of(said("req-aa_c1", "finished", is_end=True), 1.1)
    assert not heard.has_ended
    heard.line_of(said("req-aa_c0", "failed", is_end=True), 1.2)
    assert heard.has_ended


def test_without_an_id_everybody_is_told_by_name() -> None:
    heard = Tail("")
    lines = [heard.line_of(said(request_id), 1.0) for request_id in ("req-aa", "req-bb")]
    assert [line is not None and line.plain.split()[4] for line in lines] == ["req-aa", "req-bb"]


def test_a_request_that_goes_on_says_why() -> None:
    resumed = example(story.RequestResumed)
    told = event_of("mesh.v1.request.req-1.resumed", encode(resumed))
    assert told is not None and told.what == "goes on after 3 tokens; decode-0 has left: died"
