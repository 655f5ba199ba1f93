"""`python -m tests.bench.bench_loss`: what it costs a batch that a part of its requests' KV is lost on the way.

One engine thread decodes a batch of eight requests whose prompts' KV was sent to it; for some of them it arrived only
half. Three ways to go on, interleaved:
- ours: what arrived is kept, the rest is chunked prefill inside the running batch;
- recompute: each request that lost KV computes its whole prompt inside the running batch;
- naive: the batch fails as one; all its prompts are computed from token 0 before any request decodes, as vLLM of
  January 2025 did (its `simple_connector.py`: "Failed to receive all KVs and hidden states, redo model forwarding").

Before each batch, KV that no request counts as computed is overwritten with NaN, so that no lost KV can be used.
"""

import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table

from dataplane.blocks.layout import (
    KEY,
    VALUE,
    ArenaShape,
    BlockTable,
    BlockTables,
    KVLayout,
    Segment,
    num_blocks_for,
    slot_spans,
    uniform_shape,
)
from schemas.ids import RequestId
from schemas.request import SamplingParams
from services.bench.drive.random_model import SHAPE, make_model
from services.bench.drive.stats import percentile, rounded
from services.bench.drive.workload import random_tokens
from services.cli.bench import Json
from services.engine import interface as base
from services.engine.batch import Batch
from services.engine.batch_steps import BatchSteps
from services.engine.checkpoint import layout_of, read_checkpoint

Way = Literal["ours", "recompute", "naive"]
WAYS: tuple[Way, ...] = ("ours", "recompute", "naive")
NAIVE_LABEL = "naive, the baseline: recompute the batch (vLLM of January 2025)"

NUM_REQUESTS = 8
NUMBERS_LOST = (0, 1, 4, 8)
BLOCK_SIZE = 16
REPEATS = 5
SEED = 20261121


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """The batch to be measured. Of a request that lost KV, `landed_tokens` of its `prompt_tokens` have arrived.

    `num_tokens` are decoded after the one that came with the prompt's KV.
    """

    prompt_tokens: int = 1_000
    landed_tokens: int = 500
    num_tokens: int = 32
    token_budget: int = 512


class Request(NamedTuple):
    """A prompt whose KV is in `tables`, and the token that its prefill produced."""

    number: int
    prompt: list[int]
    first_token: int
    tables: BlockTables


class Plan(NamedTuple):
    """What the engine computes: all of `recomputed`, and then `served`."""

    recomputed: tuple[base.Sequence, ...]
    served: tuple[base.Sequence, ...]

    @property
    def num_recomputed_tokens(self) -> int:
        """How many prompt tokens are computed; the last token of a served sequence belongs to its answer."""
        served = sum(sequence.num_uncomputed_tokens - 1 for sequence in self.served)
        return served + sum(sequence.num_uncomputed_tokens for sequence in self.recomputed)


class BatchOutcome(NamedTuple):
    """The result of one batch, by request number. `times_ms`: of each token, from the batch's submission; `steps`:
    the number of the step that produced it."""

    num_recomputed_tokens: int
    times_ms: dict[int, list[float]]
    steps: dict[int, list[int]]
    tokens: dict[int, list[int]]
    step_ms: list[float]


@dataclass(slots=True)
class Samples:
    """The results of all batches of one way and number of losing requests."""

    num_recomputed_tokens: int = 0
    lost_ttft_ms: list[float] = field(default_factory=list[float])
    ready_ttft_ms: list[float] = field(default_factory=list[float])
    ready_itl_ms: list[float] = field(default_factory=list[float])
    ready_steps: list[int] = field(default_factory=list[int])
    step_ms: list[float] = field(default_factory=list[float])
    num_differing: int = 0

    def add(self, outcome: BatchOutcome, lost: frozenset[int], expected: dict[int, list[int]]) -> None:
        self.num_recomputed_tokens = outcome.num_recomputed_tokens
        self.step_ms += outcome.step_ms
        self.num_differing += sum(outcome.tokens[number] != tokens for number, tokens in expected.items())
        for number, times in outcome.times_ms.items():
            if number in lost:
                self.lost_ttft_ms.append(times[0])
                continue
            self.ready_ttft_ms.append(times[0])
            self.ready_itl_ms += [after - before for before, after in pairwise(times)]
            self.ready_steps += [after - before for before, after in pairwise([0, *outcome.steps[number]])]


