"""Our engine against transformers' own `generate`: the same weights on the same card, in one process, taking turns.

Prefill: one prompt, in chunks of 2,048 tokens, until its first token is on the host; `generate` for one token. Decode:
a batch of sequences with 512 tokens of context each, one token a step each; `generate` for so many tokens more, without
the time that it takes for one. Both are greedy and stop for nothing.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from dataplane.blocks.layout import ArenaShape, BlockTable, KVLayout, Segment, num_blocks_for, uniform_shape
from schemas.ids import RequestId
from schemas.request import SamplingParams
from services.engine.checkpoint import Checkpoint, layout_of, read_checkpoint
from services.engine.cpu.attention import ATTENTION_NAME
from services.engine.interface import Choice, Engine, StepItem
from services.engine.interface import Sequence as EngineSequence
from tests.bench.bench_carriers import measure
from tests.bench.gpu_report import Row, against
from tests.bench.known_models import checkpoint_of

CHUNK_TOKENS = 2048
CONTEXT = 512
NUM_TOKENS = 64
AIM = 2.0
BLOCK_SIZE = 16
STAGING_BYTES = 32 << 20


@dataclass
class Plan:
    """What is measured. `lengths`: of prompts; `batches`: of decodes."""

    lengths: tuple[int, ...]
    batches: tuple[int, ...]
    num_tokens: int
    rounds: int


def plan_of(model: str, *, quick: bool) -> Plan:
    if model == "tiny":
        return Plan((100,), (2,), 4, 1)
    return (
        Plan((1000, 4000), (1, 8, 32), NUM_TOKENS, 3) if quick else Plan((1000, 4000), (1, 8, 32, 128), NUM_TOKENS, 7)
    )


def rows(device: str, models: Sequence[str], *, quick: bool) -> Iterator[Row]:
    """Yield this section's rows."""
    for model in models:
        rig = Rig.load(read_checkpoint(checkpoint_of(model)), device, plan_of(model, quick=quick))
        try:
            yield from rig.rows(model)
        finally:
            rig.close()
        del rig
        gc.collect()
        if device.startswith("cuda"):
            torch.cuda.empty_cache()


@dataclass
class Rig:
    """An engine, its arena, and the same model as the library runs it."""

    engine: Engine
    arena: Any
    model: Any
    device: torch.device
    layout: KVLayout
    plan: Plan

    @classmethod
    def load(cls, checkpoint: Checkpoint, device: str, plan: Plan) -> "Rig":
        layout = layout_of(checkpoint, dtype=checkpoint.dtype, block_size=BLOCK_SIZE)
        longest = CONTEXT + plan.num_tokens
        num_blocks = max(
            max(plan.batches) * num_blocks_for(longest, BLOCK_SIZE), num_blocks_for(max(plan.lengths) + 1, BLOCK_SIZE)
        )
        shape = uniform_shape(layout, num_blocks)
        engine, arena = on_cpu(checkpoint, shape) if device == "cpu" else on_card(checkpoint, shape, device)
        model: Any = engine.model  # type: ignore[attr-defined]
        return cls(engine, arena, model, torch.device(device), layout, plan)

    def close(self) -> None:
        self.engine.close()
        if self.arena is not None:
            self.arena.close()

    def rows(self, name: str) -> Iterator[Row]:
        for length in self.plan.lengths:
            seconds = measure(
                {"ours": partial(self.prefill, length), "theirs": partial(self.generate, 1, length, 1)},
                self.plan.rounds,
            )
            ours, theirs = (length / seconds[side] for side in ("ours", "theirs"))
            yield against(f"{name}: prefill of {length:,} tokens", "tokens/s", ours, theirs, "transformers", AIM)
        more = self.plan.num_tokens + 1
        for batch in self.plan.batches:
            cases: dict[str, Callable[[], object]] = {
                "ours": self.decoder(batch),
                "first": partial(self.generate, batch, CONTEXT, 1),
                "theirs": partial(self.generate, batch, CONTEXT, more),
            }
            seconds = measure(cases, self.plan.rounds)
            num_tokens = batch * self.plan.num_tokens
            theirs_s = max(1e-9, seconds["theirs"] - seconds["first"])
            what = f"{name}: decode, {batch} at once, {CONTEXT} tokens of context"
            yield against(what, "tokens/s", num_tokens / seconds["ours"], num_tokens / theirs_s, "transformers", AIM)

    def prefill(self, length: int) -> None:
        sequence = self.sequence(length, length + 1, 0)
        for start in range(0, length, CHUNK_TOKENS):
            count = min(CHUNK_TOKENS, length - start)
            self.engine.step([StepItem(sequence, start, count, start + count == length)])

    def decoder(self, batch: int) -> Callable[[], None]:
        """Return what decodes. KV of the context is whatever lies there: it takes as long."""

        def decode() -> None:
            longest = CONTEXT + self.plan.num_tokens
            per_sequence = num_blocks_for(longest, BLOCK_SIZE)
            sequences = [self.sequence(CONTEXT, longest, number * per_sequence) for number in range(batch)]
            for _ in range(self.plan.num_tokens):
                items = [StepItem(each, len(each.token_ids) - 1, 1, True) for each in sequences]
                for each, outcome in zip(sequences, self.engine.step(items), strict=True):
                    assert isinstance(outcome, Choice), outcome
                    each.token_ids.append(outcome.token_id)

        return decode

    @torch.inference_mode()
    def generate(self, batch: int, length: int, num_tokens: int) -> None:
        """The library's own loop, with its own cache and PyTorch's attention."""
        ids = torch.tensor([self.token_ids(length, number) for number in range(batch)], device=self.device)
        self.model.set_attn_implementation("sdpa")
        try:
            out = self.model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, use_cache=True, pad_token_id=0,
                min_new_tokens=num_tokens, max_new_tokens=num_tokens,
            )  # fmt: skip
        finally:
            self.model.set_attn_implementation(ATTENTION_NAME)
        assert tuple(out.cpu().shape) == (batch, length + num_tokens)

    def sequence(self, num_known: int, longest: int, first_block: int) -> EngineSequence:
        table = BlockTable((Segment(first_block, num_blocks_for(longest, BLOCK_SIZE)),))
        return EngineSequence(
            request_id=RequestId(f"bench-{first_block}"),
            attempt=0,
            token_ids=self.token_ids(num_known, first_block),
            num_prompt_tokens=num_known,
            sampling=SamplingParams(max_tokens=longest, temperature=0.0),
            tables=(table,) * len(self.layout.groups),
        )

    def token_ids(self, count: int, seed: int) -> list[int]:
        return [(7919 * at + 31 * seed + 7) % self.engine.vocab_size for at in range(count)]


def on_cpu(checkpoint: Checkpoint, shape: ArenaShape) -> tuple[Engine, None]:
    from services.engine.cpu.model import load_engine

    return load_engine(checkpoint, arena_buffer=memoryview(bytearray(shape.num_bytes)), shape=shape), None


def on_card(checkpoint: Checkpoint, shape: ArenaShape, device: str) -> tuple[Engine, Any]:
    from dataplane.cards.card_arena import CardArena
    from dataplane.cards.cuda.cuda_driver import find_device
    from services.engine.cuda.cuda_runtime import load_cuda_engine

    card = int(device.partition(":")[2] or 0)
    arena = CardArena(find_device(card), shape, STAGING_BYTES)
    engine = load_cuda_engine(
        checkpoint, arena=arena.exported, shape=shape, marks=arena, card=card, token_budget=CHUNK_TOKENS
    )
    return engine, arena
