"""The one way to an engine on a card: its arena and itself, or one line that says what is missing. Imported only where
a card was asked for: it takes seconds, and asks for libraries that other machines have not."""

import logging
import time
from typing import Any, cast

import torch

from dataplane.blocks.layout import ArenaShape, BlockTable, Segment, num_blocks_for
from dataplane.cards.factory import CardRefusedError, make_card_arena
from schemas.ids import RequestId
from schemas.request import SamplingParams
from services.config import WorkerConfig
from services.engine.checkpoint import Checkpoint
from services.engine.interface import PlacedEngine, Sequence, StepItem
from services.engine.torch_engine.card import CardStream, check_card
from services.engine.torch_engine.model import TransformersEngine, load_engine
from services.errors import CheckpointError, UserError

log = logging.getLogger(__name__)


def place_on_card(card: int, checkpoint: Checkpoint, shape: ArenaShape, settings: WorkerConfig) -> PlacedEngine:
    """Return an arena of this shape on the card of this number, and the engine that computes in it.

    Raises UserError: no such card, no room on it, nothing to make communicators with where `nccl` is asked for.
    """
    device = check_card(card)  # says what is missing, and what to do
    try:
        arena = make_card_arena(card, shape, carrier=settings.carrier)
    except CardRefusedError as error:
        raise UserError(str(error)) from error
    try:
        engine = load_engine(
            checkpoint,
            arena_buffer=torch.from_dlpack(cast(Any, arena.exported)),
            shape=shape,
            card=CardStream(device, arena.mark),
        )
        compute_largest(engine, checkpoint, shape, settings.token_budget)
    except BaseException:
        arena.close()
        raise
    return PlacedEngine(arena, engine, f"cuda:{card} {arena.card.name}")


def compute_largest(engine: TransformersEngine, checkpoint: Checkpoint, shape: ArenaShape, token_budget: int) -> None:
    """Compute a step as large as any will be, in blocks that nobody uses yet: what it needs of the card is then had, or
    missed, before anybody is served. Raises CheckpointError when there is no room for it."""
    started = time.monotonic()
    layout = shape.layout
    num_tokens = min(token_budget, checkpoint.context_length, min(shape.num_blocks) * layout.block_size)
    table = BlockTable((Segment(0, num_blocks_for(num_tokens, layout.block_size)),))
    sequence = Sequence(
        request_id=RequestId("self-check"),
        number=0,
        token_ids=[1] * num_tokens,
        num_prompt_tokens=num_tokens,
        sampling=SamplingParams(max_tokens=1),
        tables=(table,) * len(layout.groups),
    )
    try:
        engine.logits([StepItem(sequence, 0, num_tokens, True)], range(num_tokens))
    except torch.OutOfMemoryError as error:
        raise CheckpointError(
            f"a step of {num_tokens} tokens of {checkpoint.name} does not fit on the card beside its weights and the "
            "KV: take less for the KV (--kv-mib), or smaller steps (--token-budget)"
        ) from error
    log.info("computed a step of %d tokens in %.1f s", num_tokens, time.monotonic() - started)
