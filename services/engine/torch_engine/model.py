"""The engine proper: a transformers model whose attention is ours, one flat ragged batch a step."""

import inspect
import logging
import threading
from collections.abc import Generator
from collections.abc import Sequence as Seq
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from dataplane.blocks.layout import ArenaShape, BlockTable, KVLayout, Segment, num_blocks_for, uniform_shape
from schemas.ids import RequestId
from schemas.request import SamplingParams
from services.engine.checkpoint import Checkpoint, engine_folder
from services.engine.interface import EngineFailedError, EngineLostError, Outcome, Sequence, StepItem
from services.engine.logprobs import row_numbers, score_prompts, scored_rows
from services.engine.sampler import sample
from services.engine.torch_engine.attention import (
    ATTENTION_NAME,
    STEP_ARGUMENT,
    KVTensors,
    StepAttention,
    UnsupportedAttentionError,
    paged_attention,
)
from services.engine.torch_engine.card import CardStream
from services.errors import CheckpointError

log = logging.getLogger(__name__)

CHECK_CHUNKS = (13, 6, 1)
"""What the self-check computes, a step each: a first chunk, one with a past, and a decode."""
CHECK_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.05}
"""Largest difference, relative to the logits' spread, that rounding alone is allowed to make."""


class TransformersEngine:
    """Computes steps with a transformers model and keeps KV in an arena that others may read and write between layers.

    Model and arena are on one device, a `card` or (None) the CPU, where tokens are chosen in either case. `compute` may
    run on any one thread at a time. `close` lets go of the arena's buffer.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        arena: KVTensors,
        *,
        vocab_size: int,
        num_threads: int,
        card: CardStream | None = None,
    ) -> None:
        self.layout: KVLayout = arena.layout
        self.vocab_size = vocab_size
        self.model = model
        self._arena: KVTensors | None = arena
        self._num_threads = num_threads
        self._card = card
        self._thread: int | None = None

    @torch.inference_mode()
    def compute(self, items: Seq[StepItem]) -> list[Outcome]:
        """Compute the items, write their KV, call the layer listeners, and return one outcome per sampling item.

        Raises EngineFailedError when the model did not call its attention once a layer, LogitsNotFiniteError when its
        logits are no numbers, ValueError when a sequence has outgrown its block tables, EngineLostError when the card
        fails.
        """
        rows, sequences = _sampling_rows(items)
        scored = scored_rows(items)
        with self._on_card():
            logits = self._compute(items, [*rows, *row_numbers(scored)])
            score_prompts(scored, logits[len(rows) :])
            chosen_from = logits[: len(rows)].float().cpu()
        return sample(chosen_from, sequences)

    @torch.inference_mode()
    def logits(self, items: Seq[StepItem], rows: Seq[int]) -> Tensor:
        """Compute the items and return the logits `[len(rows), vocab]`, float32, of these rows of the flat batch."""
        with self._on_card():
            return self._compute(items, rows).float()

    @contextmanager
    def _on_card(self) -> Generator[None]:
        """Compute where the arena is. What was begun there has ended when this is left, however that comes about: its
        blocks are others' then. Raises EngineLostError."""
        if self._card is None:
            yield
            return
        with self._card.active():
            try:
                yield
            finally:
                try:
                    self._card.wait()
                except RuntimeError as error:
                    raise EngineLostError(f"the card fails: {str(error).partition(chr(10))[0]}") from error

    def _compute(self, items: Seq[StepItem], rows: Seq[int]) -> Tensor:
        """Return the logits of these rows, in the model's dtype."""
        if self._arena is None:
            raise EngineFailedError("the engine is closed")
        if self._thread != threading.get_ident():
            # OpenMP keeps its number of threads per calling thread.
            torch.set_num_threads(self._num_threads)
            self._thread = threading.get_ident()
        # Put the tokens of all items into one row, in the order of items that `StepAttention` assumes. Positions count
        # within each sequence.
        attention = StepAttention(self._arena, items, self._card and self._card.mark)
        token_ids: list[int] = []
        positions: list[int] = []
        for item in items:
            end = item.start + item.num_tokens
            token_ids += item.sequence.token_ids[item.start : end]
            positions += range(item.start, end)
        # The model passes unknown arguments on to its attention, so the step reaches `paged_attention`. KV is in the
        # arena, so the library keeps no cache.
        arguments: dict[str, Any] = {STEP_ARGUMENT: attention}
        output = self.model(
            input_ids=self._arena.indices(token_ids)[None],
            position_ids=self._arena.indices(positions)[None],
            use_cache=False,
            logits_to_keep=self._arena.indices(rows),
            **arguments,
        )
        # A layer that did not call this attention has no KV in the arena, which later steps would read.
        if attention.layers_seen != list(range(self.layout.num_layers)):
            raise EngineFailedError(
                f"attention ran for layers {attention.layers_seen}, not each of {self.layout.num_layers}"
            )
        return cast(Tensor, output.logits)[0]

    def close(self) -> None:
        """Let go of the arena, so that its memory can be closed. Idempotent; not while a step runs."""
        self._arena = None


