"""What the engine's tests share: tiny checkpoints, engines over plain memory, and the library's own answer."""

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM

from dataplane.blocks.layout import (
    KEY,
    VALUE,
    ArenaShape,
    BlockTable,
    KVLayout,
    Segment,
    num_blocks_for,
    slot_spans,
    uniform_shape,
)
from schemas.ids import RequestId
from schemas.request import SamplingParams
from services.bench.drive.make_checkpoint import make_random_checkpoint
from services.engine.batch import Batch
from services.engine.checkpoint import layout_of, read_checkpoint
from services.engine.interface import Engine, LayerListener, Sequence
from services.engine.sampler import near_tie
from services.engine.torch_engine.model import TransformersEngine, load_engine

NUM_BLOCKS = 96
BLOCK_SIZE = 8
VOCAB = 512


def make_tokenizer(folder: Path) -> Path:
    """Write a tokenizer of a few words: the engine never reads it, a checkpoint must have one."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "b": 2}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def make_tiny(folder: Path, architecture: str = "qwen3", **fields: Any) -> Path:
    tokenizer = make_tokenizer(folder.parent / f"{folder.name}-tokenizer")
    return make_random_checkpoint(folder, architecture=architecture, vocab=VOCAB, tokenizer_from=tokenizer, **fields)


def load_tiny(folder: Path, *, num_blocks: int = NUM_BLOCKS, dtype: str = "float32") -> TransformersEngine:
    checkpoint = read_checkpoint(str(folder))
    layout = layout_of(checkpoint, dtype=dtype, block_size=BLOCK_SIZE)
    shape = uniform_shape(layout, num_blocks)
    buffer = bytearray(b"\xff") * shape.arena_bytes  # NaN in every float: reading what is not ours shows
    return load_engine(
        checkpoint,
        arena_buffer=memoryview(buffer),
        shape=shape,
        num_threads=1,
    )


def arena_bytes(engine: TransformersEngine) -> memoryview:
    """Return the bytes of an engine's arena."""
    arena = engine._arena
    assert arena is not None
    whole = arena.keys[0].untyped_storage()
    return memoryview(torch.tensor([], dtype=torch.uint8).set_(whole).numpy())


def prompt_of(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCAB, (length,), generator=generator).tolist()


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0)


NAMES: dict[int, str] = {}
"""Those of the sequences that tests have made, by number."""


def new_number(name: str) -> int:
    """Return the number of a new sequence of this name."""
    NAMES[len(NAMES) + 1] = name
    return len(NAMES)


def num_uncomputed(sequences: Iterable[Sequence]) -> int:
    """Return how many tokens of prompts are left to compute."""
    return sum(each.num_uncomputed_tokens for each in sequences if each.num_uncomputed_tokens > 1)


def make_sequence(
    name: str,
    prompt: Seq[int],
    segments: Seq[Segment],
    sampling: SamplingParams,
    *,
    listener: LayerListener | None = None,
    max_local_tokens: int | None = None,
    num_groups: int = 1,
) -> Sequence:
    """Return a sequence that has the same blocks in each of `num_groups` cache groups."""
    return Sequence(
        request_id=RequestId(name),
        number=new_number(name),
        token_ids=list(prompt),
        num_prompt_tokens=len(prompt),
        sampling=sampling,
        tables=(BlockTable(tuple(segments)),) * num_groups,
        layer_listener=listener,
        max_local_tokens=max_local_tokens,
    )


class Allocator:
    """Hands out blocks in runs of at most `run` blocks, with a gap after each: what a fragmented pool gives."""

    def __init__(self, *, run: int = 1000, first: int = 0) -> None:
        self.run = run
        self.next = first

    def take(self, num_tokens: int) -> tuple[Segment, ...]:
        left = num_blocks_for(num_tokens, BLOCK_SIZE)
        segments: list[Segment] = []
        while left:
            count = min(left, self.run)
            segments.append(Segment(self.next, count))
            self.next += count + 1
            left -= count
        return tuple(reversed(segments))


def sequence_at(
    sampling: SamplingParams, prompt: Seq[int] = (0,), answer: Seq[int] = (), stops: Seq[int] = ()
) -> Sequence:
    """Return a sequence without blocks, whose next token is to be chosen."""
    return Sequence(RequestId("r"), 1, [*prompt, *answer], len(prompt), sampling, (), stop_token_ids=frozenset(stops))


def run_batch(engine: Engine, batch: Batch, answers: dict[str, list[int]] | None = None) -> dict[str, list[int]]:
    """Step until the batch is empty; return the tokens sampled for each request."""
    answers = {} if answers is None else answers
    while items := batch.plan():
        result = batch.commit(items, engine.compute(items), 0, 0)
        batch.check_integrity()
        for token in result.sampled:
            answers.setdefault(NAMES[token.number], []).append(token.token_id)
    return answers


def copy_kv(
    source: memoryview, target: memoryview, layout: KVLayout, moves: tuple[Seq[Segment], Seq[Segment]], num_tokens: int
) -> None:
    """Copy tokens [0, num_tokens) from the first segments of one arena to the second ones of another."""
    for layer in range(layout.num_layers):
        for key_or_value in (KEY, VALUE):
            rows = b"".join(
                bytes(source[at : at + count * layout.token_bytes])
                for at, count in _offsets(layout, source, layer, key_or_value, moves[0], num_tokens)
            )
            done = 0
            for at, count in _offsets(layout, target, layer, key_or_value, moves[1], num_tokens):
                size = count * layout.token_bytes
                target[at : at + size] = rows[done : done + size]
                done += size


def _offsets(
    layout: KVLayout, arena: memoryview, layer: int, key_or_value: int, segments: Seq[Segment], num_tokens: int
) -> list[tuple[int, int]]:
    shape: ArenaShape = uniform_shape(layout, arena.nbytes // layout.block_bytes)
    spans = slot_spans(BlockTable(tuple(segments)), layout.block_size, 0, num_tokens)
    return [(shape.offset(layer, key_or_value, slot), count) for slot, count in spans]


@lru_cache(maxsize=16)
def library_model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()


def generate(folder: Path, prompt: Seq[int], num_tokens: int) -> list[int]:
    """Return transformers' own greedy answer, eager attention, its own cache."""
    output = library_model(folder).generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return output[0, len(prompt) :].tolist()


def num_near_ties(folder: Path, prompt: Seq[int], ours: Seq[int], theirs: Seq[int], sampling: SamplingParams) -> int:
    """Assert that two answers are equal, or part at a proven near-tie; return 1 in that case, else 0.

    Past the parting the answers are about different texts and say nothing.
    """
    assert len(ours) == len(theirs)
    parting = next((at for at in range(len(ours)) if ours[at] != theirs[at]), None)
    if parting is None:
        return 0
    with torch.inference_mode():
        logits = library_model(folder)(torch.tensor([[*prompt, *theirs[:parting]]]), use_cache=False).logits[0, -1]
    assert near_tie(logits, sequence_at(sampling, prompt, theirs[:parting])), (
        f"token {parting}: {ours[parting]} where the library has {theirs[parting]}"
    )
    return 1
