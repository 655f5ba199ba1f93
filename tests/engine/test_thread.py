"""The engine, on a thread and in a process of its own: every sequence ends in exactly one way, whoever asks when."""

import queue
import threading
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from functools import partial
from typing import Any

import pytest

from dataplane.blocks.layout import BlockTable, KVLayout, Segment, uniform_shape
from dataplane.carriers.host import HostArena
from schemas.ids import RequestId
from schemas.request import SamplingParams
from services.engine.batch import Batch
from services.engine.batch_steps import BatchSteps
from services.engine.fake import FakeEngine, fake_answer
from services.engine.interface import (
    EngineCallbacks,
    EngineDeath,
    EngineLoad,
    EngineLostError,
    InvalidSequenceError,
    Sequence,
    StepItem,
    StepResult,
)
from services.engine.process import EngineProcess, RunningEngine
from services.engine.rules import check_sequence
from services.engine.spawn import EngineChild, SpareEngines
from services.engine.thread import EngineStoppedError, EngineThread
from tests.engine import fake_child
from tests.waiting import wait_until

VOCAB = 256
LAYOUT = KVLayout(weights="fake", dtype="float32", num_layers=2, num_kv_heads=1, head_dim=4, block_size=8)
NUM_BLOCKS = 400
TIMEOUT = 30.0


class Rig:
    """A fake engine, on a thread or in a process of its own; steps can be held and failed."""

    def __init__(
        self,
        *,
        in_process: bool = False,
        token_budget: int = 16,
        step_timeout_s: float = TIMEOUT,
        num_spares: int = 0,
    ) -> None:
        self.events: queue.Queue[tuple[str, str, str]] = queue.Queue()
        self.answers: dict[str, list[int]] = {}
        self.threads: set[str] = set()
        self.next_block = 0
        self.in_process = in_process
        self.deaths: list[EngineDeath] = []
        callbacks = EngineCallbacks(self.on_step, self.on_failure, self.on_removed, self.on_died, self.on_back)
        shape = uniform_shape(LAYOUT, NUM_BLOCKS)
        if in_process:
            self.arena = HostArena.create(shape)
            self.control = fake_child.Control()
            self.gate: Any = self.control
            self.in_step: Any = self.control
            order = fake_child.order_of(shape, self.arena.name, self.arena.nonce, token_budget=token_budget)
            self.start_child = partial(EngineChild, order, "decode-0", self.control.spawn)
            self.child = self.start_child()
            self.child.wait_ready()
            check = partial(
                check_sequence, layout=LAYOUT, vocab_size=VOCAB, context_length=4096, token_budget=token_budget
            )
            self.started = [self.child]
            self.has_room = True
            self.spares = SpareEngines(self.next_child, num_spares, lambda: self.has_room)
            self.thread: RunningEngine = EngineProcess(self.child, self.spares, check, step_timeout_s, callbacks)
            return
        self.gate, self.in_step = threading.Event(), threading.Event()
        self.gate.set()
        self._error: Exception | None = None
        memory = memoryview(bytearray(NUM_BLOCKS * LAYOUT.block_bytes))
        steps = BatchSteps(FakeEngine(shape, memory, before_step=self.before_step), Batch(token_budget))
        self.thread = EngineThread(steps, fake_child.GRAMMARS.compile, callbacks)

    def before_step(self, items: Seq[StepItem]) -> None:
        self.in_step.set()
        assert self.gate.wait(TIMEOUT)
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def next_child(self) -> EngineChild:
        self.child = self.start_child()
        self.started.append(self.child)
        return self.child

    def fail(self, how: int) -> None:
        """Let the next step raise (`fake_child`)."""
        if self.in_process:
            self.control.fail(how)
        else:
            lost = how == fake_child.IS_LOST
            self._error = EngineLostError("the card fails") if lost else RuntimeError("out of luck")

    def close(self) -> None:
        self.gate.set()
        assert self.thread.stop_engine(TIMEOUT)
        self.thread.close()
        if self.in_process:
            self.control.close()
            self.arena.close()

    def on_step(self, result: StepResult) -> None:
        self.threads.add(threading.current_thread().name)
        assert result.started_ns <= result.ended_ns
        for token in result.sampled:
            request_id = token.sequence.request_id
            self.answers.setdefault(request_id, []).append(token.token_id)
            if token.local_end:
                self.events.put(("ended", request_id, token.finish_reason or ""))
        for sequence, reason, _ in result.failed:
            self.events.put(("failed", sequence.request_id, reason))

    def on_failure(self, sequences: list[Sequence], reason: str) -> None:
        for sequence in sequences:
            self.events.put(("failed", sequence.request_id, reason))

    def on_died(self, death: EngineDeath) -> None:
        self.deaths.append(death)
        for request_id, _ in death.had:
            self.events.put(("failed", request_id, death.reason))

    def on_back(self) -> None:
        self.events.put(("back", "", ""))

    def on_removed(self, sequence: Sequence) -> None:
        self.events.put(("removed", sequence.request_id, ""))

    def submit(self, name: str, length: int = 20, max_tokens: int = 5, **more: Any) -> Sequence:
        count = -(-(length + max_tokens) // LAYOUT.block_size)
        sequence = Sequence(
            request_id=RequestId(name),
            attempt=0,
            token_ids=list(range(length)),
            num_prompt_tokens=length,
            sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0),
            tables=(BlockTable((Segment(self.next_block, count),)),),
        )
        for field, value in more.items():
            setattr(sequence, field, value)
        self.next_block += count
        self.thread.submit(sequence)
        return sequence

    def next(self) -> tuple[str, str, str]:
        return self.events.get(timeout=TIMEOUT)


