"""The simulator's threads and its engine: real code under virtual time."""

import asyncio
import logging

import pytest

from dataplane.blocks.layout import BlockTable, KVLayout, Segment, uniform_shape
from schemas.block import pack_tokens
from schemas.ids import RequestId
from schemas.request import SamplingParams
from services.engine.batch import Batch
from services.engine.client import EngineCallbacks
from services.engine.fake import FakeEngine, fake_answer
from services.engine.messages import StepResult, SubmitSequence
from services.sim.platform import threads
from services.sim.platform.engine import Pace, SimEngineThread, SimSteps
from tests.engine.quiet import no_grammar
from tests.virtual import virtually

# Threads.


def test_threads_take_turns_in_virtual_time() -> None:
    async def live() -> list[tuple[str, float, bool]]:
        told: list[tuple[str, float, bool]] = []

        def run(name: str, wait_s: float) -> None:
            for _ in range(2):
                told.append((name, round(threads.now_s(), 3), threads.pause(wait_s)))

        one, two = threads.spawn(lambda: run("one", 10.0), "one"), threads.spawn(lambda: run("two", 4.0), "two")
        await asyncio.sleep(1.0)
        one.wake()
        one.wake()
        await asyncio.sleep(20.0)
        assert not one.is_alive() and not two.is_alive()
        return told

    told = virtually(live)
    assert told == [("one", 0.0, True), ("two", 0.0, False), ("two", 4.0, False), ("one", 1.0, False)]


def test_a_thread_s_failure_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def live() -> None:
        def fail() -> None:
            raise ValueError("of the thread")

        threads.spawn(fail, "kaput")
        await asyncio.sleep(0.1)

    with caplog.at_level(logging.ERROR):
        virtually(live)
    assert "kaput failed" in caplog.text and "of the thread" in caplog.text


def test_join_waits_and_conditions_wake() -> None:
    async def live() -> list[str]:
        told: list[str] = []
        changed = threads.CoCondition()

        def late() -> None:
            assert not changed.wait(1.0)
            changed.notify_all()
            threads.pause(1.0)
            told.append("late")

        def joiner() -> None:
            assert changed.wait()
            first.join(0.5)
            told.append("gave up")
            first.join()
            told.append("joined")

        first = threads.spawn(late, "late")
        threads.spawn(joiner, "joiner")
        await asyncio.sleep(5.0)
        return told

    assert virtually(live) == ["gave up", "late", "joined"]


def test_threads_that_never_end_are_unwound() -> None:
    told: list[str] = []

    async def live() -> None:
        def run() -> None:
            try:
                threads.pause(None)
            finally:
                told.append("unwound")

        threads.spawn(run, "forever")
        await asyncio.sleep(1.0)

    virtually(live)
    assert told == ["unwound"]


# The engine.


def submitted(number: int, num_tokens: int, max_tokens: int) -> SubmitSequence:
    return SubmitSequence(
        number=number, request_id=RequestId(f"r{number}"), tokens=pack_tokens(range(num_tokens)),
        num_prompt_tokens=num_tokens, sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0),
        tables=(BlockTable((Segment(0, 4),)),),
    )  # fmt: skip


def engine_run(pace: Pace) -> tuple[list[tuple[int, int, float]], list[StepResult], list[int]]:
    """Compute a prompt of 40 tokens and 5 tokens of an answer. Returns what the layers told, and the steps."""
    heard: list[tuple[int, int, float]] = []
    steps: list[StepResult] = []
    left: list[int] = []
    layout = KVLayout(weights="w", dtype="float32", num_layers=3, num_kv_heads=1, head_dim=4, block_size=16)
    shape = uniform_shape(layout, 4)

    class Listener:
        def advance(self, layer: int, num_tokens: int, mark: int = 0) -> None:
            heard.append((layer, num_tokens, round(threads.now_s(), 4)))

    async def live() -> None:
        engine = FakeEngine(shape, memoryview(bytearray(shape.arena_bytes)))
        thread = SimEngineThread(
            SimSteps(engine, Batch(32), pace),
            no_grammar,
            EngineCallbacks(
                steps.append,
                lambda numbers, _: left.extend(numbers),
                left.append,
            ),
        )  # fmt: skip
        thread.start_engine()
        first = submitted(1, 40, 5)
        thread.submit(first, Listener())
        await asyncio.sleep(10.0)
        answer = [token.token_id for step in steps for token in step.sampled]
        assert answer == fake_answer(layout, list(range(40)), first.sampling)
        thread.submit(submitted(2, 40, 5))
        await asyncio.sleep(0.001)
        thread.stop_engine(1.0)
        await asyncio.sleep(1.0)
        assert thread.stop_engine(1.0), "it has ended"

    virtually(live)
    return heard, steps, left


def test_engine_steps_take_virtual_time_layer_by_layer() -> None:
    heard, steps, left = engine_run(Pace(base_s=0.08, prefill_token_s=0.01, decode_token_s=0.02))
    assert heard[:6] == [(0, 32, 0.1), (1, 32, 0.2), (2, 32, 0.3), (0, 40, 0.44), (1, 40, 0.48), (2, 40, 0.52)]
    assert [round((step.ended_ns - step.started_ns) / 1e9, 3) for step in steps[:6]] == [0.4, 0.16, 0.1, 0.1, 0.1, 0.1]
    assert left == [2], "what is left is failed when it is stopped"


@pytest.mark.parametrize(("for_s", "is_killed"), [(0.9, False), (60.0, True)], ids=["for a while", "for good"])
def test_an_engine_that_hangs_goes_on_or_is_killed_in_its_step(for_s: float, *, is_killed: bool) -> None:
    layout = KVLayout(weights="w", dtype="float32", num_layers=3, num_kv_heads=1, head_dim=4, block_size=16)
    shape = uniform_shape(layout, 4)
    steps: list[StepResult] = []
    told: list[str] = []

    async def live() -> None:
        engine = FakeEngine(shape, memoryview(bytearray(shape.arena_bytes)))
        callbacks = EngineCallbacks(
            steps.append,
            lambda _, reason: told.append(reason),
            lambda _: None,
            on_died=lambda death: told.append(f"died computing {len(death.in_step)} of {len(death.had)}"),
            on_back=lambda: told.append("back"),
        )
        thread = SimEngineThread(SimSteps(engine, Batch(32), Pace(base_s=0.4)), no_grammar, callbacks)
        thread.start_engine()
        await asyncio.sleep(0.1)
        thread.hang_engine(for_s)
        await asyncio.sleep(0.3)
        thread.submit(submitted(1, 20, 1))
        await asyncio.sleep(10.0)

    virtually(live)
    assert told == (["died computing 1 of 1", "back"] if is_killed else [])
    assert len(steps) == (not is_killed)