class LossRow(msgspec.Struct, frozen=True, kw_only=True):
    """The row of one way and number of losing requests; times in milliseconds. None where there are no such requests.

    TTFT is from the batch's submission to a request's next token. `ready_steps_max`: the most engine steps that a
    request without loss waited for one token; 1 is the least. `num_differing`: answers unlike those of a batch without
    loss.
    """

    num_lost: int
    way: Way
    recomputed_tokens: int
    lost_ttft_p50_ms: float | None
    lost_ttft_max_ms: float | None
    ready_ttft_p50_ms: float | None
    ready_ttft_max_ms: float | None
    ready_itl_p50_ms: float | None
    ready_itl_p99_ms: float | None
    ready_itl_max_ms: float | None
    ready_steps_max: int | None
    step_max_ms: float | None
    num_differing: int


class LossReport(msgspec.Struct, frozen=True, kw_only=True):
    num_parameters: int
    num_requests: int
    terms: Terms
    repeats: int
    rows: tuple[LossRow, ...]


def main(*, as_json: Json = False) -> None:
    """What lost KV costs a batch: those that lost it, and those that did not."""
    report = _measure()
    if as_json:
        sys.stdout.buffer.write(msgspec.json.encode(report) + b"\n")
    else:
        _print(report)


def plan_batch(way: Way, requests: Sequence[Request], lost: frozenset[int], terms: Terms) -> Plan:
    """Return how a batch goes on whose requests `lost` have only the KV that arrived. Without loss all ways are
    equal."""
    kept = {"ours": terms.landed_tokens, "recompute": 0, "naive": terms.prompt_tokens}[way]
    return Plan(
        recomputed=tuple(prefill_sequence(r.number, r.prompt, r.tables) for r in requests if way == "naive" and lost),
        served=tuple(_served(r, kept if r.number in lost else terms.prompt_tokens, terms) for r in requests),
    )


def prefill_sequence(number: int, prompt: list[int], tables: BlockTables) -> base.Sequence:
    """Return a sequence that computes a prompt's KV and samples one token."""
    return base.Sequence(
        request_id=RequestId(f"loss-{number}"),
        number=number,
        token_ids=list(prompt),
        num_prompt_tokens=len(prompt),
        sampling=SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True),
        tables=tables,
    )


def _served(request: Request, num_computed_tokens: int, terms: Terms) -> base.Sequence:
    sequence = prefill_sequence(request.number, request.prompt, request.tables)
    sequence.number += NUM_REQUESTS
    sequence.token_ids.append(request.first_token)
    sequence.num_computed_tokens = num_computed_tokens
    sequence.sampling = SamplingParams(max_tokens=1 + terms.num_tokens, temperature=0.0, ignore_eos=True)
    return sequence


def arena_shape(layout: KVLayout, terms: Terms) -> ArenaShape:
    """Return the shape of an arena that holds one batch."""
    return uniform_shape(layout, NUM_REQUESTS * _blocks_of_request(layout, terms))


def _blocks_of_request(layout: KVLayout, terms: Terms) -> int:
    return num_blocks_for(terms.prompt_tokens + 1 + terms.num_tokens, layout.block_size)