@pytest.fixture(params=[False, True], ids=["thread", "process"])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    made = Rig(in_process=request.param)
    made.thread.start()
    yield made
    made.close()


@pytest.fixture
def threaded() -> Iterator[Rig]:
    made = Rig()
    made.thread.start()
    yield made
    made.close()


def test_sequences_are_answered_on_the_engine_s_thread(rig: Rig) -> None:
    for n in range(5):
        rig.submit(f"r{n}", length=10 + n)
    assert {rig.next() for _ in range(5)} == {("ended", f"r{n}", "length") for n in range(5)}
    for n in range(5):
        sampling = SamplingParams(max_tokens=5, temperature=0.0)
        assert rig.answers[f"r{n}"] == fake_answer(LAYOUT, list(range(10 + n)), sampling)
    assert rig.threads == {"engine"}
    assert rig.thread.engine_load() == EngineLoad(0, 0, 0)


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
    assert not threaded.thread.has_failed


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
    assert threaded.thread.has_failed
    with pytest.raises(EngineStoppedError):
        threaded.submit("t")


def test_a_cancelled_sequence_is_let_go_of_only_after_the_step(rig: Rig) -> None:
    rig.gate.clear()
    rig.submit("r", max_tokens=1000)
    assert rig.in_step.wait(TIMEOUT)
    rig.thread.cancel(RequestId("r"), 0)
    assert rig.events.empty(), "the step still runs"
    rig.gate.set()
    assert rig.next() == ("removed", "r", "")
    rig.submit("next")
    assert rig.next() == ("ended", "next", "length")
    assert rig.events.empty()


def test_cancelling_what_is_not_there_says_nothing(rig: Rig) -> None:
    rig.thread.cancel(RequestId("never"), 0)
    rig.submit("r")
    assert rig.next() == ("ended", "r", "length")
    rig.thread.cancel(RequestId("r"), 0)
    rig.submit("other")
    assert rig.next() == ("ended", "other", "length")
    assert rig.events.empty()


def test_another_attempt_is_not_cancelled(rig: Rig) -> None:
    rig.submit("r")
    rig.thread.cancel(RequestId("r"), 1)
    assert rig.next() == ("ended", "r", "length")


def test_submit_and_cancel_before_a_step_takes_both(rig: Rig) -> None:
    rig.gate.clear()
    rig.submit("first")
    assert rig.in_step.wait(TIMEOUT)
    rig.submit("second")
    rig.thread.cancel(RequestId("second"), 0)
    rig.thread.start_grammar("brackets 1").result(TIMEOUT)  # behind it what was said before is heard
    rig.gate.set()
    assert {rig.next(), rig.next()} == {("removed", "second", ""), ("ended", "first", "length")}
    assert "second" not in rig.answers


def test_a_step_that_raises_fails_its_sequences_and_the_thread_lives(rig: Rig) -> None:
    rig.gate.clear()
    rig.submit("a")
    assert rig.in_step.wait(TIMEOUT)
    rig.submit("b")
    rig.fail(fake_child.RAISES)
    rig.gate.set()
    assert rig.next() == ("failed", "a", "RuntimeError: out of luck")
    assert rig.next() == ("ended", "b", "length"), "who was not in the step is not in the failure"
    assert rig.thread.engine_load() == EngineLoad(0, 0, 0)


