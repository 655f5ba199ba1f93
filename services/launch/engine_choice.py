"""The engine that the command line asks for, as `mesh.toml` says it: what vLLM's KV is on this machine."""

from typing import Any

from services.config import BLOCK_SIZES, EngineName, MeshConfig, dtype_of
from services.engine.checkpoint import Checkpoint, read_checkpoint
from services.engine.demo_model import DEMO_MODEL_DIR
from services.engine.vllm_engine.formats import BLOCK_SIZE, check_args, format_here
from services.errors import UserError
from services.settings import changed


def with_engine(config: MeshConfig, checkpoint: Checkpoint) -> MeshConfig:
    """Return the configuration as services read it: with the size of a block, and what the bytes of its engine's KV
    mean on this machine.

    Raises UserError where vLLM is not installed, its blocks cannot have this size, or an argument is not the user's to
    set.
    """
    config, engine = changed(config, {"worker.block_size": config.block_size}), config.engine
    if engine.name == "transformers":
        return config
    if config.block_size % BLOCK_SIZE:
        sizes = f"a multiple of {BLOCK_SIZE} tokens"
        raise UserError(f"vLLM's blocks on the CPU have {sizes}: --block-size {config.block_size}")
    check_args(engine.args)
    kv_format = format_here(dtype_of(config, checkpoint.dtype), config.block_size, checkpoint.head_dim, engine.args)
    return changed(config, {"engine.kv_format": kv_format})


def in_place_of_the_files(config: MeshConfig, name: EngineName) -> MeshConfig:
    """Return the configuration with an engine in place of the file's, and the file's block size where the engine takes
    it. Raises UserError as `with_engine`, and CheckpointError."""
    if name == config.engine.name:
        return config
    size = config.block_size
    other: dict[str, Any] = {
        "engine.name": name,
        "engine.kv_format": "",
        "engine.kv_bytes": 0,
        "engine.args": {},
        "worker.block_size": BLOCK_SIZES[name] if name == "vllm" and size % BLOCK_SIZE else size,
    }
    try:
        config = changed(config, other)
    except ValueError as error:
        raise UserError(f"vLLM cannot be served like this: {error}") from error
    return with_engine(config, read_checkpoint(config.model.path or str(DEMO_MODEL_DIR), name))
