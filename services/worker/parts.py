"""Makes what a worker runs on: checkpoint, arena, engine, and decides between a thread and a process for that. The only
place anywhere that asks for an engine on a card."""

import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from dataplane.blocks.cache import max_sequence_tokens
from dataplane.blocks.layout import ArenaShape
from dataplane.carriers.carrier import KVArena
from dataplane.carriers.host import HostArena
from dataplane.machine import available_bytes, usable_cores
from dataplane.memory.arena import ArenaTooLargeError
from schemas.ids import WorkerId
from schemas.worker import WorkerInfo, WorkerRole
from services.config import MeshConfig, WorkerConfig, is_card
from services.engine.checkpoint import Checkpoint, default_shape, layout_for, read_checkpoint
from services.engine.client import EngineCallbacks, EngineClient
from services.engine.demo_model import DEMO_MODEL_DIR
from services.engine.devices import CPU, card_of
from services.engine.ipc import LoadEngine
from services.engine.loading import load_host_engine, planned_steps, read_answer_rules
from services.engine.memory import check_memory, has_room
from services.engine.process import EngineProcess
from services.engine.spawn import EngineChild, SpareEngines
from services.engine.starter import EngineStarter
from services.engine.thread import EngineThread
from services.errors import UserError
from services.holder.core.checks import WorkerLimits
from services.holder.parts import HolderParts
from services.trust.credentials import holder_credentials

log = logging.getLogger(__name__)


MakeEngine = Callable[[EngineCallbacks], EngineClient]


@dataclass(frozen=True, kw_only=True)
class WorkerParts(HolderParts):
    """A worker's memory and engine."""

    make_engine: MakeEngine
    limits: WorkerLimits


def info_of(limits: WorkerLimits, role: WorkerRole, model: str, incarnation: str, device: str = CPU) -> WorkerInfo:
    """Return who a worker is, as far as that is known before it serves. `device`: what its engine runs on, as is
    reported: "cpu", or its number and name."""
    return WorkerInfo(
        worker_id=limits.worker_id,
        incarnation=incarnation,
        role=role,
        model=model,
        fingerprint=limits.fingerprint,
        num_blocks=limits.num_blocks,
        block_size=limits.block_size,
        context_length=limits.context_length,
        device=device,
    )


def load_parts(config: MeshConfig, role: WorkerRole, worker_id: WorkerId, starter: int | None = None) -> WorkerParts:
    """Load the model and map the arena. `starter`: descriptor of the process that forks engines, if there is one.
    Raises UserError: no such checkpoint, no room for its KV, no such device."""
    credentials = holder_credentials(config)
    settings = config.worker
    # Read the model's shape, and check that the memory holds a block of its KV at least.
    checkpoint = read_checkpoint(config.model.path or str(DEMO_MODEL_DIR), config.engine.name)
    layout = layout_for(config, checkpoint)
    if settings.kv_bytes < layout.block_bytes:
        raise UserError(f"{settings.kv_bytes} bytes hold no block of {layout.block_bytes} bytes: raise --kv-mib")
    # Size the arena, and find the longest sequence that it can hold; 0: only the model's context bounds it.
    context_length, token_budget = checkpoint.context_length, settings.token_budget
    shape = default_shape(layout, settings.kv_bytes, context_length=context_length, token_budget=token_budget)
    max_tokens = max_sequence_tokens(shape, token_budget) or context_length
    # Load the engine before the limits are set: the tokens that end an answer come from it.
    placed = _place(config, checkpoint, shape, worker_id, starter)
    log.info("%s of %s runs on %s in %s", role, checkpoint.name, placed.device, layout.dtype)
    limits = WorkerLimits(
        worker_id=worker_id,
        fingerprint=layout.fingerprint,
        num_blocks=max_tokens // layout.block_size,
        block_size=layout.block_size,
        context_length=checkpoint.context_length,
        vocab_size=checkpoint.vocab_size,
        eos_token_ids=placed.eos_token_ids,
        max_queued=settings.max_queued,
        lease_ms=settings.lease_ms,
        times=config.times,
    )
    return WorkerParts(
        info=info_of(limits, role, config.model.name or checkpoint.name, secrets.token_hex(8), placed.device),
        arena=placed.arena,
        shape=shape,
        make_engine=placed.make_engine,
        limits=limits,
        credentials=credentials,
    )


class _Placed(NamedTuple):
    """An arena, what makes the engine that computes in it, where that is ("cpu", a card's number and name, or vLLM's
    version), and the tokens that end an answer."""

    arena: KVArena
    make_engine: MakeEngine
    device: str
    eos_token_ids: frozenset[int]


def _place(
    config: MeshConfig, checkpoint: Checkpoint, shape: ArenaShape, worker_id: WorkerId, starter: int | None
) -> _Placed:
    """Return an arena and an engine on the device that is asked for. Raises UserError."""
    # Decide between CPU and card, and refuse what the engine cannot do there before anything is allocated.
    settings, engine = config.worker, config.engine
    if engine.name == "vllm" and is_card(settings.device):
        raise UserError("vLLM runs on the CPU here, not yet on cards: take --device cpu")
    card = None if engine.name == "vllm" else card_of(settings.device)
    if card is not None:
        if engine.spares:
            raise UserError("an engine on a card has no spare: take --spare-engines 0, or --device cpu")
        return _on_card(card, checkpoint, shape, settings)
    # On the CPU: check the memory first, so that a lack of it is an error message and not a kill by the kernel.
    check_memory(config, checkpoint, available_bytes(), num_workers=1)
    try:
        arena = HostArena.create(shape)
    except ArenaTooLargeError as error:
        raise UserError(str(error)) from error
    # The arena is mapped from here on: any error must give it back. An engine's own process opens it by name and nonce.
    try:
        if engine.process:
            order = LoadEngine(checkpoint, shape, arena.name, arena.nonce, settings, engine)
            return _in_process(order, arena, config, worker_id, starter)
        steps, rules, device = load_host_engine(checkpoint, shape, arena.buffer, settings, engine)
    except BaseException:
        arena.close()
        raise
    return _Placed(arena, partial(EngineThread, steps, rules.start_grammar), device, rules.eos_token_ids)


def _in_process(
    order: LoadEngine, arena: HostArena, config: MeshConfig, worker_id: WorkerId, inherited: int | None
) -> _Placed:
    num_threads = config.worker.num_threads or usable_cores()
    starter = EngineStarter(config.engine.name, num_threads, inherited=inherited)
    try:
        start_child = partial(EngineChild, order, worker_id, starter.fork_engine)
        child = start_child()
        ready = child.wait_ready()
    except BaseException:
        starter.close()
        raise
    room = partial(has_room, config, order.checkpoint)
    spares = SpareEngines(start_child, config.engine.spares, room, starter.close)
    make_engine = partial(EngineProcess, child, spares, config.engine.step_timeout_s)
    return _Placed(arena, make_engine, ready.device, frozenset(ready.eos_token_ids))


def _on_card(card: int, checkpoint: Checkpoint, shape: ArenaShape, settings: WorkerConfig) -> _Placed:
    """A card's engine stays in the worker: its memory, streams and handles belong to the process that has made them,
    and the plane uses all three."""
    from services.engine.torch_engine.on_card import place_on_card  # noqa: PLC0415  (needs what other machines have not)

    rules = read_answer_rules(checkpoint)
    placed = place_on_card(card, checkpoint, shape, settings)
    steps = planned_steps(placed.engine, checkpoint, settings)
    return _Placed(placed.arena, partial(EngineThread, steps, rules.start_grammar), placed.device, rules.eos_token_ids)
