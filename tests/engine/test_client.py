"""A worker's engine, on a thread and in a process of its own: every sequence ends in exactly one way."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from dataplane.blocks.layout import BlockTable, Segment
from schemas.request import SamplingParams
from services.engine.batch import Batch
from services.engine.client import EngineLoad, EngineStoppedError
from services.engine.fake import FakeEngine, fake_answer, fake_choices, fake_prompt_logprobs
from services.engine.interface import GrammarError, StepItem
from services.engine.messages import StepResult
from services.sim.brackets import Brackets
from tests.engine import fake_child
from tests.engine.client_rig import LAYOUT, TIMEOUT, VOCAB, Rig
from tests.waiting import wait_until


@pytest.fixture(params=[False, True], ids=["thread", "process"])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    made = Rig(in_process=request.param)
    made.engine.start_engine()
    yield made
    made.close()


@pytest.fixture
def threaded() -> Iterator[Rig]:
    made = Rig()
    made.engine.start_engine()
    yield made
    made.close()


def test_sequences_are_answered_on_the_engine_s_thread(rig: Rig) -> None:
    for n in range(5):
        rig.submit(f"r{n}", length=10 + n)
    assert {rig.next() for _ in range(5)} == {("ended", f"r{n}", "length") for n in range(5)}
    for n in range(5):
        sampling = SamplingParams(max_tokens=5, temperature=0.0)
        assert rig.answer(f"r{n}") == fake_answer(LAYOUT, list(range(10 + n)), sampling)
    assert rig.threads == {"engine"}
    assert rig.engine.engine_load() == EngineLoad(0, 0, 0)


def test_an_engine_that_gives_too_few_tokens_fails_the_step_and_not_the_thread(
    threaded: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(FakeEngine, "compute", lambda self, items: [])
        threaded.submit("r")
        event, name, reason = threaded.next()
        assert (event, name) == ("failed", "r") and "one outcome per sampling item" in reason
    threaded.submit("s")
    assert threaded.next() == ("ended", "s", "length")
    assert not threaded.engine.has_failed


def test_a_thread_that_fails_ends_all_sequences_and_says_so(threaded: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def plan(_self: Batch) -> list[StepItem]:
        raise RuntimeError("a mistake of ours")

    threaded.gate.clear()
    threaded.submit("r")
    assert threaded.in_step.wait(TIMEOUT)
    monkeypatch.setattr(Batch, "plan", plan)
    threaded.submit("s")
    threaded.gate.set()
    assert {threaded.next() for _ in range(2)} == {("failed", name, "the engine was stopped") for name in ("r", "s")}
    assert threaded.engine.has_failed
    with pytest.raises(EngineStoppedError):
        threaded.submit("t")


def test_a_cancelled_sequence_is_let_go_of_only_after_the_step(rig: Rig) -> None:
    rig.gate.clear()
    rig.submit("r", max_tokens=1000)
    assert rig.in_step.wait(TIMEOUT)
    rig.cancel("r")
    assert rig.events.empty(), "the step still runs"
    rig.gate.set()
    assert rig.next() == ("removed", "r", "")
    rig.submit("next")
    assert rig.next() == ("ended", "next", "length")
    assert rig.events.empty()


def test_cancelling_what_is_not_there_says_nothing(rig: Rig) -> None:
    rig.engine.cancel(99)
    rig.submit("r")
    assert rig.next() == ("ended", "r", "length")
    rig.cancel("r")
    rig.submit("other")
    assert rig.next() == ("ended", "other", "length")
    assert rig.events.empty()


def test_submit_and_cancel_before_a_step_takes_both(rig: Rig) -> None:
    rig.gate.clear()
    rig.submit("first")
    assert rig.in_step.wait(TIMEOUT)
    rig.submit("second")
    rig.cancel("second")
    rig.engine.start_grammar("brackets 1").result(TIMEOUT)  # behind it what was said before is heard
    rig.gate.set()
    assert {rig.next(), rig.next()} == {("removed", "second", ""), ("ended", "first", "length")}
    assert not rig.answer("second")


def fail_behind_a_step(rig: Rig, fault: int) -> None:
    """Let the next step end by a fault. It has "a"; "b" came while it ran."""
    rig.gate.clear()
    rig.submit("a")
    assert rig.in_step.wait(TIMEOUT)
    rig.submit("b")
    rig.fail(fault)
    rig.gate.set()


def test_a_step_that_raises_fails_its_sequences_and_the_thread_lives(rig: Rig) -> None:
    fail_behind_a_step(rig, fake_child.RAISES)
    assert rig.next() == ("failed", "a", "RuntimeError: out of luck")
    assert rig.next() == ("ended", "b", "length"), "who was not in the step is not in the failure"
    assert rig.engine.engine_load() == EngineLoad(0, 0, 0)


def test_an_engine_that_is_lost_ends_the_thread_and_all_sequences(rig: Rig) -> None:
    fail_behind_a_step(rig, fake_child.IS_LOST)
    assert rig.next() == ("failed", "a", "EngineLostError: the card fails")
    assert rig.next()[:2] == ("failed", "b")
    wait_until(lambda: rig.engine.has_failed or bool(rig.deaths))


def test_a_callback_that_raises_does_not_end_the_thread(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    original = rig.engine._callbacks

    def fail(result: StepResult) -> None:
        rig.engine._callbacks = original
        raise ValueError("a bug")

    rig.engine._callbacks = original._replace(on_step=fail)
    rig.submit("r")
    assert rig.next() == ("ended", "r", "length")
    assert "a bug" in caplog.text


def test_load_counts_what_waits(rig: Rig) -> None:
    rig.gate.clear()
    rig.submit("a", length=40, max_tokens=2)
    assert rig.in_step.wait(TIMEOUT)
    assert rig.engine.engine_load() == EngineLoad(0, 1, 40)
    rig.submit("b", length=30, max_tokens=2)
    assert rig.engine.engine_load() == EngineLoad(0, 2, 70)
    rig.gate.set()
    rig.next(), rig.next()
    assert rig.engine.engine_load() == EngineLoad(0, 0, 0)


def test_stop_fails_what_is_left_and_refuses_more() -> None:
    rig = Rig()
    rig.engine.start_engine()
    rig.gate.clear()
    rig.submit("a", max_tokens=1000)
    assert rig.in_step.wait(TIMEOUT)
    rig.submit("b")
    assert not rig.engine.stop_engine(0.01), "the step still runs"
    with pytest.raises(EngineStoppedError):
        rig.submit("c")
    with pytest.raises(EngineStoppedError):
        rig.cancel("a")
    rig.gate.set()
    assert rig.engine.stop_engine(TIMEOUT)
    assert {rig.next(), rig.next()} == {("failed", name, "the engine was stopped") for name in ("a", "b")}


def test_stop_before_start() -> None:
    assert Rig().engine.stop_engine(1.0)


BLOCKS = {"tables": (BlockTable((Segment(390, 4),)),)}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"tables": (BlockTable((Segment(0, 1),)),)}, "slots"),
        ({"tables": ()}, "0 block tables"),
        ({"tables": (BlockTable((Segment(0, 3),), 1),)}, "begins at token 8"),
        ({"tables": (BlockTable((Segment(0, 1), Segment(0, 1))),)}, "a block twice"),
        ({"token_ids": [1, 2, 999]}, "vocabulary"),
        ({"num_computed_tokens": 3}, "no token to compute"),
        ({"token_ids": []}, "no token to compute"),
        ({"token_ids": [1, 2, 3, *range(10)], "num_prompt_tokens": 3}, "has had all"),
    ],
)
def test_a_sequence_that_would_fail_everybody_fails_alone(rig: Rig, change: dict[str, Any], expected: str) -> None:
    rig.gate.clear()
    rig.submit("good")
    assert rig.in_step.wait(TIMEOUT)
    rig.submit("bad", max_tokens=10, **({"token_ids": [1, 2, 3]} | change))
    rig.gate.set()
    ends = {name: (kind, told) for kind, name, told in (rig.next(), rig.next())}
    assert ends["good"] == ("ended", "length")
    assert ends["bad"][0] == "failed" and expected in ends["bad"][1]
    assert rig.engine.engine_load() == EngineLoad(0, 0, 0)


def test_layers_are_told_as_they_are_written(rig: Rig) -> None:
    """Two sequences at once: each layer of each ends complete before the step is told, and none goes back."""
    heard: dict[str, list[tuple[int, int]]] = {"a": [], "b": []}

    class Listener:
        def __init__(self, name: str) -> None:
            self.name = name

        def advance(self, layer: int, num_tokens: int, mark: int = 0) -> None:
            heard[self.name].append((layer, num_tokens))

    for name, length in (("a", 40), ("b", 50)):
        rig.submit(name, length, listener=Listener(name))
    assert {rig.next()[1], rig.next()[1]} == {"a", "b"}
    for name, length in (("a", 40), ("b", 50)):
        last = dict(heard[name])
        assert set(last) == set(range(LAYOUT.num_layers)) and min(last.values()) >= length
        for layer in last:
            told = [num_tokens for other, num_tokens in heard[name] if other == layer]
            assert told == sorted(told)


def test_more_are_listened_to_than_there_are_rows_at_a_time(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row is given back."""
    rig.engine._new_rows = iter(range(1))

    class Listener:
        def advance(self, layer: int, num_tokens: int, mark: int = 0) -> None: ...

    for name in "abc":
        rig.submit(name, listener=Listener())
        assert rig.next() == ("ended", name, "length")


