"""Makes what a worker runs on: checkpoint, arena, engine. The only place of the worker that imports torch, and the only
one anywhere that asks for an engine on a card."""

import logging
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from dataplane.blocks.cache import max_sequence_tokens
from dataplane.blocks.layout import ArenaShape
from dataplane.carriers.carrier import KVArena
from dataplane.carriers.host import HostArena
from dataplane.machine import available_bytes, usable_cores
from dataplane.memory.arena import ArenaTooLargeError
from schemas.ids import WorkerId
from schemas.worker import WorkerInfo, WorkerRole
from services.config import EngineConfig, MeshConfig, WorkerConfig, is_card
from services.engine.batch import Batch
from services.engine.batch_steps import BatchSteps
from services.engine.checkpoint import Checkpoint, default_shape, layout_for, read_checkpoint
from services.engine.demo_model import DEMO_MODEL_DIR
from services.engine.devices import CPU, card_of
from services.engine.grammar import Grammars
from services.engine.interface import PlacedEngine, StartGrammar, Steps
from services.engine.memory import check_memory
from services.engine.tokenizer import read_tokenizer
from services.errors import UserError
from services.trust.credentials import holder_credentials
from services.worker.core.checks import WorkerLimits
from services.worker.holder_shell import HolderParts

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class WorkerParts(HolderParts):
    """A worker's memory and engine, and what it says of itself."""

    role: WorkerRole
    steps: Steps
    limits: WorkerLimits
    start_grammar: StartGrammar
    device: str = CPU
    """What the engine runs on, as is said of it: "cpu", or its number and name."""
    library_metrics: str = ""
    """How the names of the metrics begin that the engine counts itself; "": it counts none."""

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


def load_parts(config: MeshConfig, role: WorkerRole, worker_id: WorkerId) -> WorkerParts:
    """Load the model and map the arena. Raises UserError: no such checkpoint, no room for its KV, no such device."""
    credentials = holder_credentials(config)
    settings = config.worker
    checkpoint = read_checkpoint(config.model.path or str(DEMO_MODEL_DIR), config.engine.name)
    layout = layout_for(config, checkpoint)
    if settings.kv_bytes < layout.block_bytes:
        raise UserError(f"{settings.kv_bytes} bytes hold no block of {layout.block_bytes} bytes: raise --kv-mib")
    context_length, token_budget = checkpoint.context_length, settings.token_budget
    shape = default_shape(layout, settings.kv_bytes, context_length=context_length, token_budget=token_budget)
    max_tokens = max_sequence_tokens(shape, token_budget) or context_length
    placed = _place(config, checkpoint, shape)
    tokenizer = read_tokenizer(Path(checkpoint.path))
    ends = tokenizer.ends(checkpoint)
    log.info("%s of %s runs on %s in %s", role, checkpoint.name, placed.device, layout.dtype)
    limits = WorkerLimits(
        worker_id=worker_id,
        fingerprint=layout.fingerprint,
        num_blocks=max_tokens // settings.block_size,
        block_size=settings.block_size,
        context_length=checkpoint.context_length,
        vocab_size=checkpoint.vocab_size,
        eos_token_ids=ends,
        max_queued=settings.max_queued,
        lease_ms=settings.lease_ms,
        times=config.times,
    )
    return WorkerParts(
        worker_id=worker_id,
        incarnation=secrets.token_hex(8),
        role=role,
        model=config.model.name or checkpoint.name,
        arena=placed.arena,
        shape=shape,
        steps=placed.steps,
        limits=limits,
        credentials=credentials,
        start_grammar=Grammars(tokenizer.tokenizer, checkpoint.vocab_size, ends).compile,
        device=placed.device,
        library_metrics=placed.library_metrics,
    )


def threads_of(settings: WorkerConfig) -> int:
    return settings.num_threads or usable_cores()


class _Placed(NamedTuple):
    """An arena, what computes in it, and where: "cpu", a card's number and name, or vLLM's version."""

    arena: KVArena
    steps: Steps
    device: str
    library_metrics: str = ""


def _place(config: MeshConfig, checkpoint: Checkpoint, shape: ArenaShape) -> _Placed:
    """Return an arena and an engine on the device that is asked for. Raises UserError."""
    settings, is_vllm = config.worker, config.engine.name == "vllm"
    card = None if is_vllm else card_of(settings.device)
    if card is None:
        check_memory(config, checkpoint, available_bytes(), num_workers=1)
    if is_vllm:
        return _on_vllm(checkpoint, shape, settings, config.engine)
    if card is None:
        placed = _on_cpu(checkpoint, shape, settings)
    else:
        from services.engine.torch_engine.on_card import place_on_card  # noqa: PLC0415  (needs what other machines have not)

        placed = place_on_card(card, checkpoint, shape, settings)
    batch = Batch(settings.token_budget, context_length=checkpoint.context_length)
    return _Placed(placed.arena, BatchSteps(placed.engine, batch), placed.device)


def _on_cpu(checkpoint: Checkpoint, shape: ArenaShape, settings: WorkerConfig) -> PlacedEngine:
    from services.engine.torch_engine.model import load_engine  # noqa: PLC0415  (seconds of imports)

    arena = _host_arena(shape)
    try:
        engine = load_engine(checkpoint, arena_buffer=arena.buffer, shape=shape, num_threads=threads_of(settings))
    except BaseException:
        arena.close()
        raise
    return PlacedEngine(arena, engine, CPU)


def _on_vllm(checkpoint: Checkpoint, shape: ArenaShape, settings: WorkerConfig, engine: EngineConfig) -> _Placed:
    from services.engine.vllm_engine.loading import load_vllm  # noqa: PLC0415  (seconds of imports)

    if is_card(settings.device):
        raise UserError("vLLM runs on the CPU here, not yet on cards: take --device cpu")
    arena = _host_arena(shape)
    try:
        loaded = load_vllm(
            checkpoint,
            arena.buffer,
            shape,
            token_budget=settings.token_budget,
            num_threads=threads_of(settings),
            kv_format=engine.kv_format,
            kv_bytes=engine.kv_bytes,
            args=engine.args,
        )
    except BaseException:
        arena.close()
        raise
    return _Placed(arena, loaded.steps, loaded.device, "vllm:")


def _host_arena(shape: ArenaShape) -> HostArena:
    try:
        return HostArena.create(shape)
    except ArenaTooLargeError as error:
        raise UserError(str(error)) from error