class LossBench:
    """Runs batches on one engine, each on the KV of the same prompts. `arena` is the engine's, of `arena_shape`."""

    def __init__(self, engine: base.Engine, arena: memoryview, prompts: Sequence[list[int]], terms: Terms) -> None:
        self._engine = engine
        self._arena = arena
        self._shape = arena_shape(engine.layout, terms)
        self._terms = terms
        self._requests = self._prefill(prompts)
        self._snapshot = bytes(arena)
        self.expected: dict[int, list[int]] = self.run("ours", frozenset()).tokens
        """The answers without loss."""

    def run(self, way: Way, lost: frozenset[int]) -> BatchOutcome:
        """Run one batch after the KV of `lost` was overwritten. Raises StepFailedError."""
        plan = plan_batch(way, self._requests, lost, self._terms)
        self._arena[:] = self._snapshot
        for sequence in plan.recomputed or plan.served:
            _forget_uncomputed(self._arena, self._shape, sequence)
        return _Run(self._engine, plan, self._terms.token_budget).outcome()

    def _prefill(self, prompts: Sequence[list[int]]) -> list[Request]:
        count = _blocks_of_request(self._shape.layout, self._terms)
        batch = Batch(self._terms.token_budget)
        sequences: list[base.Sequence] = []
        for number, prompt in enumerate(prompts):
            table = BlockTable((Segment(number * count, count),))
            sequences.append(prefill_sequence(number, prompt, (table,) * len(self._shape.layout.groups)))
            batch.add(sequences[-1])
        while items := batch.plan():
            batch.commit(items, self._engine.compute(items), 0, 0)
        return [
            Request(number, prompt, sequence.token_ids[-1], sequence.tables)
            for number, (prompt, sequence) in enumerate(zip(prompts, sequences, strict=True))
        ]


def _forget_uncomputed(arena: memoryview, shape: ArenaShape, sequence: base.Sequence) -> None:
    """Overwrite the KV that the sequence does not count as computed. Bytes of ones are NaN in every float type."""
    layout = shape.layout
    for layer in range(layout.num_layers):
        table = sequence.tables[layout.group_of_layer[layer]]
        end = table.end_block * layout.block_size
        for slot, count in slot_spans(table, layout.block_size, sequence.num_computed_tokens, end):
            for key_or_value in (KEY, VALUE):
                at = shape.offset(layer, key_or_value, slot)
                num_bytes = count * layout.token_bytes
                arena[at : at + num_bytes] = b"\xff" * num_bytes


class _Run:
    """One batch, step by step. All is there before the first step, so that the order is fixed."""

    def __init__(self, engine: base.Engine, plan: Plan, token_budget: int) -> None:
        self._steps = BatchSteps(engine, Batch(token_budget))
        self._plan = plan
        self._numbers = {sequence.number: number for number, sequence in enumerate(plan.served)}
        self._outcome = BatchOutcome(plan.num_recomputed_tokens, {}, {}, {}, [])

    def outcome(self) -> BatchOutcome:
        """Run to the end. Raises StepFailedError."""
        started = time.perf_counter()
        for sequences in (self._plan.recomputed, self._plan.served):
            for sequence in sequences:
                self._steps.add(sequence)
            while len(self._steps):
                self._step(started)
        return self._outcome

    def _step(self, started: float) -> None:
        result = self._steps.run_step()
        assert result is not None, "there is something to compute"
        now_ms = (time.perf_counter() - started) * 1e3
        self._outcome.step_ms.append((result.ended_ns - result.started_ns) / 1e6)
        for token in result.sampled:
            if (number := self._numbers.get(token.number)) is None:
                continue  # what is recomputed: its token is known, it came with the KV
            self._outcome.times_ms.setdefault(number, []).append(now_ms)
            self._outcome.steps.setdefault(number, []).append(len(self._outcome.step_ms))
            self._outcome.tokens.setdefault(number, []).append(token.token_id)


def lost_requests(num_lost: int, repeat: int) -> frozenset[int]:
    """Return which requests lose their KV: others in each repeat."""
    return frozenset((repeat + index) % NUM_REQUESTS for index in range(num_lost))


def _measure() -> LossReport:
    from services.engine.torch_engine.model import load_engine

    terms = Terms()
    rng = random.Random(SEED)
    prompts = [random_tokens(rng, terms.prompt_tokens, SHAPE["vocab"]) for _ in range(NUM_REQUESTS)]
    with tempfile.TemporaryDirectory(prefix="kvmesh-bench-model-") as folder:
        path, num_parameters = make_model(Path(folder))
        checkpoint = read_checkpoint(str(path))
        shape = arena_shape(layout_of(checkpoint, block_size=BLOCK_SIZE), terms)
        arena = memoryview(bytearray(shape.arena_bytes))
        engine = load_engine(checkpoint, arena_buffer=arena, shape=shape, num_threads=1)
    try:
        samples = _interleave(LossBench(engine, arena, prompts, terms))
    finally:
        engine.close()
    return LossReport(
        num_parameters=num_parameters,
        num_requests=NUM_REQUESTS,
        terms=terms,
        repeats=REPEATS,
        rows=tuple(_row(num_lost, way, got) for (num_lost, way), got in samples.items()),
    )