def test_logprobs_come_with_the_tokens(rig: Rig) -> None:
    sampling = SamplingParams(max_tokens=4, temperature=0.0, logprobs=2, prompt_logprobs=1)
    rig.submit("r", max_tokens=4, sampling=sampling, wants_prompt_logprobs=True)
    rig.next()
    first, *others = rig.tokens["r"]
    assert first.prompt_logprobs == tuple(fake_prompt_logprobs(LAYOUT, range(20), 1, vocab_size=VOCAB))
    expected = fake_choices(LAYOUT, range(20), sampling, vocab_size=VOCAB)
    assert [token.logprob for token in rig.tokens["r"]] == [choice.logprob for choice in expected]
    assert all(token.prompt_logprobs is None for token in others)


def test_an_answer_is_held_to_its_grammar(rig: Rig) -> None:
    sampling = SamplingParams(max_tokens=40, temperature=1.0, seed=3, grammar="brackets 2")
    rig.engine.start_grammar("brackets 2").result(TIMEOUT)
    rig.submit("r", max_tokens=40, sampling=sampling, stop_token_ids=(0,))
    kind, _, _ = rig.next()
    grammar = Brackets(2, VOCAB, 0)
    assert kind == "ended"
    answer = fake_answer(LAYOUT, list(range(20)), sampling, vocab_size=VOCAB, eos=(0,), grammar=grammar)
    assert rig.answer("r") == answer
    with pytest.raises(GrammarError):
        rig.engine.start_grammar("nonsense").result(TIMEOUT)


