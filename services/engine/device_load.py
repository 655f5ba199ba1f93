"""Puts an engine on a card together and proves it: nothing is served that does not compute the library's logits."""

import logging
import time
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from services.engine.attention import KVArena
from services.engine.backends import ChunkBackend
from services.engine.base import Marks
from services.engine.checkpoint import Checkpoint
from services.engine.device import Recorder, Runtime
from services.engine.device_engine import DeviceEngine, check_graph
from services.engine.model import CHECK_TOLERANCE, check_logits, check_shape

log = logging.getLogger(__name__)


class Card(NamedTuple):
    """What an engine has of its card. `recorder` None: no graphs. `backend` None: our kernel computes chunks."""

    runtime: Runtime
    marks: Marks
    recorder: Recorder | None
    backend: ChunkBackend | None


def make_device_engine(
    model: PreTrainedModel, checkpoint: Checkpoint, arena: KVArena, card: Card, *, max_sequences: int
) -> DeviceEngine:
    """Return an engine over `arena`, proven, its kernels compiled and its graphs recorded.

    The first blocks of the arena are written to. Raises CheckpointError as `model.check_logits`.
    """
    card = card._replace(backend=_proven_backend(model, checkpoint, arena, card))
    engine = _engine(model, checkpoint, arena, card, max_sequences=max_sequences)
    _record_graphs(engine, CHECK_TOLERANCE[arena.layout.dtype])
    return engine


def _engine(
    model: PreTrainedModel, checkpoint: Checkpoint, arena: KVArena, card: Card, *, max_sequences: int = 1
) -> DeviceEngine:
    return DeviceEngine(
        model,
        arena,
        vocab_size=checkpoint.vocab_size,
        runtime=card.runtime,
        marks=card.marks,
        recorder=card.recorder,
        backend=card.backend,
        max_sequences=max_sequences,
    )


def _proven_backend(model: PreTrainedModel, checkpoint: Checkpoint, arena: KVArena, card: Card) -> ChunkBackend | None:
    """Check the engine with and, should it fail, without the backend; return the one that is right."""
    shape = check_shape(arena.layout)
    small = KVArena(shape, torch.zeros(shape.num_bytes, dtype=torch.uint8, device=card.runtime.device))
    plain = card._replace(recorder=None, backend=None)
    if card.backend is not None:
        try:
            check_logits(_engine(model, checkpoint, small, plain._replace(backend=card.backend)), model, checkpoint)
        except Exception as error:  # noqa: BLE001 - another library's, and our kernel does without it
            log.warning("%s is not used: %s", type(card.backend).__name__, error)
            card = plain
    check_logits(_engine(model, checkpoint, small, plain), model, checkpoint)
    return card.backend


def _record_graphs(engine: DeviceEngine, tolerance: float) -> None:
    """Record the graphs and compare one with what it was recorded from; without them the engine works, slower."""
    if engine.graphs is None:
        return
    started = time.monotonic()
    log.info("recording CUDA graphs for decodes of %s sequences", ", ".join(map(str, engine.graphs.sizes)))
    if not engine.record_graphs():
        return
    difference = check_graph(engine)
    if not difference <= tolerance:
        log.warning("decode runs without CUDA graphs: theirs are other logits (off by %.1e of the spread)", difference)
        engine.graphs.disable()
        return
    log.info("recorded %d CUDA graphs in %.1f s", len(engine.graphs.sizes), time.monotonic() - started)
