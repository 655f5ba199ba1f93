"""Reasoning that is split off, alone and before calls."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.api.choice import TextReader
from services.gateway.api.pieces import Content, Reasoning
from services.gateway.api.reasoning import ReasoningSplitter, ReasoningState, reasons, state_of
from services.gateway.api.text import StopMatcher
from services.gateway.api.tools.parser import HermesParser, LlamaParser, ToolParser
from tests.gateway.splitting import Sum, counting, divided, split
from tests.share import examples

MAY_COME, BEGUN, GOES_ON, OVER = ReasoningState
CALL = '<tool_call>\n{"name": "now", "arguments": {"a": 1}}\n</tool_call>'


def of(state: ReasoningState, *deltas: str) -> tuple[str, str]:
    found = split(ReasoningSplitter(state), deltas)
    return found.reasoning, found.content


def both(state: ReasoningState, calls: ToolParser) -> TextReader:
    return TextReader(ReasoningSplitter(state), StopMatcher(()), calls)


@pytest.mark.parametrize(
    ("state", "text", "reasoning", "content"),
    [
        (MAY_COME, "<think>\nHm.\n</think>\n\nHello.", "Hm.", "Hello."),
        (MAY_COME, "\n <think>Hm.</think>Hello.", "Hm.", "Hello."),
        (MAY_COME, "<think>\n\n</think>\n\nHello.", "", "Hello."),
        (MAY_COME, "Hello <think>Hm.</think>", "", "Hello <think>Hm.</think>"),
        (MAY_COME, "\n\nHello.\n", "", "\n\nHello.\n"),
        (MAY_COME, "<thin", "", "<thin"),
        (MAY_COME, "<thinking>", "", "<thinking>"),
        (MAY_COME, "<think>Hm, a<b </thin", "Hm, a<b </thin", ""),
        (MAY_COME, "", "", ""),
        (BEGUN, "Hm.\n\nSo.\n</think>\n\nHello.", "Hm.\n\nSo.", "Hello."),
        (BEGUN, "\nHm.", "Hm.", ""),
        (BEGUN, "</think>Hello </think>.", "", "Hello </think>."),
        (BEGUN, "<think>Hm.</think>Hello.", "<think>Hm.", "Hello."),
        (BEGUN, "  \n", "", ""),
        (GOES_ON, " me see.</think>Hello.", " me see.", "Hello."),
        (GOES_ON, " me see. ", " me see. ", ""),
        (OVER, " <think>Hm.</think>", "", " <think>Hm.</think>"),
    ],
)
def test_what_is_split_off(state: ReasoningState, text: str, reasoning: str, content: str) -> None:
    assert of(state, text) == (reasoning, content)
    assert of(state, *text) == (reasoning, content), "character by character"
    for at in range(len(text)):
        assert of(state, text[:at], text[at:]) == (reasoning, content)


@settings(max_examples=examples(500), deadline=None)
@given(
    state=st.sampled_from(ReasoningState),
    parts=st.lists(
        st.sampled_from(["<think>", "</think>", "<", "</", "think>", " ", "\n", "a", "Hm", CALL, CALL[:30]])
    ),
    sizes=st.lists(st.integers(0, 9), max_size=30),
)
def test_the_sum_does_not_depend_on_how_text_comes(state: ReasoningState, parts: list[str], sizes: list[int]) -> None:
    text = "".join(parts)

    def found(deltas: list[str]) -> Sum:
        return split(both(state, HermesParser({"now"}, counting())), deltas)

    assert found(divided(text, sizes)) == found([text])
    kept_whole = split(ReasoningSplitter(state, keeps=True), divided(text, sizes))
    assert kept_whole.reasoning + kept_whole.content == text
    reasoning, content = of(state, text)
    assert of(state, *divided(text, sizes)) == (reasoning, content)
    kept = "".join((reasoning + content).split())
    markers = "".join(text.split())
    assert kept in (markers, markers.replace("<think>", "", 1), markers.replace("</think>", "", 1)) or kept == (
        markers.replace("<think>", "", 1).replace("</think>", "", 1)
    ), "but for one block's ends nothing is lost"


def test_reasoning_is_told_of_as_it_comes() -> None:
    splitter = ReasoningSplitter(BEGUN)
    assert splitter.feed("\nLet") == [Reasoning("Let")]
    assert splitter.feed(" me ") == [Reasoning(" me")]
    assert splitter.feed("see </th") == [Reasoning(" see")]
    assert splitter.feed("ink>\n") == []
    assert splitter.feed("Paris") == [Content("Paris")]
    assert splitter.finish() == []


def test_calls_come_after_reasoning() -> None:
    text = f"<think>\nI may write {CALL}.\n</think>\n\nI look.\n{CALL}"
    found = split(both(MAY_COME, HermesParser({"now"}, counting())), text)
    assert found.reasoning == f"I may write {CALL}."
    assert (found.content, found.named) == ("I look.", [("now", '{"a": 1}')])


def test_a_bare_call_may_follow_reasoning() -> None:
    text = 'Hm.</think>\n\n{"name": "now", "parameters": {}}'
    found = split(both(BEGUN, LlamaParser({"now"}, counting())), text)
    assert (found.reasoning, found.content, found.named) == ("Hm.", "", [("now", "{}")])


@pytest.mark.parametrize(
    ("prompt_end", "continued", "state"),
    [
        ("<|im_end|>\n<|im_start|>assistant\n", None, MAY_COME),
        ("what is <think>?<|im_end|>\n<|im_start|>assistant\n", None, MAY_COME),
        ("<｜Assistant｜><think>\n", None, BEGUN),
        ("<|im_start|>assistant\n<think>", None, BEGUN),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", None, OVER),
        ("<｜Assistant｜></think>", None, OVER),
        ("<think>\nLet", "<think>\nLet", GOES_ON),
        ("<think>", "<think>\n", BEGUN),
        ("<think>a</think>Hel", "<think>a</think>Hel", OVER),
        ("assistant\nHel", "Hel", OVER),
    ],
)
def test_where_an_answer_begins(prompt_end: str, continued: str | None, state: ReasoningState) -> None:
    assert state_of(prompt_end, continued) is state


def test_which_templates_reason() -> None:
    assert reasons("{% set content = content.split('</think>')[-1] %}")
    assert not reasons("{{ content }}")