def load_engine(
    checkpoint: Checkpoint,
    *,
    arena_buffer: memoryview | Tensor,
    shape: ArenaShape,
    num_threads: int = 1,
    card: CardStream | None = None,
) -> TransformersEngine:
    """Load the weights and return an engine that has proven itself against the library's own attention.

    `arena_buffer`: the bytes of an arena of `shape`, nobody's yet: memory, or a tensor on the `card`.

    Raises CheckpointError when transformers lacks the architecture, weights are missing or have no room, the model does
    not go through the attention interface in every layer, or its logits differ from those of the library's eager
    attention.
    """
    arena = KVTensors(shape, arena_buffer)
    torch.set_num_threads(num_threads)
    # On a card, load and check on the stream on which the steps will run.
    with nullcontext() if card is None else card.active():
        model = _moved(load_model(checkpoint, shape.layout.dtype), checkpoint, arena.device)
        engine_over = partial(
            TransformersEngine, model, vocab_size=checkpoint.vocab_size, num_threads=num_threads, card=card
        )
        # Check in a small arena of its own: a spare or a restarted engine loads while others use the blocks of the real
        # arena.
        small = check_shape(shape.layout)
        memory = torch.zeros(small.arena_bytes, dtype=torch.uint8, device=arena.device)
        check_logits(engine_over(KVTensors(small, memory)), model, checkpoint)  # also ends the first call's latency
    return engine_over(arena)


def _moved(model: PreTrainedModel, checkpoint: Checkpoint, device: torch.device) -> PreTrainedModel:
    """Move the weights to the device. Raises CheckpointError when there is no room."""
    try:
        return cast(PreTrainedModel, cast(Any, model).to(device))
    except torch.OutOfMemoryError as error:
        free, _ = torch.cuda.mem_get_info(device)
        raise CheckpointError(
            f"{checkpoint.name} does not fit on {torch.cuda.get_device_name(device)}, which has "
            f"{free / (1 << 30):.1f} GiB left beside the KV: take less for it (--kv-mib), or a smaller model"
        ) from error


def check_shape(layout: KVLayout) -> ArenaShape:
    """Return the shape of an arena that `check_logits` can do with."""
    return uniform_shape(layout, num_blocks_for(sum(CHECK_CHUNKS), layout.block_size))


