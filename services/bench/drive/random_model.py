"""A model with random weights, so that its size and context length can be chosen."""

from pathlib import Path
from typing import Any

SHAPE: dict[str, Any] = {
    "hidden": 256,
    "num_layers": 6,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 64,
    "intermediate": 768,
    "vocab": 1024,
    "context_length": 16_384,
}
"""About 5 million parameters: 10,000 tokens take seconds on one core."""
LARGE_KV_SHAPE = SHAPE | {
    "hidden": 64,
    "num_layers": 32,
    "heads": 8,
    "kv_heads": 8,
    "head_dim": 64,
    "intermediate": 64,
    "context_length": 4_000,
}
"""KV of 128 KiB a token, as Llama-3.1-8B's: as many layers and KV heads, of half the size, as float32 is twice as wide.
A context fits an arena of 512 MiB."""
FIRST_TOKEN = 256
"""Token ids below are special tokens and single bytes; prompts consist of others."""


def make_model(folder: Path, shape: dict[str, Any] = SHAPE) -> tuple[Path, int]:
    """Write the checkpoint; return its folder and how many parameters it has. Slow: imports torch."""
    from services.bench.drive.make_checkpoint import make_random_checkpoint  # noqa: PLC0415

    path = make_random_checkpoint(folder / "random", **shape)
    return path, sum(file.stat().st_size for file in path.glob("*.safetensors")) // 4
