"""The one way to an engine on a card: its arena and itself, or one line that says what is missing. Imported only where
a card was asked for: it takes seconds, and asks for libraries that other machines have not."""

from dataplane.blocks.layout import ArenaShape
from dataplane.cards.factory import CardRefusedError, make_card_arena
from services.config import WorkerConfig
from services.engine.checkpoint import Checkpoint
from services.engine.cuda.cuda_runtime import check_card, load_cuda_engine
from services.engine.interface import PlacedEngine
from services.errors import UserError


def place_on_card(card: int, checkpoint: Checkpoint, shape: ArenaShape, settings: WorkerConfig) -> PlacedEngine:
    """Return an arena of this shape on the card of this number, and the engine that computes in it.

    Raises UserError: no such card, no room on it, nothing to make communicators with where `nccl` is asked for.
    """
    check_card(card)  # says what is missing, and what to do
    try:
        arena = make_card_arena(card, shape, staging_bytes=settings.staging_bytes, carrier=settings.carrier)
    except CardRefusedError as error:
        raise UserError(str(error)) from error
    try:
        engine = load_cuda_engine(
            checkpoint,
            arena=arena.exported,
            shape=shape,
            marks=arena,
            card=card,
            token_budget=settings.token_budget,
        )
    except BaseException:
        arena.close()
        raise
    return PlacedEngine(arena, engine, f"cuda:{card} {arena.device.name}")