def test_an_engine_that_is_lost_ends_the_thread_and_all_sequences(rig: Rig) -> None:
    rig.gate.clear()
    rig.submit("a")
    assert rig.in_step.wait(TIMEOUT)
    rig.submit("b")
    rig.fail(fake_child.IS_LOST)
    rig.gate.set()
    assert rig.next() == ("failed", "a", "EngineLostError: the card fails")
    assert rig.next()[:2] == ("failed", "b")
    wait_until(lambda: rig.thread.has_failed or bool(rig.deaths))


def test_a_callback_that_raises_does_not_end_the_thread(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    original = rig.thread._callbacks

    def fail(result: StepResult) -> None:
        rig.thread._callbacks = original
        raise ValueError("a bug")

    rig.thread._callbacks = original._replace(on_step=fail)
    rig.submit("r")
    assert rig.next() == ("ended", "r", "length")
    assert "a bug" in caplog.text


def test_load_counts_what_waits(rig: Rig) -> None:
    rig.gate.clear()
    rig.submit("a", length=40, max_tokens=2)
    assert rig.in_step.wait(TIMEOUT)
    assert rig.thread.engine_load() == EngineLoad(0, 1, 40)
    rig.submit("b", length=30, max_tokens=2)
    assert rig.thread.engine_load() == EngineLoad(0, 2, 70)
    rig.gate.set()
    rig.next(), rig.next()
    assert rig.thread.engine_load() == EngineLoad(0, 0, 0)


def test_stop_fails_what_is_left_and_refuses_more() -> None:
    rig = Rig()
    rig.thread.start()
    rig.gate.clear()
    rig.submit("a", max_tokens=1000)
    assert rig.in_step.wait(TIMEOUT)
    rig.submit("b")
    assert not rig.thread.stop_engine(0.01), "the step still runs"
    with pytest.raises(EngineStoppedError):
        rig.submit("c")
    with pytest.raises(EngineStoppedError):
        rig.thread.cancel(RequestId("a"), 0)
    rig.gate.set()
    assert rig.thread.stop_engine(TIMEOUT)
    assert {rig.next(), rig.next()} == {("failed", name, "the engine was stopped") for name in ("a", "b")}


def test_stop_before_start() -> None:
    assert Rig().thread.stop_engine(1.0)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"tables": (BlockTable((Segment(0, 1),)),)}, "slots"),
        ({"tables": ()}, "0 block tables"),
        ({"tables": (BlockTable((Segment(0, 3),), 1),)}, "begins at token 8"),
        ({"tables": (BlockTable((Segment(0, 1), Segment(0, 1))),)}, "a block twice"),
        ({"token_ids": [1, 2, 999]}, "vocabulary"),
        ({"token_ids": [1, -2, 3]}, "vocabulary"),
        ({"num_computed_tokens": 3}, "no token to compute"),
        ({"token_ids": []}, "no token to compute"),
        ({"token_ids": [1, 2, 3, *range(10)]}, "has had all"),
    ],
)
def test_a_sequence_that_would_fail_everybody_is_refused(
    threaded: Rig, change: dict[str, object], expected: str
) -> None:
    sequence = Sequence(
        request_id=RequestId("bad"),
        attempt=0,
        token_ids=[1, 2, 3],
        num_prompt_tokens=3,
        sampling=SamplingParams(max_tokens=10),
        tables=(BlockTable((Segment(0, 4),)),),
    )
    for name, value in change.items():
        setattr(sequence, name, value)
    with pytest.raises(InvalidSequenceError, match=expected):
        threaded.thread.submit(sequence)


def test_submissions_and_cancellations_from_many_threads(rig: Rig) -> None:
    """Each of 60 sequences ends exactly once, and what was not cancelled has the right tokens."""

    def client(first: int) -> None:
        for n in range(first, first + 15):
            submit_at(n)
            if n % 3 == 0:
                rig.thread.cancel(RequestId(f"r{n}"), 0)

    def submit_at(n: int) -> None:
        sequence = Sequence(
            request_id=RequestId(f"r{n}"),
            attempt=0,
            token_ids=list(range(n + 1)),
            num_prompt_tokens=n + 1,
            sampling=SamplingParams(max_tokens=6, temperature=0.0),
            tables=(BlockTable((Segment(n * 8, 8),)),),
        )
        rig.thread.submit(sequence)

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
            assert rig.answers[name] == fake_answer(LAYOUT, list(range(int(name[1:]) + 1)), sampling)
        else:
            assert kind == "removed"
    assert rig.events.empty()
