"""What it costs, and brings, that the engine is a process of its own: each figure with the engine on a thread of its
worker, and in a process, in turn.

    python -m tests.bench.bench_ipc [--engine vllm] [--only border,loop,gaps] [--rounds 3] [--json]

    border  from a sequence's submission until its step begins, and from a step's end until the worker's callback runs
    loop    how late an event loop's timers are beside an engine that decodes 8 sequences all the time
    gaps    of 8 running answers on one decode worker, while prompts of 2,000 tokens are handed over to it

`border` and `loop` make the engine as a worker does (`load_parts`); `gaps` has a mesh of one prefill and one decode
worker for each way, both up at the same time, and one of them busy. Workers have one thread to compute with.
"""

import argparse
import asyncio
import itertools
import json
import queue
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from dataplane.blocks.layout import BlockTable, num_blocks_for, segments_of
from schemas.block import pack_tokens
from schemas.ids import RequestId, WorkerId
from schemas.request import SamplingParams
from services.bench.drive.meshes import model_folder, rotated, serving
from services.bench.drive.progress_bar import progress
from services.bench.drive.stats import percentile
from services.bench.drive.workload import random_tokens
from services.config import (
    EngineConfig,
    EngineName,
    MeshConfig,
    ModelConfig,
    SchedulerConfig,
    WorkerConfig,
    set_environment,
)
from services.engine.checkpoint import read_checkpoint
from services.engine.client import EngineCallbacks
from services.engine.messages import StepResult, SubmitSequence
from services.holder.limits import SWITCH_INTERVAL_S
from services.launch.engine_choice import with_engine
from services.launch.options import Launch
from services.settings import changed
from services.worker.parts import WorkerParts, load_parts
from tests.bench.bench_gaps import Answer, ask
from tests.bench.vllm_inside import in_a_process, p99_late_ms

WAYS = ("thread", "process")
NUM_RUNNING = 8
PROMPT, LONG_PROMPT = 64, 2_000
SUBMISSIONS, LOOP_S = 300, 5.0
ANSWER, HANDOVERS = 400, 6
STOP_S = 30.0


class Row(NamedTuple):
    """One figure, by the round: `thread` and `process` have a value for each."""

    name: str
    thread: list[float]
    process: list[float]

    @property
    def ratio(self) -> float:
        """Of the rounds' medians."""
        thread, process = percentile(self.thread, 50), percentile(self.process, 50)
        assert thread is not None and process is not None
        return process / thread


def config_of(model: str, engine: EngineName, way: str) -> MeshConfig:
    config = MeshConfig(
        model=ModelConfig(path=model),
        worker=WorkerConfig(num_threads=1, kv_bytes=256 << 20, device="cpu"),
        engine=EngineConfig(name=engine, process=way == "process"),
        ticket_secrets=("s" * 32,),
        tenant_seed="s" * 32,
    )
    return with_engine(config, read_checkpoint(model, engine))


class Loaded:
    """A worker's engine, in one of the ways, with a prompt for whoever asks."""

    def __init__(self, parts: WorkerParts, on_step: Callable[[StepResult], None]) -> None:
        nothing: Callable[..., None] = lambda *_: None  # noqa: E731
        self.engine = parts.make_engine(EngineCallbacks(on_step, nothing, nothing))
        self._block_size, self._vocab_size = parts.limits.block_size, parts.limits.vocab_size
        self._numbers, self._rng = itertools.count(), random.Random(20261128)

    def submit(self, num_answer: int) -> None:
        self.engine.submit(self.new_sequence(num_answer))

    def new_sequence(self, num_answer: int) -> SubmitSequence:
        """Return a fresh prompt, in blocks that none of the few before it has."""
        number, num_blocks = next(self._numbers), num_blocks_for(PROMPT + num_answer, self._block_size)
        first = number % NUM_RUNNING * num_blocks
        blocks = segments_of(range(first, first + num_blocks))
        sampling = SamplingParams(max_tokens=num_answer, temperature=0.0, ignore_eos=True)
        return SubmitSequence(
            number=number,
            request_id=RequestId(f"bench-{number}"),
            tokens=pack_tokens(random_tokens(self._rng, PROMPT, self._vocab_size)),
            num_prompt_tokens=PROMPT,
            sampling=sampling,
            tables=(BlockTable(blocks),),
        )


@contextmanager
def loaded(model: str, engine: EngineName, way: str, on_step: Callable[[StepResult], None]) -> Iterator[Loaded]:
    set_environment({"TORCH_CPP_LOG_LEVEL": "ERROR"})
    parts = load_parts(config_of(model, engine, way), "decode", WorkerId(f"decode-{way}"))
    made = Loaded(parts, on_step)
    made.engine.start_engine()
    try:
        yield made
    finally:
        assert made.engine.stop_engine(STOP_S)
        made.engine.close()
        parts.arena.close()


def border(model: str, engine: EngineName, way: str) -> dict[str, float]:
    """Return medians, in milliseconds; one sequence at a time."""
    told: queue.SimpleQueue[tuple[StepResult, int]] = queue.SimpleQueue()
    taken_ms, received_ms = list[float](), list[float]()
    with loaded(model, engine, way, lambda result: told.put((result, time.monotonic_ns()))) as made:
        for number in range(SUBMISSIONS):
            sequence, submitted_ns = made.new_sequence(1), time.monotonic_ns()
            made.engine.submit(sequence)
            result, told_ns = told.get()
            if number >= SUBMISSIONS // 10:  # the first ones warm up
                taken_ms.append((result.started_ns - submitted_ns) / 1e6)
                received_ms.append((told_ns - result.ended_ns) / 1e6)
    return {
        "submission until its step begins, ms": _p(taken_ms, 50),
        "step's end until its result is received, ms": _p(received_ms, 50),
    }


