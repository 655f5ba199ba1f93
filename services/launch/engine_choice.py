"""The engine that the command line asks for, as `mesh.toml` says it: what vLLM's KV is on this machine, and whether
there is memory for it."""

from pathlib import Path
from typing import Any

import msgspec

from services.config import EngineConfig, EngineName, MeshConfig, dtype_of
from services.engine.checkpoint import Checkpoint, default_shape, layout_for, read_checkpoint
from services.engine.demo_model import DEMO_MODEL_DIR
from services.engine.vllm_engine.formats import BLOCK_SIZE, PROCESS_BYTES, check_args, format_here, pool_bytes
from services.errors import UserError

GIB = 1 << 30


def with_engine(
    config: MeshConfig,
    checkpoint: Checkpoint,
    *,
    name: EngineName,
    block_size: int,
    kv_bytes: int,
    args: dict[str, Any],
    num_workers: int,
) -> MeshConfig:
    """Return the configuration with an engine. `block_size`: 0 is the engine's own. `kv_bytes`: of the engine's own
    pool; 0 is as large as the arena.

    Raises UserError where vLLM is not installed, its blocks cannot have this size, an argument is not the user's to
    set, or memory does not do.
    """
    if name == "transformers":
        if kv_bytes or args:
            raise UserError("--engine-args and --engine-kv-mib are for --engine vllm: leave them out, or add it")
        worker = msgspec.structs.replace(config.worker, block_size=block_size or config.worker.block_size)
        return msgspec.structs.replace(config, worker=worker)
    block_size = block_size or BLOCK_SIZE
    if block_size % BLOCK_SIZE:
        raise UserError(f"vLLM's blocks on the CPU have a multiple of {BLOCK_SIZE} tokens: --block-size {block_size}")
    check_args(args)
    kv_format = format_here(dtype_of(config, checkpoint.dtype), block_size, checkpoint.head_dim, args)
    try:
        config = msgspec.structs.replace(
            config,
            worker=msgspec.structs.replace(config.worker, block_size=block_size),
            engine=EngineConfig(name="vllm", kv_format=kv_format, kv_bytes=kv_bytes, args=args),
        )
    except ValueError as error:
        raise UserError(f"vLLM cannot be served like this: {error}") from error
    check_memory(config, checkpoint, num_workers, available_bytes())
    return config


def in_place_of_the_files(config: MeshConfig, name: EngineName, num_workers: int) -> MeshConfig:
    """Return the configuration with an engine in place of the file's, and the file's block size where the engine takes
    it. `num_workers`: those that are to start. Raises UserError as `with_engine`, and CheckpointError."""
    if name == config.engine.name:
        return config
    size = config.worker.block_size
    return with_engine(
        msgspec.structs.replace(config, engine=EngineConfig()),
        read_checkpoint(config.model.path or str(DEMO_MODEL_DIR), name),
        name=name,
        block_size=BLOCK_SIZE if name == "vllm" and size % BLOCK_SIZE else size,
        kv_bytes=0,
        args={},
        num_workers=num_workers,
    )


def check_memory(config: MeshConfig, checkpoint: Checkpoint, num_workers: int, available: int | None) -> None:
    """Raise UserError where workers on vLLM would not fit into `available` bytes; None: nobody knows."""
    layout = layout_for(config, checkpoint)
    arena = config.worker.kv_bytes
    budget = config.worker.token_budget
    shape = default_shape(layout, arena, context_length=checkpoint.context_length, token_budget=budget)
    pool = config.engine.kv_bytes or pool_bytes(shape, budget)
    needed = num_workers * (arena + pool + checkpoint.num_bytes + PROCESS_BYTES)
    if available is not None and needed > available:
        raise UserError(
            f"{num_workers} workers on vLLM need about {needed / GIB:.1f} GiB (each has {arena / GIB:.1f} of arena, "
            f"{pool / GIB:.1f} of vLLM's own KV, {checkpoint.num_bytes / GIB:.1f} of weights) and "
            f"{available / GIB:.1f} are free: lower --kv-mib or the number of workers"
        )


def available_bytes() -> int | None:
    """Return how much memory can be had, as Linux tells; None elsewhere."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)
