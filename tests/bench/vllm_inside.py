"""What the seam to vLLM costs inside a worker, each measured in a process of its own: vLLM is loaded once in it.

`copies`: how much of a step the copies between vLLM's blocks and the arena take. `loop`: how late an event loop is
beside vLLM's steps, on the loop and with the switch interval that workers have.
"""

import asyncio
import multiprocessing
import random
import sys
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from statistics import median
from typing import Any, NamedTuple

import uvloop

from dataplane.blocks.layout import BlockTable, KVLayout, num_blocks_for, segments_of, uniform_shape
from schemas.block import pack_tokens
from schemas.ids import RequestId
from schemas.request import SamplingParams
from services.bench.drive.stats import percentile
from services.bench.drive.workload import random_tokens
from services.config import set_environment
from services.engine.interface import Sequence, Steps
from services.engine.loop import sequence_of
from services.engine.messages import StepResult, SubmitSequence
from services.engine.thread import EngineThread
from services.engine.vllm_engine.formats import BLOCK_SIZE, format_here
from services.holder.limits import SWITCH_INTERVAL_S
from tests.bench.vllm_peers import NUM_THREADS, TOKEN_BUDGET
from tests.engine.quiet import NO_CALLBACKS, no_grammar

TIMER_S = 0.005
NUM_ANSWER = 32
STOP_TIMEOUT_S = 30.0


class CopyTimes(NamedTuple):
    """Medians of one model's steps, in milliseconds. `save_ms`: in the step that computes a prompt; `load_ms`: in the
    step that goes on behind one that lies in the arena."""

    step_ms: float
    save_ms: float
    load_ms: float
    kv_bytes_per_token: int


class Lateness(NamedTuple):
    """Of a timer, p99 in milliseconds: with nothing else in the process, and beside steps."""

    idle_ms: float
    beside_ms: float


def in_a_process(measure: Callable[..., Any], *arguments: object) -> Any:
    """Return what `measure` does in a process that nothing was imported in before."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(measure, *arguments).result()


class _Loaded(NamedTuple):
    steps: Any
    layout: KVLayout
    vocab_size: int
    rng: random.Random

    def submission(self, number: int, num_tokens: int, num_answer: int) -> SubmitSequence:
        """Return a fresh prompt in the arena's first blocks."""
        blocks = num_blocks_for(num_tokens + num_answer, self.layout.block_size)
        return SubmitSequence(
            number=number,
            request_id=RequestId("bench"),
            tokens=pack_tokens(random_tokens(self.rng, num_tokens, self.vocab_size)),
            num_prompt_tokens=num_tokens,
            sampling=SamplingParams(max_tokens=num_answer, temperature=0.0, ignore_eos=True),
            tables=(BlockTable(segments_of(range(blocks))),),
        )


def _load(model: str, num_tokens: int, token_budget: int) -> _Loaded:
    """Load vLLM as a worker does, with an arena and a pool for one sequence."""
    set_environment({"TORCH_CPP_LOG_LEVEL": "ERROR"})
    warnings.filterwarnings("ignore", category=FutureWarning)  # vLLM's own
    from services.engine.checkpoint import layout_of, read_checkpoint
    from services.engine.vllm_engine.loading import load_vllm

    checkpoint = read_checkpoint(model, "vllm")
    layout = layout_of(checkpoint, block_size=BLOCK_SIZE)
    shape = uniform_shape(layout, num_blocks_for(num_tokens + NUM_ANSWER, BLOCK_SIZE) + 8)
    loaded = load_vllm(
        checkpoint, memoryview(bytearray(shape.arena_bytes)), shape, token_budget=token_budget, num_threads=NUM_THREADS,
        kv_format=format_here(layout.dtype, BLOCK_SIZE, checkpoint.head_dim, {}), kv_bytes=2 * shape.arena_bytes,
        args={},
    )  # fmt: skip
    return _Loaded(loaded.steps, layout, checkpoint.vocab_size, random.Random(20261123))


def copy_times(model: str, num_tokens: int, num_rounds: int) -> CopyTimes:
    """Return what steps and copies of a model take. One step computes the whole prompt."""
    loaded = _load(model, num_tokens, num_tokens + 1)
    link, engine = loaded.steps._link, loaded.steps._engine
    spent_ms: list[float] = []

    def timed(call: Callable[..., None]) -> Callable[..., None]:
        def run(*arguments: object) -> None:
            started = time.perf_counter()
            call(*arguments)
            spent_ms.append((time.perf_counter() - started) * 1e3)

        return run

    link.save, link.copy_in = timed(link.save), timed(link.copy_in)

    def step(sequence: Sequence) -> tuple[float, float]:
        """Return what the only step of a sequence takes, and its copies."""
        engine.forget_blocks()
        spent_ms.clear()
        loaded.steps.add(sequence)
        result: StepResult = loaded.steps.run_step()
        assert len(result.sampled) == 1 and result.sampled[0].local_end
        return (result.ended_ns - result.started_ns) / 1e6, sum(spent_ms)

    computed: list[tuple[float, float]] = []
    read: list[float] = []
    for number in range(num_rounds + 1):
        sequence = sequence_of(loaded.submission(2 * number, num_tokens, 2))
        sequence.max_local_tokens = 1
        times = step(sequence)
        following = sequence_of(loaded.submission(2 * number + 1, num_tokens, 2))
        following.token_ids, following.num_computed_tokens = sequence.token_ids, num_tokens
        _, load_ms = step(following)
        if number:
            computed.append(times)
            read.append(load_ms)
    per_token = loaded.layout.block_bytes // loaded.layout.block_size
    step_ms, save_ms = (median(column) for column in zip(*computed, strict=True))
    return CopyTimes(step_ms, save_ms, median(read), per_token)


def lateness(model: str, num_tokens: int, seconds: float, num_rounds: int) -> list[Lateness]:
    """Return how late a timer is, round by round: first idle, then beside an engine that always has a request."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    loaded = _load(model, num_tokens, TOKEN_BUDGET)
    return [
        Lateness(p99_late_ms(seconds), _beside(loaded, num_tokens, lambda: p99_late_ms(seconds)))
        for _ in range(num_rounds)
    ]


def _beside(loaded: _Loaded, num_tokens: int, measure: Callable[[], float]) -> float:
    num_sent, is_over = 0, threading.Event()

    def submit() -> None:
        nonlocal num_sent
        num_sent += 1
        thread.submit(loaded.submission(num_sent, num_tokens, NUM_ANSWER))

    def on_step(result: StepResult) -> None:
        if not is_over.is_set() and any(token.local_end for token in result.sampled):
            submit()

    steps: Steps = loaded.steps
    thread = EngineThread(steps, no_grammar, NO_CALLBACKS._replace(on_step=on_step))
    submit()
    thread.start_engine()
    late_ms = measure()
    is_over.set()
    while thread.engine_load().num_running + thread.engine_load().num_queued:
        time.sleep(TIMER_S)
    assert thread.stop_engine(STOP_TIMEOUT_S) and not thread.has_failed  # one request may outlast a short measurement
    return late_ms


def p99_late_ms(seconds: float) -> float:
    """Return how late a timer of an event loop is, in milliseconds."""

    async def run() -> list[float]:
        late_ms: list[float] = []
        until = time.perf_counter() + seconds
        while (now := time.perf_counter()) < until:
            await asyncio.sleep(TIMER_S)
            late_ms.append((time.perf_counter() - now - TIMER_S) * 1e3)
        return late_ms

    return percentile(uvloop.run(run()), 99) or 0.0
