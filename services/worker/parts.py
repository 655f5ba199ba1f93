"""Makes what a worker runs on: checkpoint, arena, engine; on the CPU or on a card. The only place of the worker that
imports torch."""

import logging
import secrets
from dataclasses import dataclass
from typing import NamedTuple

from dataplane.blocks.cache import max_sequence_tokens
from dataplane.blocks.layout import ArenaShape
from dataplane.cards.device import DeviceError
from dataplane.cards.device_arena import DeviceArena, KVArena
from dataplane.ends.choice import NCCL
from dataplane.memory.arena import Arena, ArenaTooLargeError
from schemas.ids import WorkerId
from schemas.worker import WorkerInfo, WorkerRole
from services.config import MeshConfig, WorkerConfig, dtype_of, require_secret
from services.engine.checkpoint import Checkpoint, default_shape, layout_of, read_checkpoint
from services.engine.demo_model import DEMO_MODEL_DIR
from services.engine.interface import Engine
from services.errors import UserError
from services.worker.core.checks import WorkerLimits
from services.worker.devices import CPU, card_of
from services.worker.platform import THREADS, Platform

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class WorkerParts:
    """A worker's memory and engine, and what it says of itself."""

    worker_id: WorkerId
    incarnation: str
    role: WorkerRole
    model: str
    arena: KVArena
    shape: ArenaShape
    engine: Engine
    limits: WorkerLimits
    secret: bytes
    device: str = CPU
    """What is said of it: `cpu`, or `cuda:0` and what the card is called."""
    platform: Platform = THREADS

    def info(self) -> WorkerInfo:
        """Return who this is, as far as that is known before it serves."""
        limits = self.limits
        return WorkerInfo(
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            role=self.role,
            model=self.model,
            fingerprint=limits.fingerprint,
            num_blocks=limits.num_blocks,
            block_size=limits.block_size,
            context_length=limits.context_length,
            device=self.device,
        )


class Placed(NamedTuple):
    """What lies on a device, and what is said of that."""

    arena: KVArena
    engine: Engine
    device: str


def load_parts(config: MeshConfig, role: WorkerRole, worker_id: WorkerId) -> WorkerParts:
    """Load the model and map the arena. Raises UserError: no such checkpoint, no room for its KV, no such card."""
    secret = require_secret(config)
    settings = config.worker
    checkpoint = read_checkpoint(config.model.path or str(DEMO_MODEL_DIR))
    layout = layout_of(
        checkpoint,
        dtype=dtype_of(config, checkpoint.dtype),
        block_size=settings.block_size,
        wire_dtype=settings.wire_dtype,
    )
    if settings.kv_bytes < layout.block_bytes:
        raise UserError(f"{settings.kv_bytes} bytes hold no block of {layout.block_bytes} bytes: raise --kv-mib")
    context_length, token_budget = checkpoint.context_length, settings.token_budget
    shape = default_shape(layout, settings.kv_bytes, context_length=context_length, token_budget=token_budget)
    max_tokens = max_sequence_tokens(shape, token_budget) or context_length
    card = card_of(settings.device)
    placed = _on_cpu(checkpoint, shape, settings) if card is None else _on_card(card, checkpoint, shape, settings)
    log.info("%s of %s runs on %s in %s", role, checkpoint.name, placed.device, layout.dtype)
    limits = WorkerLimits(
        worker_id=worker_id,
        fingerprint=layout.fingerprint,
        num_blocks=max_tokens // settings.block_size,
        block_size=settings.block_size,
        context_length=checkpoint.context_length,
        vocab_size=checkpoint.vocab_size,
        eos_token_ids=checkpoint.eos_token_ids,
        max_queued=settings.max_queued,
        lease_ms=settings.lease_ms,
    )
    return WorkerParts(
        worker_id=worker_id,
        incarnation=secrets.token_hex(8),
        role=role,
        model=config.model.name or checkpoint.name,
        arena=placed.arena,
        shape=shape,
        engine=placed.engine,
        limits=limits,
        secret=secret,
        device=placed.device,
    )


def _on_cpu(checkpoint: Checkpoint, shape: ArenaShape, settings: WorkerConfig) -> Placed:
    from services.engine.cpu.model import load_engine  # noqa: PLC0415  (seconds of imports)

    try:
        arena = Arena.create(shape)
    except ArenaTooLargeError as error:
        raise UserError(str(error)) from error
    try:
        num_threads = max(1, settings.num_threads)
        engine = load_engine(checkpoint, arena_buffer=arena.buffer, shape=shape, num_threads=num_threads)
    except BaseException:
        arena.close()
        raise
    return Placed(arena, engine, CPU)


def _on_card(card: int, checkpoint: Checkpoint, shape: ArenaShape, settings: WorkerConfig) -> Placed:
    from dataplane.cards.cuda.driver import find_device  # noqa: PLC0415
    from dataplane.cards.nccl.library import pair_parts  # noqa: PLC0415
    from services.engine.cuda.runtime import check_card, load_cuda_engine  # noqa: PLC0415

    check_card(card)  # says what is missing, and what to do
    try:
        device = find_device(card)
        parts = pair_parts(device, card)
        if settings.carrier == NCCL and (refusal := parts.refusal()) is not None:
            raise UserError(f"the carrier nccl cannot be had: {refusal}")
        arena = DeviceArena(device, shape, settings.staging_bytes)
        arena.pair_parts = parts
    except (DeviceError, ValueError, ArenaTooLargeError) as error:
        raise UserError(f"cuda:{card}: {error}") from error
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
    return Placed(arena, engine, f"cuda:{card} {device.name}")