def check_logits(engine: TransformersEngine, model: PreTrainedModel, checkpoint: Checkpoint) -> None:
    """Compare an engine's paged, chunked logits of a few tokens, in the first blocks of its arena, with the library's.

    Raises CheckpointError.
    """
    # A prompt of fixed token ids, so that each check of a checkpoint computes the same; it needs no tokenizer.
    layout = engine.layout
    num_tokens = sum(CHECK_CHUNKS)
    num_blocks = num_blocks_for(num_tokens, layout.block_size)
    sequence = Sequence(
        request_id=RequestId("self-check"),
        number=0,
        token_ids=[(7 * position + 3) % checkpoint.vocab_size for position in range(num_tokens)],
        num_prompt_tokens=num_tokens,
        sampling=SamplingParams(max_tokens=1),
        tables=(BlockTable((Segment(0, num_blocks),)),) * len(layout.groups),
    )
    # Compute it in chunks: the later ones have to read the KV of the earlier ones from the arena.
    paged: list[Tensor] = []
    start = 0
    try:
        for num_chunk_tokens in CHECK_CHUNKS:
            item = StepItem(sequence, start, num_chunk_tokens, True)
            paged.append(engine.logits([item], range(num_chunk_tokens)))
            start += num_chunk_tokens
    except (UnsupportedAttentionError, EngineFailedError) as error:
        raise CheckpointError(
            f"{checkpoint.architecture} cannot run on paged KV ({error}): choose another architecture"
        ) from error
    # Compare with the library's attention over the whole prompt at once. The difference is relative, as models differ
    # in the scale of their logits, and `not <=` refuses NaN as well.
    ours, theirs = torch.cat(paged), _library_logits(model, sequence.token_ids)
    difference = float((ours - theirs).abs().max() / (theirs.max() - theirs.min()).clamp(min=1e-30))
    if not difference <= CHECK_TOLERANCE[layout.dtype]:
        raise CheckpointError(
            f"{checkpoint.architecture} computes other logits on paged KV (off by {difference:.1e} of their spread): "
            "choose another architecture"
        )
    log.debug("self-check of %s: logits within %.1e of their spread", checkpoint.name, difference)


@torch.inference_mode()
def _library_logits(model: PreTrainedModel, token_ids: list[int]) -> Tensor:
    _set_attention(model, "eager")
    try:
        input_ids = torch.tensor([token_ids], device=model.device)
        return cast(Tensor, model(input_ids=input_ids, use_cache=False).logits)[0].float()
    finally:
        _set_attention(model, ATTENTION_NAME)


def _set_attention(model: PreTrainedModel, name: str) -> None:
    cast(Any, model).set_attn_implementation(name)


def load_model(checkpoint: Checkpoint, dtype: str) -> PreTrainedModel:
    """Return the model with its weights, in host memory, calling our attention. Raises CheckpointError."""
    cast(Any, AttentionInterface).register(ATTENTION_NAME, paged_attention)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    # Load the config alone first: here a ValueError or KeyError means an unknown architecture.
    try:
        cast(Any, AutoConfig).from_pretrained(checkpoint.path, local_files_only=True, trust_remote_code=False)
    except (ValueError, KeyError) as error:
        raise CheckpointError(
            f"transformers does not know the architecture {checkpoint.architecture}: choose another, or upgrade it"
        ) from error
    # Load only the weights that were digested, never pickled ones, and run no code of the checkpoint.
    try:
        with engine_folder(checkpoint) as folder:
            loaded = cast(Any, AutoModelForCausalLM).from_pretrained(
                folder,
                dtype=getattr(torch, dtype),
                attn_implementation=ATTENTION_NAME,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
            )
    except Exception as error:  # the library raises whatever its model classes do
        reason = str(error).partition("\n")[0][:200]
        raise CheckpointError(
            f"transformers cannot load {checkpoint.path} ({type(error).__name__}: {reason}): choose another checkpoint"
        ) from error
    # transformers initializes weights that it does not find at random and goes on: refuse such a model.
    model, info = cast(tuple[PreTrainedModel, dict[str, Any]], loaded)
    missing = sorted(str(key) for key in (*info.get("missing_keys", ()), *info.get("mismatched_keys", ())))
    if missing:
        raise CheckpointError(
            f"{checkpoint.path} lacks or misshapes weight {missing[0]}: save it whole, or mend config.json"
        )
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        raise CheckpointError(f"{checkpoint.architecture} cannot keep only some logits: choose another architecture")
    return model.eval().requires_grad_(False)


def _sampling_rows(items: Seq[StepItem]) -> tuple[list[int], list[Sequence]]:
    """Return the rows of the flat batch that are sampled from, and the sequence of each."""
    rows: list[int] = []
    sequences: list[Sequence] = []
    end = 0
    for item in items:
        end += item.num_tokens
        if item.samples:
            rows.append(end - 1)
            sequences.append(item.sequence)
    return rows, sequences