def _interleave(bench: LossBench) -> dict[tuple[int, Way], Samples]:
    """Run each way with each number of losing requests in every repeat, starting with another way each time."""
    samples: dict[tuple[int, Way], Samples] = {(num_lost, way): Samples() for num_lost in NUMBERS_LOST for way in WAYS}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("batches", total=REPEATS * len(samples))
        for repeat in range(REPEATS):
            for num_lost in NUMBERS_LOST:
                lost = lost_requests(num_lost, repeat)
                for way in WAYS[repeat % len(WAYS) :] + WAYS[: repeat % len(WAYS)]:
                    progress.update(task, description=f"{num_lost} lost, {way}")
                    samples[num_lost, way].add(bench.run(way, lost), lost, bench.expected)
                    progress.advance(task)
    return samples


def _row(num_lost: int, way: Way, samples: Samples) -> LossRow:
    return LossRow(
        num_lost=num_lost,
        way=way,
        recomputed_tokens=samples.num_recomputed_tokens,
        lost_ttft_p50_ms=_percentile(samples.lost_ttft_ms, 50),
        lost_ttft_max_ms=_percentile(samples.lost_ttft_ms, 100),
        ready_ttft_p50_ms=_percentile(samples.ready_ttft_ms, 50),
        ready_ttft_max_ms=_percentile(samples.ready_ttft_ms, 100),
        ready_itl_p50_ms=_percentile(samples.ready_itl_ms, 50),
        ready_itl_p99_ms=_percentile(samples.ready_itl_ms, 99),
        ready_itl_max_ms=_percentile(samples.ready_itl_ms, 100),
        ready_steps_max=max(samples.ready_steps, default=None),
        step_max_ms=_percentile(samples.step_ms, 100),
        num_differing=samples.num_differing,
    )


def _percentile(values: list[float], percent: float) -> float | None:
    return rounded(percentile(values, percent))


def _print(report: LossReport) -> None:
    console = Console(highlight=False)
    headings = ("computed\ntokens", "lost TTFT\np50/max", "ready TTFT\np50/max", "ready ITL\np50/p99/max")
    columns = [Column(heading, justify="right") for heading in (*headings, "steps/\ntoken", "longest\nstep")]
    table = Table("lost", "way", *columns, box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    for row in report.rows:
        table.add_row(
            str(row.num_lost),
            row.way,
            str(row.recomputed_tokens),
            _ms(row.lost_ttft_p50_ms, row.lost_ttft_max_ms),
            _ms(row.ready_ttft_p50_ms, row.ready_ttft_max_ms),
            _ms(row.ready_itl_p50_ms, row.ready_itl_p99_ms, row.ready_itl_max_ms),
            "–" if row.ready_steps_max is None else str(row.ready_steps_max),
            _ms(row.step_max_ms),
            end_section=row.way == WAYS[-1],
        )
    terms = report.terms
    console.print(
        f"{report.num_requests} requests of {terms.prompt_tokens} tokens, {terms.landed_tokens} landed where lost; "
        f"random weights, {report.num_parameters / 1e6:.1f} M parameters; steps of {terms.token_budget} tokens; "
        f"{report.repeats} repeats, ways interleaved; milliseconds"
    )
    console.print(NAIVE_LABEL)
    console.print(table)
    num_answers = len(report.rows) * report.repeats * report.num_requests
    console.print(
        f"{sum(row.num_differing for row in report.rows)} of {num_answers} answers differ from those "
        "of a batch that lost nothing"
    )


def _ms(*values: float | None) -> str:
    return "–" if None in values else "/".join(f"{value:.0f}" for value in values if value is not None)


if __name__ == "__main__":
    typer.run(main)
