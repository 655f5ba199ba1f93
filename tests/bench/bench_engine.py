"""The engine beside what it replaces, in one run, interleaved, medians: `python -m tests.bench.bench_engine [--json]`.

Prefill: a prompt through our paged attention, whole and in chunks, against the library's own forward (sdpa; without
and with its KV cache). Decode: one step of a batch over 1,000 tokens of context each, against the same model with a
naive paged attention that gathers every slot into a padded batch. All compute the logits of the last token only.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import services.engine.torch_engine.model as model_module
from dataplane.blocks.layout import BlockTable, Segment, num_blocks_for, uniform_shape
from schemas.ids import RequestId
from schemas.request import SamplingParams
from services.bench.drive.make_checkpoint import make_random_checkpoint
from services.engine.checkpoint import layout_of, read_checkpoint
from services.engine.interface import Sequence, StepItem
from services.engine.torch_engine.attention import ATTENTION_NAME, StepAttention
from services.engine.torch_engine.model import TransformersEngine, load_engine

SHAPE: dict[str, Any] = {
    "hidden": 512,
    "num_layers": 4,
    "heads": 8,
    "kv_heads": 4,
    "head_dim": 64,
    "intermediate": 1536,
    "vocab": 4096,
}
BLOCK_SIZE = 16
CONTEXT = 1000
CHUNK = 512
TABLE_ROW = "{name:44}{median_ms:12.1f}{best_ms:12.1f}{vs_first:12.2f}\n"


class NaiveAttention(StepAttention):
    """Paged attention as first written: every slot of every sequence is copied into one padded batch per layer."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
        self.layers_seen.append(layer)
        self._write(layer, key.transpose(0, 1), value.transpose(0, 1))
        group = self.arena.layout.group_of_layer[layer]
        longest = max(plan.end for plan in self._plans)
        slots = torch.zeros(len(self._plans), longest, dtype=torch.long)
        for row, plan in enumerate(self._plans):
            slots[row, : plan.end] = torch.cat([torch.arange(s, s + n) for s, n in plan.spans[group]])
        shape = (len(self._plans), longest, *key.shape[::2])
        k = self.arena.keys[layer].index_select(0, slots.view(-1)).view(shape).transpose(1, 2)
        v = self.arena.values[layer].index_select(0, slots.view(-1)).view(shape).transpose(1, 2)
        output = torch.nn.functional.scaled_dot_product_attention(
            query.transpose(0, 1)[:, :, None], k, v, scale=scale, enable_gqa=True
        )
        return output[:, :, 0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    shape = " ".join(f"{name}={value}" for name, value in SHAPE.items())
    if not options.json:
        sys.stdout.write(f"qwen3 {shape} float32, {options.threads} threads, {options.rounds} interleaved rounds\n\n")
        sys.stdout.write(f"{'':44}{'median ms':>12}{'best ms':>12}{'vs first':>12}\n")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        engine = make_engine(Path(folder), options.threads)
        for row in chain(prefill_rows(engine, options.rounds), decode_rows(engine, options.rounds * 3)):
            rows.append(row)
            if not options.json:
                sys.stdout.write(TABLE_ROW.format(**row))
                sys.stdout.flush()
    if options.json:
        json.dump({"shape": SHAPE, "threads": options.threads, "rows": rows}, sys.stdout, indent=2)


def make_engine(folder: Path, num_threads: int) -> TransformersEngine:
    checkpoint = read_checkpoint(str(make_random_checkpoint(folder / "model", context_length=8192, **SHAPE)))
    num_blocks = 33 * num_blocks_for(CONTEXT + 100, BLOCK_SIZE)
    layout = layout_of(checkpoint, block_size=BLOCK_SIZE)
    buffer = memoryview(bytearray(num_blocks * layout.block_bytes))
    return load_engine(
        checkpoint, arena_buffer=buffer, shape=uniform_shape(layout, num_blocks), num_threads=num_threads
    )


def make_sequence(num_tokens: int, first_block: int, *, run: int = 10_000) -> Sequence:
    """Return a sequence in runs of at most `run` blocks."""
    num_blocks = num_blocks_for(num_tokens, BLOCK_SIZE)
    runs = [Segment(first_block + at, min(run, num_blocks - at)) for at in range(0, num_blocks, run)]
    return Sequence(
        request_id=RequestId(f"r{first_block}"),
        number=first_block,
        token_ids=[(at * 7919 + first_block) % SHAPE["vocab"] for at in range(num_tokens)],
        num_prompt_tokens=num_tokens,
        sampling=SamplingParams(max_tokens=10, temperature=0.0),
        tables=(BlockTable(tuple(reversed(runs))),),
    )


def prefill_rows(engine: TransformersEngine, rounds: int) -> Iterator[dict[str, Any]]:
    for num_tokens in (1000, 4000):
        sequence = make_sequence(num_tokens, 0)
        scattered = make_sequence(num_tokens, 0, run=32)

        def paged(chunk: int, sequence: Sequence = sequence, num_tokens: int = num_tokens) -> None:
            for start in range(0, num_tokens, chunk):
                count = min(chunk, num_tokens - start)
                engine.compute([StepItem(sequence, start, count, start + count == num_tokens)])

        @torch.inference_mode()
        def library(use_cache: bool, sequence: Sequence = sequence) -> None:
            engine.model(input_ids=torch.tensor([sequence.token_ids]), use_cache=use_cache, logits_to_keep=1)

        yield from compare(
            {
                f"prefill {num_tokens}: library, sdpa, no cache": with_sdpa(engine, lambda: library(False)),
                f"prefill {num_tokens}: library, sdpa, its cache": with_sdpa(engine, lambda: library(True)),
                f"prefill {num_tokens}: ours, one chunk": lambda: paged(10_000),
                f"prefill {num_tokens}: ours, chunks of {CHUNK}": lambda: paged(CHUNK),
                f"prefill {num_tokens}: ours, scattered blocks": lambda scattered=scattered: paged(10_000, scattered),
            },
            rounds,
        )


def decode_rows(engine: TransformersEngine, rounds: int) -> Iterator[dict[str, Any]]:
    arena = engine._arena
    assert arena is not None
    for cache in (*arena.keys, *arena.values):
        cache.normal_()
    per_sequence = num_blocks_for(CONTEXT + 100, BLOCK_SIZE)
    for batch_size in (1, 8, 32):
        sequences = [make_sequence(CONTEXT, n * per_sequence) for n in range(batch_size)]
        scattered = [make_sequence(CONTEXT, n * per_sequence, run=8) for n in range(batch_size)]
        items = [StepItem(sequence, CONTEXT - 1, 1, True) for sequence in sequences]
        pieces = [StepItem(sequence, CONTEXT - 1, 1, True) for sequence in scattered]
        yield from compare(
            {
                f"decode batch {batch_size}: naive gather": with_naive(lambda items=items: engine.compute(items)),
                f"decode batch {batch_size}: ours": lambda items=items: engine.compute(items),
                f"decode batch {batch_size}: ours, runs of 8 blocks": lambda pieces=pieces: engine.compute(pieces),
            },
            rounds,
        )


def with_sdpa(engine: TransformersEngine, call: Callable[[], object]) -> Callable[[], object]:
    def run() -> object:
        engine.model.set_attn_implementation("sdpa")
        try:
            return call()
        finally:
            engine.model.set_attn_implementation(ATTENTION_NAME)

    return run


@contextmanager
def naive_attention() -> Iterator[None]:
    model_module.StepAttention = NaiveAttention  # type: ignore[misc]
    try:
        yield
    finally:
        model_module.StepAttention = StepAttention  # type: ignore[misc]


def with_naive(call: Callable[[], object]) -> Callable[[], object]:
    def run() -> object:
        with naive_attention():
            return call()

    return run


def compare(calls: dict[str, Callable[[], object]], rounds: int) -> list[dict[str, Any]]:
    """Time each call once a round, all in turn, so that a noisy neighbour disturbs all alike."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name, call in calls.items():
            started = time.perf_counter()
            call()
            if number:  # the first round warms up
                seconds[name].append(time.perf_counter() - started)
    first = statistics.median(next(iter(seconds.values())))
    return [
        {
            "name": name,
            "median_ms": statistics.median(times) * 1e3,
            "best_ms": min(times) * 1e3,
            "vs_first": statistics.median(times) / first,
        }
        for name, times in seconds.items()
    ]


if __name__ == "__main__":
    main()