def loop(model: str, engine: EngineName, way: str) -> dict[str, float]:
    """Return p99 of the loop's timers, and the median of how long steps' results take, in milliseconds."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    received_ms = list[float]()

    def on_step(result: StepResult) -> None:
        received_ms.append((time.monotonic_ns() - result.ended_ns) / 1e6)
        for token in result.sampled:
            if token.local_end:
                made.submit(ANSWER)

    with loaded(model, engine, way, on_step) as made:
        for _ in range(NUM_RUNNING):
            made.submit(ANSWER)
        late_ms = p99_late_ms(LOOP_S)
    beside = f"beside {NUM_RUNNING} that decode"
    return {
        f"loop {beside}, p99 late, ms": late_ms,
        f"step's end until its result is received, {beside}, ms": _p(received_ms, 50),
    }


async def gaps(model: str, engine: EngineName, num_rounds: int, on_round: Callable[[], None]) -> list[dict[str, Any]]:
    """Return p99 of the gaps in milliseconds, by the round and the way."""
    options = Launch(
        config=MeshConfig(
            model=ModelConfig(path=model),
            scheduler=SchedulerConfig(unsplit_tokens_max=0),
            worker=WorkerConfig(num_threads=1, kv_bytes=256 << 20),
            engine=EngineConfig(name=engine),
        )
    )
    rounds: list[dict[str, Any]] = []

    def meshes(options: Launch) -> Mapping[str, Launch]:
        return {way: changed(options, {"config.engine.process": way == "process"}) for way in WAYS}

    async with serving(meshes, options) as served:
        urls = {way: supervisor.url for way, supervisor in served.supervisors.items()}
        rng = random.Random(20261128)
        for turn in range(num_rounds + 1):
            found: dict[str, Any] = {}
            for way in rotated(WAYS, turn):
                found[way] = await _gap_p99_ms(urls[way], served.model, rng, served.vocab_size)
            if turn:  # the first one warms up
                rounds.append(found)
                on_round()
    return rounds


async def _gap_p99_ms(url: str, model: str, rng: random.Random, vocab_size: int) -> float:
    def body(num_prompt: int, num_answer: int) -> dict[str, Any]:
        prompt = random_tokens(rng, num_prompt, vocab_size)
        fields = {"model": model, "prompt": prompt, "max_tokens": num_answer, "ignore_eos": True, "temperature": 0}
        return fields | {"stream": True, "return_token_ids": True}

    running = [asyncio.create_task(ask(url, body(PROMPT, ANSWER))) for _ in range(NUM_RUNNING)]
    await asyncio.sleep(0)
    handed = [(await ask(url, body(LONG_PROMPT, 2))).arrivals[0].at_s for _ in range(HANDOVERS)]
    answers: list[Answer] = await asyncio.gather(*running)
    until_s = handed[-1]
    pairs = [pair for answer in answers for pair in itertools.pairwise(answer.arrivals) if pair[1].at_s < until_s]
    return _p([1e3 * (after.at_s - before.at_s) for before, after in pairs], 99)


def _p(values: list[float], share: int) -> float:
    found = percentile(values, share)
    assert found is not None
    return round(found, 4)


async def measure(model: str, engine: EngineName, only: list[str], num_rounds: int) -> list[Row]:
    rows: dict[str, dict[str, list[float]]] = {}
    parts: dict[str, Callable[[str, EngineName, str], dict[str, float]]] = {"border": border, "loop": loop}
    for name, part in parts.items():
        if name not in only:
            continue
        for turn in range(num_rounds):
            for way in rotated(WAYS, turn):
                with progress(f"{name}, {way}, round {turn + 1}"):
                    found = await asyncio.to_thread(in_a_process, part, model, engine, way)
                for figure, value in found.items():
                    rows.setdefault(figure, {each: [] for each in WAYS})[way].append(value)
    if "gaps" in only:
        rounds = await gaps(model, engine, num_rounds, lambda: None)
        name = f"gaps of {NUM_RUNNING} answers beside hand-overs of {LONG_PROMPT} tokens, p99, ms"
        rows[name] = {way: [found[way] for found in rounds] for way in WAYS}
    return [Row(name, found["thread"], found["process"]) for name, found in rows.items()]


async def run(options: argparse.Namespace) -> list[Row]:
    only = options.only.split(",")
    if unknown := set(only) - {"border", "loop", "gaps"}:
        sys.exit(f"no part is called {min(unknown)}; there are border, loop, gaps")
    async with model_folder("") as (model, _):
        return await measure(model, options.engine, only, options.rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", default="transformers", choices=("transformers", "vllm"))
    parser.add_argument("--only", default="border,loop,gaps", help="parts, with commas between")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = asyncio.run(run(options))
    if options.json:
        print(json.dumps([row._asdict() for row in rows]))
        return
    table = Table(f"{options.engine}; medians of the rounds, [all of them]", "thread", "process", "process / thread")
    for row in rows:
        cells = [
            f"{percentile(each, 50):.3f} {[round(value, 3) for value in each]}" for each in (row.thread, row.process)
        ]
        table.add_row(row.name, *cells, f"{row.ratio:.2f}")
    Console(highlight=False).print(table)


if __name__ == "__main__":
    main()