def test_a_grammar_and_what_is_counted_do_not_wait_for_a_step(rig: Rig) -> None:
    rig.gate.clear()
    rig.submit("a")
    assert rig.in_step.wait(TIMEOUT)
    rig.engine.start_grammar("brackets 2").result(TIMEOUT)
    assert "python_info{" in rig.engine.library_text("python_info")
    assert rig.events.empty()
    rig.gate.set()
    assert rig.next() == ("ended", "a", "length")


def test_submissions_and_cancellations_from_many_threads(rig: Rig) -> None:
    """Each of 45 sequences ends exactly once, and what was not cancelled has the right tokens."""

    one_at_a_time = threading.Lock()

    def client(first: int) -> None:
        for n in range(first, first + 15):
            with one_at_a_time:
                number = rig.submit(f"r{n}", n + 1, 6)
            if n % 3 == 0:
                rig.engine.cancel(number)

    clients = [threading.Thread(target=client, args=(first,)) for first in (0, 15, 30)]
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join()
    ended = [rig.next() for _ in range(45)]
    assert sorted(name for _, name, _ in ended) == sorted(f"r{n}" for n in range(45))
    sampling = SamplingParams(max_tokens=6, temperature=0.0)
    for kind, name, _ in ended:
        if kind == "ended":
            assert rig.answer(name) == fake_answer(LAYOUT, list(range(int(name[1:]) + 1)), sampling)
        else:
            assert kind == "removed"
    assert rig.events.empty()
