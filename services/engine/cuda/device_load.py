"""Puts an engine on a card together and proves it: nothing is served that does not compute the library's logits."""

import contextlib
import logging
import time
from itertools import cycle, islice
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from dataplane.blocks.layout import BlockTable, Segment, num_blocks_for
from schemas.ids import RequestId
from schemas.request import SamplingParams
from services.engine.checkpoint import Checkpoint
from services.engine.cpu.attention import KVTensors
from services.engine.cpu.model import CHECK_TOLERANCE, check_logits, check_shape
from services.engine.cuda.backends import ChunkBackend
from services.engine.cuda.device_engine import DeviceEngine
from services.engine.cuda.protocol import MarkSource, Recorder, Runtime
from services.engine.cuda.step_plan import StepLimits
from services.engine.interface import Sequence, StepItem
from services.engine.sampler import LogitsNotFiniteError
from services.errors import CheckpointError

log = logging.getLogger(__name__)

SMALL = StepLimits(num_tokens=512, num_sequences=1, sequence_tokens=512)
"""Of the self-check."""
DRAWS = (
    SamplingParams(max_tokens=1, temperature=100.0, top_p=0.9999),  # so flat that the first candidates do not settle it
    SamplingParams(max_tokens=1, temperature=1.0, top_k=40),
)


class Card(NamedTuple):
    """What an engine has of its card. `recorder` None: no graphs. `backend` None: our kernel computes chunks."""

    runtime: Runtime
    marks: MarkSource
    recorder: Recorder | None
    backend: ChunkBackend | None


def make_device_engine(
    model: PreTrainedModel, checkpoint: Checkpoint, arena: KVTensors, card: Card, limits: StepLimits
) -> DeviceEngine:
    """Return an engine over `arena`, proven, its kernels compiled, its memory taken and its graphs recorded.

    The blocks of the arena are written to. Raises CheckpointError as `model.check_logits`, and when a step as large as
    the limits does not fit on the card.
    """
    card = card._replace(backend=_proven_backend(model, checkpoint, arena, card))
    engine = _engine(model, checkpoint, arena, card, limits)
    compute_largest(engine, checkpoint.name, arena, limits)
    _record_graphs(engine, arena, CHECK_TOLERANCE[arena.layout.dtype])
    return engine


def _engine(
    model: PreTrainedModel, checkpoint: Checkpoint, arena: KVTensors, card: Card, limits: StepLimits
) -> DeviceEngine:
    return DeviceEngine(
        model,
        arena,
        vocab_size=checkpoint.vocab_size,
        runtime=card.runtime,
        marks=card.marks,
        recorder=card.recorder,
        backend=card.backend,
        limits=limits,
    )


def _proven_backend(
    model: PreTrainedModel, checkpoint: Checkpoint, arena: KVTensors, card: Card
) -> ChunkBackend | None:
    """Check the engine with and, should it fail, without the backend; return the one that is right."""
    shape = check_shape(arena.layout)
    small = KVTensors(shape, torch.zeros(shape.num_bytes, dtype=torch.uint8, device=card.runtime.device))
    plain = card._replace(recorder=None, backend=None)
    if card.backend is not None:
        try:
            tried = _engine(model, checkpoint, small, plain._replace(backend=card.backend), SMALL)
            check_logits(tried, model, checkpoint)
        except Exception as error:  # noqa: BLE001 - another library's, and our kernel does without it
            log.warning("%s is not used: %s", type(card.backend).__name__, error)
            card = plain
    check_logits(_engine(model, checkpoint, small, plain, SMALL), model, checkpoint)
    return card.backend


def compute_largest(engine: DeviceEngine, name: str, arena: KVTensors, limits: StepLimits) -> None:
    """Compute a step as large as any will be: what it needs of the card is then had, or missed, before anybody is
    served. All of it samples, in all of the sampler's ways. Raises CheckpointError when there is no room for it."""
    started = time.monotonic()
    num_singles = min(limits.num_sequences, limits.num_tokens) - 1
    num_tokens = min(
        limits.num_tokens - num_singles, limits.sequence_tokens, arena.num_blocks * arena.layout.block_size
    )
    items = [StepItem(_sequence(arena, 0, [1], draw), 0, 1, True) for draw in islice(cycle(DRAWS), num_singles)]
    items.append(StepItem(_sequence(arena, 0, [1] * num_tokens, DRAWS[0]), 0, num_tokens, True))
    try:
        with contextlib.suppress(LogitsNotFiniteError):  # of a text that nobody wrote
            engine.step(items)
    except torch.OutOfMemoryError as error:
        raise CheckpointError(
            f"a step of {limits.num_tokens} tokens of {name} does not fit on the card beside its weights and the KV: "
            "take less for the KV (--kv-mib), or smaller steps (--token-budget)"
        ) from error
    log.info("computed a step of %d tokens in %.1f s", num_singles + num_tokens, time.monotonic() - started)


def _record_graphs(engine: DeviceEngine, arena: KVTensors, tolerance: float) -> None:
    """Record the graphs and compare them with what they were recorded from; without them the engine works, slower."""
    if engine.graphs is None:
        return
    started = time.monotonic()
    log.info("recording CUDA graphs for decodes of %s sequences", ", ".join(map(str, engine.graphs.sizes)))
    if not engine.record_graphs():
        return
    for size in [size for size in engine.graphs.sizes if size <= arena.num_blocks]:
        difference = check_graph(engine, arena, size)
        if not difference <= tolerance:
            log.warning(
                "decode runs without CUDA graphs: the one for %d sequences computes other logits (off by %.1e of the "
                "spread)", size, difference,
            )  # fmt: skip
            engine.graphs.disable()
            return
    log.info("recorded %d CUDA graphs in %.1f s", len(engine.graphs.sizes), time.monotonic() - started)


def check_graph(engine: DeviceEngine, arena: KVTensors, size: int) -> float:
    """Return how far the logits of the graph for `size` sequences are off those computed without it, relative to their
    spread.

    Computes sequences of two tokens, one in each of the arena's blocks, which nobody may be using; where there can be,
    one fewer than fill the graph.
    """
    count = size - 1 if size > 2 else size
    sequences = [
        _sequence(arena, block, [1 + block % (engine.vocab_size - 1), 2], SamplingParams(max_tokens=1))
        for block in range(count)
    ]
    rows = sorted({0, count // 2, count - 1})
    first = [StepItem(sequence, 0, 1, False) for sequence in sequences]
    second = [StepItem(sequence, 1, 1, True) for sequence in sequences]
    engine.logits(first, [0])
    eager = engine.logits(second, rows)
    graph = engine.logits(second, rows, graph=True)
    spread = (eager.max() - eager.min()).clamp(min=1e-30)
    return float((graph - eager).abs().max() / spread)


def _sequence(arena: KVTensors, block: int, token_ids: list[int], sampling: SamplingParams) -> Sequence:
    """Return one that lies in the blocks from `block` on, in each cache group."""
    layout = arena.layout
    table = BlockTable((Segment(block, num_blocks_for(len(token_ids), layout.block_size)),))
    return Sequence(
        request_id=RequestId("self-check"),
        attempt=0,
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids),
        sampling=sampling,
        tables=(table,) * len(layout.groups),
    )
