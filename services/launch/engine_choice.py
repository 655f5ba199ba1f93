"""The engine that the command line asks for, as `mesh.toml` says it: what vLLM's KV is on this machine."""

from typing import Any

import msgspec

from services.config import EngineName, MeshConfig, dtype_of
from services.engine.checkpoint import Checkpoint, read_checkpoint
from services.engine.demo_model import DEMO_MODEL_DIR
from services.engine.vllm_engine.formats import BLOCK_SIZE, check_args, format_here
from services.errors import UserError


def with_engine(
    config: MeshConfig,
    checkpoint: Checkpoint,
    *,
    name: EngineName,
    block_size: int,
    kv_bytes: int,
    args: dict[str, Any],
) -> MeshConfig:
    """Return the configuration with an engine. `block_size`: 0 is the engine's own. `kv_bytes`: of the engine's own
    pool; 0 is as large as the arena.

    Raises UserError where vLLM is not installed, its blocks cannot have this size, or an argument is not the user's to
    set.
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
        return msgspec.structs.replace(
            config,
            worker=msgspec.structs.replace(config.worker, block_size=block_size),
            engine=msgspec.structs.replace(
                config.engine, name="vllm", kv_format=kv_format, kv_bytes=kv_bytes, args=args
            ),
        )
    except ValueError as error:
        raise UserError(f"vLLM cannot be served like this: {error}") from error


def in_place_of_the_files(config: MeshConfig, name: EngineName) -> MeshConfig:
    """Return the configuration with an engine in place of the file's, and the file's block size where the engine takes
    it. Raises UserError as `with_engine`, and CheckpointError."""
    if name == config.engine.name:
        return config
    size = config.worker.block_size
    plain = msgspec.structs.replace(config.engine, name="transformers", kv_format="", kv_bytes=0, args={})
    return with_engine(
        msgspec.structs.replace(config, engine=plain),
        read_checkpoint(config.model.path or str(DEMO_MODEL_DIR), name),
        name=name,
        block_size=BLOCK_SIZE if name == "vllm" and size % BLOCK_SIZE else size,
        kv_bytes=0,
        args={},
    )
